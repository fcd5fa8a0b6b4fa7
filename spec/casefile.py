"""The case file: one batch as versioned JSON of plain integers, readable by a person and by nothing but a JSON parser.

Golden cases, reported cases and found failures share this form. A file holds one case, or a list of them:

    {"version": 1, "name": "...",
     "window": 4, "block_size": 4, "width": 4, "noncausal": false, "num_tokens": 1,
     "slot_mapping": [39], "token_to_req": [0], "query_start_loc": [0, 1], "seq_lens": [8],
     "block_table": [[0, 9]], "replay_start": [3],
     "buffers": {"lens_tail": 3}, "target": {"name": "kernel@gpu"}, "versions": {"torch": "2.11.0"},
     "finding": {"verdict": "MISMATCH"}, "expected": {"is_valid": [true], "indices": [[36, 37, 38, 39]], ...}}

A case of several cache groups, which one step builds, has the further ones in "groups", each with what is its own:

     "groups": [{"block_size": 2, "width": 4, "slot_mapping": [7], "block_table": [[3, 1, 0, 2]]}]

Only the batch is required; a file without "version" is read as version 1. A block_table without rows, [], needs
"columns" to say how wide it is, if it is.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .batch import INPUTS, INT32_MAX, SHARED, TENSORS, Batch, Result
from .errors import ArgumentError, CaseFileError, brief
from .layout import BufferLayout

VERSION = 1
MAX_FILE_BYTES = 64 * 2**20
MAX_ENTRIES = 2**26  # num_tokens * width of one case: what a checker must be able to hold several times over
MAX_TEXT = 10_000
MAX_DEPTH = 50  # of target, versions and finding; far from where Python's own recursion ends

_SCALARS = {"window": "window_size", "block_size": "block_size", "width": "width", "num_tokens": "num_tokens"}
_BATCH = (*_SCALARS, "noncausal", *INPUTS)
_EXPECTED = tuple(item.name for item in fields(Result))
_TEXTS = ("name", "reported_in")
_MAPPINGS = ("target", "versions", "finding")
_OTHERS = ("version", "equals_vllm", "columns", "groups", "buffers", "expected")
_GROUP = ("block_size", "width", "slot_mapping", "block_table")
MAX_GROUPS = 64
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Case:
    """One batch with what is needed to run it again.

    batch; groups (further cache groups of the same step: batches that differ from it in slot_mapping, block_table,
    block_size and width alone); buffers (layout of the launch's tensors, of every group); expected (what a build of
    `batch` must write, when it is known);
    name and reported_in (words); target, versions, finding (JSON objects of plain values, kept as they are);
    equals_vllm (whether vLLM 0.33.0 writes the same, when it is known).
    """

    batch: Batch
    buffers: BufferLayout = field(default_factory=BufferLayout)
    expected: Result | None = None
    name: str = ""
    reported_in: str = ""
    target: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    finding: Mapping[str, Any] = field(default_factory=dict)
    equals_vllm: bool | None = None
    groups: tuple[Batch, ...] = ()

    def __post_init__(self) -> None:
        """Raises ArgumentError for a group that differs where a step's groups do not."""
        object.__setattr__(self, "groups", tuple(self.groups))
        for index, group in enumerate(self.groups):
            for name in ("num_tokens", "window_size", "noncausal", *SHARED):
                if not np.array_equal(getattr(group, name), getattr(self.batch, name)):
                    raise ArgumentError(f"groups[{index}].{name}", "what the batch has", "something else")

    @property
    def step(self) -> tuple[Batch, ...]:
        """The batch of each cache group."""
        return (self.batch, *self.groups)


def load_case(path: str | os.PathLike[str]) -> Case:
    """Read the one case of a file. Raises CaseFileError: unreadable, malformed, or a list of several."""
    cases = load_cases(path)
    if len(cases) != 1:
        raise CaseFileError(path, "", f"holds {len(cases)} cases where one was expected; load_cases reads them all")
    return cases[0]


def load_cases(path: str | os.PathLike[str]) -> list[Case]:
    """Read every case of a file (one object, or a list of objects). Raises CaseFileError naming the field."""
    return _cases(path, read_bytes(path))


