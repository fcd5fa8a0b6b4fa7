"""SPEC.md once more, in NumPy: all rows of any number of batches in one pass, with no loop over rows.

Written from SPEC.md alone, so that it and `plain` check each other. It looks at no single position before
the very end: a row falls into runs, one for every block of the table that it touches, and the positions of a
run have consecutive slots.

All arithmetic is int64, and nothing wraps. An int32 input lies within 2**31 of 0, and so does `t` (a batch
that has rows has T <= T * width < 2**31), so every prefix, position and number of positions lies within
2**34 of 0. That makes `_FAR` as good as any larger window (it reaches below 0 from every position) and as
any larger page (every position lies in its block 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..spec.batch import INT32_MAX, Batch, BoolArray, Dependencies, Int64Array, Result

_FAR = 2**34


class _Rows(NamedTuple):
    """All rows of all batches, one batch after the other: `n` rows of `m` batches.

    batch, t: int64 [n], which batch, and which of its tokens.
    is_valid, named: bool [n], clause 1, and whether the row has a request, clause 2.
    request, first, length: int64 [n], that request, the row's first position and its number of positions;
    0 where not named.
    edges: int64 [m + 1], the first row of each batch, and the end of the last.
    block_size, width, columns: int64 [m], of each batch.
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
    edges: int64 [n + 1], the first run of each row, and the end of the last.
    """

    row: Int64Array
    block: Int64Array
    edges: Int64Array


def decode_meta(batch: Batch) -> Result:
    """What a build of `batch` writes (clause 14: every `Batch` has a result).

    Returns is_valid bool [T], indices int32 [T, width], lens int32 [T], ragged int32 [indptr[T]] and indptr
    int32 [T + 1]. Raises MemoryError; and ValueError for T = 0 with a width of 2**61 or more, because NumPy
    has no int32 array of shape [0, width] then.
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
    batch = rows.batch[runs.row]
    block_size = rows.block_size[batch]

    # Clause 8, for the first position of every run. Pages above INT32_MAX // B have only slots above
    # INT32_MAX: the lowest of them stands for the others, whose slots might leave int64, and for holes.
    row_first, block_first = rows.first[runs.row], runs.block * block_size
    first = np.maximum(row_first, block_first)
    size = np.minimum(row_first + rows.length[runs.row], block_first + block_size) - first
    page = _pages(batches, rows, runs)
    page = np.minimum(np.where(page < 0, _FAR, page), INT32_MAX // block_size + 1)
    slot = page * block_size + (first - block_first)

    # Clause 9. The slots of a run ascend, so those above INT32_MAX are its last ones.
    kept = np.clip(INT32_MAX + 1 - slot, 0, size)

    # Clauses 10 and 11. What is kept makes up the ragged form, and is spread over a dense form of -1.
    cells = _edges(np.diff(rows.edges) * rows.width)
    cell = cells[batch] + rows.t[runs.row] * rows.width[batch] + (first - row_first)
    ragged = _spans(slot, kept).astype(np.int32)
    indices = np.full(cells[-1], -1, np.int32)
    indices[_spans(cell, kept)] = ragged

    # Clause 11. Every batch counts from 0, so that it has one entry more than it has rows.
    kept_before = _edges(kept)[runs.edges]
    base, entries = kept_before[rows.edges], np.diff(rows.edges) + 1
    indptr = (kept_before[_spans(rows.edges[:-1], entries)] - np.repeat(base[:-1], entries)).astype(np.int32)

    lens = rows.length.astype(np.int32)  # clause 7
    results = []
    places = zip(batches, _pairs(rows.edges), _pairs(cells), _pairs(base), strict=True)
    for i, (b, (row, row_end), (cell0, cell_end), (entry, entry_end)) in enumerate(places):
        results.append(
            Result(
                rows.is_valid[row:row_end],
                indices[cell0:cell_end].reshape(b.num_tokens, b.width),
                lens[row:row_end],
                ragged[entry:entry_end],
                indptr[row + i : row_end + i + 1],
            )
        )
    return results


def dependencies(batch: Batch) -> Dependencies:
    """The elements that clauses 1 to 11 read (clause 13): a bool array in the shape of each input.

    Raises nothing but MemoryError.
    """
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
    """Clauses 1 to 7. The arrays of all batches are laid end to end, without their spare entries."""
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

    # From here on only named rows: the others have nothing to read. `at` counts the requests of all batches;
    # in query_start_loc every batch before has one entry more than it has requests.
    owner = batch[named]
    at = _edges(requests)[owner] + request[named]
    loc = np.concatenate([b.query_start_loc for b in batches], dtype=np.int64)
    q0, q1 = loc[at + owner], loc[at + owner + 1]
    seq = np.concatenate([b.seq_lens for b in batches], dtype=np.int64)[at]
    replay = np.concatenate([b.replay_start[: b.num_reqs] for b in batches], dtype=np.int64)[at]

    prefix = seq - (q1 - q0)  # clause 3
    position = prefix + t[named] - q0
    dspark = noncausal[owner] != 0
    start = np.where(dspark, prefix - window[owner], np.maximum(position - window[owner] + 1, replay))
    start = np.maximum(start, 0)  # clauses 4 and 5
    end = np.where(dspark, seq - 1, position)

    named_request, first, length = np.zeros((3, len(t)), np.int64)
    named_request[named] = request[named]
    first[named] = start
    length[named] = np.clip(end - start + 1, 0, width[owner])  # clauses 6 and 7
    return _Rows(batch, t, is_valid, named, named_request, first, length, edges, block_size, width, columns)


def _runs(rows: _Rows) -> _Runs:
    """The blocks that the positions of every row lie in (clause 8), as far as they are columns (clause 9)."""
    block_size = rows.block_size[rows.batch]
    block = rows.first // block_size
    last = np.minimum((rows.first + rows.length - 1) // block_size, rows.columns[rows.batch] - 1)
    count = np.where(rows.length > 0, np.maximum(last - block + 1, 0), 0)
    return _Runs(np.repeat(np.arange(len(count)), count), _spans(block, count), _edges(count))


def _pages(batches: Sequence[Batch], rows: _Rows, runs: _Runs) -> Int64Array:
    """The page number of every run. No table is copied: it may be far larger than what is read of it."""
    request, parts = rows.request[runs.row], zip(batches, _pairs(runs.edges[rows.edges]), strict=True)
    pages = [b.block_table[request[i:j], runs.block[i:j]] for b, (i, j) in parts]
    return np.concatenate(pages, dtype=np.int64)


def _edges(counts: Int64Array) -> Int64Array:
    """Where each of the consecutive parts of these sizes begins, and after them where the last one ends."""
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def _pairs(edges: Int64Array) -> Iterator[tuple[int, int]]:
    """The beginning and the end of every part that `_edges` marks off."""
    return pairwise(edges.tolist())


def _spans(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """The numbers `start .. start + count - 1` of every pair, one pair after the other."""
    edges = _edges(counts)
    spans = np.repeat(starts - edges[:-1], counts)
    spans += np.arange(edges[-1])
    return spans
