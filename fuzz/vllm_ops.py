"""A target: the ops of vLLM 0.33 that its fused build replaces, called as `launch` is. Needs vLLM.

Of the ragged entries only those that indptr counts are copied: vLLM copies the rest of an uninitialised tensor too,
which clause 12 forbids and attention never reads, and every batch would fail for that alone.
"""

from __future__ import annotations

from typing import Any

import torch

from ..spec import TENSORS


def launch(*arguments: Any) -> None:
    """The arguments of `launch`, by position: the flags, the dense rows, and those packed, as vLLM's builders do it."""
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import build_ragged_indices_from_dense

    tensors = dict(zip(TENSORS, arguments, strict=False))
    num_tokens, window_size, block_size, noncausal = arguments[len(TENSORS) :]
    is_valid, indices, lens = tensors["is_valid"], tensors["indices"], tensors["lens"]
    width = indices.shape[-1]
    torch.ge(tensors["slot_mapping"][:num_tokens], 0, out=is_valid[:num_tokens])
    lens[num_tokens:] = 0
    requests = (tensors[name] for name in ("query_start_loc", "seq_lens", "token_to_req"))
    rows = (*requests, is_valid, tensors["block_table"], block_size)
    which = {"num_tokens": num_tokens, "token_offset": 0}
    if noncausal:
        fill = sparse_swa._COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL
        fill(indices, lens, window_size, width, *rows, **which)
    else:
        fill = sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL
        fill(indices, lens, window_size, width, lens, lens, *rows, tensors["replay_start"], **which)
    dense = indices[:num_tokens].reshape(num_tokens, width)
    packed, offsets = build_ragged_indices_from_dense(dense, lens[:num_tokens])
    tensors["indptr"][: num_tokens + 1].copy_(offsets)
    kept = int(offsets[-1])
    tensors["ragged"][:kept].copy_(packed[:kept])
