"""The two oracles against recorded results, each other, and the clauses that bind an oracle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import swa_decode_meta.spec
from swa_decode_meta.fuzz import bench, check, exhaustive
from swa_decode_meta.fuzz.scramble import is_legal, scramble
from swa_decode_meta.fuzz.strategies import PROFILES, cases
from swa_decode_meta.oracle import plain, vectorised
from swa_decode_meta.spec import Batch, Case, CaseFileError, Result, load_case, save_case
from tests.batches import GOLDEN, KEPT, REPORTED, REPORTED_FILE, WIDE, golden, golden_batch, golden_result

ORACLES = {"plain": plain.decode_meta, "vectorised": vectorised.decode_meta}
SHARDS = 16

oracle = pytest.mark.parametrize("build", ORACLES.values(), ids=ORACLES)


# ------------------------------------------------------------ recorded results


def test_the_golden_file_holds_120_batches() -> None:
    assert {int(key[:4]) for key in golden()} == set(GOLDEN)


@oracle
@pytest.mark.parametrize("index", GOLDEN)
def test_a_golden_batch_of_vllm(build: Callable[[Batch], Result], index: int) -> None:
    assert golden_result(index).difference(build(golden_batch(index))) is None


@oracle
@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_a_kept_case(build: Callable[[Batch], Result], case: Case) -> None:
    assert case.expected is not None
    assert case.expected.difference(build(case.batch)) is None


@oracle
def test_rows_wider_than_a_tile(build: Callable[[Batch], Result]) -> None:
    """Positions 4 and 5 of pages of 4, of which the second has number 2."""
    indices = np.full((2, WIDE.batch.width), -1, np.int32)
    indices[:, 0] = ragged = np.array([8, 9], np.int32)
    found = build(WIDE.batch)
    expected = Result(
        is_valid=np.ones(2, np.bool_),
        indices=indices,
        lens=np.ones(2, np.int32),
        ragged=ragged,
        indptr=np.arange(3, dtype=np.int32),
    )
    assert expected.difference(found) is None


@oracle
@pytest.mark.parametrize("case", check.worked_examples(), ids=lambda case: case.name)
def test_the_worked_example_of_the_specification(build: Callable[[Batch], Result], case: Case) -> None:
    assert case.expected is not None
    assert case.expected.difference(build(case.batch)) is None


def test_the_worked_example_is_the_one_in_the_document() -> None:
    text = (Path(swa_decode_meta.spec.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
    example = text[text.index("## 6. A worked example") :]
    causal, hole, dspark = check.worked_examples()
    for values in (causal.batch.inputs(), causal.expected.arrays() if causal.expected else {}):
        for name, array in values.items():
            assert re.search(rf"{name} +{re.escape(str(array.tolist()).lower())}", example), name
    assert hole.expected is not None
    assert f"`{hole.expected.indices[1].tolist()}` with `lens` still {hole.expected.lens[1]}" in example
    assert f"just `{hole.expected.ragged.tolist()}`" in example
    assert dspark.expected is not None
    assert f"slots {str(dspark.expected.indices[0, :-1].tolist())[1:-1]}." in example


def test_many_batches_at_once_are_each_built_as_if_alone() -> None:
    batches = [golden_batch(index) for index in GOLDEN] + [case.batch for case in REPORTED]
    for batch, result in zip(batches, vectorised.decode_meta_many(batches), strict=True):
        assert result.difference(vectorised.decode_meta(batch)) is None
    assert vectorised.decode_meta_many([]) == []


# ------------------------------------------------------------ exhaustive preset


def identity(batch: Batch) -> int:
    scalars = (batch.num_tokens, batch.window_size, batch.block_size, batch.width, batch.noncausal)
    return hash((scalars, *[(array.shape, array.tobytes()) for array in batch.inputs().values()]))


def test_the_exhaustive_preset_has_the_promised_number_of_batches_no_two_of_them_equal() -> None:
    ids = [identity(batch) for batch in exhaustive.batches()]
    assert len(ids) == len(set(ids)) == exhaustive.COUNT
    for index, of in ((0, 997), (5, 997), (996, 997), (3, 400_000)):
        assert [identity(batch) for batch in exhaustive.shard(index, of)] == ids[index::of]


@pytest.mark.parametrize(("index", "of"), [(-1, 3), (3, 3), (0, 0)])
def test_a_shard_that_does_not_exist_is_refused(index: int, of: int) -> None:
    with pytest.raises(ValueError, match="shard"):
        next(exhaustive.shard(index, of))


def test_the_exhaustive_preset_reaches_every_bound_and_special_value() -> None:
    causal: dict[tuple[str, Any], int] = {}
    dspark: dict[tuple[str, Any], int] = {}
    for batch in exhaustive.shard(0, 13):
        seen = dspark if batch.noncausal else causal
        query_lens = np.diff(batch.query_start_loc)
        columns = batch.block_table.shape[1]
        needed = -(-int(batch.seq_lens.max(initial=0)) // batch.block_size)
        facts = {
            ("window", batch.window_size),
            ("page", batch.block_size),
            ("width - window", batch.width - batch.window_size),
            ("requests", batch.num_reqs),
            ("rows", batch.num_tokens),
            ("table too short", columns < needed),
            ("hole", bool((batch.block_table == -1).any())),
            ("null page", bool((batch.block_table == 0).any())),
            ("below query", bool((batch.seq_lens < query_lens).any())),
            ("replay after the end", bool((batch.replay_start > batch.seq_lens).any())),
            ("legal", is_legal(batch)),
            *[("seq_len", seq_len) for seq_len in batch.seq_lens.tolist()],
            *[("query", query_len) for query_len in query_lens.tolist()],
            *[("names", request) for request in batch.token_to_req.tolist()],
        }
        for fact in facts:
            seen[fact] = seen.get(fact, 0) + 1
    flags = ("table too short", "hole", "null page", "below query", "replay after the end", "legal")
    for seen, extra in ((causal, (-1, 0, 1)), (dspark, (-1, 0, 1, 2, 3, 4))):
        assert {value for name, value in seen if name == "window"} == {1, 2, 3}
        assert {value for name, value in seen if name == "page"} == {1, 2, 3}
        assert {value for name, value in seen if name == "width - window"} == set(extra)
        assert {value for name, value in seen if name == "requests"} == {0, 1, 2}
        assert {value for name, value in seen if name == "rows"} == {0, 1, 2, 3}
        assert {value for name, value in seen if name == "seq_len"} == set(range(8))
        assert {value for name, value in seen if name == "query"} == {0, 1, 2, 3}
        assert {value for name, value in seen if name == "names"} == {-1, 0, 1, 2}
        for flag in flags:
            assert seen[flag, False] > 1000, flag
            assert seen[flag, True] > 1000, flag


@pytest.mark.parametrize("index", range(SHARDS))
def test_both_oracles_write_the_same_on_the_exhaustive_preset(index: int) -> None:
    shard = exhaustive.shard(index, SHARDS)
    while batches := list(islice(shard, 1000)):
        check.compare(batches)


def test_both_oracles_read_the_same_on_a_part_of_the_exhaustive_preset() -> None:
    check.compare_dependencies(exhaustive.shard(1, 37))


def test_both_oracles_read_the_same_on_golden_batches() -> None:
    check.compare_dependencies(golden_batch(index) for index in GOLDEN)


# ------------------------------------------------------------ random batches


@pytest.mark.parametrize("profile", PROFILES)
def test_both_oracles_write_and_read_the_same_on_random_batches_of_real_sizes(profile: str) -> None:
    @settings(max_examples=150)
    @given(cases(profile))
    def compare(case: Case) -> None:
        batch = check.affordable(case.batch)
        check.compare([batch])
        check.compare_dependencies([batch])
        assert profile == "hostile" or is_legal(batch)

    compare()


@pytest.mark.parametrize("profile", PROFILES)
def test_random_batches_are_other_ones_at_every_call(profile: str) -> None:
    first, second = ([identity(batch) for batch in check.drawn(profile, 20)] for _ in range(2))
    assert len(set(first)) > 10
    assert set(first) != set(second)


@pytest.mark.parametrize(("tokens", "width", "left"), [(0, 2**31 - 1, 0), (384, 192, 384), (4000, 128, 2048)])
def test_a_huge_batch_is_cut_to_the_rows_that_the_plain_oracle_can_build(tokens: int, width: int, left: int) -> None:
    [batch] = islice((batch for batch in exhaustive.batches() if not batch.num_tokens), 1)
    rows = {"slot_mapping": np.zeros(tokens, np.int64), "token_to_req": np.zeros(tokens, np.int32)}
    assert check.affordable(replace(batch, num_tokens=tokens, width=width, **rows)).num_tokens == left


# ------------------------------------------------------------ what binds an oracle


def some_batches() -> Iterator[Batch]:
    yield from exhaustive.shard(5, 499)
    yield from (golden_batch(index) for index in GOLDEN)
    for profile in PROFILES:
        yield from check.drawn(profile, 20)


@oracle
def test_an_oracle_does_not_depend_on_what_clause_13_calls_free(build: Callable[[Batch], Result]) -> None:
    rng, changed = np.random.default_rng(13), 0
    for batch in some_batches():
        other = scramble([batch], rng)[0]
        assert build(batch).difference(build(other)) is None
        assert is_legal(other) or not is_legal(batch)
        changed += identity(batch) != identity(other)
    assert changed > 1500


@oracle
def test_an_oracle_leaves_its_inputs_and_earlier_results_alone(build: Callable[[Batch], Result]) -> None:
    for batch in (golden_batch(0), golden_batch(1)):
        inputs, first = identity(batch), build(batch)
        first.indices[:] = 77
        first.ragged[:] = 77
        assert identity(batch) == inputs
        assert golden_result(0).difference(build(golden_batch(0))) is None


# ------------------------------------------------------------ broken oracles

BREAKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "clause 1, slot 0 is padding": ("valid", lambda x, t: x.slot_mapping[t] > 0),
    "clause 2, negative requests count from the end": (
        "request",
        lambda x, t: r if plain.valid(x, t) and -x.R <= (r := x.token_to_req[t]) < x.R else None,
    ),
    "clause 3, tokens count from the batch": ("position", lambda x, r, t: plain.prefix(x, r) + t),
    "clause 4, no replay": (
        "causal_window",
        lambda x, r, t: range(max(0, plain.position(x, r, t) - x.W + 1), plain.position(x, r, t) + 1),
    ),
    "clause 4, window one too long": (
        "causal_window",
        lambda x, r, t: range(max(0, plain.position(x, r, t) - x.W, x.replay_start[r]), plain.position(x, r, t) + 1),
    ),
    "clause 5, replay": (
        "dspark_block",
        lambda x, r: range(max(0, plain.prefix(x, r) - x.W, x.replay_start[r]), x.seq_lens[r]),
    ),
    "clause 7, not cut to width": (
        "length",
        lambda x, t: len(plain.causal_window(x, r, t)) if (r := plain.request(x, t)) is not None else 0,
    ),
    "clause 8, page of request 0": (
        "slot",
        lambda x, page, p: x.block_table[0][p // x.B] * x.B + p % x.B,
    ),
    "clause 9, a hole has the slot of the null page": (
        "entry",
        lambda x, r, p: max(0, x.block_table[r][p // x.B]) * x.B + p % x.B if p // x.B < x.columns else -1,
    ),
    "clause 9, the null page is a hole": (
        "entry",
        lambda x, r, p: (
            plain.slot(x, x.block_table[r][p // x.B], p)
            if p // x.B < x.columns and x.block_table[r][p // x.B] > 0
            else -1
        ),
    ),
    "clause 11, holes are kept": (
        "ragged",
        lambda x: (
            [item for t in range(x.T) for item in plain.entries(x, t)],
            np.cumsum([0] + [plain.length(x, t) for t in range(x.T)]).tolist(),
        ),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_clause_shows_in_every_shard_of_the_exhaustive_preset(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, broken = BREAKS[name]
    monkeypatch.setattr(plain, function, broken)
    for index in (0, 30, 60):
        with pytest.raises(check.OracleDifference, match=r"differ: (is_valid|lens|indices|indptr), row \d"):
            check.compare(list(exhaustive.shard(index, 61)))


def test_a_difference_in_what_is_read_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    of = plain.valid

    def valid(x: plain.Inputs, t: int) -> bool:
        return x.token_to_req[t] is not None and of(x, t)

    monkeypatch.setattr(plain, "valid", valid)
    with pytest.raises(check.OracleDifference, match="in what they read: token_to_req, row"):
        check.compare_dependencies(exhaustive.shard(0, 997))


def test_an_oracle_that_raises_is_a_difference_on_the_batch_that_it_raises_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slot(x: plain.Inputs, page: int, p: int) -> int:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(plain, "slot", slot)
    with pytest.raises(check.OracleDifference, match="an oracle raised ZeroDivisionError: by zero") as caught:
        check.compare(list(exhaustive.shard(0, 997)))
    assert vectorised.decode_meta(caught.value.case.batch).lens.any()


# ------------------------------------------------------------ the command's checks


def run_check(*paths: Path, full: bool = False) -> tuple[int, list[str]]:
    lines: list[str] = []
    return check.run(paths, 0.0, lines.append, full), lines


def test_check_says_what_it_checked_in_one_line_a_part() -> None:
    status, lines = run_check(REPORTED_FILE)
    assert status == check.OK
    assert [line.split(":")[0] for line in lines] == [
        "worked example of SPEC.md",
        "case files (1)",
        "exhaustive preset",
        "random batches",
    ]
    assert "10 cases" in lines[1]
    assert f" of {exhaustive.COUNT:,} batches" in lines[2]
    assert all(re.search(r" \(\d+\.\d s\)$", line) for line in lines)


def test_check_in_full_takes_every_shard_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []

    def shard(index: int, of: int) -> Iterator[Batch]:
        taken.append((index, of))
        return iter(())

    monkeypatch.setattr(exhaustive, "shard", shard)
    assert run_check(full=True)[0] == check.OK
    assert taken == [(index, len(taken)) for index in range(len(taken))]


def test_check_ends_with_3_and_saves_the_case_on_which_the_oracles_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(plain, *BREAKS["clause 5, replay"])
    status, lines = run_check()
    monkeypatch.undo()
    assert status == check.HARNESS_ERROR
    assert "the plain and the vectorised oracle differ: lens, row" in lines[-1] or "indices, row" in lines[-1]
    [path] = tmp_path.rglob("*.json")
    assert lines[-1].endswith(f"the case is in {path}")
    batch = load_case(path).batch
    assert batch.noncausal
    check.compare([batch])


def test_check_ends_with_3_when_a_recorded_result_is_not_the_oracles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    case = REPORTED[0]
    assert case.expected is not None
    wrong = replace(case.expected, lens=case.expected.lens + np.int32(1))
    save_case(tmp_path / "wrong.json", replace(case, expected=wrong))
    status, lines = run_check(REPORTED_FILE, tmp_path / "wrong.json")
    assert status == check.HARNESS_ERROR
    assert f"wrong.json differs from both oracles: lens, row 0: recorded {wrong.lens[0]}" in lines[-1]


def test_check_ends_with_3_even_where_the_case_cannot_be_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    monkeypatch.setattr(plain, *BREAKS["clause 5, replay"])
    status, lines = run_check()
    assert status == check.HARNESS_ERROR
    assert "cannot be saved" in lines[-1]


def test_check_refuses_a_bad_case_file(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CaseFileError):
        run_check(REPORTED_FILE, tmp_path / "bad.json")


# ------------------------------------------------------------ without torch

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
{code}
loaded = {{name.partition(".")[0] for name in sys.modules}} & set({blocked!r})
assert not loaded, loaded
assert "swa_decode_meta.kernel" not in sys.modules
"""


