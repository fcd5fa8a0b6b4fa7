"""What is under test: a function with the signature of vLLM's launch, and the backend that it runs on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..spec import ArgumentError

BACKENDS = ("gpu", "interpreter")
KERNEL = "swa_decode_meta.kernel:launch"


@dataclass(frozen=True)
class Target:
    """A function to test.

    name: as the user wrote it. module, function: where it lies. backend: "gpu", "interpreter", or "" for the best
    one present. takes_shape: whether it is this project's launch, whose programs can be cut in other ways.
    """

    name: str
    module: str
    function: str
    backend: str = ""

    @property
    def takes_shape(self) -> bool:
        return f"{self.module}:{self.function}" == KERNEL


def parse_target(text: str) -> Target:
    """`kernel` or `package.module:function`, either with `@gpu` or `@interpreter`. Raises ArgumentError."""
    place, at, backend = text.partition("@")
    if at and backend not in BACKENDS:
        raise ArgumentError("target", f"a backend of {' or '.join(BACKENDS)} after @", repr(text))
    module, _, function = (KERNEL if place == "kernel" else place).partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not function.isidentifier():
        raise ArgumentError("target", "kernel or package.module:function, with @gpu or @interpreter if wanted", repr(text))
    return Target(text, module, function, backend)
