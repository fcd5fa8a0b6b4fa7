"""All groups of a step in one launch, and prepared launches: each group gets what `launch` writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from swa_decode_meta.kernel import Group, LaunchShape, launch_step, prepare, prepare_step  # noqa: E402
from swa_decode_meta.spec import OUTPUTS, OWN, SHARED, ArgumentError, Batch  # noqa: E402
from tests.arguments import DTYPES, arguments_for, poisoned  # noqa: E402
from tests.batches import served  # noqa: E402
from tests.test_look_back import same, with_holes  # noqa: E402

pytestmark = pytest.mark.kernel

LOOK_BACK = LaunchShape(2, 4, 4, 64, 1024, 1, look_back=True)


@pytest.fixture(scope="module")
def device(backend: str) -> str:
    return "cuda" if backend == "gpu" else "cpu"


def step_of(rows: int, noncausal: bool, groups: int = 3) -> list[Batch]:
    """A batch for each group, with its own table, slots and page size, and what is shared."""
    first = with_holes(rows, noncausal)
    shared = {name: getattr(first, name) for name in SHARED}
    rng = np.random.default_rng(rows)
    batches = [first]
    for index in range(1, groups):
        block_size = (128, 64, 48)[index % 3]
        table = rng.permutation(first.num_reqs * 40).reshape(-1, 40)[:, : 24 + index]
        slots = np.where(rng.random(rows) < 0.2, -1, np.arange(rows))
        batches.append(replace(first, block_table=table, block_size=block_size, slot_mapping=slots, **shared))
    return batches


def arguments_of(batches: list[Batch], device: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The launch arguments of each group, and those of launch_step over them."""
    each = [arguments_for(batch, device) for batch in batches]
    groups = [Group(**{name: one[name] for name in (*OWN, "block_size")}) for one in each]
    shared = {name: each[0][name] for name in (*SHARED, "num_tokens", "window_size", "noncausal")}
    return each, {"groups": groups, **shared}


@pytest.mark.parametrize("shape", [None, LOOK_BACK], ids=["own", "look_back"])
@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
@pytest.mark.parametrize("rows", [0, 14])
def test_a_step_writes_what_each_group_alone_would(
    rows: int, noncausal: bool, shape: LaunchShape | None, device: str
) -> None:
    batches = step_of(rows, noncausal)
    each, arguments = arguments_of(batches, device)
    for _ in range(2):  # the second time from the table and the state of the first
        launch_step(**arguments, shape=shape)
        for batch, one in zip(batches, each, strict=True):
            same(batch, one)
            for name in OUTPUTS:
                one[name].fill_(True if name == "is_valid" else 77)


def test_groups_may_differ_in_width_and_in_the_tail_of_lens(device: str) -> None:
    batches = [served(5), replace(served(5), width=200), replace(served(5), width=130)]
    each, arguments = arguments_of(batches, device)
    each[1]["lens"] = poisoned((3000,), DTYPES["lens"], device)
    arguments["groups"][1] = replace(arguments["groups"][1], lens=each[1]["lens"])
    launch_step(**arguments)
    for batch, one in zip(batches, each, strict=True):
        same(batch, one)
    assert not each[1]["lens"][5:].any()


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_a_prepared_launch_serves_any_row_and_request_count(noncausal: bool, device: str) -> None:
    """What changes from step to step is in the buffers, and the two counts."""
    whole = with_holes(96, noncausal)
    arguments = arguments_for(whole, device)
    max_num_tokens = arguments.pop("num_tokens")
    prepared = prepare(**arguments, max_num_tokens=max_num_tokens)
    assert (prepared.max_num_tokens, prepared.max_num_reqs) == (96, 16)
    for rows, reqs in ((96, 16), (0, 0), (1, 1), (17, 3), (33, 16), (65, 11), (96, 15)):
        for name in OUTPUTS:
            arguments[name].fill_(True if name == "is_valid" else 77)
        prepared(rows, reqs)
        cut = {"query_start_loc": whole.query_start_loc[: reqs + 1], "seq_lens": whole.seq_lens[:reqs]}
        same(replace(whole, num_tokens=rows, **cut), arguments)
        assert not arguments["lens"][rows:].any()
        assert (arguments["indptr"][rows + 1 :] == 77).all()
    prepared(96)
    same(whole, arguments)


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
def test_a_prepared_step_writes_what_each_group_alone_would(noncausal: bool, device: str) -> None:
    batches = step_of(14, noncausal)
    each, arguments = arguments_of(batches, device)
    prepared = prepare_step(
        **{name: value for name, value in arguments.items() if name != "num_tokens"}, max_num_tokens=14
    )
    for rows in (14, 3, 0):
        prepared(rows)
        for batch, one in zip(batches, each, strict=True):
            same(replace(batch, num_tokens=rows), one)


