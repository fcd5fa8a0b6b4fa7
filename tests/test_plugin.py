"""The vLLM plug-in: what it puts in place, when, and what it leaves alone."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from swa_decode_meta.kernel import plugin  # noqa: E402
from swa_decode_meta.kernel.build import VllmMismatchError, enabled  # noqa: E402

pytestmark = pytest.mark.kernel

BUILD = importlib.import_module("swa_decode_meta.kernel.build")
OPS = "vllm.models.deepseek_v41.amd.ops"
STEPS = "vllm.v1.worker.gpu.attn_utils"


class Vllm:
    """vLLM's modules, as far as the plug-in touches them."""

    def __init__(self) -> None:
        def build(
            builder: Any, common_prefix_len: Any, cam: Any, fast_build: Any, replay_start: Any, metadata_cls: Any
        ) -> str:
            return "theirs"

        def record_monokernel(vllm_config: Any) -> None:
            self.recorded = vllm_config

        def build_attn_metadata(*arguments: Any) -> str:
            self.deferring = getattr(sys.modules["swa_decode_meta.kernel.deferred"]._local, "step", None) is not None
            return "a step"

        self.theirs, self.step = build, build_attn_metadata
        self.swa: Any = ModuleType(f"{OPS}.swa_decode_meta")
        self.ops: Any = ModuleType(OPS)
        self.steps: Any = ModuleType(STEPS)
        self.user: Any = ModuleType("vllm.v1.worker.gpu.model_states.default")
        self.swa.build, self.ops.record_monokernel = build, record_monokernel
        self.steps.build_attn_metadata = self.user.build_attn_metadata = build_attn_metadata
        self.recorded: Any = None
        self.deferring = False

    def modules(self) -> dict[str, ModuleType]:
        parents = {name[:at] for name in (OPS, STEPS) for at in range(len(name)) if name[at] == "."}
        mine = {module.__name__: module for module in (self.swa, self.ops, self.steps, self.user)}
        return {**{name: ModuleType(name) for name in parents}, **mine}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Vllm]:
    made = Vllm()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.33.0")
    monkeypatch.setenv("SWA_DECODE_META", "1")
    monkeypatch.delenv("SWA_DECODE_META_DEFER", raising=False)
    caplog.set_level(logging.INFO, "vllm.swa_decode_meta")
    plugin.register.cache_clear()
    enabled.cache_clear()
    yield made
    plugin.register.cache_clear()
    enabled.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that was logged."""
    [record] = caplog.records
    return record.getMessage()


def test_vllm_finds_it() -> None:
    [found] = [each for each in entry_points(group="vllm.general_plugins") if each.name == "swa_decode_meta"]
    assert found.load() is plugin.register


def test_it_puts_build_in_place_once_and_says_so(vllm: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    plugin.register()
    assert "builds the SWA metadata of decode batches of vLLM 0.33.0" in said(caplog)
    assert vllm.swa.build.__module__ == "swa_decode_meta.kernel.build"
    config = SimpleNamespace(kernel_config=SimpleNamespace(monokernel=True))
    vllm.ops.record_monokernel(config)
    assert vllm.recorded is config  # theirs still hears of it, and so does ours
    assert BUILD._monokernel
    assert vllm.steps.build_attn_metadata is vllm.step


@pytest.mark.parametrize(("value", "there", "mine"), [("0", True, False), (None, True, True), (None, False, False)])
def test_where_it_stays_out(
    value: str | None, there: bool, mine: bool, vllm: Vllm, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWA_DECODE_META")
    if value is not None:
        monkeypatch.setenv("SWA_DECODE_META", value)
    monkeypatch.setattr(plugin, "on_gfx942", lambda: there)
    plugin.register()
    assert (vllm.swa.build is not vllm.theirs) == mine
    assert ("stays in place" in said(caplog)) == (not mine)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda vllm, patch: patch.setattr(plugin, "vllm_version", lambda: "0.34.1"),
            "expected version 0.33, got 0.34",
        ),
        (lambda vllm, patch: setattr(vllm.swa, "build", lambda builder, cam: None), "got builder, cam"),
        (lambda vllm, patch: delattr(vllm.ops, "record_monokernel"), "record_monokernel: expected (vllm_config)"),
        (lambda vllm, patch: patch.setitem(sys.modules, OPS, None), OPS),
        (lambda vllm, patch: patch.setenv("SWA_DECODE_META", "on"), "SWA_DECODE_META: expected 0 or 1, got 'on'"),
        (lambda vllm, patch: patch.setenv("SWA_DECODE_META_DEFER", "2"), "SWA_DECODE_META_DEFER: expected 0 or 1"),
    ],
    ids=["version", "build", "record", "module", "switch", "defer"],
)
def test_what_is_not_as_expected_leaves_vllm_alone(
    change: Any, words: str, vllm: Vllm, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(vllm, monkeypatch)
    build, step = vllm.swa.build, vllm.steps.build_attn_metadata
    plugin.register()
    assert said(caplog).startswith("swa-decode-meta: vLLM's own SWA metadata build stays in place: ")
    assert words in said(caplog)
    assert vllm.swa.build is build
    assert vllm.steps.build_attn_metadata is step


def test_an_object_of_another_vllm_brings_theirs_back(vllm: Vllm, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise VllmMismatchError("builder.decode_swa_lens: expected as in vLLM 0.33, got none; the vLLM here is 0.33.9")

    monkeypatch.setattr(plugin, "build", fails)
    plugin.register()
    caplog.clear()
    for _ in range(2):
        assert vllm.swa.build(*range(6)) == "theirs"
    assert "back to vLLM's own" in said(caplog)
    assert "builder.decode_swa_lens" in said(caplog)


def test_steps_are_deferred_where_that_is_asked_for(vllm: Vllm, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWA_DECODE_META_DEFER", "1")
    plugin.register()
    assert said(caplog).endswith("those of a step together")
    for module in (vllm.steps, vllm.user):  # also where it was imported by name before
        vllm.deferring = False
        assert module.build_attn_metadata() == "a step"
        assert vllm.deferring
