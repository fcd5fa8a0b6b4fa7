"""Every batch of a tiny world, each of them once: small enough to be judged whole, with nothing left to luck.

Batches have up to two requests and three rows; window and page are 1 to 3 positions, and both forms occur.
An entry of the block table is -1 (a hole) or a page number of its own, the last one being the null page, 0.
Padded tokens name a request all the same. Three parts differ in what they exhaust:

**One request**, 556,092 batches. A query of 0 to 3 tokens, and as many rows, or three (fewer rows are three
of which the last are padding); every pattern of padding. `seq_len` from 0 to 6, so below the query's length
too. The table ends with the last position's block and has every pattern of holes, or it is one column too
short and has none. `width` is one below the window, the window, the least legal width, and one above that,
as far as these differ and are positive. `replay_start` is anything from 0 to `seq_len + 1`; in DSpark form
just these two, which show that it plays no part there (clause 5).

**Pairs**, 260,925 batches. Queries of 0 to 3 tokens in all, which are the rows; every pattern of padding;
every `seq_len` from 0 to 3; every pattern of holes in the blocks that the positions of each request lie in.
`replay_start` is 0 or max(1, `seq_len - 1`) for each request (DSpark: its prefix), and `width` the least
legal one: other values are left to the first part, because a row depends on its own token and request alone
(clauses 2 to 10).

**Strangers**, 31,590 batches. 0 to 2 requests, of 7 and 5 positions, and 0 to 3 rows, each padded or not,
and each naming any request from -1 to 2, whether or not that request exists and the token lies in its
query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from ..spec import Batch, Int32Array, Int64Array

COUNT = 848_607
"""How many batches there are."""

_SIZES = (1, 2, 3)  # of windows and pages
_TOKENS = 3
_ONE_SEQ_LENS = range(7)
_PAIR_SEQ_LENS = range(4)
_HOLE = -1


@dataclass(frozen=True)
class _Family:
    """Batches that share most of their inputs and combine all choices of the rest."""

    noncausal: bool
    window_size: int
    block_size: int
    num_tokens: int
    query_start_loc: Int32Array
    seq_lens: Int32Array
    width: Sequence[int]
    slot_mapping: Sequence[Int64Array]
    token_to_req: Sequence[Int32Array]
    block_table: Sequence[Int32Array]
    replay_start: Sequence[Int32Array]

    @property
    def size(self) -> int:
        axes = (self.width, self.slot_mapping, self.token_to_req, self.block_table, self.replay_start)
        return int(np.prod([len(axis) for axis in axes]))

    def batch(self, index: int) -> Batch:
        """Batch `index` of `size`: its digits, in a number system of mixed radix, are the choices."""
        index, width = divmod(index, len(self.width))
        index, slot_mapping = divmod(index, len(self.slot_mapping))
        index, token_to_req = divmod(index, len(self.token_to_req))
        replay_start, block_table = divmod(index, len(self.block_table))
        return Batch(
            num_tokens=self.num_tokens,
            window_size=self.window_size,
            block_size=self.block_size,
            width=self.width[width],
            slot_mapping=self.slot_mapping[slot_mapping],
            token_to_req=self.token_to_req[token_to_req],
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table[block_table],
            replay_start=self.replay_start[replay_start],
            noncausal=self.noncausal,
        )


def batches() -> Iterator[Batch]:
    """All COUNT batches."""
    return shard(0, 1)


def shard(index: int, of: int) -> Iterator[Batch]:
    """Every `of`-th batch, from batch `index` on: the shards 0 .. of-1 make up the whole.

    A shard is spread evenly over all parts, and the batches between its own cost nothing. Raises ValueError
    unless 0 <= index < of.
    """
    if not 0 <= index < of:
        raise ValueError(f"shard {index} of {of}: expected 0 <= index < of")
    before = 0
    for family in _families():
        size = family.size
        for i in range((index - before) % of, size, of):
            yield family.batch(i)
        before += size


def _families() -> Iterator[_Family]:
    for noncausal, window, block in product((False, True), _SIZES, _SIZES):
        yield from _one_request(noncausal, window, block)
        yield from _pairs(noncausal, window, block)
        yield from _strangers(noncausal, window, block)


def _one_request(noncausal: bool, window: int, block: int) -> Iterator[_Family]:
    for query, seq_len in product(range(_TOKENS + 1), _ONE_SEQ_LENS):
        least = _least_width(noncausal, window, query)
        columns = _blocks(seq_len, block)
        tables = _tables(columns, (columns,))
        if columns:
            tables = (*tables, _pages(1, columns - 1))
        for tokens in sorted({query, _TOKENS}):
            yield _Family(
                noncausal,
                window,
                block,
                tokens,
                _int32(0, query),
                _int32(seq_len),
                width=sorted({max(1, window - 1), window, least, least + 1}),
                slot_mapping=_paddings(tokens),
                token_to_req=[_int32(*[0] * tokens)],
                block_table=tables,
                replay_start=[_int32(p) for p in ((0, seq_len + 1) if noncausal else range(seq_len + 2))],
            )


def _pairs(noncausal: bool, window: int, block: int) -> Iterator[_Family]:
    pairs = [pair for pair in product(range(_TOKENS + 1), repeat=2) if sum(pair) <= _TOKENS]
    for queries, seq_lens in product(pairs, product(_PAIR_SEQ_LENS, repeat=2)):
        tokens = sum(queries)
        blocks = tuple(_blocks(seq_len, block) for seq_len in seq_lens)
        replays: list[tuple[int, ...]]
        if noncausal:
            replays = [(max(0, seq_len - query),) for query, seq_len in zip(queries, seq_lens, strict=True)]
        else:
            replays = [(0, max(1, seq_len - 1)) for seq_len in seq_lens]
        yield _Family(
            noncausal,
            window,
            block,
            tokens,
            _int32(0, queries[0], tokens),
            _int32(*seq_lens),
            width=[_least_width(noncausal, window, max(queries))],
            slot_mapping=_paddings(tokens),
            token_to_req=[_int32(*[0] * queries[0], *[1] * queries[1])],
            block_table=_tables(max(blocks), blocks),
            replay_start=[_int32(*starts) for starts in product(*replays)],
        )


def _strangers(noncausal: bool, window: int, block: int) -> Iterator[_Family]:
    seq_lens = (7, 5)  # longer than in the other parts, so that no batch comes twice
    for requests, tokens in product(range(3), range(_TOKENS + 1)):
        yield _Family(
            noncausal,
            window,
            block,
            tokens,
            _int32(*(0, 2, 3)[: requests + 1]),
            _int32(*seq_lens[:requests]),
            width=[window],
            slot_mapping=_paddings(tokens),
            token_to_req=[_int32(*names) for names in product((-1, 0, 1, 2), repeat=tokens)],
            block_table=[_pages(requests, _blocks(max(seq_lens), block))],
            replay_start=[_int32(*(4, 0)[:requests])],
        )


def _least_width(noncausal: bool, window: int, query: int) -> int:
    """The width that rule L7 asks for: it cuts no legal row."""
    return window + query if noncausal else window


def _blocks(seq_len: int, block: int) -> int:
    """How many blocks the positions of a request lie in."""
    return -(-seq_len // block)


def _int32(*values: int) -> Int32Array:
    return np.array(values, np.int32)


@cache
def _paddings(tokens: int) -> tuple[Int64Array, ...]:
    """`slot_mapping` with every pattern of padding. Slot 0 is as valid as any."""
    return tuple(np.array(slots, np.int64) for slots in product(*[(-1, t) for t in range(tokens)]))


@cache
def _pages(requests: int, columns: int) -> Int32Array:
    """A table without holes. Numbers descend to the null page: ascending, each would be its block's own."""
    return np.arange(requests * columns, dtype=np.int32)[::-1].reshape(requests, columns)


@cache
def _tables(columns: int, blocks: tuple[int, ...]) -> tuple[Int32Array, ...]:
    """Tables with every pattern of holes in the first `blocks[r]` columns of each row `r`."""
    pages = _pages(len(blocks), columns)
    places = [(r, k) for r, count in enumerate(blocks) for k in range(count)]
    tables = []
    for holes in product((False, True), repeat=len(places)):
        table = pages.copy()
        for (r, k), hole in zip(places, holes, strict=True):
            if hole:
                table[r, k] = _HOLE
        tables.append(table)
    return tuple(tables)
