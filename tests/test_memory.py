"""What memory holds around a launch: images, canaries, guard pages, bands."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_decode_meta.fuzz.image import Array, Placement, after, before, canary, placements
from swa_decode_meta.fuzz.strategies import cases
from swa_decode_meta.oracle import vectorised
from swa_decode_meta.spec import (
    INPUTS,
    TENSORS,
    BufferLayout,
    Case,
)
from tests.batches import BATCH, CASE, ROOM

# ------------------------------------------------------------------ images


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


@settings(max_examples=100)
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


# ------------------------------------------------------------------ memory


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
