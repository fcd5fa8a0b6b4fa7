"""vLLM's `launch`, and `launch_step` for all groups of a step: checks on the host, then exactly one kernel launch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..spec import OWN, ArgumentError, BackendError
from .arguments import ON_CPU
from .binding import WAVE, Binding, Group, bind_group, bind_step
from .decode_meta import GROUP_WORDS, decode_meta_kernel
from .direct import Direct, direct, may_start
from .scratch import Scratch
from .shape import LaunchShape, counting_shape

_scratch = Scratch()


def launch(
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
    num_tokens: int,
    window_size: int,
    block_size: int,
    noncausal: bool = False,
    *,
    shape: LaunchShape | None = None,
) -> None:
    """Write the decode metadata of one SWA cache group: SPEC.md, in one launch on the current stream.

    Inputs: slot_mapping int64 [>= T], query_start_loc int32 [R+1], seq_lens int32 [R], token_to_req int32 [>= T],
    block_table int32 [>= R, columns] with any row stride, replay_start int32 [>= R].
    Outputs, written in place: is_valid bool [>= T]; indices int32 [>= T, 1, width] or [>= T, width], any row stride
    of at least width; lens int32 [>= T], all of it; ragged int32 [>= T * width]; indptr int32 [>= T+1].
    num_tokens is T; window_size and block_size are in positions; noncausal selects the DSpark block form.
    All tensors lie on one device. The signature is that of vLLM 0.33.0's launch; `shape` (ours) overrides how
    the work is cut into programs, which changes no result.

    Reads nothing from the device and never synchronises, so it may be captured in a graph, the first call too. The
    first call of many rows on the same `indptr` also allocates and zeroes a few KB, which later ones use; in a
    capture it does without, and is slower.
    Raises ArgumentError before anything is written when a dtype, shape, stride, device or range is off, or when an
    output overlaps another tensor; BackendError when the tensors' device cannot run the kernel.
    """
    shared = (query_start_loc, seq_lens, token_to_req, replay_start)
    tensors = (slot_mapping, is_valid, indices, lens, ragged, indptr, block_table, *shared)
    key = _key(tensors, num_tokens, window_size, block_size, noncausal, shape)
    if _again(key):
        return
    group = Group(slot_mapping, is_valid, indices, lens, ragged, indptr, block_table, block_size)
    bound = bind_group(group, *shared, num_tokens, window_size, noncausal)
    shape = _checked(shape) or bound.shape(bound.num_tokens)
    if not shape.look_back:
        _first(key, bound, shape)
        return
    state = _state(bound, shape, group)
    if state is None:
        _first(None, bound, counting_shape(bound.width, bound.max_pages, WAVE))
    else:
        _first(key, bound, shape, state=state, scratch={_state_key(bound, shape, group): state})


def launch_step(
    groups: Sequence[Group],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    replay_start: torch.Tensor,
    num_tokens: int,
    window_size: int,
    noncausal: bool = False,
    *,
    shape: LaunchShape | None = None,
) -> None:
    """Write the decode metadata of all SWA cache groups of a step in one launch: what `launch` writes for each.

    groups: one `Group` for each cache group; page size, table and width may differ between them. The other tensors
    are shared, with shapes and dtypes as for `launch`.

    The kernel reads the groups' addresses from a table on the device, which the first call for these buffers fills.
    That call cannot be captured in a graph: BackendError says so. `prepare_step` and every later call can.
    Raises ArgumentError and BackendError as `launch` does, and names the group.
    """
    shared = (query_start_loc, seq_lens, token_to_req, replay_start)
    key = _step_key(groups, shared, num_tokens, window_size, noncausal, shape)
    if _again(key):
        return
    bound = bind_step(groups, *shared, num_tokens, window_size, noncausal)
    shape = _checked(shape) or bound.shape(bound.num_tokens)
    states = [_state(bound, shape, group) for group in bound.groups] if shape.look_back else []
    if None in states:
        raise BackendError(_NEW_IN_CAPTURE)
    words = bound.words([state for state in states if state is not None])
    table_key = (bound.device, *words)
    make = partial(group_table, words, bound.device)
    table = make() if ON_CPU else _scratch.get(table_key, make)
    if table is None:
        raise BackendError(_NEW_IN_CAPTURE)
    scratch: dict[Hashable, torch.Tensor] = {table_key: table}
    for group, state in zip(bound.groups, states, strict=False):
        if state is not None:
            scratch[_state_key(bound, shape, group)] = state
    _first(key, bound, shape, table=table, scratch=scratch)


_NEW_IN_CAPTURE = "launch_step: a graph is being captured and these buffers are new; call it once before that"


def enqueue(
    bound: Binding,
    shape: LaunchShape,
    num_tokens: int,
    num_reqs: int,
    most: int,
    state: torch.Tensor | None,
    table: torch.Tensor | None,
) -> None:
    """Launch the kernel once, through Triton's own binding of arguments. It is compiled for up to `most` rows."""
    arguments = bound.arguments(num_tokens, num_reqs, state, table)
    constants = bound.constants(most, shape)
    with bound.on_device():
        decode_meta_kernel[bound.grid(num_tokens, shape)](**arguments, **constants, num_warps=shape.num_warps)


