"""Each instruction that the emulator knows does what AMD's ISA says, against rules of plain integers, a lane at a time.

The rules here are written from the ISA's pseudocode and share nothing with the emulator's tables, which are NumPy's.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from swa_decode_meta.fuzz.cdna import scalar
from swa_decode_meta.fuzz.cdna.assembly import read
from swa_decode_meta.fuzz.cdna.machine import Launch, Wave, Workgroup
from swa_decode_meta.fuzz.cdna.regions import Region
from swa_decode_meta.fuzz.cdna.translate import SCC, VCC, Translated, translate

ALL = (1 << 64) - 1
M32 = 0xFFFFFFFF
PARTIAL = 0x8000_F00F_1234_5679
EDGES = (0, 1, M32, 0x7FFFFFFF, 0x80000000, 0x80000001, 31, 0x8001C, 0xFFFF8000, 0x00FFFFFF, 0x12345678, 0xDEADBEEF)
EDGES64 = (0, 1, ALL, ALL >> 1, 1 << 63, M32, 1 << 32, 0x123456789ABCDEF0)
FLOATS = (0.0, 1.0, -1.0, 1.5, -2.75, 3.0, 16777216.0, 4294967296.0, 1e-18, 3e18, -7e9, 0.1, 1 / 3)

Rule = Callable[..., Any]


# ------------------------------------------------------------ tiny kernels


def kernel(*lines: str, metadata: str = "", **directives: int) -> Translated:
    """A kernel of these instructions and labels, at least 32 VGPRs wide, that gets its arguments' address in s[0:1]."""
    known = {"kernarg_size": 64, "user_sgpr_kernarg_segment_ptr": 1, "user_sgpr_count": 2, **directives}
    known.setdefault("system_sgpr_workgroup_id_x", 1)
    text = "\n".join(
        [
            "kernel:",
            *("\t" * (not line.endswith(":")) + line for line in lines),
            "\ts_endpgm",
            "\tv_mov_b32_e32 v31, v31",
            ".Lfunc_end0:",
            "\t.amdhsa_kernel kernel",
            *(f"\t\t.amdhsa_{key} {value}" for key, value in known.items()),
            "\t.end_amdhsa_kernel",
            "\t.amdgpu_metadata",
            "  - .args:",
            metadata,
        ]
    )
    return translate(read(text))


def region(name: str, array: Any, writable: bool = True, row: int = 0, step: int = 0) -> Region:
    """A NumPy array as a tensor of the launch."""
    return Region(name, array.ctypes.data, array.nbytes, array.itemsize, writable, row, step, keep=array)


def execute(
    code: Translated | Sequence[str],
    v: Mapping[int, Any] | None = None,
    s: Mapping[int, int] | None = None,
    on: int = ALL,
    lds: int = 0,
    regions: Iterable[Region] = (),
    **options: Any,
) -> Wave:
    """One wave after it ran the code: v and s set before, the lanes `on`."""
    code = code if isinstance(code, Translated) else kernel(*code)
    launch = Launch(code, (1,), 1, bytes(64), lds, list(regions), **options)
    wave = Workgroup(launch, 0, (0, 0, 0)).waves[0]
    for number, column in (v or {}).items():
        wave.v[number][:] = column
    for number, value in (s or {}).items():
        wave.s[number] = value
    wave.set_exec(on)
    with np.errstate(all="ignore"):
        while wave.block is not None:
            wave.run(1000)
    return wave


def lane_on(mask: int, lane: int) -> bool:
    """Whether a lane's bit is set."""
    return bool(mask >> lane & 1)


def signed(value: int, bits: int = 32) -> int:
    """The low bits as two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def single(value: Fraction | float) -> float:
    """The nearest number of single precision, of two the even one; rounded once."""
    exact = Fraction(value)
    bits = struct.unpack("<I", struct.pack("<f", float(exact)))[0]
    near = [struct.unpack("<f", struct.pack("<I", n))[0] for n in (bits - 1, bits, bits + 1) if 0 <= n <= M32]
    order = {n: (bits + k - 1) & 1 for k, n in enumerate(near)}
    return min((n for n in near if n - n == 0), key=lambda n: (abs(Fraction(n) - exact), order[n]))


def as_float(bits: int) -> float:
    """The number of single precision that the bits are."""
    return float(struct.unpack("<f", struct.pack("<I", bits & M32))[0])


def as_bits(value: float) -> int:
    """The bits of a number in single precision."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


