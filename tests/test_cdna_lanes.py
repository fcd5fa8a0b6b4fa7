"""What emulators get wrong: lanes that read others, lanes that are off, parts of registers, and what is not known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from swa_decode_meta.fuzz.cdna.assembly import UnknownInstruction
from swa_decode_meta.fuzz.cdna.translate import M0, SCC, VCC
from tests.test_cdna_instructions import ALL, EDGES, M32, PARTIAL, execute, kernel, lane_on, signed

DRAW = random.Random(7)
A = [DRAW.choice((*EDGES, DRAW.getrandbits(32))) for _ in range(64)]
B = [DRAW.getrandbits(32) for _ in range(64)]
C = [DRAW.choice((*EDGES, DRAW.getrandbits(32))) for _ in range(64)]

# Which lane a lane reads, None for none.
DPP: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[3,0,0,1]": lambda n: n // 4 * 4 + (3, 0, 0, 1)[n % 4],
    "row_mirror": lambda n: n // 16 * 16 + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "row_shl:1": lambda n: n + 1 if n % 16 < 15 else None,
    "row_shl:15": lambda n: n + 15 if n % 16 < 1 else None,
    "row_shr:1": lambda n: n - 1 if n % 16 >= 1 else None,
    "row_shr:4": lambda n: n - 4 if n % 16 >= 4 else None,
    "row_shr:15": lambda n: n - 15 if n % 16 >= 15 else None,
    "row_ror:3": lambda n: n // 16 * 16 + (n - 3) % 16,
    "row_newbcast:5": lambda n: n // 16 * 16 + 5,
    "row_bcast:15": lambda n: n // 16 * 16 - 1 if n >= 16 else None,
    "row_bcast:31": lambda n: 31 if n >= 32 else None,
    "wave_shl:1": lambda n: n + 1 if n < 63 else None,
    "wave_shr:1": lambda n: n - 1 if n else None,
    "wave_rol:1": lambda n: (n + 1) % 64,
    "wave_ror:1": lambda n: (n - 1) % 64,
}


def bits_of(a: list[bool]) -> int:
    """As a mask."""
    return sum(each << lane for lane, each in enumerate(a))


@pytest.mark.parametrize("control", DPP)
@pytest.mark.parametrize("opcode", ["v_mov_b32", "v_add_u32", "v_min_i32", "v_add_co_u32"])
@pytest.mark.parametrize("target", [1, 3])
def test_dpp_reads_every_lane_before_any_is_written(control: str, opcode: str, target: int) -> None:
    """Whether the destination is a source or neither; with lanes off, rows and banks masked, and both bounds."""
    masks = ((0xF, 0xF), (0xA, 0xF), (0xC, 0x5), (0xF, 0xC))
    for on, (rows, banks), bound in itertools.product((ALL, PARTIAL), masks, ("", " bound_ctrl:1", " bound_ctrl:0")):
        operands = {"v_mov_b32": "v1", "v_add_co_u32": "vcc, v1, v2"}.get(opcode, "v1, v2")
        text = f"{opcode}_dpp v{target}, {operands} {control} row_mask:{rows:#x} bank_mask:{banks:#x}{bound}"
        old = (A, B, C)[target - 1]
        wave = execute([text], v={1: A, 2: B, 3: C}, s={VCC: M32}, on=on)
        carry = 0
        for lane in range(64):
            source = DPP[control](lane)
            there = source is not None and lane_on(on, source)
            written = lane_on(on, lane) and rows >> lane // 16 & 1 and banks >> lane // 4 % 4 & 1 and (there or bound)
            a, b = A[source] if there and source is not None else 0, B[lane]
            total = {"v_mov_b32": a, "v_min_i32": min(signed(a), signed(b))}.get(opcode, a + b)
            assert wave.v[target][lane] == (total & M32 if written else old[lane]), (text, lane)
            carry |= bool(written and a + b > M32) << lane
        assert opcode != "v_add_co_u32" or wave.s[VCC] | wave.s[VCC + 1] << 32 == carry, text


def test_row_bcast_15_gives_each_rows_last_lane_to_the_next_row() -> None:
    wave = execute(["v_mov_b32_dpp v1, v1 row_bcast:15 row_mask:0xa bank_mask:0xf"], v={1: list(range(100, 164))})
    assert wave.v[1].tolist() == [*range(100, 116), *[115] * 16, *range(132, 148), *[147] * 16]


def test_row_bcast_31_gives_lane_31_to_the_upper_half() -> None:
    wave = execute(["v_mov_b32_dpp v1, v1 row_bcast:31 row_mask:0xc bank_mask:0xf"], v={1: list(range(100, 164))})
    assert wave.v[1].tolist() == [*range(100, 132), *[131] * 32]


def test_a_sum_over_lanes_as_the_compiler_writes_it() -> None:
    """Lane 63 has the sum of all."""
    steps = ["quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]", "row_half_mirror", "row_mirror"]
    text = [f"v_add_u32_dpp v1, v1, v1 {step} row_mask:0xf bank_mask:0xf" for step in steps]
    text += [
        f"v_add_u32_dpp v1, v1, v1 row_bcast:{n} row_mask:{m} bank_mask:0xf" for n, m in ((15, "0xa"), (31, "0xc"))
    ]
    assert execute(text, v={1: B}).v[1][63] == sum(B) & M32


# The swizzles of groups of 32 lanes.
SWIZZLES: dict[str, Callable[[int], int]] = {
    "swizzle(SWAP,16)": lambda n: n ^ 16,
    "swizzle(SWAP,1)": lambda n: n ^ 1,
    "swizzle(REVERSE,8)": lambda n: n ^ 7,
    "swizzle(QUAD_PERM,0,3,1,1)": lambda n: n // 4 * 4 + (0, 3, 1, 1)[n % 4],
    "swizzle(BROADCAST,8,3)": lambda n: n // 8 * 8 + 3,
    'swizzle(BITMASK_PERM,"01pip")': lambda n: n & 32 | 8 | n & 4 | ~n & 2 | n & 1,
    "32768": lambda n: n // 4 * 4,
    str(0x80B1): lambda n: n ^ 1,
    str(0x4000 | 0x1F): lambda n: n ^ 16,
    str(5 << 5 | 0x18): lambda n: n & 0x38 | 5,
}


@pytest.mark.parametrize("pattern", SWIZZLES)
@pytest.mark.parametrize("on", [ALL, PARTIAL])
def test_ds_swizzle(pattern: str, on: int) -> None:
    wave = execute([f"ds_swizzle_b32 v1, v1 offset:{pattern}"], v={1: A}, on=on)
    read = [A[SWIZZLES[pattern](lane)] if lane_on(on, SWIZZLES[pattern](lane)) else 0 for lane in range(64)]
    assert wave.v[1].tolist() == [read[lane] if lane_on(on, lane) else A[lane] for lane in range(64)]


@pytest.mark.parametrize("offset", [0, 8, 252])
@pytest.mark.parametrize("on", [ALL, PARTIAL])
def test_ds_bpermute(offset: int, on: int) -> None:
    """The address is in bytes, modulo the wave; lanes that are off give 0."""
    wave = execute([f"ds_bpermute_b32 v1, v2, v1 offset:{offset}"], v={1: A, 2: B}, on=on)
    for lane in range(64):
        source = (B[lane] + offset) // 4 % 64
        got = (A[source] if lane_on(on, source) else 0) if lane_on(on, lane) else A[lane]
        assert wave.v[1][lane] == got


@pytest.mark.parametrize("rows", [16, 32])
def test_permlane_swap(rows: int) -> None:
    """The first operand's odd rows change places with the second's even ones."""
    wave = execute([f"v_permlane{rows}_swap_b32_e32 v1, v2"], v={1: A, 2: B})
    for lane in range(64):
        odd = lane // rows % 2
        assert wave.v[1][lane] == (B[lane - rows] if odd else A[lane])
        assert wave.v[2][lane] == (B[lane] if odd else A[lane + rows])


@pytest.mark.parametrize("on", [0, ALL, PARTIAL, 1 << 40])
def test_lanes_to_and_from_scalars_whatever_exec_is(on: int) -> None:
    """v_readlane and v_writelane ignore EXEC, and spill to lanes that are off; the lane's number is modulo 64."""
    text = ["v_readfirstlane_b32 s4, v1", "v_readlane_b32 s5, v1, 17", "v_readlane_b32 vcc_lo, v1, s9"]
    text += ["v_writelane_b32 v2, s8, 5", "v_writelane_b32 v2, -7, s9", "v_writelane_b32 v2, vcc_lo, m0"]
    wave = execute(text, v={1: A, 2: B}, s={8: 0xABCDEF01, 9: 64 + 11, M0: 3}, on=on)
    first = next((lane for lane in range(64) if lane_on(on, lane)), 0)
    assert [wave.s[4], wave.s[5], wave.s[VCC]] == [A[first], A[17], A[11]]
    written = {5: 0xABCDEF01, 11: -7 & M32, 3: A[11]}
    assert wave.v[2].tolist() == [written.get(lane, B[lane]) for lane in range(64)]


