"""A plain-text picture of one case, for the person who has a shrunk failure before them.

    request 0  q0 0  q1 2  prefix 7  seq_len 9  replay_start 4  2 valid, 0 padded
      block     │0   │1   │2   │3   │
      page      │7   │10  │2   │past│
      position  │0   │4   │8   │12  │
      t0 @7     │···░│████│····│····│
    → t1 @8     │····│████│█···│····│

What it draws comes from the clause functions of the oracle, so the picture cannot disagree with it.
"""

from __future__ import annotations

import reprlib
import textwrap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, NamedTuple

from ..oracle import plain
from ..spec import INT32_MAX, BufferLayout, Case, check_legal

WIDTH = 100
"""Columns of a line."""

_MAX_ENTRIES = 2**21  # T * width of which the oracle works out all: a whole batch in service, a few seconds
_WHOLE, _MARGIN = 16, 4  # larger blocks are drawn only this many positions around what is seen

_SLOT, _HOLE, _CLIPPED, _CUT, _UNSEEN, _BELOW = "█○░╳·‹"
_LEGEND = (
    "seen: █ slot  ○ no slot      not seen: ░ below replay_start  ╳ after the width  ‹ below position 0",
    "page: null = 0  hole = negative  past = not in the table  ! = slots above 2**31 - 1  ⋯ = left out",
)


def draw(case: Case, max_requests: int = 16, max_rows: int = 40) -> str:
    """The picture of `case`: header, requests with their rows, and what the rows must hold.

    At most `max_requests` requests and `max_rows` rows; lines say how many are left out. The row in
    which `case.finding` lies is among them, marked →. Draws every Case, legal or not. No newline at the end.
    A case of several cache groups is drawn group by group.
    """
    if case.groups:
        return "\n\n".join(
            f"group {index} of {len(case.step)}\n" + draw(_alone(case, index), max_requests, max_rows)
            for index in range(len(case.step))
        )
    picture = _Picture(case)
    x, rows, marked = picture.x, picture.rows, picture.marked
    # The marked row and its request before all others, and requests with rows before idle ones.
    owner = None if marked is None else plain.request(x, marked)
    requests = sorted(sorted(range(x.R), key=lambda r: (r != owner, r not in rows))[: max(0, max_requests)])
    tokens = [t for r in requests for t in rows.get(r, ())]
    shown = sorted(sorted(tokens, key=lambda t: (t != marked, t))[: max(0, max_rows)])

    lines = list(picture.header())
    for r in requests:
        lines += ["", *picture.request(r, shown)]
    if len(requests) < x.R:
        others = sum(map(len, rows.values())) - len(tokens)
        lines += ["", f"… left out: {x.R - len(requests)} of {x.R} requests, with {others} rows"]
    lines += ["", *_LEGEND] if shown else []
    lines += ["", *picture.expected(shown)]
    return "\n".join(line.rstrip() for line in lines)


def _alone(case: Case, index: int) -> Case:
    """One group of a case, with the finding if that lies in it."""
    group, dot, tensor = str(case.finding.get("tensor", "")).rpartition(".")
    inside = (group == f"groups[{index}]") if dot else index == 0
    finding = {**case.finding, "tensor": tensor} if inside and case.finding else {}
    expected = case.expected if index == 0 else None
    return replace(case, batch=case.step[index], groups=(), finding=finding, expected=expected)


class _Row(NamedTuple):
    """What one token, standing at `position`, sees of its request."""

    position: int
    asked: int  # where its window would start if nothing clipped it
    seen: range  # clauses 4 and 5
    kept: range  # clause 6: the part that `width` leaves


