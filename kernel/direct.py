"""Starting a compiled kernel straight away, without Triton's binding of arguments, which costs more than the launch."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from .arguments import ON_CPU
from .binding import Binding
from .decode_meta import decode_meta_kernel
from .shape import LaunchShape

# Of these, a compiled kernel's `run` is known to take what is handed to it here.
_KNOWN_TRITON = ("3.4.", "3.5.", "3.6.", "3.7.", "3.8.", "3.9.")

_Arguments = tuple[Any, ...]
_Start = Callable[[int, int, int, int], None]


@dataclass(frozen=True)
class Direct:
    """A compiled kernel, loaded on a device, with all of its arguments but the row and request counts.

    device: its index. arguments: the kernel's, tensors as addresses, but for the counts; holds none of the tensors.
    start: launches it on the current stream, given programs, groups, rows and requests.
    """

    device: int
    arguments: _Arguments
    start: _Start


def direct(
    bound: Binding, most: int, shape: LaunchShape, state: torch.Tensor | None, table: torch.Tensor | None
) -> Direct | None:
    """Compile and load the kernel of a shape for up to `most` rows; None where only Triton itself can start it."""
    if ON_CPU:
        return None
    arguments = bound.arguments(most, bound.num_reqs, state, table)
    constants = bound.constants(most, shape)
    with bound.on_device():
        grid = bound.grid(most, shape)
        kernel = decode_meta_kernel.warmup(**arguments, **constants, num_warps=shape.num_warps, grid=grid)
        if not triton.__version__.startswith(_KNOWN_TRITON):
            return None
        kernel._init_handles()  # loads it
    values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments.values()]
    counts = list(arguments).index("num_tokens")
    before, after = tuple(values[:counts]), (*values[counts + 2 :], *constants.values())
    device = bound.device.index
    ahead = (kernel.function, kernel.packed_metadata, None, None, None)  # the last three: metadata and hooks, for tools
    return Direct(device, before + after, _starter(kernel.run, ahead, before, after, device))


def _starter(run: Callable[..., None], ahead: _Arguments, before: _Arguments, after: _Arguments, device: int) -> _Start:
    """What starts a kernel. run: Triton's launcher.

    ahead: what that takes after the stream. before, after: the kernel's arguments on either side of the counts.
    """
    current_stream = driver.active.get_current_stream
    beneath = _beneath(run, ahead, before, after)

    def start(programs: int, groups: int, num_tokens: int, num_reqs: int) -> None:
        run(programs, groups, 1, current_stream(device), *ahead, *before, num_tokens, num_reqs, *after)

    if beneath is None:
        return start
    function, first, middle, packed = beneath
    middle = middle if packed else (*middle, *before)

    def skip(programs: int, groups: int, num_tokens: int, num_reqs: int) -> None:
        function(*first, programs, groups, 1, current_stream(device), *middle, num_tokens, num_reqs, *after)

    def skip_packed(programs: int, groups: int, num_tokens: int, num_reqs: int) -> None:
        arguments = (*before, num_tokens, num_reqs, *after)
        function(*first, programs, groups, 1, current_stream(device), *middle, arguments)

    return skip_packed if packed else skip


def _beneath(
    run: Callable[..., None], ahead: _Arguments, before: _Arguments, after: _Arguments
) -> tuple[Callable[..., None], _Arguments, _Arguments, bool] | None:
    """The function that Triton's launcher calls, in which the GPU's runtime is called, if a launch may go there.

    The launcher is Python, and for a kernel like ours it only adds arguments that never change. A launch of marks,
    which a copy of it hands over to be looked at, shows which. One that has to know the grid, or that is made in
    another way, fails at the marks or hides one: None then.
    Returns the function, what it takes ahead of the grid, what it takes between the stream and the kernel's arguments,
    and whether those are one tuple.
    """
    grid, stream, counts = (object(), object(), 1), object(), (object(), object())
    arguments = (*before, *counts, *after)
    handed: list[_Arguments] = []
    try:
        function = vars(run)["launch"]
        launcher = copy(run)
        vars(launcher)["launch"] = lambda *given: handed.append(given)
        launcher(*grid, stream, *ahead, *arguments)
        [given] = handed
        here = given.index(grid[0])
    except Exception:
        return None
    first, rest = given[:here], given[here + 4 :]
    packed = rest[-1:] == (arguments,)
    middle = rest[:-1] if packed else rest[: -len(arguments)]
    if given != (*first, *grid, stream, *middle, *((arguments,) if packed else arguments)):
        return None
    return function, first, middle, packed


def may_start(device: int) -> bool:
    """Whether a kernel loaded on `device` may be started directly now.

    Not while another device is current, nor while a profiler or the like wants to hear of each launch from Triton.
    """
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # None, a function, or from Triton 3.5 on a chain of functions.
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return False
    return bool(device == torch.cuda.current_device())
