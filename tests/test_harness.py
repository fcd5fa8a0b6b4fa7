"""The judge, on launches that are right or wrong in one known way; and what it is made of, piece by piece."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swa_decode_meta.fuzz import harness
from swa_decode_meta.fuzz.child import Done, Job, Raised
from swa_decode_meta.fuzz.harness import OracleDisagreement, expect, judge
from swa_decode_meta.fuzz.image import Array, Placement, after, before, canary, placements
from swa_decode_meta.fuzz.journal import Journal, read_journal
from swa_decode_meta.fuzz.runner import Died, HarnessError, Hung, Outcome, Runner, crash_site
from swa_decode_meta.fuzz.scramble import is_legal, scramble
from swa_decode_meta.fuzz.strategies import PROFILES, cases
from swa_decode_meta.fuzz.target import SHAPE_FIELDS, Target, check_shape, parse_target
from swa_decode_meta.fuzz.verdict import Verdict, compare
from swa_decode_meta.oracle import plain, vectorised
from swa_decode_meta.spec import (
    INPUTS,
    OUTPUTS,
    TENSORS,
    ArgumentError,
    Batch,
    BufferLayout,
    Case,
    CaseFileError,
    Result,
    dump_case,
)

HANG_SECONDS = 4.0
PATIENCE = 60  # seconds after which the harness itself is taken to hang
TELLER = "SWA_DECODE_META_FAKE"
MARK = 77

# SPEC.md's example in wider rows, with a second request that no token names and room wherever there may be some.
BATCH = Batch(
    num_tokens=3,
    window_size=5,
    block_size=4,
    width=6,
    slot_mapping=[43, 8, -1],
    token_to_req=[0, 0, 99],
    query_start_loc=[0, 2, 2],
    seq_lens=[9, 3],
    block_table=[[7, 10, 2], [1, 3, 5]],
    replay_start=[4, 0],
)
ROOM = {"indices_row_gap": 2, "block_table_row_gap": 1, "spare_rows": 2, "lens_tail": 3, "ragged_spare": 2}
CASE = Case(BATCH, BufferLayout(**ROOM))
GUARDED = {guard: Case(BATCH, BufferLayout(guard=guard, **ROOM)) for guard in ("start", "end")}


def batch_with(**changes: Any) -> Batch:
    """BATCH with changes."""
    return replace(BATCH, **changes)


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """A harness that waits for ever fails its test, and keeps nobody waiting."""

    def late(*_: object) -> None:
        pytest.fail(f"nothing came of it within {PATIENCE} s")

    was = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, was)


# ------------------------------------------------------------------- in a child process


class Told:
    """A runner whose launches are the fakes that it is told to be."""

    def __init__(self, runner: Runner, teller: Path) -> None:
        self.runner, self.teller = runner, teller

    def judge(self, fake: str, case: Case = CASE) -> Verdict | None:
        """The verdict on a fake."""
        self.teller.write_text(fake)
        return judge(case, self.runner)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    with pytest.MonkeyPatch.context() as patch:
        teller = tmp_path_factory.mktemp("fake") / "name"
        patch.setenv(TELLER, str(teller))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with Runner(parse_target("fakes:told@interpreter"), HANG_SECONDS) as runner:
            yield Told(runner, teller)


@pytest.mark.kernel
@pytest.mark.parametrize("guard", ["start", "end"])
@pytest.mark.parametrize("layout", [{}, ROOM, {"indices_ndim": 2, "misalignment": 1}])
def test_a_right_launch_is_right_in_every_layout(told: Told, layout: dict[str, Any], guard: str) -> None:
    assert told.judge("right", Case(BATCH, BufferLayout(guard=guard, **layout))) is None


@pytest.mark.kernel
@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 0},
        {"query_start_loc": [0], "seq_lens": []},
        {"query_start_loc": [0], "seq_lens": [], "block_table": [], "replay_start": []},
        {"block_table": np.zeros((2, 0), np.int32)},
        {"noncausal": True, "width": 9},
        {"block_table": [[7, -1, 2], [1, 3, 5]]},
        {"block_size": 2**40},
    ],
)
def test_a_right_launch_is_right_on_odd_batches(told: Told, changes: dict[str, Any]) -> None:
    for layout in (BufferLayout(), CASE.buffers, GUARDED["start"].buffers):
        assert told.judge("right", Case(batch_with(**changes), layout)) is None


WRONG = {
    "wrong_is_valid": Verdict("MISMATCH", 1, "is_valid", 1, None, 1, 0),
    "wrong_lens": Verdict("MISMATCH", 4, "lens", 1, None, 5, 4),
    "wrong_indices": Verdict("MISMATCH", 8, "indices", 1, 3, 43, MARK),
    "wrong_indptr": Verdict("MISMATCH", 11, "indptr", 2, None, 9, MARK),
    "wrong_ragged": Verdict("MISMATCH", 11, "ragged", 5, None, 41, MARK),
}


@pytest.mark.kernel
@pytest.mark.parametrize("fake", WRONG)
def test_a_wrong_entry_is_a_mismatch_with_its_place_and_clause(told: Told, fake: str) -> None:
    assert told.judge(fake) == WRONG[fake]


UNWRITTEN = {"is_valid": (1, 1), "indices": (8, 40), "lens": (7, 4), "indptr": (11, 0), "ragged": (11, 40)}


@pytest.mark.kernel
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_left_unwritten_is_a_mismatch_at_its_first_entry(told: Told, name: str) -> None:
    clause, expected = UNWRITTEN[name]
    verdict = told.judge(f"leaves_{name}_unwritten")
    assert verdict is not None
    column = 0 if name == "indices" else None
    assert replace(verdict, got=None) == Verdict("MISMATCH", clause, name, 0, column, expected)
    assert verdict.got not in range(-1, 0x80)


@pytest.mark.kernel
def test_a_tail_of_lens_that_is_not_zeroed_breaks_clause_7(told: Told) -> None:
    verdict = told.judge("leaves_lens_after_its_end")
    assert verdict is not None
    assert replace(verdict, got=None) == Verdict("MISMATCH", 7, "lens", 3, None, 0)


FRAMES = {
    "writes_spare_row": ("indices", 4, 0, -1),
    "writes_ragged_past_its_end": ("ragged", 19, None, 0),
    "writes_indptr_past_its_end": ("indptr", 5, None, MARK),
    "writes_is_valid_past_its_end": ("is_valid", 4, None, 0),
}


@pytest.mark.kernel
@pytest.mark.parametrize("fake", FRAMES)
def test_a_write_to_spare_entries_breaks_the_frame(told: Told, fake: str) -> None:
    verdict = told.judge(fake)
    assert verdict is not None
    name, row, column, got = FRAMES[fake]
    assert replace(verdict, expected=None) == Verdict("FRAME", 12, name, row, column, got=got)


@pytest.mark.kernel
def test_a_write_between_the_rows_breaks_the_frame(told: Told) -> None:
    verdict = told.judge("writes_gap")
    assert verdict is not None
    assert (verdict.verdict, verdict.tensor, verdict.got) == ("FRAME", "indices", MARK)
    assert verdict.detail == "the gap after row 0 was written"


@pytest.mark.kernel
@pytest.mark.parametrize("name", INPUTS)
def test_a_changed_input_breaks_the_frame(told: Told, name: str) -> None:
    first = int(getattr(BATCH, name).flat[0])
    column = 0 if name == "block_table" else None
    assert told.judge(f"mutates_{name}") == Verdict("FRAME", 12, name, 0, column, first, MARK)


@pytest.mark.kernel
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_write_just_outside_a_tensor_breaks_the_frame_where_no_guard_page_stops_it(told: Told, name: str) -> None:
    place = placements(BATCH, CASE.buffers)[name]
    past = place.size * np.dtype(TENSORS[name].dtype).itemsize
    for side, guard, offset in (("past", "start", past), ("before", "end", -1)):
        verdict = told.judge(f"writes_{side}_{name}", GUARDED[guard])
        detail = f"a byte outside the tensor was written, at byte {offset} of it"
        assert verdict == Verdict("FRAME", 12, name, detail=detail)


TOUCHES = [
    *((f"reads_past_{name}", "end") for name in INPUTS),
    *((f"reads_before_{name}", "start") for name in INPUTS),
    *((f"writes_past_{name}", "end") for name in OUTPUTS),
    *((f"writes_before_{name}", "start") for name in OUTPUTS),
]


@pytest.mark.kernel
@pytest.mark.parametrize(("fake", "guard"), TOUCHES, ids=[fake for fake, _ in TOUCHES])
def test_an_element_touched_past_the_guarded_side_is_a_fault(told: Told, fake: str, guard: str) -> None:
    verdict = told.judge(fake, GUARDED[guard])
    assert verdict is not None
    assert (verdict.verdict, verdict.clause) == ("FAULT", 14)
    assert verdict.detail.startswith("SIGSEGV: the process died in the launch")


@pytest.mark.kernel
def test_a_read_on_the_other_side_finds_canary_and_passes(told: Told) -> None:
    assert told.judge("reads_past_block_table", GUARDED["start"]) is None
    assert told.judge("reads_before_seq_lens", GUARDED["end"]) is None


@pytest.mark.kernel
def test_an_output_that_depends_on_the_gap_between_rows_is_noticed(told: Told) -> None:
    verdict = told.judge("trusts_the_gap")
    assert verdict is not None
    assert (verdict.verdict, verdict.clause, verdict.tensor, verdict.row) == ("MISMATCH", 7, "lens", 0)


@pytest.mark.kernel
def test_an_output_that_depends_on_a_dont_care_input_is_interference(told: Told) -> None:
    detail = "with don't-care inputs replaced, clause 7"
    assert told.judge("depends") == Verdict("INTERFERENCE", 13, "lens", 0, None, 4, MARK, detail)


@pytest.mark.kernel
def test_an_exception_for_a_dont_care_input_stays_an_exception(told: Told) -> None:
    assert told.judge("depends_and_raises") == Verdict("EXCEPTION", 14, detail="ValueError: depends")


EXCEPTIONS = {
    "raises": "ValueError: last: line",
    "raises_unpicklable": "Unpicklable: ('of its', 'own kind')",
    "raises_end_of_file": "EOFError: no more",
}


@pytest.mark.kernel
@pytest.mark.parametrize("fake", EXCEPTIONS)
def test_an_exception_is_named_with_the_last_line_of_its_message(told: Told, fake: str) -> None:
    assert told.judge(fake) == Verdict("EXCEPTION", 14, detail=EXCEPTIONS[fake])


@pytest.mark.kernel
@pytest.mark.parametrize(
    "fake",
    [
        "raises_mute",
        "raises_base_exception",
        "interrupts",
        "exits",
        "exits_at_once",
        "exits_with_a_thread",
        "dies_with_a_process",
        "aborts",
        "closes_everything",
    ],
)
def test_a_process_that_ends_in_the_launch_is_a_fault_and_the_next_launch_is_none(told: Told, fake: str) -> None:
    verdict = told.judge(fake)
    assert verdict is not None
    assert verdict.verdict in ("FAULT", "EXCEPTION")
    assert verdict.clause == 14
    assert told.judge("right") is None


@pytest.mark.kernel
def test_a_fault_is_told_with_its_signal_and_the_line_of_the_target(told: Told) -> None:
    verdict = told.judge("aborts")
    assert verdict is not None
    assert verdict.detail.startswith("SIGABRT: the process died in the launch, at fakes.py:")


@pytest.mark.kernel
@pytest.mark.parametrize("fake", ["hangs", "closes_everything_and_hangs"])
def test_a_launch_without_an_answer_hangs_and_the_next_one_does_not(told: Told, fake: str) -> None:
    started = time.monotonic()
    assert told.judge(fake) == Verdict("HANG", 14, detail="no answer within 4 s")
    assert time.monotonic() - started > HANG_SECONDS
    assert told.judge("right") is None


@pytest.mark.kernel
def test_a_launch_that_writes_into_the_harness_own_socket_keeps_nobody_waiting(told: Told) -> None:
    with suppress(HarnessError):  # no verdict is right too, when the answer cannot be read
        verdict = told.judge("scribbles")
        assert verdict is not None
        assert verdict.clause == 14
    assert told.judge("right") is None


@pytest.mark.kernel
def test_a_launch_that_prints_megabytes_is_right(told: Told) -> None:
    assert told.judge("prints") is None


def running(group: str) -> list[str]:
    """The processes of a process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            if of == group and state != "Z":
                found.append(stat.parent.name)
    return found


