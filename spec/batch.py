"""The data that all parts exchange: a decode batch, what a build of it writes, and what that depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError, brief

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the launch: its dtype, and per axis how its size relates to T, R and width.

    `sizes` pairs a relation ("==" or ">=") with one of the symbols of `symbols()`.
    """

    role: Literal["input", "output"]
    dtype: str
    sizes: tuple[tuple[str, str], ...]
    unit: str
    sentinel: str = ""


# In the order of vLLM's launch. SPEC.md, sections 2 and 3.
TENSORS: Mapping[str, TensorSpec] = {
    "slot_mapping": TensorSpec("input", "int64", ((">=", "T"),), "slot", "negative: padded token"),
    "is_valid": TensorSpec("output", "bool", ((">=", "T"),), "flag"),
    "indices": TensorSpec("output", "int32", ((">=", "T"), ("==", "width")), "slot", "-1: no slot"),
    "lens": TensorSpec("output", "int32", ((">=", "T"),), "positions"),
    "ragged": TensorSpec("output", "int32", ((">=", "T * width"),), "slot"),
    "indptr": TensorSpec("output", "int32", ((">=", "T + 1"),), "ragged entries"),
    "query_start_loc": TensorSpec("input", "int32", (("==", "R + 1"),), "token"),
    "seq_lens": TensorSpec("input", "int32", (("==", "R"),), "positions"),
    "token_to_req": TensorSpec("input", "int32", ((">=", "T"),), "request"),
    "block_table": TensorSpec(
        "input", "int32", ((">=", "R"), (">=", "0")), "page number", "negative: no page; 0: the null page"
    ),
    "replay_start": TensorSpec("input", "int32", ((">=", "R"),), "position"),
}
INPUTS = tuple(name for name, spec in TENSORS.items() if spec.role == "input")
OUTPUTS = tuple(name for name, spec in TENSORS.items() if spec.role == "output")
SHARED = ("query_start_loc", "seq_lens", "token_to_req", "replay_start")
"""What all cache groups of a step read; every other tensor is a group's own."""
OWN = tuple(name for name in TENSORS if name not in SHARED)


def symbols(num_tokens: int, num_reqs: int, width: int) -> dict[str, int]:
    """The sizes that `TensorSpec.sizes` speaks of."""
    return {
        "T": num_tokens,
        "R": num_reqs,
        "width": width,
        "T * width": num_tokens * width,
        "T + 1": num_tokens + 1,
        "R + 1": num_reqs + 1,
        "0": 0,
    }


def check_scalar(name: str, value: object, least: int) -> int:
    """`value` as an int of at least `least`; raises ArgumentError for anything else (a bool or a tensor too)."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ArgumentError(name, "an integer", brief(value))
    number = int(value)
    if number < least:
        raise ArgumentError(name, f"an integer of at least {least}", brief(number))
    return number


def check_flag(name: str, value: object) -> bool:
    """`value` as a bool; raises ArgumentError for anything but a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(name, "a bool", brief(value))
    return bool(value)


def check_tensor(name: str, shape: tuple[int, ...], stride: tuple[int, ...], sizes: Mapping[str, int]) -> None:
    """Check the shape and strides (both in elements) of the tensor called `name` against SPEC.md.

    `indices` may have a middle axis of 1. A row stride is free for `block_table`, and at least `width` for
    `indices`, whose rows must not overlap; everything else is contiguous.
    """
    if name == "indices" and len(shape) == 3:
        if shape[1] != 1:
            raise ArgumentError(name, "a middle axis of size 1", f"shape {list(shape)}")
        shape, stride = (shape[0], shape[2]), (stride[0], stride[2])
    wanted = TENSORS[name].sizes
    if len(shape) != len(wanted):
        expected = "2 or 3 axes" if name == "indices" else f"{len(wanted)} {'axis' if len(wanted) == 1 else 'axes'}"
        raise ArgumentError(name, expected, f"shape {list(shape)}")
    for axis, (relation, symbol) in enumerate(wanted):
        size, least = shape[axis], sizes[symbol]
        if size < least or (relation == "==" and size != least):
            expected = f"a size of {'' if relation == '==' else 'at least '}{symbol} = {least} on axis {axis}"
            raise ArgumentError(name, expected, f"shape {list(shape)}")
    if 0 in shape:  # no element, so strides say nothing
        return
    if shape[-1] > 1 and stride[-1] != 1:
        raise ArgumentError(name, "a stride of 1 on the last axis", f"strides {list(stride)}")
    if name == "indices" and shape[0] > 1 and stride[0] < shape[1]:
        raise ArgumentError(name, f"a row stride of at least width = {shape[1]}", f"strides {list(stride)}")


