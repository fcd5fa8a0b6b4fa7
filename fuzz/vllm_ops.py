"""A target: the ops of vLLM 0.33 that its fused build replaces, called as `launch` is. Needs vLLM."""

from __future__ import annotations

import torch


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
) -> None:
    """The flags, the dense rows and their lengths, and the rows packed, as vLLM's builders call them one by one."""
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import build_ragged_indices_from_dense

    width = indices.shape[-1]
    torch.ge(slot_mapping[:num_tokens], 0, out=is_valid[:num_tokens])
    lens[num_tokens:] = 0
    rows = (query_start_loc, seq_lens, token_to_req, is_valid, block_table, block_size)
    which = {"num_tokens": num_tokens, "token_offset": 0}
    if noncausal:
        fill = sparse_swa._COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL
        fill(indices, lens, window_size, width, *rows, **which)
    else:
        fill = sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL
        fill(indices, lens, window_size, width, lens, lens, *rows, replay_start, **which)
    dense = indices[:num_tokens].reshape(num_tokens, width)
    packed, offsets = build_ragged_indices_from_dense(dense, lens[:num_tokens])
    indptr[: num_tokens + 1].copy_(offsets)
    ragged[: packed.numel()].copy_(packed)
