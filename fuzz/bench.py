"""How fast the oracles are, side by side: their repetitions alternate, so that all meet the same machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ..oracle import plain, vectorised
from ..spec import Batch, Int32Array
from . import exhaustive

_CONTEXT, WINDOW = 128 * 1024, 128  # DeepSeek-V4.1-Flash in service
_COLUMNS = 2050  # of its block table, at pages of 64
_SERVED = ((1, 1), (8, 1), (32, 1), (64, 6))  # requests, and tokens of each
_SMALL = 10_000


def run_oracles(seconds: float) -> dict[str, Any]:
    """Time the oracles for about `seconds`; at least once each, after a warm-up.

    Returns plain values: "versions", and "measurements", each with "what" was built, "rounds" (how often)
    and "oracles": by name min, median and max of "ms" and of "ratio" (to the last oracle in the same round).
    """
    cases: dict[str, dict[str, Callable[[], object]]] = {}
    for requests, tokens in _SERVED:
        batch = serving(requests * tokens, tokens)
        cases[f"rows: {batch.num_tokens}, window {WINDOW}, table [{requests}, {_COLUMNS}]"] = {
            "plain": partial(plain.decode_meta, batch),
            "vectorised": partial(vectorised.decode_meta, batch),
        }
    stride = exhaustive.COUNT // _SMALL
    small = list(islice(exhaustive.shard(0, stride), _SMALL))
    cases[f"{_SMALL:,} small batches"] = {
        "plain": lambda: [plain.decode_meta(batch) for batch in small],
        "vectorised, one by one": lambda: [vectorised.decode_meta(batch) for batch in small],
        "vectorised, decode_meta_many": lambda: vectorised.decode_meta_many(small),
    }
    return {
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
        "measurements": [_measure(what, oracles, seconds / len(cases)) for what, oracles in cases.items()],
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `run_oracles` as a Markdown table under a line of versions."""
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    lines = [
        f"{versions}. Cells are min / median / max.",
        "",
        "| built | rounds | oracle | ms | times the last oracle's |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for measurement in figures["measurements"]:
        for oracle, figure in measurement["oracles"].items():
            ms, ratio = (" / ".join(f"{x:.3g}" for x in figure[key].values()) for key in ("ms", "ratio"))
            lines.append(f"| {measurement['what']} | {measurement['rounds']} | {oracle} | {ms} | {ratio} |")
    return "\n".join(lines)


def _measure(what: str, oracles: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Any]:
    start = time.perf_counter()
    for build in oracles.values():
        build()
    rounds: list[list[float]] = []
    while not rounds or time.perf_counter() - start < seconds:
        rounds.append([_ms(build) for build in oracles.values()])
    figures = {
        oracle: {
            "ms": spread([times[i] for times in rounds]),
            "ratio": spread([times[i] / times[-1] for times in rounds]),
        }
        for i, oracle in enumerate(oracles)
    }
    return {"what": what, "rounds": len(rounds), "oracles": figures}


def _ms(build: Callable[[], object]) -> float:
    start = time.perf_counter()
    build()
    return (time.perf_counter() - start) * 1e3


def spread(values: Sequence[float]) -> dict[str, float]:
    """Min, median and max."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def serving(rows: int, tokens: int, page: int = 64, noncausal: bool = False, seed: int = 0) -> Batch:
    """A batch of `rows` rows, `tokens` a request and in the last one what is left, in the second half of the context.

    page: positions a page. noncausal: DSpark, with its wider rows. seed: other contents.
    """
    requests, columns = -(-rows // tokens), _COLUMNS * 64 // page
    rng = np.random.default_rng((rows, seed))
    return Batch(
        num_tokens=rows,
        window_size=WINDOW,
        block_size=page,
        width=width_of(noncausal),
        noncausal=noncausal,
        slot_mapping=rng.permutation(rows),
        token_to_req=_int32(np.arange(rows) // tokens),
        query_start_loc=_int32(np.minimum(np.arange(requests + 1) * tokens, rows)),
        seq_lens=_int32(rng.integers(_CONTEXT // 2, _CONTEXT, requests, endpoint=True)),
        block_table=_int32(rng.permutation(requests * columns).reshape(requests, columns)),
        replay_start=_int32(np.zeros(requests)),
    )


def width_of(noncausal: bool) -> int:
    """The width of the rows in service."""
    return 192 if noncausal else WINDOW


def _int32(values: npt.ArrayLike) -> Int32Array:
    return np.asarray(values).astype(np.int32)
