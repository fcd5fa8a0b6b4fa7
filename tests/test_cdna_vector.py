"""Each vector instruction does what AMD's ISA says, against rules of plain integers, a lane at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from swa_decode_meta.fuzz.cdna import vector
from swa_decode_meta.fuzz.cdna.translate import VCC
from tests.test_cdna_instructions import (
    ALL,
    CONDITIONS,
    EDGES,
    EDGES64,
    FLOATS,
    M32,
    PARTIAL,
    Rule,
    as_bits,
    as_float,
    execute,
    extracted,
    kernel,
    lane_on,
    signed,
    single,
)

INLINE = {"u": ("3", "-1", "64"), "f": ("1.0", "-4.0", "0.5")}
CONSTANTS = {"3": 3, "-1": ALL, "64": 64, "1.0": as_bits(1.0), "-4.0": as_bits(-4.0), "0.5": as_bits(0.5)}


def permuted(a: int, b: int, selector: int) -> int:
    """v_perm_b32."""
    data, result = a << 32 | b, 0
    for at in range(4):
        pick = selector >> 8 * at & 255
        if pick < 8:
            byte = data >> 8 * pick & 255
        elif pick < 12:
            byte = 255 if data >> (16 * (pick - 8) + 15) & 1 else 0
        else:
            byte = 0 if pick == 12 else 255
        result |= byte << 8 * at
    return result


def middle(*values: int) -> int:
    """Of three."""
    return sorted(values)[1]


def converted(value: float, low: int, high: int) -> int:
    """Towards 0, held within the range."""
    return max(low, min(high, int(value)))


def ones(value: int) -> int:
    """How many bits are set."""
    return sum(value >> bit & 1 for bit in range(32))


# Destination and sources, and the value of the sources. Letters: u, i, q, j, f; d: what the destination held, as a
# float; l: the lane's number.
VECTOR_RULES: dict[str, tuple[str, str, Rule]] = {
    "v_mov_b32": ("u", "u", lambda a: a),
    "v_accvgpr_read_b32": ("u", "u", lambda a: a),
    "v_accvgpr_write_b32": ("u", "u", lambda a: a),
    "v_accvgpr_mov_b32": ("u", "u", lambda a: a),
    "v_mov_b64": ("q", "q", lambda a: a),
    "v_not_b32": ("u", "u", lambda a: M32 - a),
    "v_add_u32": ("u", "uu", lambda a, b: a + b),
    "v_sub_u32": ("u", "uu", lambda a, b: a - b),
    "v_subrev_u32": ("u", "uu", lambda a, b: b - a),
    "v_and_b32": ("u", "uu", lambda a, b: a & b),
    "v_or_b32": ("u", "uu", lambda a, b: a | b),
    "v_xor_b32": ("u", "uu", lambda a, b: a ^ b),
    "v_xnor_b32": ("u", "uu", lambda a, b: M32 - (a ^ b)),
    "v_mul_lo_u32": ("u", "uu", lambda a, b: a * b),
    "v_mul_hi_u32": ("u", "uu", lambda a, b: a * b >> 32),
    "v_mul_hi_i32": ("i", "ii", lambda a, b: a * b >> 32),
    "v_mul_u32_u24": ("u", "uu", lambda a, b: (a % 2**24) * (b % 2**24)),
    "v_mul_i32_i24": ("i", "uu", lambda a, b: signed(a, 24) * signed(b, 24)),
    "v_mul_hi_u32_u24": ("u", "uu", lambda a, b: (a % 2**24) * (b % 2**24) >> 32),
    "v_mad_u32_u24": ("u", "uuu", lambda a, b, c: (a % 2**24) * (b % 2**24) + c),
    "v_mad_i32_i24": ("i", "uui", lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    "v_max_i32": ("i", "ii", max),
    "v_min_i32": ("i", "ii", min),
    "v_max_u32": ("u", "uu", max),
    "v_min_u32": ("u", "uu", min),
    "v_max3_i32": ("i", "iii", max),
    "v_min3_i32": ("i", "iii", min),
    "v_max3_u32": ("u", "uuu", max),
    "v_min3_u32": ("u", "uuu", min),
    "v_med3_i32": ("i", "iii", middle),
    "v_lshlrev_b32": ("u", "uu", lambda a, b: b << a % 32),
    "v_lshrrev_b32": ("u", "uu", lambda a, b: b >> a % 32),
    "v_ashrrev_i32": ("i", "ui", lambda a, b: b >> a % 32),
    "v_lshlrev_b64": ("q", "uq", lambda a, b: b << a % 64),
    "v_lshrrev_b64": ("q", "uq", lambda a, b: b >> a % 64),
    "v_ashrrev_i64": ("j", "uj", lambda a, b: b >> a % 64),
    "v_lshl_add_u32": ("u", "uuu", lambda a, b, c: (a << b % 32) + c),
    "v_add_lshl_u32": ("u", "uuu", lambda a, b, c: (a + b) << c % 32),
    "v_lshl_or_b32": ("u", "uuu", lambda a, b, c: a << b % 32 | c),
    "v_and_or_b32": ("u", "uuu", lambda a, b, c: a & b | c),
    "v_or3_b32": ("u", "uuu", lambda a, b, c: a | b | c),
    "v_add3_u32": ("u", "uuu", lambda a, b, c: a + b + c),
    "v_xad_u32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u64": ("q", "quq", lambda a, b, c: (a << b % 8) + c),
    "v_bfe_u32": ("u", "uuu", lambda a, b, c: extracted(a, b % 32, c % 32, False)),
    "v_bfe_i32": ("i", "iuu", lambda a, b, c: extracted(a, b % 32, c % 32, True)),
    "v_bfi_b32": ("u", "uuu", lambda a, b, c: a & b | (M32 - a) & c),
    "v_bfrev_b32": ("u", "u", lambda a: sum((a >> k & 1) << (31 - k) for k in range(32))),
    "v_alignbit_b32": ("u", "uuu", lambda a, b, c: (a << 32 | b) >> c % 32),
    "v_perm_b32": ("u", "uuu", permuted),
    "v_bcnt_u32_b32": ("u", "uu", lambda a, b: ones(a) + b),
    "v_mbcnt_lo_u32_b32": ("u", "uul", lambda a, b, lane: ones(a & ((1 << lane) - 1)) + b),
    "v_mbcnt_hi_u32_b32": ("u", "uul", lambda a, b, lane: ones(a & (((1 << lane) - 1) >> 32)) + b),
    "v_add_f32": ("f", "ff", lambda a, b: Fraction(a) + Fraction(b)),
    "v_sub_f32": ("f", "ff", lambda a, b: Fraction(a) - Fraction(b)),
    "v_mul_f32": ("f", "ff", lambda a, b: Fraction(a) * Fraction(b)),
    "v_trunc_f32": ("f", "f", lambda a: Fraction(int(a))),
    "v_floor_f32": ("f", "f", lambda a: Fraction(a).__floor__()),
    "v_fma_f32": ("f", "fff", lambda a, b, c: Fraction(a) * Fraction(b) + Fraction(c)),
    "v_fmac_f32": ("f", "ffd", lambda a, b, d: Fraction(a) * Fraction(b) + Fraction(d)),
    "v_fmamk_f32": ("f", "fff", lambda a, b, c: Fraction(a) * Fraction(b) + Fraction(c)),
    "v_fmaak_f32": ("f", "fff", lambda a, b, c: Fraction(a) * Fraction(b) + Fraction(c)),
    "v_mac_f32": ("f", "ffd", lambda a, b, d: Fraction(single(Fraction(a) * Fraction(b))) + Fraction(d)),
    "v_mad_f32": ("f", "fff", lambda a, b, c: Fraction(single(Fraction(a) * Fraction(b))) + Fraction(c)),
    "v_madmk_f32": ("f", "fff", lambda a, b, c: Fraction(single(Fraction(a) * Fraction(b))) + Fraction(c)),
    "v_madak_f32": ("f", "fff", lambda a, b, c: Fraction(single(Fraction(a) * Fraction(b))) + Fraction(c)),
    "v_cvt_f32_u32": ("f", "u", Fraction),
    "v_cvt_f32_i32": ("f", "i", Fraction),
    "v_cvt_u32_f32": ("u", "f", lambda a: converted(a, 0, M32)),
    "v_cvt_i32_f32": ("i", "f", lambda a: converted(a, -(2**31), 2**31 - 1)),
}
RECIPROCALS = ("v_rcp_f32", "v_rcp_iflag_f32")
COMPARE_RULES = {
    f"v_cmp_{'ne' if name == 'lg' else name}_{kind}": (2 * letter, test)
    for name, test in CONDITIONS.items()
    for kind, letter in (("i32", "i"), ("u32", "u"), ("i64", "j"), ("u64", "q"))
}
CARRY_RULES: dict[str, Callable[[int, int, int], int]] = {
    "v_add_co_u32": lambda a, b, c: a + b,
    "v_addc_co_u32": lambda a, b, c: a + b + c,
    "v_sub_co_u32": lambda a, b, c: a - b,
    "v_subb_co_u32": lambda a, b, c: a - b - c,
    "v_subrev_co_u32": lambda a, b, c: b - a,
    "v_subbrev_co_u32": lambda a, b, c: b - a - c,
}


def test_every_vector_opcode_has_a_rule() -> None:
    assert set(vector.VECTOR) == set(VECTOR_RULES) | set(RECIPROCALS)
    assert set(vector.COMPARE) == set(COMPARE_RULES)
    assert set(vector.CARRY) == set(CARRY_RULES)
    assert set(vector.MULTIPLY_ADD) == {"v_mad_u64_u32", "v_mad_i64_i32"}


# ------------------------------------------------------------ operands of every form


def columns(sources: Sequence[str], draw: random.Random, round_: int) -> list[list[int]]:
    """The bits of 64 lanes for each source: pairs of edges first, then any."""
    values: list[list[int]] = []
    for at, kind in enumerate(sources):
        edges: Sequence[int] = (
            [as_bits(value) for value in FLOATS] if kind in "fd" else EDGES64 if kind in "qj" else EDGES
        )
        walk = [edges[(lane + 64 * round_) // len(edges) ** at % len(edges)] for lane in range(64)]
        if round_ % 2:
            bits = 64 if kind in "qj" else 32
            some = [draw.getrandbits(bits) if kind not in "fd" else draw.choice(edges) for _ in range(64)]
            walk = [draw.choice((old, new, draw.choice(edges))) for old, new in zip(walk, some, strict=True)]
        values.append(walk)
    return values


def forms(sources: str) -> Iterator[tuple[str, ...]]:
    """Where each source may come from: v a VGPR, s an SGPR, c a constant."""
    return itertools.product("vsc", repeat=len(sources))


def given(kind: str, bits: int) -> Any:
    """A source's bits as what the instruction takes them for."""
    if kind in "fd":
        return as_float(bits)
    bits &= ALL if kind in "qj" else M32
    return signed(bits, 64 if kind == "j" else 32) if kind in "ij" else bits


