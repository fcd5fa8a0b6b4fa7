"""What scalar instructions do: integers of Python over SGPRs. Source: AMD's "MI300" ISA reference, chapter 5."""

from __future__ import annotations

from typing import NamedTuple


class Scalar(NamedTuple):
    """destination, sources: a letter each: u, i (32 bits, unsigned, signed), q, j (64 bits), "" for no destination.

    value: of the result before it is cut to the destination's bits, an expression in a, b and c. scc: of the flag, in
    those, `t` (the result before it is cut), `d` (after) and `scc` (the flag before); "" where it stays.
    """

    destination: str
    sources: str
    value: str
    scc: str = ""


_LOGIC = {
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
    "andn2": "a & ~b",
    "orn2": "a | ~b",
    "nand": "~(a & b)",
    "nor": "~(a | b)",
    "xnor": "~(a ^ b)",
}
_COMPARE = {"eq": "a == b", "lg": "a != b", "gt": "a > b", "ge": "a >= b", "lt": "a < b", "le": "a <= b"}

SCALAR: dict[str, Scalar] = {
    "s_mov_b32": Scalar("u", "u", "a"),
    "s_mov_b64": Scalar("q", "q", "a"),
    "s_movk_i32": Scalar("i", "i", "a"),
    "s_cmov_b32": Scalar("u", "uu", "b if scc else a"),
    "s_not_b32": Scalar("u", "u", "~a", "d != 0"),
    "s_not_b64": Scalar("q", "q", "~a", "d != 0"),
    "s_add_u32": Scalar("u", "uu", "a + b", "t >> 32"),
    "s_addc_u32": Scalar("u", "uu", "a + b + scc", "t >> 32"),
    "s_sub_u32": Scalar("u", "uu", "a - b", "t < 0"),
    "s_subb_u32": Scalar("u", "uu", "a - b - scc", "t < 0"),
    "s_add_i32": Scalar("i", "ii", "a + b", "not -2147483648 <= t < 2147483648"),
    "s_sub_i32": Scalar("i", "ii", "a - b", "not -2147483648 <= t < 2147483648"),
    "s_addk_i32": Scalar("i", "ii", "a + b", "not -2147483648 <= t < 2147483648"),
    "s_mulk_i32": Scalar("i", "ii", "a * b"),
    "s_mul_i32": Scalar("i", "ii", "a * b"),
    "s_mul_hi_u32": Scalar("u", "uu", "(a * b) >> 32"),
    "s_mul_hi_i32": Scalar("i", "ii", "(a * b) >> 32"),
    "s_min_i32": Scalar("i", "ii", "min(a, b)", "a < b"),
    "s_min_u32": Scalar("u", "uu", "min(a, b)", "a < b"),
    "s_max_i32": Scalar("i", "ii", "max(a, b)", "a >= b"),
    "s_max_u32": Scalar("u", "uu", "max(a, b)", "a >= b"),
    "s_abs_i32": Scalar("i", "i", "abs(a)", "d != 0"),
    "s_sext_i32_i8": Scalar("i", "u", "((a & 0xff) ^ 0x80) - 0x80"),
    "s_sext_i32_i16": Scalar("i", "u", "((a & 0xffff) ^ 0x8000) - 0x8000"),
    "s_lshl_b32": Scalar("u", "uu", "a << (b & 31)", "d != 0"),
    "s_lshl_b64": Scalar("q", "qu", "a << (b & 63)", "d != 0"),
    "s_lshr_b32": Scalar("u", "uu", "a >> (b & 31)", "d != 0"),
    "s_lshr_b64": Scalar("q", "qu", "a >> (b & 63)", "d != 0"),
    "s_ashr_i32": Scalar("i", "iu", "a >> (b & 31)", "d != 0"),
    "s_ashr_i64": Scalar("j", "ju", "a >> (b & 63)", "d != 0"),
    "s_bfm_b32": Scalar("u", "uu", "((1 << (a & 31)) - 1) << (b & 31)"),
    "s_bfm_b64": Scalar("q", "uu", "((1 << (a & 63)) - 1) << (b & 63)"),
    "s_bfe_u32": Scalar("u", "uu", "field(a, b & 31, b >> 16 & 0x7f, 32, False)", "d != 0"),
    "s_bfe_i32": Scalar("i", "uu", "field(a, b & 31, b >> 16 & 0x7f, 32, True)", "d != 0"),
    "s_bfe_u64": Scalar("q", "qu", "field(a, b & 63, b >> 16 & 0x7f, 64, False)", "d != 0"),
    "s_bfe_i64": Scalar("j", "qu", "field(a, b & 63, b >> 16 & 0x7f, 64, True)", "d != 0"),
    "s_brev_b32": Scalar("u", "u", 'int(f"{a:032b}"[::-1], 2)'),
    "s_brev_b64": Scalar("q", "q", 'int(f"{a:064b}"[::-1], 2)'),
    "s_bcnt1_i32_b32": Scalar("i", "u", 'bin(a).count("1")', "d != 0"),
    "s_bcnt1_i32_b64": Scalar("i", "q", 'bin(a).count("1")', "d != 0"),
    "s_ff1_i32_b32": Scalar("i", "u", "(a & -a).bit_length() - 1"),
    "s_ff1_i32_b64": Scalar("i", "q", "(a & -a).bit_length() - 1"),
    "s_flbit_i32_b32": Scalar("i", "u", "32 - a.bit_length() if a else -1"),
    "s_flbit_i32_b64": Scalar("i", "q", "64 - a.bit_length() if a else -1"),
    "s_bitset0_b32": Scalar("u", "uu", "b & ~(1 << (a & 31))"),
    "s_bitset1_b32": Scalar("u", "uu", "b | 1 << (a & 31)"),
    "s_bitcmp0_b32": Scalar("", "uu", "0", "not a >> (b & 31) & 1"),
    "s_bitcmp1_b32": Scalar("", "uu", "0", "a >> (b & 31) & 1"),
    "s_cselect_b32": Scalar("u", "uu", "a if scc else b"),
    "s_cselect_b64": Scalar("q", "qq", "a if scc else b"),
    "s_pack_ll_b32_b16": Scalar("u", "uu", "a & 0xffff | b << 16"),
    "s_cmp_eq_u64": Scalar("", "qq", "0", "a == b"),
    "s_cmp_lg_u64": Scalar("", "qq", "0", "a != b"),
}
for _name, _value in _LOGIC.items():
    SCALAR[f"s_{_name}_b32"] = Scalar("u", "uu", _value, "d != 0")
    SCALAR[f"s_{_name}_b64"] = Scalar("q", "qq", _value, "d != 0")