@pytest.mark.kernel
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to list processes")
def test_whatever_a_launch_leaves_running_ends_with_its_runner(told: Told) -> None:
    with Runner(told.runner.target, HANG_SECONDS) as runner:
        other = Told(runner, told.teller)
        assert other.judge("leaves_a_thread") is None
        assert other.judge("dies_with_a_process") is not None
        group = str(runner._process.pid)
        assert len(running(group)) >= 2  # the first process, what the dead one left, and soon the next fork
        started = time.monotonic()
    while running(group):  # a process that was killed may take a moment to go
        assert time.monotonic() - started < 10
        time.sleep(0.05)


@pytest.mark.kernel
def test_a_death_between_two_launches_does_not_shift_the_answers(told: Told) -> None:
    told.judge("aborts_later")
    time.sleep(1)
    told.judge("right")  # may be taken for the one that died
    for changes in ({}, {"num_tokens": 2}, {"width": 7}):
        assert told.judge("right", Case(batch_with(**changes))) is None


@pytest.mark.kernel
@pytest.mark.parametrize("fake", ["wrong_lens", "depends", "aborts", "writes_gap"])
def test_the_same_case_gets_the_same_verdict_again(told: Told, fake: str) -> None:
    first = told.judge(fake)
    assert first is not None
    assert told.judge(fake) == first


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fakes:no_such_fake", "AttributeError"),
        ("fakes:MARK", "is not callable"),
        ("no_such_module:launch", "ModuleNotFoundError"),
    ],
)
def test_a_target_that_does_not_load_is_refused_in_one_line(told: Told, name: str, problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem) as caught:
        Runner(parse_target(f"{name}@interpreter"), HANG_SECONDS)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ without a child process


