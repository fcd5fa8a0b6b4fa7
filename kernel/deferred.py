"""The deferred step: builds of one step that launch together, once all have said what they write.

A build inside a `deferred_step` gives its views back at once, and the launch comes when the step ends, however it
ends. Nothing inside may read what a build writes. Whatever cannot wait is launched at once, alone: a build outside a
step, and one while a graph is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..spec import OUTPUTS, OWN, SHARED, TENSORS, SwaDecodeMetaError
from .binding import Group
from .launch import launch, launch_step


@dataclass(frozen=True)
class _Build:
    """The arguments of a build that waits."""

    group: Group
    shared: Sequence[torch.Tensor]
    num_tokens: int
    window_size: int
    noncausal: bool
    stream: Any

    def launch(self) -> None:
        tensors = {**self.group.tensors(), **dict(zip(SHARED, self.shared, strict=True))}
        sizes = (self.num_tokens, self.window_size, self.group.block_size)
        arguments: list[Any] = [*(tensors[name] for name in TENSORS), *sizes, self.noncausal]
        launch(*arguments)

    def outputs(self) -> set[int]:
        """The addresses that it writes from."""
        return {getattr(self.group, name).data_ptr() for name in OUTPUTS if name in OWN}


class _Step:
    """The builds that wait, by what they must share to be launched together."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[_Build]] = {}

    def add(self, key: Hashable, build: _Build) -> None:
        """Let a build wait. Those that write the same buffers were of another step: they come first."""
        mine = build.outputs()
        if any(mine & other.outputs() for others in self._waiting.values() for other in others):
            self.flush()
        self._waiting.setdefault(key, []).append(build)

    def flush(self) -> None:
        """Launch all that waits. An error of one build keeps no other from its launch."""
        waiting, self._waiting = self._waiting, {}
        errors: list[Exception] = []
        for builds in waiting.values():
            with _on(builds[0].stream):
                errors += _launch_together(builds)
        if errors:
            raise errors[0]


_local = threading.local()


@contextmanager
def deferred_step() -> Iterator[None]:
    """Builds of this thread inside it wait for its end, where all that share their step's inputs are one launch.

    A step within a step ends with its own end. Raises at the end what launching raises; the error of what ends it
    early goes first.
    """
    outer, step = getattr(_local, "step", None), _Step()
    _local.step = step
    try:
        yield
    except BaseException:
        _local.step = outer
        with suppress(SwaDecodeMetaError):  # what ended the step is what is reported
            step.flush()
        raise
    finally:
        _local.step = outer
    step.flush()


def submit(
    group: Group,
    shared: Sequence[torch.Tensor],
    num_tokens: int,
    window_size: int,
    noncausal: bool,
    replays: bool,
) -> None:
    """Build a group: at the end of the step that is under way, or now.

    shared: the tensors of SHARED, in that order. replays: False where replay_start is known to be all zeros, so that
    another's zeros do as well.
    """
    on_gpu = group.indices.is_cuda
    stream = torch.cuda.current_stream(group.indices.device) if on_gpu else None
    build = _Build(group, shared, num_tokens, window_size, noncausal, stream)
    step = getattr(_local, "step", None)
    if step is None or (on_gpu and torch.cuda.is_current_stream_capturing()):
        build.launch()
        return
    same = shared if replays else shared[:-1]
    parts = tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in same)
    raw = stream.cuda_stream if stream is not None else None
    step.add((parts, replays, num_tokens, window_size, noncausal, group.indices.device, raw), build)


def _launch_together(builds: Sequence[_Build]) -> list[Exception]:
    """One launch for all, or one for each where they cannot be one. Returns what went wrong."""
    first = builds[0]
    if len(builds) > 1:
        try:
            arguments: list[Any] = [*first.shared, first.num_tokens, first.window_size, first.noncausal]
            launch_step([build.group for build in builds], *arguments)
        except SwaDecodeMetaError:
            pass  # which of them is wrong shows when each is launched alone
        else:
            return []
    errors: list[Exception] = []
    for build in builds:
        try:
            build.launch()
        except SwaDecodeMetaError as error:
            errors.append(error)
    return errors


def _on(stream: Any) -> AbstractContextManager[Any]:
    if stream is None:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context
