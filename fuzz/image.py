"""What memory holds before a launch, and what it must hold after it: one flat image for each tensor.

An image covers a tensor's storage: its elements, the gaps between its rows and its spare rows. Everything that a
build may not rely on starts as canary: bytes of 0x80 to 0xfe, which no output can hold (an int32 of such bytes is
neither a slot nor -1, and such a bool is neither 0 nor 1), so that an entry left unwritten never looks written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..spec import SHARED, TENSORS, Batch, BufferLayout, Result

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Placement:
    """Shape of one tensor, [n] or [rows, columns], and the elements from one row to the next."""

    shape: tuple[int, ...]
    row_stride: int = 1

    @property
    def size(self) -> int:
        """Elements from the first to the last, gaps included."""
        if 0 in self.shape:
            return 0
        return self.shape[0] if len(self.shape) == 1 else (self.shape[0] - 1) * self.row_stride + self.shape[1]

    def element(self, offset: int) -> tuple[int, int | None] | None:
        """Row and column of the element at `offset`, or None when it lies in a gap."""
        if len(self.shape) == 1:
            return offset, None
        row, column = divmod(offset, self.row_stride)
        return (row, column) if column < self.shape[1] else None

    def view(self, image: Array) -> Array:
        """The tensor's elements within its image."""
        if len(self.shape) == 1:
            return image
        step = image.itemsize
        return np.lib.stride_tricks.as_strided(image, self.shape, (self.row_stride * step, step))


def placements(batch: Batch, layout: BufferLayout) -> dict[str, Placement]:
    """Where each tensor of a launch lies, in the order of the launch's arguments."""
    T, width = batch.num_tokens, batch.width
    places = {name: Placement(array.shape) for name, array in batch.inputs().items()}
    rows, columns = batch.block_table.shape
    places["block_table"] = Placement((rows, columns), columns + layout.block_table_row_gap)
    places["is_valid"] = Placement((T + layout.spare_rows,))
    places["indices"] = Placement((T + layout.spare_rows, width), width + layout.indices_row_gap)
    places["lens"] = Placement((T + layout.lens_tail,))
    places["indptr"] = Placement((T + 1 + layout.spare_rows,))
    places["ragged"] = Placement((T * width + layout.ragged_spare,))
    return {name: places[name] for name in TENSORS}


def key_of(group: int, name: str) -> str:
    """The name of a group's tensor among all of a step; the shared ones, and the first group's, are plain."""
    return name if group == 0 or name in SHARED else f"groups[{group}].{name}"


def canary(rng: np.random.Generator, count: int, dtype: str) -> Array:
    """`count` elements of canary bytes."""
    stored = _stored(dtype)
    filler: Array = rng.integers(0, 0x7F, count * stored.itemsize, dtype=np.uint8) + np.uint8(0x80)
    return filler.view(stored)


def before(batch: Batch, places: Mapping[str, Placement], rng: np.random.Generator) -> dict[str, Array]:
    """The image of each tensor before the launch: inputs as the batch has them, canary everywhere else."""
    images = {}
    inputs = batch.inputs()
    for name, place in places.items():
        if name in inputs and place.size == inputs[name].size:
            images[name] = inputs[name].reshape(-1)
            continue
        images[name] = canary(rng, place.size, TENSORS[name].dtype)
        if name in inputs:
            place.view(images[name])[...] = inputs[name]
    return images


def after(
    start: Mapping[str, Array], batch: Batch, result: Result, places: Mapping[str, Placement]
) -> dict[str, Array]:
    """The image of each tensor after a right build: clauses 1 to 11 where clause 12 says, unchanged elsewhere."""
    T = batch.num_tokens
    images = dict(start)
    for name, values in result.arrays().items():
        images[name] = start[name].copy()
        places[name].view(images[name])[: len(values)] = values
    images["lens"][T:] = 0
    return images


def _stored(dtype: str) -> np.dtype[Any]:
    """How an image holds a dtype: a bool as its byte, since a canary byte is no bool."""
    return np.dtype("uint8" if dtype == "bool" else dtype)