class Stub:
    """A runner in this process: answers each job with what `answer` makes of it."""

    def __init__(self, answer: Callable[[Job], Outcome], backend: str = "interpreter") -> None:
        self.answer, self.backend = answer, backend
        self.jobs: list[Job] = []

    def run(self, job: Job) -> Outcome:
        """The next answer."""
        self.jobs.append(job)
        return self.answer(job)


def rightly(case: Case = CASE) -> Callable[[Job], Outcome]:
    """Answers as a right build of `case`, or of the same with don't-care inputs replaced, would."""
    result = plain.decode_meta(case.batch)
    return lambda job: Done(after(job.images, case.batch, result, job.places), None)


def judged(answer: Callable[[Job], Outcome], case: Case = CASE) -> Verdict | None:
    """The verdict on a stub."""
    stub: Any = Stub(answer)
    return judge(case, stub)


def test_a_case_is_launched_as_it_is_and_then_scrambled_each_in_the_journal_before() -> None:
    told: list[Any] = []
    answer = rightly()

    def launch(job: Job) -> Outcome:
        told.append(job)
        return answer(job)

    stub: Any = Stub(launch)
    assert judge(CASE, stub, told.append) is None
    first, job, second, other = told
    assert first is CASE
    assert second.buffers is CASE.buffers
    for case, launched in ((first, job), (second, other)):
        for name, array in case.batch.inputs().items():
            assert np.array_equal(launched.places[name].view(launched.images[name]), array)
    assert dump_case(second) != dump_case(first)
    assert vectorised.decode_meta(second.batch).difference(vectorised.decode_meta(BATCH)) is None


