"""The judge, on launches that are right or wrong in one known way, in a child process and without one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swa_decode_meta.fuzz import harness
from swa_decode_meta.fuzz.child import Done, Job, Raised
from swa_decode_meta.fuzz.harness import OracleDisagreement, expect, judge
from swa_decode_meta.fuzz.image import after, placements
from swa_decode_meta.fuzz.runner import Died, HarnessError, Hung, Outcome, Runner
from swa_decode_meta.fuzz.target import parse_target
from swa_decode_meta.fuzz.verdict import Verdict
from swa_decode_meta.oracle import plain, vectorised
from swa_decode_meta.spec import (
    INPUTS,
    OUTPUTS,
    TENSORS,
    ArgumentError,
    Batch,
    BufferLayout,
    Case,
    Result,
    dump_case,
)
from tests.batches import BATCH, CASE, GUARDED, ROOM, batch_with

HANG_SECONDS = 4.0
PATIENCE = 60  # seconds after which the harness itself is taken to hang
TELLER = "SWA_DECODE_META_FAKE"
MARK = 77


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


# ------------------------------------------------------------------ in a child process


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
        ("no_such_module:launch", "No module named 'no_such_module' .* on PYTHONPATH"),
        ("fakes:element", "other arguments than"),
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
