"""One case on one target: launch it twice and say what, if anything, is wrong. The judge is the oracle alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..oracle import plain, vectorised
from ..spec import Batch, Case, Result
from .child import Done, Job, Raised
from .image import Array, after, before, placements
from .runner import Died, HarnessError, Outcome, Runner, crash_site
from .scramble import scramble
from .verdict import Verdict, compare

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

    `journal` is called with each batch before its launch. Canaries and replacements are drawn from the case itself,
    so that the same case is judged in the same way every time. Raises HarnessError for a fault of ours.
    """
    batch = case.batch
    rng = np.random.default_rng(_seed(batch))
    result = expect(batch)
    verdict = _launch(case, result, runner, rng, journal)
    if verdict is None:
        other = replace(case, batch=scramble(batch, rng))
        verdict = _launch(other, result, runner, rng, journal)
        if verdict is not None and verdict.verdict in ("MISMATCH", "FRAME"):
            # Nothing that an output may depend on has changed, so this is one finding whatever clause it shows in.
            verdict = replace(verdict, verdict="INTERFERENCE", clause=13, detail=_once_replaced(verdict))
    if verdict is not None:
        expect(batch, plain_too=True)
    return verdict


def _once_replaced(verdict: Verdict) -> str:
    return f"with don't-care inputs replaced, clause {verdict.clause}; {verdict.detail}".rstrip("; ")


def _launch(
    case: Case,
    result: Result,
    runner: Runner,
    rng: np.random.Generator,
    journal: Callable[[Case], None] | None,
) -> Verdict | None:
    batch, layout = case.batch, case.buffers
    places = placements(batch, layout)
    start = before(batch, places, rng)
    job = Job(
        images=start,
        places=places,
        num_tokens=batch.num_tokens,
        window_size=batch.window_size,
        block_size=batch.block_size,
        noncausal=batch.noncausal,
        middle_axis=layout.indices_ndim == 3,
        misalignment=layout.misalignment,
        guard=layout.guard,
        shape=_shape(case, runner),
    )
    if journal is not None:
        journal(case)
    outcome = runner.run(job)
    if isinstance(outcome, Done):
        expected = after(start, batch, result, places)
        return compare(batch, result, places, expected, _sound(outcome.images, start), outcome.damage)
    return _ended(outcome)


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


def _seed(batch: Batch) -> int:
    scalars = (batch.num_tokens, batch.window_size, batch.block_size, batch.width, batch.noncausal)
    digest = zlib.crc32(repr([number.bit_length() if number > 2**64 else number for number in scalars]).encode())
    for array in batch.inputs().values():
        digest = zlib.crc32(np.ascontiguousarray(array).data, digest)
    return digest