def run_blocked(blocked: list[str], code: str, folder: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked, code=code)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_oracle_needs_numpy_alone(tmp_path: Path) -> None:
    code = """
from swa_decode_meta.oracle import decode_meta, vectorised
from swa_decode_meta.spec import load_cases
for case in load_cases(%r):
    assert decode_meta(case.batch).difference(vectorised.decode_meta(case.batch)) is None
"""
    run_blocked(["torch", "triton", "hypothesis", "click"], code % str(REPORTED_FILE), tmp_path)


@pytest.mark.parametrize("ci", ["", "1"])
def test_check_needs_neither_torch_nor_triton_and_does_not_heed_ci(tmp_path: Path, ci: str) -> None:
    code = """
from pathlib import Path
import swa_decode_meta.fuzz.check as check
assert "hypothesis" not in sys.modules
assert check.run([Path(%r)], 0.0, print) == 0
first, second = ([batch.seq_lens.tolist() for batch in check.drawn("legal", 20)] for _ in range(2))
assert first != second
"""
    run_blocked(["torch", "triton"], code % str(REPORTED_FILE), tmp_path, CI=ci)


# ------------------------------------------------------------ benchmark


def test_the_benchmark_measures_every_oracle_and_makes_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_SMALL", 100)
    figures = bench.run_oracles(0.0)
    assert figures["versions"]["numpy"] == np.__version__
    oracles = [list(measurement["oracles"]) for measurement in figures["measurements"]]
    assert oracles == [["plain", "vectorised"]] * 4 + [
        ["plain", "vectorised, one by one", "vectorised, decode_meta_many"]
    ]
    for measurement in figures["measurements"]:
        assert measurement["rounds"] >= 1
        for figure in measurement["oracles"].values():
            assert 0 < figure["ms"]["min"] <= figure["ms"]["median"] <= figure["ms"]["max"]
        assert figure["ratio"] == {"min": 1, "median": 1, "max": 1}
    lines = bench.table(figures).splitlines()
    assert len({line.count("|") for line in lines[2:]}) == 1
    assert len(lines) == 4 + sum(map(len, oracles))