class Operands:
    """Of one form of an instruction: their text, and registers that hold values for them."""

    def __init__(self, sources: str, form: Sequence[str], draw: random.Random, round_: int) -> None:
        self.text: list[str] = []
        self.v: dict[int, list[int]] = {}
        self.s: dict[int, int] = {}
        self.bits = columns(sources, draw, round_)
        for at, (kind, where) in enumerate(zip(sources, form, strict=True)):
            wide, number = kind in "qj", 4 + 2 * at
            if where == "c":
                self.text.append(INLINE["f" if kind == "f" else "u"][at])
                self.bits[at] = [CONSTANTS[self.text[-1]]] * 64
            elif where == "s":
                self.bits[at] = [draw.choice(self.bits[at])] * 64
                self.s |= {number: self.bits[at][0] & M32, number + 1: self.bits[at][0] >> 32}
                self.text.append(f"s[{number}:{number + 1}]" if wide else f"s{number}")
            else:
                self.v |= {number: [each & M32 for each in self.bits[at]]}
                self.v |= {number + 1: [each >> 32 for each in self.bits[at]]} if wide else {}
                self.text.append(f"v[{number}:{number + 1}]" if wide else f"v{number}")

    def of_lane(self, sources: str, lane: int) -> list[Any]:
        """What the instruction takes in a lane."""
        return [given(kind, column[lane]) for kind, column in zip(sources, self.bits, strict=True)]


