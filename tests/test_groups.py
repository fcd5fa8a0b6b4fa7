"""Cases of several cache groups: drawn, written to files and read back, judged and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_decode_meta.fuzz.features import features_of, reachable
from swa_decode_meta.fuzz.harness import judge
from swa_decode_meta.fuzz.journal import Journal, read_journal
from swa_decode_meta.fuzz.runner import Runner
from swa_decode_meta.fuzz.scramble import is_legal, scramble
from swa_decode_meta.fuzz.show import draw
from swa_decode_meta.fuzz.strategies import PROFILES, cases
from swa_decode_meta.fuzz.target import NAMED, parse_target
from swa_decode_meta.oracle import vectorised
from swa_decode_meta.spec import SHARED, ArgumentError, Case, CaseFileError, dump_case, load_case, save_case
from tests.batches import BATCH, CASE, ROOM
from tests.planted import FAULTS

SECOND = replace(BATCH, block_size=2, width=7, slot_mapping=[1, -1, -1], block_table=[[7, 6, 5, 4, 3], [1, 1, 1, 1, 1]])
THIRD = replace(BATCH, slot_mapping=[1, 2, -1], block_table=np.zeros((2, 0), np.int32))
STEP = replace(CASE, groups=(SECOND, THIRD))


def changed(**changes: Any) -> dict[str, Any]:
    """STEP as parsed JSON, with changes to its second group; None removes a field."""
    document: dict[str, Any] = json.loads(dump_case(STEP))
    group = document["groups"][0]
    group.update(changes)
    document["groups"][0] = {key: value for key, value in group.items() if value is not None}
    return document


# ------------------------------------------------------------------------------------------------------- files


def test_a_saved_step_loads_back_the_same(tmp_path: Path) -> None:
    save_case(tmp_path / "step.json", STEP)
    found = load_case(tmp_path / "step.json")
    assert dump_case(found) == dump_case(STEP)
    assert [batch.block_size for batch in found.step] == [4, 2, 4]
    for mine, theirs in zip(STEP.step, found.step, strict=True):
        assert vectorised.decode_meta(mine).difference(vectorised.decode_meta(theirs)) is None


def test_a_journal_gives_back_a_step(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "worker.npz")
    journal.write(STEP)
    assert dump_case(read_journal(journal.path)) == dump_case(replace(STEP, name=""))


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (changed(block_size=None), "groups[0].block_size"),
        (changed(width=0), "groups[0].width"),
        (changed(slot_mapping=[1]), "groups[0].slot_mapping"),
        (changed(slot_mapping=[1, 2.5, 3]), "groups[0].slot_mapping[1]"),
        (changed(block_table=[[1], [2, 3]]), "groups[0].block_table[1]"),
        (changed(seq_lens=[1, 2]), "groups[0].'seq_lens'"),
        (changed(columns=-1), "groups[0].columns"),
        ({**changed(), "groups": 3}, "groups"),
        ({**changed(), "groups": [3]}, "groups[0]"),
        ({**changed(), "groups": changed()["groups"] * 33}, "groups"),
        ({**changed(), "groups": changed(width=2**23)["groups"][:1] * 3}, "groups"),
    ],
)
def test_a_bad_group_is_refused_by_its_field_in_one_line(document: Any, field: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(CaseFileError) as caught:
        load_case(tmp_path / "bad.json")
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    (tmp_path / "list.json").write_text(json.dumps([document]))
    with pytest.raises(CaseFileError) as caught:
        load_case(tmp_path / "list.json")
    assert caught.value.field == f"[0].{field}"


@pytest.mark.parametrize("name", [*SHARED, "window_size", "noncausal"])
def test_groups_that_do_not_share_what_a_step_shares_are_no_case(name: str) -> None:
    value = getattr(BATCH, name)
    other = value + 1 if isinstance(value, (int, np.ndarray)) and not isinstance(value, bool) else not value
    with pytest.raises(ArgumentError, match=rf"groups\[1\]\.{name}: expected what the batch has"):
        Case(BATCH, groups=(SECOND, replace(SECOND, **{name: other})))


# ----------------------------------------------------------------------------------------------- drawn, scrambled


@pytest.mark.parametrize("profile", PROFILES)
def test_steps_are_drawn_with_groups_that_differ_and_scrambled_within_the_law(profile: str) -> None:
    seen: set[str] = set()

    @settings(max_examples=150)
    @given(cases(profile, step=True), st.integers(0, 2**32))
    def check(case: Case, entropy: int) -> None:
        seen.update(features_of(case))
        legal = all(is_legal(batch) for batch in case.step)
        assert legal or profile == "hostile"
        others = scramble(case.step, np.random.default_rng(entropy))
        assert len(others) == len(case.step)
        for batch, other in zip(case.step, others, strict=True):
            assert is_legal(other) or not legal
            assert vectorised.decode_meta(batch).difference(vectorised.decode_meta(other)) is None
            for name in SHARED:
                assert np.array_equal(getattr(other, name), getattr(others[0], name))

    check()
    assert {"several groups", "groups of other page sizes", "groups padded in other places"} <= seen
    assert "several groups" in reachable([profile], step=True)
    assert "several groups" not in reachable([profile])


def test_every_group_is_drawn_in_the_picture_and_the_finding_in_its_own() -> None:
    finding = {"verdict": "MISMATCH", "tensor": "groups[1].lens", "row": 1, "clause": 4}
    picture = draw(replace(STEP, finding=finding))
    parts = picture.split("\n\ngroup ")
    assert [part.partition("\n")[0].removeprefix("group ") for part in parts] == ["0 of 3", "1 of 3", "2 of 3"]
    assert ["finding" in part for part in parts] == [False, True, False]


# ------------------------------------------------------------------------------------------------------- judged


@pytest.mark.kernel
@pytest.mark.parametrize("name", [name for name in NAMED if not name.startswith("vllm")])
def test_every_form_of_the_kernel_builds_every_group(name: str) -> None:
    """A target that takes one group at a time is given one after the other."""
    with Runner(parse_target(name), hang_seconds=60) as runner:
        assert runner.takes_step == ("step" in name)
        for guard in ("start", "end"):
            layout = replace(CASE.buffers, guard=guard, **ROOM)
            assert judge(replace(STEP, buffers=layout), runner) is None
            assert judge(replace(STEP, buffers=layout, groups=()), runner) is None


@pytest.mark.kernel
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.function == "launch_step"])
def test_a_fault_in_a_further_group_is_told_by_its_name(name: str) -> None:
    table = np.full((2, 9), 3)
    groups = (replace(BATCH, block_table=table), replace(BATCH, block_size=1, width=7, block_table=table))
    with Runner(parse_target(f"tests.planted:{name}"), hang_seconds=60) as runner:
        case = replace(CASE, groups=groups)
        verdict = judge(case, runner)
        assert verdict is not None
        assert verdict.tensor.startswith("groups[2].")
        assert "groups" not in verdict.fingerprint
