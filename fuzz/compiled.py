"""What AMD's compiler makes of every variant of the kernel: registers, spills, memory, code. Needs no GPU."""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Mapping
from typing import Any

from ..spec import TENSORS, ArgumentError, BackendError, brief, check_scalar
from .figures import markdown
from .target import EMULATED

# Widths of causal and of DSpark rows, with pages a row and a page size that comes to about as many.
_GEOMETRIES = ((128, 3, 64), (128, 6, 25), (192, 3, 64), (192, 6, 25))
_TYPES = {"int64": "*i64", "int32": "*i32", "bool": "*i1"}
_OTHER_TYPES = {"state": "*i64", "groups": "*i64", "block_shift": "i32"}  # what else is no int64 scalar

# Where the assembly says it: in the metadata that ends it, or in the comments behind the code.
_NUMBERS = {
    "vgprs": r"; NumVgprs: (\d+)",
    "agprs": r"\.agpr_count:\s+(\d+)",
    "sgprs": r"\.sgpr_count:\s+(\d+)",
    "vgpr_spills": r"\.vgpr_spill_count:\s+(\d+)",
    "sgpr_spills": r"\.sgpr_spill_count:\s+(\d+)",
    "scratch": r"\.private_segment_fixed_size:\s+(\d+)",
    "code": r"; codeLenInByte = (\d+)",
    "occupancy": r"; Occupancy: (\d+)",
}
_COLUMNS = {
    "vgprs": "VGPRs",
    "agprs": "AGPRs",
    "sgprs": "SGPRs",
    "vgpr_spills": "VGPR spills",
    "sgpr_spills": "SGPR spills",
    "lds": "LDS",
    "scratch": "scratch",
    "code": "code",
    "occupancy": "occupancy",
}


def figures(arch: str, every: int = 1) -> dict[str, Any]:
    """Compile every variant of the kernel, or one in `every`, for `arch`, one of EMULATED.

    Returns plain values: "arch", "versions", and "variants", each with "constants" (its compile-time parameters and
    num_warps), "service" (whether DeepSeek-V4.1-Flash meets it: page sizes that are powers of two, up to 4 pages a
    row), registers a lane ("vgprs", "agprs") and a wave ("sgprs"), "vgpr_spills" and "sgpr_spills" in registers, "lds"
    a program, "scratch" a lane and "code" in bytes, and "occupancy" in waves a SIMD, as far as registers limit it.
    Raises ArgumentError, and BackendError where kernels are interpreted.
    """
    if arch not in EMULATED:
        raise ArgumentError("arch", f"one of {', '.join(EMULATED)}", brief(arch))
    check_scalar("every", every, 1)
    import triton

    from ..kernel.arguments import INTERPRETED

    if INTERPRETED:
        raise BackendError("the kernel is interpreted in this process; to compile it, leave TRITON_INTERPRET unset")
    return {
        "arch": arch,
        "versions": {"python": platform.python_version(), "triton": triton.__version__},
        "variants": [
            {"constants": constants, "service": service, **_compiled(arch, constants)}
            for constants, service in _variants()[::every]
        ],
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures as a Markdown table, one line a variant, and a last line that says how those in service fare."""
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    variants = figures["variants"]
    lines = [
        ("yes" if variant["service"] else "", _name(variant["constants"]), *(variant[key] for key in _COLUMNS))
        for variant in variants
    ]
    served, bad = sum(variant["service"] for variant in variants), len(spilling(figures))
    return "\n".join(
        [
            f"{figures['arch']}, {versions}. LDS (a program), scratch (a lane), code: bytes. Occupancy: waves a SIMD.",
            "Variants: rows x columns of a tile, how earlier rows are counted and rows x pages at a time, warps.",
            "",
            markdown(("service", "variant", *_COLUMNS.values()), lines, words=2),
            "",
            f"{len(lines)} variants, {served} of them in service: {bad or 'none'} of those spilling or using scratch",
        ]
    )


def spilling(figures: Mapping[str, Any]) -> list[str]:
    """The variants that service uses and that spill registers or use scratch, in words."""
    return [
        _name(variant["constants"])
        for variant in figures["variants"]
        if variant["service"] and (variant["vgpr_spills"] or variant["sgpr_spills"] or variant["scratch"])
    ]


def _variants() -> list[tuple[dict[str, int | bool], bool]]:
    """The compile-time parameters of every variant that a GPU can meet, and whether service does."""
    from ..kernel.shape import gpu_shapes

    found: dict[tuple[tuple[str, int | bool], ...], bool] = {}
    switches = itertools.product((False, True), repeat=3)
    for (width, pages, block_size), (noncausal, pow2, step) in itertools.product(_GEOMETRIES, switches):
        least = 1
        for most, shape in gpu_shapes(width, pages, groups=8 if step else 1, wave=64):
            for rows in (least, most):  # with many pages, only the least may be few enough to count at once
                constants = shape.constants(rows, width, pages, block_size, noncausal, pow2, step, amd=True)
                key = (*constants.items(), ("num_warps", shape.num_warps))
                found[key] = found.get(key, False) or (pow2 and pages <= 4)
            least = most + 1
    return [(dict(key), service) for key, service in found.items()]


def _compiled(arch: str, constants: Mapping[str, int | bool]) -> dict[str, int]:
    from triton.compiler import ASTSource

    from ..kernel.decode_meta import decode_meta_kernel
    from .cdna.triton_kernels import compile_kernel

    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    signature = {}
    for name in decode_meta_kernel.arg_names:
        kind = _TYPES[TENSORS[name].dtype] if name in TENSORS else _OTHER_TYPES.get(name, "i64")
        signature[name] = "constexpr" if name in constants else kind
    source = ASTSource(fn=decode_meta_kernel, signature=signature, constexprs=constants)
    assembly, shared, _ = compile_kernel(source, arch, {"num_warps": num_warps})
    numbers = {key: int(re.findall(pattern, assembly)[-1]) for key, pattern in _NUMBERS.items()}
    return {**numbers, "lds": shared}


def _name(constants: Mapping[str, int | bool]) -> str:
    """A variant in words: what it is for, and how it is cut."""
    form = "DSpark" if constants["NONCAUSAL"] else "causal"
    launch = "step" if constants["STEP"] else "single"
    pages = ("few" if constants["FEW_PAGES"] else "many") + (" 2**n pages" if constants["POW2"] else " odd pages")
    how = "look-back" if constants["LOOK_BACK"] else "one count" if constants["ONE_COUNT"] else "counts"
    tile = f"{constants['ROWS']} x {constants['WIDTH_CHUNK']}"
    count = f"{constants['COUNT_ROWS']} x {constants['PAGE_CHUNK']}"
    return f"{form}, {launch}, {pages}, {tile}, {how} {count}, {constants['num_warps']} warps"
