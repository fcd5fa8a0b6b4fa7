"""Memory of an emulated launch: loads, stores and atomics of every size, by every way of addressing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.test_cdna_instructions import ALL, M32, PARTIAL, execute, lane_on, region, signed

DRAW = random.Random(11)
DATA = np.array([DRAW.getrandbits(8) for _ in range(4096)], np.uint8)
WORDS = {n: [DRAW.getrandbits(32) for _ in range(64)] for n in range(8, 20)}
SIZES = {"ubyte": 1, "sbyte": -1, "ushort": 2, "sshort": -2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
STORES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
LDS_READS = {"u8": 1, "i8": -1, "u16": 2, "i16": -2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
LDS_WRITES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def registers(first: int, size: int) -> str:
    """The VGPRs of so many bytes."""
    count = max(1, abs(size) // 4)
    return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"


def words(raw: bytes, size: int) -> list[int]:
    """What a load of `size` bytes, negative for signed, puts in the registers."""
    if abs(size) < 4:
        value = int.from_bytes(raw, "little")
        return [signed(value, 8 * -size) & M32 if size < 0 else value]
    return [int.from_bytes(raw[n : n + 4], "little") for n in range(0, size, 4)]


def pair(values: Sequence[int], first: int) -> dict[int, list[int]]:
    """64-bit values in a pair of VGPRs."""
    return {first: [each & M32 for each in values], first + 1: [each >> 32 for each in values]}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("on", [ALL, PARTIAL])
def test_global_loads(name: str, on: int) -> None:
    """From a VGPR pair, and from an SGPR pair with offsets; the destination may be the address."""
    size = SIZES[name]
    data = DATA.copy()
    base = data.ctypes.data
    offsets = [32 + 16 * ((5 * lane) % 64) for lane in range(64)]
    for form, extra, first in itertools.product(("off", "s[4:5]"), (0, 8, -8), (2, 8)):
        where, v = (
            (registers(2, 8), pair([base + each for each in offsets], 2)) if form == "off" else ("v2", {2: offsets})
        )
        text = f"global_load_{name} {registers(first, size)}, {where}, {form} offset:{extra}"
        v = {**WORDS, 3: [9] * 64, 4: [9] * 64, 5: [9] * 64, **v}
        wave = execute([text], v=v, s={4: base & M32, 5: base >> 32}, on=on, regions=[region("data", data)])
        for lane in range(64):
            at = offsets[lane] + extra
            for n, expected in enumerate(words(data[at : at + abs(size)].tobytes(), size)):
                assert wave.v[first + n][lane] == (expected if lane_on(on, lane) else v[first + n][lane]), text


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("on", [ALL, PARTIAL, 0])
def test_global_stores(name: str, on: int) -> None:
    """Only the bytes of the lanes that are on change."""
    size = STORES[name]
    for form, extra in itertools.product(("off", "s[4:5]"), (0, 16, -16)):
        data = DATA.copy()
        base = data.ctypes.data
        offsets = [32 + 16 * ((5 * lane) % 64) for lane in range(64)]
        where, v = (
            (registers(2, 8), pair([base + each for each in offsets], 2)) if form == "off" else ("v2", {2: offsets})
        )
        text = f"global_store_{name} {where}, {registers(8, size)}, {form} offset:{extra}"
        execute([text], v={**WORDS, **v}, s={4: base & M32, 5: base >> 32}, on=on, regions=[region("data", data)])
        expected = bytearray(DATA.tobytes())
        for lane in range(64):
            raw = b"".join(WORDS[8 + n][lane].to_bytes(4, "little") for n in range(4))[:size]
            if lane_on(on, lane):
                expected[offsets[lane] + extra : offsets[lane] + extra + size] = raw
        assert data.tobytes() == expected, text


@pytest.mark.parametrize("name", LDS_READS)
@pytest.mark.parametrize("on", [ALL, PARTIAL])
def test_lds(name: str, on: int) -> None:
    """What was written comes back, of every size."""
    size = LDS_READS[name]
    write = name.replace("u", "b").replace("i", "b")
    offsets = [16 * ((7 * lane) % 64) for lane in range(64)]
    first = 1 if abs(size) == 4 else 20
    text = [
        f"ds_write_{write} v1, {registers(8, size)} offset:32",
        f"ds_read_{name} {registers(first, size)}, v1 offset:32",
    ]
    wave = execute(text, v={1: offsets, **{n: [5] * 64 for n in range(20, 24)}, **WORDS}, on=on, lds=2048)
    for lane in range(64):
        raw = b"".join(WORDS[8 + n][lane].to_bytes(4, "little") for n in range(4))[: abs(size)]
        for n, expected in enumerate(words(raw, size)):
            assert wave.v[first + n][lane] == (expected if lane_on(on, lane) else 5 if first == 20 else offsets[lane])
    assert {key for key in LDS_WRITES if key == write} == {write}


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("stride", ["", "st64"])
def test_lds_in_twos(width: int, stride: str) -> None:
    """Offsets count elements, or 64 of them; a read may overwrite its address by either half."""
    bits, unit = 8 * width, width * (64 if stride else 1)
    size = width // 4
    write = f"ds_write2{stride}_b{bits} v2, {registers(8, width)}, {registers(10, width)} offset0:1 offset1:3"
    for first in (1, 2, 20):
        first -= first % 2 if width == 8 else 0
        read = f"ds_read2{stride}_b{bits} {registers(first, 2 * width)}, v2 offset0:3 offset1:1"
        offsets = [4 * width * lane for lane in range(64)]
        wave = execute([write, read], v={2: offsets, **WORDS}, lds=8192) if not stride else None
        if wave is None:  # lanes would overlap: one at a time
            wave = execute([write, read], v={2: offsets, **WORDS}, lds=4 * unit, on=1)
        for lane in range(1 if stride else 64):
            expected = [WORDS[n][lane] for n in [10, 11][:size] + [8, 9][:size]]
            assert [int(wave.v[first + n][lane]) for n in range(2 * size)] == expected


def descriptor(array: Any, records: int, first: int = 4) -> dict[int, int]:
    """A raw buffer's four SGPRs."""
    base = array.ctypes.data
    return {first: base & M32, first + 1: base >> 32, first + 2: records, first + 3: 0x27000}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("on", [ALL, PARTIAL])