@pytest.mark.parametrize("on", [ALL, PARTIAL])
def test_cndmask(on: int) -> None:
    for mask, a, b in itertools.product(("vcc", "s[10:11]"), ("v1", "0", "s4"), ("v2", "-1", "s5")):
        text = f"v_cndmask_b32{'_e32' if mask == 'vcc' else '_e64'} v3, {a}, {b}, {mask}"
        number = VCC if mask == "vcc" else 10
        wave = execute(
            [text], v={1: A, 2: B, 3: C}, s={4: 44, 5: 55, number: M32 & 0xF0F1, number + 1: 0x80000001}, on=on
        )
        for lane in range(64):
            x, y = {"v1": A[lane], "0": 0, "s4": 44}[a], {"v2": B[lane], "-1": M32, "s5": 55}[b]
            chosen = y if 0x80000001_0000F0F1 >> lane & 1 else x
            assert wave.v[3][lane] == (chosen if lane_on(on, lane) else C[lane]), text


@pytest.mark.parametrize("table", [0, 1, 0x80, 0xC8, 0x54, 0x96, 0xFF, 0x36])
@pytest.mark.parametrize("first", ["v1", "s4", "-1"])
def test_bitop3(table: int, first: str) -> None:
    """Bit 4a + 2b + c of the table."""
    wave = execute(
        [f"v_bitop3_b32 v3, {first}, v2, v3 bitop3:{table:#x}"], v={1: A, 2: B, 3: C}, s={4: 0x1234}, on=PARTIAL
    )
    for lane in range(64):
        x = {"v1": A[lane], "s4": 0x1234, "-1": M32}[first]
        bits = [4 * (x >> k & 1) + 2 * (B[lane] >> k & 1) + (C[lane] >> k & 1) for k in range(32)]
        expected = sum((table >> bit & 1) << k for k, bit in enumerate(bits))
        assert wave.v[3][lane] == (expected if lane_on(PARTIAL, lane) else C[lane])


