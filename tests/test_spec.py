"""SPEC.md, the data types and the legal domain: document and code say the same, bad input is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import swa_decode_meta.spec
from swa_decode_meta.oracle import plain
from swa_decode_meta.spec import (
    INPUTS,
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    TENSORS,
    ArgumentError,
    BackendError,
    Batch,
    CaseFileError,
    IllegalBatchError,
    Result,
    SwaDecodeMetaError,
    check_legal,
)

SPEC = (Path(swa_decode_meta.spec.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
CLAUSES = re.findall(r"^\*\*Clause (\d+), [^*]+\.\*\*(.*?)(?=^\*\*Clause|^## |\Z)", SPEC, re.MULTILINE | re.DOTALL)


def clauses_named(doc: str) -> set[int]:
    """The clause numbers that a docstring begins with: "Clauses 1 to 3, 14 and 15: ..." names five."""
    head = doc.split(":")[0]
    if not re.match(r"Clauses? \d", head):
        return set()
    named: set[int] = set()
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", head):
        named |= set(range(int(first), int(last or first) + 1))
    return named


# ----------------------------------------------------------------------------------------------- the document


def test_clauses_are_numbered_from_1_to_15_without_gaps() -> None:
    assert [int(number) for number, _ in CLAUSES] == list(range(1, 16))


@pytest.mark.parametrize(("number", "text"), CLAUSES, ids=[number for number, _ in CLAUSES])
def test_each_clause_names_an_oracle_function_whose_docstring_names_it(number: str, text: str) -> None:
    names = re.findall(r"^Executed by `(\w+)`", text, re.MULTILINE)
    assert len(names) == 1
    function = getattr(plain, names[0])
    assert inspect.isfunction(function)
    assert function.__module__ == plain.__name__
    assert int(number) in clauses_named(inspect.getdoc(function) or "")


def test_decode_meta_executes_clauses_14_and_15() -> None:
    last = [re.findall(r"^Executed by `(\w+)`", text, re.MULTILINE) for _, text in CLAUSES[13:]]
    assert last == [["decode_meta"], ["decode_meta"]]
    assert clauses_named(inspect.getdoc(plain.decode_meta) or "") >= {14, 15}


def test_every_public_oracle_function_names_a_clause_of_the_document() -> None:
    functions = [f for _, f in inspect.getmembers(plain, inspect.isfunction) if f.__module__ == plain.__name__]
    public = [f for f in functions if not f.__name__.startswith("_")]
    assert public
    for function in public:
        named = clauses_named(inspect.getdoc(function) or "")
        assert named, function.__name__
        assert named <= {int(number) for number, _ in CLAUSES}, function.__name__


def test_the_tables_of_tensors_give_the_dtypes_and_roles_of_the_code() -> None:
    titles = {"input": "2. Inputs", "output": "3. Outputs"}
    sections = {role: SPEC.split(f"\n## {title}\n")[1].split("\n## ")[0] for role, title in titles.items()}
    found = {
        name: (role, dtype)
        for role, section in sections.items()
        for name, dtype in re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)
    }
    assert found == {name: (spec.role, spec.dtype) for name, spec in TENSORS.items()}


def test_the_rules_of_the_legal_domain_are_numbered_L1_to_L7() -> None:
    assert re.findall(r"^- \*\*(L\d+)\*\*", SPEC, re.MULTILINE) == [f"L{i}" for i in range(1, 8)]


# ----------------------------------------------------------------------------------------- the worked example


EXAMPLE = SPEC.split("\n## 6. A worked example\n")[1].split("\n## ")[0]


def value_of(name: str) -> Any:
    """The JSON value that follows `name` in the example's blocks; the document must give exactly one."""
    found = re.findall(rf"(?<!\w){name} +(\[.*?\]|\d+)(?= {{2,}}|$)", EXAMPLE, re.MULTILINE)
    assert len(found) == 1, (name, found)
    return json.loads(found[0])