class _Column(NamedTuple):
    """One column of a request's picture: a block, several like ones, or (_GAP) blocks that are left out."""

    drawn: range  # positions
    labels: tuple[str, str, str]  # block, page, first position drawn

    def width(self, scale: int) -> int:
        return max(-(-len(self.drawn) // scale), *map(len, self.labels))


_GAP = _Column(range(0), ("⋯", "⋯", "⋯"))


class _Picture:
    """The parts of the picture of one case, line by line."""

    def __init__(self, case: Case) -> None:
        b = self.batch = case.batch
        self.case = case
        arrays: dict[str, Any] = {name: array.tolist() for name, array in b.inputs().items()}
        sizes = (b.num_tokens, b.num_reqs, b.window_size, b.block_size, b.width)
        self.x = plain.Inputs(*sizes, noncausal=b.noncausal, columns=b.block_table.shape[1], **arrays)
        self.result = plain.decode_meta(b) if max(1, b.num_tokens) * b.width <= _MAX_ENTRIES else None
        self.marked = self._marked()
        self.rows: dict[int, list[int]] = {}  # tokens of each request that has any
        for t in range(b.num_tokens):
            if (r := plain.request(self.x, t)) is not None:
                self.rows.setdefault(r, []).append(t)

    def header(self) -> Iterator[str]:
        """What the case is, and whether it is legal and expects what it should."""
        case, x = self.case, self.x
        if case.expected is not None and self.result is None:
            yield "!! expected was not compared with the oracle's result: the case is too large"
        elif case.expected is not None and self.result and (name := case.expected.difference(self.result)):
            yield f"!! expected differs from the oracle's result, first in {name}"
        yield from _fold(f"case {_words(case.name) or '(no name)'}  {_words(case.reported_in)}")
        sizes = f"T {x.T}  R {x.R}  W {_number(x.W)}  B {_number(x.B)}  width {_number(x.width)}"
        form = "DSpark" if x.noncausal else "causal"
        yield from _fold(f"{form}  {sizes}  block_table {len(x.block_table)} x {x.columns}")
        try:
            check_legal(self.batch)
            yield "legal"
        except ValueError as error:  # IllegalBatchError, or a number too long to print
            yield from _fold(str(error))
        usual = asdict(BufferLayout())
        unusual = {key: value for key, value in asdict(case.buffers).items() if value != usual[key]}
        for title, items in ("buffers", unusual), ("target", case.target), ("finding", case.finding):
            if items:
                words = (f"{_words(key)} {_words(value)}" for key, value in items.items())
                yield from _fold(f"{title}: {', '.join(words)}")
        if case.equals_vllm is not None:
            yield f"vLLM 0.33.0 {'writes the same' if case.equals_vllm else 'differs'}"

    def request(self, r: int, shown: Sequence[int]) -> Iterator[str]:
        """The numbers of request `r`, its blocks, and a bar for each of its rows that is shown."""
        x, tokens = self.x, self.rows.get(r, [])
        q0, q1 = x.query_start_loc[r : r + 2]
        padded = sum(not plain.valid(x, t) for t in range(max(0, q0), min(q1, x.T)))
        strays = sum(not q0 <= t < q1 for t in tokens)
        yield from _fold(
            f"request {r}  q0 {q0}  q1 {q1}  prefix {plain.prefix(x, r)}  seq_len {x.seq_lens[r]}"
            f"  replay_start {x.replay_start[r]}{' (not read)' if x.noncausal else ''}"
            f"  {len(tokens)} valid, {padded} padded" + (f", {strays} outside q0..q1" if strays else "")
        )
        rows = {t: _row(x, r, t) for t in tokens if t in shown}
        names = {t: f"{self._arrow(t)} t{t} @{row.position} " for t, row in rows.items()}
        indent = max([len("  position "), *map(len, names.values())])
        columns, scale = _layout(x, r, [row.kept for row in rows.values() if row.kept], WIDTH - indent - 2)
        if scale > 1:
            yield f"  one mark for {scale} positions, ○ when any of them has no slot"
        for i, title in enumerate(("block", "page", "position") if columns else ()):
            cells = "│".join(column.labels[i].ljust(column.width(scale)) for column in columns)
            yield f"  {title}".ljust(indent + 1) + f"│{cells}│"
        for t, row in rows.items():
            below = _BELOW if row.asked < 0 else " "
            bar = f"{below}│{'│'.join(_bar(x, r, row, columns, scale))}│"
            nothing = f" sees nothing: {row.seen.start} .. {row.seen.stop - 1} is empty"
            yield names[t].ljust(indent) + (bar if row.kept else nothing)
        if len(rows) < len(tokens):
            yield f"  … left out: {len(tokens) - len(rows)} of {len(tokens)} rows"

    def expected(self, shown: Sequence[int]) -> Iterator[str]:
        """What the rows `shown` must hold, and in a few words the tokens that have no request."""
        x = self.x
        if shown:
            yield "expected   t  valid  request   lens  indptr        indices"
        for t in shown:
            r, row = x.token_to_req[t], plain.row(x, t)[1]
            indptr = f"{self.result.indptr[t]}..{self.result.indptr[t + 1]}" if self.result else "?"
            line = f"{self._arrow(t)} {t:>10}    yes  {r:>7}  {len(row):>5}  {indptr:<12}  "
            yield line + _dense(x, r, row, WIDTH - len(line))
        count = sum(map(len, self.rows.values()))
        if count > len(shown):
            yield f"… left out: {count - len(shown)} of {count} rows"
        padded = [t for t in range(x.T) if not plain.valid(x, t)]
        adrift = [t for t in range(x.T) if plain.valid(x, t) and plain.request(x, t) is None]
        if padded:
            yield from _fold(f"padded: {self._tokens(padded)}: is_valid false, lens 0, indices all -1")
        if adrift:
            ids = " ".join(str(x.token_to_req[t]) for t in adrift[:8]) + (" …" if adrift[8:] else "")
            words = f"no such request: {self._tokens(adrift)}, of requests {ids}"
            yield from _fold(f"{words}: is_valid true, lens 0, indices all -1")
        if not x.T:
            yield "no tokens: indptr is [0], and every entry of lens 0"

    def _marked(self) -> int | None:
        """The token whose row the finding lies in, if there is one."""
        tensor, row = (self.case.finding.get(key) for key in ("tensor", "row"))
        if tensor == "indptr" and type(row) is int:
            return _index(row - 1, self.x.T)  # entry t + 1 counts up to the end of row t
        if tensor == "ragged" and self.result and type(row) is int:
            return _index(bisect_right(self.result.indptr.tolist(), row) - 1, self.x.T)
        by_token = (None, "is_valid", "indices", "lens", "slot_mapping", "token_to_req")
        return _index(row, self.x.T) if tensor in by_token else None

    def _arrow(self, t: int) -> str:
        return "→" if t == self.marked else " "

    def _tokens(self, tokens: Sequence[int]) -> str:
        """How many, and the first few runs of them, and the marked one: `4 (t2 t5..t7)`."""
        runs = [[t for _, t in run] for _, run in groupby(enumerate(tokens), lambda item: item[1] - item[0])]
        words = [f"t{run[0]}" if len(run) == 1 else f"t{run[0]}..t{run[-1]}" for run in runs[:8]]
        words += ["…"] * (len(runs) > 8) + [f"→ t{self.marked}"] * (self.marked in tokens)
        return f"{len(tokens)} ({' '.join(words)})"


def _row(x: plain.Inputs, r: int, t: int) -> _Row:
    position, kept = plain.position(x, r, t), plain.row(x, t)[1]
    if x.noncausal:
        return _Row(position, plain.prefix(x, r) - x.W, plain.dspark_block(x, r), kept)
    return _Row(position, position - x.W + 1, plain.causal_window(x, r, t), kept)


def _layout(x: plain.Inputs, r: int, kept: Iterable[range], room: int) -> tuple[list[_Column], int]:
    """The columns that show the positions `kept` in `room`, and how many positions one mark stands for.

    A column for each block if that fits; else like blocks share one; else the middle ones are left out.
    """
    spans: list[range] = []  # `kept`, joined where no block would be left out between two
    for item in sorted(kept, key=lambda item: item.start):
        if spans and item[0] // x.B - spans[-1][-1] // x.B <= 3:
            spans[-1] = range(spans[-1].start, max(spans[-1].stop, item.stop))
        else:
            spans.append(item)
    like = _columns(x, r, spans, grouped=True)
    ways = [[*like[:n], _GAP, *like[-n:]] for n in range(min(room, len(like)) // 2, 0, -1)]
    ways.insert(0, like)
    if sum(span[-1] // x.B - span[0] // x.B + 3 for span in spans) <= room:
        ways.insert(0, _columns(x, r, spans, grouped=False))
    for columns in ways:
        longest = max((len(column.drawn) for column in columns), default=1)
        for scale in (2**n for n in range(longest.bit_length() + 1)):
            if sum(column.width(scale) + 1 for column in columns) <= room:
                return columns, scale
    return [_GAP], 1


def _columns(x: plain.Inputs, r: int, spans: Iterable[range], grouped: bool) -> list[_Column]:
    """The blocks that `spans` touch and one neighbour on each side, like ones in one column if `grouped`."""
    columns: list[_Column] = []
    end = 0
    for span in spans:
        begin = max(0, span[0] // x.B - 1)
        if begin > end:
            columns.append(_GAP)
        end = span[-1] // x.B + 2
        near = range(span.start - _MARGIN, span.stop + _MARGIN) if x.B > _WHOLE else range(end * x.B)
        for kind, first, stop in _runs(x, r, begin, end, grouped):
            start = max(first * x.B, near.start)
            drawn = range(start, max(start, min(stop * x.B, near.stop)))
            block = str(first) if stop - first == 1 else f"{first}..{stop - 1}"
            page = _page(x, r, first) if stop - first == 1 else f"{kind} ×{stop - first}"
            columns.append(_Column(drawn, (block, page, _number(start if drawn else first * x.B))))
    return [*columns, _GAP] if columns and end < x.columns else columns


def _runs(x: plain.Inputs, r: int, begin: int, end: int, grouped: bool) -> Iterator[tuple[str, int, int]]:
    """The blocks begin .. end - 1 as (kind, first block, block after the last)."""
    if not grouped:
        yield from (("", k, k + 1) for k in range(begin, end))
        return
    for kind, run in groupby(range(begin, min(end, x.columns)), lambda k: _page(x, r, k).strip("0123456789")):
        blocks = list(run)
        yield kind or "page", blocks[0], blocks[-1] + 1
    if end > max(begin, x.columns):  # these may be billions, and are all alike
        yield "past", max(begin, x.columns), end


def _page(x: plain.Inputs, r: int, k: int) -> str:
    """The page number of block `k`, with ! where slots of it do not fit; or a word that _LEGEND explains."""
    if k >= x.columns:
        return "past"
    page = x.block_table[r][k]
    if page <= 0:
        return "hole" if page < 0 else "null"
    return f"{page}!" if plain.slot(x, page, x.B - 1) > INT32_MAX else str(page)


def _bar(x: plain.Inputs, r: int, row: _Row, columns: Iterable[_Column], scale: int) -> Iterator[str]:
    """The marks of `row` in each column."""
    for column in columns:
        cells = (column.drawn[i : i + scale] for i in range(0, len(column.drawn), scale))
        marks = "⋯" if column is _GAP else "".join(_mark(x, r, row, cell) for cell in cells)
        yield marks.ljust(column.width(scale))


def _mark(x: plain.Inputs, r: int, row: _Row, cell: range) -> str:
    """The mark of `row` for the positions of `cell`: what it sees of them comes before what it does not."""

    def inside(start: int, stop: int) -> range:
        return range(max(cell.start, start), min(cell.stop, stop))

    if kept := inside(row.kept.start, row.kept.stop):
        # The pages of a cell are of one kind, and slots ascend in a page. So where any position has no slot,
        # the last one has none, or the last one of the block before.
        ends = kept[-1], max(kept[0], kept[-1] // x.B * x.B - 1)
        return _HOLE if plain.NO_SLOT in (plain.entry(x, r, p) for p in ends) else _SLOT
    if inside(row.kept.stop, row.seen.stop):
        return _CUT
    return _CLIPPED if inside(row.asked, row.seen.start) else _UNSEEN


def _dense(x: plain.Inputs, r: int, row: range, room: int) -> str:
    """The dense row: all of it if that fits, else as many of its first and last entries as do."""
    n, after = len(row), f"-1 × {_number(x.width - len(row))}" if x.width > len(row) else ""
    for ends in (room, 4, 3, 2, 1):
        first = [str(plain.entry(x, r, p)) for p in row[:ends]]
        last = [str(plain.entry(x, r, p)) for p in row[max(n - ends, len(first)) :]]
        middle = ["…"] * (n > len(first) + len(last))
        text = "  ".join(filter(None, (" ".join([*first, *middle, *last]), after)))
        if len(text) <= room:
            break
    return text


def _index(value: object, size: int) -> int | None:
    """`value` if it is an index below `size`: a finding may hold anything."""
    return value if type(value) is int and 0 <= value < size else None


def _number(value: int) -> str:
    """`value`, or its magnitude when its digits would take the line: sizes have no upper bound."""
    return str(value) if value < 10**12 else f"~2**{value.bit_length() - 1}"


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def _words(value: object) -> str:
    """`value` in short, without control characters: a case comes from anyone, and this goes to a terminal."""
    text = value if isinstance(value, str) else _REPR.repr(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text[: 2 * WIDTH])


def _fold(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", max_lines=4, placeholder=" …")