def test_a_launch_that_fails_is_not_launched_again() -> None:
    stub: Any = Stub(lambda job: Raised("ValueError", "no"))
    assert judge(CASE, stub) == Verdict("EXCEPTION", 14, detail="ValueError: no")
    assert len(stub.jobs) == 1


def test_every_ending_of_a_launch_has_its_verdict() -> None:
    assert judged(lambda job: Hung(30.0)) == Verdict("HANG", 14, detail="no answer within 30 s")
    died = Died("SIGSEGV", 'Thread 1\n  File "/home/me/kernel.py", line 12 in body\n')
    detail = "SIGSEGV: the process died in the launch, at kernel.py:12 in body"
    assert judged(lambda job: died) == Verdict("FAULT", 14, detail=detail)
    verdict = judged(lambda job: Raised("E", "x" * 10**6))
    assert verdict is not None
    assert len(verdict.detail) == 500


@pytest.mark.parametrize("name", TENSORS)
def test_images_of_other_sizes_are_a_fault_of_the_harness(name: str) -> None:
    def short(job: Job) -> Outcome:
        return Done({**job.images, name: job.images[name][:-1]}, None)

    with pytest.raises(HarnessError, match="other sizes"):
        judged(short)
    with pytest.raises(HarnessError, match="other sizes"):
        judged(lambda job: Done({key: image for key, image in job.images.items() if key != name}, None))


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        ({}, None),
        ({"shape": {"num_warps": 2}}, {"num_warps": 2}),
        ({"shape": {"num_warps": 2}, "backend": "interpreter"}, {"num_warps": 2}),
        ({"shape": {"num_warps": 2}, "backend": "gpu"}, None),
        ({"shape": None}, None),
    ],
)
def test_a_case_brings_its_own_shape_on_the_backend_it_was_drawn_for(target: dict[str, Any], shape: Any) -> None:
    case = replace(CASE, target=target)
    stub: Any = Stub(rightly())
    assert judge(case, stub) is None
    assert [job.shape for job in stub.jobs] == [shape, shape]


