"""Batches that tests share: 120 recorded from vLLM 0.33.0, small ones behind public bug reports, and made ones."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swa_decode_meta.spec import INPUTS, Batch, BufferLayout, Case, Result, load_case, load_cases

DATA = Path(__file__).parent / "data"
REPORTED_FILE = DATA / "reported.json"
REPORTED = load_cases(REPORTED_FILE)
VLLM_DIFFERS = {path.stem: load_case(path) for path in sorted((DATA / "vllm").glob("*.json"))}
"""Batches, none of which it makes, for which vLLM 0.33.0 writes something else."""
_WIDE = "row-wider-than-a-tile"
WIDE = VLLM_DIFFERS[_WIDE]
"""Two rows of 2^19 + 1 entries: what they must hold would fill megabytes of the file, which leaves it out."""
KEPT = [case for path in sorted(DATA.rglob("*.json")) if path.stem != _WIDE for case in load_cases(path)]
"""All other case files here, with what is expected."""
GOLDEN = range(120)

_SCALARS = {"window_size": "window", "block_size": "block_size", "width": "width", "num_tokens": "num_tokens"}


@cache
def golden() -> dict[str, npt.NDArray[Any]]:
    """All arrays of the golden file."""
    with np.load(DATA / "vllm-0.33.0.npz") as file:
        return dict(file)


def golden_batch(index: int) -> Batch:
    """Golden batch `index`."""
    found = golden()
    given: dict[str, Any] = {name: found[f"{index:04}/in/{name}"] for name in INPUTS}
    scalars: dict[str, Any] = {name: int(found[f"{index:04}/in/{key}"]) for name, key in _SCALARS.items()}
    return Batch(noncausal=bool(found[f"{index:04}/in/noncausal"]), **scalars, **given)


def golden_result(index: int) -> Result:
    """What vLLM wrote for golden batch `index`."""
    found = {item.name: golden()[f"{index:04}/out/{item.name}"] for item in fields(Result)}
    tokens = golden_batch(index).num_tokens
    assert not found["lens"][tokens:].any()  # clause 7
    return Result(**{**found, "lens": found["lens"][:tokens]})


def served(rows: int, query_len: int = 1, seed: int = 0, **changes: Any) -> Batch:
    """A batch of DeepSeek-V4.1-Flash in service: `rows` tokens, the last request padded where they do not divide."""
    requests, columns = -(-rows // query_len), 2048
    rng = np.random.default_rng((rows, seed))
    padded = np.arange(rows) >= rows // query_len * query_len
    given: dict[str, Any] = {
        "num_tokens": rows,
        "window_size": 128,
        "block_size": 64,
        "width": 192 if changes.get("noncausal") else 128,
        "slot_mapping": np.where(padded, -1, np.arange(rows)),
        "token_to_req": np.repeat(np.arange(requests), query_len)[:rows],
        "query_start_loc": np.minimum(np.arange(requests + 1) * query_len, rows),
        "seq_lens": rng.integers(query_len, columns * 64, requests, endpoint=True),
        "block_table": rng.permutation(requests * columns).reshape(requests, columns),
        "replay_start": np.zeros(requests, np.int32),
    }
    return Batch(**{**given, **changes})


# SPEC.md's example in wider rows, with a second request that no token names and room wherever there may be some.
BATCH = Batch(
    num_tokens=3,
    window_size=5,
    block_size=4,
    width=6,
    slot_mapping=[43, 8, -1],
    token_to_req=[0, 0, 99],
    query_start_loc=[0, 2, 2],
    seq_lens=[9, 3],
    block_table=[[7, 10, 2], [1, 3, 5]],
    replay_start=[4, 0],
)
ROOM = {"indices_row_gap": 2, "block_table_row_gap": 1, "spare_rows": 2, "lens_tail": 3, "ragged_spare": 2}
CASE = Case(BATCH, BufferLayout(**ROOM))
GUARDED = {guard: Case(BATCH, BufferLayout(guard=guard, **ROOM)) for guard in ("start", "end")}


def batch_with(**changes: Any) -> Batch:
    """BATCH with changes."""
    return replace(BATCH, **changes)
