"""The vLLM plug-in, of entry point group vllm.general_plugins: puts `build` in the place of vLLM's own.

It edits nothing on disk: in each process of vLLM it replaces one function of a module, if the module and its functions
are what it knows, and says once what it did.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..spec import ArgumentError, SwaDecodeMetaError, brief
from .build import (
    SWITCH,
    VLLM,
    VllmMismatchError,
    build,
    on_gfx942,
    record_monokernel,
    switch,
    vllm,
    vllm_version,
)
from .deferred import deferred_step

DEFER = "SWA_DECODE_META_DEFER"
"""The environment variable that, as "1", has all builds of a step launch together. Off by default."""

_OPS = "vllm.models.deepseek_v41.amd.ops"
_MODULE = f"{_OPS}.swa_decode_meta"
_STEPS = "vllm.v1.worker.gpu.attn_utils"
_STEP = "build_attn_metadata"
_BUILD = ("builder", "common_prefix_len", "cam", "fast_build", "replay_start", "metadata_cls")

_log = logging.getLogger("vllm.swa_decode_meta")  # vLLM shows what is said under its own name


@functools.cache
def register() -> None:
    """What vLLM calls in each of its processes. Never raises: whatever is not as expected leaves vLLM as it is."""
    try:
        _log.info("swa-decode-meta: %s", _register())
    except (SwaDecodeMetaError, ImportError) as error:
        _log.warning("swa-decode-meta: vLLM's own SWA metadata build stays in place: %s", error)
    except Exception as error:
        _log.warning(
            "swa-decode-meta: vLLM's own SWA metadata build stays in place: %s: %s", type(error).__name__, error
        )


def _register() -> str:
    """Put `build` in place, or not; what was done, in words."""
    wanted = switch()
    if not (on_gfx942() if wanted is None else wanted):
        why = f"{SWITCH}=0" if wanted is False else f"no gfx942 here; {SWITCH}=1 uses it on any GPU"
        return f"vLLM's own SWA metadata build stays in place: {why}"
    if not vllm_version().startswith(f"{VLLM}."):
        raise VllmMismatchError(f"vllm: expected version {VLLM}, got {vllm_version()}")
    ops, module = vllm(_OPS), vllm(_MODULE)
    _check_parameters(module, "build", _BUILD)
    _check_parameters(ops, "record_monokernel", ("vllm_config",))
    defer = os.environ.get(DEFER, "")
    if defer not in ("", "0", "1"):
        raise ArgumentError(DEFER, "0 or 1", brief(defer))
    if defer == "1":
        _defer_steps()
    module.build = _or_theirs(module, module.build)
    ops.record_monokernel = _both(record_monokernel, ops.record_monokernel)
    together = ", those of a step together" if defer == "1" else ""
    return f"builds the SWA metadata of decode batches of vLLM {vllm_version()}{together}"


def _or_theirs(module: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`build`, until something is not as expected: from then on theirs."""

    @functools.wraps(build)
    def ours(*arguments: Any, **keywords: Any) -> Any:
        try:
            return build(*arguments, **keywords)
        except VllmMismatchError as error:
            _log.warning("swa-decode-meta: back to vLLM's own SWA metadata build: %s", error)
            module.build = theirs
            return theirs(*arguments, **keywords)

    return ours


def _both(mine: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def both(vllm_config: Any) -> None:
        theirs(vllm_config)
        mine(vllm_config)

    return both


def _defer_steps() -> None:
    """Have vLLM's function that builds the metadata of all groups of a step be a `deferred_step`."""
    theirs = vllm(_STEPS, _STEP)

    @functools.wraps(theirs)
    def whole_step(*arguments: Any, **keywords: Any) -> Any:
        with deferred_step():
            return theirs(*arguments, **keywords)

    for other in list(sys.modules.values()):  # some have it by its name already
        if isinstance(other, ModuleType) and vars(other).get(_STEP) is theirs:
            setattr(other, _STEP, whole_step)


def _check_parameters(module: Any, name: str, expected: tuple[str, ...]) -> None:
    try:
        found = tuple(inspect.signature(getattr(module, name)).parameters)
    except (AttributeError, TypeError, ValueError):
        found = ()
    if found != expected:
        got = ", ".join(found) or "no such function"
        raise VllmMismatchError(f"{module.__name__}.{name}: expected ({', '.join(expected)}), got {got}")
