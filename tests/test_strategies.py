"""What the profiles draw: legal where they say so, at every edge they promise, and small once shrunk."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings

from swa_decode_meta.fuzz.features import FEATURES, View, features_of, reachable
from swa_decode_meta.fuzz.strategies import (
    BLOCK_SIZES,
    GPU_SHAPES,
    PROFILES,
    ROWS,
    SERVING_CONTEXT,
    WINDOWS,
    cases,
)
from swa_decode_meta.fuzz.target import SHAPE_FIELDS, check_shape
from swa_decode_meta.spec import Batch, Case, check_legal, dump_case

ROUNDS = {"serving": 10, "legal": 20, "hostile": 24}
"""How many rounds of ROUND cases each the tests below draw of a profile."""
ROUND = 50

# What these profiles can never show: in the legal domain nothing of the first list is possible.
each_profile = pytest.mark.parametrize("profile", PROFILES)
lawful = pytest.mark.parametrize("profile", ["serving", "legal"])


def draw(profile: str, count: int, entropy: int, backend: str = "interpreter") -> list[Case]:
    """`count` cases at most, as one round of a campaign draws them."""
    drawn: list[Case] = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=False,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @seed(entropy)
    @given(cases(profile, backend))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    return drawn


@cache
def sample(profile: str, backend: str = "interpreter") -> list[Case]:
    """All rounds of a profile, with a fixed seed."""
    entropy = random.Random(f"{profile}/1")
    return [case for _ in range(ROUNDS[profile]) for case in draw(profile, ROUND, entropy.getrandbits(64), backend)]


@cache
def reached(profile: str) -> set[str]:
    """The features of a profile's sample."""
    return set(chain.from_iterable(map(features_of, sample(profile))))


def query_lens(batch: Batch) -> np.ndarray:
    return np.diff(batch.query_start_loc.astype(np.int64))


def smallest(profile: str, wanted: Callable[[View], bool]) -> Batch:
    """What a case of the profile shrinks to that has what is wanted."""
    case = find(
        cases(profile),
        lambda case: bool(wanted(View(case))),
        settings=settings(max_examples=2000, database=None, deadline=None, derandomize=True),
    )
    return case.batch


# ------------------------------------------------------------------------ domains


@each_profile
def test_a_sample_has_the_size_that_it_is_meant_to_have(profile: str) -> None:
    assert len(sample(profile)) > 0.9 * ROUND * ROUNDS[profile]


@lawful
def test_every_batch_of_a_lawful_profile_is_legal(profile: str) -> None:
    for case in sample(profile):
        check_legal(case.batch)


def test_the_hostile_profile_draws_legal_and_illegal_batches() -> None:
    assert {"legal batch", "illegal batch"} <= reached("hostile")


def test_every_serving_batch_has_the_geometry_of_the_served_model() -> None:
    for case in sample("serving"):
        batch = case.batch
        assert batch.window_size == 128
        assert batch.block_size in (64, 128)
        assert batch.width == (192 if batch.noncausal else 128)
        assert 1 <= batch.num_reqs <= 64
        assert query_lens(batch).min() >= 1
        assert query_lens(batch).max() <= 6
        assert batch.seq_lens.max() <= SERVING_CONTEXT == 128 * 1024


@pytest.mark.parametrize("noncausal", [False, True])
def test_the_serving_profile_reaches_the_corners_of_its_geometry(noncausal: bool) -> None:
    batches = [case.batch for case in sample("serving") if case.batch.noncausal is noncausal]
    assert {batch.block_size for batch in batches} == {64, 128}
    assert {1, 64} <= {batch.num_reqs for batch in batches}
    assert set(range(1, 7)) <= {int(length) for batch in batches for length in query_lens(batch)}
    assert SERVING_CONTEXT in {int(length) for batch in batches for length in batch.seq_lens}
    for same in (1, 6):  # a step without speculation, and one with the same number of drafts everywhere
        assert any(batch.num_reqs > 8 and set(query_lens(batch)) == {same} for batch in batches)
    assert any(set(query_lens(batch)) == set(range(1, 7)) for batch in batches)


def test_an_unknown_profile_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="one of serving, legal, hostile, got 'servng'"):
        cases("servng")


# ----------------------------------------------------------------------- coverage


@each_profile
def test_every_feature_is_reached_save_those_that_a_profile_cannot_have(profile: str) -> None:
    assert reached(profile) == set(reachable([profile]))


def test_every_feature_is_reached_by_some_profile() -> None:
    assert reachable(PROFILES, "gpu", step=True) == list(FEATURES)


def test_every_listed_number_of_rows_is_reached() -> None:
    assert set(ROWS) == {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65}
    assert set(ROWS) <= {case.batch.num_tokens for profile in PROFILES for case in sample(profile)}


@pytest.mark.parametrize("profile", ["legal", "hostile"])
def test_every_listed_window_and_page_size_is_reached(profile: str) -> None:
    assert set(WINDOWS) == {1, 2, 3, 63, 64, 65, 127, 128}
    assert {1, 2, 16, 64, 128} < set(BLOCK_SIZES)
    assert any(size & (size - 1) for size in BLOCK_SIZES)
    batches = [case.batch for case in sample(profile)]
    assert set(WINDOWS) <= {batch.window_size for batch in batches}
    assert {*BLOCK_SIZES, 2**31 - 1, 2**31, 2**40} <= {batch.block_size for batch in batches}


def edges(valid: np.ndarray) -> int:
    """How often valid tokens and padding meet."""
    return int(np.count_nonzero(np.diff(valid)))


