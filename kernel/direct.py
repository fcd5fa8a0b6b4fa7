"""Starting a compiled kernel straight away, without Triton's binding of arguments, which costs more than the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from .arguments import INTERPRETED
from .binding import Binding
from .decode_meta import decode_meta_kernel
from .shape import LaunchShape

# Of these, a compiled kernel's `run` is known to take what is handed to it here.
_KNOWN_TRITON = ("3.4.", "3.5.", "3.6.", "3.7.", "3.8.", "3.9.")


@dataclass(frozen=True)
class Direct:
    """A compiled kernel, loaded, with all of its arguments but the row and request counts. Holds none of the tensors.

    run: starts it. before: what `run` takes ahead of the arguments, and those before the counts, tensors as addresses;
    after: those after the counts. device: the index of the one that it is loaded on. current_stream: of a device.
    """

    run: Callable[..., None]
    before: tuple[Any, ...]
    after: tuple[int, ...]
    device: int
    current_stream: Callable[[int], int]

    def __call__(self, programs: int, groups: int, num_tokens: int, num_reqs: int) -> None:
        """Start it on the current stream."""
        stream = self.current_stream(self.device)
        self.run(programs, groups, 1, stream, *self.before, num_tokens, num_reqs, *self.after)


def direct(
    bound: Binding, most: int, shape: LaunchShape, state: torch.Tensor | None, table: torch.Tensor | None
) -> Direct | None:
    """Compile and load the kernel of a shape for up to `most` rows; None where only Triton itself can start it."""
    if INTERPRETED:
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
    return Direct(
        run=kernel.run,
        before=(kernel.function, kernel.packed_metadata, None, None, None, *values[:counts]),
        after=(*values[counts + 2 :], *constants.values()),
        device=bound.device.index,
        current_stream=driver.active.get_current_stream,
    )


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
