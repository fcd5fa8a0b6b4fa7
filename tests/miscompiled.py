"""Faults planted in what the compiler made of the kernel: what the fuzzer must find on an emulated GPU.

Each is an edit of the assembly, made after compilation and before the emulator reads it; the kernel's source stays as
it is. From the repository's root any of them is a target:
`swa-decode-meta fuzz --target tests.miscompiled:indptr_one_too_far@gfx942`. UNSEEN lists edits that are faults on
hardware and that the emulator cannot show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KERNEL = "decode_meta_kernel"

_S, _V = r"(s\d+)", r"(v\d+)"
_SS, _VV = r"(s\[\d+:\d+\])", r"(v\[\d+:\d+\])"
_GAP = r"\n(?:.*\n)*?"  # any lines between, as few as can be


@dataclass(frozen=True)
class Edit:
    """Replace one match of `old` in the kernel's code by `new`.

    The code is what `code` gives: one instruction or label a line, with single spaces. A match is of whole lines.
    occurrence: which of the matches, from 0, or from -1 for the last. always: whether every variant of the kernel has
    a match, so that one without is an error; otherwise such a variant stays as it is.
    """

    old: str
    new: str | Callable[[re.Match[str]], str]
    occurrence: int = 0
    always: bool = True

    def __call__(self, assembly: str) -> str:
        """The assembly with the fault. Raises ValueError where it should apply and does not."""
        lines = assembly.splitlines()
        places, text = code(assembly)
        found = list(re.finditer(f"^(?:{self.old})$", text, re.MULTILINE))
        if not -len(found) <= self.occurrence < len(found):
            if self.always:
                raise ValueError(f"not in this code: match {self.occurrence} of {self.old!r}")
            return assembly
        match = found[self.occurrence]
        first = text.count("\n", 0, match.start())
        before = match[0].split("\n")
        after = (self.new(match) if callable(self.new) else match.expand(self.new)).split("\n")
        assert len(before) == len(after), "an edit keeps its lines, so that the rest keeps its place"
        for place, old, new in zip(places[first:], before, after, strict=False):
            if old != new:
                lines[place] = f"\t{new}"
        return "\n".join(lines) + "\n"


def code(assembly: str) -> tuple[list[int], str]:
    """The kernel's instructions and labels, a line each, and the lines of the assembly, from 0, on which they stand."""
    places, texts, inside = [], [], False
    for number, line in enumerate(assembly.splitlines()):
        text = " ".join(line.partition(";")[0].split())
        inside = (inside or text == f"{KERNEL}:") and not text.startswith((".Lfunc_end", ".section"))
        if inside and text and not re.match(r"\.(?!L)|\.Ltmp", text):
            places.append(number)
            texts.append(text)
    return places, "\n".join(texts)


def _other_half(match: re.Match[str]) -> str:
    """The neighbour of the register that an even and an odd one make a pair with."""
    return f"{match[1]}v_readfirstlane_b32 {match[3]}, v{int(match[2]) ^ 1}"


