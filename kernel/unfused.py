"""The same build in eight launches, as plain torch and Triton write it: what the one launch is measured against.

is_valid, the zeroed tail of lens, the dense rows, then the ragged form from the dense one: which entries are kept, how
many in each row, where each row begins, and the packing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import INTERPRETED
from .binding import Binding, Group, bind_group
from .shape import interpreter_shape


@triton.jit
def dense_rows_kernel(
    slot_mapping,
    indices,
    lens,
    query_start_loc,
    seq_lens,
    token_to_req,
    block_table,
    replay_start,
    num_tokens,
    num_reqs,
    columns,
    window_size: tl.int64,
    block_size: tl.int64,
    width: tl.int64,
    indices_stride: tl.int64,
    block_table_stride: tl.int64,
    NONCAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Clauses 2 to 10 for ROWS rows a program."""
    window_size = window_size.to(tl.int64)  # the interpreter gives a scalar the narrowest type that holds it
    block_size = block_size.to(tl.int64)
    width = width.to(tl.int64)
    indices_stride = indices_stride.to(tl.int64)
    block_table_stride = block_table_stride.to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = t < num_tokens
    r = tl.load(token_to_req + t, mask=inside, other=-1).to(tl.int64)
    seen = (tl.load(slot_mapping + t, mask=inside, other=-1) >= 0) & (r >= 0) & (r < num_reqs)
    q0 = tl.load(query_start_loc + r, mask=seen, other=0).to(tl.int64)
    q1 = tl.load(query_start_loc + r + 1, mask=seen, other=0).to(tl.int64)
    stop = tl.load(seq_lens + r, mask=seen, other=0).to(tl.int64)
    start = stop - (q1 - q0) - window_size
    if not NONCAUSAL:
        stop += t - q1 + 1
        start = tl.maximum(stop - window_size, tl.load(replay_start + r, mask=seen, other=0))
    start = tl.maximum(start, 0)
    size = tl.where(seen, tl.minimum(tl.maximum(stop - start, 0), width), 0)
    tl.store(lens + t, size.to(tl.int32), mask=inside)
    table = block_table + r[:, None] * block_table_stride
    begin = width * 0
    while begin < width:
        i = begin + tl.arange(0, CHUNK)[None, :]
        position = start[:, None] + i
        k = position // block_size
        page = tl.load(table + k, mask=(i < size[:, None]) & (k < columns), other=-1).to(tl.int64)
        # A page number times a block size past 2**31 is no slot but for page 0; cut, the product fits int64.
        slot = page * tl.minimum(block_size, 2147483648) + position % block_size
        slot = tl.where((page >= 0) & (slot < 2147483648), slot, -1)
        tl.store(indices + t[:, None] * indices_stride + i, slot.to(tl.int32), mask=inside[:, None] & (i < width))
        begin += CHUNK


@triton.jit
def pack_kernel(
    indices,
    ragged,
    indptr,
    num_tokens,
    width: tl.int64,
    indices_stride: tl.int64,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Clause 11, packing: the kept entries of ROWS dense rows a program, from where indptr says on."""
    width = width.to(tl.int64)
    indices_stride = indices_stride.to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = t < num_tokens
    at = tl.load(indptr + t, mask=inside, other=0)[:, None]
    begin = width * 0
    while begin < width:
        i = begin + tl.arange(0, CHUNK)[None, :]
        slot = tl.load(indices + t[:, None] * indices_stride + i, mask=inside[:, None] & (i < width), other=-1)
        kept = (slot >= 0).to(tl.int32)
        tl.store(ragged + at + tl.cumsum(kept, axis=1) - 1, slot, mask=slot >= 0)
        at += tl.sum(kept, axis=1)[:, None]
        begin += CHUNK


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
    """What `swa_decode_meta.kernel.launch` writes, with the same arguments and errors, in eight launches."""
    group = Group(slot_mapping, is_valid, indices, lens, ragged, indptr, block_table, block_size)
    shared = (query_start_loc, seq_lens, token_to_req, replay_start)
    build(bind_group(group, *shared, num_tokens, window_size, noncausal))


def build(bound: Binding) -> None:
    """The eight launches, on the current stream, for the first group of `bound`."""
    tensors, sizes, T = {**bound.groups[0].tensors(), **bound.shared}, bound.sizes[0], bound.num_tokens
    width = sizes["width"]
    rows, chunk = 1, 1 << (min(width, 1024) - 1).bit_length()
    if INTERPRETED:
        shape = interpreter_shape(T, width, sizes["max_pages"], 0)
        rows, chunk = shape.rows_per_program, shape.width_chunk
    dense = tensors["indices"].reshape(-1, width) if T == 0 else tensors["indices"][:T].reshape(T, width)
    indptr = tensors["indptr"]
    with bound.on_device():
        torch.ge(tensors["slot_mapping"][:T], 0, out=tensors["is_valid"][:T])
        tensors["lens"][T:].zero_()
        indptr[:1].zero_()
        if T == 0:
            return
        grid = (-(-T // rows),)
        dense_rows_kernel[grid](
            tensors["slot_mapping"],
            tensors["indices"],
            tensors["lens"],
            *(bound.shared[name] for name in ("query_start_loc", "seq_lens", "token_to_req")),
            tensors["block_table"],
            tensors["replay_start"],
            T,
            bound.num_reqs,
            sizes["columns"],
            bound.window_size,
            sizes["block_size"],
            width,
            sizes["indices_stride"],
            sizes["block_table_stride"],
            NONCAUSAL=bound.noncausal,
            ROWS=rows,
            CHUNK=chunk,
        )
        kept = torch.ge(dense, 0)
        counts = torch.sum(kept, dim=1, dtype=torch.int32)
        torch.cumsum(counts, dim=0, dtype=torch.int32, out=indptr[1 : T + 1])
        pack_kernel[grid](
            tensors["indices"], tensors["ragged"], indptr, T, width, sizes["indices_stride"], ROWS=rows, CHUNK=chunk
        )
