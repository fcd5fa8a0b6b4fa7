"""The case file: what is saved loads back the same, and a bad file is refused with its field in one line."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swa_decode_meta.oracle import plain
from swa_decode_meta.spec import (
    INPUTS,
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    Batch,
    BufferLayout,
    Case,
    CaseFileError,
    Result,
    brief,
    casefile,
    dump_case,
    load_case,
    load_cases,
    save_case,
    write_atomically,
)

REPORTED = Path(__file__).parent / "data" / "reported.json"
DELETED = object()


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Fails what would otherwise wait for ever."""

    def expire(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def document(**changes: Any) -> dict[str, Any]:
    """A whole case as parsed JSON, changed; a field set to DELETED goes."""
    whole: dict[str, Any] = {
        "version": 1,
        "name": "two requests, one padded token",
        "window": 4,
        "block_size": 2,
        "width": 4,
        "noncausal": False,
        "num_tokens": 3,
        "slot_mapping": [13, -1, 8],
        "token_to_req": [0, 77, 1],
        "query_start_loc": [0, 2, 3],
        "seq_lens": [6, 3],
        "block_table": [[9, 8, 7], [4, -1, 0]],
        "replay_start": [0, 0],
        "buffers": {"lens_tail": 3},
        "expected": {
            "is_valid": [True, False, True],
            "indices": [[19, 16, 17, 14], [-1, -1, -1, -1], [8, 9, -1, -1]],
            "lens": [4, 0, 3],
            "ragged": [19, 16, 17, 14, 8, 9],
            "indptr": [0, 4, 4, 6],
        },
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not DELETED}


def inside(field: str, key: str, value: Any) -> dict[str, Any]:
    """The change that sets (or deletes) one key of an object-valued field."""
    merged = {**document()[field], key: value}
    return {field: {name: item for name, item in merged.items() if item is not DELETED}}


def put(path: Path, content: str | bytes | dict[str, Any] | list[Any]) -> Path:
    if isinstance(content, (dict, list)):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refused(path: object, load: Callable[[Any], object] = load_case) -> CaseFileError:
    """The error that loading gives, after the checks that hold for every such error."""
    with deadline(30), pytest.raises(CaseFileError) as caught:
        load(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.isprintable()
    assert len(message) < 1000
    assert caught.value.problem
    assert caught.value.problem in message
    assert caught.value.field in message
    return caught.value


def same_result(mine: Result | None, theirs: Result | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return mine.difference(theirs) is None and theirs.difference(mine) is None


def assert_same(mine: Case, theirs: Case) -> None:
    for name in ("num_tokens", "window_size", "block_size", "width", "noncausal"):
        assert getattr(mine.batch, name) == getattr(theirs.batch, name), name
    for name in INPUTS:
        one, other = getattr(mine.batch, name), getattr(theirs.batch, name)
        assert one.dtype == other.dtype, name
        assert np.array_equal(one, other), name
    for name in ("buffers", "name", "reported_in", "target", "versions", "finding", "equals_vllm"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert same_result(mine.expected, theirs.expected)


def a_batch(**changes: Any) -> Batch:
    given: dict[str, Any] = {
        "num_tokens": 3,
        "window_size": 4,
        "block_size": 2,
        "width": 4,
        **{name: document()[name] for name in INPUTS},
    }
    return Batch(**{**given, **changes})


# ------------------------------------------------------------------------------------------------ round trips


NO_REQUEST: dict[str, Any] = {"query_start_loc": [0], "seq_lens": [], "block_table": [], "replay_start": []}
ROUND_TRIPS: dict[str, Case] = {
    "plain": Case(a_batch()),
    "full": Case(
        a_batch(noncausal=True, width=9),
        buffers=BufferLayout(2, 3, 4, 5, 6, 7, 8, "start"),
        expected=plain.decode_meta(a_batch(noncausal=True, width=9)),
        name='line\nbreak, "quote", \\, é, \U0001f980, \x00, \u2028',
        reported_in="somewhere",
        target={"name": "kernel@gpu", "options": {"warps": [1, 2], "empty": {}, "none": None}},
        versions={"torch": "2.11.0", "": [], "list": [[1, 2], [3], "x"], "float": 0.1},
        finding={"verdict": "MISMATCH", "deep": {"a": {"b": {"c": [{"d": -1}]}}}, "ok": False},
        equals_vllm=False,
    ),
    "equals_vllm": Case(a_batch(), equals_vllm=True),
    "no token": Case(a_batch(num_tokens=0), expected=plain.decode_meta(a_batch(num_tokens=0))),
    "no request": Case(a_batch(**NO_REQUEST), expected=plain.decode_meta(a_batch(**NO_REQUEST))),
    "nothing": Case(
        a_batch(num_tokens=0, slot_mapping=[], token_to_req=[], **NO_REQUEST),
        expected=plain.decode_meta(a_batch(num_tokens=0, slot_mapping=[], token_to_req=[], **NO_REQUEST)),
    ),
    "no row of the table": Case(a_batch(**NO_REQUEST | {"block_table": np.zeros((0, 3), np.int32)})),
    "no row of a wide table": Case(a_batch(**NO_REQUEST | {"block_table": np.zeros((0, INT32_MAX), np.int32)})),
    "no column": Case(
        a_batch(block_table=np.zeros((2, 0), np.int32)),
        expected=plain.decode_meta(a_batch(block_table=np.zeros((2, 0), np.int32))),
    ),
    "one row of the table": Case(
        a_batch(seq_lens=[6], query_start_loc=[0, 2], block_table=[[9, 8, 7]], token_to_req=[0, 0, 0])
    ),
    "one column": Case(a_batch(block_table=[[9], [8], [7]], width=1, window_size=1)),
    "spare entries": Case(
        a_batch(
            slot_mapping=[13, -1, 8, INT64_MIN, INT64_MAX],
            token_to_req=[0, 77, 1, INT32_MIN, INT32_MAX],
            block_table=[[9, 8, 7], [4, -1, 0], [INT32_MIN, INT32_MAX, 0]],
            replay_start=[0, 0, INT32_MIN],
        )
    ),
    "extremes": Case(
        a_batch(
            window_size=10**40,
            block_size=2**70,
            query_start_loc=[INT32_MAX, INT32_MIN, INT32_MAX],
            seq_lens=[INT32_MIN, INT32_MAX],
            slot_mapping=[INT64_MAX, INT64_MIN, 0],
        )
    ),
    "the longest name": Case(a_batch(), name="x" * 10_000, reported_in="\n" * 10_000),
    "as many entries as a file may have": Case(a_batch(num_tokens=2, width=2**25)),
    "the widest empty batch": Case(
        a_batch(num_tokens=0, width=INT32_MAX),
        expected=plain.decode_meta(a_batch(num_tokens=0, width=INT32_MAX)),
    ),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_saved_case_loads_back_the_same(name: str, tmp_path: Path) -> None:
    case = ROUND_TRIPS[name]
    path = tmp_path / "case.json"
    save_case(path, case)
    loaded = load_case(path)
    assert_same(loaded, case)
    assert dump_case(loaded) == path.read_text(encoding="utf-8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.json"]


def test_a_saved_file_is_plain_json_of_integers(tmp_path: Path) -> None:
    """A float, an Infinity or a comment in the text would make it more than JSON of plain integers."""

    def forbidden(text: str) -> None:
        raise AssertionError(text)

    case = Case(a_batch(), expected=plain.decode_meta(a_batch()))
    save_case(tmp_path / "case.json", case)
    text = (tmp_path / "case.json").read_text(encoding="ascii")
    parsed = json.loads(text, parse_float=forbidden, parse_constant=forbidden)
    assert parsed["version"] == 1
    assert parsed["window"] == 4
    assert {name: parsed[name] for name in INPUTS} == {name: document()[name] for name in INPUTS}
    assert parsed["expected"] == document()["expected"]
    assert text.endswith("}\n")


def test_a_saved_file_has_a_line_for_each_field_and_each_row_of_a_matrix() -> None:
    case = Case(a_batch(), expected=plain.decode_meta(a_batch()), name="two\nlines", versions={"a": 1})
    lines = [line.strip().rstrip(",") for line in dump_case(case).splitlines()]
    for row in (*document()["block_table"], *document()["expected"]["indices"]):
        assert json.dumps(row) in lines
    for line in (
        '"window": 4',
        '"slot_mapping": [13, -1, 8]',
        '"noncausal": false',
        '"a": 1',
        '"lens": [4, 0, 3]',
    ):
        assert line in lines


def test_the_reported_cases_load_as_ten_and_have_what_the_oracle_expects() -> None:
    cases = load_cases(REPORTED)
    assert len(cases) == 10
    for case in cases:
        assert case.expected is not None
        assert case.name
        assert case.reported_in
        assert case.equals_vllm is not None
        assert case.expected.difference(plain.decode_meta(case.batch)) is None


@pytest.mark.parametrize("i", range(10))
def test_each_reported_case_loads_alone_and_round_trips(i: int, tmp_path: Path) -> None:
    item = json.loads(REPORTED.read_text(encoding="utf-8"))[i]
    alone = load_case(put(tmp_path / "alone.json", item))
    assert_same(alone, load_cases(REPORTED)[i])
    assert_same(load_case(put(tmp_path / "list.json", [item])), alone)
    save_case(tmp_path / "saved.json", alone)
    assert_same(load_case(tmp_path / "saved.json"), alone)


def test_only_the_batch_is_required_and_the_rest_has_defaults(tmp_path: Path) -> None:
    needed = ("window", "block_size", "width", "noncausal", "num_tokens", *INPUTS)
    case = load_case(put(tmp_path / "case.json", {key: document()[key] for key in needed}))
    assert_same(case, Case(a_batch()))


def test_a_path_may_be_a_text_or_a_path(tmp_path: Path) -> None:
    save_case(str(tmp_path / "a.json"), Case(a_batch()))
    assert_same(load_case(str(tmp_path / "a.json")), load_case(tmp_path / "a.json"))


def test_an_empty_list_holds_no_case(tmp_path: Path) -> None:
    assert load_cases(put(tmp_path / "case.json", "[]")) == []


# ---------------------------------------------------------------------------------------- files that are none


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path / "none.json")
    assert error.field == ""
    assert error.path == str(tmp_path / "none.json")
    assert "cannot be read: No such file" in error.problem


def test_a_directory_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path)
    assert error.field == ""
    assert "irectory" in error.problem or "regular file" in error.problem


def test_refusing_a_directory_many_times_leaves_no_file_open(tmp_path: Path) -> None:
    """The lowest free descriptor rises when one stays open."""

    def lowest_free() -> int:
        with open(REPORTED, "rb") as file:
            return file.fileno()

    before = lowest_free()
    for _ in range(20):
        refused(tmp_path)
    assert lowest_free() == before


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with deadline(10):
        error = refused(tmp_path / "pipe")
    assert (error.path, error.field) == (str(tmp_path / "pipe"), "")
    assert "not a regular file" in error.problem


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused_as_such(device: str) -> None:
    error = refused(device)
    assert (error.path, error.field) == (device, "")
    assert "not a regular file" in error.problem


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert refused("socket").field == ""


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "case.json", document())
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything

        def denied(*args: object, **kwargs: object) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(os, "open", denied)
    error = refused(path)
    assert error.field == ""
    assert "cannot be read: Permission denied" in error.problem


@pytest.mark.parametrize("name", ["none\nhere.json", "none\x1b[31m.json", "none\u2028.json", "none\0.json"])
def test_a_hostile_path_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    assert refused(tmp_path / name).field == ""


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseFileError, match="cannot be read"):
        load_case(tmp_path / ("n" * 5000))


@pytest.mark.parametrize("content", [b"", b"   \n", b"\n\n\n"])
def test_an_empty_file_is_refused_as_cut_off(content: bytes, tmp_path: Path) -> None:
    error = refused(put(tmp_path / "case.json", content))
    assert error.field == ""
    assert "cut off" in error.problem


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """No prefix of a case is a case: one that loads would run another batch than the one that was saved."""
    text = dump_case(ROUND_TRIPS["full"]).rstrip()
    path = tmp_path / "case.json"
    for end in range(len(text)):
        error = refused(put(path, text[:end]))
        assert error.field == "", end
    assert_same(load_case(put(path, text)), ROUND_TRIPS["full"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"version": 1, "name": "\xff"}', "byte 24 is 0xff"),
        (b"\x80", "byte 0 is 0x80"),
        (json.dumps(document()).encode("utf-16"), "byte 0 is 0xff"),
        (b'{"name": "\xc3', "byte 10 is 0xc3"),
        (b'{"name": "\xed\xa0\x80"}', "byte 10 is 0xed"),
        (json.dumps({"name": "\xe9"}, ensure_ascii=False).encode("latin-1"), "byte 10 is 0xe9"),
    ],
)
def test_bytes_that_are_not_utf8_are_refused_with_their_place(content: bytes, words: str, tmp_path: Path) -> None:
    error = refused(put(tmp_path / "case.json", content))
    assert error.field == ""
    assert "UTF-8" in error.problem
    assert words in error.problem


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        ("{'window': 4}", "", "not JSON"),
        ('{"window": 4,}', "", "not JSON"),
        ('{"window": 4} {"window": 4}', "", "not JSON"),
        ('{"window": 04}', "", "not JSON"),
        ('{"window": +4}', "", "not JSON"),
        ('{"window": 0x4}', "", "not JSON"),
        ('{"name": "a\nb"}', "", "not JSON"),
        ('{"name": "\\x41"}', "", "not JSON"),
        ('{"window": 4} // comment', "", "not JSON"),
        ("\ufeff{}", "", "not JSON"),
        ("\0", "", "not JSON"),
        ("window: 4", "", "not JSON"),
        ('{"window": NaN}', "", "NaN"),
        ('{"window": Infinity}', "", "Infinity"),
        ('{"window": -Infinity}', "", "-Infinity"),
        ('{"finding": {"time": NaN}}', "", "NaN"),
        ('{"window": 4, "window": 4}', "'window'", "twice"),
        ('{"window": 4, "width": 4, "w\\u0069ndow": 5}', "'window'", "twice"),
        ('{"buffers": {"lens_tail": 1, "lens_tail": 2}}', "'lens_tail'", "twice"),
        ('{"finding": {"a": [{"b": 1, "b": 2}]}}', "'b'", "twice"),
        ('[{"window": 4}, {"window": 4, "window": 4}]', "'window'", "twice"),
        ("[" * 100_000, "", "nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "", "nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "", "nested too deeply"),
        ('{"window": 1' + "0" * 10_000 + "}", "", "too many digits"),
        ('{"window": -1' + "0" * 10_000 + "}", "", "too many digits"),
        ('{"finding": {"n": 1' + "0" * 10_000 + "}}", "", "too many digits"),
        ("null", "", "expected an object"),
        ("4", "", "expected an object"),
        ('"window"', "", "expected an object"),
        ("true", "", "expected an object"),
    ],
)
def test_text_that_is_no_json_object_is_refused(content: str, field: str, words: str, tmp_path: Path) -> None:
    error = refused(put(tmp_path / "case.json", content))
    assert error.field == field
    assert words in error.problem