def save_case(path: str | os.PathLike[str], case: Case) -> None:
    """Write `case` to `path` whole or not at all.

    Raises CaseFileError, with nothing written, when load_case could not read it or when the file system refuses.
    """
    try:
        text = dump_case(case)
    except (TypeError, ValueError, RecursionError) as error:
        raise CaseFileError(path, "", f"cannot be written: {error}") from None
    _cases(path, text.encode())  # a finding saved to a file that nobody can read is a finding lost
    write_atomically(path, text)


def dump_case(case: Case) -> str:
    """The text of a case file: a line for each field, and for each row of a matrix.

    Raises TypeError, ValueError or RecursionError when `target`, `versions` or `finding` is not plain JSON.
    """
    batch = case.batch
    document: dict[str, Any] = {"version": VERSION}
    document |= {key: getattr(case, key) for key in _TEXTS if getattr(case, key)}
    if case.equals_vllm is not None:
        document["equals_vllm"] = case.equals_vllm
    document |= {key: getattr(batch, attribute) for key, attribute in _SCALARS.items()}
    document["noncausal"] = batch.noncausal
    document |= {name: array.tolist() for name, array in batch.inputs().items()}
    if not batch.block_table.shape[0]:
        document["columns"] = batch.block_table.shape[1]
    if case.groups:
        document["groups"] = [_group(group) for group in case.groups]
    document["buffers"] = asdict(case.buffers)
    document |= {key: dict(getattr(case, key)) for key in _MAPPINGS if getattr(case, key)}
    if case.expected is not None:
        document["expected"] = {name: array.tolist() for name, array in case.expected.arrays().items()}
    return _lines(document, "") + "\n"


