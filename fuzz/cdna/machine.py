"""Running a translated kernel: waves of 64 lanes, workgroups with LDS and barriers, in an order that a seed decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cost import longest_chain
from .regions import AccessFault, Array, Lane, LocalMemory, Region, Regions, Who
from .translate import M0, SCC, Registers, Translated
from .vector import LANES, lanes

_ALL = (1 << LANES) - 1
_MOST_AT_ONCE = 8  # workgroups that run side by side, and
_LONGEST_RUN = 64  # blocks of a wave before another one's turn


class Wave:
    """One wave: its registers, and the instructions that are more than arithmetic. `translate` names the fields."""

    def __init__(self, launch: Launch, group: Workgroup, number: int) -> None:
        """number: in its workgroup."""
        code = launch.code
        self.launch, self.group, self.number = launch, group, number
        self.at = 0
        self.file = code.spare.pop() if code.spare else Registers(code.vgprs)
        self.registers = self.file.whole
        self.registers[:] = launch.garbage[: code.vgprs]  # as hardware leaves them: anything
        self.v, self.i, self.f, self.q, self.j = (getattr(self.file, name) for name in "vifqj")
        self.s: list[int] = launch.garbage[:128].tolist()
        self.s[SCC] = 0
        self.exec = _ALL
        self.m: Any = True
        self.v[0][:] = np.arange(LANES) + LANES * number
        self.block: int | None = launch.enter(self.s, group.index)
        self.trace: list[int] | None = [] if launch.detailed else None
        self.waiting = False
        self.who = Who(group.number * launch.num_warps + number, group.number, 0)

    def run(self, most: int) -> None:
        """Run up to `most` blocks, or to a barrier or the end."""
        code, counts = self.launch.code.blocks, self.launch.counts
        block, trace = self.block, self.trace
        try:
            while most > 0 and block is not None:
                counts[block] += 1
                if trace is not None:
                    trace.append(block)
                block = code[block](self)
                most -= 1
                if block is not None and block < 0:
                    block, self.waiting = -1 - block, True
                    break
        except Lane as wrong:
            raise self._fault(wrong) from None
        self.block = block

    def _fault(self, wrong: Lane) -> AccessFault:
        at = self.launch.code.kernel.instructions[self.at]
        on = np.flatnonzero(np.broadcast_to(self.m, LANES))
        lane = on[wrong.index] if wrong.index < len(on) else wrong.index
        return AccessFault(f"lane {lane} of wave {self.number} in workgroup {self.group.index} {wrong} at {at}")

    # -------------------------------------------------------- what blocks call

    def set_exec(self, mask: int) -> Any:
        """Switch lanes on and off; the new `m`."""
        self.exec = mask
        self.m = True if mask == _ALL else lanes(mask)
        return self.m

    def first_lane(self) -> int:
        """The first lane that is on; 0 where none is."""
        return (self.exec & -self.exec).bit_length() - 1 if self.exec else 0

    def on_lanes(self, source: Array) -> Array:
        """Whether the lanes with these numbers are on."""
        on: Array = np.ones(LANES, bool) if self.m is True else self.m[source]
        return on

    def odd_pair(self, number: int, signed: bool) -> Array:
        """A pair of VGPRs that starts at an odd number."""
        pair = np.ascontiguousarray(self.registers[:, number : number + 2])
        return pair.view(np.int64 if signed else np.uint64)[:, 0]

    def reciprocal(self, value: Any) -> Array:
        """1 / value as hardware may give it: any number that is not more than one unit in the last place off.

        Powers of two have it exactly, as on hardware: the compiler's division by 2^24 + 1 would be wrong otherwise.
        """
        exact = 1.0 / np.broadcast_to(np.asarray(value, np.float32), LANES).astype(np.float64)
        nearest = exact.astype(np.float32)
        off: Any = self.launch.reciprocal_off
        if off is None:
            off = self.launch.random.integers(-1, 2, LANES)
        near = (nearest.view(np.int32) + np.asarray(off, np.int32)).view(np.float32)
        allowed = np.isfinite(nearest) & (nearest != exact) & (np.abs(near - exact) <= np.spacing(np.abs(nearest)))
        return np.where(allowed, near, nearest)

    def permute(self, destination: int, data: Any, source: Array) -> None:
        """Each lane that is on takes the data of another; 0 from one that is off."""
        taken = np.where(self.on_lanes(source), np.take(data, source), np.uint32(0))
        np.copyto(self.v[destination], taken, where=self.m)

    def swap_lanes(self, a: int, b: int, rows: int) -> None:
        """Exchange the odd groups of `rows` lanes of one register with the even groups of another."""
        x, y = self.v[a].copy().reshape(-1, 2, rows), self.v[b].copy().reshape(-1, 2, rows)
        x[:, 1], y[:, 0] = y[:, 0].copy(), x[:, 1].copy()
        np.copyto(self.v[a], x.reshape(-1), where=self.m)
        np.copyto(self.v[b], y.reshape(-1), where=self.m)

    def scalar_load(self, address: int, count: int) -> list[int]:
        """32-bit words, from an address of which the low two bits are ignored."""
        own = (address - self.launch.kernarg_address) >> 2
        if own >= 0 and own + count <= len(self.launch.kernarg_words):
            self.launch.touched["scalar"] += 4 * count
            return self.launch.kernarg_words[own : own + count]
        where = np.array([address & 0xFFFFFFFFFFFFFFFC], np.uint64)
        data = self.launch.regions.load(where, 4 * count, self.who)
        self.launch.touch(where, 4 * count, "scalar")
        words: list[int] = data.view(np.uint32)[0].tolist()
        return words

    def load(self, destination: int, addresses: Any, size: int, signed: bool, coherent: bool) -> None:
        """Read `size` bytes for each lane that is on."""
        if not self.exec:
            return
        on = self._on(addresses)
        self.launch.touch(on, size, "read")
        self._put(destination, self.launch.regions.load(on, size, self.who, coherent), signed)

    def store(self, addresses: Any, data: int, size: int) -> None:
        """Write `size` bytes for each lane that is on."""
        if not self.exec:
            return
        on = self._on(addresses)
        self.launch.touch(on, size, "written")
        self.launch.regions.store(on, self._get(data, size), self.who)

    def buffer_load(
        self,
        destination: int,
        base: int,
        offsets: Array,
        records: int,
        stride: int,
        size: int,
        signed: bool,
        coherent: bool,
    ) -> None:
        """Read from a raw buffer, word by word; 0 for what lies past its records."""
        assert not stride & 0x3FFF, "a buffer with a stride"
        for part in range(max(1, size // 4)):
            width = min(4, size)
            inside = offsets + np.uint64(4 * part + width) <= np.uint64(max(0, records))
            before = self.m  # a fault is to find the lanes that were asked for
            outside = np.broadcast_to(self.m, LANES) & ~inside
            np.copyto(self.v[destination + part], 0, where=outside)
            self.m = np.broadcast_to(self.m, LANES) & inside
            if self.m.any():
                on = (offsets + np.uint64((base + 4 * part) & 0xFFFFFFFFFFFFFFFF))[self.m]
                self.launch.touch(on, width, "read")
                self._put(destination + part, self.launch.regions.load(on, width, self.who, coherent), signed)
            self.m = before

    def buffer_store(self, base: int, offsets: Array, records: int, stride: int, data: int, size: int) -> None:
        """Write to a raw buffer, word by word; nothing past its records."""
        assert not stride & 0x3FFF, "a buffer with a stride"
        for part in range(max(1, size // 4)):
            width = min(4, size)
            inside = offsets + np.uint64(4 * part + width) <= np.uint64(max(0, records))
            before = self.m
            self.m = np.broadcast_to(self.m, LANES) & inside
            if self.m.any():
                on = (offsets + np.uint64((base + 4 * part) & 0xFFFFFFFFFFFFFFFF))[self.m]
                self.launch.touch(on, width, "written")
                self.launch.regions.store(on, self._get(data + part, width), self.who)
            self.m = before

    def buffer_atomic(
        self,
        operation: str,
        destination: int,
        base: int,
        offsets: Array,
        records: int,
        stride: int,
        data: int,
        size: int,
    ) -> None:
        """Change a raw buffer; nothing past its records, from where 0 comes back."""
        assert not stride & 0x3FFF, "a buffer with a stride"
        inside = offsets + np.uint64(size) <= np.uint64(max(0, records))
        before = np.broadcast_to(self.m, LANES)
        self.m = before & inside
        if self.m.any():
            self.atomic(operation, destination, offsets + np.uint64(base & 0xFFFFFFFFFFFFFFFF), data, size)
        for part in range(size // 4 if destination >= 0 else 0):
            np.copyto(self.v[destination + part], 0, where=before & ~inside)
        self.set_exec(self.exec)

    def atomic(self, operation: str, destination: int, addresses: Any, data: int, size: int) -> None:
        """Read, change and write back, lane by lane."""
        kind = np.dtype(f"u{size}")
        signed = np.dtype(f"i{size}")
        on, where = np.flatnonzero(np.broadcast_to(self.m, LANES)), self._on(addresses) if self.exec else ()
        for index, (lane, address) in enumerate(zip(on, where, strict=True)):
            try:
                there = self.launch.regions.atomic(int(address), size, self.who).view(kind)
            except Lane as wrong:
                raise Lane(index, wrong.address, str(wrong)) from None
            self.launch.touch(np.array([address], np.uint64), size, "written")
            words = self.registers[lane, data : data + (2 if operation == "cmpswap" else 1) * size // 4].copy()
            given = words.view(kind)
            before = there[0]
            there[0] = {
                "swap": lambda old, new: new[0],
                "add": lambda old, new: (np.array([old]) + new[:1])[0],
                "sub": lambda old, new: (np.array([old]) - new[:1])[0],
                "and": lambda old, new: old & new[0],
                "or": lambda old, new: old | new[0],
                "xor": lambda old, new: old ^ new[0],
                "umin": lambda old, new: min(old, new[0]),
                "umax": lambda old, new: max(old, new[0]),
                "smin": lambda old, new: min(old.view(signed), new[0].view(signed)).view(kind),
                "smax": lambda old, new: max(old.view(signed), new[0].view(signed)).view(kind),
                "cmpswap": lambda old, new: new[0] if old == new[1] else old,
            }[operation](before, given)
            if destination >= 0:
                self.registers[lane, destination : destination + size // 4] = np.array([before]).view(np.uint32)

    def local_load(self, destination: int, addresses: Array, size: int, signed: bool) -> None:
        """Read `size` bytes of LDS for each lane that is on."""
        if self.exec:
            self.launch.local_bytes += size * self.exec.bit_count()
            self._put(destination, self.group.lds.load(self._on(addresses), size, self.who), signed)

    def local_store(self, addresses: Array, data: int, size: int) -> None:
        """Write `size` bytes of LDS for each lane that is on."""
        if self.exec:
            self.launch.local_bytes += size * self.exec.bit_count()
            self.group.lds.store(self._on(addresses), self._get(data, size), self.who)

    def _on(self, addresses: Any) -> Array:
        """The addresses of the lanes that are on."""
        whole = addresses if getattr(addresses, "ndim", 0) else np.full(LANES, addresses, np.uint64)
        return whole if self.m is True else whole[self.m]

    def _put(self, destination: int, data: Array, signed: bool) -> None:
        """Bytes [n, size] into the registers of the lanes that are on."""
        size = data.shape[1]
        if size < 4:
            kind = np.dtype(f"{'i' if signed else 'u'}{size}")
            words = np.ascontiguousarray(data).view(kind).astype(np.int64).astype(np.uint32)
        else:
            words = np.ascontiguousarray(data).view(np.uint32)
        on = slice(None) if self.m is True else self.m
        self.registers[on, destination : destination + words.shape[1]] = words

    def _get(self, data: int, size: int) -> Array:
        """Bytes [n, size] out of the registers of the lanes that are on."""
        on = slice(None) if self.m is True else self.m
        words = np.ascontiguousarray(self.registers[on, data : data + max(1, size // 4)])
        return words.view(np.uint8)[:, :size]


class Workgroup:
    """Waves that share LDS and meet at barriers."""

    def __init__(self, launch: Launch, number: int, index: tuple[int, int, int]) -> None:
        self.number, self.index = number, index
        self.lds = LocalMemory(launch.lds_size)
        self.barriers = 0
        self.waves = [Wave(launch, self, n) for n in range(launch.num_warps)]
        self.running = list(self.waves)

    def step(self, random: np.random.Generator) -> bool:
        """Let one of the waves run for a while. Returns whether any is left."""
        ready = [wave for wave in self.running if not wave.waiting]
        if not ready:  # all that are left stand at the barrier
            self.barriers += 1
            for wave in self.running:
                wave.waiting = False
                wave.who = Who(wave.who.wave, self.number, self.barriers)
            ready = self.running
        wave = ready[int(random.integers(len(ready)))] if len(ready) > 1 else ready[0]
        wave.run(int(random.integers(1, _LONGEST_RUN)))
        if wave.block is None:
            self.running.remove(wave)
            wave.launch.ended(wave)
            wave.launch.code.spare.append(wave.file)
        return bool(self.running)


@dataclass(frozen=True)
class Cost:
    """What a launch did. instructions: by class, of all waves. waves, barriers: how many, barriers by workgroup.

    bytes: by "read", "written", "scalar" and "LDS", as the instructions ask for them. lines: of 128 bytes of global
    memory touched, each counted once. chain: as `cost.longest_chain` has it, the most of all waves. Lines and chain
    are 0 where they were not asked for.
    """

    instructions: dict[str, int]
    waves: int
    barriers: int
    bytes: dict[str, int]
    lines: int
    chain: int


class Launch:
    """One launch of a kernel.

    reciprocal_off: how many units in the last place a reciprocal is off from the nearest number, -1, 0 or 1, where that
    is no more than one off from the exact value; None for any of these, lane by lane. detailed: whether to count
    lines and chains too.
    """

    def __init__(
        self,
        code: Translated,
        grid: Sequence[int],
        num_warps: int,
        arguments: bytes,
        lds_size: int,
        regions: Sequence[Region],
        seed: int = 0,
        reciprocal_off: int | None = None,
        detailed: bool = False,
    ) -> None:
        self.code, self.num_warps, self.lds_size = code, num_warps, lds_size
        self.grid = (*grid, 1, 1)[:3]
        self.random = np.random.default_rng(seed)
        self.reciprocal_off = reciprocal_off
        self.garbage = self.random.integers(0, 2**32, 1024, np.uint32)
        self.counts = [0] * len(code.blocks)
        self.local_bytes, self.barriers = 0, 0
        self.touched = {"read": 0, "written": 0, "scalar": 0}
        self.detailed, self._lines, self._chain = detailed, set[int](), 0
        self._kernarg = np.frombuffer(bytearray(arguments), np.uint8)
        for argument in code.kernel.arguments:
            value = self._hidden(argument.kind)
            if value is not None:
                end = argument.offset + argument.size
                self._kernarg[argument.offset : end] = list(value.to_bytes(argument.size, "little"))
        place = Region(
            "kernel arguments", self._kernarg.ctypes.data, len(arguments), 4, writable=False, keep=self._kernarg
        )
        self.regions = Regions([place, *regions])
        self.kernarg_address: int = self._kernarg.ctypes.data
        self.kernarg_words: list[int] = self._kernarg[: len(arguments) // 4 * 4].view(np.uint32).tolist()
        self._preload = bool(self.random.integers(2))

    def _hidden(self, kind: str) -> int | None:
        """What the runtime puts in an argument that only the ABI knows; None for a kernel's own, and for pointers."""
        name, _, axis = kind.rpartition("_")
        if name == "hidden_block_count":
            return self.grid["xyz".index(axis)]
        if name == "hidden_group_size":
            return self.num_warps * LANES if axis == "x" else 1
        return 3 if kind == "hidden_grid_dims" else None

    def run(self) -> Cost:
        """Run it to its end. Raises AccessFault."""
        with np.errstate(all="ignore"):
            self._run()
        return self._cost()

    def _run(self) -> None:
        x, y, z = self.grid
        order = np.arange(x * y * z)
        if self.random.integers(2):  # hardware starts workgroups in order, and promises nothing
            self.random.shuffle(order)
        at_once = int(self.random.integers(1, _MOST_AT_ONCE + 1))
        groups: list[Workgroup] = []
        for number in order.tolist():
            groups.append(Workgroup(self, number, (number % x, number // x % y, number // x // y)))
            while len(groups) >= at_once:
                self._step(groups)
        while groups:
            self._step(groups)

    def _cost(self) -> Cost:
        instructions: dict[str, int] = {}
        for times, classes in zip(self.counts, self.code.classes, strict=True):
            for name, count in classes.items():
                instructions[name] = instructions.get(name, 0) + times * count
        return Cost(
            {name: count for name, count in instructions.items() if count},
            math.prod(self.grid) * self.num_warps,
            self.barriers,
            {**self.touched, "LDS": self.local_bytes},
            len(self._lines),
            self._chain,
        )

    def _step(self, groups: list[Workgroup]) -> None:
        group = groups[int(self.random.integers(len(groups)))] if len(groups) > 1 else groups[0]
        if not group.step(self.random):
            self.barriers += group.barriers
            groups.remove(group)

    def ended(self, wave: Wave) -> None:
        """Count what a wave did."""
        if wave.trace is not None:
            members = self.code.members
            chain = longest_chain(each for block in wave.trace for each in members[block])
            self._chain = max(self._chain, chain)

    def touch(self, addresses: Array, size: int, how: str) -> None:
        """Count an access."""
        self.touched[how] += size * len(addresses)
        if not self.detailed:
            return
        if how != "scalar":
            self._lines.update(np.unique(addresses >> np.uint64(7)).tolist())

    def enter(self, s: list[int], index: tuple[int, int, int]) -> int:
        """Set the SGPRs that a wave starts with, and give the block that it starts at."""
        known = self.code.kernel.directives
        address = self.kernarg_address
        at = 0
        for name, size in (
            ("private_segment_buffer", 4),
            ("dispatch_ptr", 2),
            ("queue_ptr", 2),
            ("kernarg_segment_ptr", 2),
            ("dispatch_id", 2),
            ("flat_scratch_init", 2),
            ("private_segment_size", 1),
        ):
            if known.get(f"user_sgpr_{name}"):
                if name == "kernarg_segment_ptr":
                    s[at], s[at + 1] = address & 0xFFFFFFFF, address >> 32
                at += size
        preloaded = known.get("user_sgpr_kernarg_preload_length", 0)
        start = self.code.first
        if preloaded and self.code.preloaded is not None and self._preload:
            offset = 4 * known.get("user_sgpr_kernarg_preload_offset", 0)
            s[at : at + preloaded] = self._kernarg[offset : offset + 4 * preloaded].view(np.uint32).tolist()
            start = self.code.preloaded
        at = known.get("user_sgpr_count", at + preloaded)
        for axis, name in enumerate("xyz"):
            if known.get(f"system_sgpr_workgroup_id_{name}", 0):
                s[at] = index[axis]
                at += 1
        s[M0] = 0
        return start