def check_capacity(num_tokens: int, width: int) -> None:
    """Refuse a batch whose ragged form could hold more entries than `indptr` (int32) can count."""
    if width > INT32_MAX:
        raise ArgumentError("width", f"at most 2**31 - 1 = {INT32_MAX}", brief(width))
    if num_tokens * width > INT32_MAX:
        raise ArgumentError("num_tokens", f"num_tokens * {width} of at most 2**31 - 1 = {INT32_MAX}", brief(num_tokens))


def _as_array(name: str, value: object) -> npt.NDArray[Any]:
    """`value` as a read-only array of the tensor's dtype; refuses values that the dtype does not hold."""
    spec = TENSORS[name]
    dtype = np.dtype(spec.dtype)
    try:
        given = np.asarray(value)  # a subclass, such as a masked array, becomes the plain array below it
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(name, f"a rectangular array of {spec.dtype}", brief(value)) from None
    if given.size == 0:
        given = np.empty(given.shape, dtype)
    if given.dtype != dtype:
        if given.dtype.kind not in "iu":
            raise ArgumentError(name, f"integers that fit {spec.dtype}", f"dtype {given.dtype}")
        limits = np.iinfo(dtype)
        if not limits.min <= int(given.min()) <= int(given.max()) <= limits.max:
            raise ArgumentError(name, f"integers that fit {spec.dtype}", f"{given.min()} .. {given.max()}")
        given = given.astype(dtype)
    array: npt.NDArray[Any] = given.view()
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Batch:
    """One decode batch: every input of a build. SPEC.md section 2 has the units, ranges and sentinels.

    num_tokens: T, rows of this build. window_size: W, positions. block_size: B, positions a page.
    width: columns of a dense row. noncausal: the DSpark block form.
    slot_mapping int64 [>= T], token_to_req int32 [>= T], query_start_loc int32 [R+1], seq_lens int32 [R],
    block_table int32 [>= R, columns], replay_start int32 [>= R]; sequences of ints are converted, arrays are
    viewed read-only and not copied.

    Raises ArgumentError when a dtype, shape or scalar is off. Any values are accepted: see `check_legal`.
    """

    num_tokens: int
    window_size: int
    block_size: int
    width: int
    slot_mapping: Int64Array = field(repr=False)
    token_to_req: Int32Array = field(repr=False)
    query_start_loc: Int32Array = field(repr=False)
    seq_lens: Int32Array = field(repr=False)
    block_table: Int32Array = field(repr=False)
    replay_start: Int32Array = field(repr=False)
    noncausal: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "num_tokens", check_scalar("num_tokens", self.num_tokens, 0))
        for name in ("window_size", "block_size", "width"):
            put(self, name, check_scalar(name, getattr(self, name), 1))
        put(self, "noncausal", check_flag("noncausal", self.noncausal))
        check_capacity(self.num_tokens, self.width)
        for name in INPUTS:
            put(self, name, _as_array(name, getattr(self, name)))
        if self.block_table.ndim == 1 and self.block_table.size == 0:
            put(self, "block_table", self.block_table.reshape(0, 0))
        if self.seq_lens.ndim != 1:
            raise ArgumentError("seq_lens", "1 axis", f"shape {list(self.seq_lens.shape)}")
        sizes = symbols(self.num_tokens, self.num_reqs, self.width)
        for name in INPUTS:
            shape = getattr(self, name).shape
            check_tensor(name, shape, (1,) * len(shape), sizes)

    @property
    def num_reqs(self) -> int:
        """R, the number of requests."""
        return int(self.seq_lens.shape[0])

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """The six input arrays by name."""
        return {name: getattr(self, name) for name in INPUTS}


@dataclass(frozen=True, eq=False)
class Result:
    """What one build writes (SPEC.md section 3), without spare room.

    is_valid bool [T]; indices int32 [T, width]; lens int32 [T]; ragged int32 [indptr[T]]; indptr int32 [T+1].
    """

    is_valid: BoolArray
    indices: Int32Array
    lens: Int32Array
    ragged: Int32Array
    indptr: Int32Array

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The five output arrays by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def difference(self, other: Result) -> str | None:
        """The name of the first tensor in which two results differ in dtype, shape or any element, or None."""
        mine, theirs = self.arrays(), other.arrays()
        for name, array in mine.items():
            if array.dtype != theirs[name].dtype or not np.array_equal(array, theirs[name]):
                return name
        return None


@dataclass(frozen=True, eq=False)
class Dependencies:
    """Which input elements the outputs depend on (clause 13): a bool array in the shape of each input.

    Of a `slot_mapping` element only the sign counts.
    """

    slot_mapping: BoolArray
    token_to_req: BoolArray
    query_start_loc: BoolArray
    seq_lens: BoolArray
    block_table: BoolArray
    replay_start: BoolArray