def _group(batch: Batch) -> dict[str, Any]:
    own: dict[str, Any] = {"block_size": batch.block_size, "width": batch.width}
    own |= {name: getattr(batch, name).tolist() for name in _GROUP if name not in own}
    if not batch.block_table.shape[0]:
        own["columns"] = batch.block_table.shape[1]
    return own


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Put `text` at `path` through a temporary file beside it, flushed to disk. Raises CaseFileError.

    Only a regular file is replaced: run by root, a case written to /dev/null must not become /dev/null.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            raise ValueError("not a regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".saving-", dir=target.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise CaseFileError(path, "", f"cannot be written: {_reason(error)}") from None


def _reason(error: OSError | ValueError) -> str:
    """What the system says, without the path; of a ValueError (a NUL in the path) what Python says."""
    return getattr(error, "strerror", None) or str(error)


def _lines(value: Any, indent: str) -> str:
    """JSON with one line a field and a line a matrix row: what a person compares by eye."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        if not all(isinstance(key, str) for key in value):  # json.dumps would make texts of some
            raise TypeError("a key of an object is not a text")
        parts = [f"{inner}{json.dumps(key)}: {_lines(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + _lines(item, inner) for item in value) + f"\n{indent}]"
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], list):
        return "[\n" + ",\n".join(inner + json.dumps(row, allow_nan=False) for row in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file, cut one byte after MAX_FILE_BYTES, without waiting. Raises CaseFileError."""
    try:
        # A pipe or a device would block, or never end. O_NONBLOCK keeps the open itself from waiting.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise CaseFileError(path, "", f"cannot be read: {_reason(error)}") from None
    raise CaseFileError(path, "", "is not a regular file")


def _cases(path: str | os.PathLike[str], data: bytes) -> list[Case]:
    """The cases of a file's bytes."""
    if len(data) > MAX_FILE_BYTES:
        raise CaseFileError(path, "", f"is larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CaseFileError(path, "", f"is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None
    document = _parse(path, text)
    if not isinstance(document, list):
        return [_Reader(path, "").case(document)]
    return [_Reader(path, f"[{i}]").case(item) for i, item in enumerate(document)]


def _parse(path: str | os.PathLike[str], text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in items:
            if key in table:
                raise CaseFileError(path, brief(key), "is given twice")
            table[key] = value
        return table

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):  # Infinity and NaN, which JSON has not, and 1e999, which reads as Infinity
            raise CaseFileError(path, "", f"{brief(number)} is not a finite number")
        return float(number)

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=finite, parse_float=finite)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        if error.pos >= len(text.rstrip()):
            raise CaseFileError(path, "", f"is cut off: {error.msg} at {where}, where the file ends") from None
        raise CaseFileError(path, "", f"is not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise CaseFileError(path, "", "is nested too deeply") from None
    except CaseFileError:  # a ValueError too
        raise
    except ValueError:  # Python refuses to convert integers of thousands of digits
        raise CaseFileError(path, "", "holds an integer of too many digits") from None


class _Reader:
    """Turns parsed JSON into a Case; knows where it is, so that every error names its field."""

    def __init__(self, path: object, where: str) -> None:
        self.path, self.where = path, where

    def fail(self, name: str, problem: str) -> CaseFileError:
        joint = "." if self.where and name and not name.startswith("[") else ""
        return CaseFileError(self.path, f"{self.where}{joint}{name}", problem)

    def case(self, document: Any) -> Case:
        data = self.mapping("", document)
        known = {*_BATCH, *_TEXTS, *_MAPPINGS, *_OTHERS}
        for key in data:
            if key not in known:
                raise self.fail(brief(key), "is not a field of a case")
        version = data.get("version", VERSION)
        if type(version) is not int or version != VERSION:
            raise self.fail("version", f"expected {VERSION}, got {brief(version)}")
        for key in _BATCH:
            if key not in data:
                raise self.fail(key, "is missing")
        batch = self.batch(data)
        words: dict[str, Any] = {key: self.text(key, data[key]) for key in _TEXTS if key in data}
        words |= {key: self.plain(key, data[key]) for key in _MAPPINGS if key in data}
        return Case(
            batch=batch,
            buffers=self.buffers(data["buffers"]) if "buffers" in data else BufferLayout(),
            expected=self.expected(batch, data["expected"]) if data.get("expected") is not None else None,
            equals_vllm=self.flag("equals_vllm", data["equals_vllm"]) if "equals_vllm" in data else None,
            groups=self.groups(data, batch),
            **words,
        )

    def groups(self, data: Mapping[str, Any], batch: Batch) -> tuple[Batch, ...]:
        given = self.sequence("groups", data.get("groups", []))
        if len(given) > MAX_GROUPS:
            raise self.fail("groups", f"expected at most {MAX_GROUPS}, got {len(given)}")
        entries, groups = batch.num_tokens * batch.width, []
        for i, value in enumerate(given):
            own = self.mapping(f"groups[{i}]", value)
            for key in own:
                if key not in (*_GROUP, "columns"):
                    raise self.fail(f"groups[{i}].{brief(key)}", "is not a field of a group")
            for key in _GROUP:
                if key not in own:
                    raise self.fail(f"groups[{i}].{key}", "is missing")
            inside = _Reader(self.path, f"{self.where}{'.' if self.where else ''}groups[{i}]")
            groups.append(inside.batch({**{key: data[key] for key in _BATCH}, **own}))
            entries += batch.num_tokens * groups[-1].width
            if entries > MAX_ENTRIES:
                raise self.fail("groups", f"num_tokens * width of all groups is above {MAX_ENTRIES}")
        return tuple(groups)

    def batch(self, data: Mapping[str, Any]) -> Batch:
        scalars: dict[str, Any] = {attribute: self.integer(key, data[key]) for key, attribute in _SCALARS.items()}
        if scalars["num_tokens"] * scalars["width"] > MAX_ENTRIES:
            raise self.fail("num_tokens", f"num_tokens * width is above {MAX_ENTRIES}")
        noncausal = self.flag("noncausal", data["noncausal"])
        columns = self.integer("columns", data.get("columns", 0))
        if not 0 <= columns <= INT32_MAX:
            raise self.fail("columns", f"expected 0 to {INT32_MAX}, got {brief(columns)}")
        arrays: dict[str, Any] = {
            name: self.tensor(name, data[name], name, len(TENSORS[name].sizes), columns) for name in INPUTS
        }
        if "columns" in data and arrays["block_table"].shape[1] != columns:
            raise self.fail("columns", f"expected {arrays['block_table'].shape[1]}, as block_table has, got {columns}")
        return self.checked(lambda: Batch(**scalars, noncausal=noncausal, **arrays))

    def checked(self, make: Callable[[], _T]) -> _T:
        try:
            return make()
        except ArgumentError as error:
            keys = {attribute: key for key, attribute in _SCALARS.items()}
            name = keys.get(error.argument, error.argument)
            raise self.fail(name, f"expected {error.expected}, got {error.got}") from None

    def buffers(self, value: Any) -> BufferLayout:
        data = self.mapping("buffers", value)
        known = {item.name for item in fields(BufferLayout)}
        for key in data:
            if key not in known:
                raise self.fail(f"buffers.{brief(key)}", "is not a field of a buffer layout")
        inside = _Reader(self.path, f"{self.where}.buffers" if self.where else "buffers")
        return inside.checked(lambda: BufferLayout(**data))

    def expected(self, batch: Batch, value: Any) -> Result:
        data = self.mapping("expected", value)
        for key in data:
            if key not in _EXPECTED:
                raise self.fail(f"expected.{brief(key)}", "is not an output")
        arrays: dict[str, npt.NDArray[Any]] = {}
        T = batch.num_tokens
        for name in _EXPECTED:
            if name not in data:
                raise self.fail(f"expected.{name}", "is missing")
            dims = 2 if name == "indices" else 1
            arrays[name] = self.tensor(f"expected.{name}", data[name], name, dims, columns=batch.width)
        arrays["is_valid"] = arrays["is_valid"].astype(np.bool_)
        kept = int(arrays["indptr"][-1]) if arrays["indptr"].size else 0
        shapes = {"is_valid": (T,), "indices": (T, batch.width), "lens": (T,), "indptr": (T + 1,), "ragged": (kept,)}
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                problem = f"expected shape {list(shape)}, got {list(arrays[name].shape)}"
                raise self.fail(f"expected.{name}", problem)
        return Result(**arrays)

    def integer(self, name: str, value: Any) -> int:
        if type(value) is not int:
            raise self.fail(name, f"expected an integer, got {brief(value)}")
        return value

    def flag(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.fail(name, f"expected true or false, got {brief(value)}")
        return value

    def text(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise self.fail(name, f"expected a text of at most {MAX_TEXT} characters, got {brief(value)}")
        return value

    def mapping(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(name, f"expected an object, got {brief(value)}")
        return value

    def plain(self, name: str, value: Any) -> dict[str, Any]:
        """An object of anything, not so deep that it could be read here and then not be saved."""
        data = self.mapping(name, value)
        level: list[Any] = [data]
        for _ in range(MAX_DEPTH):
            level = [
                item
                for part in level
                if isinstance(part, (dict, list))
                for item in (part.values() if isinstance(part, dict) else part)
            ]
        if level:
            raise self.fail(name, f"is nested deeper than {MAX_DEPTH} levels")
        return data

    def tensor(self, name: str, value: Any, tensor: str, dims: int, columns: int = 0) -> npt.NDArray[Any]:
        """`value` as the array of `tensor`; an empty list of rows has `columns` columns."""
        dtype = TENSORS[tensor].dtype
        if dims == 1:
            return self.row(name, value, dtype)
        rows = [self.row(f"{name}[{i}]", row, dtype) for i, row in enumerate(self.sequence(name, value))]
        for i, row in enumerate(rows):
            if row.shape != rows[0].shape:
                raise self.fail(f"{name}[{i}]", f"expected {rows[0].size} entries as in row 0, got {row.size}")
        return np.stack(rows) if rows else np.empty((0, columns), np.dtype(dtype))

    def sequence(self, name: str, value: Any) -> Sequence[Any]:
        if not isinstance(value, list):
            raise self.fail(name, f"expected a list, got {brief(value)}")
        return value

    def row(self, name: str, value: Any, dtype: str) -> npt.NDArray[Any]:
        items = self.sequence(name, value)
        kind, word = (bool, "true or false") if dtype == "bool" else (int, f"an integer that fits {dtype}")
        for i, item in enumerate(items):
            if type(item) is not kind:
                raise self.fail(f"{name}[{i}]", f"expected {word}, got {brief(item)}")
        try:
            return np.array(items, dtype=np.dtype(dtype))
        except OverflowError:
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            i = next(i for i, item in enumerate(items) if not low <= item <= high)
            raise self.fail(f"{name}[{i}]", f"expected {word}, got {brief(items[i])}") from None