def same(kind: str, got: int, expected: Any) -> bool:
    """Whether a result is the expected one; a zero may have either sign."""
    if kind == "f":
        return as_float(got) == single(expected)
    return bool(got == int(expected) & (ALL if kind in "qj" else M32))


@pytest.mark.parametrize("name", sorted(VECTOR_RULES))
def test_vector(name: str) -> None:
    """From VGPRs, SGPRs and constants; lanes that are off keep what they had; a destination may be a source."""
    destination, sources, value = VECTOR_RULES[name]
    written = sources.rstrip("dl")
    draw = random.Random(name)
    wide = destination in "qj"
    for form in forms(written):
        for round_ in range(4 if set(form) == {"v"} else 2):
            operands = Operands(written, form, draw, round_)
            old = [draw.choice([as_bits(value) for value in FLOATS]) for _ in range(64)]
            target = 4 if form[0] == "v" and (written[0] in "qj") == wide and round_ == 1 and "d" not in sources else 20
            text = f"{name} {f'v[{target}:{target + 1}]' if wide else f'v{target}'}, {', '.join(operands.text)}"
            before = {20: old, 21: old, **operands.v}
            on = (ALL, PARTIAL)[round_ % 2]
            wave = execute([text], v=before, s=operands.s, on=on)
            for lane in range(64):
                got = int(wave.v[target][lane]) | (int(wave.v[target + 1][lane]) << 32 if wide else 0)
                if not lane_on(on, lane):
                    assert got == before[target][lane] | (before[target + 1][lane] << 32 if wide else 0)
                    continue
                sent = operands.of_lane(written, lane)
                sent += [as_float(old[lane])] if "d" in sources else [lane] if "l" in sources else []
                assert same(destination, got, value(*sent)), (text, lane, sent)