# ------------------------------------------------------------ scalar instructions


def flag_nonzero(a: int, b: int, scc: int, d: int) -> bool:
    """SCC of what sets it where the result is not 0."""
    return d != 0


def overflows(value: int) -> bool:
    """Whether 32 signed bits do not hold it."""
    return not -(1 << 31) <= value < 1 << 31


def extracted(value: int, offset: int, width: int, signs: bool) -> int:
    """s_bfe and v_bfe: the shift is arithmetic where the field is signed."""
    got = (value >> offset) & ((1 << width) - 1)
    return got - (1 << width) if signs and width and got >> (width - 1) else got


def scan(value: int, places: Iterable[int]) -> int:
    """At which of the places the first set bit is; -1 for none."""
    return next((n for n, place in enumerate(places) if value >> place & 1), -1)


# Destination, sources, the value of (a, b, scc), and SCC of (a, b, scc, d) or None where it stays. Letters: u, i, q, j;
# k, K: 16 bits in the instruction, with and without sign; D, E: what the destination held, unsigned and signed.
SCALAR_RULES: dict[str, tuple[str, str, Rule, Rule | None]] = {
    "s_mov_b32": ("u", "u", lambda a, b, c: a, None),
    "s_mov_b64": ("q", "q", lambda a, b, c: a, None),
    "s_movk_i32": ("i", "k", lambda a, b, c: a, None),
    "s_cmov_b32": ("u", "uD", lambda a, b, c: a if c else b, None),
    "s_add_u32": ("u", "uu", lambda a, b, c: a + b, lambda a, b, c, d: a + b > M32),
    "s_addc_u32": ("u", "uu", lambda a, b, c: a + b + c, lambda a, b, c, d: a + b + c > M32),
    "s_sub_u32": ("u", "uu", lambda a, b, c: a - b, lambda a, b, c, d: b > a),
    "s_subb_u32": ("u", "uu", lambda a, b, c: a - b - c, lambda a, b, c, d: b + c > a),
    "s_add_i32": ("i", "ii", lambda a, b, c: a + b, lambda a, b, c, d: overflows(a + b)),
    "s_sub_i32": ("i", "ii", lambda a, b, c: a - b, lambda a, b, c, d: overflows(a - b)),
    "s_addk_i32": ("i", "kE", lambda a, b, c: a + b, lambda a, b, c, d: overflows(a + b)),
    "s_mulk_i32": ("i", "kE", lambda a, b, c: a * b, None),
    "s_mul_i32": ("i", "ii", lambda a, b, c: a * b, None),
    "s_mul_hi_u32": ("u", "uu", lambda a, b, c: a * b >> 32, None),
    "s_mul_hi_i32": ("i", "ii", lambda a, b, c: a * b >> 32, None),
    "s_min_i32": ("i", "ii", lambda a, b, c: min(a, b), lambda a, b, c, d: a < b),
    "s_min_u32": ("u", "uu", lambda a, b, c: min(a, b), lambda a, b, c, d: a < b),
    "s_max_i32": ("i", "ii", lambda a, b, c: max(a, b), lambda a, b, c, d: a >= b),
    "s_max_u32": ("u", "uu", lambda a, b, c: max(a, b), lambda a, b, c, d: a >= b),
    "s_abs_i32": ("i", "i", lambda a, b, c: -a if a < 0 else a, flag_nonzero),
    "s_sext_i32_i8": ("i", "u", lambda a, b, c: signed(a, 8), None),
    "s_sext_i32_i16": ("i", "u", lambda a, b, c: signed(a, 16), None),
    "s_ashr_i32": ("i", "iu", lambda a, b, c: a >> b % 32, flag_nonzero),
    "s_ashr_i64": ("j", "ju", lambda a, b, c: a >> b % 64, flag_nonzero),
    "s_bfe_u32": ("u", "uu", lambda a, b, c: extracted(a, b % 32, b >> 16 & 127, False), flag_nonzero),
    "s_bfe_i32": ("i", "iu", lambda a, b, c: extracted(a, b % 32, b >> 16 & 127, True), flag_nonzero),
    "s_bfe_u64": ("q", "qu", lambda a, b, c: extracted(a, b % 64, b >> 16 & 127, False), flag_nonzero),
    "s_bfe_i64": ("j", "ju", lambda a, b, c: extracted(a, b % 64, b >> 16 & 127, True), flag_nonzero),
    "s_pack_ll_b32_b16": ("u", "uu", lambda a, b, c: (b % 65536) * 65536 + a % 65536, None),
    "s_bitset0_b32": ("u", "uD", lambda a, b, c: b - (b & 1 << a % 32), None),
    "s_bitset1_b32": ("u", "uD", lambda a, b, c: b | 1 << a % 32, None),
    "s_bitcmp0_b32": ("", "uu", lambda a, b, c: 0, lambda a, b, c, d: a >> b % 32 & 1 == 0),
    "s_bitcmp1_b32": ("", "uu", lambda a, b, c: 0, lambda a, b, c, d: a >> b % 32 & 1 == 1),
}
for _bits, _u in ((32, "u"), (64, "q")):
    _two, _ones = 2 * _u, (1 << _bits) - 1
    SCALAR_RULES |= {
        f"s_not_b{_bits}": (_u, _u, lambda a, b, c, o=_ones: o - a, flag_nonzero),
        f"s_and_b{_bits}": (_u, _two, lambda a, b, c: a & b, flag_nonzero),
        f"s_or_b{_bits}": (_u, _two, lambda a, b, c: a | b, flag_nonzero),
        f"s_xor_b{_bits}": (_u, _two, lambda a, b, c: a ^ b, flag_nonzero),
        f"s_andn2_b{_bits}": (_u, _two, lambda a, b, c, o=_ones: a & (o - b), flag_nonzero),
        f"s_orn2_b{_bits}": (_u, _two, lambda a, b, c, o=_ones: a | (o - b), flag_nonzero),
        f"s_nand_b{_bits}": (_u, _two, lambda a, b, c, o=_ones: o - (a & b), flag_nonzero),
        f"s_nor_b{_bits}": (_u, _two, lambda a, b, c, o=_ones: o - (a | b), flag_nonzero),
        f"s_xnor_b{_bits}": (_u, _two, lambda a, b, c, o=_ones: o - (a ^ b), flag_nonzero),
        f"s_lshl_b{_bits}": (_u, _u + "u", lambda a, b, c, n=_bits: a << b % n, flag_nonzero),
        f"s_lshr_b{_bits}": (_u, _u + "u", lambda a, b, c, n=_bits: a >> b % n, flag_nonzero),
        f"s_bfm_b{_bits}": (_u, "uu", lambda a, b, c, n=_bits: ((1 << a % n) - 1) << b % n, None),
        f"s_brev_b{_bits}": (_u, _u, lambda a, b, c, n=_bits: sum((a >> k & 1) << (n - 1 - k) for k in range(n)), None),
        f"s_bcnt1_i32_b{_bits}": ("i", _u, lambda a, b, c, n=_bits: sum(a >> k & 1 for k in range(n)), flag_nonzero),
        f"s_ff1_i32_b{_bits}": ("i", _u, lambda a, b, c, n=_bits: scan(a, range(n)), None),
        f"s_flbit_i32_b{_bits}": ("i", _u, lambda a, b, c, n=_bits: scan(a, reversed(range(n))), None),
        f"s_cselect_b{_bits}": (_u, _two, lambda a, b, c: a if c else b, None),
    }