def test_any_depth_of_nesting_is_refused_by_name(tmp_path: Path) -> None:
    """Around the interpreter's own limit an error could come from the code that words the refusal."""
    limit = sys.getrecursionlimit()
    text = json.dumps(document(num_tokens=77777))
    path = tmp_path / "case.json"
    for depth in (1, 50, *range(limit - 250, limit + 20)):
        error = refused(put(path, text.replace("77777", "[" * depth + "]" * depth)))
        assert error.field in ("num_tokens", ""), depth


def test_a_million_keys_with_one_given_twice_are_refused_in_linear_time(tmp_path: Path) -> None:
    keys = [f'"k{i}":0' for i in range(30_000)]
    path = put(tmp_path / "case.json", "{" + ",".join([*keys, keys[-1]]) + "}")
    start = time.process_time()
    refused(path)
    assert time.process_time() - start < 1


def test_a_file_above_the_limit_is_refused_and_one_at_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casefile, "MAX_FILE_BYTES", 2**20)
    text = json.dumps(document())
    path = put(tmp_path / "case.json", text + " " * (2**20 - len(text)))
    assert_same(load_case(path), load_case(put(tmp_path / "same.json", text)))
    error = refused(put(path, text + " " * (2**20 - len(text) + 1)))
    assert (error.field, error.problem) == ("", "is larger than 1 MiB")


