"""How the buffers of one launch lie in memory. SPEC.md leaves it free, so nothing in a result may depend on it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Literal

from .errors import ArgumentError, brief

# Room is there to be watched, not to fill memory; vLLM's own lens buffer has a tail of 16384.
MAX_ROOM = 2**20

_ROOM: tuple[Container[object], str] = (range(MAX_ROOM + 1), f"an integer from 0 to {MAX_ROOM}")
_CHOICES: dict[str, tuple[Container[object], str]] = {
    "indices_ndim": ((2, 3), "2 or 3"),
    "guard": (("end", "start"), "'end' or 'start'"),
}


@dataclass(frozen=True)
class BufferLayout:
    """Room around and between the rows of the launch's tensors, in elements of the tensor's dtype.

    indices_ndim: 3 for [rows, 1, width] (vLLM's), 2 for [rows, width].
    indices_row_gap, block_table_row_gap: elements between the end of a row and the next.
    spare_rows: rows of is_valid and indices after T, and entries of indptr after T + 1.
    lens_tail: entries of lens after T, all of which a build zeroes.
    ragged_spare: entries of ragged after T * width.
    misalignment: elements between an aligned address and each tensor's first.
    guard: which side of each tensor touches inaccessible memory, where the machine can arrange it.

    Raises ArgumentError for a value of another type or range.
    """

    indices_ndim: Literal[2, 3] = 3
    indices_row_gap: int = 0
    block_table_row_gap: int = 0
    spare_rows: int = 0
    lens_tail: int = 0
    ragged_spare: int = 0
    misalignment: int = 0
    guard: Literal["end", "start"] = "end"

    def __post_init__(self) -> None:
        for item in fields(self):
            value: object = getattr(self, item.name)
            allowed, words = _CHOICES.get(item.name, _ROOM)
            if type(value) is not type(item.default) or value not in allowed:  # True and 3.0 are no sizes
                raise ArgumentError(item.name, words, brief(value))
