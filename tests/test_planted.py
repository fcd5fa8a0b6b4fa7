"""Faults planted in copies of the kernel: the fuzzer finds each, shrinks it, and replay tells copy from kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swa_decode_meta.spec import load_case
from tests.commands import run
from tests.planted import FAULTS, source

pytestmark = pytest.mark.kernel

WITHIN = 150  # cases that suffice to find any of them


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_changes_the_kernel(name: str) -> None:
    fault = FAULTS[name]
    assert fault.new in source(name)[fault.file]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_shrunk_and_replayed(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not FAULTS[name].routine and not request.config.getoption("--all-faults"):
        pytest.skip("takes half a minute; --all-faults looks for it")
    target = ("--target", f"tests.planted:{name}", "--hang", "2s")
    limits = ("--examples", WITHIN, "--workers", 1, "--seed", 1, "--until-failure", "--out", tmp_path / "out")
    ended = run("fuzz", *target, *limits)
    assert ended.code == 1, ended.out
    found = json.loads((tmp_path / "out" / "campaign.json").read_text())
    assert found["cases"] <= WITHIN
    [path] = (tmp_path / "out" / "failures").iterdir()
    assert load_case(path).batch.num_reqs <= 2
    failed = run("replay", *target, path)
    assert failed.code == 1
    assert failed.out.startswith(f"FAILED {path}")
    fixed = run("replay", path)
    assert fixed.code == 0
    assert fixed.out.startswith(f"FIXED {path}")
