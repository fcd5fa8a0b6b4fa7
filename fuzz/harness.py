"""One case on one target: launch it twice and say what, if anything, is wrong. The judge is the oracle alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..oracle import plain, vectorised
from ..spec import Batch, Case, Result
from .child import Done, Job, Raised
from .image import Array, Placement, after, before, key_of, placements
from .runner import Died, HarnessError, Outcome, Runner, crash_site
from .scramble import scramble
from .verdict import Verdict, compare, damaged

PLAIN_ENTRIES = 2048  # the plain oracle checks the fast one on every batch of up to this many entries


class OracleDisagreement(HarnessError):
    """The two oracles differ on a batch: nothing can be said of any target."""


def expect(batch: Batch, plain_too: bool | None = None) -> Result:
    """What a build of `batch` must write; raises OracleDisagreement when the oracles differ.

    The vectorised oracle answers. The plain one is asked too for small batches, or as `plain_too` says.
    """
    result = vectorised.decode_meta(batch)
    if plain_too is None:
        plain_too = batch.num_tokens * batch.width <= PLAIN_ENTRIES
    if plain_too:
        tensor = plain.decode_meta(batch).difference(result)
        if tensor is not None:
            raise OracleDisagreement(f"the plain and the vectorised oracle differ in {tensor}")
    return result


def judge(case: Case, runner: Runner, journal: Callable[[Case], None] | None = None) -> Verdict | None:
    """Run `case` on the runner's target as it is, then with all don't-care inputs replaced; None when both are right.

    A target that takes one group at a time is given those of the case one by one. `journal` is called with each case
    before its launch. Canaries and replacements are drawn from the case itself, so that the same case is judged in
    the same way every time. Raises HarnessError for a fault of ours.
    """
    if not case.groups or runner.takes_step:
        return _judge(case, runner, journal)
    for group, batch in enumerate(case.step):
        verdict = _judge(replace(case, batch=batch, groups=()), runner, journal)
        if verdict is not None:
            return replace(verdict, tensor=key_of(group, verdict.tensor) if verdict.tensor else "")
    return None


def _judge(case: Case, runner: Runner, journal: Callable[[Case], None] | None) -> Verdict | None:
    rng = np.random.default_rng(_seed(case.step))
    results = [expect(batch) for batch in case.step]
    verdict = _launch(case, results, runner, rng, journal)
    if verdict is None:
        first, *others = scramble(case.step, rng)
        verdict = _launch(replace(case, batch=first, groups=tuple(others)), results, runner, rng, journal)
        if verdict is not None and verdict.verdict in ("MISMATCH", "FRAME"):
            # Nothing that an output may depend on has changed, so this is one finding whatever clause it shows in.
            verdict = replace(verdict, verdict="INTERFERENCE", clause=13, detail=_once_replaced(verdict))
    if verdict is not None:
        for batch in case.step:
            expect(batch, plain_too=True)
    return verdict


def _once_replaced(verdict: Verdict) -> str:
    return f"with don't-care inputs replaced, clause {verdict.clause}; {verdict.detail}".rstrip("; ")


def _launch(
    case: Case,
    results: Sequence[Result],
    runner: Runner,
    rng: np.random.Generator,
    journal: Callable[[Case], None] | None,
) -> Verdict | None:
    layout = case.buffers
    places: dict[str, Placement] = {}
    start: dict[str, Array] = {}
    expected: dict[str, Array] = {}
    for group, (batch, result) in enumerate(zip(case.step, results, strict=True)):
        own = placements(batch, layout)
        images = before(batch, own, rng)
        right = after(images, batch, result, own)
        for name, place in own.items():
            key = key_of(group, name)
            if key not in places:  # the shared ones are there from the first group on
                places[key], start[key], expected[key] = place, images[name], right[name]
    job = Job(
        images=start,
        places=places,
        num_tokens=case.batch.num_tokens,
        window_size=case.batch.window_size,
        block_sizes=tuple(batch.block_size for batch in case.step),
        noncausal=case.batch.noncausal,
        middle_axis=layout.indices_ndim == 3,
        misalignment=layout.misalignment,
        guard=layout.guard,
        shape=_shape(case, runner),
    )
    if journal is not None:
        journal(case)
    outcome = runner.run(job)
    if not isinstance(outcome, Done):
        return _ended(outcome)
    got = _sound(outcome.images, start)
    for group, (batch, result) in enumerate(zip(case.step, results, strict=True)):
        verdict = compare(batch, result, places, expected, got, group)
        if verdict is not None:
            return verdict
    return damaged(*outcome.damage) if outcome.damage is not None else None


def _shape(case: Case, runner: Runner) -> Mapping[str, int] | None:
    """The case's own cut into programs, on the backend it was drawn for: the other one may take minutes for it."""
    shape = case.target.get("shape")
    return shape if isinstance(shape, dict) and case.target.get("backend", runner.backend) == runner.backend else None


def _sound(images: Mapping[str, Array], start: Mapping[str, Array]) -> Mapping[str, Array]:
    """Refuse to compare images that are not of the sizes that were sent: NumPy would compare them as unequal wholes."""
    if images.keys() != start.keys() or any(images[name].shape != start[name].shape for name in start):
        raise HarnessError("the child sent back images of other sizes")
    return images


def _ended(outcome: Outcome) -> Verdict:
    """The verdict on a launch that did not return: clause 14, it must end and write what the clauses say."""
    if isinstance(outcome, Raised):
        return Verdict("EXCEPTION", 14, detail=f"{outcome.error}: {outcome.message}"[:500])
    if isinstance(outcome, Died):
        site = crash_site(outcome.last_words)
        return Verdict(
            "FAULT", 14, detail=f"{outcome.how}: the process died in the launch" + (f", at {site}" if site else "")
        )
    assert not isinstance(outcome, Done)
    return Verdict("HANG", 14, detail=f"no answer within {outcome.seconds:.0f} s")


def _seed(step: Sequence[Batch]) -> int:
    digest = 0
    for batch in step:
        scalars = (batch.num_tokens, batch.window_size, batch.block_size, batch.width, batch.noncausal)
        words = repr([number.bit_length() if number > 2**64 else number for number in scalars])
        digest = zlib.crc32(words.encode(), digest)
        for array in batch.inputs().values():
            digest = zlib.crc32(np.ascontiguousarray(array).data, digest)
    return digest
