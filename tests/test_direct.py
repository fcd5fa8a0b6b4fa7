"""Kernels started directly: that what is handed to them is what Triton would, without a GPU and with a made-up kernel.

The kernel here takes what a compiled one takes, addresses and numbers by position, and gives it to the interpreter.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from swa_decode_meta.kernel import LaunchShape, launch, launch_step, prepare, prepare_step  # noqa: E402
from swa_decode_meta.kernel.decode_meta import decode_meta_kernel  # noqa: E402
from swa_decode_meta.kernel.scratch import Scratch  # noqa: E402
from swa_decode_meta.spec import OUTPUTS, ArgumentError  # noqa: E402
from tests.arguments import arguments_for  # noqa: E402
from tests.batches import served  # noqa: E402
from tests.test_look_back import same, with_holes  # noqa: E402
from tests.test_step import arguments_of, step_of  # noqa: E402

pytestmark = pytest.mark.kernel

MODULES = {name: importlib.import_module(f"swa_decode_meta.kernel.{name}") for name in ("direct", "launch", "prepare")}
LOOK_BACK = LaunchShape(4, 4, 4, 64, 1024, 1, look_back=True)
KIND = {"slot_mapping": torch.int64, "is_valid": torch.bool, "state": torch.int64, "groups": torch.int64}


class Launcher:
    """Stands in for Triton's launcher over a function of C: hands its arguments on, and more on either side."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.calls = 0
        self.run = run
        self.launch = self.take

    def __call__(self, *given: Any) -> None:
        self.calls += 1
        self.launch("first", *given[:9], "scratch", *given[9:])

    def take(self, first: str, *given: Any) -> None:
        assert (first, given[9]) == ("first", "scratch")
        self.run(*given[:9], *given[10:])


class Packed(Launcher):
    """One that hands the kernel's arguments on as one."""

    def __call__(self, *given: Any) -> None:
        self.calls += 1
        self.launch("first", *given[:9], "scratch", given[9:])

    def take(self, first: str, *given: Any) -> None:
        super().take(first, *given[:10], *given[10])


class Measuring(Launcher):
    """One that has to know the grid."""

    def __call__(self, *given: Any) -> None:
        assert given[0] * given[1] > 0
        super().__call__(*given)