FAULTS = {
    # Masks.
    "tail_one_too_far": Edit(rf"v_cmp_gt_i64_e(32|64) (.+), {_SS}, {_VV}", r"v_cmp_ge_i64_e\1 \2, \3, \4"),
    "holes_are_pages": Edit(rf"v_cmp_lt_i32_e32 vcc, -1, {_V}", r"v_cmp_le_i32_e32 vcc, -1, \1"),
    "mask_dropped": Edit(rf"s_and_b64 (vcc|s\[\d+:\d+\]), vcc, {_SS}", r"s_mov_b64 \1, \2", -1),
    # Lanes.
    "quad_not_permuted": Edit(r"(.*) quad_perm:\[1,0,3,2\] (.*)", r"\1 quad_perm:[0,1,2,3] \2", always=False),
    "row_shifted_by_two": Edit(r"(.*) row_shr:1 (.*)", r"\1 row_shr:2 \2", always=False),
    "last_row_left_out": Edit(r"(.*) row_bcast:31 row_mask:0xf (.*)", r"\1 row_bcast:31 row_mask:0x7 \2", always=False),
    "own_lane_for_another": Edit(rf"ds_bpermute_b32 {_V}, {_V}, {_V}", r"v_mov_b32_e32 \1, \3", 2, always=False),
    "lane_of_another_row": Edit(rf"v_readlane_b32 {_S}, {_V}, 63", r"v_readlane_b32 \1, \2, 31", always=False),
    "first_lane_of_the_neighbour": Edit(
        rf"(global_load_dword v(\d+), .*\n(?:s_waitcnt .*\n)?)v_readfirstlane_b32 {_S}, v\2", _other_half, always=False
    ),
    # Offsets.
    "indptr_one_too_far": Edit(r"(global_store_dword .*) offset:4", r"\1 offset:8"),
    "start_for_end_of_request": Edit(r"(global_load_dword .*) offset:4", r"\1"),
    "page_of_another_line": Edit(r"(global_load_dword .*) offset:8", r"\1 offset:72", always=False),
    # Exec.
    "half_of_the_lanes_stay_off": Edit(
        rf"((?:global_store_byte .*){_GAP})s_or_b64 exec, exec, s\[(\d+):\d+\]",
        r"\1s_or_b32 exec_lo, exec_lo, s\2",
        always=False,
    ),
    "lanes_stay_on": Edit(
        rf"s_and_saveexec_b64 {_SS}, .*(\n(?:(?!s_and_savee|s_or_b64 exec).*\n)*global_store_dword {_VV}, .*, off.*)",
        r"s_mov_b64 \1, exec\2",
        -1,
    ),
    "lanes_stay_off_after_the_scan": Edit(
        rf"((?:ds_write_b32 .*){_GAP})s_or_b64 exec, exec, {_SS}", r"\1s_nop 0", always=False
    ),
    # Registers.
    "subtraction_reversed": Edit(rf"v_sub_u32_e32 {_V}, {_V}, {_V}", r"v_subrev_u32_e32 \1, \2, \3"),
    "choice_reversed": Edit(rf"v_cndmask_b32_e32 {_V}, 0, {_V}, vcc", r"v_cndmask_b32_e64 \1, \2, 0, vcc"),
    "low_half_for_high": Edit(rf"v_ashrrev_i32_e32 {_V}, 31, {_V}", r"v_mov_b32_e32 \1, \2"),
    # Arithmetic.
    "borrow_lost": Edit(
        rf"(s_load_dwordx\d+ s\[(\d+):\d+\], s\[0:1\], 0x78{_GAP}s_sub_u32 .*, s\2{_GAP})s_subb_u32 (.*)",
        r"\1s_sub_u32 \3",
        always=False,
    ),
    "shift_by_three": Edit(rf"s_lshl_b64 {_SS}, {_SS}, 2", r"s_lshl_b64 \1, \2, 3", always=False),
    "greater_for_less": Edit(r"v_min_i32_e32 (.*)", r"v_max_i32_e32 \1"),
    # Memory.
    "another_argument": Edit(rf"s_load_dwordx(\d) {_SS}, s\[0:1\], 0xb0", r"s_load_dwordx\1 \2, s[0:1], 0xb8"),
    "wide_store": Edit(r"global_store_byte (.*)", r"global_store_short \1"),
    "narrow_store": Edit(r"global_store_dword (.*)", r"global_store_short \1", -1),
    "load_becomes_store": Edit(rf"global_load_dword {_V}, (\S+), (.*)", r"global_store_dword \2, \1, \3"),
    # Order.
    "barrier_missing": Edit(rf"((?:ds_write_b32 .*){_GAP})s_barrier", r"\1s_nop 0", always=False),
    "barrier_missing_before_the_scan": Edit("s_barrier", "s_nop 0", always=False),
}

# Faults on hardware, of which the emulator says nothing: it ends each instruction before it begins the next.
UNSEEN = {
    "wait_missing": Edit(r"s_waitcnt (?:vmcnt\(0\)|lgkmcnt\(0\))", "s_nop 0", -1),
}


def build(name: str) -> Callable[..., Any]:
    """The kernel's launch, with this fault in what it compiles to. Raises KeyError, and ValueError on any other GPU."""
    from swa_decode_meta.fuzz.cdna import triton_kernels

    edit = {**FAULTS, **UNSEEN}[name]
    if triton_kernels.installed is None:
        raise ValueError("assembly is edited on an emulated GPU only: a target with @gfx942")
    from swa_decode_meta.kernel import launch

    triton_kernels.installed.edit = edit
    target: Callable[..., Any] = launch
    return target


def __getattr__(name: str) -> Callable[..., Any]:
    if name in FAULTS or name in UNSEEN:
        return build(name)
    raise AttributeError(name)
