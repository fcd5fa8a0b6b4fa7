"""What a case exercises, as named predicates. A campaign counts them: this is its coverage.

Branch coverage cannot see inside a GPU program; the features of the inputs can be seen, named and missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..oracle import vectorised
from ..spec import INT32_MAX, Batch, BoolArray, BufferLayout, Case, Int64Array, Result
from .scramble import is_legal
from .strategies import TAIL_CHUNK
from .target import EMULATED


@dataclass(frozen=True)
class View:
    """A case and, worked out once, what the predicates ask of it."""

    case: Case

    @property
    def batch(self) -> Batch:
        """The case's batch."""
        return self.case.batch

    @property
    def layout(self) -> BufferLayout:
        """The case's buffer layout."""
        return self.case.buffers

    @cached_property
    def result(self) -> Result:
        """What a build must write."""
        return vectorised.decode_meta(self.batch)

    @cached_property
    def legal(self) -> bool:
        """Whether the batch is legal."""
        return is_legal(self.batch)

    @cached_property
    def valid(self) -> BoolArray:
        """Which tokens are valid."""
        return self.result.is_valid

    @cached_property
    def live(self) -> BoolArray:
        """Which tokens have a request."""
        named = self.batch.token_to_req[: self.batch.num_tokens]
        return self.valid & (named >= 0) & (named < self.batch.num_reqs)

    @cached_property
    def reqs(self) -> Int64Array:
        """The request of each live token."""
        return self.batch.token_to_req[: self.batch.num_tokens][self.live].astype(np.int64)

    @cached_property
    def query_lens(self) -> Int64Array:
        """q1 - q0 of each request."""
        starts = self.batch.query_start_loc.astype(np.int64)
        return starts[1:] - starts[:-1]

    @cached_property
    def first(self) -> Int64Array:
        """The first position of each live row, were it long enough to have one."""
        batch, prefix = self.batch, self.batch.seq_lens - self.query_lens
        window = min(batch.window_size, 2**34)
        if batch.noncausal:
            first: Int64Array = np.maximum(0, prefix[self.reqs] - window)
        else:
            first = np.maximum(np.maximum(0, self.last - window + 1), batch.replay_start[self.reqs])
        return first

    @cached_property
    def last(self) -> Int64Array:
        """The last position that each live row would have, were it not cut."""
        batch, prefix = self.batch, self.batch.seq_lens - self.query_lens
        if batch.noncausal:
            return batch.seq_lens[self.reqs].astype(np.int64) - 1
        return prefix[self.reqs] + np.flatnonzero(self.live) - batch.query_start_loc[self.reqs]

    @cached_property
    def lens(self) -> Int64Array:
        """Lengths of the live rows."""
        return self.result.lens[self.live].astype(np.int64)

    @cached_property
    def pages_seen(self) -> Int64Array:
        """The page numbers that the outputs depend on."""
        return self.batch.block_table[vectorised.dependencies(self.batch).block_table].astype(np.int64)

    @cached_property
    def holes(self) -> bool:
        """Whether a live row holds a position without a slot."""
        kept = np.diff(self.result.indptr)[self.live]
        return bool((kept < self.lens).any())

    @cached_property
    def ends_at(self) -> Int64Array:
        """last + 1 modulo the page size, of the live rows that see anything."""
        return (self.last[self.lens > 0] + 1) % min(self.batch.block_size, 2**34)


def _padding_inside(view: View) -> bool:
    where = np.flatnonzero(~view.valid)
    return bool(view.valid.size and where.size and view.valid[where[0] :].any())


