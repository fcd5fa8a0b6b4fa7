"""launch() on the host: a bad argument is refused before a byte is written, an honest one is accepted."""

from __future__ import annotations

import importlib
import inspect
import mmap
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from swa_decode_meta.kernel import LaunchShape, launch  # noqa: E402
from swa_decode_meta.oracle import plain  # noqa: E402
from swa_decode_meta.spec import (  # noqa: E402
    OUTPUTS,
    TENSORS,
    ArgumentError,
    BackendError,
    Batch,
    SwaDecodeMetaError,
)
from tests.arguments import (  # noqa: E402
    DTYPES,
    POISON,
    SIGNATURE,
    Arguments,
    arguments_for,
    poisoned,
    storage_bytes,
    strided,
)

# `swa_decode_meta.kernel.launch` is the function; the module of that name is found by import alone.
module = importlib.import_module("swa_decode_meta.kernel.launch")
direct = importlib.import_module("swa_decode_meta.kernel.direct")
arguments_module = importlib.import_module("swa_decode_meta.kernel.arguments")

FLAT = tuple(name for name in TENSORS if name not in ("indices", "block_table"))


@pytest.fixture(scope="module")
def device() -> str:
    """Where the kernel can run: a GPU when it is compiled, the CPU when it is interpreted."""
    if module.ON_CPU:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("the kernel runs on a GPU, or on the CPU with TRITON_INTERPRET=1; neither is there")
    return "cuda"


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Fails what would otherwise run for ever."""

    def expire(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def a_batch(**changes: Any) -> Batch:
    """Three requests (of 2, 0 and 1 tokens), a padded token, a hole, and rows that pass over page edges."""
    given: Arguments = {
        "num_tokens": 4,
        "window_size": 5,
        "block_size": 2,
        "width": 5,
        "slot_mapping": [9, 8, -1, 7],
        "token_to_req": [0, 0, 44, 2],
        "query_start_loc": [0, 2, 3, 4],
        "seq_lens": [7, 4, 3],
        "block_table": [[5, 9, 4, 8], [1, 2, 3, 4], [6, -1, 2, 0]],
        "replay_start": [2, 0, 0],
    }
    return Batch(**{**given, **changes})


def snapshot(arguments: Arguments) -> dict[str, bytes]:
    """Every byte of every ordinary tensor's memory, read back from the device."""
    real = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta"
    }
    return {name: bytes(storage_bytes(value).cpu().numpy()) for name, value in real.items()}


def refused(arguments: Arguments, *names: str, error: type[SwaDecodeMetaError] = ArgumentError) -> Any:
    """The error of launch(**arguments), after the checks that hold for every refusal."""
    before = snapshot(arguments)
    with deadline(30), pytest.raises(error) as caught:
        launch(**arguments)
    after = snapshot(arguments)
    assert [name for name in before if before[name] != after[name]] == []
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    if isinstance(caught.value, ArgumentError):
        assert caught.value.argument in names
        assert caught.value.argument in message
    return caught.value


def check(batch: Batch, arguments: Arguments, **keywords: Any) -> None:
    """Launch, and compare the outputs with the oracle, the memory around them with what it was."""
    before = snapshot(arguments)
    with deadline(60):
        launch(**arguments, **keywords)
    compare(batch, arguments, before)


