"""What vector instructions do: NumPy over the 64 lanes of a wave. Source: AMD's "MI300" ISA reference, chapter 6."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LANES = 64
_LANE = np.arange(LANES)


class Vector(NamedTuple):
    """destination, sources: a letter each: u, i (32 bits, unsigned, signed), q, j (64 bits), f (single precision).

    value: a name of NumPy's function of the sources, or an expression in a, b, c and d, what the destination holds.
    """

    destination: str
    sources: str
    value: str


VECTOR: dict[str, Vector] = {
    "v_mov_b32": Vector("u", "u", "positive"),
    "v_accvgpr_read_b32": Vector("u", "u", "positive"),
    "v_accvgpr_write_b32": Vector("u", "u", "positive"),
    "v_accvgpr_mov_b32": Vector("u", "u", "positive"),
    "v_mov_b64": Vector("q", "q", "positive"),
    "v_not_b32": Vector("u", "u", "invert"),
    "v_add_u32": Vector("u", "uu", "add"),
    "v_sub_u32": Vector("u", "uu", "subtract"),
    "v_subrev_u32": Vector("u", "uu", "b - a"),
    "v_and_b32": Vector("u", "uu", "bitwise_and"),
    "v_or_b32": Vector("u", "uu", "bitwise_or"),
    "v_xor_b32": Vector("u", "uu", "bitwise_xor"),
    "v_xnor_b32": Vector("u", "uu", "~(a ^ b)"),
    "v_mul_lo_u32": Vector("u", "uu", "multiply"),
    "v_mul_hi_u32": Vector("u", "uu", "wide(a, b) >> U64(32)"),
    "v_mul_hi_i32": Vector("i", "ii", "wide_signed(a, b) >> I64(32)"),
    "v_mul_u32_u24": Vector("u", "uu", "(a & 0xffffff) * (b & 0xffffff)"),
    "v_mul_i32_i24": Vector("i", "ii", "low24(a) * low24(b)"),
    "v_mul_hi_u32_u24": Vector("u", "uu", "wide(a & 0xffffff, b & 0xffffff) >> U64(32)"),
    "v_mad_u32_u24": Vector("u", "uuu", "(a & 0xffffff) * (b & 0xffffff) + c"),
    "v_mad_i32_i24": Vector("i", "iii", "low24(a) * low24(b) + c"),
    "v_max_i32": Vector("i", "ii", "maximum"),
    "v_min_i32": Vector("i", "ii", "minimum"),
    "v_max_u32": Vector("u", "uu", "maximum"),
    "v_min_u32": Vector("u", "uu", "minimum"),
    "v_max3_i32": Vector("i", "iii", "maximum(maximum(a, b), c)"),
    "v_min3_i32": Vector("i", "iii", "minimum(minimum(a, b), c)"),
    "v_max3_u32": Vector("u", "uuu", "maximum(maximum(a, b), c)"),
    "v_min3_u32": Vector("u", "uuu", "minimum(minimum(a, b), c)"),
    "v_med3_i32": Vector("i", "iii", "maximum(minimum(a, b), minimum(maximum(a, b), c))"),
    "v_lshlrev_b32": Vector("u", "uu", "b << (a & 31)"),
    "v_lshrrev_b32": Vector("u", "uu", "b >> (a & 31)"),
    "v_ashrrev_i32": Vector("i", "ii", "b >> (a & 31)"),
    "v_lshlrev_b64": Vector("q", "uq", "b << (a & 63)"),
    "v_lshrrev_b64": Vector("q", "uq", "b >> (a & 63)"),
    "v_ashrrev_i64": Vector("j", "ij", "b >> (a & 63)"),
    "v_lshl_add_u32": Vector("u", "uuu", "(a << (b & 31)) + c"),
    "v_add_lshl_u32": Vector("u", "uuu", "(a + b) << (c & 31)"),
    "v_lshl_or_b32": Vector("u", "uuu", "(a << (b & 31)) | c"),
    "v_and_or_b32": Vector("u", "uuu", "(a & b) | c"),
    "v_or3_b32": Vector("u", "uuu", "a | b | c"),
    "v_add3_u32": Vector("u", "uuu", "a + b + c"),
    "v_xad_u32": Vector("u", "uuu", "(a ^ b) + c"),
    "v_lshl_add_u64": Vector("q", "quq", "(a << (b & 7)) + c"),
    "v_bfe_u32": Vector("u", "uuu", "field(a, b & 31, c & 31)"),
    "v_bfe_i32": Vector("i", "iuu", "field_signed(a, b & 31, c & 31)"),
    "v_bfi_b32": Vector("u", "uuu", "(a & b) | ((a ^ M) & c)"),
    "v_bfrev_b32": Vector("u", "u", "reversed_bits(a)"),
    "v_alignbit_b32": Vector("u", "uuu", "((U64(a) << U64(32)) | U64(b)) >> U64(c & 31)"),
    "v_perm_b32": Vector("u", "uuu", "permuted(a, b, c)"),
    "v_bcnt_u32_b32": Vector("u", "uu", "ones(a) + b"),
    "v_mbcnt_lo_u32_b32": Vector("u", "uu", "ones(a & BELOW_LOW) + b"),
    "v_mbcnt_hi_u32_b32": Vector("u", "uu", "ones(a & BELOW_HIGH) + b"),
    "v_add_f32": Vector("f", "ff", "add"),
    "v_sub_f32": Vector("f", "ff", "subtract"),
    "v_mul_f32": Vector("f", "ff", "multiply"),
    "v_trunc_f32": Vector("f", "f", "trunc"),
    "v_floor_f32": Vector("f", "f", "floor"),
    "v_fma_f32": Vector("f", "fff", "fused(a, b, c)"),
    "v_fmac_f32": Vector("f", "ff", "fused(a, b, d)"),
    "v_fmamk_f32": Vector("f", "fff", "fused(a, b, c)"),
    "v_fmaak_f32": Vector("f", "fff", "fused(a, b, c)"),
    "v_mac_f32": Vector("f", "ff", "a * b + d"),
    "v_mad_f32": Vector("f", "fff", "a * b + c"),
    "v_madmk_f32": Vector("f", "fff", "a * b + c"),
    "v_madak_f32": Vector("f", "fff", "a * b + c"),
    "v_rcp_f32": Vector("f", "f", "w.reciprocal(a)"),
    "v_rcp_iflag_f32": Vector("f", "f", "w.reciprocal(a)"),
    "v_cvt_f32_u32": Vector("f", "u", "F32(a)"),
    "v_cvt_f32_i32": Vector("f", "i", "F32(a)"),
    "v_cvt_u32_f32": Vector("u", "f", "to_unsigned(a)"),
    "v_cvt_i32_f32": Vector("i", "f", "to_signed(a)"),
}

CARRY = {
    "v_add_co_u32": "wide_sum(a, b)",
    "v_addc_co_u32": "wide_sum(a, b) + carry",
    "v_sub_co_u32": "wide_difference(a, b)",
    "v_subb_co_u32": "wide_difference(a, b) - carry",
    "v_subrev_co_u32": "wide_difference(b, a)",
    "v_subbrev_co_u32": "wide_difference(b, a) - carry",
}
"""Sums and differences as int64, whose bit 32 is the carry or the borrow out."""

MULTIPLY_ADD = {"v_mad_u64_u32": "multiply_add", "v_mad_i64_i32": "multiply_add_signed"}
"""32 x 32 + 64 bits, with the carry out."""

_COMPARE = {
    "lt": "less(a, b)",
    "le": "less_equal(a, b)",
    "eq": "equal(a, b)",
    "ne": "not_equal(a, b)",
    "gt": "greater(a, b)",
    "ge": "greater_equal(a, b)",
}
COMPARE: dict[str, tuple[str, str]] = {
    f"v_cmp_{name}_{kind}": (letter, value)
    for name, value in _COMPARE.items()
    for kind, letter in (("i32", "i"), ("u32", "u"), ("i64", "j"), ("u64", "q"))
}
"""The letter of both sources, and the condition."""


# ------------------------------------------------------------ parts of the expressions


def U64(value: Any) -> Any:
    """As unsigned 64 bits."""
    return value.astype(np.uint64) if isinstance(value, np.ndarray) else np.uint64(value)


def I64(value: Any) -> Any:
    """As signed 64 bits."""
    return value.astype(np.int64) if isinstance(value, np.ndarray) else np.int64(value)


def F32(value: Array) -> Array:
    """Rounded to the nearest in single precision."""
    return value.astype(np.float32)


def wide(a: Array, b: Array) -> Array:
    """The 64-bit product of unsigned 32-bit numbers."""
    return U64(a) * U64(b)  # type: ignore[no-any-return]


def wide_signed(a: Array, b: Array) -> Array:
    """The 64-bit product of signed 32-bit numbers."""
    return I64(a) * I64(b)  # type: ignore[no-any-return]


def wide_sum(a: Array, b: Array) -> Array:
    """The 33-bit sum of unsigned 32-bit numbers."""
    return I64(a) + I64(b)  # type: ignore[no-any-return]


def wide_difference(a: Array, b: Array) -> Array:
    """The 33-bit difference of unsigned 32-bit numbers; negative with a borrow."""
    return I64(a) - I64(b)  # type: ignore[no-any-return]


def low24(a: Array) -> Array:
    """The low 24 bits, signed."""
    return (a << 8) >> 8


def multiply_add(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """a * b + c of unsigned numbers, cut to 64 bits, and whether it was cut."""
    c = U64(c)
    result = wide(a, b) + c
    return result, result < c


def multiply_add_signed(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """a * b + c of signed numbers, cut to 64 bits, and bit 64: whether the whole is negative."""
    product, c = U64(wide_signed(a, b)), U64(c)
    result = product + c
    return result, (((product ^ result) & (c ^ result)) ^ result) >> 63 != 0


def field(a: Array, offset: Any, width: Any) -> Array:
    """`width` bits from `offset` on."""
    return (a >> offset) & ((1 << U64(width)) - 1 if isinstance(width, int) else (U64(1) << U64(width)) - U64(1))  # type: ignore[no-any-return]


def field_signed(a: Array, offset: Any, width: Any) -> Array:
    """`width` bits from `offset` on, signed, as are those that would lie above the number; 0 for no width."""
    width = I64(width)
    got, sign = (I64(a) >> I64(offset)) & ((I64(1) << width) - I64(1)), I64(1) << (width - 1).clip(0)
    return ((got ^ sign) - sign) * (width > 0)  # type: ignore[no-any-return]


def reversed_bits(a: Array) -> Array:
    """The 32 bits from the other end."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        a = ((a >> shift) & mask) | ((a & mask) << shift)
    return a


