"""The case in flight, on disk before its launch: if everything dies, the file names the batch.

Binary, since it is written for every launch; `swa-decode-meta replay` reads it as it reads a case file.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..spec import INPUTS, MAX_ENTRIES, SHARED, Batch, BufferLayout, Case, CaseFileError, brief, read_bytes

_SCALARS = ("num_tokens", "window_size", "block_size", "width", "noncausal")
_OF_A_GROUP = ("block_size", "width")


class Journal:
    """A file that always holds the last case written to it, whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_suffix(".tmp")
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, case: Case) -> None:
        """Replace the file's case. Raises OSError."""
        note = {name: getattr(case.batch, name) for name in _SCALARS}
        note["groups"] = [{name: getattr(group, name) for name in _OF_A_GROUP} for group in case.groups]
        note |= {"buffers": asdict(case.buffers), "target": dict(case.target)}
        arrays: dict[str, Any] = dict(case.batch.inputs())
        for i, group in enumerate(case.groups):
            arrays |= {f"{i}.{name}": array for name, array in group.inputs().items() if name not in SHARED}
        with open(self._temporary, "wb") as file:
            np.savez(file, note=np.frombuffer(json.dumps(note).encode(), np.uint8), **arrays)
        os.replace(self._temporary, self.path)

    def close(self) -> None:
        """Remove the file: nothing is in flight any more."""
        self.path.unlink(missing_ok=True)
        self._temporary.unlink(missing_ok=True)


def read_journal(path: Path) -> Case:
    """The case that a journal holds. Raises CaseFileError."""
    data = read_bytes(path)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                raise ValueError("compressed")  # a small file must not become a large one
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            note = json.loads(arrays["note"].tobytes())
            inputs = {name: arrays[name] for name in INPUTS}
            own = [
                {name: arrays[f"{i}.{name}"] for name in INPUTS if name not in SHARED}
                for i in range(len(note["groups"]))
            ]
        batch = Batch(**{name: note[name] for name in _SCALARS}, **inputs)
        groups = [
            replace(batch, **{name: scalars[name] for name in _OF_A_GROUP}, **tensors)
            for scalars, tensors in zip(note["groups"], own, strict=True)
        ]
        if sum(each.num_tokens * each.width for each in (batch, *groups)) > MAX_ENTRIES:
            raise ValueError(f"num_tokens * width is above {MAX_ENTRIES}")
        return Case(batch, BufferLayout(**note["buffers"]), target=dict(note["target"]), groups=tuple(groups))
    except Exception as error:  # a damaged archive has zipfile, zlib and NumPy raise nearly anything
        raise CaseFileError(path, "", f"is not a whole journal: {type(error).__name__}: {brief(str(error))}") from None
