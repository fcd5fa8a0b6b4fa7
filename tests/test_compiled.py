"""The kernel compiled for AMD's GPUs, which needs none."""

from __future__ import annotations

import json
import sys

import pytest

from swa_decode_meta.fuzz.compiled import figures, spilling, table
from swa_decode_meta.fuzz.target import EMULATED
from swa_decode_meta.spec import ArgumentError
from tests.commands import execute, run

EVERY = {"gfx942": 7, "gfx950": 38, "gfx90a": 39}  # of the variants; 7 divides nothing, so that every choice is met

CODE = """
import json, sys
from swa_decode_meta.fuzz.compiled import figures
print(json.dumps(figures(sys.argv[1], int(sys.argv[2]))))
"""


@pytest.mark.kernel
@pytest.mark.parametrize("arch", EMULATED)
def test_no_variant_in_service_spills(arch: str) -> None:
    """Triton decides between compiling and interpreting when it is imported: this takes a fresh process."""
    ended = execute([sys.executable, "-c", CODE, arch, str(EVERY[arch])])
    assert ended.code == 0, ended.err
    found = json.loads(ended.last)
    variants = found["variants"]
    assert len(variants) >= 100 // EVERY[arch]
    assert any(variant["service"] for variant in variants)
    assert spilling(found) == []
    for variant in variants:
        assert variant["vgpr_spills"] == variant["scratch"] == 0, variant  # in service or not
        assert 0 < variant["vgprs"] <= 512
        assert 0 < variant["sgprs"] <= 112
        assert 1 <= variant["occupancy"] <= 8
        assert variant["code"] > 1000


@pytest.mark.kernel
def test_what_is_interpreted_is_not_compiled() -> None:
    ended = run("bench", "gfx942", TRITON_INTERPRET="1")
    assert ended.code == 4
    assert "TRITON_INTERPRET" in ended.err
    assert ended.out == ""


def test_another_gpu_is_refused() -> None:
    with pytest.raises(ArgumentError, match="arch: expected one of gfx942, gfx950, gfx90a, got 'gfx1100'"):
        figures("gfx1100")


def made_up(service: bool, **numbers: int) -> dict[str, object]:
    names = ("vgprs", "agprs", "sgprs", "vgpr_spills", "sgpr_spills", "lds", "scratch", "code", "occupancy")
    constants = ("NONCAUSAL", "POW2", "NARROW", "ROWS", "COUNT_ROWS", "PAGE_CHUNK", "WIDTH_CHUNK", "TAIL_CHUNK")
    constants += ("ONE_COUNT", "FEW_PAGES", "LOOK_BACK", "STEP", "num_warps")
    return {"constants": dict.fromkeys(constants, 1), "service": service, **dict.fromkeys(names, 0), **numbers}


@pytest.mark.parametrize("number", ["vgpr_spills", "sgpr_spills", "scratch"])
def test_only_what_service_uses_counts(number: str) -> None:
    found = {
        "arch": "gfx942",
        "versions": {"triton": "1"},
        "variants": [made_up(True), made_up(False, **{number: 3}), made_up(True, **{number: 4})],
    }
    assert len(spilling(found)) == 1
    assert "3 variants, 2 of them in service: 1 of those spilling or using scratch" in table(found)
    del found["variants"][-1]
    assert spilling(found) == []
    lines = table(found).splitlines()
    assert lines[0].startswith("gfx942, triton 1.")
    assert lines[-1] == "2 variants, 1 of them in service: none of those spilling or using scratch"
    assert [line.split(" | ")[0] for line in lines[5:7]] == ["| yes    ", "|        "]
