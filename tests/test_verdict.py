"""What a difference is called: its place, its clause, its fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swa_decode_meta.fuzz.image import after, before, placements
from swa_decode_meta.fuzz.runner import crash_site
from swa_decode_meta.fuzz.verdict import Verdict, compare, damaged
from swa_decode_meta.oracle import plain
from swa_decode_meta.spec import (
    INPUTS,
    Batch,
    BufferLayout,
)
from tests.batches import BATCH, CASE, batch_with


def compared(batch: Batch, tensor: str, *at: int, value: int, layout: BufferLayout = CASE.buffers) -> Verdict | None:
    """The verdict on a build of `batch` that is right save for one element."""
    result = plain.decode_meta(batch)
    places = placements(batch, layout)
    expected = after(before(batch, places, np.random.default_rng(0)), batch, result, places)
    got = {name: image.copy() for name, image in expected.items()}
    places[tensor].view(got[tensor])[at] = value
    return compare(batch, result, places, expected, got)


@pytest.mark.parametrize(
    ("changes", "tensor", "at", "value", "verdict", "clause"),
    [
        ({}, "is_valid", (2,), 1, "MISMATCH", 1),
        ({}, "is_valid", (0,), 2, "MISMATCH", 1),
        ({}, "is_valid", (3,), 1, "FRAME", 12),
        ({}, "lens", (2,), 1, "MISMATCH", 2),
        ({"token_to_req": [0, 2, 99]}, "lens", (1,), 1, "MISMATCH", 2),
        ({"token_to_req": [-1, 0, 99]}, "lens", (0,), 1, "MISMATCH", 2),
        ({}, "lens", (0,), 5, "MISMATCH", 4),
        ({"noncausal": True, "width": 8}, "lens", (0,), 5, "MISMATCH", 5),
        ({}, "lens", (0,), -1, "MISMATCH", 7),
        ({}, "lens", (0,), 7, "MISMATCH", 7),
        ({}, "lens", (5,), 1, "MISMATCH", 7),
        ({}, "indices", (0, 0), 41, "MISMATCH", 8),
        ({}, "indices", (0, 0), -1, "MISMATCH", 8),
        ({"block_table": [[7, -1, 2], [1, 3, 5]]}, "indices", (0, 0), 40, "MISMATCH", 9),
        ({}, "indices", (0, 4), 8, "MISMATCH", 10),
        ({}, "indices", (2, 0), 40, "MISMATCH", 10),
        ({}, "indices", (3, 0), -1, "FRAME", 12),
        ({}, "indptr", (0,), 1, "MISMATCH", 11),
        ({}, "indptr", (3,), 1, "MISMATCH", 11),
        ({}, "indptr", (4,), 9, "FRAME", 12),
        ({}, "ragged", (8,), 1, "MISMATCH", 11),
        ({}, "ragged", (9,), 1, "FRAME", 12),
        ({}, "ragged", (19,), 1, "FRAME", 12),
        *(({}, name, (1, 2) if name == "block_table" else (1,), 12345, "FRAME", 12) for name in INPUTS),
    ],
)
def test_a_wrong_element_is_told_with_the_clause_that_it_breaks(
    changes: dict[str, Any], tensor: str, at: tuple[int, ...], value: int, verdict: str, clause: int
) -> None:
    found = compared(batch_with(**changes), tensor, *at, value=value)
    assert found is not None
    assert (found.verdict, found.clause, found.tensor) == (verdict, clause, tensor)
    assert (found.row, found.column, found.got) == (*(*at, None)[:2], value)


def test_equal_images_have_no_verdict_and_damage_outside_them_has_one() -> None:
    result = plain.decode_meta(BATCH)
    places = placements(BATCH, CASE.buffers)
    images = after(before(BATCH, places, np.random.default_rng(0)), BATCH, result, places)
    assert compare(BATCH, result, places, images, images) is None
    found = damaged("lens", -3)
    assert (found.verdict, found.clause, found.tensor) == ("FRAME", 12, "lens")
    assert "byte -3" in found.detail


def test_the_first_difference_is_the_nearest_to_its_cause() -> None:
    result = plain.decode_meta(BATCH)
    places = placements(BATCH, CASE.buffers)
    expected = after(before(BATCH, places, np.random.default_rng(0)), BATCH, result, places)
    got = dict(expected)
    for name in ("seq_lens", "ragged", "indptr", "indices", "lens", "is_valid"):
        got[name] = expected[name] ^ 1
        found = compare(BATCH, result, places, expected, got)
        assert found is not None
        assert (found.tensor, found.row) == (name, 0)


def test_a_fingerprint_is_shared_by_findings_that_differ_only_in_place_and_value() -> None:
    one = Verdict("MISMATCH", 8, "indices", 1, 3, 43, 77)
    assert one.fingerprint == Verdict("MISMATCH", 8, "indices", 9, 0, 1, 2).fingerprint == "MISMATCH-indices-clause8"
    others = [
        Verdict("MISMATCH", 9, "indices"),
        Verdict("MISMATCH", 8, "ragged"),
        Verdict("FRAME", 8, "indices"),
        Verdict("EXCEPTION", 14, detail="ValueError: 1"),
        Verdict("EXCEPTION", 14, detail="TypeError: 1"),
        Verdict("FAULT", 14, detail="SIGSEGV: here"),
        Verdict("FAULT", 14, detail="SIGABRT: here"),
    ]
    assert len({verdict.fingerprint for verdict in (one, *others)}) == 1 + len(others)
    assert Verdict("EXCEPTION", 14, detail="ValueError: 2").fingerprint == others[3].fingerprint


@pytest.mark.parametrize("detail", ["../../etc/passwd: no", "Ärger/\0\n: x", "E" * 1000, "", ": : :"])
def test_a_fingerprint_is_fit_for_a_file_name(detail: str, tmp_path: Path) -> None:
    name = Verdict("EXCEPTION", 14, detail=detail).fingerprint
    path = tmp_path / f"{name}.json"
    path.touch()
    assert path.resolve().parent == tmp_path.resolve()
    assert len(name) <= 120


def test_a_verdict_in_words_names_place_values_and_clause() -> None:
    assert str(Verdict("MISMATCH", 8, "indices", 1, 3, 43, 77)) == (
        "MISMATCH (clause 8) indices[1][3]: expected 43, got 77"
    )
    assert str(Verdict("MISMATCH", 7, "lens", 3, None, 0, 5)) == "MISMATCH (clause 7) lens[3]: expected 0, got 5"
    assert str(Verdict("HANG", 14, detail="no answer")) == "HANG (clause 14) no answer"
    assert Verdict("MISMATCH", 7, "lens", 0, None, 0, 5).as_finding() == {
        "verdict": "MISMATCH",
        "clause": 7,
        "tensor": "lens",
        "row": 0,
        "expected": 0,
        "got": 5,
    }


def test_the_crash_site_is_the_innermost_line_of_the_target() -> None:
    report = "\n".join(
        f'  File "{file}", line {line} in {function}'
        for file, line, function in (
            ("/v/lib/python3.11/site-packages/triton/runtime/interpreter.py", 1, "load"),
            ("/v/lib/python3.11/site-packages/numpy/core.py", 2, "add"),
            ("/home/me/target.py", 3, "kernel"),
            ("/home/me/target.py", 4, "launch"),
            ("/home/me/swa/fuzz/child.py", 5, "launch"),
        )
    )
    assert crash_site(f"Fatal Python error: Segmentation fault\n{report}\n") == "target.py:3 in kernel"
    assert crash_site("Killed") == ""