PADDINGS: dict[str, Callable[[np.ndarray], bool]] = {
    "none": lambda valid: valid.all(),
    "tail": lambda valid: valid[0] and not valid[-1] and edges(valid) == 1,
    "first": lambda valid: not valid[0] and valid[1:].all(),
    "middle": lambda valid: valid[0] and edges(valid) in (2, 3),
    "alternating": lambda valid: edges(valid) == len(valid) - 1,
    "all": lambda valid: not valid.any(),
}


@each_profile
@pytest.mark.parametrize("style", PADDINGS)
def test_every_style_of_padding_is_reached(profile: str, style: str) -> None:
    valid = [case.batch.slot_mapping[: case.batch.num_tokens] >= 0 for case in sample(profile)]
    assert any(PADDINGS[style](tokens) for tokens in valid if tokens.size > 4)


# The lengths worth a visit, and how far each sequence is from them.
LENGTHS: dict[str, Callable[[Batch], np.ndarray]] = {
    "query length": lambda batch: batch.seq_lens - query_lens(batch),
    "window": lambda batch: batch.seq_lens - np.int64(batch.window_size),
    "window before the query": lambda batch: batch.seq_lens - query_lens(batch) - batch.window_size,
    "page edge": lambda batch: (batch.seq_lens + batch.block_size // 2) % batch.block_size - batch.block_size // 2,
    "table's end": lambda batch: batch.seq_lens - np.int64(batch.block_table.shape[1] * batch.block_size),
}
BEYOND_THE_LAW = {("query length", -1), ("table's end", 1)}


@each_profile
@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("length", LENGTHS)
def test_sequences_end_at_every_edge_and_on_either_side_of_it(profile: str, length: str, step: int) -> None:
    batches = [case.batch for case in sample(profile) if 2 < case.batch.block_size <= 128 and case.batch.num_reqs]
    found = any((LENGTHS[length](batch) == step).any() for batch in batches)
    assert found is (profile == "hostile" or (length, step) not in BEYOND_THE_LAW)


@pytest.mark.parametrize("profile", ["legal", "hostile"])
def test_sequences_of_no_position_are_reached(profile: str) -> None:
    assert any((case.batch.seq_lens == 0).any() for case in sample(profile))


@each_profile
def test_every_way_to_lay_out_the_buffers_is_reached(profile: str) -> None:
    layouts = [case.buffers for case in sample(profile)]
    assert {layout.guard for layout in layouts} == {"start", "end"}
    assert {layout.indices_ndim for layout in layouts} == {2, 3}
    assert {layout.misalignment for layout in layouts} == {0, 1, 2, 3}
    for room in ("indices_row_gap", "block_table_row_gap", "spare_rows", "lens_tail", "ragged_spare"):
        assert {0, 1} < {getattr(layout, room) for layout in layouts}, room


def test_on_a_gpu_only_the_few_listed_shapes_are_drawn() -> None:
    targets = [case.target for case in sample("serving", "gpu")]
    for target in targets:
        check_shape(target)
    shapes = [target["shape"] for target in targets if target]
    assert {tuple(shape.values()) for shape in shapes} == {tuple(shape.values()) for shape in GPU_SHAPES}
    assert {target.get("backend", "gpu") for target in targets} == {"gpu"}


@each_profile
def test_on_the_interpreter_every_shape_drawn_is_one_that_a_case_file_may_hold(profile: str) -> None:
    targets = [case.target for case in sample(profile)]
    for target in targets:
        check_shape(target)
        assert set(target.get("shape", ())) <= set(SHAPE_FIELDS)
    assert {target.get("backend") for target in targets} == {None, "interpreter"}


# -------------------------------------------------------------------- repeatability


@each_profile
def test_the_same_seed_draws_the_same_cases(profile: str) -> None:
    first, again, other = (list(map(dump_case, draw(profile, 30, entropy))) for entropy in (7, 7, 8))
    assert first == again
    assert first != other


def test_the_same_seed_draws_the_same_cases_in_another_process() -> None:
    code = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import test_strategies
for profile in test_strategies.PROFILES:
    texts = map(test_strategies.dump_case, test_strategies.draw(profile, 30, 7))
    print(hashlib.sha256("".join(texts).encode()).hexdigest())
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, __file__.rpartition("/")[0]],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert len(runs[0].split()) == len(PROFILES)
    assert runs[0] == runs[1]


# ------------------------------------------------------------------------ shrinking


@pytest.mark.parametrize(
    ("profile", "feature"),
    [
        ("serving", "window clipped by replay"),
        ("legal", "window clipped by replay"),
        ("hostile", "hole in the window"),
        ("hostile", "no slot for a position"),
        ("serving", "window crosses a page edge"),
        ("legal", "slot past 2**30"),
        ("hostile", "valid row names no request"),
    ],
)
def test_what_one_request_can_show_shrinks_to_one_request_of_few_tokens(profile: str, feature: str) -> None:
    batch = smallest(profile, FEATURES[feature])
    assert batch.num_reqs <= 1
    assert batch.num_tokens <= 2
    assert batch.block_table.shape[0] <= 1


def test_what_needs_two_requests_shrinks_to_two() -> None:
    batch = smallest("legal", lambda view: len(set(view.reqs.tolist())) >= 2)
    assert (batch.num_reqs, batch.num_tokens) == (2, 2)


def test_the_first_case_that_shrinking_ends_at_is_plain() -> None:
    case = find(cases("legal"), lambda case: True, settings=settings(database=None, derandomize=True))
    assert case.batch.num_reqs == 0
    assert not case.target
    assert case.buffers == type(case.buffers)()
