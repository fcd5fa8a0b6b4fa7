"""Clause 13 as a transformation: the same batch with every input that no output depends on replaced."""

from __future__ import annotations

import numpy as np

from ..oracle import vectorised
from ..spec import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, Batch, IllegalBatchError, check_legal

_INT32_EDGES = np.array([INT32_MIN, -2, -1, 0, 1, 7, 2**30, INT32_MAX], np.int32)


def is_legal(batch: Batch) -> bool:
    """Whether `batch` keeps the rules of the legal domain."""
    try:
        check_legal(batch)
    except IllegalBatchError:
        return False
    return True


def scramble(batch: Batch, rng: np.random.Generator) -> Batch:
    """`batch` with all don't-care inputs drawn anew. A legal batch stays legal."""
    used = vectorised.dependencies(batch)
    free = {name: ~getattr(used, name) for name in batch.inputs()}
    new = {name: array.copy() for name, array in batch.inputs().items()}
    T, R = batch.num_tokens, batch.num_reqs

    signs = batch.slot_mapping < 0
    signs[T:] = rng.integers(0, 2, signs[T:].size, dtype=bool)
    edges = rng.integers(0, 3, signs.size)
    magnitudes = np.where(edges == 0, 0, np.where(edges == 1, INT64_MAX, rng.integers(0, INT64_MAX, signs.size)))
    new["slot_mapping"] = np.where(signs, np.where(edges == 1, INT64_MIN, -1 - magnitudes % 1000), magnitudes)

    names = ["token_to_req", "block_table", "replay_start", "seq_lens", "query_start_loc"]
    if is_legal(batch):
        # The legal domain also speaks of requests that no token names: stay inside it.
        names = names[:2]
        prefixes = batch.seq_lens - np.diff(batch.query_start_loc)
        _fill(new["replay_start"][R:], free["replay_start"][R:], rng)
        idle = np.flatnonzero(free["seq_lens"])
        new["seq_lens"][idle] = rng.integers(np.diff(batch.query_start_loc)[idle], INT32_MAX, endpoint=True)
        prefixes[idle] = new["seq_lens"][idle] - np.diff(batch.query_start_loc)[idle]
        unread = np.flatnonzero(free["replay_start"][:R])
        new["replay_start"][unread] = rng.integers(0, prefixes[unread], endpoint=True)
    for name in names:
        _fill(new[name], free[name], rng)
    return Batch(
        num_tokens=T,
        window_size=batch.window_size,
        block_size=batch.block_size,
        width=batch.width,
        noncausal=batch.noncausal,
        **new,
    )


def _fill(array: np.ndarray, where: np.ndarray, rng: np.random.Generator) -> None:
    """Draw the elements of `array` at `where` from all of int32, edges favoured."""
    count = int(np.count_nonzero(where))
    anything = rng.integers(INT32_MIN, INT32_MAX, count, dtype=np.int32, endpoint=True)
    edges = _INT32_EDGES[rng.integers(0, len(_INT32_EDGES), count)]
    array[where] = np.where(rng.integers(0, 2, count, dtype=bool), anything, edges)
