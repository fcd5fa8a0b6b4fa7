"""The picture of a case: right for the worked example and the reported cases, and there for every other."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swa_decode_meta.fuzz import show
from swa_decode_meta.oracle import plain
from swa_decode_meta.spec import INT32_MAX, INT32_MIN, Batch, BufferLayout, Case, load_cases

REPORTED = load_cases(Path(__file__).parent / "data" / "reported.json")
WORKED: dict[str, Any] = {
    "num_tokens": 3,
    "window_size": 5,
    "block_size": 4,
    "width": 5,
    "slot_mapping": [43, 8, -1],
    "token_to_req": [0, 0, 99],
    "query_start_loc": [0, 2],
    "seq_lens": [9],
    "block_table": [[7, 10, 2]],
    "replay_start": [4],
}


def worked(**changes: Any) -> Batch:
    """The worked example of SPEC.md, with changes."""
    return Batch(**(WORKED | changes))


def one_token(**changes: Any) -> Batch:
    """One token of one request, with changes."""
    return worked(**({"num_tokens": 1, "query_start_loc": [0, 1], "replay_start": [0]} | changes))


def draw(batch: Batch, **of_case: Any) -> str:
    return show.draw(Case(batch, **of_case))


def bars(picture: str) -> dict[int, str]:
    """The bar of each token that has one, without labels and page edges."""
    found = re.findall(r"^[→ ] t(\d+) @-?\d+ +(‹?)│(.*)│$", picture, re.MULTILINE)
    return {int(t): below + bar.replace("│", "").replace(" ", "") for t, below, bar in found}


def check_form(picture: str) -> None:
    """What holds for every picture."""
    lines = picture.split("\n")
    assert max(map(len, lines)) <= show.WIDTH
    assert len(lines) < 250
    assert not any(line != line.rstrip() for line in lines)
    assert not any(unicodedata.category(letter) == "Cc" for line in lines for letter in line)


# ------------------------------------------------------------------------------------------- what it shows


def test_worked_example() -> None:
    picture = draw(worked(), name="worked example")
    check_form(picture)
    for line in (
        "case worked example",
        "causal  T 3  R 1  W 5  B 4  width 5  block_table 1 x 3",
        "legal",
        "request 0  q0 0  q1 2  prefix 7  seq_len 9  replay_start 4  2 valid, 0 padded",
        "  block     │0   │1   │2   │3   │",
        "  page      │7   │10  │2   │past│",
        "  position  │0   │4   │8   │12  │",
        "  t0 @7     │···░│████│····│····│",
        "  t1 @8     │····│████│█···│····│",
        "           0    yes        0      4  0..4          40 41 42 43  -1 × 1",
        "           1    yes        0      5  4..9          40 41 42 43 8",
        "padded: 1 (t2): is_valid false, lens 0, indices all -1",
    ):
        assert line in picture.split("\n")


def test_hole_and_null_page() -> None:
    picture = draw(worked(block_table=[[0, -3, 2]]))
    assert "illegal batch, rule L6: block_table[0][1]" in picture
    assert "  page      │null│hole│2   │past│" in picture
    assert bars(picture) == {0: "···░○○○○········", 1: "····○○○○█·······"}
    assert "0..1          -1 -1 -1 -1 8" in picture


def test_dspark() -> None:
    picture = draw(worked(noncausal=True, width=6))
    assert "DSpark  T 3" in picture
    assert "replay_start 4 (not read)" in picture
    assert bars(picture) == {0: "··██████╳···", 1: "··██████╳···"}


def test_window_below_position_0_and_past_the_table() -> None:
    assert bars(draw(one_token(seq_lens=[2]))) == {0: "‹██······⋯"}
    assert bars(draw(one_token(seq_lens=[14]))) == {0: "⋯" + "····" + "·███" + "○○··" + "····"}


def test_page_whose_slots_do_not_fit() -> None:
    picture = draw(one_token(seq_lens=[5], block_table=[[INT32_MAX, INT32_MAX // 4]]))
    assert "│2147483647!│536870911│" in picture
    assert bars(picture) == {0: "○○○○█" + "···" + "····"}


def test_row_that_sees_nothing() -> None:
    picture = draw(one_token(seq_lens=[9], replay_start=[10]))
    assert "t0 @8     sees nothing: 10 .. 8 is empty" in picture
    assert "-1 × 5" in picture


def test_tokens_without_a_request() -> None:
    batch = worked(num_tokens=5, slot_mapping=[1, 1, -1, 1, -1], token_to_req=[0, -7, 0, 12, 3])
    picture = draw(batch)
    assert "1 valid, 0 padded" in picture
    assert "padded: 2 (t2 t4): is_valid false" in picture
    assert "no such request: 2 (t1 t3), of requests -7 12: is_valid true" in picture


def test_padded_rows_of_a_request_and_rows_outside_it() -> None:
    picture = draw(worked(slot_mapping=[-1, -1, 5], token_to_req=[0, 0, 0]))
    assert "1 valid, 2 padded, 1 outside q0..q1" in picture


@pytest.mark.parametrize("case", REPORTED, ids=lambda case: case.name)
def test_reported_cases(case: Case) -> None:
    picture = show.draw(case)
    check_form(picture)
    assert picture.startswith(f"case {case.name}")
    assert "differs from the oracle" not in picture
    assert f"vLLM 0.33.0 {'writes the same' if case.equals_vllm else 'differs'}" in picture
    check_bars(case.batch, picture)


def check_bars(batch: Batch, picture: str) -> None:
    """At one mark for each position, the bars show each entry of the oracle's rows, in order."""
    result = plain.decode_meta(batch)
    drawn = bars(picture)
    for t in range(batch.num_tokens):
        seen = [letter == "█" for letter in drawn.get(t, "") if letter in "█○"]
        assert seen == [entry >= 0 for entry in result.indices[t, : result.lens[t]].tolist()]


