"""The emulator's memory checker: what a launch must not do is found, and said where; what is legal passes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import pytest

from swa_decode_meta.fuzz.cdna.machine import Launch
from swa_decode_meta.fuzz.cdna.regions import AccessFault, Region
from tests.test_cdna_instructions import execute, kernel, region

# v0 is the thread's number in its workgroup; s2 the workgroup's.
POINTER = ("s_load_dwordx2 s[4:5], s[0:1], 0x0", "s_waitcnt lgkmcnt(0)")
WAVE = ("v_readfirstlane_b32 s8, v0", "s_lshr_b32 s8, s8, 6")
SEEDS = range(8)


def launch(
    lines: Iterable[str],
    array: np.ndarray,
    *others: Region,
    grid: int = 1,
    waves: int = 1,
    seed: int = 0,
    **options: int,
) -> None:
    """Run a kernel whose only argument is the address of an array's first element; s[4:5] gets it."""
    arguments = array.ctypes.data.to_bytes(8, "little").ljust(64, b"\0")
    regions = list(others) or [region("out", array)]
    lds = options.pop("lds", 0)
    Launch(kernel(*POINTER, *lines, **options), (grid,), waves, arguments, lds, regions, seed).run()


def fault(lines: Iterable[str], array: np.ndarray, *others: Region, **options: int) -> str:
    """What the launch's fault says, which every order of waves must have."""
    said = [""]
    for seed in SEEDS:
        with pytest.raises(AccessFault) as raised:
            launch(lines, array.copy() if not others else array, *others, seed=seed, **options)
        said.append(str(raised.value))
    return said[-1]


def address_of_lane(step: int = 4) -> list[str]:
    """v1 = thread * step."""
    return [f"v_mul_u32_u24_e32 v1, {step}, v0"]


def test_a_read_past_the_end_names_instruction_source_lane_address_and_tensor() -> None:
    data = np.arange(60, dtype=np.int32)
    text = [*address_of_lane(), ".loc\t1 87 12 ; kernel.py:87:12", "global_load_dword v2, v1, s[4:5]"]
    said = fault(text, data, region("seq_lens", data, writable=False))
    assert said == (
        f"lane 60 of wave 0 in workgroup (0, 0, 0) reads 4 bytes at 0x{data.ctypes.data + 240:x},"
        " 0 bytes past the end of seq_lens at `global_load_dword v2, v1, s[4:5]`"
        " (instruction 3, line 6 of the assembly; kernel.py:87:12)"
    )


def test_a_read_before_the_begin() -> None:
    data = np.arange(64, dtype=np.int32)
    said = fault([*address_of_lane(), "global_load_dword v2, v1, s[4:5] offset:-8"], data, region("lens", data, False))
    assert "lane 0 of wave 0" in said
    assert "8 bytes before lens" in said


@pytest.mark.parametrize(("size", "lane"), [("dword", 3), ("dwordx2", 2), ("dwordx4", 0)])
def test_a_read_in_the_gap_between_rows(size: str, lane: int) -> None:
    """Rows of 3 elements in every 16, also by an access wider than what is left of the row, or than the row."""
    data = np.arange(64, dtype=np.int32)
    rows = region("block_table", data, False, row=12, step=64)
    said = fault(
        [
            *address_of_lane(),
            f"global_load_{size} v{'2' if size == 'dword' else '[2:3]' if size == 'dwordx2' else '[2:5]'}, v1, s[4:5]",
        ],
        data,
        rows,
    )
    assert f"lane {lane} of" in said
    assert "into the gap after row 0 of block_table" in said


def test_the_lanes_that_are_on_are_named() -> None:
    """Where some are off, and where a buffer's bound has dropped others."""
    data = np.arange(64, dtype=np.int32)
    text = [*address_of_lane(8), "s_mov_b64 exec, 0xff0000ff", "global_load_dword v2, v1, s[4:5] offset:64"]
    assert "lane 24 of" in fault(text, data, region("lens", data, False))
    text = [*address_of_lane(), "s_mov_b32 s6, 256", "s_mov_b32 s7, 0", "v_xor_b32_e32 v1, 0xfc, v1"]
    text += ["v_add_u32_e32 v1, 8, v1", "buffer_load_dword v2, v1, s[4:7], 0 offen"]
    small = region("lens", data[:60], False)
    said = fault(text, data, small)
    assert "lane 2 of" in said
    assert "12 bytes past the end of lens" in said


