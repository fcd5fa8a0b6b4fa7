"""vLLM's `launch`: checks on the host, then exactly one launch of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from triton.runtime.jit import JITFunction

from ..spec import (
    OUTPUTS,
    TENSORS,
    ArgumentError,
    BackendError,
    check_capacity,
    check_flag,
    check_scalar,
    check_tensor,
    symbols,
)
from .decode_meta import decode_meta_kernel
from .shape import LaunchShape, gpu_shape, interpreter_shape

INTERPRETED = not isinstance(decode_meta_kernel, JITFunction)
"""Whether TRITON_INTERPRET was set when this module was imported: Triton decides it once, there."""

_DTYPES = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
_EXPECTED_DTYPES = {name: _DTYPES[spec.dtype] for name, spec in TENSORS.items()}
# No position passes 2**34 in magnitude, whatever the inputs, so a larger window or page is no different from this.
_FAR = 2**34


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

    Reads nothing from the device and never synchronises, so it may be captured in a graph, the first call too.
    Raises ArgumentError before anything is written when a dtype, shape, stride, device or range is off, or when an
    output overlaps another tensor; BackendError when the tensors' device cannot run the kernel.
    """
    tensors = {
        "slot_mapping": slot_mapping,
        "is_valid": is_valid,
        "indices": indices,
        "lens": lens,
        "ragged": ragged,
        "indptr": indptr,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "token_to_req": token_to_req,
        "block_table": block_table,
        "replay_start": replay_start,
    }
    num_tokens = check_scalar("num_tokens", num_tokens, 0)
    window_size = min(check_scalar("window_size", window_size, 1), _FAR)
    block_size = min(check_scalar("block_size", block_size, 1), _FAR)
    noncausal = check_flag("noncausal", noncausal)
    device = _check_tensors(tensors, num_tokens)

    width = indices.shape[-1] if num_tokens else 1  # without rows, no time for wide ones
    lens_size = lens.shape[0]
    max_pages = (width - 1 + block_size - 1) // block_size + 1
    if shape is not None and not isinstance(shape, LaunchShape):
        raise ArgumentError("shape", "a LaunchShape", type(shape).__name__)
    if shape is None:
        if INTERPRETED:
            shape = interpreter_shape(num_tokens, width, max_pages, lens_size - num_tokens)
        else:
            shape = gpu_shape(num_tokens, width, max_pages)
    row_programs = max(1, -(-num_tokens // shape.rows_per_program))
    tail_programs = -(-(lens_size - num_tokens) // shape.tail_chunk)

    def run() -> None:
        decode_meta_kernel[(row_programs + tail_programs,)](
            *tensors.values(),
            num_tokens,
            seq_lens.shape[0],
            block_table.shape[1],
            window_size,
            block_size,
            block_size.bit_length() - 1,
            width,
            max_pages,
            lens_size,
            indices.stride(0),
            block_table.stride(0),
            NONCAUSAL=noncausal,
            POW2=block_size & (block_size - 1) == 0,
            ROWS=shape.rows_per_program,
            COUNT_ROWS=shape.count_rows,
            PAGE_CHUNK=shape.page_chunk,
            WIDTH_CHUNK=shape.width_chunk,
            TAIL_CHUNK=shape.tail_chunk,
            ONE_COUNT=num_tokens <= shape.count_rows,
            ONE_PAGE_CHUNK=max_pages <= shape.page_chunk,
            ONE_WIDTH_CHUNK=width <= shape.width_chunk,
            num_warps=shape.num_warps,
        )

    if device.type == "cpu" or device.index == torch.cuda.current_device():
        run()
    else:  # Triton launches on the current device, whatever device the tensors are on
        with torch.cuda.device(device):
            run()


def _check_tensors(tensors: dict[str, torch.Tensor], num_tokens: int) -> torch.device:
    """Check all that the host can see of the tensors, and give their device."""
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
    if device.type == "cpu" and not INTERPRETED:
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
    _check_overlap(tensors)
    return device


def _check_overlap(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse an output that shares memory with another tensor: one would overwrite the other during the launch."""
    spans = sorted((rows.begin, rows.end, name, rows) for name, rows in _all_rows(tensors))
    for (_, end, name, rows), (begin, _, other, others) in combinations(spans, 2):
        if begin < end and (name in OUTPUTS or other in OUTPUTS) and rows.overlap(others):
            raise ArgumentError(
                name if name in OUTPUTS else other, "memory of its own", f"overlap of {name} and {other}"
            )


def _all_rows(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, _Rows]]:
    for name, tensor in tensors.items():
        if tensor.numel():
            count, step = (tensor.shape[0], tensor.stride(0)) if name in ("indices", "block_table") else (1, 0)
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
