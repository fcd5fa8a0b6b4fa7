"""Memory of an emulated launch, as a checker: who may touch which byte, and in what order.

Every tensor is a region; what lies between regions belongs to nobody. Reads and writes of one wave are in order; those
of two waves only with a barrier of their workgroup between them, or through atomic operations.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class AccessFault(Exception):
    """A launch touched memory that it must not touch, or not in this order."""


@dataclass(frozen=True)
class Who:
    """A wave at a point of its run. wave: its number in the launch. group: its workgroup's. epoch: barriers passed."""

    wave: int
    group: int
    epoch: int


_NONE, _MANY = -1, -2


@dataclass
class Region:
    """Bytes that a launch may touch: those of a tensor, named in the words of the kernel.

    begin: the address of the first. size: in bytes. itemsize: of an element, in bytes. writable: whether it is an
    output. row, step: of every `step` bytes only the first `row` belong to it; 0 where all do.
    """

    name: str
    begin: int
    size: int
    itemsize: int = 1
    writable: bool = True
    row: int = 0
    step: int = 0
    keep: object = None  # what owns the memory
    bytes: Array = field(init=False, repr=False)
    shadow: Shadow | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self.size:
            memory: Any = (ctypes.c_uint8 * self.size).from_address(self.begin)
            self.bytes = np.frombuffer(memory, np.uint8)
        else:
            self.bytes = np.empty(0, np.uint8)
        self.words = self.bytes.view(np.uint32) if self.size % 4 == 0 and self.begin % 4 == 0 else None

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.begin + self.size

    def outside(self, offsets: Array, size: int) -> Array:
        """Of accesses to `size` bytes at these offsets, uint64 and wrapped where before the begin, those not within."""
        bad: Array = offsets > np.uint64(max(0, self.size - size)) if size <= self.size else np.ones(len(offsets), bool)
        if self.step and not bad.any():
            within = self.row - size  # the last place in a row where such an access may begin
            bad = offsets % np.uint64(self.step) > np.uint64(max(0, within)) if within >= 0 else ~bad
        return bad

    def place(self, address: int) -> str:
        """Where an address lies, seen from here."""
        offset = address - self.begin
        if offset < 0:
            return f"{-offset} bytes before {self.name}"
        if offset >= self.size:
            return f"{offset - self.size} bytes past the end of {self.name}"
        if self.step:
            row, offset = divmod(offset, self.step)
            if offset >= self.row:
                return f"{offset - self.row} bytes into the gap after row {row} of {self.name}"
            return f"{self.name}[{row}][{offset // self.itemsize}]"
        return f"{self.name}[{offset // self.itemsize}]"