def test_a_write_to_an_input() -> None:
    data = np.arange(64, dtype=np.int32)
    said = fault([*address_of_lane(), "global_store_dword v1, v0, s[4:5]"], data, region("lens", data, writable=False))
    assert "writes 4 bytes of an input, lens[0]" in said
    said = fault([*address_of_lane(), "global_atomic_add v1, v0, s[4:5]"], data, region("lens", data, writable=False))
    assert "changes 4 bytes of an input, lens[0]" in said


def test_a_read_of_lds_that_nobody_wrote() -> None:
    data = np.arange(64, dtype=np.int32)
    text = [*address_of_lane(), "v_cmp_ne_u32_e32 vcc, 9, v0", "s_and_saveexec_b64 s[6:7], vcc", "ds_write_b32 v1, v0"]
    text += ["s_mov_b64 exec, s[6:7]", "ds_read_b32 v2, v1"]
    assert (
        "lane 9 of wave 0 in workgroup (0, 0, 0) reads 4 bytes of LDS that nobody wrote, at LDS byte 36 at `ds_read_b32"
        in fault(text, data, lds=256)
    )


def test_an_access_outside_lds() -> None:
    data = np.arange(64, dtype=np.int32)
    assert "writes 4 bytes outside the 252 bytes of LDS, at LDS byte 252" in fault(
        [*address_of_lane(), "ds_write_b32 v1, v0"], data, lds=252
    )


@pytest.mark.parametrize(("grid", "waves"), [(1, 2), (2, 1)])
def test_a_byte_that_two_waves_write(grid: int, waves: int) -> None:
    """Different values are found whatever the order; the same value passes."""
    store = "global_store_dword v1, v3, s[4:5]"
    differs = ["v_and_b32_e32 v2, 63, v0", "v_lshlrev_b32_e32 v1, 2, v2", "v_lshl_or_b32 v3, s2, 8, v0", store]
    assert "to which another wave wrote another value, out[0]" in fault(
        differs, np.zeros(64, np.int32), grid=grid, waves=waves
    )
    out = np.zeros(64, np.int32)
    launch([*differs[:2], "v_mov_b32_e32 v3, v2", store], out, grid=grid, waves=waves)
    assert out.tolist() == list(range(64))


def test_two_lanes_that_write_other_values_to_a_byte() -> None:
    text = ["v_lshrrev_b32_e32 v1, 1, v0", "v_lshlrev_b32_e32 v1, 2, v1", "global_store_dword v1, v0, s[4:5]"]
    assert "to which another lane writes other values" in fault(text, np.zeros(64, np.int32))


def exchange(barrier: bool, lds: bool) -> list[str]:
    """Each of two waves writes its half and reads the other's, then writes that to the second half of the output."""
    write, read = (
        ("ds_write_b32 v1, v0", "ds_read_b32 v3, v2")
        if lds
        else ("global_store_dword v1, v0, s[4:5]", "global_load_dword v3, v2, s[4:5]")
    )
    text = [*address_of_lane(), "v_xor_b32_e32 v2, 0x100, v1", write, *["s_barrier"] * barrier, read]
    return [*text, "v_add_u32_e32 v1, 0x200, v1", "global_store_dword v1, v3, s[4:5]"]


@pytest.mark.parametrize("lds", [True, False])
def test_what_another_wave_wrote_is_read_after_a_barrier(lds: bool) -> None:
    """In LDS, and in global memory within a workgroup."""
    for seed in SEEDS:
        out = np.zeros(256, np.int32)
        launch(exchange(True, lds), out, waves=2, seed=seed, lds=512)
        assert out[128:].tolist() == [n ^ 64 for n in range(128)]


def test_a_read_of_global_memory_that_another_wave_writes_without_a_barrier() -> None:
    said = fault(exchange(False, lds=False), np.zeros(256, np.int32), waves=2)
    assert re.search(r"another wave (reads|writes), unordered, out\[\d+\] at `global_", said)