def test_a_sparse_file_of_a_terabyte_is_refused_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casefile, "MAX_FILE_BYTES", 2**20)
    path = put(tmp_path / "case.json", "[")
    try:
        os.truncate(path, 2**40)
    except OSError:
        os.truncate(path, 2**31)
    with deadline(10):
        assert "larger than" in refused(path).problem


@pytest.mark.parametrize(("content", "words"), [("[]", "0 cases"), (json.dumps([document()] * 3), "3 cases")])
def test_load_case_refuses_a_list_of_none_or_several(content: str, words: str, tmp_path: Path) -> None:
    error = refused(put(tmp_path / "case.json", content))
    assert error.field == ""
    assert words in error.problem


@pytest.mark.parametrize(
    ("second", "field"),
    [
        (4, "[1]"),
        ([], "[1]"),
        (None, "[1]"),
        (document(window=0), "[1].window"),
        (document(window=DELETED), "[1].window"),
        (document(surprise=1), "[1].'surprise'"),
        (document(block_table=[[9, 8, 7], [4, 2.5, 0]]), "[1].block_table[1][1]"),
        (document(buffers={"surprise": 1}), "[1].buffers.'surprise'"),
        (document(buffers={"lens_tail": -1}), "[1].buffers.lens_tail"),
        (document(**inside("expected", "lens", [1])), "[1].expected.lens"),
    ],
)
def test_an_error_in_a_list_names_the_case_too(second: Any, field: str, tmp_path: Path) -> None:
    assert refused(put(tmp_path / "case.json", [document(), second]), load_cases).field == field