def compare(batch: Batch, arguments: Arguments, before: dict[str, bytes]) -> None:
    expected = plain.decode_meta(batch).arrays()
    T, kept = batch.num_tokens, len(expected["ragged"])
    outputs = {name: arguments[name] for name in OUTPUTS}
    outputs["indices"] = outputs["indices"].reshape(outputs["indices"].shape[0], batch.width)
    written = {"is_valid": T, "indices": T, "lens": len(outputs["lens"]), "ragged": kept, "indptr": T + 1}
    expected["lens"] = np.concatenate([expected["lens"], np.zeros(written["lens"] - T, np.int32)])
    for name, wanted in expected.items():
        assert outputs[name][: written[name]].cpu().numpy().tolist() == wanted.tolist(), name
    # All bytes but those of the written elements must have stayed, between and behind the rows too.
    after = snapshot(arguments)
    shared: dict[int, Any] = {}
    for name in OUTPUTS:
        tensor = arguments[name]
        if tensor.numel():
            mask = shared.setdefault(tensor.untyped_storage().data_ptr(), np.ones(len(before[name]), np.bool_))
            size = tensor.element_size()
            bytes_of = np.arange(len(mask)).reshape(-1, size)
            walk = torch.arange(len(mask) // size)
            at = torch.as_strided(walk, tensor.shape, tensor.stride(), tensor.storage_offset())[: written[name]]
            mask[bytes_of[at.numpy().reshape(-1)].reshape(-1)] = False
    for name, old in before.items():
        mask = shared.get(arguments[name].untyped_storage().data_ptr(), np.ones(len(old), np.bool_))
        assert [i for i in np.flatnonzero(mask[: len(old)]) if old[i] != after[name][i]] == [], name


# --------------------------------------------------------------------------------------- refused: each tensor


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    "make",
    [lambda x: None, lambda x: x.tolist(), lambda x: x.cpu().numpy(), lambda x: x.data_ptr(), lambda x: [x]],
    ids=["None", "list", "NumPy array", "address", "list of tensors"],
)
def test_what_is_no_tensor_is_refused(name: str, make: Callable[[Any], Any], device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    arguments[name] = make(arguments[name])
    refused(arguments, name)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64", "uint32"])
def test_a_wrong_dtype_is_refused(name: str, dtype: str, device: str) -> None:
    if dtype == TENSORS[name].dtype:
        assert DTYPES[name] == getattr(torch, dtype)
        return
    arguments = arguments_for(a_batch(), device)
    arguments[name] = arguments[name].to(getattr(torch, dtype))
    assert dtype in str(refused(arguments, name))


@pytest.mark.parametrize("name", TENSORS)
def test_a_sparse_tensor_is_refused(name: str, device: str) -> None:
    """It has no strides and no address: what asks for them raises an error that names no argument."""
    for batch in (a_batch(), a_batch(num_tokens=1, width=1, slot_mapping=[9], token_to_req=[0])):
        arguments = arguments_for(batch, device)
        arguments[name] = arguments[name].to_sparse()
        refused(arguments, name)


@pytest.mark.parametrize("name", FLAT)
def test_an_axis_too_many_or_too_few_is_refused(name: str, device: str) -> None:
    for change in (lambda x: x[None], lambda x: x[:, None], lambda x: x[0]):
        arguments = arguments_for(a_batch(), device)
        arguments[name] = change(arguments[name])
        refused(arguments, name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("indices", ()),
        ("indices", (20,)),
        ("indices", (4, 1, 1, 5)),
        ("indices", (1, 4, 1, 5)),
        ("indices", (4, 2, 5)),
        ("indices", (4, 0, 5)),
        ("indices", (4, 5, 5)),
        ("indices", (1, 4, 5)),
        ("block_table", ()),
        ("block_table", (12,)),
        ("block_table", (3, 1, 4)),
        ("block_table", (3, 4, 1)),
        # Sizes.
        ("indices", (3, 1, 5)),
        ("indices", (3, 5)),
        ("indices", (0, 1, 5)),
        ("indices", (4, 1, 0)),
        ("indices", (4, 0)),
        ("indices", (0, 0)),
        ("is_valid", (3,)),
        ("is_valid", (0,)),
        ("slot_mapping", (3,)),
        ("slot_mapping", (0,)),
        ("token_to_req", (3,)),
        ("token_to_req", (0,)),
        ("lens", (3,)),
        ("lens", (0,)),
        ("ragged", (19,)),
        ("ragged", (0,)),
        ("indptr", (4,)),
        ("indptr", (0,)),
        ("query_start_loc", (3,)),
        ("query_start_loc", (5,)),
        ("query_start_loc", (0,)),
        ("block_table", (2, 4)),
        ("block_table", (0, 4)),
        ("replay_start", (2,)),
        ("replay_start", (0,)),
    ],
)
def test_a_wrong_shape_is_refused(name: str, shape: tuple[int, ...], device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    arguments[name] = poisoned(shape, DTYPES[name], device)
    refused(arguments, name)


@pytest.mark.parametrize("requests", [2, 4, 0])
def test_seq_lens_of_another_number_of_requests_is_refused_with_query_start_loc(requests: int, device: str) -> None:
    """R is the length of seq_lens; query_start_loc has to match it."""
    arguments = arguments_for(a_batch(), device)
    arguments["seq_lens"] = poisoned((requests,), torch.int32, device)
    refused(arguments, "query_start_loc")


@pytest.mark.parametrize("name", TENSORS)
def test_a_last_axis_that_is_not_contiguous_is_refused(name: str, device: str) -> None:
    """The kernel walks the last axis by ones: another stride would read and write between the elements."""
    arguments = arguments_for(a_batch(), device)
    given = arguments[name]
    wide = poisoned((*given.shape[:-1], 2 * given.shape[-1]), given.dtype, device)
    wide[..., ::2] = given
    arguments[name] = wide[..., ::2]
    assert "stride" in refused(arguments, name).expected


@pytest.mark.parametrize("name", TENSORS)
def test_a_last_axis_that_repeats_one_element_is_refused(name: str, device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    arguments[name] = arguments[name][..., :1].expand(arguments[name].shape)
    refused(arguments, name)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((4, 1, 5), (0, 0, 1)),
        ((4, 5), (0, 1)),
        ((4, 1, 5), (4, 4, 1)),
        ((4, 5), (1, 1)),
        ((4, 5), (1, 4)),
        ((4, 1, 5), (1, 1, 4)),
        ((9, 5), (4, 1)),
    ],
)
def test_rows_of_indices_that_overlap_are_refused(shape: tuple[int, ...], stride: tuple[int, ...], device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    arguments["indices"] = strided(shape, stride, torch.int32, device)
    refused(arguments, "indices")


# --------------------------------------------------------------------------------------- refused: each scalar


@pytest.mark.parametrize("name", ["num_tokens", "window_size", "block_size"])
@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        np.True_,
        1.0,
        4.0,
        np.float32(4),
        "4",
        None,
        [4],
        (4,),
        4 + 0j,
        -1,
        -(2**63),
        -(2**70),
        b"4",
    ],
    ids=repr,
)
def test_a_scalar_that_is_no_integer_or_negative_is_refused(name: str, value: Any, device: str) -> None:
    refused({**arguments_for(a_batch(), device), name: value}, name)