def test_buffer_loads_past_the_records_give_zero(name: str, on: int) -> None:
    """Word by word; so do offsets that no memory has."""
    size, data, records = SIZES[name], DATA[:512].copy(), 500
    offsets = [DRAW.choice((0x80000000, M32 - 3, *range(0, 600, 4))) for _ in range(64)]
    for form, extra, shift in itertools.product(("v2, s[4:7], {} offen", "off, s[4:7], {}"), (0, 8), ("0", "s9")):
        text = f"buffer_load_{name} {registers(12, size)}, {form.format(shift)} offset:{extra}"
        s = {**descriptor(data, records), 9: 16}
        wave = execute([text], v={2: offsets, **WORDS}, s=s, on=on, regions=[region("data", data)])
        for lane in range(64):
            at = (offsets[lane] if "offen" in form else 0) + extra
            moved = 16 if shift == "s9" else 0
            for n in range(max(1, size // 4)):
                there = at + 4 * n + min(4, abs(size)) <= records - moved
                raw = data[at + moved + 4 * n :][: min(4, abs(size))].tobytes()
                expected = words(raw, min(size, 4))[0] if there else 0
                assert wave.v[12 + n][lane] == (expected if lane_on(on, lane) else WORDS[12 + n][lane]), (text, lane)


@pytest.mark.parametrize("name", STORES)
def test_buffer_stores_past_the_records_are_dropped(name: str) -> None:
    size, data, records = STORES[name], DATA[:1024].copy(), 500
    offsets = [16 * lane if lane % 3 else 0x80000000 for lane in range(64)]
    text = f"buffer_store_{name} {registers(8, size)}, v2, s[4:7], 0 offen offset:4"
    execute([text], v={2: offsets, **WORDS}, s=descriptor(data, records), on=PARTIAL, regions=[region("data", data)])
    expected = bytearray(DATA[:1024].tobytes())
    for lane, n in itertools.product(range(64), range(max(1, size // 4))):
        at, width = offsets[lane] + 4 + 4 * n, min(4, size)
        if lane_on(PARTIAL, lane) and at + width <= records:
            expected[at : at + width] = WORDS[8 + n][lane].to_bytes(4, "little")[:width]
    assert data.tobytes() == expected


ATOMICS: dict[str, Callable[[int, int, int, int], int]] = {
    "add": lambda old, a, b, bits: old + a,
    "sub": lambda old, a, b, bits: old - a,
    "swap": lambda old, a, b, bits: a,
    "and": lambda old, a, b, bits: old & a,
    "or": lambda old, a, b, bits: old | a,
    "xor": lambda old, a, b, bits: old ^ a,
    "umin": lambda old, a, b, bits: min(old, a),
    "umax": lambda old, a, b, bits: max(old, a),
    "smin": lambda old, a, b, bits: min(signed(old, bits), signed(a, bits)),
    "smax": lambda old, a, b, bits: max(signed(old, bits), signed(a, bits)),
    "cmpswap": lambda old, a, b, bits: a if old == b else old,
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("returns", ["", " sc0"])
@pytest.mark.parametrize("kind", ["global", "buffer"])
def test_atomics(name: str, size: int, returns: str, kind: str) -> None:
    """Lane after lane, several of them on one element; the old value comes back, from a buffer where the data were.

    Nothing changes past a buffer's records, here of 12 elements, from where 0 comes back.
    """
    bits, count = 8 * size, size // 4
    mask = (1 << bits) - 1
    data = np.array([DRAW.getrandbits(bits) for _ in range(16)], f"u{size}")
    memory = data.tolist()
    v = {n: [DRAW.choice((0, 1, M32, DRAW.getrandbits(32))) for _ in range(64)] for n in range(4, 10)}
    wide = count * (2 if name == "cmpswap" else 1)
    if name == "cmpswap":  # half of them hit
        for n in range(count):
            v[4 + count + n] = [memory[lane % 16] >> 32 * n & M32 if lane % 2 else 5 for lane in range(64)]
    v[2] = [lane % 16 * size for lane in range(64)]
    opcode, given = f"{kind}_atomic_{name}{'_x2' * (size == 8)}", registers(4, 4 * wide)
    first = 4 if kind == "buffer" else 20
    text = f"{opcode} {registers(20, size) + ', ' if returns else ''}v2, {given}, s[4:5]{returns}"
    if kind == "buffer":
        text = f"{opcode} {given}, v2, s[4:7], 0 offen{returns}"
    before = {**v, 20: [1] * 64, 21: [1] * 64}
    wave = execute([text], v=before, s=descriptor(data, 12 * size), on=PARTIAL, regions=[region("data", data)])
    for lane in range(64):
        old = sum(before[first + n][lane] << 32 * n for n in range(count))
        if lane_on(PARTIAL, lane) and kind == "buffer" and lane % 16 >= 12:
            old = 0 if returns else old
        elif lane_on(PARTIAL, lane):
            a, b = (sum(v[4 + half * count + n][lane] << 32 * n for n in range(count)) for half in (0, 1))
            if returns:
                old = memory[lane % 16]
            memory[lane % 16] = ATOMICS[name](memory[lane % 16], a, b, bits) & mask
        assert sum(int(wave.v[first + n][lane]) << 32 * n for n in range(count)) == old, lane
    assert data.tolist() == memory


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads(count: int) -> None:
    """With an offset in the instruction, signed, in an SGPR, or both."""
    data = np.array([DRAW.getrandbits(32) for _ in range(64)], np.uint32)
    base = data.ctypes.data
    to = "s20" if count == 1 else f"s[20:{19 + count}]"
    for place, at in (("0x10", 16), ("-0x10", -16), ("s6", 64), ("s6 offset:0x8", 72)):
        name = f"s_load_dword{f'x{count}' if count > 1 else ''}"
        wave = execute(
            [f"{name} {to}, s[4:5], {place}"],
            s={4: base + 64 & M32, 5: base + 64 >> 32, 6: 64},
            regions=[region("data", data)],
        )
        assert wave.s[20 : 20 + count] == data[(64 + at) // 4 :][:count].tolist(), place
