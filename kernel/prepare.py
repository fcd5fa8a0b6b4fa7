"""Prepared launches: what can be done once is done once, and a call does the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from ..spec import ArgumentError, brief
from .arguments import INTERPRETED
from .binding import WAVE, Binding, Group, bind_group, bind_step
from .decode_meta import decode_meta_kernel
from .launch import enqueue, group_table
from .shape import LaunchShape, gpu_shapes

# Of these, a compiled kernel's `run` is known to take what is handed to it here.
_KNOWN_TRITON = ("3.4.", "3.5.", "3.6.", "3.7.", "3.8.", "3.9.")


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


@dataclass(frozen=True)
class _Variant:
    """One shape, up to `most` rows: its scratch memory, and the compiled kernel with all that never changes of a call.

    start: starts the kernel; None where that must go through Triton's binding of arguments.
    before, after: its arguments before and after the row and request counts.
    """

    most: int
    shape: LaunchShape
    scratch: dict[str, torch.Tensor]
    start: Callable[..., None] | None = None
    handles: tuple[Any, ...] = ()
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()


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
        self._keep: list[torch.Tensor] = []
        self._variants: list[_Variant] = []
        if not INTERPRETED:
            for most, shape in gpu_shapes(bound.width, bound.max_pages, len(bound.groups), WAVE):
                self._variants.append(self._variant(min(most, bound.num_tokens), shape))
                if most >= bound.num_tokens:
                    break
        self.direct = not INTERPRETED and all(variant.start is not None for variant in self._variants)

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
        if INTERPRETED:
            shape = self._bound.shape(num_tokens)
            enqueue(self._bound, shape, num_tokens, num_reqs, **self._scratch(shape))
            return
        for variant in self._variants:
            if num_tokens <= variant.most:
                break
        if variant.start is None or self._device != torch.cuda.current_device() or _hooked():
            enqueue(self._bound, variant.shape, num_tokens, num_reqs, most=variant.most, **variant.scratch)
            return
        programs = variant.shape.programs(num_tokens, self._lens_size)
        stream = driver.active.get_current_stream(self._device)
        variant.start(
            programs, self._groups, 1, stream, *variant.handles, *variant.before, num_tokens, num_reqs, *variant.after
        )

    def _scratch(self, shape: LaunchShape) -> dict[str, torch.Tensor]:
        """What the launches of a shape need beside the caller's buffers, as keywords of `enqueue`."""
        bound = self._bound
        states = [bound.state(shape, group) for group in bound.groups] if shape.look_back else []
        self._keep += states
        if bound.step:
            return {"table": group_table(bound.words(states), bound.device)}
        return {"state": states[0]} if states else {}

    def _variant(self, most: int, shape: LaunchShape) -> _Variant:
        bound, scratch = self._bound, self._scratch(shape)
        arguments = bound.arguments(most, bound.num_reqs, scratch.get("state"), scratch.get("table"))
        constants = bound.constants(most, shape)
        with bound.on_device():
            grid = bound.grid(most, shape)
            kernel = decode_meta_kernel.warmup(**arguments, **constants, num_warps=shape.num_warps, grid=grid)
            if not triton.__version__.startswith(_KNOWN_TRITON):
                return _Variant(most, shape, scratch)
            kernel._init_handles()  # loads the code onto the device, which a capture may not do
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments.values()]
        counts = list(arguments).index("num_tokens")
        return _Variant(
            most,
            shape,
            scratch,
            kernel.run,
            (kernel.function, kernel.packed_metadata, None, None, None),
            tuple(values[:counts]),
            (*values[counts + 2 :], *constants.values()),
        )


def _hooked() -> bool:
    """Whether a profiler or the like wants to hear of each launch, which Triton's own way tells it."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook)) or bool(getattr(knobs.runtime.launch_exit_hook, "calls", False))
