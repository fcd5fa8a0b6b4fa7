"""How a launch is judged: the first wrong element, in the words of the specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..spec import INPUTS, Batch, Result
from .image import Array, Placement, key_of

# Flags and lengths before what follows from them, inputs last: the first difference is the nearest to its cause.
_ORDER = ("is_valid", "lens", "indices", "indptr", "ragged", *INPUTS)


@dataclass(frozen=True)
class Verdict:
    """One finding.

    verdict: MISMATCH (an entry that a build writes is wrong), FRAME (something else was written), INTERFERENCE (right
    at first, wrong once inputs that no output depends on were changed), EXCEPTION, FAULT or HANG.
    tensor, row, column, expected, got: the first wrong element, as far as there is one. clause: of SPEC.md.
    """

    verdict: str
    clause: int
    tensor: str = ""
    row: int | None = None
    column: int | None = None
    expected: int | None = None
    got: int | None = None
    detail: str = ""

    @property
    def fingerprint(self) -> str:
        """What makes two findings the same one; fit for a file name."""
        # An error message differs from case to case; its type does not.
        kind = self.detail.partition(":")[0] if self.verdict in ("EXCEPTION", "FAULT") else ""
        tensor = self.tensor.rpartition(".")[2]  # whichever group it is in
        words = "-".join(word for word in (self.verdict, tensor, f"clause{self.clause}", kind) if word)
        return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in words)[:120]

    def __str__(self) -> str:
        words = [f"{self.verdict} (clause {self.clause})"]
        if self.tensor:
            place = self.tensor
            if self.row is not None:
                place += f"[{self.row}]" + (f"[{self.column}]" if self.column is not None else "")
            words.append(place + (f": expected {self.expected}, got {self.got}" if self.got is not None else ""))
        if self.detail:
            words.append(self.detail)
        return " ".join(words)

    def as_finding(self) -> dict[str, Any]:
        """The verdict as the plain values of a case file's `finding`."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def compare(
    batch: Batch,
    result: Result,
    places: Mapping[str, Placement],
    expected: Mapping[str, Array],
    got: Mapping[str, Array],
    group: int = 0,
) -> Verdict | None:
    """The first difference between the images that a launch left of a group and those that it should have left."""
    for name in _ORDER:
        key = key_of(group, name)
        wrong = np.flatnonzero(got[key] != expected[key])
        if wrong.size:
            verdict = _element(batch, result, name, places[key], int(wrong[0]), expected[key], got[key])
            return replace(verdict, tensor=key)
    return None


def damaged(tensor: str, offset: int) -> Verdict:
    """The verdict on a byte outside a tensor, `offset` bytes from its start, that a launch changed."""
    return Verdict("FRAME", 12, tensor, detail=f"a byte outside the tensor was written, at byte {offset} of it")


def _element(
    batch: Batch, result: Result, name: str, place: Placement, at: int, expected: Array, got: Array
) -> Verdict:
    where = place.element(at)
    if where is None:
        detail = f"the gap after row {at // place.row_stride} was written"
        return Verdict("FRAME", 12, name, expected=int(expected[at]), got=int(got[at]), detail=detail)
    row, column = where
    clause = 12 if name in INPUTS else _clause(batch, result, name, row, column or 0, int(got[at]))
    verdict = "FRAME" if clause == 12 else "MISMATCH"
    return Verdict(verdict, clause, name, row, column, int(expected[at]), int(got[at]))


def _clause(batch: Batch, result: Result, name: str, row: int, column: int, got: int) -> int:
    """Which clause an output's element breaks."""
    T = batch.num_tokens
    if name == "lens":
        if row >= T or got < 0 or got > batch.width:
            return 7
        return _window_clause(batch, row)
    if name == "indptr":
        return 11 if row <= T else 12
    if name == "ragged":
        return 11 if row < len(result.ragged) else 12
    if row >= T:
        return 12
    if name == "is_valid":
        return 1
    if column >= result.lens[row]:
        return 10
    return 9 if result.indices[row, column] < 0 else 8


def _window_clause(batch: Batch, row: int) -> int:
    """The clause that decides how long the row of a token is."""
    if batch.slot_mapping[row] < 0 or not 0 <= batch.token_to_req[row] < batch.num_reqs:
        return 2
    return 5 if batch.noncausal else 4
