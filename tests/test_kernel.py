"""The kernel held to the oracle: recorded batches, random ones, and sizes at which a launcher or a compiler trips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from swa_decode_meta.fuzz.harness import expect, judge
from swa_decode_meta.fuzz.runner import Runner
from swa_decode_meta.fuzz.strategies import PROFILES, ROWS, cases
from swa_decode_meta.fuzz.target import parse_target
from swa_decode_meta.spec import BufferLayout, Case
from tests.batches import GOLDEN, KEPT, WIDE, golden_batch, golden_result, served

pytestmark = pytest.mark.kernel

EXAMPLES = {"interpreter": 30, "gpu": 400}  # random batches of each profile


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(parse_target("kernel"), hang_seconds=120) as runner:
        yield runner


@pytest.mark.parametrize("index", GOLDEN)
def test_a_golden_batch_of_vllm(index: int, runner: Runner) -> None:
    batch = golden_batch(index)
    assert expect(batch).difference(golden_result(index)) is None
    assert judge(Case(batch), runner) is None


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_a_kept_case(case: Case, runner: Runner) -> None:
    assert case.expected is not None
    assert expect(case.batch).difference(case.expected) is None
    assert judge(case, runner) is None
    for guard in ("start", "end"):
        assert judge(Case(case.batch, BufferLayout(guard=guard)), runner) is None


def test_rows_wider_than_a_tile(runner: Runner) -> None:
    assert judge(WIDE, runner) is None


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
@pytest.mark.parametrize("rows", [*ROWS, 128, 257, 1025, 2050])
def test_any_number_of_rows_in_service(rows: int, noncausal: bool, runner: Runner) -> None:
    """1, 16 and their neighbours are where Triton specialises; past 1024 rows a program counts in several steps."""
    for query_len in (1, 6) if rows < 256 else (6,):
        assert judge(Case(served(rows, query_len, noncausal=noncausal)), runner) is None


@pytest.mark.parametrize("misalignment", [0, 1, 2, 3])
@pytest.mark.parametrize("gap", [0, 1, 16])
def test_alignments_and_strides_change_nothing(misalignment: int, gap: int, runner: Runner) -> None:
    layout = BufferLayout(
        indices_row_gap=gap, block_table_row_gap=gap, misalignment=misalignment, spare_rows=1, lens_tail=1025
    )
    for rows in (1, 2, 16, 17):
        assert judge(Case(served(rows), layout), runner) is None


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
@pytest.mark.parametrize("columns", [0, 3])
def test_a_table_without_rows_is_not_read(columns: int, noncausal: bool, runner: Runner) -> None:
    """Rows of padding see nothing, but the first block of nothing is block 0."""
    table = np.zeros((0, columns), np.int32)
    nothing: dict[str, Any] = {"query_start_loc": [0], "seq_lens": [], "replay_start": [], "block_table": table}
    for slots in (np.zeros(20, np.int64), np.full(20, -1)):
        batch = served(20, slot_mapping=slots, width=192, block_size=5, noncausal=noncausal, **nothing)
        for guard in ("start", "end"):
            assert judge(Case(batch, BufferLayout(guard=guard)), runner) is None


@pytest.mark.parametrize("profile", PROFILES)
def test_random_batches(profile: str, runner: Runner, backend: str) -> None:
    @settings(max_examples=EXAMPLES[backend])
    @given(cases(profile, backend))
    def hold(case: Case) -> None:
        assert judge(case, runner) is None

    hold()
