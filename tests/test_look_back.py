"""Look-back: offsets taken from other programs, in whatever order they run, and a state that cleans up after itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from swa_decode_meta.kernel import LaunchShape, launch  # noqa: E402
from swa_decode_meta.kernel.scratch import Scratch  # noqa: E402
from swa_decode_meta.oracle import vectorised  # noqa: E402
from swa_decode_meta.spec import Batch  # noqa: E402
from tests import planted  # noqa: E402
from tests.arguments import arguments_for  # noqa: E402
from tests.batches import served  # noqa: E402

pytestmark = pytest.mark.kernel

# Tiles of 1, 2 and 4 rows in bunches of 4 tiles: none, part of one, one, and several bunches before a tile.
SHAPES = [
    LaunchShape(1, 4, 4, 64, 1024, 1, look_back=True),
    LaunchShape(2, 4, 2, 128, 1024, 2, look_back=True),
    LaunchShape(4, 4, 4, 256, 1024, 4, look_back=True),
]


def same(batch: Batch, arguments: dict[str, Any]) -> None:
    for name, wanted in vectorised.decode_meta(batch).arrays().items():
        got = arguments[name].cpu().numpy().reshape(-1, *wanted.shape[1:])[: len(wanted)]
        assert np.array_equal(got, wanted), name


def with_holes(rows: int, noncausal: bool) -> Batch:
    """Rows of which some have a page in three missing."""
    query_len = 1 if rows < 6 else 6
    requests = -(-rows // query_len)
    rng = np.random.default_rng(rows)
    table = rng.permutation(requests * 24).reshape(requests, 24)
    table[::2, ::3] = -1
    seq_lens = rng.integers(query_len, 24 * 64, requests, endpoint=True)
    return served(rows, query_len, noncausal=noncausal, block_table=table, seq_lens=seq_lens)


@pytest.mark.parametrize("name", ["", "programs_in_reverse"], ids=["in_order", "in_reverse"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.rows_per_program}x{shape.count_rows}")
@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "dspark"])
@pytest.mark.parametrize("rows", [0, 13])
def test_the_order_of_programs_changes_nothing(
    rows: int, noncausal: bool, shape: LaunchShape, name: str, backend: str
) -> None:
    """In reverse, one at a time, no program finds what it looks for: each has to count for itself."""
    batch = with_holes(rows, noncausal)
    arguments = arguments_for(batch, "cuda" if backend == "gpu" else "cpu")
    if name:
        changed = planted.build(name)
        changed(**arguments, shape=changed.__globals__["LaunchShape"](**vars(shape)))
    else:
        launch(**arguments, shape=shape)
    same(batch, arguments)


def test_what_a_capture_used_is_kept_and_the_rest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    scratch = Scratch(limit=2)
    first, second = (scratch.get(key, lambda: torch.zeros(1)) for key in "ab")
    assert scratch.get("a", lambda: torch.zeros(1)) is first
    capturing[0] = True
    assert scratch.get("a", lambda: torch.zeros(1)) is first
    assert scratch.get("c", lambda: torch.zeros(1)) is None
    capturing[0] = False
    for key in "defg":
        assert scratch.get(key, lambda: torch.zeros(1)) is not None
    assert scratch.get("a", lambda: torch.zeros(1)) is first
    assert scratch.get("b", lambda: torch.zeros(1)) is not second