# ------------------------------------------------------------------------------------------------- bad fields


NOT_INTEGERS: list[Any] = [1.0, 1.5, 1e30, True, False, "1", None, [1], {"a": 1}, []]
NOT_LISTS: list[Any] = [0, 1.5, True, "123", None, {"0": 1}]
HOSTILE = "a\nb\r\u2028\x1b[31m\x85\x00\x07" + "c" * 5000


def out_of_range(name: str) -> list[int]:
    beyond = [2**63, -(2**63) - 1, 2**64, 10**100]
    return beyond if name == "slot_mapping" else [2**31, -(2**31) - 1, *beyond]


NOT_INT32: list[Any] = [*NOT_INTEGERS, *out_of_range("lens")]


OUTPUTS = ("is_valid", "indices", "lens", "ragged", "indptr")
ROWS = tuple(name for name in INPUTS if name != "block_table")
OBJECTS = ("target", "versions", "finding")
NOT_TEXTS: list[Any] = [1, True, ["a"], {}, "x" * 20_000]
NOT_OBJECTS: list[Any] = [1, True, "a", None, [], [{}]]
NOT_FLAGS: list[Any] = [0, 1, "false", [], 0.0]
NOT_VERSIONS: list[Any] = [0, 2, -1, "1", 1.0, True, None, [1], 10**100]
NOT_ROOM: list[Any] = [-1, 2**20 + 1, 10**100, 1.0, True, "1", None, [1]]
NOT_NDIM: list[Any] = [1, 4, 3.0, 2.0, "3", None, True, [3], HOSTILE, [HOSTILE], 10**4000]
NOT_GUARDS: list[Any] = ["middle", "", 1, None, ["end"], True, HOSTILE]
NOT_EXPECTED: list[Any] = [1, "a", [], True, [[]]]
BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    # The version and the set of fields.
    *(("version", {"version": value}) for value in NOT_VERSIONS),
    *((key, {key: DELETED}) for key in ("window", "block_size", "width", "noncausal", "num_tokens", *INPUTS)),
    ("'surprise'", {"surprise": 1}),
    ("'window_size'", {"window_size": 4}),
    ("'Window'", {"Window": 4}),
    ("''", {"": 4}),
    # Scalars.
    *((key, {key: v}) for key in ("window", "block_size", "width", "num_tokens") for v in NOT_INTEGERS),
    *((key, {key: -1}) for key in ("window", "block_size", "width", "num_tokens")),
    *((key, {key: -(10**4000)}) for key in ("window", "block_size", "width", "num_tokens")),
    *((key, {key: 0}) for key in ("window", "block_size", "width")),
    *((key, {key: value}) for key in ("noncausal", "equals_vllm") for value in NOT_FLAGS),
    ("noncausal", {"noncausal": None}),
    *((key, {key: value}) for key in ("name", "reported_in") for value in NOT_TEXTS),
    *((key, {key: value}) for key in OBJECTS for value in NOT_OBJECTS),
    # Elements.
    *((name, {name: value}) for name in INPUTS for value in NOT_LISTS),
    *((f"{name}[1]", {name: [0, value, 0, 0]}) for name in ROWS for value in NOT_INTEGERS),
    *(("block_table[1][2]", {"block_table": [[9, 8, 7], [4, 5, value]]}) for value in NOT_INTEGERS),
    *(("block_table[1]", {"block_table": [[9, 8, 7], value]}) for value in NOT_LISTS),
    *((f"{n}[1]", {n: [0, value, 0, 0]}) for n in ROWS for value in out_of_range(n)),
    *(("block_table[1][0]", {"block_table": [[9, 8, 7], [v, 5, 6]]}) for v in out_of_range("block_table")),
    # Shapes.
    ("block_table[1]", {"block_table": [[9, 8, 7], [4, 5]]}),
    ("block_table[1]", {"block_table": [[], [4, 5]]}),
    ("block_table[2]", {"block_table": [[9, 8, 7], [4, 5, 6], [1, 2, 3, 4]]}),
    ("block_table", {"block_table": [[9, 8, 7]]}),
    ("block_table", {"block_table": []}),
    ("block_table[0]", {"block_table": [9, 8, 7]}),
    *(("columns", {**NO_REQUEST, "columns": value}) for value in (*NOT_INTEGERS, -1, 2**31)),
    *(("columns", {"columns": value}) for value in (0, 2, 4)),
    ("block_table[0][0]", {"block_table": [[[9]], [[8]]]}),
    ("slot_mapping", {"slot_mapping": [13, -1]}),
    ("slot_mapping", {"slot_mapping": []}),
    ("slot_mapping[0]", {"slot_mapping": [[13, -1, 8]]}),
    ("slot_mapping", {"num_tokens": 4}),
    ("token_to_req", {"num_tokens": 4, "slot_mapping": [13, -1, 8, -1]}),
    ("token_to_req", {"token_to_req": [0, 77]}),
    ("query_start_loc", {"query_start_loc": [0, 2]}),
    ("query_start_loc", {"query_start_loc": [0, 2, 3, 3]}),
    ("query_start_loc", {"query_start_loc": []}),
    ("query_start_loc", {"seq_lens": [6]}),
    ("query_start_loc", {"seq_lens": [6, 3, 0]}),
    ("replay_start", {"replay_start": [0]}),
    ("num_tokens", {"num_tokens": 2**25}),
    ("num_tokens", {"num_tokens": 10**100}),
    ("num_tokens", {"width": 2**25}),
    ("num_tokens", {"num_tokens": -2, "width": 2**40}),
    ("width", {"num_tokens": 0, "width": 2**31, "expected": DELETED}),
    ("width", {"num_tokens": 0, "width": 10**100, "expected": DELETED}),
    # Buffers.
    *(("buffers", {"buffers": value}) for value in NOT_OBJECTS),
    ("buffers.'surprise'", {"buffers": {"surprise": 1}}),
    *(
        (f"buffers.{name}", {"buffers": {name: value}})
        for name in (
            "indices_row_gap",
            "block_table_row_gap",
            "spare_rows",
            "lens_tail",
            "ragged_spare",
            "misalignment",
        )
        for value in NOT_ROOM
    ),
    *(("buffers.indices_ndim", {"buffers": {"indices_ndim": value}}) for value in NOT_NDIM),
    *(("buffers.guard", {"buffers": {"guard": value}}) for value in NOT_GUARDS),
    # What is expected.
    *(("expected", {"expected": value}) for value in NOT_EXPECTED),
    ("expected.'surprise'", inside("expected", "surprise", [])),
    *((f"expected.{name}", inside("expected", name, DELETED)) for name in OUTPUTS),
    *((f"expected.{name}", inside("expected", name, [])) for name in OUTPUTS),
    *((f"expected.{name}", inside("expected", name, v)) for name in OUTPUTS for v in NOT_LISTS),
    *(("expected.is_valid[1]", inside("expected", "is_valid", [True, v, True])) for v in NOT_FLAGS),
    *(("expected.lens[1]", inside("expected", "lens", [4, v, 3])) for v in NOT_INT32),
    *(("expected.ragged[0]", inside("expected", "ragged", [v] * 6)) for v in NOT_INT32),
    *(
        ("expected.indices[1][3]", inside("expected", "indices", [[0] * 4, [0, 0, 0, v], [0] * 4]))
        for v in NOT_INT32
    ),
    ("expected.indices[1]", inside("expected", "indices", [[0] * 4, [0] * 3, [0] * 4])),
    ("expected.indices", inside("expected", "indices", [[0] * 3] * 3)),
    ("expected.indices", inside("expected", "indices", [[0] * 5] * 3)),
    ("expected.indices", inside("expected", "indices", [[0] * 4] * 4)),
    ("expected.indices", inside("expected", "indices", [[]] * 3)),
    ("expected.is_valid", inside("expected", "is_valid", [True] * 4)),
    ("expected.lens", inside("expected", "lens", [4, 0, 3, 0])),
    ("expected.ragged", inside("expected", "ragged", [1] * 7)),
    ("expected.ragged", inside("expected", "indptr", [0, 4, 4, 7])),
    ("expected.ragged", inside("expected", "indptr", [0, 4, 4, -6])),
    ("expected.ragged", inside("expected", "indptr", [0, 4, 4, INT32_MIN])),
    ("expected.indptr", inside("expected", "indptr", [0, 4, 6])),
    # Hostile names: a key must not bring line breaks, control characters or pages of text into the message.
    (brief(HOSTILE), {HOSTILE: 1}),
    (f"buffers.{brief(HOSTILE)}", {"buffers": {HOSTILE: 1}}),
    (f"expected.{brief(HOSTILE)}", {"expected": {HOSTILE: 1}}),
    *((key, {key: HOSTILE}) for key in ("version", "window", "noncausal", *OBJECTS, "buffers", "expected")),
    *((name, {name: HOSTILE}) for name in INPUTS),
    ("slot_mapping[0]", {"slot_mapping": [HOSTILE]}),
    ("block_table[0][0]", {"block_table": [[HOSTILE]]}),
    ("num_tokens", {"num_tokens": "\ud800"}),
    ("'\\ud800'", {"\ud800": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "changes"), BAD_FIELDS, ids=[f"{field[:40]!a}-{i}" for i, (field, _) in enumerate(BAD_FIELDS)]
)
def test_a_bad_field_is_refused_by_name_in_one_line(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert refused(put(tmp_path / "case.json", document(**changes))).field == field


def test_a_hostile_key_given_twice_is_refused_in_one_line(tmp_path: Path) -> None:
    key = json.dumps(HOSTILE)
    error = refused(put(tmp_path / "case.json", f"{{{key}: 1, {key}: 1}}"))
    assert error.problem == "is given twice"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400 + ".0"])