@pytest.mark.parametrize("name", ["window_size", "block_size"])
def test_a_window_or_page_of_0_positions_is_refused(name: str, device: str) -> None:
    refused({**arguments_for(a_batch(), device), name: 0}, name)


@pytest.mark.parametrize("name", ["num_tokens", "window_size", "block_size", "noncausal"])
def test_a_tensor_as_a_scalar_is_refused(name: str, device: str) -> None:
    """On a GPU its value has to be fetched, which waits for the device: launch() promises not to."""
    for value in (
        torch.tensor(4, device=device),
        torch.tensor([4], device=device),
        torch.tensor(True, device=device),
    ):
        refused({**arguments_for(a_batch(), device), name: value}, name)


@pytest.mark.parametrize("name", ["num_tokens", "window_size", "block_size", "noncausal"])
@pytest.mark.parametrize(
    "value",
    [np.zeros((3, 3), np.int64), "one\ntwo", [[1]] * 10_000, -(10**5000)],
    ids=["matrix", "two lines", "long list", "5000 digits"],
)
def test_the_refusal_of_a_monstrous_scalar_is_one_short_line(name: str, value: Any, device: str) -> None:
    refused({**arguments_for(a_batch(), device), name: value}, name)


@pytest.mark.parametrize("value", [0, 1, None, "no", "", 1.0, [], [True], np.int32(1)], ids=repr)
def test_noncausal_that_is_no_bool_is_refused(value: Any, device: str) -> None:
    refused({**arguments_for(a_batch(), device), "noncausal": value}, "noncausal")


@pytest.mark.parametrize("value", [5, 6, 2**20, 2**28])
def test_more_tokens_than_the_tensors_have_are_refused(value: int, device: str) -> None:
    refused({**arguments_for(a_batch(), device), "num_tokens": value}, *TENSORS)


