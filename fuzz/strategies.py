"""Hypothesis strategies that draw cases.

A case is drawn as a short list of request objects, a geometry, a buffer layout and a few overrides; everything else -
slots, request ids, page numbers, the table's unused entries - is computed from those. So drawing is fast, and a
failure shrinks to the one or two requests that matter.

Profiles: `serving` (DeepSeek-V4.1-Flash's geometry), `legal` (any legal batch, edges favoured), `hostile` (any bit
pattern: a legal batch with inputs corrupted).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..oracle import vectorised
from ..spec import INPUTS, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, TENSORS, Batch, BufferLayout, Case
from .target import EMULATED, SHAPE_FIELDS

PROFILES = ("serving", "legal", "hostile")

ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65)
WINDOWS = (1, 2, 3, 63, 64, 65, 127, 128)
BLOCK_SIZES = (1, 2, 16, 64, 128, 3, 5, 48, 100)
SERVING_CONTEXT = 128 * 1024
INT32_EDGES = (INT32_MIN, INT32_MIN + 1, -1000, -2, -1, 0, 1, 2, 2**30, INT32_MAX - 1, INT32_MAX)
INT64_EDGES = (INT64_MIN, -(2**32), -1, 0, 1, 2**31, 2**32, 2**63 - 2, INT64_MAX)
TAIL_CHUNK = 1024  # the kernel's tile of lens' tail on a GPU; edges on either side of it are worth a visit


def _cuts(*cuts: tuple[int, ...]) -> tuple[Mapping[str, int], ...]:
    return tuple(dict(zip(SHAPE_FIELDS, sizes, strict=True)) for sizes in cuts)


# Cuts of the work into programs, beside the kernel's own choice. Few, since each is compiled on a GPU.
GPU_SHAPES = _cuts(
    (1, 1, 1, 16, 16, 1, False),
    (2, 4, 2, 64, 64, 2, False),
    (4, 16, 8, 128, 256, 4, False),
    (16, 64, 4, 256, 1024, 8, False),
    (1, 2, 4, 64, 64, 1, True),
    (4, 16, 2, 64, 1024, 2, True),
)
# For an emulated one, which takes its time for each program, and much of it for one that waits for others.
EMULATED_SHAPES = _cuts(
    (1, 4, 1, 64, 256, 1, False),
    (2, 4, 2, 64, 64, 2, False),
    (4, 16, 8, 128, 256, 4, False),
    (8, 64, 4, 256, 1024, 8, False),
    (4, 2, 4, 64, 64, 1, True),
    (4, 16, 2, 64, 1024, 2, True),
)


@dataclass(frozen=True)
class Request:
    """One request as drawn: its tokens in this step, the positions before them, and its replay start (a position)."""

    query_len: int
    prefix: int
    replay_start: int = 0


@dataclass(frozen=True)
class Geometry:
    """What all requests of a batch share. `longest` is the greatest seq_len that may be drawn."""

    window: int
    block_size: int
    noncausal: bool
    longest: int
    most_requests: int
    query_lens: tuple[int, ...]


def cases(profile: str, backend: str = "interpreter", step: bool = False) -> st.SearchStrategy[Case]:
    """Cases of a profile, for one of target.BACKENDS: what costs little differs between them.

    step: whether a case may have further cache groups, for a target that takes them.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile: expected one of {', '.join(PROFILES)}, got {profile!r}")
    return _cases(profile, backend, step)


