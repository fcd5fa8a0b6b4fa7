"""The Triton kernel and vLLM's `launch` and `build` around it. Needs torch and triton; imports only `spec`."""

if __name__ != "swa_decode_meta.kernel":
    raise ImportError("import this package as swa_decode_meta.kernel (install the project first: pip install -e .)")

from .binding import Group
from .build import build
from .deferred import deferred_step
from .launch import launch, launch_step
from .prepare import PreparedLaunch, prepare, prepare_step
from .shape import LaunchShape

__all__ = [
    "Group",
    "LaunchShape",
    "PreparedLaunch",
    "build",
    "deferred_step",
    "launch",
    "launch_step",
    "prepare",
    "prepare_step",
]