for _bits in (1, 2, 3, 4):
    SCALAR[f"s_lshl{_bits}_add_u32"] = Scalar("u", "uu", f"(a << {_bits}) + b", "t >> 32 != 0")
for _name, _value in _COMPARE.items():
    for _type, _letter in (("i32", "i"), ("u32", "u")):
        SCALAR[f"s_cmp_{_name}_{_type}"] = Scalar("", 2 * _letter, "0", _value)
        SCALAR[f"s_cmpk_{_name}_{_type}"] = Scalar("", 2 * _letter, "0", _value)

READS_DESTINATION = {"s_addk_i32", "s_mulk_i32", "s_cmov_b32", "s_bitset0_b32", "s_bitset1_b32"}
"""Whose destination is a source too: the last for s_bitset0 and s_bitset1, for the others the first."""

SAVE_EXEC = {
    "s_and_saveexec_b64": "a & e",
    "s_or_saveexec_b64": "a | e",
    "s_xor_saveexec_b64": "a ^ e",
    "s_andn2_saveexec_b64": "a & ~e",
    "s_orn2_saveexec_b64": "a | ~e",
    "s_andn1_saveexec_b64": "~a & e",
    "s_orn1_saveexec_b64": "~a | e",
}
"""What EXEC becomes, in the source `a` and what it was, `e`, which goes to the destination."""

BRANCHES = {
    "s_branch": "True",
    "s_cbranch_scc0": "not s[SCC]",
    "s_cbranch_scc1": "s[SCC]",
    "s_cbranch_vccz": "not (s[106] | s[107])",
    "s_cbranch_vccnz": "s[106] | s[107]",
    "s_cbranch_execz": "not w.exec",
    "s_cbranch_execnz": "w.exec",
}

NOTHING = {
    "s_nop",
    "s_waitcnt",
    "s_waitcnt_depctr",
    "s_sleep",
    "s_setprio",
    "s_clause",
    "s_inst_prefetch",
    "s_icache_inv",
    "s_dcache_wb",
    "s_dcache_inv",
    "buffer_inv",
    "buffer_wbl2",
    "buffer_wbinvl1",
    "buffer_wbinvl1_vol",
    "s_code_end",
}
"""Instructions about time and caches, which the emulator does not have."""


def field(value: int, offset: int, width: int, bits: int, signed: bool) -> int:
    """The bit field of s_bfe: `width` bits from `offset` on, of a value of `bits` bits."""
    width = min(width, bits - offset)
    if width <= 0:
        return 0
    got = value >> offset & ((1 << width) - 1)
    return got - (1 << width) if signed and got >> (width - 1) else got
