"""Batches that tests share: 120 recorded from vLLM 0.33.0, small ones behind public bug reports, and made ones."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swa_decode_meta.spec import INPUTS, Batch, Result, load_cases

DATA = Path(__file__).parent / "data"
REPORTED_FILE = DATA / "reported.json"
REPORTED = load_cases(REPORTED_FILE)
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