def setting_of(symbol: str) -> int:
    found = re.findall(rf"`{symbol} = (\d+)`", EXAMPLE)
    assert found, symbol
    return int(found[0])


def example(**changes: Any) -> Batch:
    arguments: dict[str, Any] = {name: value_of(name) for name in ("num_tokens", *INPUTS)}
    arguments |= {"window_size": setting_of("W"), "block_size": setting_of("B"), "width": setting_of("width")}
    return Batch(**{**arguments, **changes})


def test_the_worked_example_is_what_the_oracle_computes_and_is_legal() -> None:
    batch = example()
    check_legal(batch)
    result = plain.decode_meta(batch)
    assert {name: array.tolist() for name, array in result.arrays().items()} == {
        name: value_of(name) for name in ("is_valid", "indices", "lens", "ragged", "indptr")
    }


def test_the_drawing_of_the_worked_example_shows_the_slots_of_its_table() -> None:
    batch = example()
    drawn = re.findall(r"^(position|slot) +(.+)$", EXAMPLE, re.MULTILINE)
    numbers = {name: [int(word) for word in re.findall(r"\d+", line)] for name, line in drawn}
    assert numbers["position"] == list(range(9))
    assert numbers["slot"] == [plain.entry(plain._inputs(batch), 0, p) for p in range(9)]


def test_the_worked_example_with_a_hole_keeps_its_length_and_loses_its_ragged_entries() -> None:
    prose = " ".join(EXAMPLE.split())
    found = re.search(
        r"page number of block 1 negative, token 1's dense row would be `(\[.*?\])` with `lens` still (\d+), "
        r"and its ragged part just `(\[.*?\])`",
        prose,
    )
    assert found
    dense, length, ragged = (json.loads(text) for text in found.groups())
    result = plain.decode_meta(example(block_table=[[7, -3, 2]]))
    assert result.indices[1].tolist() == dense
    assert result.lens[1] == length
    assert result.ragged[result.indptr[1] : result.indptr[2]].tolist() == ragged


def test_the_worked_example_in_dspark_form_gives_both_tokens_the_same_seven_slots() -> None:
    prose = " ".join(EXAMPLE.split())
    found = re.search(r"In DSpark form with `width = (\d+)`, both tokens .*?: slots ([\d, ]+)\.", prose)
    assert found
    width, slots = int(found[1]), [int(word) for word in found[2].split(",")]
    batch = example(noncausal=True, width=width)
    check_legal(batch)
    result = plain.decode_meta(batch)
    assert len(slots) == 7
    assert result.indices[:2].tolist() == [slots + [-1] * (width - 7)] * 2
    assert result.ragged.tolist() == slots * 2
    assert result.indptr.tolist() == [0, 7, 14, 14]


# ------------------------------------------------------------------------------------------------------ Batch


def arguments(**changes: Any) -> dict[str, Any]:
    """A legal causal batch: requests of 2, 0 and 1 tokens, a padded token, table entries that no row sees."""
    legal: dict[str, Any] = {
        "num_tokens": 4,
        "window_size": 5,
        "block_size": 4,
        "width": 5,
        "slot_mapping": [43, 8, 21, -1],
        "token_to_req": [0, 0, 2, 99],
        "query_start_loc": [0, 2, 2, 3],
        "seq_lens": [9, 4, 6],
        "block_table": [[7, 10, 2], [-1, -1, -1], [3, 5, -9]],
        "replay_start": [4, 0, 2],
        "noncausal": False,
    }
    return {**legal, **changes}


def test_a_batch_is_frozen() -> None:
    batch = Batch(**arguments())
    for name in arguments():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(batch, name, getattr(batch, name))


@pytest.mark.parametrize("name", INPUTS)
def test_arrays_of_a_batch_are_read_only_and_of_the_tensor_dtype(name: str) -> None:
    array = getattr(Batch(**arguments()), name)
    assert array.dtype == np.dtype(TENSORS[name].dtype)
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0