@pytest.mark.parametrize("name", sorted(COMPARE_RULES))
@pytest.mark.parametrize("out", ["vcc", "s[20:21]"])
def test_compare(name: str, out: str) -> None:
    """Lanes that are off give 0, whatever the destination held."""
    sources, condition = COMPARE_RULES[name]
    draw = random.Random(name)
    number = VCC if out == "vcc" else 20
    for form in forms(sources):
        for on in (ALL, PARTIAL):
            operands = Operands(sources, form, draw, on & 1)
            wave = execute(
                [f"{name} {out}, {', '.join(operands.text)}"], operands.v, {**operands.s, 20: M32, VCC: M32}, on
            )
            expected = sum(
                lane_on(on, lane) and condition(*operands.of_lane(sources, lane)) and 1 << lane for lane in range(64)
            )
            assert wave.s[number] | wave.s[number + 1] << 32 == expected, form


@pytest.mark.parametrize("name", sorted(CARRY_RULES))
@pytest.mark.parametrize("carries", ["vcc", "s[20:21]"])
def test_carry(name: str, carries: str) -> None:
    """A carry in and the carry out may be the same register; out of lanes that are off comes 0."""
    rule, draw = CARRY_RULES[name], random.Random(name)
    number = VCC if carries == "vcc" else 20
    carried = f", {carries}" if name in ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32") else ""
    for form in forms("uu"):
        for on in (ALL, PARTIAL):
            operands, mask = Operands("uu", form, draw, on & 1), draw.getrandbits(64)
            text = f"{name} v20, {carries}, {', '.join(operands.text)}{carried}"
            s = {**operands.s, number: mask & M32, number + 1: mask >> 32}
            wave = execute([text], {**operands.v, 20: [5] * 64}, s, on)
            out = 0
            for lane in range(64):
                exact = rule(*operands.of_lane("uu", lane), mask >> lane & 1)
                assert wave.v[20][lane] == (exact & M32 if lane_on(on, lane) else 5), (text, lane)
                out |= (lane_on(on, lane) and not 0 <= exact <= M32) << lane
            assert wave.s[number] | wave.s[number + 1] << 32 == out, text