def ones(a: Array) -> Array:
    """How many bits are set."""
    flat = np.ascontiguousarray(np.broadcast_to(a, LANES), np.uint32).view(np.uint8).reshape(-1, 4)
    return np.unpackbits(flat, axis=1).sum(axis=1, dtype=np.uint32)  # type: ignore[no-any-return]


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """v_perm: each byte of the result is picked by a byte of the selector; 0 to 3 of b, 4 to 7 of a."""
    source = np.empty((LANES, 8), np.uint8)
    source.view(np.uint32)[:, 0], source.view(np.uint32)[:, 1] = b, a
    pick = np.ascontiguousarray(np.broadcast_to(np.asarray(selector, np.uint32), LANES)).view(np.uint8).reshape(-1, 4)
    result = np.take_along_axis(source, (pick & 7).astype(np.intp), axis=1)
    sign = np.take_along_axis(source, np.array([[1, 3, 5, 7]])[[0] * LANES][:, (0, 1, 2, 3)], axis=1) >> 7
    signs = np.take_along_axis(sign, (pick & 3).astype(np.intp), axis=1) * np.uint8(255)
    result = np.where(pick >= 8, signs, result)
    result = np.where(pick == 12, np.uint8(0), result)
    result = np.where(pick > 12, np.uint8(255), result)
    return np.ascontiguousarray(result).view(np.uint32)[:, 0]


