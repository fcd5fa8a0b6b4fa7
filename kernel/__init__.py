"""The Triton kernel and vLLM's `launch` around it. Needs torch and triton; imports only `spec`."""

if __name__ != "swa_decode_meta.kernel":
    raise ImportError("import this package as swa_decode_meta.kernel (install the project first: pip install -e .)")

from .launch import launch
from .shape import LaunchShape

__all__ = ["LaunchShape", "launch"]