@pytest.mark.parametrize(
    "value", [2**31 // 5 + 1, 2**31, 2**40, 2**63, 2**70, 10**5000], ids=lambda n: f"{n.bit_length()} bits"
)
def test_more_tokens_than_indptr_can_count_are_refused(value: int, device: str) -> None:
    refused({**arguments_for(a_batch(), device), "num_tokens": value}, "num_tokens")


@pytest.mark.parametrize("absent", ["block_table", "num_tokens", "window_size"])
def test_a_missing_argument_is_a_type_error(absent: str, device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    before = snapshot(arguments)
    del arguments[absent]
    with pytest.raises(TypeError, match=absent):
        launch(**arguments)
    assert snapshot(arguments) == {name: old for name, old in before.items() if name != absent}


# ------------------------------------------------------------------------------------ refused: where they lie


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_on_another_device_is_refused(name: str, device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    arguments[name] = arguments[name].to("meta")
    # The first tensor says which device it is, so that the second is the odd one out.
    error = refused(arguments, "is_valid" if name == "slot_mapping" else name)
    assert device in str(error)
    assert "meta" in str(error)


def test_tensors_on_a_device_without_kernels_are_refused(device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    arguments |= {name: arguments[name].to("meta") for name in TENSORS}
    assert "meta" in str(refused(arguments, error=BackendError))


def test_tensors_on_the_cpu_are_refused_by_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments_module, "ON_CPU", False)
    assert "TRITON_INTERPRET" in str(refused(arguments_for(a_batch(), "cpu"), error=BackendError))


def test_a_device_error_is_told_before_a_shape_error(device: str) -> None:
    """What cannot run at all is the first thing to know; and shapes of another device say nothing."""
    arguments = arguments_for(a_batch(), device)
    arguments |= {name: arguments[name].to("meta")[:0] for name in TENSORS}
    refused(arguments, error=BackendError)


def overlapping(first: Any, second: Any) -> tuple[Any, Any]:
    """Copies of two contiguous tensors in one memory: where the first ends, the second has begun."""
    size, other = first.numel() * first.element_size(), second.numel() * second.element_size()
    start = (size - 1) // 8 * 8
    memory = poisoned((start + max(size - start, other) + 8,), torch.uint8, first.device)
    views = []
    for tensor, begin, length in ((first, 0, size), (second, start, other)):
        view = memory[begin : begin + length].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        views.append(view)
    return views[0], views[1]


OVERLAPS = [pair for pair in combinations(TENSORS, 2) if set(pair) & set(OUTPUTS)]


@pytest.mark.parametrize(("one", "other"), OVERLAPS)
@pytest.mark.parametrize("reverse", [False, True])
def test_an_output_that_overlaps_another_tensor_is_refused(one: str, other: str, reverse: bool, device: str) -> None:
    """One program would overwrite what another has yet to read, and the outcome would hang on their order."""
    first, second = (other, one) if reverse else (one, other)
    arguments = arguments_for(a_batch(), device)
    arguments[first], arguments[second] = overlapping(arguments[first], arguments[second])
    error = refused(arguments, *{one, other} & set(OUTPUTS))
    assert one in str(error)
    assert other in str(error)


@pytest.mark.parametrize("other", ["lens", "indptr", "ragged", "seq_lens", "token_to_req", "query_start_loc"])
@pytest.mark.parametrize("start", [0, 3, 9, 16, 22], ids=lambda i: f"at {i}")
def test_a_tensor_within_the_rows_of_strided_indices_is_refused(other: str, start: int, device: str) -> None:
    """Rows 5 wide every 9 elements, and another tensor that reaches into one of them: gaps are no excuse."""
    arguments = arguments_for(a_batch(), device)
    memory = poisoned((9 * 4 + 30,), torch.int32, device)
    arguments["indices"] = torch.as_strided(memory, (4, 1, 5), (9, 9, 1))
    given = arguments[other]
    arguments[other] = memory[start : start + given.numel()]
    arguments[other].copy_(given)
    refused(arguments, "indices", other)


def test_one_row_of_indices_with_any_stride_that_overlaps_is_refused(device: str) -> None:
    """The stride of a single row says nothing, so that it does not count as a gap."""
    arguments = arguments_for(a_batch(num_tokens=1), device)
    memory = poisoned((40,), torch.int32, device)
    arguments["indices"] = torch.as_strided(memory, (1, 1, 5), (17, 17, 1))
    arguments["ragged"] = memory[4:24]
    refused(arguments, "indices", "ragged")


def test_strided_indices_that_overlap_a_strided_block_table_are_refused(device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    memory = poisoned((80,), torch.int32, device)
    arguments["indices"] = torch.as_strided(memory, (4, 1, 5), (9, 9, 1))
    arguments["block_table"] = torch.as_strided(memory, (3, 4), (9, 1), 6)  # one element into the next row
    arguments["block_table"].copy_(torch.from_numpy(a_batch().block_table.copy()))
    refused(arguments, "indices")


@pytest.mark.parametrize("name", ["lens", "indices", "ragged", "indptr"])
def test_an_expanded_block_table_that_overlaps_an_output_is_refused(name: str, device: str) -> None:
    arguments = arguments_for(a_batch(), device)
    arguments["block_table"] = arguments[name].reshape(-1)[:4].expand(3, 4)
    refused(arguments, name)


# ----------------------------------------------------------------------------------------- refused: the shape


@pytest.mark.parametrize(
    "shape",
    [(1, 32, 4, 128, 1024, 1), {"rows_per_program": 1}, 1, "shape", LaunchShape],
    ids=["tuple", "dict", "int", "str", "class"],
)
def test_a_shape_that_is_no_launch_shape_is_refused(shape: Any, device: str) -> None:
    refused({**arguments_for(a_batch(), device), "shape": shape}, "shape")


FIELDS = tuple(inspect.signature(LaunchShape).parameters)


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "look_back"])
@pytest.mark.parametrize("value", [0, -1, -2, 3, 6, 2**20 + 1, True, 1.0, "2", None, [2]], ids=repr)
def test_a_launch_shape_that_is_no_power_of_two_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        LaunchShape(**{field: value})
    assert caught.value.argument == f"shape.{field}"
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_look_back_is_yes_or_no(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"shape.look_back: expected a bool"):
        LaunchShape(look_back=value)


# --------------------------------------------------------------------------------------------------- accepted


def test_the_signature_is_that_of_vllm_and_the_shape_is_by_keyword_only() -> None:
    parameters = inspect.signature(launch).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(SIGNATURE)
    assert parameters["noncausal"].default is False
    assert [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == ["shape"]


@pytest.mark.parametrize("noncausal", [False, True])
@pytest.mark.parametrize("named", [0, 1, 4, 15])
def test_a_call_by_position_gives_the_oracle_s_result(noncausal: bool, named: int, device: str) -> None:
    batch = a_batch(noncausal=noncausal, width=8)
    arguments = arguments_for(batch, device)
    before = snapshot(arguments)
    by_position, by_name = SIGNATURE[: 15 - named], SIGNATURE[15 - named :]
    launch(*(arguments[name] for name in by_position), **{name: arguments[name] for name in by_name})
    compare(batch, arguments, before)


def test_noncausal_is_false_when_it_is_left_out(device: str) -> None:
    batch = a_batch()
    arguments = arguments_for(batch, device)
    del arguments["noncausal"]
    check(batch, arguments)


def test_nothing_is_returned(device: str) -> None:
    call: Callable[..., object] = launch
    assert call(**arguments_for(a_batch(), device)) is None


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((4, 1, 5), (5, 5, 1)),
        ((4, 5), (5, 1)),
        ((4, 1, 5), (9, 9, 1)),
        ((4, 1, 5), (9, 0, 1)),
        ((4, 1, 5), (9, 1, 1)),
        ((4, 1, 5), (5, 1234567, 1)),
        ((4, 5), (6, 1)),
        ((4, 5), (1000, 1)),
        ((7, 1, 5), (8, 8, 1)),
        ((7, 5), (5, 1)),
    ],
)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_indices_of_two_or_three_axes_and_any_row_stride_are_accepted(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, device: str
) -> None:
    batch = a_batch()
    memory = poisoned((offset + stride[0] * shape[0] + 4,), torch.int32, device)
    indices = torch.as_strided(memory, shape, stride, offset)
    check(batch, {**arguments_for(batch, device), "indices": indices})


@pytest.mark.parametrize("stride", [(1, 1), (0, 1), (1_000_000, 1), (1, 5)])
def test_one_row_of_indices_may_have_any_strides(stride: tuple[int, int], device: str) -> None:
    """A size of 1 makes its stride meaningless; PyTorch itself gives such strides to slices."""
    batch = a_batch(num_tokens=1, width=1)
    indices = torch.as_strided(poisoned((1,), torch.int32, device), (1, 1), stride)
    check(batch, {**arguments_for(batch, device), "indices": indices})


@pytest.mark.parametrize("stride", [(1, 1), (1, 7), (3, 5), (0, 3), (0, 0), (4, 0)])
def test_a_table_of_one_column_may_have_any_stride_along_it(stride: tuple[int, int], device: str) -> None:
    pages = [5, 5, 5] if stride[0] == 0 else [5, 0, -1]
    batch = a_batch(block_table=[[page] for page in pages], block_size=8)
    table = strided((3, 1), stride, torch.int32, device)
    for r in range(3):
        table[r, 0] = pages[r]
    check(batch, {**arguments_for(batch, device), "block_table": table})


def far_apart(size: int, device: str) -> Any:
    """int32 memory of which only what is touched takes room on a CPU."""
    if device == "cuda":
        return torch.empty(size, dtype=torch.int32, device=device)
    no_reserve = 0x4000  # MAP_NORESERVE, which mmap does not name everywhere
    pages = mmap.mmap(-1, size * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.from_numpy(np.frombuffer(pages, np.int32))


def test_rows_more_than_two_to_the_31_elements_apart_are_accepted(device: str) -> None:
    batch = a_batch(num_tokens=3)
    arguments = arguments_for(batch, device)
    step = 2**31 + 3
    rows = far_apart(2 * step + 5, device).as_strided((3, 1, 5), (step, step, 1))
    arguments["indices"] = rows
    launch(**arguments)
    expected = plain.decode_meta(batch).indices.tolist()
    assert rows.reshape(3, 5).tolist() == expected
    table = far_apart(2 * step + 4, device).as_strided((3, 4), (step, 1))
    table.copy_(arguments["block_table"])
    arguments |= {"block_table": table, "indices": poisoned((3, 1, 5), torch.int32, device)}
    launch(**arguments)
    assert arguments["indices"].reshape(3, 5).tolist() == expected


@pytest.mark.parametrize("stride", [4, 5, 8, 64, 1000])
def test_a_table_of_any_row_stride_is_accepted(stride: int, device: str) -> None:
    batch = a_batch()
    table = strided((3, 4), (stride, 1), torch.int32, device)
    table.copy_(torch.from_numpy(batch.block_table.copy()))
    check(batch, {**arguments_for(batch, device), "block_table": table})


def test_a_table_of_one_row_repeated_is_accepted(device: str) -> None:
    batch = a_batch(block_table=[[5, 9, 4, 8]] * 3)
    arguments = arguments_for(batch, device)
    arguments["block_table"] = arguments["block_table"][:1].expand(3, 4)
    assert arguments["block_table"].stride() == (0, 1)
    check(batch, arguments)


def test_a_table_whose_rows_overlap_is_accepted(device: str) -> None:
    """It is only read."""
    batch = a_batch(block_table=[[5, 9, 4, 8], [9, 4, 8, 1], [4, 8, 1, 2]])
    table = torch.as_strided(torch.tensor([5, 9, 4, 8, 1, 2], dtype=torch.int32, device=device), (3, 4), (1, 1))
    check(batch, {**arguments_for(batch, device), "block_table": table})


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("noncausal", [False, True])
def test_a_table_without_columns_is_accepted_and_has_no_slots(rows: int, noncausal: bool, device: str) -> None:
    batch = a_batch(block_table=np.zeros((rows, 0), np.int32), noncausal=noncausal)
    arguments = arguments_for(batch, device)
    assert arguments["block_table"].shape == (rows, 0)
    check(batch, arguments)
    assert arguments["indptr"].tolist() == [0] * 5


EMPTY = {"query_start_loc": [0], "seq_lens": [], "replay_start": []}


@pytest.mark.parametrize("columns", [0, 4])
@pytest.mark.parametrize("noncausal", [False, True])
@pytest.mark.parametrize("tokens", [0, 4])
def test_a_batch_without_requests_is_accepted(columns: int, noncausal: bool, tokens: int, device: str) -> None:
    table = np.zeros((0, columns), np.int32)
    batch = a_batch(num_tokens=tokens, block_table=table, noncausal=noncausal, **EMPTY)
    check(batch, arguments_for(batch, device))


@pytest.mark.parametrize("noncausal", [False, True])
@pytest.mark.parametrize("room", [0, 3])
def test_a_batch_without_tokens_writes_indptr_and_the_tail_of_lens(noncausal: bool, room: int, device: str) -> None:
    batch = a_batch(num_tokens=0, noncausal=noncausal)
    arguments = arguments_for(batch, device)
    arguments |= {
        "is_valid": poisoned((room,), torch.bool, device),
        "indices": poisoned((room, 1, 5), torch.int32, device),
        "lens": poisoned((room,), torch.int32, device),
        "ragged": poisoned((room,), torch.int32, device),
        "indptr": poisoned((room + 1,), torch.int32, device),
    }
    check(batch, arguments)


def test_a_batch_of_nothing_at_all_is_accepted(device: str) -> None:
    batch = a_batch(num_tokens=0, slot_mapping=[], token_to_req=[], block_table=[], **EMPTY)
    check(batch, arguments_for(batch, device))


@pytest.mark.parametrize("width", [2**20, 2**31 - 1])
@pytest.mark.parametrize("block_size", [1, 128])
def test_a_batch_without_tokens_ends_at_once_however_wide(width: int, block_size: int, device: str) -> None:
    """There is nothing to write, so that nothing may take time in proportion to the width."""
    batch = a_batch(num_tokens=0, width=width, block_size=block_size)
    arguments = arguments_for(batch, device)
    before = snapshot(arguments)
    with deadline(5):
        launch(**arguments)
        after = snapshot(arguments)
    assert arguments["indptr"].tolist() == [0]
    assert after | {"indptr": b""} == before | {"indptr": b""}


@pytest.mark.parametrize("noncausal", [False, True])
def test_spare_rows_everywhere_are_accepted_and_left_alone(noncausal: bool, device: str) -> None:
    spare = 7
    batch = a_batch(
        noncausal=noncausal,
        width=8,
        slot_mapping=[9, 8, -1, 7, *[1] * spare],
        token_to_req=[0, 0, 44, 2, *[0] * spare],
        block_table=[[5, 9, 4, 8], [1, 2, 3, 4], [6, -1, 2, 0], *[[3, 3, 3, 3]] * spare],
        replay_start=[2, 0, 0, *[0] * spare],
    )
    arguments = arguments_for(batch, device)
    arguments |= {
        "is_valid": poisoned((4 + spare,), torch.bool, device),
        "indices": poisoned((4 + spare, 1, 8), torch.int32, device),
        "lens": poisoned((4 + spare,), torch.int32, device),
        "ragged": poisoned((32 + spare,), torch.int32, device),
        "indptr": poisoned((5 + spare,), torch.int32, device),
    }
    check(batch, arguments)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64])
