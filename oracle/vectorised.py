"""SPEC.md once more, in NumPy: all rows of any number of batches in one pass, with no loop over rows.

Written from SPEC.md alone, so that it and `plain` check each other. It looks at no single position before the very
end: a row falls into runs, one for every block of the table that it touches, and within a run slots ascend by 1.

All arithmetic is int64, and nothing wraps. An int32 input lies within 2**31 of 0, and so does `t` (a batch that has
rows has T <= T * width < 2**31), so every prefix, position and number of positions lies within 2**34 of 0. That
makes `_FAR` as good as any larger window (from every position it reaches below 0) and as any larger page (every
position lies in its block 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..spec.batch import INT32_MAX, Batch, BoolArray, Dependencies, Int64Array, Result

_FAR = 2**34


class _Rows(NamedTuple):
    """All rows of all batches, one batch after the other: `n` rows of `m` batches.

    batch, t: int64 [n], which batch, and which of its tokens. is_valid, named: bool [n], clauses 1 and 2; named is
    true where the row has a request. request, first, length: int64 [n], that request, the first position of the row
    and the number of its positions; 0 where not named.
    edges: int64 [m + 1], the first row of each batch. block_size, width, columns: int64 [m].
    """

    batch: Int64Array
    t: Int64Array
    is_valid: BoolArray
    named: BoolArray
    request: Int64Array
    first: Int64Array
    length: Int64Array
    edges: Int64Array
    block_size: Int64Array
    width: Int64Array
    columns: Int64Array


class _Runs(NamedTuple):
    """The table entries that all rows read, row after row, ascending in each.

    row, block: int64 [runs], which of the `n` rows, and which column of the table.
    edges: int64 [n + 1], the first run of each row.
    """

    row: Int64Array
    block: Int64Array
    edges: Int64Array


def decode_meta(batch: Batch) -> Result:
    """What a build of `batch` writes (clause 14: every `Batch` has a result).

    Returns is_valid bool [T], indices int32 [T, width], lens int32 [T], ragged int32 [indptr[T]] and indptr int32
    [T + 1]. Raises MemoryError, and ValueError where NumPy has no array of shape [0, width], for T = 0 and a width
    of 2**61 or more.
    """
    return decode_meta_many((batch,))[0]


def decode_meta_many(batches: Sequence[Batch]) -> list[Result]:
    """`decode_meta` of every batch, in order. The batches may differ in everything; there may be none.

    The arrays of the results are views of a few common ones, which live as long as any of them.
    Shapes, dtypes and errors as `decode_meta`.
    """
    if not batches:
        return []
    rows = _rows(batches)
    runs = _runs(rows)
    batch, block_size = rows.batch[runs.row], rows.block_size[rows.batch][runs.row]

    # Clause 8, for the first position of every run. A hole counts as a page after every slot; so does a page whose
    # slots might leave int64, in place of which the lowest page after every slot will do.
    row_first, block_first = rows.first[runs.row], runs.block * block_size
    first = np.maximum(row_first, block_first)
    size = np.minimum(row_first + rows.length[runs.row], block_first + block_size) - first
    page = _pages(batches, rows, runs)
    page = np.minimum(np.where(page < 0, _FAR, page), INT32_MAX // block_size + 1)
    slot = page * block_size + (first - block_first)

    # Clause 9. The slots of a run ascend, so those above INT32_MAX are its last ones.
    kept = np.clip(INT32_MAX + 1 - slot, 0, size)

    # Clauses 10 and 11. What is kept goes to the ragged form as it is, and into a dense form full of -1.
    cells = _edges(np.array([b.num_tokens * b.width for b in batches]))
    cell = (cells[rows.batch] + rows.t * rows.width[rows.batch])[runs.row] + (first - row_first)
    ragged = _spans(slot, kept).astype(np.int32)
    indices = np.full(cells[-1], -1, np.int32)
    indices[_spans(cell, kept)] = ragged

    # Clause 11. Every batch counts from 0, in one entry more than it has rows.
    counted = _edges(kept)[runs.edges]
    base, entries = counted[rows.edges], np.diff(rows.edges) + 1
    indptr = (counted[_spans(rows.edges[:-1], entries)] - np.repeat(base[:-1], entries)).astype(np.int32)

    lens = rows.length.astype(np.int32)  # clause 7
    results = []
    for i, (b, row, cell0, entry) in enumerate(zip(batches, rows.edges.tolist(), cells.tolist(), base.tolist())):
        end = row + b.num_tokens
        dense = indices[cell0 : cell0 + b.num_tokens * b.width].reshape(b.num_tokens, b.width)
        part = indptr[row + i : end + i + 1]
        results.append(
            Result(rows.is_valid[row:end], dense, lens[row:end], ragged[entry : entry + part[-1]], part)
        )
    return results


def dependencies(batch: Batch) -> Dependencies:
    """Clause 13: the elements that clauses 1 to 11 read, as a bool array in the shape of each input. No errors."""
    rows = _rows((batch,))
    runs = _runs(rows)
    masks = {name: np.zeros(array.shape, np.bool_) for name, array in batch.inputs().items()}
    masks["slot_mapping"][: batch.num_tokens] = True
    masks["token_to_req"][: batch.num_tokens] = rows.is_valid
    request = rows.request[rows.named]
    masks["query_start_loc"][request] = True
    masks["query_start_loc"][request + 1] = True
    masks["seq_lens"][request] = True
    masks["replay_start"][request] = not batch.noncausal
    masks["block_table"][rows.request[runs.row], runs.block] = True
    return Dependencies(**masks)


def _rows(batches: Sequence[Batch]) -> _Rows:
    """Clauses 1 to 6. The arrays of all batches are laid end to end, without their spare entries."""
    tokens, requests, columns, window, block_size, width, noncausal = np.array(
        [
            (
                b.num_tokens,
                b.num_reqs,
                b.block_table.shape[1],
                min(b.window_size, _FAR),
                min(b.block_size, _FAR),
                min(b.width, _FAR),  # exact: a width above INT32_MAX comes with no rows
                b.noncausal,
            )
            for b in batches
        ],
        dtype=np.int64,
    ).T
    edges = _edges(tokens)
    batch = np.repeat(np.arange(len(batches)), tokens)
    t = np.arange(edges[-1]) - edges[batch]

    is_valid = np.concatenate([b.slot_mapping[: b.num_tokens] for b in batches]) >= 0  # clause 1
    request = np.concatenate([b.token_to_req[: b.num_tokens] for b in batches], dtype=np.int64)
    named = is_valid & (request >= 0) & (request < requests[batch])  # clause 2

    # Only what named rows name is read: R may be 0. Batch i has i entries of query_start_loc more than of the rest.
    owner = batch[named]
    at = _edges(requests)[owner] + request[named]
    loc = np.concatenate([b.query_start_loc for b in batches], dtype=np.int64)
    q0, q1 = loc[at + owner], loc[at + owner + 1]
    seq = np.concatenate([b.seq_lens for b in batches], dtype=np.int64)[at]
    replay = np.concatenate([b.replay_start[: b.num_reqs] for b in batches], dtype=np.int64)[at]

    prefix = seq - (q1 - q0)  # clause 3
    position = prefix + t[named] - q0
    block_form = noncausal[owner] != 0
    start = np.where(block_form, prefix - window[owner], np.maximum(position - window[owner] + 1, replay))
    start = np.maximum(start, 0)  # clauses 4 and 5
    end = np.where(block_form, seq - 1, position)

    first, length = np.zeros_like(t), np.zeros_like(t)
    first[named] = start
    length[named] = np.clip(end - start + 1, 0, width[owner])  # clauses 6 and 7
    return _Rows(
        batch, t, is_valid, named, np.where(named, request, 0), first, length, edges, block_size, width, columns
    )


def _runs(rows: _Rows) -> _Runs:
    """The blocks that the positions of every row lie in (clause 8), as far as they are columns (clause 9)."""
    block_size = rows.block_size[rows.batch]
    block = rows.first // block_size
    last = np.minimum((rows.first + rows.length - 1) // block_size, rows.columns[rows.batch] - 1)
    count = np.where(rows.length > 0, np.maximum(last - block + 1, 0), 0)
    return _Runs(np.repeat(np.arange(len(count)), count), _spans(block, count), _edges(count))


def _pages(batches: Sequence[Batch], rows: _Rows, runs: _Runs) -> Int64Array:
    """The page number of every run. Tables are indexed one by one: they may be far larger than what is read."""
    request, edges = rows.request[runs.row], runs.edges[rows.edges].tolist()
    pages = [
        b.block_table[request[i:j], runs.block[i:j]] for b, i, j in zip(batches, edges, edges[1:], strict=False)
    ]
    return np.concatenate(pages, dtype=np.int64)


def _edges(counts: Int64Array) -> Int64Array:
    """Where each of the consecutive parts of these sizes begins, and after them where the last one ends."""
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def _spans(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """The numbers `start .. start + count - 1` of every pair, one pair after the other."""
    edges = _edges(counts)
    return np.repeat(starts - edges[:-1], counts) + np.arange(edges[-1])