@pytest.mark.parametrize("name", INPUTS)
def test_an_array_given_to_a_batch_is_viewed_and_stays_writable_for_its_owner(name: str) -> None:
    mine = np.array(arguments()[name], TENSORS[name].dtype)
    batch = Batch(**arguments(**{name: mine}))
    assert np.shares_memory(getattr(batch, name), mine)
    assert mine.flags.writeable


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_lens", np.array([9, 4, 6], np.int64)),
        ("seq_lens", np.array([9, 4, 6], np.uint64)),
        ("seq_lens", np.array([9, 4, 6], np.int8)),
        ("seq_lens", np.array([9, 4, 6], np.dtype(np.int32).newbyteorder())),
        ("seq_lens", np.array([9, 0, 4, 0, 6, 0], np.int32)[::2]),
        ("seq_lens", (9, 4, 6)),
        ("block_table", np.array([[7, -1, 3], [10, -1, 5], [2, -1, -9]], np.int32).T),
        ("slot_mapping", [INT64_MAX, 0, INT64_MAX, INT64_MIN]),
        ("replay_start", [4, 0, 2, INT32_MAX, INT32_MIN]),
        ("num_tokens", np.int64(4)),
        ("window_size", np.uint8(5)),
        ("noncausal", np.False_),
    ],
)
def test_every_honest_form_of_an_argument_makes_the_same_batch(name: str, value: Any) -> None:
    result = plain.decode_meta(Batch(**arguments(**{name: value})))
    assert result.difference(plain.decode_meta(Batch(**arguments()))) is None


def test_a_batch_without_requests_or_tokens_takes_empty_lists() -> None:
    empty: dict[str, Any] = {
        name: [] for name in ("slot_mapping", "token_to_req", "seq_lens", "block_table", "replay_start")
    }
    batch = Batch(**arguments(**empty, num_tokens=0, query_start_loc=[0]))
    assert batch.num_reqs == 0
    assert batch.block_table.shape == (0, 0)
    assert plain.decode_meta(batch).indptr.tolist() == [0]


SCALARS = ("num_tokens", "window_size", "block_size", "width")
NOT_INTEGERS: list[Any] = [True, np.True_, 1.0, np.float64(1), "1", None, [1], float("nan"), 1 + 0j, np.array(4)]
NOT_INT32: list[Any] = [
    [0.0, 0, 0, 0],
    np.zeros(4),
    np.zeros(4, np.bool_),
    [True, False, True, False],
    ["0", "0", "0", "0"],
    [None, 0, 0, 0],
    [0, 0, 0, 2**31],
    [-(2**31) - 1, 0, 0, 0],
    [2**64, 0, 0, 0],
    [2**200, 0, 0, 0],
    np.array([0, 0, 0, 2**31], np.int64),
    np.array([0, 0, 0, 2**64 - 1], np.uint64),
    [[0], [0, 0], [0], [0]],
    "0000",
    None,
    {0: 0},
]
BAD_ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: value}) for name in SCALARS for value in NOT_INTEGERS),
    *((name, {name: -1}) for name in SCALARS),
    *((name, {name: 0}) for name in SCALARS[1:]),
    ("window_size", {"window_size": -(2**70)}),
    *(("noncausal", {"noncausal": value}) for value in (0, 1, None, "no", 1.0, [True])),
    *((name, {name: value}) for name in INPUTS[1:] for value in NOT_INT32 if name != "block_table"),
    *(("block_table", {"block_table": [value]}) for value in NOT_INT32 if value is not None),
    ("block_table", {"block_table": None}),
    ("block_table", {"block_table": [[0, 0], [0]]}),
    ("block_table", {"block_table": [[0.5, 0], [0, 0], [0, 0]]}),
    *(("slot_mapping", {"slot_mapping": [0, 0, 0, value]}) for value in (2**63, -(2**63) - 1, 0.0, None, "0", 2**64)),
    ("slot_mapping", {"slot_mapping": np.array([0, 0, 0, 2**63], np.uint64)}),
    ("slot_mapping", {"slot_mapping": np.zeros(4, np.bool_)}),
    # Shapes: axes, then sizes.
    *((name, {name: 0}) for name in INPUTS),
    *((name, {name: [[0, 0, 0, 0]]}) for name in INPUTS if name != "block_table"),
    ("block_table", {"block_table": [0, 0, 0]}),
    ("block_table", {"block_table": [[[0], [0], [0]]] * 3}),
    ("slot_mapping", {"slot_mapping": [0, 0, 0]}),
    ("slot_mapping", {"num_tokens": 5}),
    ("token_to_req", {"token_to_req": [0, 0, 0]}),
    ("token_to_req", {"num_tokens": 5, "slot_mapping": [0] * 5}),
    ("query_start_loc", {"query_start_loc": [0, 2, 2]}),
    ("query_start_loc", {"query_start_loc": [0, 2, 2, 3, 3]}),
    ("query_start_loc", {"query_start_loc": []}),
    ("query_start_loc", {"seq_lens": [9, 4]}),
    ("query_start_loc", {"seq_lens": [9, 4, 6, 0]}),
    ("block_table", {"block_table": [[7, 10, 2], [3, 5, 6]]}),
    ("block_table", {"block_table": []}),
    ("replay_start", {"replay_start": [4, 0]}),
    # num_tokens * width is what indptr counts up to.
    ("num_tokens", {"num_tokens": 4, "width": 2**29}),
    ("num_tokens", {"num_tokens": 2**31, "width": 1}),
    ("num_tokens", {"num_tokens": 2**62, "width": 2}),
    ("width", {"num_tokens": 0, "width": 2**31}),
    ("width", {"num_tokens": 0, "width": 2**70}),
]


