"""A fault of Triton's, in small: for AMD's GPUs a volatile load may become a plain one. Needs no GPU.

Run it as a script: for each kind of load it prints the instructions that it becomes. On gfx942 one that must not be
served from a cache says sc0 sc1.
"""

from __future__ import annotations

import re
import sys

import triton
import triton.language as tl
from triton.compiler import ASTSource

from swa_decode_meta.fuzz.cdna.triton_kernels import compile_kernel


@triton.jit
def waits(words, out, VOLATILE: tl.constexpr, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read until no word is 0, a few times at most."""
    i = tl.arange(0, 64)
    word = tl.load(words + i, volatile=VOLATILE, cache_modifier=CACHE)
    looks = 0
    while (tl.min(word, axis=0) == 0) & (looks < 9):
        word = tl.load(words + i, volatile=VOLATILE, cache_modifier=CACHE)
        looks += 1
    tl.store(out + i, word)


def loads(arch: str, volatile: bool, cache: str) -> list[str]:
    """The load instructions, without their registers."""
    signature = {"words": "*i64", "out": "*i64", "VOLATILE": "constexpr", "CACHE": "constexpr"}
    source = ASTSource(fn=waits, signature=signature, constexprs={"VOLATILE": volatile, "CACHE": cache})
    assembly, _, _ = compile_kernel(source, arch, {"num_warps": 1})
    found = re.findall(r"^\t((?:global|buffer)_load_\w+).*?((?: sc0| sc1| glc)*)$", assembly, re.MULTILINE)
    return sorted({name + modifiers for name, modifiers in found})


if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    for arch in sys.argv[1:] or ["gfx942"]:
        for volatile, cache in ((True, ""), (False, ".cv"), (True, ".cv")):
            print(arch, f"volatile={volatile}", f"cache_modifier={cache!r}", *loads(arch, volatile, cache), sep="  ")
