"""What the host can check of a launch's tensors without reading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from triton.runtime.jit import JITFunction

from ..spec import OUTPUTS, TENSORS, ArgumentError, BackendError, check_capacity, check_tensor, symbols
from .decode_meta import decode_meta_kernel

INTERPRETED = not isinstance(decode_meta_kernel, JITFunction)
"""Whether TRITON_INTERPRET was set when this module was imported: Triton decides it once, there."""

EMULATED: str | None = getattr(JITFunction, "emulated", None)
"""The architecture, such as "gfx942", that an emulator stands in for in this process; it says so before this import."""

ON_CPU = INTERPRETED or EMULATED is not None
"""Whether launches run on the CPU, in this process, and are over when they return."""

_DTYPES = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
_EXPECTED_DTYPES = {name: _DTYPES[spec.dtype] for name, spec in TENSORS.items()}


def check_tensors(tensors: Mapping[str, torch.Tensor], num_tokens: int) -> torch.device:
    """Check all that the host can see of the tensors of one group, and give their device.

    Raises ArgumentError, or BackendError when the device cannot run the kernel.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(name, "a torch.Tensor", type(tensor).__name__)
        if tensor.dtype != _EXPECTED_DTYPES[name]:
            raise ArgumentError(name, f"dtype {_EXPECTED_DTYPES[name]}", tensor.dtype)
        if tensor.layout != torch.strided:
            raise ArgumentError(name, "a dense tensor", f"layout {tensor.layout}")
    device = tensors["slot_mapping"].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ArgumentError(name, f"a tensor on {device}, where slot_mapping is", f"one on {tensor.device}")
    if device.type == "cpu" and not ON_CPU:
        raise BackendError(
            "the tensors are on the CPU, where the kernel runs only with TRITON_INTERPRET=1 set before it is imported"
        )
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"the tensors are on {device}; the kernel runs on CUDA and ROCm devices")

    indices = tensors["indices"]
    width = indices.shape[-1] if indices.ndim else 0
    if width < 1:
        raise ArgumentError("indices", "a width of at least 1 on the last axis", f"shape {list(indices.shape)}")
    if tensors["seq_lens"].ndim != 1:
        raise ArgumentError("seq_lens", "1 axis", f"shape {list(tensors['seq_lens'].shape)}")
    check_capacity(num_tokens, width)
    sizes = symbols(num_tokens, tensors["seq_lens"].shape[0], width)
    for name, tensor in tensors.items():
        check_tensor(name, tensor.shape, tensor.stride(), sizes)
    return device


def check_overlap(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse an output that shares memory with another tensor: one would overwrite the other during the launch.

    Keys are names of the contract's tensors, or such names after a dot, as in "groups[1].lens".
    """
    spans = sorted((rows.begin, rows.end, name, rows) for name, rows in _all_rows(tensors))
    for at, (_, end, name, rows) in enumerate(spans):
        for begin, _, other, others in islice(spans, at + 1, None):
            if begin >= end:
                break
            outputs = [each for each in (name, other) if _plain(each) in OUTPUTS]
            if outputs and rows.overlap(others):
                raise ArgumentError(outputs[0], "memory of its own", f"overlap of {name} and {other}")


def _plain(name: str) -> str:
    return name.rpartition(".")[2]


def _all_rows(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, _Rows]]:
    for name, tensor in tensors.items():
        if tensor.numel():
            in_rows = _plain(name) in ("indices", "block_table")
            count, step = (tensor.shape[0], tensor.stride(0)) if in_rows else (1, 0)
            size = tensor.element_size()
            length = (tensor.shape[-1] if tensor.ndim > 1 else tensor.numel()) * size
            yield name, _Rows(tensor.data_ptr(), length, step * size, count if step else 1)


class _Rows(NamedTuple):
    """The bytes that a tensor occupies: `rows` rows of `length` bytes, the next one `step` bytes on."""

    begin: int
    length: int
    step: int
    rows: int

    @property
    def end(self) -> int:
        return self.begin + (self.rows - 1) * self.step + self.length

    def overlap(self, other: _Rows) -> bool:
        """Whether a byte is in both. Rows with gaps between them may lie in the gaps of others."""
        few, many = sorted((self, other), key=lambda span: span.rows)
        for begin in range(few.begin, few.begin + few.rows * max(1, few.step), max(1, few.step)):
            # The first of the many rows that ends after this one begins.
            at = 0 if many.rows == 1 else max(0, (begin - many.begin - many.length) // many.step + 1)
            start = many.begin + at * many.step
            if at < many.rows and start < begin + few.length and begin < start + many.length:
                return True
        return False