@pytest.mark.parametrize("seed", range(100))
def test_bars_are_the_oracles_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    T, R, columns = 6, 2, int(random.integers(0, 6))
    batch = worked(
        num_tokens=T,
        window_size=int(random.integers(1, 9)),
        block_size=int(random.integers(2, 6)),
        width=int(random.integers(1, 12)),
        slot_mapping=random.integers(-1, 3, T),
        token_to_req=random.integers(-1, 3, T),
        query_start_loc=random.integers(0, 5, R + 1),
        seq_lens=random.integers(-3, 24, R),
        block_table=random.choice([-1, 0, 1, 7, INT32_MAX], (R, columns)),
        replay_start=random.integers(-3, 12, R),
        noncausal=bool(random.integers(2)),
    )
    picture = draw(batch)
    check_form(picture)
    check_bars(batch, picture)


# ------------------------------------------------------------------------------- what else a case carries


def test_expected_that_differs_is_the_first_line() -> None:
    batch = worked()
    right = plain.decode_meta(batch)
    assert draw(batch, expected=right).startswith("case")
    wrong = dataclasses.replace(right, lens=right.lens + np.int32(1))
    first = draw(batch, expected=wrong).split("\n")[0]
    assert first == "!! expected differs from the oracle's result, first in lens"


def test_layout_target_and_finding() -> None:
    picture = draw(
        worked(),
        buffers=BufferLayout(lens_tail=3),
        target={"name": "kernel@gpu"},
        finding={"verdict": "MISMATCH", "tensor": "lens", "row": 1, "got": 7},
    )
    assert "buffers: lens_tail 3\n" in picture
    assert "target: name kernel@gpu\n" in picture
    assert "finding: verdict MISMATCH, tensor lens, row 1, got 7\n" in picture
    assert "buffers" not in draw(worked())


@pytest.mark.parametrize(
    ("finding", "token"),
    [
        ({"row": 1}, 1),
        ({"tensor": "indices", "row": 0, "column": 3}, 0),
        ({"tensor": "indptr", "row": 2}, 1),
        ({"tensor": "indptr", "row": 0}, None),
        ({"tensor": "ragged", "row": 3}, 0),
        ({"tensor": "ragged", "row": 4}, 1),
        ({"tensor": "ragged", "row": 9}, None),
        ({"tensor": "ragged", "row": 10**30}, None),
        ({"tensor": "seq_lens", "row": 0}, None),  # a request, not a token
        ({"tensor": "lens", "row": 3}, None),
        ({"tensor": "lens", "row": "x"}, None),
        ({"tensor": ["lens"], "row": -1}, None),
        ({"row": True}, None),
    ],
)
def test_the_row_of_the_finding_is_marked(finding: dict[str, Any], token: int | None) -> None:
    picture = draw(worked(), finding=finding)
    arrows = re.findall(r"^→ +t?(\d+)", picture, re.MULTILINE)
    assert arrows == ([] if token is None else [str(token)] * 2)


def test_a_padded_row_of_the_finding_is_marked() -> None:
    assert "padded: 1 (t2 → t2)" in draw(worked(), finding={"tensor": "is_valid", "row": 2})


def test_text_of_the_case_cannot_steer_the_terminal() -> None:
    finding = {"\r": "\x07" * 9000, "deep": [[[[[[[[]]]]]]]]}
    picture = draw(worked(), name="a\x1b[31m\nb" + "c" * 9000, finding=finding)
    check_form(picture)
    assert "case a?[31m?bccc" in picture


# ------------------------------------------------------------------------------------------ large and hostile


