"""How fast the kernel is on this GPU: its forms side by side with the unfused build and with an empty kernel.

GPU time is that of CUDA graphs of many launches, which go round several sets of inputs and outputs, so that no launch
finds its own in a cache. What such a graph writes is compared with the oracle before it is timed. The rounds of all
forms of a size alternate, so that all meet the same machine.
"""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, repeat
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
import triton

from ..kernel import Group, launch, launch_step, prepare, prepare_step, unfused
from ..kernel.arguments import INTERPRETED
from ..kernel.binding import AMD, WAVE
from ..kernel.shape import gpu_shapes
from ..oracle import vectorised
from ..spec import OUTPUTS, OWN, SHARED, TENSORS, ArgumentError, BackendError, Batch, check_scalar, printable
from .bench import WINDOW, serving, spread, width_of
from .figures import FIRST_LAUNCH
from .runner import HarnessError
from .target import Target

ROWS = (1, 4, 8, 24, 32, 64, 256, 384, 1024, 4096, 16384)
STEP_ROWS = (1, 8, 32, 64, 384, 1024, 4096)
"""Of ROWS, those that the eight groups of a step are built for."""

_PAGES = {64: ROWS, 128: (1, 32, 384, 4096, 16384)}  # page sizes, and the rows they are measured at
_CAPACITY = 16384  # max_num_batched_tokens: what a server's buffers hold
_LAUNCHES = 48  # builds in a graph
_JUNK = -7  # no output has it
_HOST_ROWS, _HOST_CALLS = 32, 500
_FORMS = {"causal": False, "DSpark": True}
_Call = Callable[[], object]
_Functions = Mapping[str, Callable[..., object]]


@triton.jit
def empty_kernel(anything):  # type: ignore[no-untyped-def]
    """Does nothing: what any launch costs."""


def run_kernel(
    rounds: int = 15, rows: Sequence[int] = ROWS, also: Mapping[str, Callable[..., object]] = MappingProxyType({})
) -> dict[str, Any]:
    """Measure the kernel on the current GPU; minutes. also: functions with the signature of vLLM's launch, by name.

    rows: up to 16384 each. The 8 groups of a step are built for those of STEP_ROWS, pages of 128 for a few.

    Returns plain values: "versions", "rounds", and
    - "gpu": for each size "form" ("causal" or "DSpark"), "width", "page", "groups", "rows", "requests", "sets" (of
      buffers), "launches" (of a graph) and "forms": by name min, median and max of "us" (GPU time of a build, of all
      groups) and "ratio" (by name of another form the median of the rounds' ratios to it);
    - "host": "rows", "calls" and "forms", whose "us" is a call from Python without a graph;
    - "warm_up": for each form, seconds of the first launch ("launch_s") and of a prepare for 16384 rows ("prepare_s"),
      each in a fresh process with nothing compiled, and how many "kernels" serve all row counts.
    Raises BackendError without a GPU, HarnessError when a form writes something wrong, naming it, or cannot be run.
    """
    need_gpu()
    check_scalar("rounds", rounds, 1)
    if not rows or not all(1 <= count <= _CAPACITY for count in rows):
        raise ArgumentError("rows", f"row counts from 1 to {_CAPACITY}", list(rows))
    warm_up = {name: _warm_up(name) for name in _FORMS}  # first, while no context of ours is on the GPU
    sizes = [
        _Size(count, page, noncausal, groups)
        for groups in (1, 8)
        for noncausal in _FORMS.values()
        for page, measured in _PAGES.items()
        for count in rows
        if page == 64 or (groups == 1 and count in measured)
        if groups == 1 or count in STEP_ROWS
    ]
    return {
        "versions": _versions(),
        "rounds": rounds,
        "gpu": [_on_gpu(size, rounds, also) for size in sizes],
        "host": _from_python(rounds, also),
        "warm_up": warm_up,
    }


def need_gpu() -> None:
    """Raises BackendError where the kernel cannot run on a GPU in this process."""
    if not torch.cuda.is_available():
        raise BackendError(f"no GPU that torch {torch.__version__} can see; the kernel is measured on one")
    if INTERPRETED:
        raise BackendError("the kernel is interpreted in this process; to measure it, leave TRITON_INTERPRET unset")


