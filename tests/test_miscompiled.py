"""Faults planted in the kernel's machine code: each shows in a few fixed cases, and the fuzzer finds and shrinks it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swa_decode_meta.fuzz.harness import judge
from swa_decode_meta.spec import BufferLayout, Case, load_case
from tests.batches import CASE, served
from tests.commands import execute, run
from tests.miscompiled import FAULTS, KERNEL, UNSEEN, Edit, build, code

HANGS = ("lanes_stay_off_after_the_scan",)  # in many variants a wave without lanes never leaves its loop
WITHIN = 60  # cases that suffice to find any of them

ASSEMBLY = f"""\t.text
{KERNEL}:                     ; @{KERNEL}
\t.loc\t1 5 3                           ; a.py:5:3
\ts_load_dwordx2 s[2:3], s[0:1], 0x68
.Ltmp0:
\tv_min_i32_e32 v1, v2, v3
.LBB0_1:                                ; %Flow
\tv_min_i32_e32  v4, v5, v6 ; a comment
\ts_endpgm
.Lfunc_end0:
\tv_min_i32_e32 v7, v8, v9
"""


def _cases() -> Iterator[Case]:
    """Few variants: both forms, two waves that share a row, rows of two chunks, with holes, padding and a tail."""
    shape = {"rows_per_program": 1, "count_rows": 32, "page_chunk": 4, "width_chunk": 128, "tail_chunk": 64}
    target = {"backend": "gfx942", "shape": {**shape, "num_warps": 2, "look_back": False}}
    layout = BufferLayout(indices_row_gap=3, lens_tail=5)
    for noncausal in (False, True):
        for query_len in (1, 2):
            batch = served(5, query_len, noncausal=noncausal, width=192, window_size=160)
            table = batch.block_table.copy()
            table[:, ::2] = -1  # every second page is a hole
            for changed in ({}, {"seq_lens": batch.seq_lens % 150 + 2}, {"block_table": table}):
                yield Case(replace(batch, **changed), layout, target=target)
    yield replace(CASE, target=target)


def _main() -> None:
    """Print as JSON what the cases show of the right kernel, "", and of each fault: nothing or the first verdict."""
    from swa_decode_meta.fuzz.cdna.triton_kernels import install
    from swa_decode_meta.fuzz.child import _launcher

    emulator = install("gfx942")
    from swa_decode_meta.kernel import launch

    here: Any = SimpleNamespace(backend="gfx942", takes_step=False, run=_launcher(launch, "gfx942", emulator))
    said = {}
    for name, edit in {"": str, **FAULTS, **UNSEEN}.items():
        emulator.edit = edit
        verdicts = (judge(case, here) for case in _cases())
        found = next((verdict for verdict in verdicts if verdict is not None), None)
        said[name] = [found.verdict, found.detail] if found is not None else []
    print(json.dumps(said))


@pytest.fixture(scope="module")
def shown() -> dict[str, list[str]]:
    """What the cases show. One process for all of them: loading torch takes longer than the cases of a fault."""
    if util.find_spec("triton.backends.amd") is None:
        pytest.skip("this Triton cannot compile for gfx942")
    ended = execute([sys.executable, "-m", "tests.test_miscompiled"])
    assert ended.code == 0, ended.err
    said: dict[str, list[str]] = json.loads(ended.last)
    return said


@pytest.mark.kernel
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_machine_code_shows(name: str, shown: dict[str, list[str]]) -> None:
    assert shown[""] == []
    assert shown[name], "no case shows it"
    verdict, detail = shown[name]
    if verdict == "EXCEPTION":  # the emulator's, not one of the edit's
        assert detail.startswith("AccessFault: lane ")


@pytest.mark.kernel
@pytest.mark.parametrize("name", UNSEEN)
def test_what_does_not_show(name: str, shown: dict[str, list[str]]) -> None:
    assert shown[name] == []


@pytest.mark.kernel
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_machine_code_is_found_and_shrunk_and_replayed(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--all-faults"):
        pytest.skip("takes half a minute; --all-faults looks for it")
    if name in HANGS:
        pytest.skip("found as a hang, of which a shrink takes many minutes")
    target = ("--target", f"tests.miscompiled:{name}@gfx942")
    limits = ("--examples", WITHIN, "--workers", 1, "--seed", 1, "--until-failure", "--out", tmp_path / "out")
    ended = run("fuzz", *target, *limits)
    assert ended.code == 1, ended.out
    assert json.loads((tmp_path / "out" / "campaign.json").read_text())["cases"] <= WITHIN
    [path] = (tmp_path / "out" / "failures").iterdir()
    assert load_case(path).batch.num_reqs <= 2
    failed = run("replay", *target, path)
    assert failed.code == 1
    assert failed.out.startswith(f"FAILED {path}")
    fixed = run("replay", "--target", "kernel@gfx942", path)
    assert fixed.code == 0
    assert fixed.out.startswith(f"FIXED {path}")


@pytest.mark.kernel
def test_machine_code_is_edited_on_an_emulated_gpu_only() -> None:
    """In this process kernels are interpreted, or run on a GPU."""
    with pytest.raises(ValueError, match="a target with @gfx942"):
        build("wide_store")


def test_an_edit_changes_one_match_and_nothing_else() -> None:
    for occurrence, line in ((0, "v1, v2, v3"), (1, "v4, v5, v6"), (-1, "v4, v5, v6")):
        edited = Edit(r"v_min_i32_e32 (.*)", r"v_max_i32_e32 \1", occurrence)(ASSEMBLY)
        assert code(edited)[1] == code(ASSEMBLY)[1].replace(f"v_min_i32_e32 {line}", f"v_max_i32_e32 {line}")
        assert [old == new for old, new in zip(ASSEMBLY.split("\n"), edited.split("\n"), strict=True)].count(False) == 1


@pytest.mark.parametrize(("old", "occurrence"), [("s_barrier", 0), ("v_min_i32_e32", 0), ("v_min_i32_e32 .*", 2)])
def test_an_edit_without_a_match_is_an_error_unless_it_may_lack_one(old: str, occurrence: int) -> None:
    with pytest.raises(ValueError, match="not in this code"):
        Edit(old, "s_nop 0", occurrence)(ASSEMBLY)
    assert Edit(old, "s_nop 0", occurrence, always=False)(ASSEMBLY) == ASSEMBLY


if __name__ == "__main__":
    _main()
