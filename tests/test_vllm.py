"""`build` and the plug-in in the real vLLM 0.33.0, on a CPU: `make test-vllm`. Skipped where vLLM is not installed.

vLLM's own build is run beside ours, its launch replaced by the oracle. Its ROCm metadata class cannot be imported
without a GPU: the one here adds the same four fields to the class that it is made of. vLLM's launch and its ops run
as targets of the fuzzer under Triton's interpreter.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import util
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from swa_decode_meta.fuzz.harness import judge
from swa_decode_meta.fuzz.runner import Runner
from swa_decode_meta.fuzz.scramble import is_legal
from swa_decode_meta.fuzz.strategies import cases
from swa_decode_meta.fuzz.target import parse_target
from swa_decode_meta.spec import Batch, Case
from tests.batches import GOLDEN, VLLM_DIFFERS, golden_batch
from tests.commands import execute

if util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; make test-vllm installs it", allow_module_level=True)

torch = pytest.importorskip("torch")

from swa_decode_meta.kernel import build, plugin  # noqa: E402
from swa_decode_meta.kernel.build import enabled  # noqa: E402
from tests import vllm_stand_ins as stand_ins  # noqa: E402
from tests.test_build import NOT_TAKEN, Counted, in_service  # noqa: E402

pytestmark = pytest.mark.kernel

BATCHES = 300  # of each form


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """vLLM's module, switched on, its launch done by the oracle; and its classes."""
    module = importlib.import_module("vllm.models.deepseek_v41.amd.ops.swa_decode_meta")
    sparse_swa = importlib.import_module("vllm.v1.attention.backends.mla.sparse_swa")
    backend = importlib.import_module("vllm.v1.attention.backend")
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "enabled", lambda: True)
    patch.setattr(module, "MAX_ROWS", 16384)  # the row limit is ours
    patch.setattr(module, "launch", by_the_oracle)
    patch.setenv("SWA_DECODE_META", "1")
    enabled.cache_clear()
    module.Batch, module.Base = backend.CommonAttentionMetadata, sparse_swa.DeepseekSparseSWAMetadata
    module.Builder = sparse_swa.DeepseekSparseSWAMetadataBuilder
    module.Metadata = stand_ins.with_ragged(module.Base)
    yield module
    patch.undo()
    enabled.cache_clear()


def by_the_oracle(*arguments: Any, noncausal: bool = False) -> None:
    Counted().launch(*arguments, noncausal)


def builder_of(theirs: Any, batch: Any, **changes: Any) -> Any:
    """A real builder without its __init__, with buffers of its own; each layer type's schedule is None, as on ROCm."""
    builder = stand_ins.fill(theirs.Builder.__new__(theirs.Builder), batch, batch.num_tokens + 9)
    builder.build_tile_scheduler = lambda tokens: dict.fromkeys(stand_ins.LAYER_TYPES)
    for name, value in changes.items():
        setattr(builder, name, value)
    return builder


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_all_fields_are_those_of_vllm_s_own_build(
    noncausal: bool, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("swa_decode_meta.kernel.deferred"), "launch", Counted().launch)
    compared = 0

    @settings(max_examples=BATCHES, deadline=None)
    @given(cases("serving"))
    def holds(case: Case) -> None:
        nonlocal compared
        batch = in_service(case.batch, noncausal)
        found = []
        for function in (theirs.build, build):
            cam = stand_ins.batch_of(theirs.Batch, batch)
            replay = torch.from_numpy(batch.replay_start.copy()) if batch.replay_start.any() else None
            found.append(function(builder_of(theirs, batch), 0, cam, False, replay, theirs.Metadata))
        same(*found)
        compared += 1

    holds()
    assert compared >= BATCHES


def same(vllm_s: Any, ours: Any) -> None:
    """Every field equal; of the ragged entries those that indptr says there are."""
    kept = int(vllm_s.decode_swa_ragged_indptr[-1])
    for item in fields(vllm_s):
        a, b = getattr(vllm_s, item.name), getattr(ours, item.name)
        if item.name == "decode_swa_ragged_indices":
            assert a.shape == b.shape
            a, b = a[:kept], b[:kept]
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, item.name
            assert torch.equal(a, b), item.name
        else:
            assert a == b, item.name


@pytest.mark.parametrize("why", [why for why in NOT_TAKEN if why != "switched off"])
def test_what_is_left_to_vllm(why: str, theirs: Any) -> None:
    batch, of_builder, of_batch = NOT_TAKEN[why]()
    cam = stand_ins.batch_of(theirs.Batch, batch, **of_batch)
    assert build(builder_of(theirs, batch, **of_builder), 0, cam, False, None, theirs.Metadata) is None
    if why != "a query that does not fit":  # that one is ours: vLLM would cut its rows
        cam = stand_ins.batch_of(theirs.Batch, batch, **of_batch)
        assert theirs.build(builder_of(theirs, batch, **of_builder), 0, cam, False, None, theirs.Metadata) is None


@pytest.mark.parametrize(
    ("mine", "real"), [("CommonAttentionMetadata", "Batch"), ("DeepseekSparseSWAMetadata", "Base")]
)
def test_the_stand_ins_have_the_real_fields(mine: str, real: str, theirs: Any) -> None:
    """All fields that the metadata has, with their defaults; of the batch those that are set or read."""
    stand_in = {item.name: item for item in fields(getattr(stand_ins, mine))}
    found = {item.name: item for item in fields(getattr(theirs, real))}
    assert stand_in.keys() <= found.keys()
    if real == "Base":
        assert stand_in.keys() == found.keys()
    else:
        assert {name for name, item in found.items() if item.default is MISSING} <= stand_in.keys()
    for name, item in stand_in.items():
        assert item.default == found[name].default, name