class Shadow:
    """Who wrote and read each unit of some memory last. Units are of 1 or 4 bytes; so are accesses, or multiples."""

    def __init__(self, size: int, unit: int) -> None:
        count = -(-size // unit)
        self.unit = unit
        self.written, self.write_group, self.write_epoch = (np.full(count, _NONE, np.int32) for _ in range(3))
        self.read_by, self.read_group, self.read_epoch = (np.full(count, _NONE, np.int32) for _ in range(3))
        self.atomic = np.zeros(count, bool)

    def units(self, offsets: Array, size: int) -> Array:
        """The units of accesses to `size` bytes each, a row an access."""
        first = (offsets.astype(np.int64) // self.unit)[:, None]
        return first + np.arange(max(1, size // self.unit))

    def _unordered(self, wave: Array, group: Array, epoch: Array, who: Who) -> Array:
        """Which of the last accesses were another wave's, with no barrier since."""
        other = (wave != _NONE) & (wave != who.wave)
        bad: Array = other & ((group != who.group) | (epoch == who.epoch))
        return bad

    def read(self, units: Array, who: Who, coherent: bool) -> Array:
        """Note reads. Returns which are of what another wave wrote, unordered."""
        bad = self._unordered(self.written[units], self.write_group[units], self.write_epoch[units], who)
        bad &= ~(self.atomic[units] & coherent)
        before, group = self.read_by[units], self.read_group[units]
        many = self._unordered(before, group, self.read_epoch[units], who)
        self.read_by[units] = np.where(many, _MANY, who.wave)
        self.read_group[units] = np.where(many & (group != who.group), _MANY, who.group)
        self.read_epoch[units] = who.epoch
        return bad

    def write(self, units: Array, who: Who) -> tuple[Array, Array]:
        """Note writes. Returns which another wave has written, and which another wave has read, unordered."""
        safe = ~self.atomic[units]
        written = self._unordered(self.written[units], self.write_group[units], self.write_epoch[units], who) & safe
        read = self._unordered(self.read_by[units], self.read_group[units], self.read_epoch[units], who) & safe
        self.written[units], self.write_group[units], self.write_epoch[units] = who.wave, who.group, who.epoch
        return written, read


class Regions:
    """All memory of a launch."""

    def __init__(self, regions: Iterable[Region]) -> None:
        """Of regions that overlap the first stays, grown to cover the others."""
        self.all: list[Region] = []
        for region in regions:
            self.add(region)

    def add(self, region: Region) -> None:
        """One more region, unless it lies within one that is there."""
        if not region.size:
            return
        for index, other in enumerate(self.all):
            if other.begin <= region.begin and region.end <= other.end:
                return
            if other.begin < region.end and region.begin < other.end:
                begin, end = min(other.begin, region.begin), max(other.end, region.end)
                keep, writable = (other.keep, region.keep), other.writable and region.writable
                del self.all[index]
                self.add(Region(other.name, begin, end - begin, other.itemsize, writable, keep=keep))
                return
        self.all.append(region)
        self.all.sort(key=lambda each: each.begin)
        self._begins = [each.begin for each in self.all]

    def load(self, addresses: Array, size: int, who: Who, coherent: bool = False) -> Array:
        """The `size` bytes at each of the addresses, uint64 [n], as uint8 [n, size]. Raises Lane."""
        quick = self._quick_load(addresses, size)
        if quick is not None:
            return quick
        result = np.empty((len(addresses), size), np.uint8)
        for region, where, offsets in self._split(addresses, size, "reads"):
            if size >= 4 and region.words is not None and not (offsets & np.uint64(3)).any():
                word = (offsets >> np.uint64(2)).astype(np.intp)
                words = region.words[word] if size == 4 else region.words[word[:, None] + np.arange(size // 4)]
                result[where] = words.reshape(len(word), -1).view(np.uint8)
            else:
                result[where] = region.bytes[offsets.astype(np.intp)[:, None] + np.arange(size)]
            if region.writable:
                shadow = self._shadow(region)
                bad = np.any(shadow.read(shadow.units(offsets, size), who, coherent), axis=1)
                if bad.any():
                    self._fail(
                        addresses, where, bad, "reads {} bytes which another wave writes, unordered", region, size
                    )
        return result

    def _quick_load(self, addresses: Array, size: int) -> Array | None:
        """Words of one input, the usual case; None for any other."""
        region = self._at(int(addresses[0]))
        if region is None or region.writable or region.words is None or region.step or size < 4:
            return None
        offsets = addresses - np.uint64(region.begin)
        if int(offsets.max()) > region.size - size or int(np.bitwise_or.reduce(offsets)) & 3:
            return None
        word = offsets.view(np.int64) >> 2
        if size > 4:
            word = word[:, None] + np.arange(size // 4)
        data: Array = region.words.take(word).reshape(len(addresses), size // 4).view(np.uint8)
        return data

    def store(self, addresses: Array, data: Array, who: Who) -> None:
        """Write data, uint8 [n, size], to each of the addresses. Raises Lane."""
        size = data.shape[1]
        for region, where, offsets in self._split(addresses, size, "writes"):
            if not region.writable:
                self._fail(addresses, where, np.ones(len(offsets), bool), "writes {} bytes of an input", region, size)
            index = offsets.astype(np.intp)[:, None] + np.arange(size)
            mine = data[where]
            shadow = self._shadow(region)
            written, read = shadow.write(shadow.units(offsets, size), who)
            differs = (region.bytes[index] != mine).any(axis=1)
            bad = read.any(axis=1) & differs
            if bad.any():
                self._fail(addresses, where, bad, "writes {} bytes which another wave reads, unordered", region, size)
            bad = written.any(axis=1) & differs
            if bad.any():
                words = "writes {} bytes to which another wave wrote another value"
                self._fail(addresses, where, bad, words, region, size)
            region.bytes[index] = mine
            bad = (region.bytes[index] != mine).any(axis=1)
            if bad.any():
                self._fail(
                    addresses, where, bad, "writes {} bytes to which another lane writes other values", region, size
                )

    def atomic(self, address: int, size: int, who: Who) -> Array:
        """The `size` bytes at an address, uint8, to be read and changed in one. Raises Lane."""
        addresses = np.array([address], np.uint64)
        [(region, where, offsets)] = self._split(addresses, size, "changes")
        if not region.writable:
            self._fail(addresses, where, np.ones(1, bool), "changes {} bytes of an input", region, size)
        shadow = self._shadow(region)
        units = shadow.units(offsets, size)
        shadow.atomic[units] = True
        shadow.written[units], shadow.write_group[units], shadow.write_epoch[units] = who.wave, who.group, who.epoch
        return region.bytes[int(offsets[0]) : int(offsets[0]) + size]

    def _shadow(self, region: Region) -> Shadow:
        if region.shadow is None:
            region.shadow = Shadow(region.size, 4 if region.itemsize % 4 == 0 and region.begin % 4 == 0 else 1)
        return region.shadow

    def _split(self, addresses: Array, size: int, what: str) -> Sequence[tuple[Region, Any, Array]]:
        """Regions, which of the accesses go to each, and at what offsets there."""
        region = self._at(int(addresses[0]))
        if region is not None:
            offsets = addresses - np.uint64(region.begin)
            if not region.outside(offsets, size).any():
                return [(region, slice(None), offsets)]
        owners = [self._at(int(address)) for address in addresses]
        parts: list[tuple[Region, Any, Array]] = []
        for lane, owner in enumerate(owners):
            begin = np.uint64(owner.begin if owner else 0)
            if owner is None or owner.outside(addresses[lane : lane + 1] - begin, size)[0]:
                address = int(addresses[lane])
                raise Lane(lane, address, f"{what} {size} bytes at 0x{address:x}, {self.nearest(address, size)}")
        for owner in {id(owner): owner for owner in owners}.values():
            assert owner is not None
            where = np.array([other is owner for other in owners])
            parts.append((owner, where, addresses[where] - np.uint64(owner.begin)))
        return parts

    def _at(self, address: int) -> Region | None:
        index = bisect_right(self._begins, address) - 1 if self.all else -1
        region = self.all[index] if index >= 0 else None
        return region if region is not None and address < region.end else None

    def nearest(self, address: int, size: int) -> str:
        """Where an access lies that hits no region, from the nearest one."""
        if not self.all:
            return "where nothing is"
        last = address + size - 1
        at = self._at(address)
        if at is not None:
            return at.place(last if at.place(address).startswith(at.name) else address)
        best = min(self.all, key=lambda each: max(each.begin - last, address - each.end))
        return best.place(address)

    def _fail(self, addresses: Array, where: Any, bad: Any, words: str, region: Region, size: int) -> None:
        lane = int(np.arange(len(addresses))[where][np.flatnonzero(bad)[0]])
        address = int(addresses[lane])
        raise Lane(lane, address, f"{words.format(size)}, {region.place(address)}")


class Lane(Exception):
    """What one of the accesses of an instruction did wrong: which of them, at which address, in words."""

    def __init__(self, index: int, address: int, words: str) -> None:
        super().__init__(words)
        self.index, self.address = index, address


class LocalMemory:
    """The LDS of a workgroup."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.shadow = Shadow(size, 1)

    def load(self, addresses: Array, size: int, who: Who) -> Array:
        """The `size` bytes at each of the addresses, as uint8 [n, size]. Raises Lane."""
        index = self._index(addresses, size, "reads")
        never = (self.shadow.written[index] == _NONE).any(axis=1)
        if never.any():
            self._fail(addresses, never, f"reads {size} bytes of LDS that nobody wrote")
        bad = np.any(self.shadow.read(index, who, coherent=False), axis=1)
        if bad.any():
            self._fail(addresses, bad, f"reads {size} bytes of LDS which another wave writes, with no barrier between")
        result: Array = self.bytes[index]
        return result

    def store(self, addresses: Array, data: Array, who: Who) -> None:
        """Write data, uint8 [n, size], to each of the addresses. Raises Lane."""
        size = data.shape[1]
        index = self._index(addresses, size, "writes")
        written, read = self.shadow.write(index, who)
        differs = self.bytes[index] != data
        for bad, words in ((read, "which another wave reads"), (written, "to which another wave wrote another value")):
            wrong = (bad & differs).any(axis=1)
            if wrong.any():
                self._fail(addresses, wrong, f"writes {size} bytes of LDS {words}, with no barrier between")
        self.bytes[index] = data
        twice = (self.bytes[index] != data).any(axis=1)
        if twice.any():
            self._fail(addresses, twice, f"writes {size} bytes of LDS to which another lane writes other values")

    def _index(self, addresses: Array, size: int, what: str) -> Array:
        index: Array = addresses.astype(np.int64)[:, None] + np.arange(size)
        outside = index[:, -1] >= len(self.bytes)
        if outside.any():
            self._fail(addresses, outside, f"{what} {size} bytes outside the {len(self.bytes)} bytes of LDS")
        return index

    def _fail(self, addresses: Array, bad: Any, words: str) -> None:
        lane = int(np.flatnonzero(bad)[0])
        raise Lane(lane, int(addresses[lane]), f"{words}, at LDS byte {int(addresses[lane])}")