@pytest.fixture
def wrong_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain oracle that is wrong about lengths."""
    honest = plain.decode_meta

    def wrong(batch: Batch) -> Result:
        result = honest(batch)
        return replace(result, lens=result.lens + np.int32(1))

    monkeypatch.setattr(harness.plain, "decode_meta", wrong)


LARGE = Case(batch_with(width=1000))


@pytest.mark.usefixtures("wrong_plain")
def test_oracles_that_differ_are_a_fault_of_the_harness_before_any_launch() -> None:
    stub: Any = Stub(rightly())
    with pytest.raises(OracleDisagreement, match="the plain and the vectorised oracle differ in lens") as caught:
        judge(CASE, stub)
    assert isinstance(caught.value, HarnessError)
    assert not stub.jobs


@pytest.mark.usefixtures("wrong_plain")
@pytest.mark.parametrize(
    "outcome", [Raised("ValueError", "no"), Died("SIGSEGV", ""), Hung(1.0)], ids=lambda outcome: type(outcome).__name__
)
def test_no_verdict_leaves_the_judge_unless_both_oracles_agree_on_a_large_batch_too(outcome: Outcome) -> None:
    assert LARGE.batch.num_tokens * LARGE.batch.width > harness.PLAIN_ENTRIES
    with pytest.raises(OracleDisagreement):
        judged(lambda job: outcome, LARGE)


@pytest.mark.usefixtures("wrong_plain")
def test_the_plain_oracle_is_asked_about_small_batches_or_when_told() -> None:
    assert expect(LARGE.batch).difference(vectorised.decode_meta(LARGE.batch)) is None
    assert expect(BATCH, plain_too=False).difference(vectorised.decode_meta(BATCH)) is None
    for batch, told in ((BATCH, None), (BATCH, True), (LARGE.batch, True)):
        with pytest.raises(OracleDisagreement):
            expect(batch, plain_too=told)


# ------------------------------------------------------------------------------ verdicts


def compared(batch: Batch, tensor: str, *at: int, value: int, layout: BufferLayout = CASE.buffers) -> Verdict | None:
    """The verdict on a build of `batch` that is right save for one element."""
    result = plain.decode_meta(batch)
    places = placements(batch, layout)
    expected = after(before(batch, places, np.random.default_rng(0)), batch, result, places)
    got = {name: image.copy() for name, image in expected.items()}
    places[tensor].view(got[tensor])[at] = value
    return compare(batch, result, places, expected, got, None)


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
    assert compare(BATCH, result, places, images, images, None) is None
    found = compare(BATCH, result, places, images, images, ("lens", -3))
    assert found is not None
    assert (found.verdict, found.clause, found.tensor) == ("FRAME", 12, "lens")
    assert "byte -3" in found.detail


def test_the_first_difference_is_the_nearest_to_its_cause() -> None:
    result = plain.decode_meta(BATCH)
    places = placements(BATCH, CASE.buffers)
    expected = after(before(BATCH, places, np.random.default_rng(0)), BATCH, result, places)
    got = dict(expected)
    for name in ("seq_lens", "ragged", "indptr", "indices", "lens", "is_valid"):
        got[name] = expected[name] ^ 1
        found = compare(BATCH, result, places, expected, got, ("slot_mapping", 1))
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


# ------------------------------------------------------------------------------ scrambling

drawn = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("profile", PROFILES)
def test_scrambling_changes_only_what_no_output_depends_on_and_keeps_the_law(profile: str) -> None:
    changed: set[str] = set()

    @drawn
    @given(cases(profile), st.integers(0, 2**32))
    def check(case: Case, entropy: int) -> None:
        batch = case.batch
        other = scramble(batch, np.random.default_rng(entropy))
        used = vectorised.dependencies(batch)
        for name in INPUTS:
            mine, theirs = getattr(batch, name), getattr(other, name)
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            different = (mine < 0) != (theirs < 0) if name == "slot_mapping" else mine != theirs
            assert not (different & getattr(used, name)).any(), name
            if (mine != theirs).any():
                changed.add(name)
        for scalar in ("num_tokens", "window_size", "block_size", "width", "noncausal"):
            assert getattr(batch, scalar) == getattr(other, scalar)
        assert is_legal(other) or not is_legal(batch)
        assert vectorised.decode_meta(batch).difference(vectorised.decode_meta(other)) is None

    check()
    # The legal domain leaves no choice of query_start_loc, of requests that no token names either.
    assert changed == set(INPUTS) - ({"query_start_loc"} if profile != "hostile" else set())


def test_scrambling_leaves_the_batch_itself_alone_and_repeats_with_its_seed() -> None:
    text = dump_case(CASE)
    one, two = (dump_case(Case(scramble(BATCH, np.random.default_rng(5)))) for _ in range(2))
    assert dump_case(CASE) == text
    assert one == two != dump_case(Case(scramble(BATCH, np.random.default_rng(6))))


# ---------------------------------------------------------------------------------- images


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64"])
def test_a_canary_is_never_an_entry_that_a_build_may_write(dtype: str) -> None:
    filler = canary(np.random.default_rng(1), 20000, dtype)
    assert set(filler.view(np.uint8).tolist()) == set(range(0x80, 0xFF))
    if dtype == "bool":
        assert not np.isin(filler, (0, 1)).any()
    else:
        assert filler.max() < -1


def layouts() -> st.SearchStrategy[BufferLayout]:
    room = st.integers(0, 3)
    return st.builds(BufferLayout, **dict.fromkeys(ROOM, room), indices_ndim=st.sampled_from((2, 3)))


@settings(drawn, max_examples=100)
@given(cases("hostile"), layouts(), st.integers(0, 2**32))
def test_images_hold_the_inputs_before_and_just_the_result_more_after(
    case: Case, layout: BufferLayout, entropy: int
) -> None:
    batch, result = case.batch, vectorised.decode_meta(case.batch)
    places = placements(batch, layout)
    assert tuple(places) == tuple(TENSORS)
    start = before(batch, places, np.random.default_rng(entropy))
    end = after(start, batch, result, places)
    for name, place in places.items():
        assert start[name].shape == end[name].shape == (place.size,)
        written = np.zeros(place.size, bool)
        if name in INPUTS:
            assert np.array_equal(place.view(start[name]), getattr(batch, name))
            place.view(written)[...] = True
            assert np.array_equal(start[name], end[name])
        else:
            count = place.shape[0] if name == "lens" else len(result.arrays()[name])
            place.view(written)[:count] = True
            assert (start[name][written] != end[name][written]).all(), "a canary cannot be right"
            assert np.array_equal(start[name][~written], end[name][~written])
            assert np.array_equal(place.view(end[name])[: len(result.arrays()[name])], result.arrays()[name])
        filler = start[name][~written] if name in INPUTS else start[name]
        assert not filler.size or filler.view(np.uint8).min() >= 0x80
        assert not filler.size or filler.view(np.uint8).max() < 0xFF
    assert not end["lens"][batch.num_tokens :].any()


@pytest.mark.parametrize(
    "place", [Placement((4,)), Placement((3, 5), 7), Placement((3, 5), 5), Placement((1, 1), 9), Placement((0, 4), 6)]
)
def test_every_element_of_an_image_is_found_at_its_row_and_column_or_in_a_gap(place: Placement) -> None:
    image = np.arange(place.size)
    view = place.view(image)
    seen = {}
    for offset in range(place.size):
        where = place.element(offset)
        if where is None:
            assert offset not in view
        else:
            row, column = where
            assert (view[row] if column is None else view[row, column]) == offset
            seen[where] = offset
    assert len(seen) == view.size


# ---------------------------------------------------------------------------------- journal


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


@settings(drawn, max_examples=60)
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


# ---------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("kernel", Target("kernel", "swa_decode_meta.kernel", "launch")),
        ("kernel@gpu", Target("kernel@gpu", "swa_decode_meta.kernel", "launch", "gpu")),
        ("a:b", Target("a:b", "a", "b")),
        ("a.b_c.d1:e_f@interpreter", Target("a.b_c.d1:e_f@interpreter", "a.b_c.d1", "e_f", "interpreter")),
    ],
)
def test_a_target_is_read_from_its_name(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kernels",
        "kernel@",
        "kernel@cuda",
        "a",
        "a:",
        ":b",
        "a:b:c",
        "a:b.c",
        "a.:b",
        "a..b:c",
        "a b:c",
        "a:1",
        "@gpu",
    ],
)
def test_a_bad_target_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ArgumentError, match="target") as caught:
        parse_target(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target",
    [{}, {"shape": None}, {"shape": {}}, {"shape": dict.fromkeys(SHAPE_FIELDS, 1)}, {"shape": {"num_warps": 2**15}}],
)
def test_a_shape_of_powers_of_two_is_accepted(target: dict[str, Any]) -> None:
    check_shape(target)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ([], "target.shape: expected an object"),
        ("x" * 10**6, "target.shape: expected an object"),
        ({"warps": 1}, "fields among"),
        ({1: 1}, "fields among"),
        *(({"num_warps": value}, r"target.shape.num_warps") for value in (0, -2, 3, 2**16, 2.0, True, "2", None, [1])),
    ],
)
def test_any_other_shape_is_refused_by_field_in_one_short_line(shape: Any, problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem) as caught:
        check_shape({"shape": shape})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


# ----------------------------------------------------------------------------------- memory


@pytest.fixture
def memory() -> Any:
    pytest.importorskip("torch")
    from swa_decode_meta.fuzz.memory import GuardedMemory

    return GuardedMemory()


def fate(action: Callable[[], object]) -> int:
    """How a fork ends that does something: 0, or the negative number of the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def images() -> dict[str, Array]:
    return before(BATCH, placements(BATCH, CASE.buffers), np.random.default_rng(0))