def group_table(words: Sequence[int], device: torch.device) -> torch.Tensor:
    """The table that the kernel reads the groups of a step from, int64 [groups, GROUP_WORDS]."""
    return torch.tensor(words, dtype=torch.int64, device=device).reshape(-1, GROUP_WORDS.value)


# ------------------------------------------------------------ the same launch again


class _Call(NamedTuple):
    """A launch that was checked and made: its kernel, what that was started with, and the scratch memory it uses.

    Keeps no tensor of the caller's.
    """

    kernel: Direct
    grid: tuple[int, int]
    counts: tuple[int, int]
    scratch: Mapping[Hashable, torch.Tensor]


_calls: dict[tuple[Hashable, ...], _Call] = {}
_MOST_CALLS = 4096  # a server has a few for each row count; a fuzzer has new ones for every case


def _key(tensors: Sequence[torch.Tensor], *others: Hashable) -> tuple[Hashable, ...] | None:
    """All that the checks look at; None for arguments that are not what they should be, which the checks will say."""
    try:  # only a dense tensor has an address and strides
        parts = [(t.data_ptr(), t.dtype, t.device, t.shape, t.stride()) for t in tensors]
    except Exception:
        return None
    return (*parts, *others, *map(type, others))


def _step_key(
    groups: Sequence[Group], shared: Sequence[torch.Tensor], *others: Hashable
) -> tuple[Hashable, ...] | None:
    try:
        tensors = [getattr(group, name) for group in groups for name in OWN]
        sizes = [group.block_size for group in groups]
    except Exception:
        return None
    return _key((*tensors, *shared), *sizes, *others)


def _again(key: tuple[Hashable, ...] | None) -> bool:
    """Make the launch that was made for `key` before, if one was; whether it was."""
    try:
        call = _calls.get(key) if key is not None else None
    except TypeError:  # something that cannot be hashed is none of launch's arguments
        return False
    if call is None or not may_start(call.kernel.device) or not _scratch.holds(call.scratch):
        return False
    call.kernel.start(*call.grid, *call.counts)
    return True


def _first(
    key: tuple[Hashable, ...] | None,
    bound: Binding,
    shape: LaunchShape,
    *,
    state: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    scratch: Mapping[Hashable, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Make a launch, and remember it under `key` if it can be started directly the next time."""
    counts = (bound.num_tokens, bound.num_reqs)
    kernel = None if key is None else direct(bound, bound.num_tokens, shape, state, table)
    if kernel is None or key is None or not may_start(kernel.device):
        enqueue(bound, shape, *counts, bound.num_tokens, state, table)
        return
    grid = bound.grid(bound.num_tokens, shape)
    kernel.start(*grid, *counts)
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[key] = _Call(kernel, grid, counts, scratch)


def _checked(shape: LaunchShape | None) -> LaunchShape | None:
    if shape is not None and not isinstance(shape, LaunchShape):
        raise ArgumentError("shape", "a LaunchShape", type(shape).__name__)
    return shape


def _state(bound: Binding, shape: LaunchShape, group: Group) -> torch.Tensor | None:
    """The look-back state of the group's buffers; a new one on the CPU, where a launch can be broken off."""
    make = partial(bound.state, shape, group)
    return make() if ON_CPU else _scratch.get(_state_key(bound, shape, group), make)


def _state_key(bound: Binding, shape: LaunchShape, group: Group) -> tuple[Hashable, ...]:
    return (bound.device, group.indptr.data_ptr(), shape.state_size(group.indptr.shape[0] - 1))