def test_numpy_integers_and_bools_are_accepted_as_scalars(kind: Callable[[int], Any], device: str) -> None:
    batch = a_batch()
    arguments = arguments_for(batch, device)
    arguments |= {name: kind(arguments[name]) for name in ("num_tokens", "window_size", "block_size")}
    check(batch, {**arguments, "noncausal": np.False_})


@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**34, 2**34 + 1, 2**40 + 1, 2**63, 2**70])
@pytest.mark.parametrize("name", ["window_size", "block_size"])
@pytest.mark.parametrize("noncausal", [False, True])
def test_a_window_or_page_of_any_size_is_accepted(name: str, value: int, noncausal: bool, device: str) -> None:
    batch = a_batch(**{name: value}, noncausal=noncausal, block_table=[[0, 1], [0, 1], [1, 0]])
    check(batch, arguments_for(batch, device))


def test_interleaved_indices_of_two_groups_in_one_memory_are_both_right(device: str) -> None:
    """Rows of two groups side by side share memory without sharing an element."""
    batches = [a_batch(), a_batch(block_table=[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])]
    memory = poisoned((4, 1, 12), torch.int32, device)
    calls = [arguments_for(batch, device) for batch in batches]
    for i, (batch, arguments) in enumerate(zip(batches, calls, strict=True)):
        arguments["indices"] = memory[:, :, 6 * i : 6 * i + 5]
        check(batch, arguments)
    for i, batch in enumerate(batches):
        assert memory[:, 0, 6 * i : 6 * i + 5].tolist() == plain.decode_meta(batch).indices.tolist()
    assert set(bytes(memory[:, 0, 5::6].contiguous().cpu().numpy())) == {POISON}