@pytest.mark.kernel
@pytest.mark.parametrize("guard", ["start", "end"])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the fork does nothing that another thread might hold up
def test_a_byte_read_past_the_guarded_side_of_a_tensor_kills(memory: Any, name: str, guard: str) -> None:
    import ctypes

    flat = memory.place(images(), 0, guard)[name]
    begin, end = flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()
    outside, beside = (end, begin - 1) if guard == "end" else (begin - 1, end)
    assert fate(lambda: ctypes.c_uint8.from_address(outside).value) == -signal.SIGSEGV
    assert fate(lambda: ctypes.c_uint8.from_address(beside).value) == 0
    assert fate(lambda: [ctypes.c_uint8.from_address(at).value for at in (begin, end - 1)]) == 0


@pytest.mark.kernel
@pytest.mark.parametrize("guard", ["start", "end"])
def test_what_is_placed_is_read_back_whatever_was_there_before(memory: Any, guard: str) -> None:
    small, large = images(), {name: np.tile(image, 5000) for name, image in images().items()}
    for placed in (small, large, small):
        memory.place(placed, 0, guard)
        found, damage = memory.read()
        assert damage is None
        assert {name: image.tobytes() for name, image in found.items()} == {
            name: image.tobytes() for name, image in placed.items()
        }


