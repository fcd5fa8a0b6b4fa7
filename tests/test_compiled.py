"""The kernel compiled for gfx942, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel

EVERY = 7  # of the variants; prime, so that every choice is met


def test_every_shape_compiles_for_gfx942_without_spills() -> None:
    """Triton decides between compiling and interpreting when it is imported: this takes a fresh process."""
    version = tuple(int(part) for part in metadata.version("triton").split(".")[:2])
    if version < (3, 5):
        pytest.skip(f"triton {version[0]}.{version[1]} needs ROCm's ld.lld to compile for gfx942")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gfx942", str(EVERY)],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 12
    for variant, figures in found.items():
        assert figures["vgpr_spill_count"] == 0, variant
        assert figures["private_segment_fixed_size"] == 0, variant
