"""Launches that are right, or wrong in one known way: what the judge itself is tested with.

Each is a target by name, `fakes:aborts`, with this folder on PYTHONPATH. `fakes:told` reads before every launch which
of them to be, from the file that SWA_DECODE_META_FAKE names: so one child process serves many.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from swa_decode_meta.oracle import vectorised
from swa_decode_meta.spec import INPUTS, OUTPUTS, Batch

TELLER = "SWA_DECODE_META_FAKE"
MARK = 77
"""What faulty launches write: no canary, and no entry of the tests' batch."""


class Launch(NamedTuple):
    """The arguments of a launch."""

    slot_mapping: torch.Tensor
    is_valid: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor
    ragged: torch.Tensor
    indptr: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    block_table: torch.Tensor
    replay_start: torch.Tensor
    num_tokens: int
    window_size: int
    block_size: int
    noncausal: bool


Fake = Callable[[Launch], object]


def build(x: Launch) -> None:
    """Write what SPEC.md says."""
    T = x.num_tokens
    result = vectorised.decode_meta(
        Batch(
            num_tokens=T,
            window_size=x.window_size,
            block_size=x.block_size,
            width=x.indices.shape[-1],
            noncausal=x.noncausal,
            **{name: getattr(x, name).numpy() for name in INPUTS},
        )
    )
    x.lens[T:] = 0
    for name, values in result.arrays().items():
        tensor = getattr(x, name)[: len(values)]
        tensor.copy_(torch.from_numpy(values).view(tensor.shape))


# -------------------------------------------------- what they do once they are done


def element(tensor: torch.Tensor, offset: int) -> ctypes.c_int32:
    """The int32 that lies `offset` bytes after the last element of a tensor, or before its first; no bound holds."""
    size = tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return ctypes.c_int32.from_address(tensor.data_ptr() + (offset if offset < 0 else (last + 1) * size + offset))


def outside(x: Launch, name: str, offset: int, write: bool) -> None:
    """Touch one element outside a tensor."""
    there = element(getattr(x, name), offset)
    if write:
        there.value = MARK
    else:
        assert isinstance(there.value, int)


def put(x: Launch, name: str, *at: int, value: int = MARK) -> None:
    """Write an element of a tensor."""
    getattr(x, name)[at] = value


def gap(x: Launch) -> None:
    rows = x.indices
    rows.as_strided((1,), (1,), rows.storage_offset() + rows.shape[-1]).fill_(MARK)


def prints() -> None:
    for _ in range(64):
        print("x" * 2**16)
        os.write(2, b"y" * 2**16)
    sys.stdout.flush()


def close_everything() -> None:
    os.closerange(0, 4096)


def scribble() -> None:
    """Two bytes into every socket: less than the length that an answer starts with."""
    for descriptor in range(3, 256):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                os.write(descriptor, b"\0\0")
        except OSError:
            continue


def sleep() -> None:
    time.sleep(3600)


def leave_a_thread() -> None:
    threading.Thread(target=sleep).start()


def abort_later() -> None:
    threading.Timer(0.2, os.abort).start()


def leave_a_process() -> None:
    if os.fork() == 0:
        sleep()


class Unpicklable(Exception):
    def __init__(self, *words: str) -> None:
        super().__init__(*words)
        self.why = lambda: words

    def __reduce__(self) -> NoReturn:
        raise TypeError("not to be pickled")


class Mute(Exception):
    def __str__(self) -> NoReturn:
        raise RuntimeError("no words")


def throw(error: BaseException) -> NoReturn:
    raise error


def then(*steps: Callable[[], object]) -> Fake:
    """After a right build, these."""

    def fake(x: Launch) -> None:
        build(x)
        for step in steps:
            step()

    return fake


def but(step: Callable[..., object], *arguments: int | str, **more: int) -> Fake:
    """After a right build, `step` on its arguments."""

    def fake(x: Launch) -> None:
        build(x)
        step(x, *arguments, **more)

    return fake


def depends(step: Callable[[], object]) -> Fake:
    """Does `step` once the magnitude of the first slot is another than in the tests' batch."""

    def fake(x: Launch) -> None:
        build(x)
        if x.slot_mapping[0] != 43:
            step()
            put(x, "lens", 0)

    return fake


