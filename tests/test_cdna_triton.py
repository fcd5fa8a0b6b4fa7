"""Small Triton kernels, compiled for CDNA GPUs and emulated, give what NumPy gives.

They run in a process of their own, one an architecture: emulation replaces Triton's launcher, and the rest of the
suite may run under Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

EDGES32 = (1, 2, 3, 5, 7, 10, 641, 65535, 65536, 16777217, 2**31 - 1, -1, -2, -3, -7, -(2**31), -(2**31) + 1)
EDGES64 = (1, 3, 10, 2**32 - 1, 2**32, 2**32 + 1, 2**62 + 3, 2**63 - 1, -1, -7, -(2**32), -(2**63), -(2**63) + 1)
OFFS = (-1, 0, 1, None)


@triton.jit
def reduce_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    v = tl.load(x + at)
    tl.store(out + at, tl.cumsum(v, 0))
    tl.store(out + N + at, tl.sum(v, 0) + at)
    tl.store(out + 2 * N + at, tl.max(v, 0) + at * 0)
    tl.store(out + 3 * N + at, tl.min(v, 0) + at * 0)


@triton.jit
def divide_kernel(x, y, out, n, N: tl.constexpr, UNSIGNED: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    live = at < n
    a = tl.load(x + at, live, other=0)
    b = tl.load(y + at, live, other=1)
    if UNSIGNED == 32:
        a, b = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
    if UNSIGNED == 64:
        a, b = a.to(tl.uint64, bitcast=True), b.to(tl.uint64, bitcast=True)
    tl.store(out + at, a // b, live)
    tl.store(out + n + at, a % b, live)


@triton.jit
def scalar_divide_kernel(out, a, b, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.where(at % 2 == 0, a // b, a % b))


@triton.jit
def bits_kernel(x, y, out, n, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    live = at < n
    a = tl.load(x + at, live, other=0)
    shift = tl.load(y + at, live, other=0)
    tl.store(out + at, a << shift, live)
    tl.store(out + n + at, a >> shift, live)
    tl.store(out + 2 * n + at, tl.where(a > shift, a ^ shift, -a), live)


@triton.jit
def rows_kernel(x, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    live = (r < rows) & (c < columns)
    v = tl.load(x + r * stride + c, live, other=0)
    tl.store(out + r * columns + c, v + tl.sum(v, 1)[:, None] - tl.max(v, 0)[None, :], live)


@triton.jit
def loop_kernel(x, out, trips):
    total = tl.full((), 0, tl.int64)
    n = tl.program_id(0)
    while n < trips:
        total += tl.load(x + n).to(tl.int64) * (n + 1)
        n += tl.num_programs(0)
    tl.store(out + tl.program_id(0), total)


@triton.jit
def atomic_kernel(counts, slots, n, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.atomic_add(counts + at % 8, 1, at < n)
    tl.atomic_xchg(slots + at, at, at < n)
    tl.atomic_cas(counts + 8 + tl.program_id(0), 5, 7)


def _numbers(edges: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """Every pair of edges, and as many of any numbers."""
    draw = np.random.default_rng(3)
    bits = 8 * np.dtype(dtype).itemsize
    known = np.array([n % 2**bits for n in (0, *edges)], np.uint64).astype(dtype)
    any_ = draw.integers(0, 2**64, 2000, np.uint64, endpoint=False) >> draw.integers(0, bits, 2000, np.uint64)
    a = np.concatenate([np.repeat(known, len(known) - 1), any_[:1000].astype(dtype)])
    b = np.concatenate([np.tile(known[1:], len(known)), any_[1000:].astype(dtype)])
    b[b == 0] = 1
    if np.dtype(dtype).kind == "i":  # the one quotient that does not fit
        b[(a == np.iinfo(dtype).min) & (b == -1)] = 1
    return a, b


def _quotients(a: Any, b: Any) -> tuple[Any, Any]:
    """Of C: towards 0."""
    with np.errstate(all="ignore"):
        rest = np.fmod(a, b)
        return (a - rest) // b, rest


def _run(emulator: Any, few: bool) -> Iterator[tuple[str, Any, Any]]:
    """What was run, what it gave, and what NumPy gives."""
    draw = np.random.default_rng(1)
    tensor: Callable[[Any], Any] = torch.from_numpy
    for dtype, warps in ((np.int32, 1), (np.int32, 4), (np.int64, 2), (np.int32, 8))[: 2 if few else 4]:
        n = 512
        x = draw.integers(-(2**31), 2**31 - 1, n).astype(dtype)
        out = torch.zeros(4 * n, dtype=tensor(x).dtype)
        reduce_kernel[(1,)](tensor(x), out, n, num_warps=warps)
        zero = np.zeros(n, dtype)
        ramp = np.arange(n, dtype=dtype)
        expected = [x.cumsum(dtype=dtype), x.sum(dtype=dtype) + ramp, zero + x.max(), zero + x.min()]
        yield f"reductions of {np.dtype(dtype)}, {warps} warps", out, np.concatenate(expected)
    for dtype, off in [(d, o) for d in (np.int32, np.uint32, np.int64, np.uint64)[: 2 if few else 4] for o in OFFS]:
        a, b = _numbers(EDGES32 if np.dtype(dtype).itemsize == 4 else EDGES64, dtype)
        kind = f"i{a.itemsize}"
        out = torch.zeros(2 * len(a), dtype=tensor(a.view(kind)).dtype)
        unsigned = 8 * a.itemsize if np.dtype(dtype).kind == "u" else 0
        emulator.reciprocal_off = off
        divide_kernel[(-(-len(a) // 512),)](tensor(a.view(kind)), tensor(b.view(kind)), out, len(a), 512, unsigned)
        yield f"{np.dtype(dtype)} quotients, reciprocals off by {off}", out, np.concatenate(_quotients(a, b)).view(kind)
    emulator.reciprocal_off = None
    for a, b in ((2**31 - 1, 7), (-(2**31), 641), (-7, 3), (123456789, -10), (2**40 + 5, 12345), (-(2**62), 2**33 + 1)):
        out = torch.zeros(128, dtype=torch.int64)
        scalar_divide_kernel[(1,)](out, a, b, 128)
        quotient, rest = (int(each[0]) for each in _quotients(np.array([a]), np.array([b])))
        yield f"{a} by {b}", out, np.array([quotient, rest] * 64)
    for dtype in (np.int32, np.int64)[: 1 if few else 2]:
        bits = 8 * np.dtype(dtype).itemsize
        a, _ = _numbers(EDGES32, dtype)
        shift = (np.arange(len(a)) % bits).astype(dtype)
        out = torch.zeros(3 * len(a), dtype=tensor(a).dtype)
        bits_kernel[(-(-len(a) // 256),)](tensor(a), tensor(shift), out, len(a), 256)
        yield (
            f"shifts of {np.dtype(dtype)}",
            out,
            np.concatenate([a << shift, a >> shift, np.where(a > shift, a ^ shift, -a)]),
        )
    for rows, columns, warps in ((1, 1, 1), (13, 50, 4), (16, 64, 2)):
        whole = draw.integers(-1000, 1000, (16, 70)).astype(np.int32)
        x = whole[:rows, :columns]
        out = torch.zeros(rows * columns, dtype=torch.int32)
        rows_kernel[(1,)](tensor(whole)[:rows, :columns], out, rows, columns, 70, 16, 64, num_warps=warps)
        most = x.max(0) if rows == 16 else np.maximum(x.max(0), 0)
        yield f"{rows} rows of {columns}", out, (x + x.sum(1)[:, None] - most[None]).ravel()
    for trips in (0, 1, 5, 100):
        x = draw.integers(-(2**31), 2**31 - 1, 100).astype(np.int32)
        out = torch.zeros(3, dtype=torch.int64)
        loop_kernel[(3,)](tensor(x), out, trips, num_warps=1)
        terms = x.astype(np.int64)[:trips] * np.arange(1, trips + 1)
        yield f"{trips} trips", out, np.array([terms[n::3].sum() for n in range(3)])
    counts, slots = torch.zeros(12, dtype=torch.int32), torch.full((1000,), -1, dtype=torch.int32)
    counts[8:10] = 5
    atomic_kernel[(4,)](counts, slots, 990, 256, num_warps=2)
    expected = np.array([*np.bincount(np.arange(990) % 8), 7, 7, 0, 0])
    yield "atomics: counts", counts, expected
    yield "atomics: slots", slots, np.where(np.arange(1000) < 990, np.arange(1000), -1)


def _main(arch: str) -> None:
    """Print what differs, as JSON, by what was run."""
    from swa_decode_meta.fuzz.cdna.triton_kernels import install

    emulator = install(arch)
    said: dict[str, str] = {}
    for name, out, expected in _run(emulator, few=arch != "gfx942"):
        got = out.numpy().astype(np.int64)
        wrong = np.flatnonzero(got != expected.astype(np.int64))
        at = int(wrong[0]) if len(wrong) else 0
        said[name] = f"{len(wrong)} differ, at {at} {got[at]} for {expected[at]}" if len(wrong) else ""
    print(json.dumps(said))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx90a"])
def test_small_kernels_give_what_numpy_gives(arch: str) -> None:
    from tests.commands import execute

    done = execute([sys.executable, "-m", "tests.test_cdna_triton", arch], TRITON_INTERPRET="0")
    assert done.code == 0, done.err
    said = json.loads(done.last)
    assert len(said) > 20
    assert not {name: words for name, words in said.items() if words}


if __name__ == "__main__":
    _main(sys.argv[1])