for _n in (1, 2, 3, 4):
    SCALAR_RULES[f"s_lshl{_n}_add_u32"] = (
        "u",
        "uu",
        lambda a, b, c, n=_n: a * 2**n + b,
        lambda a, b, c, d, n=_n: a * 2**n + b > M32,
    )
CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
for _name, _test in CONDITIONS.items():
    for _kind, _sources, _k in (("i32", "ii", "ik"), ("u32", "uu", "uK"), ("u64", "qq", "")):
        _flag = lambda a, b, c, d, test=_test: test(a, b)  # noqa: E731
        if _kind != "u64" or _name in ("eq", "lg"):
            SCALAR_RULES[f"s_cmp_{_name}_{_kind}"] = ("", _sources, lambda a, b, c: 0, _flag)
        if _k:
            SCALAR_RULES[f"s_cmpk_{_name}_{_kind}"] = ("", _k, lambda a, b, c: 0, _flag)


@pytest.mark.parametrize("name", sorted(SCALAR_RULES))
def test_scalar(name: str) -> None:
    destination, sources, value, flag = SCALAR_RULES[name]
    draw = random.Random(name)
    wide = destination in ("q", "j")
    literals = (0, 1, 0x7FFF, 0x8000, 0xFFFF) if set(sources) & set("kK") else (0,)
    for literal in literals:
        operands = ["s[8:9]" if wide else "s8"] if destination else []
        for at, kind in enumerate(sources):
            number = 4 + 2 * at
            if kind not in "DE":
                operands.append(
                    hex(literal) if kind in "kK" else f"s[{number}:{number + 1}]" if kind in "qj" else f"s{number}"
                )
        if "E" in sources:
            operands = ["s8", hex(literal)]
        code = kernel(f"{name} {', '.join(operands)}")
        values = [EDGES64 if kind in "qj" else EDGES for kind in sources]
        for cut, pair in enumerate(itertools.product(*values)):
            scc, random_bits = cut & 1, draw.getrandbits(64)
            s = {8: random_bits & M32, 9: random_bits >> 32}
            given = []
            for at, (kind, each) in enumerate(zip(sources, pair, strict=True)):
                if kind in "kK":
                    given.append(signed(literal, 16) if kind == "k" else literal)
                    continue
                if kind in "DE":
                    s[8] = each
                else:
                    s[4 + 2 * at], s[5 + 2 * at] = each & M32, each >> 32
                given.append(signed(each, 64 if kind == "j" else 32) if kind in "ijE" else each)
            a, b = (*given, 0)[:2]
            wave = execute(code, s={**s, SCC: scc})
            expected = value(a, b, scc) & (ALL if wide else M32)
            if destination:
                got = wave.s[8] | wave.s[9] << 32 if wide else wave.s[8]
                assert got == expected, (a, b, scc)
            assert wide or wave.s[9] == s[9]
            result = signed(expected, 32) if destination == "i" else expected
            assert wave.s[SCC] == (scc if flag is None else int(flag(a, b, scc, result))), (a, b, scc)


