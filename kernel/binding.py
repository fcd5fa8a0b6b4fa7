"""From checked tensors to the kernel's arguments: what `launch`, `launch_step` and the prepared launches share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..spec import OWN, SHARED, TENSORS, ArgumentError, brief, check_flag, check_scalar
from .arguments import EMULATED, INTERPRETED, check_overlap, check_tensors
from .decode_meta import GROUP_WORDS
from .shape import LaunchShape, gpu_shape, interpreter_shape

# No position passes 2**34 in magnitude, whatever the inputs, so a larger window or page is no different from this.
_FAR = 2**34

AMD = torch.version.hip is not None or EMULATED is not None
"""Whether the kernel is compiled for a GPU of AMD's."""

WAVE = 64 if AMD else 32
"""Lanes that run as one: 64 on the CDNA GPUs that ROCm serves on."""


@dataclass(frozen=True, eq=False)
class Group:
    """One SWA cache group of a step: what it does not share with the others. Shapes and dtypes as for `launch`.

    block_size: positions a page, of this group.
    """

    slot_mapping: torch.Tensor
    is_valid: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor
    ragged: torch.Tensor
    indptr: torch.Tensor
    block_table: torch.Tensor
    block_size: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """The group's seven tensors by name."""
        return {name: getattr(self, name) for name in OWN}


def bind_group(
    group: Group,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    replay_start: torch.Tensor,
    num_tokens: int,
    window_size: int,
    noncausal: bool,
) -> Binding:
    """What `launch` binds."""
    shared = dict(zip(SHARED, (query_start_loc, seq_lens, token_to_req, replay_start), strict=True))
    return Binding([group], shared, num_tokens, window_size, noncausal, step=False)


def bind_step(
    groups: Sequence[Group],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    replay_start: torch.Tensor,
    num_tokens: int,
    window_size: int,
    noncausal: bool,
) -> Binding:
    """What `launch_step` binds."""
    if not isinstance(groups, Sequence) or not groups:
        raise ArgumentError("groups", "a sequence of at least one Group", brief(groups))
    for index, group in enumerate(groups):
        if not isinstance(group, Group):
            raise ArgumentError(f"groups[{index}]", "a Group", brief(group))
    shared = dict(zip(SHARED, (query_start_loc, seq_lens, token_to_req, replay_start), strict=True))
    return Binding(list(groups), shared, num_tokens, window_size, noncausal, step=True)


class Binding:
    """The tensors and the geometry of one launch, checked, for any row count up to the one it was made for."""

    def __init__(
        self,
        groups: Sequence[Group],
        shared: Mapping[str, torch.Tensor],
        num_tokens: int,
        window_size: int,
        noncausal: bool,
        *,
        step: bool,
    ) -> None:
        """Raises ArgumentError when anything that the host can see is off, BackendError for the device."""
        self.num_tokens = check_scalar("num_tokens", num_tokens, 0)
        self.window_size = min(check_scalar("window_size", window_size, 1), _FAR)
        self.noncausal = check_flag("noncausal", noncausal)
        self.groups, self.shared, self.step = groups, shared, step
        block_sizes = []
        everything: dict[str, torch.Tensor] = dict(shared)
        for index, group in enumerate(groups):
            prefix = f"groups[{index}]." if step else ""
            tensors = group.tensors()
            try:
                block_sizes.append(min(check_scalar("block_size", group.block_size, 1), _FAR))
                self.device = check_tensors({name: {**tensors, **shared}[name] for name in TENSORS}, self.num_tokens)
            except ArgumentError as error:
                name = prefix * (error.argument not in shared) + error.argument
                raise ArgumentError(name, error.expected, error.got) from None
            everything |= {prefix + name: tensor for name, tensor in tensors.items()}
        check_overlap(everything)
        self.num_reqs = shared["seq_lens"].shape[0]
        self.sizes = [_sizes(group, size) for group, size in zip(groups, block_sizes, strict=True)]
        self.width, self.max_pages, self.block_size, self.lens_size = (
            max(sizes[name] for sizes in self.sizes) for name in ("width", "max_pages", "block_size", "lens_size")
        )
        self.pow2 = all(size & (size - 1) == 0 for size in block_sizes)

    def shape(self, num_tokens: int) -> LaunchShape:
        """The shape that serves so many rows on this backend."""
        if INTERPRETED:
            return interpreter_shape(num_tokens, self.width, self.max_pages, self.lens_size - num_tokens)
        return gpu_shape(num_tokens, self.width, self.max_pages, len(self.groups), WAVE)

    def grid(self, num_tokens: int, shape: LaunchShape) -> tuple[int, int]:
        """Programs of a group, and groups."""
        return shape.programs(num_tokens, self.lens_size), len(self.groups)

    def constants(self, num_tokens: int, shape: LaunchShape) -> dict[str, int | bool]:
        """The kernel's compile-time parameters for so many rows."""
        return shape.constants(
            num_tokens, self.width, self.max_pages, self.block_size, self.noncausal, self.pow2, self.step, AMD
        )

    def state(self, shape: LaunchShape, group: Group) -> torch.Tensor:
        """A new state for look-back, for as many rows as the group's buffers hold."""
        rows = group.indptr.shape[0] - 1
        return torch.zeros(shape.state_size(rows), dtype=torch.int64, device=self.device)

    def words(self, states: Sequence[torch.Tensor] | None) -> list[int]:
        """What the kernel reads of the groups of a step: GROUP_WORDS for each."""
        words = []
        for index, (group, sizes) in enumerate(zip(self.groups, self.sizes, strict=True)):
            words += [tensor.data_ptr() for tensor in group.tensors().values()]
            words += [states[index].data_ptr() if states else 0, *sizes.values()]
        assert len(words) == len(self.groups) * GROUP_WORDS.value
        return words

    def arguments(
        self, num_tokens: int, num_reqs: int, state: torch.Tensor | None, table: torch.Tensor | None
    ) -> dict[str, Any]:
        """The kernel's run-time arguments, in its order. What a variant does not use is given in another's stead."""
        tensors = {**self.groups[0].tensors(), **self.shared}
        return {
            **{name: tensors[name] for name in TENSORS},
            "state": self.groups[0].slot_mapping if state is None else state,
            "groups": self.groups[0].slot_mapping if table is None else table,
            "num_tokens": num_tokens,
            "num_reqs": num_reqs,
            "window_size": self.window_size,
            **self.sizes[0],
        }

    def on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device, whatever device the tensors are on."""
        if self.device.type == "cpu" or self.device.index == torch.cuda.current_device():
            return nullcontext()
        context: AbstractContextManager[Any] = torch.cuda.device(self.device)
        return context


def _sizes(group: Group, block_size: int) -> dict[str, int]:
    """The group's scalars, in the kernel's order."""
    width = group.indices.shape[-1]
    return {
        "columns": group.block_table.shape[1],
        "block_size": block_size,
        "block_shift": block_size.bit_length() - 1,
        "width": width,
        "max_pages": (width - 1 + block_size - 1) // block_size + 1,
        "lens_size": group.lens.shape[0],
        "indices_stride": group.indices.stride(0),
        "block_table_stride": group.block_table.stride(0),
    }