def lens_alone_after_its_end(x: Launch) -> None:
    tail = x.lens[x.num_tokens :].clone()
    build(x)
    x.lens[x.num_tokens :] = tail


def unwritten(x: Launch, name: str) -> None:
    tensor = getattr(x, name)
    if tensor.dtype == torch.bool:  # whose copy need not have the same bytes
        tensor = tensor.view(torch.uint8)
    before = tensor.clone()
    build(x)
    tensor.copy_(before)


def trusts_the_gap(x: Launch) -> None:
    """Takes the element after a row of the table for a page of it."""
    build(x)
    table = x.block_table
    put(x, "lens", 0, value=int(table.as_strided((1,), (1,), table.storage_offset() + table.shape[1])))


FAKES: dict[str, Fake] = {
    "right": build,
    # ends in another way than by returning
    "raises": then(partial(throw, ValueError("first line\nlast: line"))),
    "raises_unpicklable": then(partial(throw, Unpicklable("of its", "own kind"))),
    "raises_mute": then(partial(throw, Mute())),
    "raises_end_of_file": then(partial(throw, EOFError("no more"))),
    "raises_base_exception": then(partial(throw, BaseException("base"))),
    "interrupts": then(partial(throw, KeyboardInterrupt())),
    "exits": then(partial(sys.exit, 3)),
    "exits_at_once": then(partial(os._exit, 0)),
    "exits_with_a_thread": then(leave_a_thread, partial(sys.exit, 3)),
    "dies_with_a_process": then(leave_a_process, os.abort),
    "aborts": then(os.abort),
    "hangs": then(sleep),
    "closes_everything": then(close_everything),
    "closes_everything_and_hangs": then(close_everything, sleep),
    "scribbles": then(scribble),
    # returns, and is right
    "prints": then(prints),
    "leaves_a_thread": then(leave_a_thread),
    "aborts_later": then(abort_later),
    # writes what no clause asks for
    "writes_gap": but(gap),
    "writes_spare_row": but(put, "indices", -1, value=-1),
    "writes_ragged_past_its_end": but(put, "ragged", -1, value=0),
    "writes_indptr_past_its_end": but(put, "indptr", -1),
    "writes_is_valid_past_its_end": but(put, "is_valid", -1, value=0),
    **{f"mutates_{name}": but(put, name, *[0] * (1 + (name == "block_table"))) for name in INPUTS},
    **{f"writes_past_{name}": but(outside, name, 0, True) for name in OUTPUTS},
    **{f"writes_before_{name}": but(outside, name, -4, True) for name in OUTPUTS},
    **{f"reads_past_{name}": but(outside, name, 0, False) for name in INPUTS},
    **{f"reads_before_{name}": but(outside, name, -4, False) for name in INPUTS},
    # depends on what it may not
    "depends": depends(lambda: None),
    "depends_and_raises": depends(partial(throw, ValueError("depends"))),
    "trusts_the_gap": trusts_the_gap,
    # writes something wrong
    "wrong_is_valid": but(put, "is_valid", 1, value=0),
    "wrong_lens": but(put, "lens", 1, value=4),
    "wrong_indices": but(put, "indices", 1, ..., 3),
    "wrong_indptr": but(put, "indptr", 2),
    "wrong_ragged": but(put, "ragged", 5),
    "leaves_lens_after_its_end": lens_alone_after_its_end,
    **{f"leaves_{name}_unwritten": partial(unwritten, name=name) for name in OUTPUTS},
}


def target(fake: Fake) -> Callable[..., None]:
    """A fake with the signature of vLLM's launch."""

    def launch(*arguments: torch.Tensor | int) -> None:
        fake(Launch(*arguments))

    return launch


def _as_told(x: Launch) -> None:
    FAKES[Path(os.environ[TELLER]).read_text()](x)


def __getattr__(name: str) -> Callable[..., None]:
    if name == "told":
        return target(_as_told)
    if name in FAKES:
        return target(FAKES[name])
    raise AttributeError(name)