@pytest.mark.parametrize("on", [ALL, PARTIAL])
def test_packed_move(on: int) -> None:
    """Each half of the destination from a source's half that op_sel picks; the destination may be the source."""
    for low, high in itertools.product((0, 1), repeat=2):
        text = f"v_pk_mov_b32 v[2:3], v[2:3], v[2:3] op_sel:[{low},{high}]"
        wave = execute([text], v={2: A, 3: B}, on=on)
        for lane in range(64):
            pair = (A[lane], B[lane])
            got = (int(wave.v[2][lane]), int(wave.v[3][lane]))
            assert got == ((pair[low], pair[high]) if lane_on(on, lane) else pair), text
    wave = execute(["v_pk_mov_b32 v[2:3], s[4:5], s[4:5] op_sel:[0,1]", "v_pk_mov_b32 v[4:5], -1, 3"], s={4: 7, 5: 9})
    assert [int(wave.v[n][9]) for n in (2, 3, 4, 5)] == [7, 9, M32, 3]


SELECTS = (
    {f"BYTE_{n}": (8 * n, 8) for n in range(4)} | {f"WORD_{n}": (16 * n, 16) for n in range(2)} | {"DWORD": (0, 32)}
)


@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
@pytest.mark.parametrize("second", ["v2", "s4", "sext(v2)", "sext(s4)"])
@pytest.mark.parametrize("opcode", ["v_or_b32", "v_add_u32", "v_max_i32", "v_lshlrev_b32"])
def test_sdwa_selects_parts_of_registers(unused: str, second: str, opcode: str) -> None:
    """Of sources, with their sign or without, and of the destination, whose rest is 0, the sign, or what was there."""
    rules = {"v_or_b32": lambda a, b: a | b, "v_add_u32": lambda a, b: a + b, "v_lshlrev_b32": lambda a, b: b << a % 32}
    for to, (one, two) in itertools.product(SELECTS, (("BYTE_0", "WORD_0"), ("WORD_1", "BYTE_3"), ("DWORD", "DWORD"))):
        modifiers = f"dst_sel:{to} dst_unused:{unused} src0_sel:{one} src1_sel:{two}"
        wave = execute(
            [f"{opcode}_sdwa v3, v1, {second} {modifiers}"], v={1: A, 2: B, 3: C}, s={4: 0x9ABC8DEF}, on=PARTIAL
        )
        for lane in range(64):
            start, width = SELECTS[one]
            a = A[lane] >> start & (1 << width) - 1
            start, width = SELECTS[two]
            b = (0x9ABC8DEF if "s4" in second else B[lane]) >> start & (1 << width) - 1
            b = signed(b, width) & M32 if second.startswith("sext") else b
            value = max(signed(a), signed(b)) if opcode == "v_max_i32" else rules[opcode](a, b)
            start, width = SELECTS[to]
            value &= (1 << width) - 1
            rest = {"UNUSED_PAD": 0, "UNUSED_PRESERVE": C[lane] & ~(((1 << width) - 1) << start)}.get(unused)
            if rest is None:
                rest = signed(value, width) << start & M32 & ~((1 << start + width) - 1)
            expected = rest | value << start if width < 32 else value
            assert wave.v[3][lane] == (expected & M32 if lane_on(PARTIAL, lane) else C[lane]), modifiers


