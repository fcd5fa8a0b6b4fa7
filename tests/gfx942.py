"""Compiles the kernel for gfx942, which needs no GPU, and prints as JSON what the compiler made of each variant.

Run with TRITON_INTERPRET unset: `python -m tests.gfx942 [EVERY]`, for every variant or one in so many.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from typing import Any

from swa_decode_meta.kernel.decode_meta import decode_meta_kernel
from swa_decode_meta.kernel.shape import LaunchShape, gpu_shape
from swa_decode_meta.spec import TENSORS

# Rows, width and pages a row on either side of every bound at which the launcher takes another shape.
SIZES = tuple(itertools.product((1, 32, 33, 64, 65, 512, 513, 1025), (128, 192), (3, 6)))
_TYPES = {"int64": "*i64", "int32": "*i32", "bool": "*i1"}


def variants() -> dict[str, dict[str, Any]]:
    """The compile-time parameters of every variant that a GPU in service meets, by a name that says which."""
    found = {}
    for (rows, width, pages), noncausal, pow2 in itertools.product(SIZES, (False, True), (False, True)):
        shape = gpu_shape(rows, width, pages)
        constants = parameters(shape, noncausal, pow2, rows, width, pages)
        name = ",".join(f"{key}={int(value)}" for key, value in constants.items())
        found[name] = constants
    return found


def parameters(
    shape: LaunchShape, noncausal: bool, pow2: bool, rows: int, width: int, pages: int
) -> dict[str, int | bool]:
    """The kernel's compile-time parameters, and num_warps."""
    return {
        "NONCAUSAL": noncausal,
        "POW2": pow2,
        "ROWS": shape.rows_per_program,
        "COUNT_ROWS": shape.count_rows,
        "PAGE_CHUNK": shape.page_chunk,
        "WIDTH_CHUNK": shape.width_chunk,
        "TAIL_CHUNK": shape.tail_chunk,
        "ONE_COUNT": rows <= shape.count_rows,
        "ONE_PAGE_CHUNK": pages <= shape.page_chunk,
        "ONE_WIDTH_CHUNK": width <= shape.width_chunk,
        "num_warps": shape.num_warps,
    }


def compiled(constants: dict[str, int | bool]) -> str:
    """The gfx942 assembly of a variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    signature = {}
    for name in decode_meta_kernel.arg_names:
        kind = _TYPES[TENSORS[name].dtype] if name in TENSORS else "i64"
        signature[name] = "constexpr" if name in constants else kind
    source = ASTSource(fn=decode_meta_kernel, signature=signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options={"num_warps": num_warps})
    return str(kernel.asm["amdgcn"])


def figures(assembly: str) -> dict[str, int]:
    """Registers and memory that a kernel takes, from the metadata that ends its assembly."""
    keys = ("vgpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    return {key: int(re.findall(rf"\.{key}:\s+(\d+)", assembly)[-1]) for key in keys}


def main(every: int) -> None:
    """Compile every so-manieth variant and print what it takes."""
    chosen = itertools.islice(variants().items(), 0, None, every)
    print(json.dumps({name: figures(compiled(constants)) for name, constants in chosen}, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
