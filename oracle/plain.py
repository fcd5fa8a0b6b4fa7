"""The executable specification: plain Python integers, one small function for each clause of SPEC.md.

Read it beside SPEC.md. It is written to be checked by eye and shares nothing with the kernel; `vectorised` is the
fast twin. Every function is total: it has a result for every bit pattern of the inputs (clause 14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec import INPUTS, INT32_MAX, Batch, BoolArray, Dependencies, Result

NO_SLOT = -1
"""The entry of a position that has no slot, and of the columns after a row."""


@dataclass(frozen=True)
class Inputs:
    """A batch as plain Python integers, under the letters of SPEC.md."""

    T: int  # num_tokens
    R: int  # requests
    W: int  # window_size, positions
    B: int  # block_size, positions a page
    width: int  # entries a row at most
    noncausal: bool
    columns: int  # of block_table
    slot_mapping: Sequence[int]
    token_to_req: Sequence[int]
    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    block_table: Sequence[Sequence[int]]
    replay_start: Sequence[int]


def valid(x: Inputs, t: int) -> bool:
    """Clause 1: token `t` is not padding."""
    return x.slot_mapping[t] >= 0


def request(x: Inputs, t: int) -> int | None:
    """Clause 2: the request of token `t`, or None when its row is empty."""
    if not valid(x, t):
        return None
    r = x.token_to_req[t]
    return r if 0 <= r < x.R else None


def prefix(x: Inputs, r: int) -> int:
    """Clause 3: how many positions of request `r` come before this step's tokens."""
    return x.seq_lens[r] - (x.query_start_loc[r + 1] - x.query_start_loc[r])


def position(x: Inputs, r: int, t: int) -> int:
    """Clause 3: where token `t` stands in request `r`."""
    return prefix(x, r) + t - x.query_start_loc[r]


def causal_window(x: Inputs, r: int, t: int) -> range:
    """Clause 4: the positions that a causal token sees."""
    last = position(x, r, t)
    return range(max(0, last - x.W + 1, x.replay_start[r]), last + 1)


def dspark_block(x: Inputs, r: int) -> range:
    """Clause 5: the positions that every token of a non-causal block sees."""
    return range(max(0, prefix(x, r) - x.W), x.seq_lens[r])


def row(x: Inputs, t: int) -> tuple[int | None, range]:
    """Clause 6: the request of token `t` and the positions of its row."""
    r = request(x, t)
    if r is None:
        return None, range(0)
    seen = dspark_block(x, r) if x.noncausal else causal_window(x, r, t)
    return r, seen[: x.width]


def length(x: Inputs, t: int) -> int:
    """Clause 7: `lens[t]`; 0 after the last token."""
    if t >= x.T:
        return 0
    _, positions = row(x, t)
    return len(positions)


def slot(x: Inputs, page: int, p: int) -> int:
    """Clause 8: the slot of position `p` on page number `page`."""
    return page * x.B + p % x.B


def entry(x: Inputs, r: int, p: int) -> int:
    """Clause 9: the slot of position `p` of request `r`, or NO_SLOT."""
    k = p // x.B
    if k >= x.columns:
        return NO_SLOT
    page = x.block_table[r][k]
    if page < 0 or slot(x, page, p) > INT32_MAX:
        return NO_SLOT
    return slot(x, page, p)


def entries(x: Inputs, t: int) -> list[int]:
    """Clauses 8 and 9: the entry of each position of a row."""
    r, positions = row(x, t)
    return [] if r is None else [entry(x, r, p) for p in positions]


def dense_row(x: Inputs, t: int) -> list[int]:
    """Clause 10: `indices[t]`, `width` entries."""
    of_row = entries(x, t)
    return of_row + [NO_SLOT] * (x.width - len(of_row))


def ragged(x: Inputs) -> tuple[list[int], list[int]]:
    """Clause 11: the kept entries of all rows, and `indptr`."""
    kept: list[int] = []
    indptr = [0]
    for t in range(x.T):
        kept += [item for item in entries(x, t) if item != NO_SLOT]
        indptr.append(len(kept))
    return kept, indptr


def written(batch: Batch, lens_entries: int) -> dict[str, int]:
    """Clause 12: how many leading entries (of `indices`: rows) of each output a build writes.

    `lens_entries` is the length of `lens`, T or more, all of which is written.
    """
    x = _inputs(batch)
    _, indptr = ragged(x)
    return {"is_valid": x.T, "indices": x.T, "lens": lens_entries, "ragged": indptr[-1], "indptr": x.T + 1}


def dependencies(batch: Batch) -> Dependencies:
    """Clause 13: which input elements clauses 1 to 11 read, found by watching them read."""
    masks: dict[str, BoolArray] = {name: np.zeros(array.shape, np.bool_) for name, array in batch.inputs().items()}

    def watch(name: str, values: list[Any]) -> Sequence[Any]:
        if name == "block_table":
            return [_Watched(row, mask) for row, mask in zip(values, masks[name], strict=True)]
        return _Watched(values, masks[name])

    _build(_inputs(batch, watch))
    return Dependencies(**masks)


def decode_meta(batch: Batch) -> Result:
    """Clauses 1 to 11, 14 and 15: what one build of `batch` must write.

    Returns is_valid bool [T], indices int32 [T, width], lens int32 [T], ragged int32 [indptr[T]],
    indptr int32 [T+1]. Never raises: a Batch of any values has a result.
    """
    x = _inputs(batch)
    is_valid, indices, lens, kept, indptr = _build(x)
    return Result(
        is_valid=np.array(is_valid, np.bool_),
        indices=np.array(indices, np.int32).reshape(x.T, x.width),
        lens=np.array(lens, np.int32),
        ragged=np.array(kept, np.int32),
        indptr=np.array(indptr, np.int32),
    )


def _build(x: Inputs) -> tuple[list[bool], list[list[int]], list[int], list[int], list[int]]:
    tokens = range(x.T)
    kept, indptr = ragged(x)
    return (
        [valid(x, t) for t in tokens],
        [dense_row(x, t) for t in tokens],
        [length(x, t) for t in tokens],
        kept,
        indptr,
    )


def _as_is(name: str, values: list[Any]) -> Sequence[Any]:
    return values


def _inputs(batch: Batch, watch: Callable[[str, list[Any]], Sequence[Any]] = _as_is) -> Inputs:
    arrays = {name: watch(name, getattr(batch, name).tolist()) for name in INPUTS}
    return Inputs(
        T=batch.num_tokens,
        R=batch.num_reqs,
        W=batch.window_size,
        B=batch.block_size,
        width=batch.width,
        noncausal=batch.noncausal,
        columns=batch.block_table.shape[1],
        **arrays,
    )


class _Watched(list[Any]):
    """A list that marks which of its elements are read."""

    def __init__(self, values: list[Any], mask: BoolArray) -> None:
        super().__init__(values)
        self._mask = mask

    def __getitem__(self, index: Any) -> Any:
        self._mask[index] = True
        return super().__getitem__(index)
