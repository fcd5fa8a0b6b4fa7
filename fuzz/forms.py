"""Targets: the kernel's prepared forms, called as `launch` and `launch_step` are. Needs torch and triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernel import Group, PreparedLaunch, launch, launch_step, prepare, prepare_step
from ..spec import INPUTS, OWN, SHARED, TENSORS


def prepared(*arguments: Any) -> None:
    """The arguments of `launch`, by position: prepare for them, build half of the rows, and then all."""
    _halves(*_prepare(arguments))


def prepared_step(groups: Sequence[Group], *arguments: Any) -> None:
    """The arguments of `launch_step`: prepare for them, build half of the rows of each group, and then all."""
    _halves(*_prepare_step(groups, arguments))


def replayed(*arguments: Any) -> None:
    """The arguments of `launch`, by position: a graph, captured and replayed on other inputs, and then on these."""
    _replay(*_prepare(arguments))


def replayed_step(groups: Sequence[Group], *arguments: Any) -> None:
    """The arguments of `launch_step`: a graph, captured and replayed on other inputs, and then on these."""
    _replay(*_prepare_step(groups, arguments))


def in_turn(*arguments: Any) -> None:
    """The arguments of `launch`, by position: one of its forms, by what they are."""
    (launch, prepared, replayed)[sum(arguments[len(TENSORS) : -1]) % 3](*arguments)


def in_turn_step(groups: Sequence[Group], *arguments: Any) -> None:
    """The arguments of `launch_step`: one of its forms, by what they are."""
    (launch_step, prepared_step, replayed_step)[(len(groups) + sum(arguments[len(SHARED) : -1])) % 3](
        groups, *arguments
    )


def _prepare(arguments: Sequence[Any]) -> tuple[PreparedLaunch, list[torch.Tensor], list[torch.Tensor]]:
    """The prepared launch, and the tensors that it reads and writes."""
    tensors = dict(zip(TENSORS, arguments, strict=False))
    inputs = [tensors[name] for name in INPUTS]
    return prepare(*arguments), inputs, [tensor for name, tensor in tensors.items() if name not in INPUTS]


def _prepare_step(
    groups: Sequence[Group], arguments: Sequence[Any]
) -> tuple[PreparedLaunch, list[torch.Tensor], list[torch.Tensor]]:
    own = [(name, getattr(group, name)) for group in groups for name in OWN]
    inputs = [*arguments[: len(SHARED)], *(tensor for name, tensor in own if name in INPUTS)]
    return prepare_step(groups, *arguments), inputs, [tensor for name, tensor in own if name not in INPUTS]


def _halves(build: PreparedLaunch, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    before = _copies(outputs)
    build(build.max_num_tokens // 2)
    _restore(outputs, before)
    build(build.max_num_tokens)


def _replay(build: PreparedLaunch, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    given, before = _copies(inputs), _copies(outputs)
    for tensor in inputs:
        tensor.fill_(1)
    replay = _captured(build) if outputs[0].is_cuda else lambda: build(build.max_num_tokens)
    replay()
    _restore(inputs, given)
    for _ in range(2):
        _restore(outputs, before)
        replay()


def _captured(build: PreparedLaunch) -> Callable[[], None]:
    """A graph of one build. Not by torch.cuda.graph, which collects garbage for tens of ms before each capture."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            build(build.max_num_tokens)
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    replay: Callable[[], None] = graph.replay
    return replay


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_as_bytes(tensor).clone() for tensor in tensors]


def _restore(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        _as_bytes(tensor).copy_(value)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A bool tensor as its bytes, which torch would make 0 or 1 in copying; any other as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
