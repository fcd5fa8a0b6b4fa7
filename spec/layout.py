"""How the buffers of one launch lie in memory. SPEC.md leaves it free, so nothing in a result may depend on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from .errors import ArgumentError


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
        for name, value in asdict(self).items():
            if name == "indices_ndim":
                if value not in (2, 3):
                    raise ArgumentError(name, "2 or 3", value)
            elif name == "guard":
                if value not in ("end", "start"):
                    raise ArgumentError(name, "'end' or 'start'", repr(value))
            elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ROOM:
                raise ArgumentError(name, f"an integer from 0 to {MAX_ROOM}", repr(value))


# Room is there to be watched, not to fill memory; vLLM's own lens buffer has a tail of 16384.
MAX_ROOM = 2**20
