"""What is under test: a function with the signature of vLLM's launch, or of launch_step, and its backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..spec import ArgumentError, brief, check_flag

EMULATED = ("gfx942", "gfx950", "gfx90a")
"""Backends that are GPUs of AMD's, emulated on the CPU."""
BACKENDS = ("gpu", "interpreter", *EMULATED)
KERNEL = "swa_decode_meta.kernel:launch"
NAMED = {
    "kernel": KERNEL,
    "step": "swa_decode_meta.kernel:launch_step",
    "prepared": "swa_decode_meta.fuzz.forms:prepared",
    "prepared_step": "swa_decode_meta.fuzz.forms:prepared_step",
    "replayed": "swa_decode_meta.fuzz.forms:replayed",
    "replayed_step": "swa_decode_meta.fuzz.forms:replayed_step",
    "forms": "swa_decode_meta.fuzz.forms:in_turn",
    "step_forms": "swa_decode_meta.fuzz.forms:in_turn_step",
    "unfused": "swa_decode_meta.kernel.unfused:launch",
    "vllm": "vllm.models.deepseek_v41.amd.ops.swa_decode_meta:launch",
    "vllm_ops": "swa_decode_meta.fuzz.vllm_ops:launch",
}
"""The project's own targets, and vLLM's, by short names."""
# The fields of kernel.LaunchShape, named here since this module must load without torch and triton.
SHAPE_FIELDS = ("rows_per_program", "count_rows", "page_chunk", "width_chunk", "tail_chunk", "num_warps", "look_back")


@dataclass(frozen=True)
class Target:
    """A function to test.

    name: as the user wrote it. module, function: where it lies. backend: one of BACKENDS, or "" for the best of "gpu"
    and "interpreter" present.
    """

    name: str
    module: str
    function: str
    backend: str = ""


def parse_target(text: str) -> Target:
    """One of NAMED or `package.module:function`, either with `@` and one of BACKENDS. Raises ArgumentError."""
    place, at, backend = text.partition("@")
    if at and backend not in BACKENDS:
        raise ArgumentError("target", f"a backend of {', '.join(BACKENDS)} after @", brief(text))
    module, _, function = NAMED.get(place, place).partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not function.isidentifier() or module.endswith(".py"):
        expected = f"{', '.join(NAMED)} or package.module:function (no path, no .py), with @ and a backend if wanted"
        raise ArgumentError("target", expected, brief(text))
    return Target(text, module, function, backend)


def check_shape(target: Mapping[str, Any]) -> None:
    """Check the `shape` of a case file's target, if it has one, before it reaches the kernel. Raises ArgumentError."""
    shape = target.get("shape")
    if shape is None:
        return
    if not isinstance(shape, dict):
        raise ArgumentError("target.shape", "an object", brief(shape))
    for key, value in shape.items():
        if key not in SHAPE_FIELDS:
            raise ArgumentError("target.shape", f"fields among {', '.join(SHAPE_FIELDS)}", brief(key))
        if key == "look_back":
            check_flag("target.shape.look_back", value)
            continue
        most = 2**15 if key == "tail_chunk" else 2**10  # any two make a tile that Triton takes
        if type(value) is not int or not 1 <= value <= most or value & (value - 1):
            raise ArgumentError(f"target.shape.{key}", f"a power of two up to {most}", brief(value))
