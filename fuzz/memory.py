"""Device memory for one launch, arranged so that one element read or written outside a tensor is noticed.

On the CPU each tensor lies against an inaccessible page, at its end or at its start, so that an access past that
side kills the process, reads included. On a GPU, and on the tensor's other side on the CPU, lies a band of canary,
which shows writes; or, with PYTORCH_NO_CUDA_MEMORY_CACHING set, each tensor is an allocation of its own, for a memory
checker to watch. Runs in the child process only; needs torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from .image import Array, Placement, canary

BAND = 4096  # bytes of canary beside a tensor
_ALIGNMENT = 512  # what torch's own allocator gives on a GPU
_TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.bool}


_PATTERN = canary(np.random.default_rng(0), 65521, "uint8")


def _band(size: int) -> Array:
    """`size` bytes of canary; what a band holds need not differ from launch to launch."""
    return np.resize(_PATTERN, size)


@dataclass(frozen=True)
class Damage:
    """A byte outside a tensor that the launch changed; `offset` in bytes, negative before the tensor's start."""

    tensor: str
    offset: int


class Memory(Protocol):
    """Places images for a launch, and reads them back."""

    def place(self, images: Mapping[str, Array], misalignment: int, guard: str) -> dict[str, torch.Tensor]:
        """A flat tensor for each image, holding it."""

    def read(self) -> tuple[dict[str, Array], Damage | None]:
        """The images as the launch left them, and the first byte changed outside them."""


class GuardedMemory:
    """CPU memory: every tensor in a mapping of its own, between two inaccessible pages."""

    def __init__(self) -> None:
        self._mappings: dict[str, _Mapping] = {}
        self._placed: dict[str, tuple[Array, Array, Array, bool]] = {}

    def place(self, images: Mapping[str, Array], misalignment: int, guard: str) -> dict[str, torch.Tensor]:
        """Ignores `misalignment`: a tensor that ends at a page's end starts anywhere."""
        tensors = {}
        self._placed.clear()
        for name, image in images.items():
            need = image.nbytes + BAND
            if name not in self._mappings or self._mappings[name].bytes.size < need:
                self._mappings[name] = _Mapping(need * 2)
            room = self._mappings[name].bytes
            at_end = guard == "end"
            data = room[room.size - image.nbytes :] if at_end else room[: image.nbytes]
            band = room[room.size - need : room.size - image.nbytes] if at_end else room[image.nbytes : need]
            data[...] = image.view(np.uint8)
            band[...] = _band(BAND)
            self._placed[name] = (data.view(image.dtype), band, band.copy(), at_end)
            tensors[name] = torch.from_numpy(data.view(image.dtype)).view(_TORCH_DTYPES[image.dtype.name])
        return tensors

    def read(self) -> tuple[dict[str, Array], Damage | None]:
        """See Memory."""
        images, damage = {}, None
        for name, (data, band, was, at_end) in self._placed.items():
            images[name] = data.copy()
            changed = np.flatnonzero(band != was)
            if changed.size and damage is None:
                damage = Damage(name, int(changed[-1]) - BAND if at_end else data.nbytes + int(changed[0]))
        return images, damage


class _Mapping:
    """Anonymous pages between two that nobody may touch; `bytes` is what may be used."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        size = -(-size // page) * page
        self._map = mmap.mmap(-1, size + 2 * page)
        whole = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for address in (whole.ctypes.data, whole.ctypes.data + page + size):
            if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect refused a guard page")
        self.bytes = whole[page : page + size]


class BandedMemory:
    """GPU memory: one allocation with a band of canary between each tensor and the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self._start = np.empty(0, np.uint8)
        self._spans: dict[str, tuple[int, int, np.dtype[Any]]] = {}

    def place(self, images: Mapping[str, Array], misalignment: int, guard: str) -> dict[str, torch.Tensor]:
        """Ignores `guard`: a GPU has no guard pages, so both sides have a band."""
        spans, at = {}, 0
        for name, image in images.items():
            begin = at + BAND + misalignment * image.itemsize
            spans[name] = (begin, begin + image.nbytes, image.dtype)
            at = -(-(begin + image.nbytes) // _ALIGNMENT) * _ALIGNMENT
        start = _band(at + BAND)
        for name, image in images.items():
            start[spans[name][0] : spans[name][1]] = image.view(np.uint8)
        if self._arena.numel() < start.size:
            self._arena = torch.empty(start.size * 2, dtype=torch.uint8, device=self._device)
        self._arena[: start.size].copy_(torch.from_numpy(start))
        self._start, self._spans = start, spans
        return {
            name: self._arena[begin:end].view(_TORCH_DTYPES[dtype.name]) for name, (begin, end, dtype) in spans.items()
        }

    def read(self) -> tuple[dict[str, Array], Damage | None]:
        """See Memory."""
        now = self._arena[: self._start.size].cpu().numpy()
        images, damage, last = {}, None, 0
        for name, (begin, end, dtype) in self._spans.items():
            images[name] = now[begin:end].view(dtype)
            if damage is None:
                changed = np.flatnonzero(now[last:begin] != self._start[last:begin])
                if changed.size:
                    damage = Damage(name, last + int(changed[-1]) - begin)
            last = end
        changed = np.flatnonzero(now[last:] != self._start[last:])
        if damage is None and changed.size:
            name = next(reversed(self._spans))
            damage = Damage(name, last + int(changed[0]) - self._spans[name][0])
        return images, damage


class SeparateMemory:
    """GPU memory: each tensor an allocation that ends where it ends, so that a memory checker sees one byte past."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._placed: dict[str, tuple[torch.Tensor, np.dtype[Any]]] = {}

    def place(self, images: Mapping[str, Array], misalignment: int, guard: str) -> dict[str, torch.Tensor]:
        """Ignores `guard`."""
        self._placed.clear()
        for name, image in images.items():
            begin = misalignment * image.itemsize
            whole = torch.empty(begin + image.nbytes, dtype=torch.uint8, device=self._device)
            whole[begin:].copy_(torch.from_numpy(image.view(np.uint8).copy()))
            self._placed[name] = (whole[begin:], image.dtype)
        return {name: data.view(_TORCH_DTYPES[dtype.name]) for name, (data, dtype) in self._placed.items()}

    def read(self) -> tuple[dict[str, Array], Damage | None]:
        """See Memory; damage is for the memory checker to report."""
        return {name: data.cpu().numpy().view(dtype) for name, (data, dtype) in self._placed.items()}, None


def gpu_memory(device: torch.device) -> Memory:
    """Memory for launches on a GPU: separate where torch was told to leave allocation to the driver."""
    separate = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
    return SeparateMemory(device) if separate else BandedMemory(device)


def as_tensor(flat: torch.Tensor, place: Placement, middle_axis: bool) -> torch.Tensor:
    """The launch's argument over a flat image: its shape, and [rows, 1, width] where a middle axis is wanted."""
    if len(place.shape) == 1:
        return flat
    rows, columns = place.shape
    if middle_axis:
        return flat.as_strided((rows, 1, columns), (place.row_stride, columns, 1))
    return flat.as_strided((rows, columns), (place.row_stride, 1))