def test_long_cases_are_cut_but_keep_the_finding() -> None:
    R, T = 64, 384
    batch = worked(
        num_tokens=T,
        window_size=128,
        block_size=64,
        width=128,
        slot_mapping=[0] * T,
        token_to_req=np.arange(T) // 6,
        query_start_loc=np.arange(0, T + 1, 6),
        seq_lens=[100_000] * R,
        block_table=np.arange(R * 2048).reshape(R, 2048),
        replay_start=[0] * R,
    )
    picture = draw(batch, finding={"tensor": "lens", "row": 377})
    check_form(picture)
    assert "… left out: 48 of 64 requests, with 288 rows" in picture
    assert "… left out: 344 of 384 rows" in picture
    assert "request 62  q0 372" in picture
    assert "one mark for 4 positions" in picture
    assert re.search(r"^→ t377 @99999  │⋯│", picture, re.MULTILINE)
    assert len(bars(picture)) == 40
    few = show.draw(Case(batch), max_requests=1, max_rows=2)
    assert sorted(bars(few)) == [0, 1]
    assert "… left out: 4 of 6 rows" in few
    check_form(show.draw(Case(batch), max_requests=0, max_rows=0))


def test_like_blocks_share_a_column_where_each_cannot_have_one() -> None:
    table = [[5] * 100 + [-1] * 30 + [7] * 70]
    picture = draw(one_token(window_size=128, width=128, block_size=3, seq_lens=[400], block_table=table))
    check_form(picture)
    assert re.search(r"block +│⋯│89\.\.99 +│100\.\.129 +│130\.\.134 *│⋯│", picture)
    assert re.search(r"page +│⋯│page ×11 +│hole ×30 +│page ×5 *│⋯│", picture)
    assert re.search(r"│⋯│·+█+│○+│█+·+│⋯│", picture)


HUGE = 10**5000
HOSTILE: dict[str, Batch] = {
    "seq_len at the bottom": one_token(seq_lens=[INT32_MIN]),
    "seq_len at the top": one_token(seq_lens=[INT32_MAX]),
    "positions past 2**31": one_token(
        query_start_loc=[INT32_MAX, INT32_MIN], seq_lens=[INT32_MAX], window_size=2**33, width=300
    ),
    "no request": worked(query_start_loc=[0], seq_lens=[], block_table=[], replay_start=[]),
    "nothing": worked(
        num_tokens=0,
        slot_mapping=[],
        token_to_req=[],
        query_start_loc=[INT32_MIN],
        seq_lens=[],
        block_table=[],
        replay_start=[],
    ),
    "no token": worked(num_tokens=0),
    "no column": worked(block_table=np.empty((1, 0), np.int32)),
    "huge block": one_token(block_size=HUGE),
    "huge block, later position": one_token(block_size=2**32, seq_lens=[INT32_MAX], query_start_loc=[0, INT32_MIN]),
    "huge window": one_token(window_size=HUGE),
    "huge DSpark window": one_token(window_size=HUGE, noncausal=True),
    "huge width": one_token(width=INT32_MAX, window_size=2**40, seq_lens=[INT32_MAX], block_size=1),
    "huge width, no token": worked(num_tokens=0, width=INT32_MAX),
    "huge DSpark block": one_token(
        width=INT32_MAX, seq_lens=[INT32_MAX], noncausal=True, query_start_loc=[0, INT32_MAX]
    ),
    "alternating pages": one_token(
        block_size=1, window_size=128, width=128, seq_lens=[400], block_table=[[-1, 2, 0, INT32_MAX] * 200]
    ),
    "rows far apart": worked(
        num_tokens=900,
        slot_mapping=[0] * 900,
        token_to_req=[0, *[9] * 450, 0, *[-1] * 447, 0],
        window_size=1,
        seq_lens=[40],
        block_table=[list(range(400))],
    ),
    "everything at the bottom": worked(
        slot_mapping=[0] * 3,
        token_to_req=[0] * 3,
        query_start_loc=[INT32_MIN] * 2,
        seq_lens=[INT32_MIN],
        block_table=[[INT32_MIN]],
        replay_start=[INT32_MIN],
    ),
    "everything at the top": worked(
        slot_mapping=[0] * 3,
        token_to_req=[0] * 3,
        query_start_loc=[INT32_MAX] * 2,
        seq_lens=[INT32_MAX],
        block_table=[[INT32_MAX]],
        replay_start=[INT32_MAX],
    ),
    "a hostile query_start_loc": worked(query_start_loc=[INT32_MIN, INT32_MAX]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_cases_are_drawn(name: str) -> None:
    picture = draw(HOSTILE[name], name=name, finding={"row": 0})
    check_form(picture)
    assert picture.startswith(f"case {name}\n")


def test_expected_of_a_huge_case_is_not_compared() -> None:
    batch = one_token(width=2**22)
    result = dataclasses.replace(plain.decode_meta(one_token()), indices=np.full((1, 2**22), -1, np.int32))
    assert draw(batch, expected=result).startswith("!! expected was not compared")