def test_indices_interleaved_with_the_block_table_are_accepted(device: str) -> None:
    batch = a_batch()
    memory = poisoned((4, 9), torch.int32, device)
    arguments = arguments_for(batch, device) | {"indices": memory[:, :5], "block_table": memory[:3, 5:]}
    arguments["block_table"].copy_(torch.from_numpy(batch.block_table.copy()))
    check(batch, arguments)


def test_an_output_in_the_gap_between_rows_of_indices_is_accepted(device: str) -> None:
    batch = a_batch()
    memory = poisoned((4, 10), torch.int32, device)
    arguments = arguments_for(batch, device)
    arguments |= {"indices": memory[:, :5], "lens": memory[0, 5:9], "indptr": memory[2, 5:]}
    check(batch, arguments)


def test_tensors_side_by_side_in_one_memory_are_accepted(device: str) -> None:
    """vLLM cuts its buffers out of one allocation; touching is not overlapping."""
    batch = a_batch()
    arguments = arguments_for(batch, device)
    memory = poisoned((200,), torch.int32, device)
    at = 1
    for name in TENSORS:
        if DTYPES[name] == torch.int32:
            given = arguments[name]
            arguments[name] = memory[at : at + given.numel()].view(given.shape)
            arguments[name].copy_(given)
            at += given.numel()
    check(batch, arguments)