def test_clamped_sums_saturate() -> None:
    wave = execute(["v_add_u32_e64 v3, v1, v2 clamp", "v_sub_u32_e64 v4, v1, 1 clamp"], v={1: A, 2: B})
    assert wave.v[3].tolist() == [min(a + b, M32) for a, b in zip(A, B, strict=True)]
    assert wave.v[4].tolist() == [max(a - 1, 0) for a in A]


def test_special_registers_are_sources_and_destinations() -> None:
    """EXEC by halves too, which takes effect at once."""
    names = ("exec_lo", "exec_hi", "vcc_lo", "vcc_hi", "m0")
    text = [f"v_mov_b32_e32 v{n}, {name}" for n, name in enumerate(names, 1)]
    text += [f"v_and_b32_e32 v{n}, {name}, v20" for n, name in enumerate(names, 6)]
    text += ["s_mov_b32 exec_lo, 0x10", "s_mov_b32 exec_hi, 0x20", "v_mov_b32_e32 v20, 1", "s_mov_b64 vcc, exec"]
    wave = execute(text, v={20: M32}, s={VCC: 5, VCC + 1: 6, M0: 8}, on=PARTIAL)
    expected = [PARTIAL & M32, PARTIAL >> 32, 5, 6, 8]
    assert [int(wave.v[n][0]) for n in range(1, 11)] == expected * 2
    assert (wave.exec, wave.s[VCC], wave.s[VCC + 1]) == (0x20_00000010, 0x10, 0x20)
    assert [lane for lane in range(64) if wave.v[20][lane] == 1] == [4, 37]


def test_carries_go_through_64_bits() -> None:
    text = ["s_add_u32 s4, s4, s6", "s_addc_u32 s5, s5, s7", "s_sub_u32 s8, s4, s6", "s_subb_u32 s9, s5, s7"]
    text += ["v_add_co_u32_e32 v1, vcc, v1, v3", "v_addc_co_u32_e32 v2, vcc, v2, v4, vcc"]
    text += ["v_sub_co_u32_e64 v5, s[2:3], v1, v3", "v_subb_co_u32_e64 v6, s[2:3], v2, v4, s[2:3]"]
    wave = execute(text, v={1: A, 2: B, 3: C, 4: B[::-1]}, s={4: M32, 5: 7, 6: 1, 7: M32})
    assert [wave.s[4], wave.s[5], wave.s[8], wave.s[9], wave.s[SCC]] == [0, 7, M32, 7, 1]
    for lane in range(64):
        a, b = A[lane] | B[lane] << 32, C[lane] | B[63 - lane] << 32
        assert int(wave.v[1][lane]) | int(wave.v[2][lane]) << 32 == a + b & ALL
        assert int(wave.v[5][lane]) | int(wave.v[6][lane]) << 32 == a


