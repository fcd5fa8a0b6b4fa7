"""What only a GPU can show: launches counted by the profiler, nothing compiled twice, graphs, streams, far strides."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton  # noqa: E402

from swa_decode_meta.kernel import launch, launch_step, prepare  # noqa: E402
from swa_decode_meta.kernel.decode_meta import decode_meta_kernel  # noqa: E402
from swa_decode_meta.kernel.launch import _scratch  # noqa: E402
from swa_decode_meta.kernel.shape import counting_shape  # noqa: E402
from swa_decode_meta.oracle import vectorised  # noqa: E402
from swa_decode_meta.spec import OUTPUTS, BackendError, Batch  # noqa: E402
from tests.arguments import arguments_for  # noqa: E402
from tests.batches import served  # noqa: E402
from tests.test_step import arguments_of, step_of  # noqa: E402

pytestmark = pytest.mark.gpu

# `swa_decode_meta.kernel.direct` may be found by import alone, as its neighbours `launch` and `prepare` must be.
direct_module = importlib.import_module("swa_decode_meta.kernel.direct")

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
@pytest.mark.parametrize("rows", [0, 1, 33, 384, 1025, 4096])
def test_a_build_is_one_kernel_and_nothing_else(rows: int, noncausal: bool) -> None:
    batch = served(rows, 1 if rows < 384 else 6, noncausal=noncausal)
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
    launch(**arguments_for(batch, "cuda"))  # compiles
    arguments = arguments_for(batch, "cuda")
    stream = torch.cuda.Stream()
    for _ in range(2):  # the second time these buffers are known
        for name in OUTPUTS:
            arguments[name].fill_(1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000_000)
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


@pytest.mark.parametrize("rows", [1, 64, 1025, 4096])
def test_the_same_inputs_give_the_same_bytes_every_time(rows: int) -> None:
    arguments = arguments_for(served(rows, 1 if rows < 384 else 6), "cuda")
    launch(**arguments)
    names = ("is_valid", "indices", "lens", "ragged", "indptr")
    first = {name: arguments[name].clone() for name in names}
    for _ in range(200):
        launch(**arguments)
    assert all(torch.equal(arguments[name], first[name]) for name in names)


# ------------------------------------------------------------------------- look-back, steps and prepared launches


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
@pytest.mark.parametrize("rows", [513, 4096, 16384])
def test_many_rows_from_offsets_of_other_programs(rows: int, noncausal: bool) -> None:
    """The state is clean after each launch, and so after replays too."""
    batches = [served(rows, 6, noncausal=noncausal, seed=seed) for seed in (0, 1)]
    arguments = arguments_for(batches[0], "cuda")
    launch(**arguments)
    check(batches[0], arguments)
    states = [kept for key, kept in _scratch._kept.items() if arguments["indptr"].data_ptr() in key]
    assert states
    assert not any(state.any() for state in states)
    graph = captured(lambda: launch(**arguments))
    for batch in (*batches, *batches):
        refill(arguments, batch)
        graph.replay()
        torch.cuda.synchronize()
        check(batch, arguments)
        assert not any(state.any() for state in states)


def test_a_capture_without_a_state_counts_instead() -> None:
    batch = served(2000, 6)
    arguments = arguments_for(batch, "cuda")
    warm = arguments_for(batch, "cuda")
    launch(**warm)
    launch(**warm, shape=counting_shape(128, 3))  # compiled, as a server's warm-up would have it
    captured(lambda: launch(**arguments)).replay()
    torch.cuda.synchronize()
    check(batch, arguments)


def refill(arguments: dict[str, Any], batch: Batch) -> None:
    """Put another batch into the same buffers, and junk into the outputs."""
    for name, array in batch.inputs().items():
        arguments[name].copy_(torch.from_numpy(array.copy()))
    for name in OUTPUTS:
        arguments[name].fill_(1)


def captured(run: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_a_prepared_launch_compiles_nothing_more_and_is_one_kernel(noncausal: bool) -> None:
    whole = served(2048, 6, noncausal=noncausal)
    arguments = arguments_for(whole, "cuda")
    del arguments["num_tokens"]
    prepared = prepare(**arguments, max_num_tokens=2048)
    assert prepared.direct
    before = compiled()
    for rows in (0, 1, 32, 33, 64, 65, 512, 513, 2048):
        batch = replace(whole, num_tokens=rows)
        for name in OUTPUTS:
            arguments[name].fill_(1)
        assert device_events(lambda rows=rows: prepared(rows)) == ["decode_meta_kernel"]
        check(batch, arguments)
        for name in OUTPUTS:
            arguments[name].fill_(1)
        captured(lambda rows=rows: prepared(rows)).replay()
        torch.cuda.synchronize()
        check(batch, arguments)
    assert compiled() == before


def test_a_prepared_launch_without_the_compiled_kernels_internals_writes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = served(700, 6)
    results = []
    for known in ((triton.__version__,), ()):
        monkeypatch.setattr(direct_module, "_KNOWN_TRITON", known)
        arguments = arguments_for(batch, "cuda")
        count = arguments.pop("num_tokens")
        prepared = prepare(**arguments, max_num_tokens=count)
        assert prepared.direct == bool(known)
        for rows in (40, 700):
            prepared(rows)
            check(replace(batch, num_tokens=rows), arguments)
        results.append([arguments[name].clone() for name in OUTPUTS])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_hook_hears_of_prepared_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's profiler is told of each launch."""
    heard: list[object] = []
    arguments = arguments_for(served(5), "cuda")
    prepared = prepare(**{name: value for name, value in arguments.items() if name != "num_tokens"}, max_num_tokens=5)
    hook = triton.knobs.runtime.launch_enter_hook
    if hasattr(hook, "add"):
        hook.add(heard.append)
    else:
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", heard.append)
    try:
        prepared(5)
    finally:
        if hasattr(hook, "remove"):
            hook.remove(heard.append)
    assert len(heard) == 1


@pytest.mark.parametrize("rows", [1, 384, 1025])
def test_a_step_of_eight_groups_is_one_kernel(rows: int) -> None:
    batches = step_of(rows, noncausal=False, groups=8)
    each, arguments = arguments_of(batches, "cuda")
    launch_step(**arguments)
    torch.cuda.synchronize()
    assert device_events(lambda: launch_step(**arguments)) == ["decode_meta_kernel"]
    graph = captured(lambda: launch_step(**arguments))
    for one in each:
        for name in OUTPUTS:
            one[name].fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    for batch, one in zip(batches, each, strict=True):
        check(batch, one)


def test_a_step_that_is_new_to_a_capture_is_refused() -> None:
    _, arguments = arguments_of(step_of(5, noncausal=False), "cuda")
    launch_step(**arguments)
    _, other = arguments_of(step_of(5, noncausal=False), "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(BackendError, match="call it once before"), torch.cuda.graph(graph):
        launch_step(**other)
