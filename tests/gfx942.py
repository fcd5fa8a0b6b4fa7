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
from swa_decode_meta.kernel.shape import gpu_shape
from swa_decode_meta.spec import TENSORS

# Rows, width and pages a row on either side of every bound at which the launcher takes another shape.
SIZES = tuple(itertools.product((1, 33, 65, 513), (128, 192), (3, 6)))
_SCRATCH = {"state": "*i64", "groups": "*i64", "block_shift": "i32"}
_TYPES = {"int64": "*i64", "int32": "*i32", "bool": "*i1"}


def variants() -> dict[str, dict[str, Any]]:
    """The compile-time parameters of every variant that a GPU in service meets, by a name that says which."""
    found = {}
    switches = itertools.product((False, True), repeat=3)
    for (rows, width, pages), (noncausal, pow2, step) in itertools.product(SIZES, switches):
        shape = gpu_shape(rows, width, pages, wave=64)
        block_size = 64 if pages <= 4 else 25
        constants = shape.constants(rows, width, pages, block_size, noncausal, pow2, step)
        constants["num_warps"] = shape.num_warps
        name = ",".join(f"{key}={int(value)}" for key, value in constants.items())
        found[name] = constants
    return found


def compiled(constants: dict[str, int | bool]) -> str:
    """The gfx942 assembly of a variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    signature = {}
    for name in decode_meta_kernel.arg_names:
        kind = _TYPES[TENSORS[name].dtype] if name in TENSORS else _SCRATCH.get(name, "i64")
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