def load(target: Target) -> Callable[..., object]:
    """The function that a target names, in this process. Raises ArgumentError when it cannot be loaded."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # it may be in a module of the user's working directory
    try:
        function: Callable[..., object] = getattr(importlib.import_module(target.module), target.function)
    except (Exception, SystemExit) as error:
        words = printable(str(error)).strip().splitlines() or [""]
        raise ArgumentError("also", "a function that loads", f"{target.name}: {words[-1][:300]}") from None
    if not callable(function):
        raise ArgumentError("also", "a function that loads", f"{target.name}, which is not callable")
    try:
        inspect.signature(function).bind(*range(15))
    except TypeError:
        raise ArgumentError("also", "a function that takes launch's 15 arguments", target.name) from None
    except ValueError:  # not a Python function
        pass
    return function


# ------------------------------------------------------------ what is built


@dataclass(frozen=True)
class _Size:
    rows: int
    page: int
    noncausal: bool
    groups: int

    def __str__(self) -> str:
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        return f"{self.form}, {groups}, pages of {self.page}, {self.rows} rows"

    @property
    def form(self) -> str:
        return "DSpark" if self.noncausal else "causal"

    @property
    def sets(self) -> int:
        return 4 if self.rows < 4096 else 2

    def batches(self, seed: int) -> list[Batch]:
        """A batch for each group: tables and slots of their own, the rest shared."""
        tokens = 1 if self.rows <= 64 else 6
        first = serving(self.rows, tokens, self.page, self.noncausal, seed=seed * self.groups)
        batches = [first]
        for index in range(1, self.groups):
            other = serving(self.rows, tokens, self.page, self.noncausal, seed=seed * self.groups + index)
            batches.append(replace(first, block_table=other.block_table, slot_mapping=other.slot_mapping))
        return batches


class _Set:
    """The buffers of all groups of a step on the GPU, as a server has them, and what a build of them writes."""

    def __init__(self, size: _Size, seed: int) -> None:
        batches = size.batches(seed)
        self.rows, self.noncausal = size.rows, size.noncausal
        self.width, self.requests = batches[0].width, batches[0].num_reqs
        self.shared = {name: _on_device(batches[0], name) for name in SHARED}
        self.groups = [
            Group(
                **{name: _output(batch, name) if name in OUTPUTS else _on_device(batch, name) for name in OWN},
                block_size=size.page,
            )
            for batch in batches
        ]
        self.expected = [_expected(batch) for batch in batches]

    def arguments(self, index: int, rows: int) -> tuple[Any, ...]:
        """Those of `launch` for a group, and those of `prepare`."""
        group = self.groups[index]
        tensors = {**group.tensors(), **self.shared}
        return (*(tensors[name] for name in TENSORS), rows, WINDOW, group.block_size, self.noncausal)

    def step_arguments(self, rows: int) -> tuple[Any, ...]:
        """Those of `launch_step`, and those of `prepare_step`."""
        return (self.groups, *(self.shared[name] for name in SHARED), rows, WINDOW, self.noncausal)

    def spoil(self, groups: int) -> None:
        """Overwrite the outputs of the first groups with what no build writes there."""
        for group, expected in zip(self.groups[:groups], self.expected, strict=False):
            for name in OUTPUTS:
                if name != "is_valid":
                    getattr(group, name).fill_(_JUNK)
            torch.logical_not(expected["is_valid"], out=group.is_valid[: self.rows])

    def wrong(self, groups: int) -> str | None:
        """The first output of the first groups that is not what the oracle says, or None."""
        for group, expected in zip(self.groups[:groups], self.expected, strict=False):
            for name, wanted in expected.items():
                if not torch.equal(getattr(group, name)[: len(wanted)].reshape(wanted.shape), wanted):
                    return name
        return None


def _on_device(batch: Batch, name: str) -> torch.Tensor:
    """An input; one that has an entry a row, with room for all rows that a server may have."""
    given = torch.from_numpy(getattr(batch, name).copy())
    if name not in ("slot_mapping", "token_to_req"):
        return given.cuda()
    buffer = torch.zeros(_CAPACITY, dtype=given.dtype, device="cuda")
    buffer[: batch.num_tokens] = given.cuda()
    return buffer


def _output(batch: Batch, name: str) -> torch.Tensor:
    """The buffer of an output, for all rows that a server may have."""
    shape = {"indices": (_CAPACITY, 1, batch.width), "ragged": (_CAPACITY * batch.width,), "indptr": (_CAPACITY + 1,)}
    return torch.zeros(shape.get(name, (_CAPACITY,)), dtype=getattr(torch, TENSORS[name].dtype), device="cuda")


def _expected(batch: Batch) -> dict[str, torch.Tensor]:
    """What a build writes, on the GPU; lens with its tail."""
    result = vectorised.decode_meta(batch).arrays()
    expected = {name: torch.from_numpy(array.copy()).cuda() for name, array in result.items()}
    lens = torch.zeros(_CAPACITY, dtype=torch.int32, device="cuda")
    lens[: batch.num_tokens] = expected["lens"]
    return {**expected, "lens": lens}


@dataclass(frozen=True)
class _Form:
    """A way to build: a call for each set, and how many of the set's groups that builds; 0 for the floor."""

    calls: Sequence[_Call]
    groups: int