SAVE_RULES: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda a, e: a & e,
    "s_or_saveexec_b64": lambda a, e: a | e,
    "s_xor_saveexec_b64": lambda a, e: a ^ e,
    "s_andn1_saveexec_b64": lambda a, e: (ALL - a) & e,
    "s_orn1_saveexec_b64": lambda a, e: (ALL - a) | e,
    "s_andn2_saveexec_b64": lambda a, e: a & (ALL - e),
    "s_orn2_saveexec_b64": lambda a, e: a | (ALL - e),
}


@pytest.mark.parametrize("name", sorted(SAVE_RULES))
@pytest.mark.parametrize("source", ["s[4:5]", "vcc"])
def test_save_exec(name: str, source: str) -> None:
    """The destination, here the source too, gets the old EXEC; SCC whether any lane is on."""
    number = VCC if source == "vcc" else 4
    code = kernel(f"{name} {source}, {source}", "v_mov_b32_e32 v1, 7")
    for a, e in itertools.product((0, 1, ALL, PARTIAL, 0xFFFF), (0, ALL, PARTIAL, 1 << 63)):
        wave = execute(code, v={1: 5}, s={number: a & M32, number + 1: a >> 32}, on=e)
        expected = SAVE_RULES[name](a, e)
        assert (wave.exec, wave.s[number] | wave.s[number + 1] << 32) == (expected, e)
        assert wave.s[SCC] == (expected != 0)
        assert wave.v[1].tolist() == [7 if lane_on(expected, lane) else 5 for lane in range(64)]


def test_every_scalar_opcode_has_a_rule() -> None:
    assert set(scalar.SCALAR) == set(SCALAR_RULES)
    assert set(scalar.SAVE_EXEC) == set(SAVE_RULES)
