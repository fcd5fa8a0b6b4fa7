"""The oracles held to each other and to recorded results: what can be checked on a machine without torch.

Needs NumPy and Hypothesis. Imports neither torch nor triton nor the kernel.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..oracle import plain, vectorised
from ..spec import (
    INPUTS,
    Batch,
    Case,
    CaseFileError,
    Dependencies,
    IllegalBatchError,
    Int32Array,
    Result,
    check_legal,
    save_case,
)
from . import exhaustive
from .replay import files_of, read

OK, HARNESS_ERROR = 0, 3

_CHUNK = 1000  # batches that the vectorised oracle takes at once
_SHARDS = 61  # of the exhaustive preset; a prime, so that each of them meets every choice of every input
_DRAWS = 40  # random batches of a profile at a time
_PLAIN_ENTRIES = 2**18  # num_tokens * width of the random batches: several times a whole batch in service

# Of the outputs the nearest to the cause first; `ragged`, whose very size may differ, after `indptr`.
_ORDER = ("is_valid", "lens", "indices", "indptr", "ragged", *INPUTS)


class OracleDifference(Exception):
    """The oracles differ, or differ from what was recorded; until that is mended, no kernel can be judged.

    Attributes: `message`, of one line, and `case`, on which they do.
    """

    def __init__(self, message: str, case: Case) -> None:
        self.message, self.case = message, case
        super().__init__(message)


def run(paths: Sequence[Path], seconds: float, echo: Callable[[str], None], full: bool = False) -> int:
    """Check the oracles on SPEC.md's example, case files, the exhaustive preset and random batches.

    Half of `seconds` goes to an evenly spread part of the preset (with `full`: all of it, however long it
    takes), half to random batches; a few of each are checked even in no time. `echo` gets a line a part.
    Returns 0; or 3 when the oracles differ, or a recorded result differs from them: then the last line has
    the first difference, and the file that the case was saved in. Raises CaseFileError for a bad case file.
    """
    files = {path: read(path) for path in files_of(paths)}
    try:
        for part in (
            _examples,
            partial(_files, files),
            partial(_preset, None if full else seconds / 2),
            partial(_random, seconds / 2),
        ):
            start = time.perf_counter()
            words = part()
            echo(f"{words} ({time.perf_counter() - start:.1f} s)")
    except OracleDifference as error:
        echo(f"{error.message}; {_dump(error.case)}")
        return HARNESS_ERROR
    return OK


def compare(batches: Sequence[Batch]) -> None:
    """Raise OracleDifference unless both oracles write the same for every batch."""
    try:
        fast = vectorised.decode_meta_many(batches)
        slow = [plain.decode_meta(batch) for batch in batches]
    except Exception as error:
        if len(batches) == 1:
            problem = f"an oracle raised {type(error).__name__}: {error}"
            raise OracleDifference(problem, Case(batches[0])) from error
        for batch in batches:
            compare([batch])
        raise
    for batch, one, other in zip(batches, slow, fast, strict=True):
        if one.difference(other) is not None:
            place = _first_difference(one.arrays(), other.arrays())
            raise OracleDifference(f"the plain and the vectorised oracle differ: {place}", Case(batch))


def compare_dependencies(batches: Iterable[Batch]) -> None:
    """Raise OracleDifference unless the plain oracle reads just what the vectorised one says is read."""
    for batch in batches:
        one, other = _masks(plain.dependencies(batch)), _masks(vectorised.dependencies(batch))
        place = _first_difference(one, other)
        if place is not None:
            problem = f"the plain and the vectorised oracle differ in what they read: {place}"
            raise OracleDifference(problem, Case(batch))


def worked_examples() -> list[Case]:
    """The worked example of SPEC.md, section 6, and its two variations."""
    causal = Batch(
        num_tokens=3,
        window_size=5,
        block_size=4,
        width=5,
        slot_mapping=np.array([43, 8, -1], np.int64),
        token_to_req=_int32([0, 0, 99]),
        query_start_loc=_int32([0, 2]),
        seq_lens=_int32([9]),
        block_table=_int32([[7, 10, 2]]),
        replay_start=_int32([4]),
    )
    hole = replace(causal, block_table=_int32([[7, -1, 2]]))
    dspark = replace(causal, width=8, noncausal=True)
    block = [30, 31, 40, 41, 42, 43, 8]
    return [
        Case(
            causal,
            name="worked example",
            expected=Result(
                is_valid=np.array([True, True, False]),
                indices=_int32([[40, 41, 42, 43, -1], [40, 41, 42, 43, 8], [-1, -1, -1, -1, -1]]),
                lens=_int32([4, 5, 0]),
                ragged=_int32([40, 41, 42, 43, 40, 41, 42, 43, 8]),
                indptr=_int32([0, 4, 9, 9]),
            ),
        ),
        Case(
            hole,
            name="worked example, block 1 without a page",
            expected=Result(
                is_valid=np.array([True, True, False]),
                indices=_int32([[-1, -1, -1, -1, -1], [-1, -1, -1, -1, 8], [-1, -1, -1, -1, -1]]),
                lens=_int32([4, 5, 0]),
                ragged=_int32([8]),
                indptr=_int32([0, 0, 1, 1]),
            ),
        ),
        Case(
            dspark,
            name="worked example in DSpark form",
            expected=Result(
                is_valid=np.array([True, True, False]),
                indices=_int32([[*block, -1], [*block, -1], [-1] * 8]),
                lens=_int32([7, 7, 0]),
                ragged=_int32([*block, *block]),
                indptr=_int32([0, 7, 14, 14]),
            ),
        ),
    ]


def _int32(values: npt.ArrayLike) -> Int32Array:
    return np.asarray(values, np.int32)


def _examples() -> str:
    cases = worked_examples()
    _compare_recorded(cases, "SPEC.md")
    return f"worked example of SPEC.md: {len(cases)} batches, both oracles write what it says"


def _files(files: Mapping[Path, list[Case]]) -> str:
    for path, cases in files.items():
        _compare_recorded(cases, str(path))
    everything = [case for cases in files.values() for case in cases]
    recorded = sum(case.expected is not None for case in everything)
    found = f"both oracles equal, and equal to the {recorded} recorded results"
    return f"case files ({len(files)}): {len(everything)} cases, {found}"


def _compare_recorded(cases: Sequence[Case], source: str) -> None:
    for i, case in enumerate(cases):
        compare([case.batch])
        if case.expected is None:
            continue
        recorded, result = case.expected.arrays(), plain.decode_meta(case.batch).arrays()
        place = _first_difference(recorded, result, "recorded", "oracles")
        if place is not None:
            name = f" ({case.name})" if case.name else ""
            raise OracleDifference(f"case {i}{name} of {source} differs from both oracles: {place}", case)


def _preset(seconds: float | None) -> str:
    """The exhaustive preset, shard by shard until the time is over; None: all of it."""
    start, checked = time.perf_counter(), 0
    for i in range(_SHARDS):
        if i and seconds is not None and time.perf_counter() - start >= seconds:
            break
        for chunk in _chunks(exhaustive.shard(i, _SHARDS)):
            compare(chunk)
            checked += len(chunk)
    return f"exhaustive preset: {checked:,} of {exhaustive.COUNT:,} batches, both oracles equal"


def _random(seconds: float) -> str:
    """Random batches of all profiles in turn until the time is over."""
    from .strategies import PROFILES  # here, so that all else needs no Hypothesis

    start, counts = time.perf_counter(), dict.fromkeys(PROFILES, 0)
    for profile in cycle(PROFILES):
        if all(counts.values()) and time.perf_counter() - start >= seconds:
            break
        batches = drawn(profile, _DRAWS)
        if profile != "hostile":
            for batch in batches:
                _expect_legal(batch, profile)
        compare(batches)
        compare_dependencies(batches)
        counts[profile] += len(batches)
    words = ", ".join(f"{count:,} {profile}" for profile, count in counts.items())
    return f"random batches: {words}; both oracles equal, and equal in what they read"


def drawn(profile: str, count: int) -> list[Batch]:
    """Up to `count` random batches of a profile of `strategies`, `affordable` ones, others at every call."""
    from hypothesis import HealthCheck, Phase, given, settings

    from .strategies import cases

    collected: list[Batch] = []

    # Everything that a profile of Hypothesis could change is set here: it picks one by the variable CI.
    @settings(
        max_examples=count,
        phases=(Phase.generate,),
        derandomize=False,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(profile))
    def collect(case: Case) -> None:
        collected.append(affordable(case.batch))

    collect()
    return collected


def affordable(batch: Batch) -> Batch:
    """`batch` with as many of its rows as the plain oracle builds in about a second. Legal stays legal."""
    return replace(batch, num_tokens=min(batch.num_tokens, _PLAIN_ENTRIES // batch.width))


def _expect_legal(batch: Batch, profile: str) -> None:
    try:
        check_legal(batch)
    except IllegalBatchError as error:
        raise OracleDifference(f"a batch of the profile {profile} is an {error}", Case(batch)) from None


def _chunks(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    while chunk := list(islice(batches, _CHUNK)):
        yield chunk


def _masks(dependencies: Dependencies) -> dict[str, npt.NDArray[Any]]:
    return {name: getattr(dependencies, name) for name in INPUTS}


def _first_difference(
    one: Mapping[str, npt.NDArray[Any]],
    other: Mapping[str, npt.NDArray[Any]],
    name_one: str = "plain",
    name_other: str = "vectorised",
) -> str | None:
    """Tensor, row and column of the first element that differs, with both values; None when all are equal."""
    for tensor in (name for name in _ORDER if name in one):
        array, twin = one[tensor], other[tensor]
        if array.dtype != twin.dtype or array.shape != twin.shape:
            kinds = [f"{a.dtype}{list(a.shape)}" for a in (array, twin)]
            return f"{tensor}: {name_one} {kinds[0]}, {name_other} {kinds[1]}"
        wrong = np.argwhere(array != twin)
        if len(wrong):
            at = tuple(wrong[0].tolist())
            place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "column"), at, strict=False))
            return f"{tensor}, {place}: {name_one} {array[at]}, {name_other} {twin[at]}"
    return None


def _dump(case: Case) -> str:
    """Save `case` in a new folder of its own, and say where."""
    try:
        path = Path(tempfile.mkdtemp(prefix="swa-decode-meta-")) / "oracle-difference.json"
        save_case(path, case)
    except (OSError, CaseFileError) as error:
        return f"the case cannot be saved: {error}"
    return f"the case is in {path}"