def test_accumulator_registers_are_registers_of_their_own() -> None:
    text = [
        "v_accvgpr_write_b32 a1, v1",
        "v_mov_b32_e32 v1, 0",
        "v_accvgpr_mov_b32 a2, a1",
        "v_accvgpr_read_b32 v2, a2",
    ]
    wave = execute(text, v={1: A})
    assert (wave.v[1].tolist(), wave.v[2].tolist()) == ([0] * 64, A)


BRANCHES = (
    "s_branch",
    "s_cbranch_scc0",
    "s_cbranch_scc1",
    "s_cbranch_vccz",
    "s_cbranch_vccnz",
    "s_cbranch_execz",
    "s_cbranch_execnz",
)


@pytest.mark.parametrize("name", BRANCHES)
def test_branches(name: str) -> None:
    code = kernel(f"{name} .LBB0_1", "s_mov_b32 s4, 1", ".LBB0_1:")
    for scc, vcc, on in itertools.product((0, 1), (0, 1 << 40, 1), (0, PARTIAL, 1 << 40)):
        wave = execute(code, s={4: 0, SCC: scc, VCC: vcc & M32, VCC + 1: vcc >> 32}, on=on)
        taken = {"vccz": not vcc, "vccnz": vcc, "scc0": not scc, "scc1": scc, "execz": not on, "execnz": on}
        assert wave.s[4] == (not taken.get(name.rpartition("_")[2], True)), (scc, vcc, on)


UNKNOWN = (
    "v_frobnicate_b32 v1, v2",
    "s_frobnicate_b32 s1, s2",
    "ds_frobnicate_b32 v1, v2",
    "global_frobnicate_dword v1, v[2:3], off",
    "global_atomic_add_f32 v[2:3], v1, off",
    "flat_load_dword v1, v[2:3]",
    "v_add_u32_e64 v1, v2, v3 mul:2",
    "v_mov_b32_dpp v1, v2 row_sideways:1 row_mask:0xf bank_mask:0xf",
    "v_mov_b32_dpp v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf fi:1",
    "v_or_b32_sdwa v1, v2, v3 dst_sel:NIBBLE_0 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
    "v_mul_f32_sdwa v1, v2, v3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
    "v_cmp_eq_u32_sdwa vcc, v1, v2 src0_sel:BYTE_0 src1_sel:DWORD",
    "v_readlane_b32 s1, v1, 3 clamp",
    "v_mad_u64_u32 v[2:3], vcc, v4, v5, v[6:7] clamp",
    "v_mad_i32_i24 v1, v2, v3, v4 clamp",
    "ds_read_b32 v1, v2 gds",
    "ds_swizzle_b32 v1, v2 offset:57344",
    "ds_swizzle_b32 v1, v2 offset:swizzle(ROTATE,0,3)",
    "global_load_dword v1, v[2:3], off lds",
    "buffer_load_dword v1, v2, s[4:7], 0 idxen",
    "s_load_dwordx2 s[4:5], s[0:1], 0x0 glc",
    "s_add_u32 s1, s2, lds_direct",
    "s_add_u32 s1, s2, ttmp3",
    "s_add_u32 s1, s2",
    "s_add_u32 s1, s2, s[4:5]",
    "s_mov_b64 s[4:5], s6",
    "v_add_u32_e32 v1, lds_direct, v2",
    "v_add_u32_e32 v1, v2",
    "v_add_u32_e32 v1, -v2, v3",
    "v_add_u32_e32 v1, v[2:3], v4",
    "v_mov_b64_e32 v[3:4], v[6:7]",
    "v_cmp_lt_i64_e32 vcc, 0x80000000, v[2:3]",
    "s_branch .LBB0_9",
)


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_is_not_known_is_said_with_its_text_and_place(text: str) -> None:
    """Never guessed at."""
    with pytest.raises(UnknownInstruction) as raised:
        kernel("s_nop 0", ".loc\t1 461 29 is_stmt 0 ; decode_meta.py:461:29", text)
    said = str(raised.value)
    assert f"`{text}` (instruction 1, line 4 of the assembly; decode_meta.py:461:29)" in said
