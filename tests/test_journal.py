"""The case in flight, on disk."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_decode_meta.fuzz.journal import Journal, read_journal
from swa_decode_meta.fuzz.strategies import PROFILES, cases
from swa_decode_meta.spec import (
    BufferLayout,
    Case,
    CaseFileError,
    dump_case,
)
from tests.batches import CASE, batch_with


def test_a_journal_gives_back_the_last_case_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "pending" / "worker.npz")
    odd = Case(
        batch_with(noncausal=True, block_table=np.zeros((2, 0), np.int32)),
        BufferLayout(guard="start"),
        target={"backend": "interpreter", "shape": {"num_warps": 2}},
    )
    for case in (CASE, odd):
        journal.write(case)
        assert dump_case(read_journal(journal.path)) == dump_case(case)
    journal.close()
    assert not list(journal.path.parent.iterdir())
    journal.close()


@settings(max_examples=60)
@given(st.sampled_from(PROFILES).flatmap(cases))
def test_a_journal_holds_any_case(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    journal = Journal(tmp_path_factory.getbasetemp() / "any.npz")
    journal.write(case)
    found = read_journal(journal.path)
    assert dump_case(found) == dump_case(case)


def test_a_journal_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "worker.npz"
    Journal(path).write(CASE)
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 61), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CaseFileError) as caught:
            read_journal(path)
        assert "\n" not in str(caught.value)


def test_a_journal_with_any_byte_changed_is_refused_or_whole(tmp_path: Path) -> None:
    path = tmp_path / "worker.npz"
    Journal(path).write(CASE)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with suppress(CaseFileError):
            read_journal(path)


def _archive(path: Path, **changes: Any) -> None:
    """A journal with other arrays."""
    Journal(path).write(CASE)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    "changes",
    [
        {"note": None},
        {"seq_lens": None},
        {"note": np.frombuffer(b"[]", np.uint8)},
        {"note": np.frombuffer(b'"text"', np.uint8)},
        {"note": np.frombuffer(b"{", np.uint8)},
        {"note": np.frombuffer(b"\xff\xfe", np.uint8)},
        {"seq_lens": np.zeros(7, np.int32)},
        {"seq_lens": np.array(["a", "b"])},
        {"seq_lens": np.array([1, None], object)},
    ],
)
def test_a_journal_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "worker.npz"
    _archive(path, **changes)
    with pytest.raises(CaseFileError, match="is not a whole journal"):
        read_journal(path)


def test_a_missing_journal_is_refused_and_a_pickle_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(CaseFileError, match="cannot be read: No such file"):
        read_journal(tmp_path / "none.npz")
    for content in (pickle.dumps({"note": 1}), b"not an archive", b""):
        path = tmp_path / "pickle.npz"
        path.write_bytes(content)
        with pytest.raises(CaseFileError, match="is not a whole journal"):
            read_journal(path)


def test_a_compressed_journal_is_refused_unread(tmp_path: Path) -> None:
    """A small file must not become a large one."""
    np.savez_compressed(tmp_path / "bomb.npz", note=np.zeros(2**24, np.uint8))
    with pytest.raises(CaseFileError, match="compressed"):
        read_journal(tmp_path / "bomb.npz")


def test_a_pipe_in_the_place_of_a_journal_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(CaseFileError, match="regular file"):
        read_journal(tmp_path / "pipe.npz")