@pytest.mark.kernel
@pytest.mark.parametrize(("guard", "offset"), [("start", 0), ("start", 4095), ("end", -1), ("end", -4096)])
def test_a_byte_changed_in_the_band_is_damage_at_its_offset(memory: Any, guard: str, offset: int) -> None:
    import ctypes

    flat = memory.place(images(), 0, guard)["lens"]
    size = flat.numel() * flat.element_size()
    at = offset if offset < 0 else size + offset
    ctypes.c_uint8.from_address(flat.data_ptr() + at).value ^= 0xFF
    _, damage = memory.read()
    assert (damage.tensor, damage.offset) == ("lens", at)
    memory.place(images(), 0, guard)
    assert memory.read()[1] is None


@pytest.mark.kernel
@pytest.mark.parametrize("misalignment", [0, 3])
@pytest.mark.parametrize("kind", ["BandedMemory", "SeparateMemory"])
def test_memory_for_a_gpu_holds_what_is_placed_too(kind: str, misalignment: int) -> None:
    torch = pytest.importorskip("torch")
    from swa_decode_meta.fuzz import memory

    of_gpu = getattr(memory, kind)(torch.device("cpu"))
    for placed in (images(), {name: np.tile(image, 50) for name, image in images().items()}, images()):
        flat = of_gpu.place(placed, misalignment, "end")
        found, damage = of_gpu.read()
        assert damage is None
        assert {name: image.tobytes() for name, image in found.items()} == {
            name: image.tobytes() for name, image in placed.items()
        }
        flat["lens"][0] = 77
        assert of_gpu.read()[0]["lens"][0] == 77
        if kind == "SeparateMemory":
            spare = flat["lens"].untyped_storage().nbytes() - flat["lens"].numel() * 4
            assert spare == misalignment * 4


@pytest.mark.kernel
def test_memory_on_a_gpu_is_separate_where_torch_leaves_allocation_to_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from swa_decode_meta.fuzz.memory import BandedMemory, SeparateMemory, gpu_memory

    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    assert isinstance(gpu_memory(torch.device("cpu")), BandedMemory)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert isinstance(gpu_memory(torch.device("cpu")), SeparateMemory)


@pytest.mark.kernel
@pytest.mark.parametrize("guard", ["start", "end"])
def test_an_empty_tensor_is_placed_too(memory: Any, guard: str) -> None:
    flat = memory.place({"ragged": np.empty(0, np.int32), "is_valid": np.empty(0, np.uint8)}, 0, guard)
    assert [tensor.numel() for tensor in flat.values()] == [0, 0]
    assert memory.read()[1] is None
