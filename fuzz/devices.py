"""Which GPUs there are, and giving each process one, before torch is imported. Imports neither torch nor a driver."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def visible_gpus(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """Names by which this process may ask for a GPU: what the environment allows, else all that the system lists."""
    for variable in _VISIBLE:
        if variable in environ:
            return [name.strip() for name in environ[variable].split(",") if name.strip()]
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    if nodes.is_dir():  # ROCm: a node with a gpu_id of 0 is a CPU
        ids = [path for path in nodes.glob("*/gpu_id") if path.read_text().strip() not in ("", "0")]
        return [str(i) for i in range(len(ids))]
    nvidia = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(i) for i in range(len(nvidia))]


def pin(worker: str, environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """Give the process of pytest-xdist worker "gwN" (or worker "N") one GPU; None where it keeps all.

    Workers share GPUs where there are more workers than GPUs. Nothing changes with one GPU or none.
    """
    number = re.fullmatch(r"(?:gw)?(\d+)", worker)
    gpus = visible_gpus(environ, root)
    if number is None or len(gpus) < 2:
        return None
    mine = gpus[int(number[1]) % len(gpus)]
    variable = next((name for name in _VISIBLE if name in environ), None)
    if variable is None:
        variable = "HIP_VISIBLE_DEVICES" if (root / "sys/class/kfd").is_dir() else "CUDA_VISIBLE_DEVICES"
    environ[variable] = mine
    return mine
