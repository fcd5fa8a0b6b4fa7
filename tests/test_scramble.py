"""Replacing the inputs that no output depends on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_decode_meta.fuzz.scramble import is_legal, scramble
from swa_decode_meta.fuzz.strategies import PROFILES, cases
from swa_decode_meta.oracle import vectorised
from swa_decode_meta.spec import (
    INPUTS,
    Case,
    dump_case,
)
from tests.batches import BATCH, CASE


@pytest.mark.parametrize("profile", PROFILES)
def test_scrambling_changes_only_what_no_output_depends_on_and_keeps_the_law(profile: str) -> None:
    changed: set[str] = set()

    @settings(max_examples=150)
    @given(cases(profile), st.integers(0, 2**32))
    def check(case: Case, entropy: int) -> None:
        batch = case.batch
        other = scramble([batch], np.random.default_rng(entropy))[0]
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
    one, two = (dump_case(Case(scramble([BATCH], np.random.default_rng(5))[0])) for _ in range(2))
    assert dump_case(CASE) == text
    assert one == two != dump_case(Case(scramble([BATCH], np.random.default_rng(6))[0]))