def test_a_number_that_reads_as_infinity_is_refused_or_saved_so_that_it_loads(number: str, tmp_path: Path) -> None:
    """A finding that holds it must not be saved as Infinity, which no reader of JSON takes."""
    text = json.dumps(document(finding={"seconds": 77777})).replace("77777", number)
    try:
        case = load_case(put(tmp_path / "case.json", text))
    except CaseFileError:
        return
    save_case(tmp_path / "saved.json", case)
    assert load_case(tmp_path / "saved.json").finding == case.finding


@pytest.mark.parametrize(("before", "after"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("depth", [10, 300, 600, 900])
def test_a_case_that_loads_can_be_saved(before: str, after: str, depth: int, tmp_path: Path) -> None:
    text = json.dumps(document(finding={"seconds": 77777})).replace("77777", before * depth + "1" + after * depth)
    try:
        case = load_case(put(tmp_path / "case.json", text))
    except CaseFileError as error:
        if depth == 10:
            raise AssertionError("a finding of ordinary depth is refused") from error
        return
    save_case(tmp_path / "saved.json", case)
    assert load_case(tmp_path / "saved.json").finding == case.finding


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


NUMBERED: Any = {1: 2}
UNSAVEABLE: dict[str, Case] = {
    "a NaN": Case(a_batch(), finding={"seconds": float("nan")}),
    "an infinity": Case(a_batch(), versions={"a": {"b": [float("inf")]}}),
    "a key that is no text": Case(a_batch(), finding=NUMBERED),
    "a key that is no text, deeper": Case(a_batch(), finding={"a": {None: 2}}),
    "a NumPy number": Case(a_batch(), finding={"count": np.int64(3)}),
    "an object": Case(a_batch(), target={"a": object()}),
    "an integer of too many digits": Case(a_batch(), finding={"n": 10**5000}),
    "a deep finding": Case(a_batch(), finding=nested(2000)),
    "a long name": Case(a_batch(), name="x" * 20_000),
    "a long origin": Case(a_batch(), reported_in="x" * 20_000),
    "more entries than a file may have": Case(a_batch(width=2**25)),
    "too many digits in a scalar": Case(a_batch(window_size=10**5000)),
}


@pytest.mark.parametrize("name", UNSAVEABLE)
def test_a_case_is_saved_so_that_it_loads_or_refused_with_nothing_written(name: str, tmp_path: Path) -> None:
    """A finding saved to a file that load_case refuses is a finding lost."""
    path = tmp_path / "case.json"
    try:
        save_case(path, UNSAVEABLE[name])
    except CaseFileError as error:
        message = str(error)
    else:
        load_case(path)
        return
    assert len(message.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- writing


def test_saving_replaces_a_file_and_makes_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "case.json"
    for name in ("plain", "full"):
        save_case(path, ROUND_TRIPS[name])
        assert_same(load_case(path), ROUND_TRIPS[name])
    assert [entry.name for entry in path.parent.iterdir()] == ["case.json"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444


def unwritten(path: Path, text: str = "text") -> CaseFileError:
    with pytest.raises(CaseFileError) as caught:
        write_atomically(path, text)
    assert caught.value.field == ""
    assert "cannot be written" in caught.value.problem
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def test_a_place_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    put(tmp_path / "file", "text")
    assert unwritten(tmp_path / "file" / "case.json").path == str(tmp_path / "file" / "case.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_directory_cannot_be_written_over(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    unwritten(tmp_path / "folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_case_larger_than_a_file_may_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casefile, "MAX_FILE_BYTES", len(dump_case(ROUND_TRIPS["full"])))
    path = tmp_path / "case.json"
    save_case(path, ROUND_TRIPS["full"])
    assert_same(load_case(path), ROUND_TRIPS["full"])
    monkeypatch.setattr(casefile, "MAX_FILE_BYTES", len(dump_case(ROUND_TRIPS["full"])) - 1)
    refused(path)
    path.unlink()
    with pytest.raises(CaseFileError):
        save_case(path, ROUND_TRIPS["full"])
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_or_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Run by root, a file written "to /dev/null" must not become /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    with deadline(10):
        unwritten(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("name", ["n" * 5000, "a\nb/" + "n" * 5000, "a\0b"], ids=["long", "two lines", "NUL"])
def test_a_name_that_no_file_can_have_cannot_be_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(CaseFileError, match="cannot be written"):
        write_atomically(tmp_path / name, "text")


def test_the_longest_name_that_a_file_can_have_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    put(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    assert "Permission denied" in unwritten(folder / "case.json").problem


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_refusing_file_system_leaves_the_old_file_and_nothing_else(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "case.json"
    save_case(path, ROUND_TRIPS["plain"])
    old = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CaseFileError) as caught:
        save_case(path, ROUND_TRIPS["full"])
    monkeypatch.undo()
    assert caught.value.problem == f"cannot be written: {os.strerror(code)}"
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.json"]


def test_a_file_that_outgrows_the_space_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """A real refusal of a write half-way through, by the limit on the size of a file."""
    path = put(tmp_path / "case.json", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        unwritten(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.json"]


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "case.json", "old")

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_case(path, ROUND_TRIPS["full"])
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.json"]