def test_inputs_may_share_memory(device: str) -> None:
    """One tensor serves as seq_lens, replay_start and a row of the table: inputs are only read."""
    batch = a_batch(seq_lens=[7, 4, 3], replay_start=[7, 4, 3], block_table=[[7, 4, 3]] * 3)
    arguments = arguments_for(batch, device)
    shared = arguments["seq_lens"]
    check(batch, {**arguments, "replay_start": shared, "block_table": shared[None].expand(3, 3)})


@pytest.mark.parametrize(
    "shape",
    [
        LaunchShape(),
        LaunchShape(1, 1, 1, 1, 1, 1),
        LaunchShape(2, 1, 2, 4, 2, 2),
        LaunchShape(4, 4, 1, 8, 8, 4),
        LaunchShape(16, 16, 16, 16, 16, 8),
        LaunchShape(1, 1, 1, 2, 16, 1, look_back=True),
        LaunchShape(2, 1, 4, 16, 16, 2, look_back=True),
        LaunchShape(1, 2, 8, 4, 16, 1, look_back=True),
    ],
)
@pytest.mark.parametrize("noncausal", [False, True])
def test_no_launch_shape_changes_the_result(shape: LaunchShape, noncausal: bool, device: str) -> None:
    batch = a_batch(noncausal=noncausal, width=7)
    arguments = {**arguments_for(batch, device), "lens": poisoned((9,), torch.int32, device)}
    check(batch, arguments, shape=shape)