def _floor() -> _Call:
    return partial(empty_kernel[(1,)], torch.zeros(1, dtype=torch.int32, device="cuda"))


def _forms_of_group(sets: Sequence[_Set], also: _Functions) -> dict[str, _Form]:
    """What builds the first group of each set."""
    functions: _Functions = {"unfused": unfused.launch, "launch": launch, **also}
    forms = {
        name: _Form([partial(function, *one.arguments(0, one.rows)) for one in sets], 1)
        for name, function in functions.items()
    }
    forms["prepared"] = _Form([partial(prepare(*one.arguments(0, _CAPACITY)), one.rows) for one in sets], 1)
    return forms


def _forms_of_step(sets: Sequence[_Set], also: _Functions) -> dict[str, _Form]:
    """What builds all groups of each set."""
    functions: _Functions = {
        "8 unfused": unfused.launch,
        "8 launches": launch,
        **{f"8 {name}": function for name, function in also.items()},
    }
    forms = {name: _Form([_each_group(function, one) for one in sets], 8) for name, function in functions.items()}
    forms["launch_step"] = _Form([partial(launch_step, *one.step_arguments(one.rows)) for one in sets], 8)
    forms["prepared step"] = _Form([partial(prepare_step(*one.step_arguments(_CAPACITY)), one.rows) for one in sets], 8)
    return forms


def _each_group(function: Callable[..., object], one: _Set) -> _Call:
    calls = [partial(function, *one.arguments(index, one.rows)) for index in range(len(one.groups))]

    def run() -> None:
        for call in calls:
            call()

    return run


# ------------------------------------------------------------ how it is timed


def _on_gpu(size: _Size, rounds: int, also: _Functions) -> dict[str, Any]:
    sets = [_Set(size, seed) for seed in range(size.sets)]
    forms = {"empty": _Form([_floor()], 0)}
    if size.groups == 1:
        forms |= _forms_of_group(sets, also)
        to = ["empty", "unfused"]
    else:
        forms |= {"prepared": _forms_of_group(sets, {})["prepared"], **_forms_of_step(sets, also)}
        to = ["empty", "prepared", "8 unfused"]
    graphs = {name: _graph(f"{name}, {size}", form) for name, form in forms.items()}
    for name, form in forms.items():
        _check(f"{name}, {size}", graphs[name].replay, form, sets)
    clocks = {name: partial(_replay_us, graph) for name, graph in graphs.items()}
    measured = _measure(clocks, rounds, to)
    return {
        "form": size.form,
        "width": sets[0].width,
        "page": size.page,
        "groups": size.groups,
        "rows": size.rows,
        "requests": sets[0].requests,
        "sets": len(sets),
        "launches": _LAUNCHES,
        "forms": measured,
    }


def _from_python(rounds: int, also: _Functions) -> dict[str, Any]:
    """Calls from Python without a graph, as they come, on one set of buffers."""
    size = _Size(_HOST_ROWS, 64, noncausal=False, groups=8)
    sets = [_Set(size, 0)]
    forms = {**_forms_of_group(sets, also), **_forms_of_step(sets, {})}
    for name in ("8 unfused", "8 launches"):
        del forms[name]
    for name, form in forms.items():
        with _blamed(f"{name}, {size}, from Python"):
            form.calls[0]()
            torch.cuda.synchronize()
        _check(f"{name}, {size}, from Python", form.calls[0], form, sets)
    one = torch.zeros(1, dtype=torch.int32, device="cuda")
    calls: dict[str, Iterable[_Call]] = {
        "torch.add(out=)": repeat(partial(torch.add, one, one, out=torch.zeros_like(one))),
        "empty": repeat(_floor()),
        FIRST_LAUNCH: _first_launches(sets[0]),
        **{name: repeat(form.calls[0]) for name, form in forms.items()},
    }
    clocks = {name: partial(_call_us, iter(each)) for name, each in calls.items()}
    measured = _measure(clocks, rounds, ["torch.add(out=)", FIRST_LAUNCH, "launch"])
    return {"rows": _HOST_ROWS, "calls": _HOST_CALLS, "forms": measured}


