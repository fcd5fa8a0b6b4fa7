"""Set up before torch is imported: which GPU a worker of pytest-xdist has, and how the kernel runs in this process."""

from __future__ import annotations

import os
import sys
from importlib import metadata, util

import pytest
from hypothesis import HealthCheck, settings

from swa_decode_meta.fuzz.devices import pin

# One GPU for each xdist worker, before anything imports torch.
pin(os.environ.get("PYTEST_XDIST_WORKER", ""))


def _backend() -> str:
    """ "gpu", "interpreter", or "none" where torch or triton is missing."""
    if util.find_spec("torch") is None or util.find_spec("triton") is None:
        return "none"
    import torch

    return "gpu" if torch.cuda.is_available() else "interpreter"


# Batches take as long as they take, and what a test draws must not depend on what an earlier run left behind.
settings.register_profile("project", deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.load_profile("project")

BACKEND = _backend()
if BACKEND == "interpreter":
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-backend",
        choices=["gpu", "interpreter"],
        help="fail, instead of skipping, what needs this backend where it is absent",
    )

    parser.addoption(
        "--all-faults",
        action="store_true",
        help="also run what takes minutes: every planted fault, every recorded batch on an emulated GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    required = config.getoption("--require-backend")
    if required == "gpu" and BACKEND != "gpu":
        raise pytest.UsageError("--require-backend gpu: no GPU that torch can see")
    if required == "interpreter" and BACKEND == "none":
        raise pytest.UsageError("--require-backend interpreter: torch or triton is not installed")


def pytest_report_header(config: pytest.Config) -> str:
    versions = []
    for name in ("torch", "triton"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    device = ""
    if BACKEND == "gpu":
        import torch

        device = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"backend: {BACKEND}{device}; {', '.join(versions)}; python {sys.version.split()[0]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and BACKEND != "gpu":
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU; the backend here is {BACKEND}"))
        if item.get_closest_marker("kernel") and BACKEND == "none":
            item.add_marker(pytest.mark.skip(reason="needs torch and triton, which are not installed"))


@pytest.fixture(scope="session")
def backend() -> str:
    """The best backend here."""
    return BACKEND