def fused(a: Any, b: Any, c: Any) -> Array:
    """a * b + c, rounded once to single precision.

    The product is exact in double precision. The sum is rounded to odd there, and so once more without harm.
    """
    product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
    addend = np.asarray(c, np.float32).astype(np.float64)
    total = np.atleast_1d(product + addend)
    with np.errstate(invalid="ignore"):
        other = total - product
        lost = (product - (total - other)) + (addend - other)
    bits = total.view(np.int64)
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    return np.where(odd, bits + towards, bits).view(np.float64).astype(np.float32)


def to_unsigned(a: Array) -> Array:
    """Towards 0, held within the range; 0 for what is no number."""
    return np.nan_to_num(np.asarray(a, np.float64), nan=0.0).clip(0, 2**32 - 1).astype(np.uint32)


def to_signed(a: Array) -> Array:
    """Towards 0, held within the range; 0 for what is no number."""
    return np.nan_to_num(np.asarray(a, np.float64), nan=0.0).clip(-(2**31), 2**31 - 1).astype(np.int32)


BELOW_LOW = np.array([(1 << min(lane, 32)) - 1 for lane in range(LANES)], np.uint32)
BELOW_HIGH = np.array([(1 << max(lane - 32, 0)) - 1 for lane in range(LANES)], np.uint32)


@lru_cache(maxsize=65536)
def lanes(mask: int) -> Array:
    """The 64 bits of a mask as booleans."""
    got = np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little").view(bool)
    got.flags.writeable = False
    return got


def bits(condition: Any) -> int:
    """64 booleans as the bits of a mask; one for all."""
    if not isinstance(condition, np.ndarray) or condition.ndim == 0:
        return (1 << LANES) - 1 if condition else 0
    return int(np.packbits(condition, bitorder="little").view(np.uint64)[0])


# ------------------------------------------------------------ lanes that read others


