"""The kernel's machine code for AMD's GPUs, run by emulation and held to the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from swa_decode_meta.fuzz.harness import judge
from swa_decode_meta.fuzz.runner import Runner
from swa_decode_meta.fuzz.strategies import PROFILES, cases
from swa_decode_meta.fuzz.target import EMULATED, parse_target
from swa_decode_meta.spec import BufferLayout, Case
from tests.batches import CASE, GOLDEN, KEPT, REPORTED, golden_batch, served
from tests.commands import run
from tests.test_groups import STEP

pytestmark = pytest.mark.kernel

WARPS = (1, 2, 4, 8)


def shape(num_warps: int, rows_per_program: int = 1, count_rows: int = 32, look_back: bool = False) -> dict[str, int]:
    """A cut of the work into programs."""
    chunks = {"page_chunk": 4, "width_chunk": 64, "tail_chunk": 64}
    given = {"rows_per_program": rows_per_program, "count_rows": count_rows, "num_warps": num_warps}
    return {**chunks, **given, "look_back": look_back}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(parse_target("kernel@gfx942"), hang_seconds=120) as runner:
        yield runner


@pytest.mark.parametrize("index", GOLDEN)
def test_a_golden_batch_of_vllm(index: int, runner: Runner, request: pytest.FixtureRequest) -> None:
    if index % 3 and not request.config.getoption("--all-faults"):
        pytest.skip("one in three in every run, all with --all-faults")
    assert judge(Case(golden_batch(index)), runner) is None


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_a_kept_case(case: Case, runner: Runner) -> None:
    assert judge(case, runner) is None


@pytest.mark.parametrize("rows", range(1, 34))
def test_few_rows(rows: int, runner: Runner) -> None:
    """Both forms, pages of 64, 128 and odd ones, and all warps that a program may have, in turn."""
    form, page, warps = rows % 2 == 1, (64, 128, 48)[rows % 3], WARPS[rows % 4]
    batch = served(rows, block_size=page, noncausal=form)
    verdict = judge(Case(batch, target={"backend": "gfx942", "shape": shape(warps)}), runner)
    assert verdict is None


@pytest.mark.parametrize("rows", [9, 40])
def test_look_back(rows: int, runner: Runner) -> None:
    """Programs that wait for others, in the order that the case's seed makes, and count for themselves at last."""
    target = {"backend": "gfx942", "shape": shape(2, rows_per_program=4, count_rows=2, look_back=True)}
    assert judge(Case(served(rows, query_len=3), target=target), runner) is None


def test_more_rows_than_are_counted_at_once(runner: Runner) -> None:
    assert judge(Case(served(66)), runner) is None


@pytest.mark.parametrize("name", ["step", "forms", "unfused"])
def test_other_targets(name: str) -> None:
    with Runner(parse_target(f"{name}@gfx942"), hang_seconds=120) as runner:
        for case in (STEP, CASE):
            assert judge(case, runner) is None


@pytest.mark.parametrize("arch", [arch for arch in EMULATED if arch != "gfx942"])
def test_other_gpus(arch: str) -> None:
    with Runner(parse_target(f"kernel@{arch}"), hang_seconds=120) as runner:
        assert arch in runner.versions["device"]
        for case in (CASE, *REPORTED[:3]):
            assert judge(case, runner) is None


@pytest.mark.parametrize("profile", PROFILES)
def test_random_batches(profile: str, runner: Runner) -> None:
    @settings(max_examples=2)
    @given(cases(profile, "gfx942"))
    def hold(case: Case) -> None:
        assert judge(case, runner) is None

    hold()


def test_what_a_kernel_must_not_touch_is_a_finding() -> None:
    """The planted fault reads past an input; the message names the instruction, its source and the region."""
    with Runner(parse_target("tests.planted:request_bound_off_by_one@gfx942"), hang_seconds=120) as runner:
        batch = served(2, token_to_req=[0, 2])
        verdict = judge(Case(batch, BufferLayout()), runner)
    assert verdict is not None
    assert verdict.verdict == "EXCEPTION"
    for word in ("AccessFault: lane", "wave", "reads 4 bytes at 0x", "past the end of", "load", "decode_meta.py:"):
        assert word in verdict.detail


def test_an_emulated_gpu_cannot_be_one_under_the_interpreter() -> None:
    """TRITON_INTERPRET is the child's to set: the command works whatever it is."""
    ended = run("replay", "--target", "kernel@gfx942", "tests/data/reported.json", TRITON_INTERPRET="1")
    assert ended.code == 0, ended.err
    assert "device gfx942, emulated" in ended.out + ended.err