@st.composite
def _cases(draw: st.DrawFn, profile: str, backend: str, step: bool) -> Case:
    geometry = draw(_geometries(profile, backend))
    window, block_size = geometry.window, geometry.block_size
    fewest = min(draw(st.sampled_from(_FEWEST_REQUESTS[profile])), geometry.most_requests)
    requests = draw(st.lists(_requests(geometry), min_size=fewest, max_size=geometry.most_requests))
    query_lens = np.array([request.query_len for request in requests], np.int64)
    total = int(query_lens.sum())
    T = total + draw(_padding_rows(total, backend == "gpu" and profile != "serving"))
    R = len(requests)

    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    prefixes = np.array([request.prefix for request in requests], np.int64)
    seq_lens = (prefixes + query_lens).astype(np.int32)
    replay_start = np.array([request.replay_start for request in requests], np.int32)
    of_token = np.full(T, -1, np.int64)
    of_token[:total] = np.repeat(np.arange(R), query_lens)
    padded = _padded(draw(st.sampled_from(_PADDINGS)), T, total)

    columns = max(1, -(-int(seq_lens.max(initial=0)) // block_size)) + draw(st.sampled_from((0, 0, 1, 3)))
    if profile == "serving" and draw(st.booleans()):
        columns = max(columns, SERVING_CONTEXT // block_size + 2)
    if profile != "serving":
        columns = min(columns, 4096)
    if profile == "hostile":
        columns = max(0, columns - draw(st.sampled_from((0, 0, 0, 1, 2))))
    spare_requests = draw(st.sampled_from((0, 0, 1, 5)))
    table = _pages(draw(st.sampled_from(_PAGE_STYLES)), R + spare_requests, columns, block_size)
    holes = profile == "hostile"
    for request, back, style in draw(st.lists(_overrides(holes), max_size=3)):
        if not R:
            break
        r = request % R
        if style == "shorter than its query":
            seq_lens[r] = query_lens[r] - 1
        elif style == "past the table":
            seq_lens[r] = min(columns * block_size + 1, INT32_MAX)
        elif columns:
            k = max(0, (int(seq_lens[r]) - 1) // block_size - back)
            table[r, min(k, columns - 1)] = _page(style, block_size)

    spare_tokens = draw(st.sampled_from((0, 0, 1, 3)))
    garbage = draw(st.sampled_from((0, -1, R, INT32_MAX, INT32_MIN)))
    token_to_req = np.full(T + spare_tokens, garbage, np.int64)
    token_to_req[:T] = np.where(padded, garbage, of_token)
    slots = np.arange(T + spare_tokens, dtype=np.int64) * draw(st.sampled_from((1, 0, INT32_MAX, 2**40)))
    slots[:T][padded] = draw(st.sampled_from((-1, INT64_MIN, -(2**32))))
    inputs: dict[str, Any] = {
        "slot_mapping": slots,
        "token_to_req": token_to_req.astype(np.int32),
        "query_start_loc": starts,
        "seq_lens": seq_lens,
        "block_table": table,
        "replay_start": np.concatenate([replay_start, np.full(spare_requests, garbage, np.int32)]),
    }
    scalars: dict[str, Any] = {
        "num_tokens": T,
        "window_size": window,
        "block_size": block_size,
        "noncausal": geometry.noncausal,
        "width": draw(_widths(profile, window, geometry.noncausal, int(query_lens.max(initial=0)))),
    }
    if holes:
        for t, request in draw(st.lists(st.tuples(st.integers(0, 200), st.sampled_from((R, R + 1, -1))), max_size=2)):
            if T:
                token_to_req[t % T] = request
        inputs["token_to_req"] = token_to_req.astype(np.int32)
        for name, at, value in draw(st.lists(_corruptions(), max_size=6)):
            flat = inputs[name].reshape(-1)
            if flat.size:
                flat[at % flat.size] = value
        scalars |= draw(_hostile_scalars())
    batch = Batch(**scalars, **inputs)
    poison = draw(st.sampled_from(_POISONS))
    if poison is not None:
        unseen = ~vectorised.dependencies(batch).block_table
        batch = Batch(**scalars, **{**inputs, "block_table": np.where(unseen, np.int32(poison), table)})
    shape = draw(_shapes(backend, batch))
    target = {"backend": backend, "shape": dict(shape)} if shape else {}
    most = min(7 if backend == "gpu" else 2, 2**21 // max(1, T * batch.width)) if step else 0
    groups = draw(st.lists(_groups(profile, batch), max_size=most))
    return Case(batch, draw(_layouts()), target=target, groups=tuple(groups))


@st.composite
def _groups(draw: st.DrawFn, profile: str, batch: Batch) -> Batch:
    """A further cache group: its own page size, table, padding and width, legal where `batch` is."""
    longest = max(1, int(batch.seq_lens.max(initial=0)))
    sizes = (64, 128) if profile == "serving" else BLOCK_SIZES
    # A table of many columns is slow; a legal one may not be cut.
    fit = [size for size in sizes if longest <= 4000 * size] or [batch.block_size]
    block_size = draw(st.sampled_from(fit))
    columns = min(4096, -(-longest // block_size) + draw(st.sampled_from((0, 1))))
    if profile == "hostile":
        columns -= draw(st.sampled_from((0, 0, 1)))
    table = _pages(draw(st.sampled_from(_PAGE_STYLES)), batch.block_table.shape[0], columns, block_size)
    if profile == "hostile" and table.size and draw(st.booleans()):
        table.reshape(-1)[draw(st.integers(0, 200)) % table.size] = -1
    T = batch.num_tokens
    slots = np.arange(len(batch.slot_mapping), dtype=np.int64)
    # What the first group pads stays padded: the request that such a token names is garbage.
    slots[:T][_padded(draw(st.sampled_from(_PADDINGS)), T, T) | (batch.slot_mapping[:T] < 0)] = -1
    width = batch.width + (0 if profile == "serving" else draw(st.sampled_from((0, 0, 1, 64))))
    return replace(batch, block_size=block_size, block_table=table, slot_mapping=slots, width=width)


@st.composite
def _geometries(draw: st.DrawFn, profile: str, backend: str) -> Geometry:
    noncausal = draw(st.booleans())
    emulated = backend in EMULATED  # which takes 10 ms a row
    if profile == "serving":
        query_lens = draw(st.sampled_from(((1,), (6,), (1, 6, 2, 3, 4, 5))))
        most = 4 if emulated else 64
        return Geometry(128, draw(st.sampled_from((64, 128))), noncausal, SERVING_CONTEXT, most, query_lens)
    window = draw(_edges_or_any(WINDOWS, 1, 200))
    block_size = draw(_edges_or_any((*BLOCK_SIZES, 2**31 - 1, 2**31, 2**40), 1, 130))
    longest = draw(
        st.sampled_from((window + 3 * min(block_size, 200), 4 * window + 40, 1200, min(40_000, 4000 * block_size)))
    )
    if emulated:
        return Geometry(window, block_size, noncausal, longest, 4, (1, 0, 2, 3, 5, 6, 17))
    if draw(st.integers(0, 15)) == 15:  # rarely: rows in plenty, of few requests
        if backend == "gpu" and draw(st.integers(0, 3)) == 3:
            # A DSpark row is as wide as a query is long: those of thousands would fill the memory.
            return Geometry(window, block_size, False, longest, 1, (1, 4096, 8191, 16383, 16384))
        return Geometry(window, block_size, noncausal, longest, 2, (1, 515, 1030))
    return Geometry(window, block_size, noncausal, longest, 12, (1, 0, 2, 3, 5, 6, 17, 33, 66))


@lru_cache(maxsize=256)
def _edges_or_any(edges: Sequence[int], low: int, high: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from(sorted(edges)), st.integers(low, high))


@lru_cache(maxsize=1024)
def _requests(geometry: Geometry) -> st.SearchStrategy[Request]:
    """Requests whose sequence length favours 0, the query length, the window, page edges and the longest, +-1."""
    window, block = geometry.window, min(geometry.block_size, 2**20)
    longest = geometry.longest
    around = {0, window, block, 2 * block, window + block, longest - 6, longest // 2 // block * block}
    # One more step down: a length is its prefix and at least one token.
    edges = sorted({edge + step for edge in around for step in (-2, -1, 0, 1) if 0 <= edge + step <= longest})
    prefixes = st.one_of(st.sampled_from(edges), st.integers(0, longest))
    query_lens = st.sampled_from(geometry.query_lens)

    def build(query_len: int, prefix: int, replay: int) -> Request:
        prefix = min(prefix, max(0, longest - query_len))  # most query lengths are far below the longest
        # From the prefix back, so that the clip falls inside the window as often as not.
        replay_start = 0 if replay == 0 else max(0, prefix - (replay - 1) * max(1, window // 4))
        return Request(query_len, prefix, replay_start)

    return st.builds(build, query_lens, prefixes, st.integers(0, 7))


@lru_cache(maxsize=4096)
def _padding_rows(total: int, far: bool) -> st.SearchStrategy[int]:
    """How many rows of padding follow the last request: none, one, or up to the next sizes worth a visit.

    far: whether, rarely, up to the sizes of the largest buffers.
    """
    nearest = 9 if total == 0 else 3 if total < 33 else 1
    edges = [edge - total for edge in (*ROWS, 128, 256, 384) if edge >= total][:nearest]
    usual = st.sampled_from((0, 0, 1, *edges))
    if not far or total > 4096:
        return usual
    most = st.sampled_from([edge - total for edge in (4096, 4097, 8193, 16384)])
    return st.integers(0, 127).flatmap(lambda n: most if n == 127 else usual)


def _padded(style: str, T: int, total: int) -> np.ndarray:
    """Which tokens are padding."""
    padded = np.arange(T) >= total
    if style == "all":
        padded[:] = True
    elif style == "alternating":
        padded[::2] = True
    elif style == "middle":
        padded[total // 3 : total // 3 + max(1, total // 4)] = True
    elif style == "first":
        padded[:1] = True
    elif style == "tail":
        padded[max(0, total - 2) :] = True
    return padded


_FEWEST_REQUESTS = {"serving": (1, 1, 2, 8, 20, 64), "legal": (0, 0, 1, 6), "hostile": (0, 0, 1, 3)}
_PADDINGS = ("none", "none", "none", "first", "tail", "middle", "alternating", "all")
_PAGE_STYLES = ("counting", "counting", "scattered", "largest", "null")
_POISONS = (None, -1, INT32_MAX, INT32_MIN, 12345)


def _pages(style: str, rows: int, columns: int, block_size: int) -> np.ndarray:
    """Page numbers, all of whose slots fit int32."""
    most = _page("largest", block_size)
    count = np.arange(rows * columns, dtype=np.int64)
    if most < 1 or style == "null":
        count = np.zeros_like(count)
    elif style == "scattered":
        count = count * 2654435761 % (most + 1)
    elif style == "largest":
        count = most - count % min(most + 1, 1 << 20)
    else:
        count = 1 + count % most
    return count.astype(np.int32).reshape(rows, columns)


def _page(style: str, block_size: int) -> int:
    """A page number worth a visit: "largest" is the last all of whose slots fit int32, "cut" the one after it."""
    largest = max(0, 2**31 // block_size - 1)
    pages = {"one": 1, "null": 0, "largest": largest, "cut": largest + 1, "past": largest + 2}
    pages |= {"hole": -1, "deep hole": INT32_MIN, "huge": INT32_MAX}
    return min(pages[style], INT32_MAX)


@lru_cache(maxsize=2)
def _overrides(hostile: bool) -> st.SearchStrategy[tuple[int, int, str]]:
    """(request, blocks back from its last, style of page number); or, hostile, a length that no request may have."""
    legal = ("null", "largest")
    pages, lengths = ("hole", "deep hole", *legal, "cut", "past", "huge"), ("shorter than its query", "past the table")
    styles = st.sampled_from((*pages, *lengths) if hostile else legal)
    return st.tuples(st.integers(0, 63), st.integers(0, 3), styles)


@lru_cache(maxsize=4096)
def _widths(profile: str, window: int, noncausal: bool, longest_query: int) -> st.SearchStrategy[int]:
    if profile == "serving":
        return st.just(192 if noncausal else 128)
    needed = window + longest_query if noncausal else window
    rounded = -(-needed // 64) * 64
    legal = (needed, needed, rounded, needed + 1, needed + 70)
    if profile == "legal":
        return st.sampled_from(legal)
    return st.one_of(st.sampled_from((*legal, 1, max(1, window - 1), max(1, window // 2))), st.integers(1, 300))


@lru_cache(maxsize=1)
def _corruptions() -> st.SearchStrategy[tuple[str, int, int]]:
    """(input, index to be taken modulo its size, value)."""

    def of(name: str) -> st.SearchStrategy[tuple[str, int, int]]:
        wide = TENSORS[name].dtype == "int64"
        edges, low, high = (INT64_EDGES, INT64_MIN, INT64_MAX) if wide else (INT32_EDGES, INT32_MIN, INT32_MAX)
        values = st.one_of(st.sampled_from(edges), st.integers(-3, 300), st.integers(low, high))
        return st.tuples(st.just(name), st.integers(0, 200), values)

    return st.one_of(*[of(name) for name in INPUTS])


@lru_cache(maxsize=1)
def _hostile_scalars() -> st.SearchStrategy[dict[str, int]]:
    return st.sampled_from(
        (
            {},
            {},
            {},
            {},
            {},
            {"window_size": 2**31 - 1},
            {"window_size": 2**40},
            {"block_size": 2**31 - 1},
            {"block_size": 2**62},
        )
    )


@lru_cache(maxsize=1)
def _layouts() -> st.SearchStrategy[BufferLayout]:
    plain = st.builds(BufferLayout, guard=st.sampled_from(("end", "start")), lens_tail=st.sampled_from((0, 1, 9)))
    return st.one_of(
        plain,
        st.builds(
            BufferLayout,
            indices_ndim=st.sampled_from((3, 2)),
            indices_row_gap=st.sampled_from((0, 1, 5, 64)),
            block_table_row_gap=st.sampled_from((0, 1, 6)),
            spare_rows=st.sampled_from((0, 1, 7)),
            lens_tail=st.sampled_from((0, 1, 31, TAIL_CHUNK, TAIL_CHUNK + 1, 16384)),
            ragged_spare=st.sampled_from((0, 1, 130)),
            misalignment=st.sampled_from((0, 1, 2, 3)),
            guard=st.sampled_from(("end", "start")),
        ),
    )


# For the interpreter: into how many parts to cut a launch's rows, the rows counted, a row's pages and its columns.
_INTERPRETER_PARTS = ((2, 3, 2, 1), (3, 1, 1, 2), (5, 2, 3, 3), (2, 9, 9, 9))
_INTERPRETER_MOST = (512, 512, 1024, 1024)  # of each: Triton has no tile of more than 2**20 elements


def _shapes(backend: str, batch: Batch) -> st.SearchStrategy[Mapping[str, int] | None]:
    """Ways to cut the launch into programs; None leaves it to the kernel.

    The interpreter pays for each step, so there everything is cut into a few; a GPU, emulated or not, pays for each
    kernel that is compiled for it.
    """
    if backend != "interpreter":
        return st.sampled_from((None, None, None, *(EMULATED_SHAPES if backend in EMULATED else GPU_SHAPES)))
    sizes = (batch.num_tokens, batch.num_tokens, (batch.width - 1) // batch.block_size + 2, batch.width)
    shapes = []
    for parts in _INTERPRETER_PARTS:
        chunks = [
            min(most, _power_of_two(-(-size // part)))
            for size, part, most in zip(sizes, parts, _INTERPRETER_MOST, strict=True)
        ]
        shape = dict(zip(SHAPE_FIELDS, (*chunks, 2 * TAIL_CHUNK), strict=False))
        # In bunches of one tile, so that a few tiles are some bunches.
        shapes += [shape, {**shape, "look_back": True, "count_rows": 1}]
    return st.sampled_from((None, None, None, *shapes))


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
