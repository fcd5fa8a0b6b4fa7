"""Device memory that a launch needs beside the caller's tensors, kept for the next launch on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch

LIMIT = 1024  # a server has a few dozen; a fuzzer has new buffers for every case


class Scratch:
    """Small tensors by a key that names the buffers they serve.

    Launches that share a tensor write the same output buffers, so whoever orders those orders these.
    What was used in a graph capture is kept for good, since the graph holds its address.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._captured: set[Hashable] = set()

    def get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """The tensor kept under `key`, made if need be; None when it is not there and a graph is being captured."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        found = self._kept.get(key)
        if found is None:
            if capturing:
                return None
            if len(self._kept) - len(self._captured) >= self.limit:
                self._forget()
            found = self._kept.setdefault(key, make())
        if capturing:
            self._captured.add(key)
        return found

    def holds(self, tensors: Mapping[Hashable, torch.Tensor]) -> bool:
        """Whether it is still these tensors that are kept; they are then kept for good if a graph is being captured."""
        if not all(self._kept.get(key) is tensor for key, tensor in tensors.items()):
            return False  # forgotten, and perhaps another one made since
        if tensors and torch.cuda.is_current_stream_capturing():
            self._captured.update(tensors)
        return True

    def _forget(self) -> None:
        torch.cuda.synchronize()  # a launch in flight may still use what goes
        self._kept = {key: tensor for key, tensor in self._kept.items() if key in self._captured}