# ---------------------------------------------------------------------------------------------------- refused


def refused(name: str, device: str, **changes: Any) -> ArgumentError:
    """The error of launch_step, and of prepare_step, with these changes."""
    _, arguments = arguments_of(step_of(5, False), device)
    arguments |= changes
    with pytest.raises(ArgumentError) as caught:
        launch_step(**arguments)
    assert caught.value.argument == name
    assert "\n" not in str(caught.value)
    del arguments["num_tokens"]
    with pytest.raises(ArgumentError) as again:
        prepare_step(**arguments, max_num_tokens=changes.get("num_tokens", 5))
    assert again.value.argument == name.replace("num_tokens", "max_num_tokens")
    return caught.value


@pytest.mark.parametrize("groups", [[], None, 3, {}])
def test_no_groups_are_refused(groups: Any, device: str) -> None:
    refused("groups", device, groups=groups)


def test_what_is_no_group_is_refused_by_its_index(device: str) -> None:
    _, arguments = arguments_of(step_of(5, False), device)
    refused("groups[1]", device, groups=[arguments["groups"][0], {"lens": 3}])


@pytest.mark.parametrize("name", OWN)
def test_a_tensor_of_another_dtype_is_refused_by_group_and_name(name: str, device: str) -> None:
    _, arguments = arguments_of(step_of(5, False), device)
    groups = arguments["groups"]
    groups[2] = replace(groups[2], **{name: getattr(groups[2], name).to(torch.float32)})
    refused(f"groups[2].{name}", device, groups=groups)


@pytest.mark.parametrize("block_size", [0, -1, 1.5, True, None])
def test_a_page_size_is_refused_by_group(block_size: Any, device: str) -> None:
    _, arguments = arguments_of(step_of(5, False), device)
    groups = arguments["groups"]
    groups[1] = replace(groups[1], block_size=block_size)
    refused("groups[1].block_size", device, groups=groups)


def test_a_shared_tensor_is_refused_by_its_own_name(device: str) -> None:
    refused("seq_lens", device, seq_lens=torch.zeros(3, dtype=torch.int64, device=device))


def test_too_many_rows_are_refused(device: str) -> None:
    refused("num_tokens", device, num_tokens=-1)


@pytest.mark.parametrize(("name", "other"), [("lens", "lens"), ("ragged", "block_table"), ("indptr", "indices")])
def test_groups_whose_outputs_share_memory_are_refused(name: str, other: str, device: str) -> None:
    _, arguments = arguments_of(step_of(5, False), device)
    groups = arguments["groups"]
    size = getattr(groups[0], name).numel()
    memory = poisoned((max(size, getattr(groups[2], other).numel()),), torch.int32, device)
    groups[0] = replace(groups[0], **{name: memory[:size]})
    shape = getattr(groups[2], other).shape
    groups[2] = replace(groups[2], **{other: memory[: shape.numel()].view(shape)})
    _, again = arguments_of(step_of(5, False), device)
    with pytest.raises(ArgumentError, match="memory of its own") as caught:
        launch_step(**{**again, "groups": groups})
    assert {f"groups[0].{name}", f"groups[2].{other}"} == set(
        caught.value.got.removeprefix("overlap of ").split(" and ")
    )


@pytest.mark.parametrize("counts", [(6,), (-1,), (1.0,), (True,), (None,), (5, 6), (5, -1), (5, "1")])
def test_counts_outside_what_was_prepared_are_refused(counts: tuple[Any, ...], device: str) -> None:
    arguments = arguments_for(served(5), device)
    prepared = prepare(**{name: value for name, value in arguments.items() if name != "num_tokens"}, max_num_tokens=5)
    with pytest.raises(
        ArgumentError, match=f"num_{'reqs' if len(counts) == 2 else 'tokens'}: expected an integer from"
    ):
        prepared(*counts)
