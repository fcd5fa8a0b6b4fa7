"""Clause 13 as a transformation: the same step with every input that no output depends on replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..oracle import vectorised
from ..spec import (
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    SHARED,
    Batch,
    Dependencies,
    IllegalBatchError,
    Int32Array,
    Int64Array,
    check_legal,
)

_INT32_EDGES = np.array([INT32_MIN, -2, -1, 0, 1, 7, 2**30, INT32_MAX], np.int32)


def is_legal(batch: Batch) -> bool:
    """Whether `batch` keeps the rules of the legal domain."""
    try:
        check_legal(batch)
    except IllegalBatchError:
        return False
    return True


def scramble(batches: Sequence[Batch], rng: np.random.Generator) -> list[Batch]:
    """The groups of a step with all don't-care inputs drawn anew. Legal ones stay legal."""
    used = [vectorised.dependencies(batch) for batch in batches]
    of_any = {name: np.logical_or.reduce([getattr(one, name) for one in used]) for name in SHARED}
    shared: dict[str, Any] = _scrambled_shared(batches, of_any, rng)
    scrambled = []
    for batch, one in zip(batches, used, strict=True):
        own: dict[str, Any] = {
            "slot_mapping": _scrambled_slots(batch, rng),
            "block_table": _scrambled_table(batch, one, rng),
        }
        scrambled.append(replace(batch, **shared, **own))
    return scrambled


def _scrambled_slots(batch: Batch, rng: np.random.Generator) -> Int64Array:
    """Other slots of the same signs."""
    T = batch.num_tokens
    signs = batch.slot_mapping < 0
    signs[T:] = rng.integers(0, 2, signs[T:].size, dtype=bool)
    edges = rng.integers(0, 3, signs.size)
    magnitudes = np.where(edges == 0, 0, np.where(edges == 1, INT64_MAX, rng.integers(0, INT64_MAX, signs.size)))
    slots: Int64Array = np.array(magnitudes, np.int64)
    np.copyto(slots, np.where(edges == 1, INT64_MIN, -1 - magnitudes % 1000), where=signs)
    return slots


def _scrambled_table(batch: Batch, used: Dependencies, rng: np.random.Generator) -> Int32Array:
    table: Int32Array = batch.block_table.copy()
    _fill(table, ~used.block_table, rng)
    return table


def _scrambled_shared(
    batches: Sequence[Batch], used: Mapping[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    batch = batches[0]
    new = {name: getattr(batch, name).copy() for name in SHARED}
    names = list(SHARED)
    if all(is_legal(each) for each in batches):
        # The legal domain also speaks of requests that no token names: stay inside it.
        names = ["token_to_req"]
        R, query_lens = batch.num_reqs, np.diff(batch.query_start_loc)
        _fill(new["replay_start"][R:], ~used["replay_start"][R:], rng)
        idle = np.flatnonzero(~used["seq_lens"])
        new["seq_lens"][idle] = rng.integers(query_lens[idle], INT32_MAX, endpoint=True)
        prefixes = new["seq_lens"] - query_lens
        unread = np.flatnonzero(~used["replay_start"][:R])
        new["replay_start"][unread] = rng.integers(0, prefixes[unread], endpoint=True)
    for name in names:
        _fill(new[name], ~used[name], rng)
    return new


def _fill(array: np.ndarray, where: np.ndarray, rng: np.random.Generator) -> None:
    """Draw the elements of `array` at `where` from all of int32, edges favoured."""
    count = int(np.count_nonzero(where))
    anything = rng.integers(INT32_MIN, INT32_MAX, count, dtype=np.int32, endpoint=True)
    edges = _INT32_EDGES[rng.integers(0, len(_INT32_EDGES), count)]
    array[where] = np.where(rng.integers(0, 2, count, dtype=bool), anything, edges)