def test_a_read_of_lds_that_another_wave_writes_without_a_barrier() -> None:
    """Bytes that were written before a barrier and are written again after it, by one wave, while the other reads."""
    text = [*WAVE, *address_of_lane(), "ds_write_b32 v1, v0", "v_xor_b32_e32 v2, 0x100, v1", "s_barrier"]
    text += ["ds_read_b32 v3, v2", "v_add_u32_e32 v3, 7, v0", "ds_write_b32 v1, v3"]
    assert re.search(
        r"of LDS which another wave (reads|writes), with no barrier between",
        fault(text, np.zeros(1, np.int32), waves=2, lds=512),
    )


def test_what_all_read_before_a_barrier_one_may_read_and_write_after_it() -> None:
    text = [*WAVE, "v_mov_b32_e32 v1, 0", "v_mov_b32_e32 v2, 5", "s_cmp_lg_u32 s8, 0", "s_cbranch_scc1 .LBB0_1"]
    text += ["ds_write_b32 v1, v2", ".LBB0_1:", "s_barrier", "ds_read_b32 v3, v1", "s_barrier", "s_cmp_lg_u32 s8, 0"]
    text += ["s_cbranch_scc1 .LBB0_2", "ds_read_b32 v3, v1", "v_add_u32_e32 v3, 1, v3", "ds_write_b32 v1, v3"]
    text += ["ds_read_b32 v3, v1", "global_store_dword v1, v3, s[4:5]", ".LBB0_2:"]
    for seed in SEEDS:
        out = np.zeros(1, np.int32)
        launch(text, out, waves=2, seed=seed, lds=4)
        assert out[0] == 6


def test_atomics_of_many_waves_add_up_whatever_the_order() -> None:
    text = ["v_mov_b32_e32 v1, 0", "v_mov_b32_e32 v2, 1", "global_atomic_add v1, v2, s[4:5]"]
    for seed in SEEDS:
        out = np.zeros(1, np.int32)
        launch(text, out, grid=5, waves=3, seed=seed)
        assert out[0] == 64 * 15


def test_results_do_not_change_with_the_seed() -> None:
    """Though registers start with something else, waves run in another order, and arguments may come in SGPRs."""
    text = ["v_lshl_add_u32 v1, s2, 7, v0", "v_lshlrev_b32_e32 v2, 2, v1", "v_mul_lo_u32 v1, v1, v1"]
    text += ["global_store_dword v2, v1, s[4:5]"]
    for seed in SEEDS:
        out = np.zeros(1024, np.int32)
        launch(text, out, grid=8, waves=2, seed=seed)
        assert out.tolist() == [n * n for n in range(1024)]


def test_arguments_in_sgprs_and_arguments_that_the_prologue_loads() -> None:
    """A kernel with two entries, of which the seed picks one, as hardware or its firmware does."""
    prologue = [
        "s_load_dwordx2 s[2:3], s[0:1], 0x0",
        "s_load_dword s4, s[0:1], 0x8",
        "s_branch .LBB0_0",
        ".p2align\t8",
        ".LBB0_0:",
    ]
    body = ["v_mul_u32_u24_e32 v1, 4, v0", "v_add_u32_e32 v2, s4, v0", "v_add_u32_e32 v2, s5, v2"]
    sgprs = {"user_sgpr_kernarg_preload_length": 3, "user_sgpr_kernarg_preload_offset": 0, "user_sgpr_count": 5}
    code = kernel(*prologue, *body, "global_store_dword v1, v2, s[2:3]", **sgprs)
    entries = set()
    for seed in range(12):
        out = np.zeros(64, np.int32)
        arguments = (out.ctypes.data.to_bytes(8, "little") + (1000).to_bytes(4, "little")).ljust(64, b"\0")
        one = Launch(code, (1,), 1, arguments, 0, [region("out", out)], seed)
        cost = one.run()
        entries.add("scalar memory" in cost.instructions)
        assert out.tolist() == list(range(1000, 1064))
    assert entries == {True, False}


def test_a_row_narrower_than_the_access_is_never_wholly_inside() -> None:
    data = np.arange(64, dtype=np.int32)
    with pytest.raises(AccessFault, match="into the gap after row 0 of table"):
        execute(
            ["global_load_dwordx2 v[2:3], v1, s[4:5]"],
            v={1: 0},
            s={4: data.ctypes.data & 0xFFFFFFFF, 5: data.ctypes.data >> 32},
            regions=[region("table", data, False, row=4, step=16)],
        )