@pytest.mark.parametrize(("name", "changes"), BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_by_name_in_one_line(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        Batch(**arguments(**changes))
    assert caught.value.argument == name
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert name in message
    assert isinstance(caught.value, SwaDecodeMetaError)


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize(
    "value",
    [np.zeros((3, 3), np.int64), "one\ntwo", [[1]] * 10_000, -(10**5000)],
    ids=["matrix", "two lines", "long list", "5000 digits"],
)
def test_the_refusal_of_a_monstrous_scalar_is_one_short_line(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        Batch(**arguments(**{name: value}))
    assert caught.value.argument == name
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["num_tokens", "width"])
def test_a_size_of_5000_digits_is_refused_by_name(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Batch(**arguments(**{name: 10**5000}))
    assert caught.value.argument in ("num_tokens", "width")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("tokens", "width"), [(1, 2**31 - 1), (4, (2**31 - 1) // 4), (0, 2**31 - 1)])
def test_the_largest_sizes_that_indptr_can_count_are_accepted(tokens: int, width: int) -> None:
    assert Batch(**arguments(num_tokens=tokens, width=width)).width == width


@pytest.mark.parametrize(
    "error",
    [
        ArgumentError("width", "an integer", [1.5]),
        IllegalBatchError("L1", "query_start_loc[0]", "is 3, not 0"),
        CaseFileError("case.json", "width", "is missing"),
        BackendError("there is no GPU"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_passes_from_one_process_to_another(error: SwaDecodeMetaError) -> None:
    """An exception that cannot be unpickled breaks the pool whose worker raised it, and its words are lost."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_masked_array_does_not_smuggle_missing_values_into_a_batch() -> None:
    """A masked entry reads as None; the oracle, which must never raise, would raise on it."""
    masked = np.ma.MaskedArray([9, 4, 6], mask=[True, False, False], dtype=np.int32)
    try:
        batch = Batch(**arguments(seq_lens=masked))
    except ArgumentError:
        return
    assert plain.decode_meta(batch).lens.shape == (4,)


# ----------------------------------------------------------------------------------------------------- Result


def result(**changes: npt.NDArray[Any]) -> Result:
    return dataclasses.replace(plain.decode_meta(Batch(**arguments())), **changes)


def test_equal_results_have_no_difference() -> None:
    assert result().difference(result()) is None


@pytest.mark.parametrize("name", ["is_valid", "indices", "lens", "ragged", "indptr"])
def test_a_difference_in_one_element_dtype_or_shape_is_named(name: str) -> None:
    array = result().arrays()[name]
    changed = array.copy()
    changed.reshape(-1)[-1] ^= 1
    assert result().difference(result(**{name: changed})) == name
    assert result(**{name: changed}).difference(result()) == name
    assert result().difference(result(**{name: array.astype(np.int64)})) == name
    assert result().difference(result(**{name: array[:-1]})) == name
    assert result().difference(result(**{name: array[None]})) == name


# ------------------------------------------------------------------------------------------------ check_legal


def broken(batch: Batch) -> IllegalBatchError | None:
    try:
        check_legal(batch)
    except IllegalBatchError as error:
        return error
    return None


def with_item(name: str, at: tuple[int, ...], value: int) -> dict[str, Any]:
    array = np.array(arguments()[name], np.int64)
    array[at] = value
    return {name: array.tolist()}


DSPARK = {"noncausal": True, "width": 7, "block_table": [[7, 10, 2], [-1, -1, -1], [3, 5, -9]]}

LEGAL: dict[str, dict[str, Any]] = {
    "the batch itself": {},
    "padding at will": with_item("slot_mapping", (1,), -1),
    "all padding": {"slot_mapping": [-1] * 4, "token_to_req": [-5, 99, INT32_MAX, INT32_MIN]},
    "no token": {"num_tokens": 0},
    "no request": {
        "num_tokens": 0, "query_start_loc": [0], "seq_lens": [], "block_table": [], "replay_start": [],
    },
    "no request, padding only": {
        "slot_mapping": [-1] * 4,
        "query_start_loc": [0], "seq_lens": [], "block_table": [], "replay_start": [],
    },
    "replay_start at the prefix": with_item("replay_start", (0,), 7),
    "a hole before the window": with_item("block_table", (0, 0), -1),
    "a hole after the position": with_item("block_table", (2, 2), INT32_MIN),
    "a page out of range that no token sees": with_item("block_table", (1, 0), INT32_MAX),
    "garbage in spare rows": {
        "slot_mapping": [43, 8, 21, -1, 5], "token_to_req": [0, 0, 2, 99, -1],
        "replay_start": [4, 0, 2, -1], "block_table": [[7, 10, 2], [-1] * 3, [3, 5, -9], [INT32_MIN] * 3],
    },
    "the highest page": with_item("block_table", (0, 1), 2**29 - 1),
    "the null page": with_item("block_table", (0, 1), 0),
    "wider than the window": {"width": 6},
    "more requests than tokens": {
        "query_start_loc": [0, 0, 0, 0], "slot_mapping": [-1] * 4, "replay_start": [0, 0, 0],
    },
    "DSpark": DSPARK,
    "pages of 2**40": {"block_size": 2**40, "block_table": [[0], [-1], [0]]},
    "DSpark on pages of 2**40": {**DSPARK, "block_size": 2**40, "block_table": [[0], [-1], [0]]},
    "a window of 2**31 - 1": {
        "num_tokens": 1, "window_size": INT32_MAX, "width": INT32_MAX, "query_start_loc": [0, 1, 1, 1],
    },
    "a window of 2**31 - 2 in DSpark form": {
        "num_tokens": 1, "window_size": INT32_MAX - 1, "width": INT32_MAX, "query_start_loc": [0, 1, 1, 1],
        "noncausal": True,
    },
    # "for every request" of L7 speaks of none here.
    "DSpark without a request": {
        "num_tokens": 0, "noncausal": True, "window_size": 2**40, "width": 1,
        "query_start_loc": [0], "seq_lens": [], "block_table": [], "replay_start": [],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_batch_is_accepted(name: str) -> None:
    check_legal(Batch(**arguments(**LEGAL[name])))


NO_REQUEST = {"query_start_loc": [0], "seq_lens": [], "block_table": [], "replay_start": []}
ILLEGAL: list[tuple[str, str, dict[str, Any]]] = [
    ("L1", "query_start_loc[0]", with_item("query_start_loc", (0,), 1)),
    ("L1", "query_start_loc[0]", with_item("query_start_loc", (0,), -1)),
    ("L1", "query_start_loc[0]", with_item("query_start_loc", (0,), INT32_MIN)),
    ("L1", "query_start_loc[2]", with_item("query_start_loc", (2,), 1)),
    ("L1", "query_start_loc[3]", with_item("query_start_loc", (3,), INT32_MIN)),
    ("L1", "query_start_loc[2]", with_item("query_start_loc", (1,), INT32_MAX)),
    ("L1", "query_start_loc[0]", {"num_tokens": 0, **NO_REQUEST, "query_start_loc": [1]}),
    ("L2", "slot_mapping[3]", with_item("slot_mapping", (3,), 5)),
    ("L2", "slot_mapping[3]", with_item("slot_mapping", (3,), 0)),
    ("L2", "slot_mapping[3]", with_item("slot_mapping", (3,), INT64_MAX)),
    ("L2", "slot_mapping[2]", with_item("query_start_loc", (3,), 2)),
    ("L2", "slot_mapping[0]", {"query_start_loc": [0, 0, 0, 0]}),
    ("L2", "slot_mapping[0]", NO_REQUEST),
    ("L3", "token_to_req[2]", with_item("token_to_req", (2,), -1)),
    ("L3", "token_to_req[2]", with_item("token_to_req", (2,), 3)),
    ("L3", "token_to_req[2]", with_item("token_to_req", (2,), INT32_MAX)),
    ("L3", "token_to_req[2]", with_item("token_to_req", (2,), INT32_MIN)),
    ("L3", "token_to_req[2]", with_item("token_to_req", (2,), 0)),
    ("L3", "token_to_req[2]", with_item("token_to_req", (2,), 1)),
    ("L3", "token_to_req[0]", with_item("token_to_req", (0,), 2)),
    ("L3", "token_to_req[1]", with_item("query_start_loc", (1,), 1)),
    ("L4", "seq_lens[0]", with_item("seq_lens", (0,), 1)),
    ("L4", "seq_lens[0]", with_item("seq_lens", (0,), INT32_MIN)),
    ("L4", "seq_lens[1]", with_item("seq_lens", (1,), -1)),
    ("L4", "seq_lens[2]", with_item("seq_lens", (2,), 0)),
    ("L5", "replay_start[0]", with_item("replay_start", (0,), 8)),
    ("L5", "replay_start[0]", with_item("replay_start", (0,), -1)),
    ("L5", "replay_start[1]", with_item("replay_start", (1,), 5)),
    ("L5", "replay_start[1]", with_item("replay_start", (1,), INT32_MIN)),
    ("L5", "replay_start[2]", with_item("replay_start", (2,), INT32_MAX)),
    ("L5", "replay_start[0]", {**DSPARK, **with_item("replay_start", (0,), 8)}),
    ("L6", "block_table[0]", {"block_table": [[7, 10], [-1, -1], [3, 5]]}),
    ("L6", "block_table[0]", {"block_table": [[], [], []]}),
    ("L6", "block_table[2]", {"slot_mapping": [-1, -1, 21, -1], "block_table": [[7], [-1], [3]]}),
    ("L6", "block_table[0]", {"block_size": 1}),
    ("L6", "block_table[0][1]", with_item("block_table", (0, 1), -1)),
    ("L6", "block_table[0][2]", with_item("block_table", (0, 2), INT32_MIN)),
    ("L6", "block_table[2][0]", with_item("block_table", (2, 0), -1)),
    ("L6", "block_table[0][1]", with_item("block_table", (0, 1), 2**29)),
    ("L6", "block_table[0][2]", with_item("block_table", (0, 2), INT32_MAX)),
    ("L6", "block_table[0][0]", {**DSPARK, "block_table": [[-1, 10, 2], [-1] * 3, [3, 5, -9]]}),
    ("L6", "block_table[0][0]", {"block_size": 2**40, "block_table": [[1], [-1], [0]]}),
    ("L6", "block_table[0][0]", {"block_size": 2**70, "block_table": [[INT32_MAX], [-1], [0]]}),
    ("L6", "block_table[0]", {"block_size": 2**70, "block_table": [[], [], []]}),
    ("L6", "block_table[0][0]", {"block_size": 10**5000, "block_table": [[1], [-1], [0]]}),
    ("L7", "width", {"window_size": 10**5000}),
    ("L7", "width", {"width": 4}),
    ("L7", "width", {"window_size": 6}),
    ("L7", "width", {"window_size": 2**40}),
    ("L7", "width", {"width": 4, "num_tokens": 0}),
    ("L7", "width", {**DSPARK, "width": 6}),
    ("L7", "width", {**DSPARK, "window_size": 2**40}),
]


@pytest.mark.parametrize(("rule", "element", "changes"), ILLEGAL)
def test_a_broken_rule_is_named_with_its_element_in_one_line(rule: str, element: str, changes: dict[str, Any]) -> None:
    error = broken(Batch(**arguments(**changes)))
    assert error is not None
    assert (error.rule, error.element) == (rule, element)
    assert len(str(error).splitlines()) == 1
    assert rule in str(error)
    assert element in str(error)
    assert error.found in str(error)


@pytest.mark.parametrize(
    ("block_size", "page", "offset", "fits"),
    [
        (3, 715827882, 0, True),
        (3, 715827882, 1, True),
        (3, 715827882, 2, False),
        (3, 715827883, 0, False),
        (4, 536870911, 3, True),
        (4, 536870912, 0, False),
        (1, INT32_MAX, 0, True),
        (2, 2**30 - 1, 1, True),
        (2, 2**30, 0, False),
        (INT32_MAX, 1, 0, True),
        (INT32_MAX, 1, 1, False),
        (INT32_MAX, 2, 0, False),
        (2**31, 0, 5, True),
        (2**31, 1, 0, False),
        (2**40, 0, 2**31 - 3, True),
        (2**40, 1, 0, False),
        (2**33 + 1, INT32_MAX, 7, False),
    ],
)
@pytest.mark.parametrize("noncausal", [False, True])
def test_a_slot_just_inside_int32_is_legal_and_just_outside_is_not(
    block_size: int, page: int, offset: int, fits: bool, noncausal: bool
) -> None:
    one_token = {
        "num_tokens": 1,
        "window_size": 1,
        "width": 2,
        "query_start_loc": [0, 1],
        "replay_start": [0],
    }
    one_page = {"block_size": block_size, "seq_lens": [offset + 1], "block_table": [[page]]}
    batch = Batch(**arguments(**one_token, **one_page, noncausal=noncausal))
    error = broken(batch)
    assert (error is None) == fits
    assert error is None or (error.rule, error.element) == ("L6", "block_table[0][0]")
    built = plain.decode_meta(batch)
    assert built.indices[0, built.lens[0] - 1] == (page * block_size + offset if fits else -1)


@pytest.mark.parametrize("noncausal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 4, 7])
@pytest.mark.parametrize("replay", [0, 3, 7])
def test_a_hole_is_illegal_just_where_a_token_sees_it(noncausal: bool, window: int, replay: int) -> None:
    """Pages of one position, a hole in each in turn: one position too many or too few at either end fails."""
    for hole in range(11):
        one_request = {"query_start_loc": [0, 2], "seq_lens": [9], "replay_start": [replay]}
        table = [[-1 if k == hole else 5 for k in range(11)]]
        forms = {"num_tokens": 2, "noncausal": noncausal, "window_size": window, "block_size": 1, "width": 9}
        error = broken(Batch(**arguments(**one_request, **forms, block_table=table)))
        seen = range(max(0, 7 - window) if noncausal else max(0, 8 - window, replay), 9)
        assert (error is not None) == (hole in seen), hole
        assert error is None or (error.rule, error.element) == ("L6", f"block_table[0][{hole}]")


def rules_broken(batch: Batch) -> set[str]:
    """L1 to L7 again, word by word from SPEC.md, in plain integers; L6 where L1 to L5 give it a meaning."""
    x = plain._inputs(batch)
    q, tokens, requests = x.query_start_loc, range(x.T), range(x.R)
    wrong = set()
    if q[0] != 0 or any(q[r + 1] < q[r] for r in requests):
        wrong.add("L1")
    valid = [t for t in tokens if x.slot_mapping[t] >= 0]
    if any(t >= q[x.R] for t in valid):
        wrong.add("L2")
    if not all(0 <= x.token_to_req[t] < x.R and q[x.token_to_req[t]] <= t < q[x.token_to_req[t] + 1] for t in valid):
        wrong.add("L3")
    if any(x.seq_lens[r] < q[r + 1] - q[r] for r in requests):
        wrong.add("L4")
    if any(not 0 <= x.replay_start[r] <= plain.prefix(x, r) for r in requests):
        wrong.add("L5")
    queries = [q[r + 1] - q[r] for r in requests] if x.noncausal else [0]
    if any(x.width < x.W + query for query in queries):
        wrong.add("L7")
    if not wrong - {"L7"}:
        uncut = dataclasses.replace(x, width=2**40)
        if any(item == plain.NO_SLOT for t in tokens for item in plain.entries(uncut, t)):
            wrong.add("L6")
    return wrong


ARRAYS = ("slot_mapping", "token_to_req", "query_start_loc", "seq_lens", "block_table", "replay_start")


def test_check_legal_agrees_with_the_words_of_the_rules_on_3000_small_batches() -> None:
    """Batches near the edges of every rule: a verdict that differs, or a rule named that holds, fails."""
    random = np.random.default_rng(20240607)
    counts = dict.fromkeys(("none", *(f"L{i}" for i in range(1, 8))), 0)
    for _ in range(3000):
        R, noncausal = int(random.integers(0, 4)), bool(random.integers(2))
        q = np.concatenate([[0], np.cumsum(random.integers(0, 3, R))])
        T = int(q[-1] + random.integers(0, 2))
        token_to_req = np.concatenate([np.repeat(np.arange(R), np.diff(q)), [7, 7]])[:T]
        slot_mapping = np.where(np.arange(T) < q[-1], 3, -1)
        B, W = int(random.integers(1, 5)), int(random.integers(1, 5))
        seq_lens = np.diff(q) + random.integers(0, 6, R)
        replay_start = np.minimum(random.integers(0, 4, R), seq_lens - np.diff(q))
        block_table = random.integers(0, 9, (R, 8 // B + 1))
        width = W + (int(np.diff(q).max(initial=0)) if noncausal else 0)
        arrays: tuple[Any, ...] = (slot_mapping, token_to_req, q, seq_lens, block_table, replay_start)
        for _ in range(int(random.integers(0, 3))):
            array = arrays[int(random.integers(6))]
            if array.size:
                change = int(random.choice([-4, -1, 1, 2**28 * B])) // B
                array.reshape(-1)[int(random.integers(array.size))] += change
        width = max(1, width - int(random.random() < 0.1))
        named = dict(zip(ARRAYS, arrays, strict=True))
        batch = Batch(num_tokens=T, window_size=W, block_size=B, width=width, noncausal=noncausal, **named)
        error, wrong = broken(batch), rules_broken(batch)
        assert (error is None) == (not wrong), (error, wrong, batch.inputs())
        assert error is None or error.rule in wrong, (error, wrong, batch.inputs())
        for rule in wrong or {"none"}:
            counts[rule] += 1
    assert min(counts.values()) >= 20, counts
