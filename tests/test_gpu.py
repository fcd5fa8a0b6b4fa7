"""What only a GPU can show: launches counted by the profiler, nothing compiled twice, graphs, streams, far strides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from swa_decode_meta.kernel import launch  # noqa: E402
from swa_decode_meta.kernel.decode_meta import decode_meta_kernel  # noqa: E402
from swa_decode_meta.oracle import vectorised  # noqa: E402
from swa_decode_meta.spec import Batch  # noqa: E402
from tests.arguments import arguments_for  # noqa: E402
from tests.batches import served  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]


def check(batch: Batch, arguments: dict[str, Any]) -> None:
    """The outputs among `arguments` are what the oracle says of `batch`."""
    for name, wanted in vectorised.decode_meta(batch).arrays().items():
        got = arguments[name]
        got = got.reshape(got.shape[0], batch.width)[: len(wanted)] if name == "indices" else got[: len(wanted)]
        assert np.array_equal(got.cpu().numpy(), wanted), name


def device_events(run: Any) -> list[str]:
    """Everything that the device did during `run()`: kernels, copies and fills."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
@pytest.mark.parametrize("rows", [0, 1, 33, 384, 1025])
def test_a_build_is_one_kernel_and_nothing_else(rows: int, noncausal: bool) -> None:
    batch = served(rows, noncausal=noncausal)
    arguments = arguments_for(batch, "cuda")
    launch(**arguments)
    torch.cuda.synchronize()
    assert device_events(lambda: launch(**arguments)) == ["decode_meta_kernel"]
    check(batch, arguments)


def compiled() -> int:
    """How many kernels Triton holds for this device."""
    [caches] = [caches for device, caches in decode_meta_kernel.device_caches.items()]
    return len(caches[0])


def test_nothing_is_compiled_twice_for_sizes_strides_and_alignments() -> None:
    """Triton's own specialisation, on arguments of 1, multiples of 16 and aligned pointers, would compile anew."""
    launch(**arguments_for(served(3), "cuda"))
    before = compiled()
    for rows in (1, 2, 15, 16, 17, 32):
        for offset in (0, 1):
            batch = served(rows)
            arguments = arguments_for(batch, "cuda")
            table = torch.zeros((rows, 2048 + 15 + offset), dtype=torch.int32, device="cuda")
            table[:, :2048].copy_(arguments["block_table"])
            lens = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
            arguments |= {"block_table": table[:, :2048], "lens": lens[offset : offset + rows]}
            launch(**arguments)
            check(batch, arguments)
    assert compiled() == before


FIRST_IN_CAPTURE = """
import torch
from swa_decode_meta.kernel import launch
from tests.arguments import arguments_for
from tests.batches import served
from tests.test_gpu import check

batch = served(24)
arguments = arguments_for(batch, "cuda")
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    launch(**arguments)
for name in ("is_valid", "indices", "lens", "ragged", "indptr"):
    arguments[name].zero_()
for seed in (1, 2):
    other = served(24, seed=seed)
    for name, array in other.inputs().items():
        arguments[name].copy_(torch.from_numpy(array.copy()))
    graph.replay()
    torch.cuda.synchronize()
    check(other, arguments)
"""


def test_the_very_first_launch_may_be_captured_in_a_graph() -> None:
    """In a fresh process, so that nothing is loaded; replays see the inputs as they then are."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_IN_CAPTURE], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_launch_is_on_the_current_stream() -> None:
    batch = served(64)
    arguments = arguments_for(batch, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        launch(**arguments)
    assert stream.query() is False
    torch.cuda.current_stream().wait_stream(stream)
    check(batch, arguments)


def test_the_launch_is_on_the_device_of_the_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    batch = served(64)
    arguments = arguments_for(batch, "cuda:1")
    launch(**arguments)
    check(batch, arguments)


@pytest.mark.parametrize("rows", [1, 64, 1025])
def test_the_same_inputs_give_the_same_bytes_every_time(rows: int) -> None:
    arguments = arguments_for(served(rows), "cuda")
    launch(**arguments)
    names = ("is_valid", "indices", "lens", "ragged", "indptr")
    first = {name: arguments[name].clone() for name in names}
    for _ in range(200):
        launch(**arguments)
    assert all(torch.equal(arguments[name], first[name]) for name in names)