def dpp(control: str, value: str) -> tuple[Array, Array]:
    """The lane that each lane reads, and whether there is such a lane. Raises KeyError for an unknown control."""
    row, at = _LANE & ~15, _LANE & 15
    everywhere = np.ones(LANES, bool)
    if control == "quad_perm":
        picks = np.array([int(digit) for digit in value.strip("[]").split(",")])
        return (_LANE & ~3) + picks[_LANE & 3], everywhere
    if control == "row_mirror":
        return row + 15 - at, everywhere
    if control == "row_half_mirror":
        return (_LANE & ~7) + 7 - (_LANE & 7), everywhere
    shift = int(value, 0)
    if control == "row_shl":
        return row + (at + shift) % 16, at + shift < 16
    if control == "row_shr":
        return row + (at - shift) % 16, at - shift >= 0
    if control == "row_ror":
        return row + (at - shift) % 16, everywhere
    if control == "row_newbcast":
        return row + shift, everywhere
    if control == "row_bcast":
        # The last lane of a row goes to the next row; the last of the lower half to the upper one.
        return (row - 1) % LANES if shift == 15 else np.full(LANES, 31), (16 if shift == 15 else 32) <= _LANE
    if control in ("wave_shl", "wave_shr", "wave_rol", "wave_ror"):
        source = _LANE + (shift if control.endswith("l") else -shift)
        return source % LANES, everywhere if "_ro" in control else (source >= 0) & (source < LANES)
    raise KeyError(control)


DPP_CONTROLS = (
    "quad_perm",
    "row_mirror",
    "row_half_mirror",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_newbcast",
    "row_bcast",
    "wave_shl",
    "wave_shr",
    "wave_rol",
    "wave_ror",
)


def dpp_writes(row_mask: int, bank_mask: int) -> Array:
    """The lanes that a DPP instruction may write: a bit a row of 16 lanes, a bit a bank of 4 within each row."""
    return ((row_mask >> (_LANE >> 4)) & (bank_mask >> (_LANE >> 2 & 3)) & 1).astype(bool)


def swizzle(pattern: str) -> Array:
    """The lane that each lane reads by ds_swizzle. Raises KeyError for an unknown pattern."""
    if not pattern.startswith("swizzle("):
        code = int(pattern, 0)
        if code >= 0x8100:
            raise KeyError(pattern)
        if code & 0x8000:
            return (_LANE & ~3) + np.array([code >> 2 * k & 3 for k in range(4)])[_LANE & 3]  # type: ignore[no-any-return]
        keep, put, flip = code & 31, code >> 5 & 31, code >> 10 & 31
        return (_LANE & 32) + (((_LANE & 31 & keep) | put) ^ flip)
    name, *values = [word.strip() for word in pattern[len("swizzle(") :].rstrip(")").split(",")]
    if name == "SWAP":
        return _LANE ^ int(values[0])
    if name == "REVERSE":
        return _LANE ^ (int(values[0]) - 1)
    if name == "QUAD_PERM":
        return (_LANE & ~3) + np.array([int(value) for value in values])[_LANE & 3]  # type: ignore[no-any-return]
    if name == "BROADCAST":
        return (_LANE & ~(int(values[0]) - 1)) + int(values[1])
    if name == "BITMASK_PERM":
        source = np.zeros(LANES, np.int64)
        for bit, letter in enumerate(reversed(values[0].strip('"'))):
            mine = _LANE >> bit & 1
            source |= {"0": 0 * mine, "1": 0 * mine + 1, "p": mine, "i": 1 - mine}[letter] << bit
        return (_LANE & 32) + source
    raise KeyError(pattern)


def sdwa_source(value: Any, select: str, signed: bool) -> Any:
    """The byte or word that an SDWA source selects, widened."""
    kind, _, index = select.partition("_")
    if kind == "DWORD":
        return value
    width = 8 if kind == "BYTE" else 16
    got = (value >> (int(index) * width)) & ((1 << width) - 1)
    sign = 1 << (width - 1)
    return (got ^ sign) - sign if signed else got


def sdwa_result(value: Array, before: Array, select: str, unused: str) -> Array:
    """An SDWA result put where it goes in the destination; the rest 0, the sign, or what was there."""
    kind, _, index = select.partition("_")
    if kind == "DWORD":
        return value
    width = 8 if kind == "BYTE" else 16
    shift, ones_ = int(index) * width, (1 << width) - 1
    put = (value & ones_) << shift
    if unused == "UNUSED_PRESERVE":
        result: Array = (before & ~np.uint32(ones_ << shift)) | put
        return result
    if unused == "UNUSED_SEXT":
        negative = (value >> (width - 1)) & 1
        sign: Array = negative * np.uint32((0xFFFFFFFF << (shift + width)) & 0xFFFFFFFF)
        return put | sign
    return put