def test_the_stand_ins_have_the_real_functions(theirs: Any) -> None:
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    for mine, real in (
        (stand_ins.CommonAttentionMetadata.token_to_req_indices, theirs.Batch.token_to_req_indices),
        (stand_ins.Builder._build_deepseek_v4_metadata, theirs.Builder._build_deepseek_v4_metadata),
        (stand_ins.Builder.build_tile_scheduler, theirs.Builder.build_tile_scheduler),
    ):
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(real).parameters)
    names = list(inspect.signature(utils.split_decodes_and_prefills).parameters)
    assert names[:2] == list(inspect.signature(stand_ins.split_decodes_and_prefills).parameters)[:2]
    empty = theirs.Builder.__new__(theirs.Builder)
    empty._layer_types = set()
    assert set(theirs.Builder.build_tile_scheduler(empty, 0)) == set(stand_ins.LAYER_TYPES)


@pytest.mark.parametrize("seed", range(20))
def test_the_stand_in_splits_as_vllm_does(seed: int, theirs: Any) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.integers(1, 12, rng.integers(1, 9)))
    start = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    given = {"num_reqs": len(lengths), "num_actual_tokens": int(lengths.sum()), "max_query_len": int(lengths.max())}
    nothing = torch.zeros(len(lengths), dtype=torch.int32)
    cam = theirs.Batch(start, start, nothing, max_seq_len=1, block_table_tensor=nothing, slot_mapping=nothing, **given)
    for threshold in (1, 6):
        assert stand_ins.split_decodes_and_prefills(cam, threshold) == utils.split_decodes_and_prefills(cam, threshold)


LENGTH, ENTRY, OUTSIDE = ("MISMATCH", 7, "lens"), ("MISMATCH", 9, "indices"), ("FAULT", 14, "")
FINDINGS = {
    "dspark-longer-than-the-row": {LENGTH},
    "length-below-0": {LENGTH},
    "no-rows": {("EXCEPTION", 14, "")},
    "page-below-0": {ENTRY},
    "position-past-int32": {OUTSIDE, ("MISMATCH", 4, "lens")},  # whatever lies there
    "position-past-the-table": {OUTSIDE},
    "replay-past-the-token": {LENGTH},
    "request-below-0": {OUTSIDE, LENGTH, ("MISMATCH", 2, "lens")},
    "request-out-of-range": {OUTSIDE},
    "row-wider-than-a-tile": {("EXCEPTION", 14, "")},
    "slot-past-int32": {ENTRY},
    "window-longer-than-the-row": {LENGTH},
}
"""What vLLM's launch and its ops do otherwise than the contract: verdict, clause and tensor."""
OF_THE_LAUNCH_ALONE = {"row-wider-than-a-tile"}
"""Where the ops, which cut a row into tiles, do what the contract says."""


@pytest.fixture(scope="module", params=["vllm", "vllm_ops"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """vLLM's own launch, or its ops, under the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # vLLM then takes the triton that is there without looking for a GPU
        with Runner(parse_target(f"{request.param}@interpreter"), hang_seconds=300) as runner:
            yield runner


@pytest.mark.parametrize("name", VLLM_DIFFERS)
def test_where_vllm_differs_from_the_contract(name: str, runner: Runner) -> None:
    verdict = judge(VLLM_DIFFERS[name], runner)
    if name in OF_THE_LAUNCH_ALONE and not _is_the_launch(runner):
        assert verdict is None
    else:
        assert verdict is not None
        assert (verdict.verdict, verdict.clause, verdict.tensor) in FINDINGS[name]


def _is_the_launch(runner: Runner) -> bool:
    return runner.target.name.startswith("vllm@")


def _in_one_tile(batch: Batch) -> bool:
    """Whether vLLM's launch compiles: it has all rows in one tile, of which Triton allows 2^20 entries."""
    rows, width = (1 << (size - 1).bit_length() for size in (batch.num_tokens, batch.width))
    return rows * width <= 2**20


@pytest.mark.parametrize("profile", ["serving", "legal"])
def test_on_legal_batches_vllm_does_not_differ(profile: str, runner: Runner) -> None:
    def taken(batch: Batch) -> bool:
        return batch.num_tokens > 0 and (_in_one_tile(batch) or not _is_the_launch(runner))

    @settings(max_examples=40 if _is_the_launch(runner) else 10)
    @given(cases(profile).filter(lambda case: taken(case.batch)))
    def holds(case: Case) -> None:
        assert judge(case, runner) is None

    holds()


def test_on_the_recorded_batches_vllm_does_not_differ(runner: Runner) -> None:
    legal = [batch for batch in map(golden_batch, GOLDEN) if is_legal(batch)]  # 13 have pages below 0 in view
    for batch in legal[:: 4 if _is_the_launch(runner) else 40]:
        assert judge(Case(batch), runner) is None


CODE = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.models.deepseek_v41.amd.ops import swa_decode_meta
print(swa_decode_meta.build.__module__)
"""


@pytest.mark.parametrize("switch", ["1", ""])
def test_the_plug_in_in_a_fresh_process(switch: str) -> None:
    ended = execute([sys.executable, "-c", CODE], SWA_DECODE_META=switch)
    assert ended.code == 0, ended.err
    expected = "swa_decode_meta.kernel.build" if switch else "vllm.models.deepseek_v41.amd.ops.swa_decode_meta"
    assert ended.last == expected
    assert plugin.register.__module__ == "swa_decode_meta.kernel.plugin"