class Made:
    """Stands in for Triton's kernel: `warmup` gives what starts it directly."""

    def __init__(self, launcher: type[Launcher] | None = None) -> None:
        self.launcher = launcher
        self.starts = 0
        self.compiled = 0

    def warmup(self, *, grid: tuple[int, int], num_warps: int, **arguments: Any) -> Any:
        """What a compiled kernel has, as far as it is used."""
        self.compiled += 1
        names = list(arguments)

        def run(*given: Any) -> None:
            x, y, z, stream, function, packed, metadata, enter, leave, *values = given
            assert (z, stream, function, packed, metadata, enter, leave) == (
                1,
                0,
                "function",
                "packed",
                None,
                None,
                None,
            )
            assert len(values) == len(names)
            self.starts += 1
            rebuilt = {name: self.tensor(name, value) for name, value in zip(names, values, strict=True)}
            decode_meta_kernel[(x, y)](**rebuilt, num_warps=num_warps)

        launcher = self.launcher(run) if self.launcher else run
        return SimpleNamespace(run=launcher, function="function", packed_metadata="packed", _init_handles=lambda: None)

    @staticmethod
    def tensor(name: str, value: Any) -> Any:
        """A kernel's pointer argument over an address; anything else as it is."""
        if name not in decode_meta_kernel.arg_names[:13]:
            return value
        assert type(value) is int
        dtype = KIND.get(name, torch.int32)
        if value == 0:
            return torch.empty(0, dtype=dtype)
        there = (ctypes.c_uint8 * 8).from_address(value)  # the interpreter asks for the address alone
        return torch.frombuffer(there, dtype=torch.uint8).view(dtype)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, backend: str, request: pytest.FixtureRequest) -> Made:
    if backend == "gpu":
        pytest.skip("on a GPU the kernel itself is started directly; tests/test_gpu.py holds it to the same")
    kernel = Made(getattr(request, "param", None))
    for name in MODULES:
        monkeypatch.setattr(MODULES[name], "ON_CPU", False)
    monkeypatch.setattr(MODULES["direct"], "decode_meta_kernel", kernel)
    monkeypatch.setattr(MODULES["direct"].triton, "__version__", "3.6.0")
    active = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(MODULES["direct"], "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(MODULES["launch"], "_calls", {})
    return kernel


def spoil(arguments: dict[str, Any]) -> None:
    for name in OUTPUTS:
        arguments[name].fill_(True if name == "is_valid" else 77)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """How often `launch` binds, and so checks, its arguments."""
    calls: list[int] = []
    bind = getattr(MODULES["launch"], name)

    def binds(*arguments: Any) -> Any:
        calls.append(1)
        return bind(*arguments)

    monkeypatch.setattr(MODULES["launch"], name, binds)
    return calls


LAUNCHERS = pytest.mark.parametrize("made", [None, Launcher, Packed, Measuring], indirect=True)


@LAUNCHERS
@pytest.mark.parametrize("shape", [None, LOOK_BACK], ids=["own", "look_back"])
def test_the_same_launch_again_is_not_checked_again(
    shape: LaunchShape | None, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    binds = counted(monkeypatch, "bind_group")
    batch = with_holes(9, False)
    arguments = arguments_for(batch, "cpu")
    for _ in range(3):
        launch(**arguments, shape=shape)
        same(batch, arguments)
        spoil(arguments)
    assert (len(binds), made.starts, made.compiled) == (1, 3, 1)
    fewer = replace(batch, num_tokens=5)
    launch(**{**arguments, "num_tokens": 5}, shape=shape)
    same(fewer, arguments)
    assert len(binds) == 2


def test_the_same_step_again_is_not_checked_again(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    binds = counted(monkeypatch, "bind_step")
    batches = step_of(9, False)
    each, arguments = arguments_of(batches, "cpu")
    for _ in range(3):
        launch_step(**arguments)
        for batch, one in zip(batches, each, strict=True):
            same(batch, one)
            spoil(one)
    assert (len(binds), made.starts) == (1, 3)


@pytest.mark.parametrize(
    ("name", "value"), [("num_tokens", True), ("num_tokens", 1.0), ("noncausal", 0), ("block_size", 64.0), ("shape", 3)]
)
def test_what_equals_a_launch_made_before_and_is_none_is_refused(name: str, value: Any, made: Made) -> None:
    """1, True and 1.0 are one key of a dictionary."""
    arguments = arguments_for(served(1), "cpu")
    launch(**arguments)
    with pytest.raises(ArgumentError) as caught:
        launch(**{**arguments, name: value})
    assert caught.value.argument == name


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("lens", lambda tensor: tensor[:2]),
        ("indices", lambda tensor: tensor.view(-1)[:6].view(3, 2).t()),
        ("seq_lens", lambda tensor: tensor.view(torch.float32)),
        ("token_to_req", lambda tensor: tensor.to_sparse()),
    ],
)
def test_another_view_of_the_same_memory_is_checked_anew(name: str, view: Callable[[Any], Any], made: Made) -> None:
    arguments = arguments_for(served(3), "cpu")
    launch(**arguments)
    with pytest.raises(ArgumentError) as caught:
        launch(**{**arguments, name: view(arguments[name])})
    assert caught.value.argument == name


def test_a_state_that_was_forgotten_is_not_used_again(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches of other row counts share a state; the new one that the first makes is the second's as well."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    scratch = Scratch(limit=1)
    monkeypatch.setattr(MODULES["launch"], "_scratch", scratch)
    batch = with_holes(9, False)
    arguments, other = arguments_for(batch, "cpu"), arguments_for(with_holes(7, False), "cpu")
    counts = (9, 5)
    for count in counts:
        launch(**{**arguments, "num_tokens": count}, shape=LOOK_BACK)
    launch(**other, shape=LOOK_BACK)
    for count in counts:
        launch(**{**arguments, "num_tokens": count}, shape=LOOK_BACK)
        [state] = scratch._kept.values()
        used = {call.counts[0]: call for call in MODULES["launch"]._calls.values()}[count]
        assert state.data_ptr() in used.kernel.arguments
        same(replace(batch, num_tokens=count), arguments)


def test_buffers_are_not_kept(made: Made) -> None:
    """What is remembered of a launch must not hold a server's memory."""
    arguments = arguments_for(served(3), "cpu")
    launch(**arguments)
    storage = arguments["indices"].untyped_storage()
    before = storage._use_count() if hasattr(storage, "_use_count") else None
    [call] = MODULES["launch"]._calls.values()
    parts = (*call.kernel.arguments, *call.grid, *call.counts, *call.scratch.values())
    assert not any(isinstance(part, torch.Tensor) for part in parts)
    assert before is None or before <= 3


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_a_prepared_launch_compiles_all_first_and_serves_every_count(noncausal: bool, made: Made) -> None:
    whole = with_holes(72, noncausal)
    arguments = arguments_for(whole, "cpu")
    del arguments["num_tokens"]
    prepared = prepare(**arguments, max_num_tokens=72)
    assert prepared.direct
    compiled = made.compiled
    assert compiled == 3  # up to 32, 64 and 512 rows
    for rows in (0, 5, 40, 72):
        spoil(arguments)
        prepared(rows, whole.num_reqs)
        same(replace(whole, num_tokens=rows), arguments)
    assert (made.compiled, made.starts) == (compiled, 4)


@LAUNCHERS
def test_a_prepared_step_serves_every_count(made: Made) -> None:
    batches = step_of(12, True)
    each, arguments = arguments_of(batches, "cpu")
    del arguments["num_tokens"]
    prepared = prepare_step(**arguments, max_num_tokens=12)
    for rows in (12, 3):
        prepared(rows)
        for batch, one in zip(batches, each, strict=True):
            same(replace(batch, num_tokens=rows), one)
    assert made.starts == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(MODULES["direct"].triton, "__version__", "9.0.0"),
        lambda patch: patch.setattr(torch.cuda, "current_device", lambda: 1),
        lambda patch: patch.setattr(MODULES["direct"].knobs.runtime, "launch_enter_hook", print),
    ],
    ids=["unknown triton", "another device", "a hook"],
)
def test_where_it_may_not_start_directly_triton_starts_it(
    change: Callable[[pytest.MonkeyPatch], None], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = with_holes(9, False)
    arguments = arguments_for(batch, "cpu")
    count = arguments.pop("num_tokens")
    prepared = prepare(**arguments, max_num_tokens=count)
    launch(**arguments, num_tokens=count)
    starts = made.starts
    change(monkeypatch)
    for build in (prepared, lambda rows: launch(**arguments, num_tokens=rows)):
        spoil(arguments)
        build(count)
        same(batch, arguments)
    # What is known of an unknown Triton is known when the kernel is compiled, and these were before.
    later = prepare(**arguments, max_num_tokens=count)
    spoil(arguments)
    later(count)
    same(batch, arguments)
    assert (made.starts == starts) == (MODULES["direct"].triton.__version__ == "3.6.0")


def test_only_what_adds_to_its_arguments_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher itself is called once for each kind, to see what it adds; one that reads the grid, every time."""
    seen: list[Any] = []
    for kind, skipped in ((Launcher, True), (Packed, True), (Measuring, False)):
        launcher = kind(lambda *given: seen.append(given))
        active = SimpleNamespace(get_current_stream=lambda device: device + 7)
        monkeypatch.setattr(MODULES["direct"], "driver", SimpleNamespace(active=active))
        start = MODULES["direct"]._starter(launcher, tuple("fpmel"), (1, 2), (3,), 0)
        before = launcher.calls
        start(5, 8, 70, 9)
        assert (launcher.calls == before) == skipped
        assert seen.pop() == (5, 8, 1, 7, *"fpmel", 1, 2, 70, 9, 3)
        assert not seen


@pytest.mark.parametrize("name", ["nvidia", "amd"])
def test_triton_s_own_launchers_are_skipped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What their function of C is handed is the same with and without them, in the Triton that is installed."""
    backend = importlib.import_module(f"triton.backends.{name}.driver")
    kind = backend.CudaLauncher if name == "nvidia" else backend.HIPLauncher
    active = SimpleNamespace(get_current_stream=lambda device: 7)
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setattr(backend, "triton", SimpleNamespace(runtime=runtime), raising=False)
    monkeypatch.setattr(MODULES["direct"], "driver", SimpleNamespace(active=active))
    launcher = kind.__new__(kind)
    seen: list[Any] = []
    for attribute in ("global_scratch", "profile_scratch"):
        setattr(launcher, f"{attribute}_size", 0)
        setattr(launcher, f"{attribute}_align", 1)
    for attribute in ("launch_cooperative_grid", "launch_pdl", "num_ctas", "warp_size", "gsan_enabled"):
        setattr(launcher, attribute, 0)
    launcher.arg_annotations, launcher.kernel_signature = [], b""
    launcher.launch = lambda *given: seen.append(given)
    ahead, before, after = ("function", b"packed", None, None, None), (1, 2), (3, True)
    start = MODULES["direct"]._starter(launcher, ahead, before, after, 0)
    launcher(5, 8, 1, 7, *ahead, *before, 70, 9, *after)
    monkeypatch.setattr(kind, "__call__", None)
    start(5, 8, 70, 9)
    assert len(seen) == 2
    assert seen[0] == seen[1]
