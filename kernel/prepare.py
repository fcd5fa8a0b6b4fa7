"""Prepared launches: what can be done once is done once, and a call does the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..spec import ArgumentError, brief
from .arguments import ON_CPU
from .binding import WAVE, Binding, Group, bind_group, bind_step
from .direct import direct, may_start
from .launch import enqueue, group_table
from .shape import LaunchShape, gpu_shapes


def prepare(
    slot_mapping: torch.Tensor,
    is_valid: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    ragged: torch.Tensor,
    indptr: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    replay_start: torch.Tensor,
    max_num_tokens: int,
    window_size: int,
    block_size: int,
    noncausal: bool = False,
) -> PreparedLaunch:
    """`launch` with its buffers bound: checks them once, compiles all that their row counts can need, gives the call.

    The arguments are those of `launch`, with whole buffers: for max_num_tokens rows, and for as many requests as
    seq_lens has entries. Contents are read at each call; the buffers themselves must stay where they are.
    Raises what `launch` raises.
    """
    group = Group(slot_mapping, is_valid, indices, lens, ragged, indptr, block_table, block_size)
    shared = (query_start_loc, seq_lens, token_to_req, replay_start)
    return _prepared(lambda: bind_group(group, *shared, max_num_tokens, window_size, noncausal))


def prepare_step(
    groups: Sequence[Group],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    replay_start: torch.Tensor,
    max_num_tokens: int,
    window_size: int,
    noncausal: bool = False,
) -> PreparedLaunch:
    """`launch_step` with its buffers bound, as `prepare` does for `launch`."""
    shared = (query_start_loc, seq_lens, token_to_req, replay_start)
    return _prepared(lambda: bind_step(groups, *shared, max_num_tokens, window_size, noncausal))


def _prepared(bind: Callable[[], Binding]) -> PreparedLaunch:
    try:
        return PreparedLaunch(bind())
    except ArgumentError as error:
        if error.argument == "num_tokens":
            raise ArgumentError("max_num_tokens", error.expected, error.got) from None
        raise


class _Variant(NamedTuple):
    """One shape, for up to `most` rows: its scratch memory, as keywords, and its kernel where that starts directly."""

    most: int
    rows_per_program: int
    tail_chunk: int
    shape: LaunchShape
    scratch: dict[str, torch.Tensor | None]
    start: Callable[[int, int, int, int], None] | None


class PreparedLaunch:
    """Buffers and geometry bound to compiled kernels.

    Calls of one object must not run at the same time, on two streams say: they write the same buffers.

    max_num_tokens, max_num_reqs: the most rows and requests that a call may name.
    direct: whether calls go straight to the compiled kernel, without Triton's binding of arguments.
    """

    def __init__(self, bound: Binding) -> None:
        self.max_num_tokens, self.max_num_reqs = bound.num_tokens, bound.num_reqs
        self._bound, self._lens_size, self._groups = bound, bound.lens_size, len(bound.groups)
        self._device = bound.device.index
        self._states: list[torch.Tensor] = []
        self._variants: list[_Variant] = []
        if not ON_CPU:
            for most, shape in gpu_shapes(bound.width, bound.max_pages, self._groups, WAVE):
                most = min(most, bound.num_tokens)
                scratch = self._scratch(shape)
                kernel = direct(bound, most, shape, **scratch)
                start = kernel.start if kernel else None
                self._variants.append(_Variant(most, shape.rows_per_program, shape.tail_chunk, shape, scratch, start))
                if most == bound.num_tokens:
                    break
        self.direct = not ON_CPU and all(variant.start is not None for variant in self._variants)

    def __call__(self, num_tokens: int, num_reqs: int | None = None) -> None:
        """Build the metadata of num_tokens rows and the first num_reqs requests (None: all), on the current stream.

        May be captured in a graph. Raises ArgumentError for numbers outside the prepared range.
        """
        if num_reqs is None:
            num_reqs = self.max_num_reqs
        if type(num_tokens) is not int or not 0 <= num_tokens <= self.max_num_tokens:
            raise ArgumentError("num_tokens", f"an integer from 0 to {self.max_num_tokens}", brief(num_tokens))
        if type(num_reqs) is not int or not 0 <= num_reqs <= self.max_num_reqs:
            raise ArgumentError("num_reqs", f"an integer from 0 to {self.max_num_reqs}", brief(num_reqs))
        if ON_CPU:
            shape = self._bound.shape(num_tokens)
            enqueue(self._bound, shape, num_tokens, num_reqs, num_tokens, **self._scratch(shape))
            return
        for most, rows, tail, shape, scratch, start in self._variants:  # noqa: B007
            if num_tokens <= most:
                break
        if start is not None and may_start(self._device):
            # shape.programs(), without the time that calls take
            programs = (-(-num_tokens // rows) or 1) - (num_tokens - self._lens_size) // tail
            start(programs, self._groups, num_tokens, num_reqs)
        else:
            enqueue(self._bound, shape, num_tokens, num_reqs, most, **scratch)

    def _scratch(self, shape: LaunchShape) -> dict[str, torch.Tensor | None]:
        """What the launches of a shape need beside the caller's buffers, as keywords."""
        bound = self._bound
        states = [bound.state(shape, group) for group in bound.groups] if shape.look_back else []
        self._states += states
        if bound.step:
            return {"state": None, "table": group_table(bound.words(states), bound.device)}
        return {"state": states[0] if states else None, "table": None}
