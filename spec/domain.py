"""The legal domain (SPEC.md section 5) as code: the one check that generator, oracle, launcher and replay share."""

from __future__ import annotations

import numpy as np

from .batch import INT32_MAX, Batch, BoolArray, Int64Array
from .errors import IllegalBatchError, brief


def check_legal(batch: Batch) -> None:
    """Raise IllegalBatchError, naming rule, element and what was found, unless `batch` keeps L1 to L7."""
    R, T = batch.num_reqs, batch.num_tokens
    # int64 holds every sum below exactly: each is of a few int32 values.
    starts = batch.query_start_loc.astype(np.int64)
    seq_lens = batch.seq_lens.astype(np.int64)
    replay_start = batch.replay_start[:R].astype(np.int64)
    query_lens = np.diff(starts)
    prefixes = seq_lens - query_lens

    if starts[0] != 0:
        raise IllegalBatchError("L1", "query_start_loc[0]", f"is {starts[0]}, not 0")
    for r in _first(query_lens < 0):
        raise IllegalBatchError("L1", f"query_start_loc[{r + 1}]", f"is {starts[r + 1]}, below {starts[r]} before it")

    tokens = np.flatnonzero(batch.slot_mapping[:T] >= 0)
    for i in _first(tokens >= starts[R]):
        raise IllegalBatchError(
            "L2", f"slot_mapping[{tokens[i]}]", f"is valid, at or after query_start_loc[R] = {starts[R]}"
        )
    reqs = batch.token_to_req[:T].astype(np.int64)[tokens]
    for i in _first((reqs < 0) | (reqs >= R)):
        raise IllegalBatchError("L3", f"token_to_req[{tokens[i]}]", f"is {reqs[i]}, outside the {R} requests")
    for i in _first((tokens < starts[reqs]) | (tokens >= starts[reqs + 1])):
        r = reqs[i]
        raise IllegalBatchError(
            "L3", f"token_to_req[{tokens[i]}]", f"is {r}, whose tokens are {starts[r]} to {starts[r + 1] - 1}"
        )
    for r in _first(prefixes < 0):
        raise IllegalBatchError("L4", f"seq_lens[{r}]", f"is {seq_lens[r]}, below its {query_lens[r]} query tokens")
    for r in _first((replay_start < 0) | (replay_start > prefixes)):
        raise IllegalBatchError("L5", f"replay_start[{r}]", f"is {replay_start[r]}, outside 0 to {prefixes[r]}")

    if R or not batch.noncausal:  # L7 asks nothing of a DSpark batch without requests
        needed = batch.window_size + (int(query_lens.max()) if batch.noncausal else 0)
        if batch.width < needed:
            raise IllegalBatchError("L7", "width", f"is {batch.width}, below {brief(needed)}")
    _check_pages(batch, tokens, reqs, starts, prefixes, seq_lens, replay_start)


def _check_pages(
    batch: Batch,
    tokens: Int64Array,
    reqs: Int64Array,
    starts: Int64Array,
    prefixes: Int64Array,
    seq_lens: Int64Array,
    replay_start: Int64Array,
) -> None:
    """L6, for `tokens` (the valid ones) of requests `reqs`."""
    # Positions fit int32 once L1 to L5 hold, so a larger window or page is no different from this one.
    window, block = min(batch.window_size, 2**31), min(batch.block_size, 2**31)
    if batch.noncausal:
        first, last = np.maximum(0, prefixes[reqs] - window), seq_lens[reqs] - 1
    else:
        last = prefixes[reqs] + tokens - starts[reqs]
        first = np.maximum(np.maximum(0, last - window + 1), replay_start[reqs])
    first_block, last_block = first // block, last // block
    columns = batch.block_table.shape[1]
    for i in _first(last_block >= columns):
        raise IllegalBatchError(
            "L6",
            f"block_table[{reqs[i]}]",
            f"has {columns} columns, and token {tokens[i]} sees position {last[i]} in block {last_block[i]}",
        )
    most = int((last_block - first_block).max(initial=-1)) + 1
    for step in range(most):
        k = first_block + step
        at = np.flatnonzero(k <= last_block)
        pages = batch.block_table[reqs[at], k[at]].astype(np.int64)
        for i in _first(pages < 0):
            raise IllegalBatchError(
                "L6", f"block_table[{reqs[at[i]]}][{k[at[i]]}]", f"is {pages[i]}, and token {tokens[at[i]]} sees it"
            )
        offset = np.minimum(last[at] - k[at] * block, block - 1)
        for i in _first(pages * block + offset > INT32_MAX):
            raise IllegalBatchError(
                "L6",
                f"block_table[{reqs[at[i]]}][{k[at[i]]}]",
                f"is {pages[i]}, whose slots of pages of {brief(batch.block_size)} pass 2**31 - 1",
            )


def _first(wrong: BoolArray) -> list[int]:
    """The index of the first wrong element, as a list of one or none, so that a check reads as a `for`."""
    return [int(np.argmax(wrong))] if wrong.any() else []