def _first_launches(one: _Set) -> Iterator[_Call]:
    """Launches of the first group, each on a view that was not seen before or long ago, so that all is checked anew."""
    slot_mapping, *others = one.arguments(0, one.rows)
    for less in cycle(range(_CAPACITY - one.rows)):
        yield partial(launch, slot_mapping[: _CAPACITY - less], *others)


def _measure(clocks: Mapping[str, Callable[[], float]], rounds: int, to: Sequence[str]) -> dict[str, Any]:
    """Read every clock in each round, each time beginning with another one; the first round does not count."""
    names = list(clocks)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            microseconds = clocks[name]()
            if number:
                times[name].append(microseconds)
    return {
        name: {
            "us": spread(mine),
            "ratio": {base: median(a / b for a, b in zip(mine, times[base], strict=True)) for base in to},
        }
        for name, mine in times.items()
    }


def _graph(what: str, form: _Form) -> torch.cuda.CUDAGraph:
    """A graph of _LAUNCHES builds, which go round the sets."""
    graph = torch.cuda.CUDAGraph()
    with _blamed(what):
        for call in form.calls:  # compiles, loads, and allocates what a capture may not
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for index in range(_LAUNCHES):
                form.calls[index % len(form.calls)]()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """GPU time of a build of the graph. The replay before keeps the GPU busy until the timed one is queued."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / _LAUNCHES


def _call_us(calls: Iterator[_Call]) -> float:
    """Time of a call: of the next _HOST_CALLS."""
    each = list(islice(calls, _HOST_CALLS))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in each:
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / _HOST_CALLS


def _check(what: str, run: _Call, form: _Form, sets: Sequence[_Set]) -> None:
    """Raise HarnessError unless `run` writes all outputs of the form's groups in every set."""
    for one in sets:
        one.spoil(form.groups)
    with _blamed(what):
        run()
        torch.cuda.synchronize()
    for one in sets:
        name = one.wrong(form.groups)
        if name is not None:
            raise HarnessError(f"{what}: {name} is not what the oracle says, so it is not timed")


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Say which form it was that could not be run."""
    try:
        yield
    except Exception as error:
        raise HarnessError(f"{what}: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------ warm-up, versions

# Imported and not run with -m, so that the module has one name.
_CHILD = "from swa_decode_meta.fuzz.bench_kernel import _cold_start; _cold_start()"


def _warm_up(form: str) -> dict[str, float | int]:
    """What a server waits for that has nothing compiled yet, and how many kernels it comes to hold."""
    return {
        "launch_s": _seconds("launch", form),
        "prepare_s": _seconds("prepare", form),
        "kernels": _kernels(_FORMS[form]),
    }


def _seconds(what: str, form: str) -> float:
    """How long `what` takes in a fresh process with an empty cache of compiled kernels."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, what, form],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        words = printable(done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
        raise HarnessError(f"the first {what} in a fresh process, {form}: {words[-1]}")
    return float(done.stdout.split()[-1])


def _cold_start() -> None:
    """In the fresh process: print the seconds that the first launch or prepare takes."""
    what, form = sys.argv[1:]
    one = _Set(_Size(_HOST_ROWS, 64, _FORMS[form], 1), 0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    if what == "launch":
        launch(*one.arguments(0, one.rows))
    else:
        prepare(*one.arguments(0, _CAPACITY))
    torch.cuda.synchronize()
    print(time.perf_counter() - start)


def _kernels(noncausal: bool) -> int:
    """How many kernels serve all row counts of a server, at either page size."""
    width = width_of(noncausal)
    kernels = set()
    for page in _PAGES:
        max_pages = (width + page - 2) // page + 1  # that a row can touch
        for most, shape in gpu_shapes(width, max_pages, wave=WAVE):
            rows = min(most, _CAPACITY)
            constants = shape.constants(rows, width, max_pages, page, noncausal, pow2=True, step=False, amd=AMD)
            kernels.add((*constants.items(), shape.num_warps))
            if most >= _CAPACITY:
                break
    return len(kernels)


def _versions() -> dict[str, str]:
    runtime = {"hip": torch.version.hip} if torch.version.hip else {"cuda": str(torch.version.cuda)}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **runtime,
        "device": torch.cuda.get_device_name(),
    }
