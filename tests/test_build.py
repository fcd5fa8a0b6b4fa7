"""vLLM's `build`: every field, every batch that it leaves to vLLM, and the step that launches together."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import MISSING, fields, make_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from swa_decode_meta.fuzz.strategies import cases  # noqa: E402
from swa_decode_meta.kernel import deferred_step  # noqa: E402
from swa_decode_meta.kernel.build import VllmMismatchError, build, enabled, record_monokernel  # noqa: E402
from swa_decode_meta.oracle import vectorised  # noqa: E402
from swa_decode_meta.spec import OUTPUTS, OWN, SHARED, TENSORS, ArgumentError, Batch, Case  # noqa: E402
from tests.batches import served  # noqa: E402
from tests.vllm_stand_ins import (  # noqa: E402
    Builder,
    CommonAttentionMetadata,
    DeepseekSparseSWAMetadata,
    batch_of,
    fill,
    modules,
    with_ragged,
)

pytestmark = pytest.mark.kernel

BUILD = importlib.import_module("swa_decode_meta.kernel.build")
DEFERRED = importlib.import_module("swa_decode_meta.kernel.deferred")
METADATA = with_ragged(DeepseekSparseSWAMetadata)


@pytest.fixture(autouse=True)
def in_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins are vLLM, and `build` is switched on."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("SWA_DECODE_META", "1")
    enabled.cache_clear()
    yield
    enabled.cache_clear()


@pytest.fixture
def device(backend: str) -> str:
    return "cuda" if backend == "gpu" else "cpu"


def built(batch: Batch, device: str, builder: Any = None, replay: bool = True, **changes: Any) -> tuple[Any, Any]:
    """What `build` gives, and the builder."""
    room = batch.num_tokens + 9
    builder = builder or fill(Builder(), batch, room, device=device)
    cam = batch_of(CommonAttentionMetadata, batch, device, **changes)
    start = torch.from_numpy(batch.replay_start.copy()).to(device) if replay else None
    return build(builder, 0, cam, False, start, METADATA), builder


def hold(batch: Batch, got: Any, builder: Any) -> None:
    """Every field is what the batch and the oracle say."""
    T, result = batch.num_tokens, vectorised.decode_meta(batch)
    dense = builder.decode_swa_indices_noncausal if batch.noncausal else builder.decode_swa_indices
    expected: dict[str, Any] = {
        "block_table": batch.block_table,
        "slot_mapping": batch.slot_mapping,
        "seq_lens": batch.seq_lens,
        "query_start_loc": batch.query_start_loc,
        "query_start_loc_cpu": batch.query_start_loc,
        "is_valid_token": result.is_valid,
        "token_to_req_indices": batch.token_to_req[:T],
        "decode_swa_indices": result.indices[:, None],
        "decode_swa_lens": result.lens,
        "decode_swa_ragged_indptr": result.indptr,
        "block_size": batch.block_size,
        "decode_swa_width": batch.width,
        "num_decodes": batch.num_reqs,
        "num_decode_tokens": T,
        "num_prefills": 0,
        "num_prefill_tokens": 0,
        "max_decode_query_len": int(np.diff(batch.query_start_loc).max()),
    }
    for name, wanted in expected.items():
        found = getattr(got, name)
        assert np.array_equal(found.cpu() if isinstance(found, torch.Tensor) else found, wanted), name
    ragged = got.decode_swa_ragged_indices.cpu().numpy()
    assert len(ragged) == max(1, T * batch.width)
    assert np.array_equal(ragged[: len(result.ragged)], result.ragged)
    assert not builder.decode_swa_lens[T:].any()
    for name, buffer in {  # views of what a captured graph reads
        "is_valid_token": builder.is_valid_token,
        "decode_swa_indices": dense,
        "decode_swa_lens": builder.decode_swa_lens,
        "decode_swa_ragged_indices": builder.decode_swa_ragged_indices_buffer,
        "decode_swa_ragged_indptr": builder.decode_swa_ragged_indptr_buffer,
    }.items():
        assert getattr(got, name).data_ptr() == buffer.data_ptr(), name
    for item in fields(METADATA):
        if item.name not in expected and item.name not in OF_BUFFERS:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            assert getattr(got, item.name) == default, item.name


OF_BUFFERS = {"decode_swa_ragged_indices", "replay_start"}


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_random_batches(noncausal: bool, device: str) -> None:
    @settings(max_examples=15)
    @given(cases("serving"))
    def holds(case: Case) -> None:
        batch = in_service(case.batch, noncausal)
        got, builder = built(batch, device)
        hold(batch, got, builder)

    holds()


def in_service(batch: Batch, noncausal: bool) -> Batch:
    """A drawn batch as vLLM would make it: of one form, its arrays no longer than its rows and requests."""
    T, R = batch.num_tokens, batch.num_reqs
    table, replay = batch.block_table[:R], batch.replay_start[:R]
    cut = {"slot_mapping": batch.slot_mapping[:T], "token_to_req": batch.token_to_req[:T], "block_table": table}
    return replace(batch, **cut, replay_start=replay, noncausal=noncausal, width=192 if noncausal else 128)


def test_no_replay_start_is_the_builder_s(device: str) -> None:
    batch = served(4)
    got, builder = built(batch, device, replay=False)
    hold(batch, got, builder)
    assert got.replay_start is builder.no_replay_start


def test_the_block_s_buffer_is_made_by_the_first_batch_that_needs_it(device: str) -> None:
    batch = served(5, noncausal=True)
    _, builder = built(replace(batch, noncausal=False, width=128), device)
    assert builder.decode_swa_indices_noncausal is None
    _, builder = built(batch, device, builder)
    made = builder.decode_swa_indices_noncausal
    assert made.shape == (14, 1, 192)
    assert not made[5:].any()
    got, _ = built(batch, device, builder)
    assert builder.decode_swa_indices_noncausal is made
    hold(batch, got, builder)


NOT_TAKEN: dict[str, Callable[[], Any]] = {
    "switched off": lambda: (served(4), {}, {}),
    "a block without DSpark": lambda: (served(4, noncausal=True), {"is_dspark": False}, {}),
    "a prefill": lambda: (served(14, query_len=7), {}, {}),
    "no tokens": lambda: (served(0), {}, {}),
    "too many rows": lambda: (served(6), {}, {"num_actual_tokens": 16385}),
    "slots of other tokens": lambda: (served(4), {}, {"slot_mapping": torch.zeros(6, dtype=torch.int64)}),
    "narrower rows": lambda: (served(4), {"decode_swa_indices": torch.zeros(13, 1, 127, dtype=torch.int32)}, {}),
    "a wider buffer of the block": lambda: (
        served(4, noncausal=True),
        {"decode_swa_indices_noncausal": torch.zeros(13, 1, 256, dtype=torch.int32)},
        {},
    ),
    "a query that does not fit": lambda: (
        served(12, query_len=6, noncausal=True),
        {"noncausal_index_width": 133},
        {},
    ),
}


@pytest.mark.parametrize("why", NOT_TAKEN)
def test_what_is_left_to_vllm(why: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written and nothing launched."""
    if why == "switched off":
        monkeypatch.setenv("SWA_DECODE_META", "0")
    batch, of_builder, of_batch = NOT_TAKEN[why]()
    builder = fill(Builder(), batch, batch.num_tokens + 9, device=device)
    for name, value in of_builder.items():
        setattr(builder, name, value)
    before = builder.decode_swa_lens.clone()
    got, _ = built(batch, device, builder, **of_batch)
    assert got is None
    assert torch.equal(builder.decode_swa_lens, before)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("builder", "decode_swa_lens"),
        ("builder", "build_tile_scheduler"),
        ("cam", "block_table_tensor"),
        ("METADATA", "decode_swa_width"),
        ("METADATA", "new_field"),
        ("split", "split_decodes_and_prefills"),
        ("scheduler", "c1a"),
    ],
)
def test_another_vllm_is_named_before_anything_is_written(
    what: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, kind = served(4), METADATA
    builder, cam = fill(Builder(), batch, 13, device=device), batch_of(CommonAttentionMetadata, batch, device)
    if what == "builder" and name in vars(builder):
        delattr(builder, name)
    elif what == "builder":
        monkeypatch.delattr(Builder, name)
    elif what == "cam":
        delattr(cam, name)
    elif what == "METADATA":
        names = [item.name for item in fields(METADATA) if item.name != name]
        added = [(name, Any)] if name == "new_field" else []
        kind = make_dataclass("Renamed", [*added, *((each, Any, None) for each in names)])
    elif what == "split":
        monkeypatch.delattr(sys.modules["vllm.v1.attention.backends.utils"], name)
    else:
        monkeypatch.setattr(builder, "build_tile_scheduler", lambda tokens: {"swaonly": None, "c4a": None, "c128a": 0})
    lens = builder.decode_swa_lens.clone() if hasattr(builder, "decode_swa_lens") else None
    with pytest.raises(VllmMismatchError) as caught:
        build(builder, 0, cam, False, None, kind)
    assert name in str(caught.value)
    assert "the vLLM here is" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert lens is None or torch.equal(builder.decode_swa_lens, lens)


def test_when_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.delenv("SWA_DECODE_META")
    monkeypatch.setattr(BUILD, "_monokernel", False)
    for there in (False, True):
        monkeypatch.setattr(BUILD, "on_gfx942", lambda there=there: there)
        for flag in (False, True):
            record_monokernel(SimpleNamespace(kernel_config=SimpleNamespace(monokernel=flag)))
            assert enabled() == (there and flag)
    monkeypatch.setenv("SWA_DECODE_META", "yes")
    enabled.cache_clear()
    with pytest.raises(ArgumentError, match="SWA_DECODE_META: expected 0 or 1, got 'yes'"):
        enabled()


# ------------------------------------------------------------------------------------------- the deferred step


class Counted:
    """Launches done by the oracle, and counted."""

    def __init__(self) -> None:
        self.launches: list[int] = []

    def launch(self, *arguments: Any) -> None:
        self.launches.append(1)
        self._write(arguments)

    def launch_step(self, groups: Any, *arguments: Any) -> None:
        self.launches.append(len(groups))
        shared = dict(zip(SHARED, arguments, strict=False))
        for group in groups:
            tensors = {**{name: getattr(group, name) for name in OWN}, **shared}
            num_tokens, window_size, noncausal = arguments[len(SHARED) :]
            self._write((*(tensors[name] for name in TENSORS), num_tokens, window_size, group.block_size, noncausal))

    @staticmethod
    def _write(arguments: Any) -> None:
        tensors = dict(zip(TENSORS, arguments, strict=False))
        num_tokens, window_size, block_size, noncausal = arguments[len(TENSORS) :]
        inputs = {name: tensor.numpy() for name, tensor in tensors.items() if name not in OUTPUTS}
        width = tensors["indices"].shape[-1]
        sizes = {"num_tokens": num_tokens, "window_size": window_size, "block_size": block_size, "width": width}
        result = vectorised.decode_meta(Batch(noncausal=noncausal, **sizes, **inputs)).arrays()
        for name, array in result.items():
            flat = tensors[name].reshape(-1)
            flat[: array.size] = torch.from_numpy(array.copy()).reshape(-1)
        tensors["lens"][num_tokens:] = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(DEFERRED, "launch", made.launch)
    monkeypatch.setattr(DEFERRED, "launch_step", made.launch_step)
    return made


class Step:
    """The groups of a step: a builder and a batch for each; what they share is shared."""

    def __init__(
        self, count: int, rows: int, noncausal: bool, seed: int, replaying: int = 0, device: str = "cpu"
    ) -> None:
        rng = np.random.default_rng(seed)
        columns = 40
        first = served(rows, query_len=1 + seed % 3, seed=seed, noncausal=noncausal)
        first = replace(first, seq_lens=first.seq_lens % (columns * 64) + 6, block_table=first.block_table[:, :columns])
        self.batches = [
            replace(
                first,
                block_size=(64, 128)[n % 2],
                block_table=rng.permutation(first.num_reqs * columns).reshape(first.num_reqs, columns),
                replay_start=first.seq_lens // 2 if n < replaying else np.zeros_like(first.replay_start),
            )
            for n in range(count)
        ]
        self.builders = [fill(Builder(), batch, rows + 5, device=device) for batch in self.batches]
        shared = batch_of(CommonAttentionMetadata, first, device)
        self.cams = []
        for batch in self.batches:
            cam = batch_of(CommonAttentionMetadata, batch, device)
            for name in ("query_start_loc", "seq_lens", "_token_to_req_indices_cache"):
                setattr(cam, name, getattr(shared, name))
            self.cams.append(cam)
        start = torch.from_numpy(self.batches[0].replay_start.copy()).to(device)
        self.starts = [start if n < replaying else None for n in range(count)]

    def build(self, n: int) -> Any:
        return build(self.builders[n], 0, self.cams[n], False, self.starts[n], METADATA)

    def hold(self, n: int, got: Any) -> None:
        hold(self.batches[n], got, self.builders[n])


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_eight_builds_are_one_launch(noncausal: bool, counted: Counted) -> None:
    step = Step(8, 6, noncausal, 1)
    with deferred_step():
        found = [step.build(n) for n in range(8)]
        assert counted.launches == []
    assert counted.launches == [8]
    for n, got in enumerate(found):
        step.hold(n, got)
    step.hold(3, step.build(3))  # outside a step, at once
    assert counted.launches == [8, 1]


def test_the_kernel_itself_launches_a_step(device: str) -> None:
    step = Step(3, 4, False, 2, replaying=1, device=device)
    with deferred_step():
        found = [step.build(n) for n in range(3)]
    for n, got in enumerate(found):
        step.hold(n, got)


def test_groups_that_replay_and_those_that_do_not_are_two_launches(counted: Counted) -> None:
    step = Step(8, 5, False, 3, replaying=3)
    with deferred_step():
        found = [step.build(n) for n in (7, 0, 4, 1, 6, 2, 5, 3)]
    assert sorted(counted.launches) == [3, 5]
    for n, got in zip((7, 0, 4, 1, 6, 2, 5, 3), found, strict=True):
        step.hold(n, got)


def test_a_step_that_is_broken_off_is_launched(counted: Counted) -> None:
    step = Step(8, 5, True, 4)
    found: list[Any] = []

    def breaks() -> None:
        with deferred_step():
            found.extend(step.build(n) for n in range(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breaks()
    assert counted.launches == [3]
    for n, got in enumerate(found):
        step.hold(n, got)
    step.hold(5, step.build(5))  # and the next build waits for no one
    assert counted.launches == [3, 1]


def test_a_build_of_the_next_step_flushes_the_one_before(counted: Counted) -> None:
    """The same buffers twice in one step: the second is of another batch, and must come last."""
    step, other = Step(2, 5, False, 5), Step(2, 5, False, 6)
    other.builders = step.builders
    with deferred_step():
        step.build(0)
        found = [other.build(n) for n in range(2)]
    assert counted.launches == [1, 2]
    for n, got in enumerate(found):
        other.hold(n, got)


def test_one_build_that_cannot_be_launched_keeps_no_other_from_it(device: str) -> None:
    step = Step(3, 4, False, 7, device=device)
    step.builders[1].decode_swa_lens = step.builders[1].decode_swa_lens[:2]
    found: list[Any] = []

    def builds() -> None:
        with deferred_step():
            found.extend(step.build(n) for n in range(3))

    with pytest.raises(ArgumentError, match="lens"):
        builds()
    for n in (0, 2):
        step.hold(n, found[n])


def test_steps_of_other_threads_are_their_own(counted: Counted) -> None:
    from threading import Thread

    step = Step(2, 4, False, 8)
    with deferred_step():
        step.build(0)
        thread = Thread(target=lambda: step.build(1))
        thread.start()
        thread.join()
        assert counted.launches == [1]
    assert counted.launches == [1, 1]


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_random_steps_write_what_single_builds_write(
    noncausal: bool, counted: Counted, request: pytest.FixtureRequest
) -> None:
    random_steps(5000 if request.config.getoption("--all-faults") else 100, noncausal, "cpu")


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_random_steps_of_the_kernel_itself(
    noncausal: bool, device: str, backend: str, request: pytest.FixtureRequest
) -> None:
    random_steps(5000 if backend == "gpu" and request.config.getoption("--all-faults") else 4, noncausal, device)


def random_steps(count: int, noncausal: bool, device: str) -> None:
    """Random orders, missing groups, steps broken off and steps within steps, on the same buffers over and over."""
    rng = random.Random(noncausal)
    steps = [Step(8, 1 + seed, noncausal, seed, replaying=seed % 3, device=device) for seed in range(6)]
    for step in steps:
        step.builders = [fill(Builder(), batch, 20, device=device) for batch in steps[0].batches]
        for builder, batch in zip(step.builders, step.batches, strict=True):
            builder.block_size = batch.block_size
    singles = [
        [one.tolist() for one in outputs(step, n)] for step in steps for n in range(8) if step.build(n) is not None
    ]
    for _ in range(count):
        index = rng.randrange(len(steps))
        step = steps[index]
        order = rng.sample(range(8), rng.randint(1, 8))
        for builder in step.builders:
            builder.decode_swa_lens.fill_(7)
        broken = rng.random() < 0.2
        with pytest.raises(ZeroDivisionError) if broken else nullcontext(), deferred_step():
            for n in order:
                with deferred_step() if rng.random() < 0.1 else nullcontext():
                    step.build(n)
            if broken:
                raise ZeroDivisionError
        for n in order:
            assert [one.tolist() for one in outputs(step, n)] == singles[index * 8 + n]


def outputs(step: Step, n: int) -> list[Any]:
    """All that a build of the group may write, as far as it is said what that is."""
    builder, rows = step.builders[n], step.batches[n].num_tokens
    noncausal = step.batches[n].noncausal
    dense = builder.decode_swa_indices_noncausal if noncausal else builder.decode_swa_indices
    indptr = builder.decode_swa_ragged_indptr_buffer[: rows + 1]
    ragged = builder.decode_swa_ragged_indices_buffer[: int(indptr[-1])]
    return [builder.is_valid_token[:rows], dense[:rows], builder.decode_swa_lens, indptr, ragged]
