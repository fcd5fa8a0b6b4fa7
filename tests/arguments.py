"""The arguments of launch() for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swa_decode_meta.spec import INPUTS, TENSORS, Batch

SIGNATURE = (
    "slot_mapping",
    "is_valid",
    "indices",
    "lens",
    "ragged",
    "indptr",
    "query_start_loc",
    "seq_lens",
    "token_to_req",
    "block_table",
    "replay_start",
    "num_tokens",
    "window_size",
    "block_size",
    "noncausal",
)
DTYPES = {name: getattr(torch, spec.dtype) for name, spec in TENSORS.items()}
POISON = 0x5A
Arguments = dict[str, Any]


def poisoned(shape: Sequence[int], dtype: Any, device: str) -> Any:
    """A tensor with every byte set to POISON."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    storage_bytes(tensor).fill_(POISON)
    return tensor


def storage_bytes(tensor: Any) -> Any:
    """All bytes of the memory that `tensor` is a view of."""
    whole: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def strided(shape: Sequence[int], stride: Sequence[int], dtype: Any, device: str) -> Any:
    """A tensor of this shape and strides in poisoned memory."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if all(shape) else 0
    return torch.as_strided(poisoned((size,), dtype, device), tuple(shape), tuple(stride))


def arguments_for(batch: Batch, device: str) -> Arguments:
    """The arguments of launch(), as vLLM has them: contiguous, without spare room, outputs poisoned."""
    T, width = batch.num_tokens, batch.width
    shapes = {
        "is_valid": (T,),
        "indices": (T, 1, width),
        "lens": (T,),
        "ragged": (T * width,),
        "indptr": (T + 1,),
    }
    arguments: Arguments = {}
    for name in SIGNATURE:
        if name in INPUTS:
            arguments[name] = torch.from_numpy(getattr(batch, name).copy()).to(device)
        elif name in shapes:
            arguments[name] = poisoned(shapes[name], DTYPES[name], device)
        else:
            arguments[name] = getattr(batch, name)
    return arguments