FEATURES: dict[str, Callable[[View], bool]] = {
    "causal": lambda v: not v.batch.noncausal,
    "dspark block": lambda v: v.batch.noncausal,
    "legal batch": lambda v: v.legal,
    "illegal batch": lambda v: not v.legal,
    # rows
    "no tokens": lambda v: v.batch.num_tokens == 0,
    "no requests": lambda v: v.batch.num_reqs == 0,
    "one row": lambda v: v.batch.num_tokens == 1,
    "rows at a power of two": lambda v: v.batch.num_tokens in (2, 4, 8, 16, 32, 64, 128, 256, 512),
    "rows one past a power of two": lambda v: v.batch.num_tokens in (3, 5, 9, 17, 33, 65, 129, 257),
    "rows one before a power of two": lambda v: v.batch.num_tokens in (3, 7, 15, 31, 63, 127, 255),
    "more than 32 rows": lambda v: v.batch.num_tokens > 32,
    "more than 256 rows": lambda v: v.batch.num_tokens > 256,
    "more than 1024 rows": lambda v: v.batch.num_tokens > 1024,
    "more than 4096 rows": lambda v: v.batch.num_tokens > 4096,
    # padding
    "padded row": lambda v: not v.valid.all(),
    "padding between valid rows": _padding_inside,
    "all rows padded": lambda v: v.batch.num_tokens > 0 and not v.valid.any(),
    "padded row names no request": lambda v: bool(
        (v.batch.token_to_req[: v.batch.num_tokens][~v.valid] >= v.batch.num_reqs).any()
        or (v.batch.token_to_req[: v.batch.num_tokens][~v.valid] < 0).any()
    ),
    "valid row names no request": lambda v: bool((v.valid & ~v.live).any()),
    # requests
    "zero-length request": lambda v: bool((v.query_lens == 0).any()),
    "mixed query lengths": lambda v: len(set(v.query_lens.tolist())) > 1,
    "sequence shorter than its query": lambda v: bool((v.batch.seq_lens < v.query_lens).any()),
    "sequence as long as its query": lambda v: bool((v.batch.seq_lens == v.query_lens).any()),
    "sequence past 64k": lambda v: bool((v.batch.seq_lens > 65536).any()),
    "query_start_loc decreases": lambda v: bool((v.query_lens < 0).any()),
    # window
    "window clipped at 0": lambda v: bool((v.lens > 0).any() and (v.first[v.lens > 0] == 0).any()),
    "window clipped by replay": lambda v: (
        not v.batch.noncausal and bool(((v.first == v.batch.replay_start[v.reqs]) & (v.first > 0) & (v.lens > 0)).any())
    ),
    "replay past the position": lambda v: (
        not v.batch.noncausal and bool((v.batch.replay_start[v.reqs].astype(np.int64) > v.last).any())
    ),
    "full window": lambda v: bool((v.lens >= v.batch.window_size).any()),
    "row cut to width": lambda v: bool((v.last - v.first + 1 > v.batch.width).any()),
    "live row that sees nothing": lambda v: bool((v.lens == 0).any()),
    "width past the window": lambda v: v.batch.width > v.batch.window_size,
    "width not a power of two": lambda v: v.batch.width & (v.batch.width - 1) != 0,
    "position past int32": lambda v: bool((v.last > INT32_MAX).any()),
    # pages
    "page size not a power of two": lambda v: v.batch.block_size & (v.batch.block_size - 1) != 0,
    "one position a page": lambda v: v.batch.block_size == 1,
    "window crosses a page edge": lambda v: bool(
        (v.first // min(v.batch.block_size, 2**34) != v.last // min(v.batch.block_size, 2**34))[v.lens > 0].any()
    ),
    "row ends at a page's end": lambda v: bool((v.ends_at == 0).any()),
    "row ends at a page's start": lambda v: bool((v.ends_at == 1 % min(v.batch.block_size, 2**34)).any()),
    "null page": lambda v: bool((v.pages_seen == 0).any()),
    "hole in the window": lambda v: bool((v.pages_seen < 0).any()),
    "no slot for a position": lambda v: v.holes,
    "position past the table": lambda v: bool(
        (v.last[v.lens > 0] // min(v.batch.block_size, 2**34) >= v.batch.block_table.shape[1]).any()
    ),
    "slot past 2**30": lambda v: bool((v.result.ragged > 2**30).any()),
    "slot does not fit int32": lambda v: bool(
        (v.pages_seen * min(v.batch.block_size, 2**31) + min(v.batch.block_size, 2**31) - 1 > INT32_MAX).any()
    ),
    "poison outside the window": lambda v: bool(
        (np.abs(v.batch.block_table[~vectorised.dependencies(v.batch).block_table].astype(np.int64)) > 2**30).any()
    ),
    "nothing kept": lambda v: v.batch.num_tokens > 0 and len(v.result.ragged) == 0,
    # buffers
    "one-column table": lambda v: v.batch.block_table.shape[1] == 1,
    "strided table": lambda v: v.layout.block_table_row_gap > 0,
    "strided rows": lambda v: v.layout.indices_row_gap > 0,
    "rows without the middle axis": lambda v: v.layout.indices_ndim == 2,
    "spare rows": lambda v: v.layout.spare_rows > 0,
    "no tail": lambda v: v.layout.lens_tail == 0,
    "tail of one tile": lambda v: v.layout.lens_tail == TAIL_CHUNK,
    "tail one past a tile": lambda v: v.layout.lens_tail == TAIL_CHUNK + 1,
    "odd alignment": lambda v: v.layout.misalignment > 0,
    "guard before the tensors": lambda v: v.layout.guard == "start",
    "work cut another way": lambda v: bool(v.case.target.get("shape")),
    "offsets by look-back": lambda v: bool((v.case.target.get("shape") or {}).get("look_back")),
    # groups
    "several groups": lambda v: bool(v.case.groups),
    "groups of other page sizes": lambda v: len({batch.block_size for batch in v.case.step}) > 1,
    "groups padded in other places": lambda v: any(
        ((batch.slot_mapping < 0) != (v.batch.slot_mapping < 0)).any() for batch in v.case.groups
    ),
}


_ILLEGAL = {
    "illegal batch",
    "valid row names no request",
    "sequence shorter than its query",
    "query_start_loc decreases",
    "replay past the position",
    "row cut to width",
    "live row that sees nothing",
    "position past int32",
    "hole in the window",
    "no slot for a position",
    "position past the table",
}
_NOT_SERVED = {
    "no tokens",
    "no requests",
    "more than 1024 rows",
    "more than 4096 rows",
    "zero-length request",
    "page size not a power of two",
    "one position a page",
}
BEYOND: dict[str, set[str]] = {
    "serving": _ILLEGAL | _NOT_SERVED | {"slot does not fit int32"},
    "legal": _ILLEGAL | {"slot does not fit int32", "sequence past 64k"},
    "hostile": set(),
}
"""The features that the cases of a profile cannot have."""
_OF_STEPS = {"several groups", "groups of other page sizes", "groups padded in other places"}
_TOO_SLOW = {
    "gpu": set[str](),
    "interpreter": {"more than 4096 rows"},
    **{backend: {"more than 4096 rows", "more than 1024 rows", "more than 256 rows"} for backend in EMULATED},
}
"""The features whose cases a backend takes minutes for; "" is one that is not known yet."""


def features_of(case: Case) -> list[str]:
    """The names of the features that a case has."""
    view = View(case)
    return [name for name, has in FEATURES.items() if has(view)]


def reachable(profiles: Iterable[str], backend: str = "interpreter", step: bool = False) -> list[str]:
    """The features that cases of these profiles can have, drawn for this backend, and for a target of steps or not."""
    beyond = set.intersection(*(BEYOND[profile] for profile in profiles))
    beyond |= (set() if step else _OF_STEPS) | _TOO_SLOW.get(backend, set())
    return [name for name in FEATURES if name not in beyond]