# ------------------------------------------------------------------------------------------- what a call does


def counted(monkeypatch: pytest.MonkeyPatch, made: bool) -> list[Any]:
    """Launches, which are counted here, and made or not.

    Counted on the classes, so that a second kernel beside the first would count too: what Triton launches, and what is
    started directly on a GPU.
    """
    launched: list[Any] = []
    kind = type(module.decode_meta_kernel)
    of_grid, starter = kind.__getitem__, direct._starter

    def through_triton(self: Any, grid: Any) -> Any:
        def run(*arguments: Any, **keywords: Any) -> None:
            launched.append(self)
            if made:
                of_grid(self, grid)(*arguments, **keywords)

        return run

    def straight(*arguments: Any) -> Any:
        def start(*counts: int) -> None:
            launched.append(module.decode_meta_kernel)
            if made:
                starter(*arguments)(*counts)

        return start

    monkeypatch.setattr(kind, "__getitem__", through_triton)
    monkeypatch.setattr(direct, "_starter", straight)
    monkeypatch.setattr(module, "_calls", {})
    return launched


@pytest.mark.parametrize("changes", [{}, {"num_tokens": 0}, {"noncausal": True}])
def test_a_call_is_exactly_one_kernel_launch(changes: Arguments, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = counted(monkeypatch, made=True)
    batch = a_batch(**changes)
    check(batch, {**arguments_for(batch, device), "lens": poisoned((5000,), torch.int32, device)})
    assert launched == [module.decode_meta_kernel]


def test_a_refused_call_launches_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = counted(monkeypatch, made=False)
    refused({**arguments_for(a_batch(), device), "window_size": 0}, "window_size")
    assert launched == []
    launch(**arguments_for(a_batch(), device))
    assert len(launched) == 1


class Counting(TorchDispatchMode):  # type: ignore[misc]
    """Notes every operator that torch dispatches, and runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("changes", [{}, {"num_tokens": 0}, {"noncausal": True}, EMPTY | {"block_table": []}])
def test_no_torch_operator_runs_in_a_call(changes: Arguments, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator is a kernel or a copy of its own. The interpreter runs some: the kernel is left out."""
    launched = counted(monkeypatch, made=False)
    arguments = arguments_for(a_batch(**changes), device)
    arguments["indices"] = strided((4, 1, 5), (8, 8, 1), torch.int32, device)
    with Counting() as mode:
        launch(**arguments)
        assert mode.seen == []
        torch.zeros(1)
    assert mode.seen  # the count does count
    assert len(launched) == 1