@pytest.mark.parametrize(("name", "sources"), [("v_mad_u64_u32", "uuq"), ("v_mad_i64_i32", "iij")])
def test_multiply_add(name: str, sources: str) -> None:
    """64 bits, and bit 64 of the exact sum as the carry."""
    draw = random.Random(name)
    for form, on in itertools.product(forms(sources), (ALL, PARTIAL)):
        operands = Operands(sources, form, draw, on & 1)
        wave = execute(
            [f"{name} v[20:21], s[20:21], {', '.join(operands.text)}"],
            {**operands.v, 20: [5] * 64, 21: [0] * 64},
            operands.s,
            on,
        )
        out = 0
        for lane in range(64):
            a, b, c = operands.of_lane(sources, lane)
            exact = a * b + c
            got = int(wave.v[20][lane]) | int(wave.v[21][lane]) << 32
            assert got == (exact & ALL if lane_on(on, lane) else 5), (form, a, b, c)
            out |= (lane_on(on, lane) and exact >> 64 & 1) << lane
        assert wave.s[20] | wave.s[21] << 32 == out, form


@pytest.mark.parametrize("name", RECIPROCALS)
@pytest.mark.parametrize("off", [-1, 0, 1, None])
def test_reciprocal_is_within_one_unit_in_the_last_place(name: str, off: int | None) -> None:
    draw = random.Random(1)
    values = [single(draw.choice((1, -1)) * draw.uniform(1, 2) * 2.0 ** draw.randrange(-60, 60)) for _ in range(64)]
    wave = execute([f"{name}_e32 v2, v1"], v={1: [as_bits(value) for value in values]}, reciprocal_off=off)
    seen = set()
    for lane, value in enumerate(values):
        got, exact = Fraction(as_float(int(wave.v[2][lane]))), 1 / Fraction(value)
        nearest = as_bits(single(exact))
        assert abs(got - exact) <= abs(Fraction(as_float(nearest + 1)) - Fraction(as_float(nearest)))
        seen.add(int(wave.v[2][lane]) - nearest)
    assert seen - {0} == ({-1, 1} if off is None else {off} - {0})
    powers = [2.0**n for n in range(-32, 32)]
    wave = execute([f"{name}_e32 v2, v1"], v={1: [as_bits(value) for value in powers]}, reciprocal_off=off)
    assert [as_float(int(each)) for each in wave.v[2]] == [1 / value for value in powers]


def test_fused_multiply_add_rounds_once() -> None:
    """Sums whose value in double precision is a tie of single precision, which the exact value is not."""
    draw = random.Random(2)
    code = kernel("v_fma_f32 v4, v1, v2, v3")
    for _ in range(40):
        rows = []
        for lane in range(64):
            a, b = (single(1 + draw.getrandbits(23) / 2**23) for _ in range(2))
            tie = Fraction(a) * Fraction(b)
            c = -single(tie) if lane % 2 else single(Fraction(draw.choice((1, -1))) * 2 ** draw.randrange(-60, 60))
            rows.append(
                (a, b, c) if lane % 3 else (single(1 + 2**-12), single(1 + 2**-12), single((1 + lane / 64) * 2.0**-60))
            )
        v = {1 + at: [as_bits(row[at]) for row in rows] for at in range(3)}
        got = execute(code, v=v).v[4].view(np.float32)
        for lane, (a, b, c) in enumerate(rows):
            assert float(got[lane]) == single(Fraction(a) * Fraction(b) + Fraction(c)), (a, b, c)
