"""The command line: exit codes, what it prints, what it leaves on disk, and how it takes bad input and bad luck."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swa_decode_meta.fuzz.features import reachable
from swa_decode_meta.fuzz.strategies import PROFILES
from swa_decode_meta.oracle import decode_meta
from swa_decode_meta.spec import BufferLayout, Case, load_case, load_cases, save_case
from tests.batches import REPORTED, REPORTED_FILE, served
from tests.commands import COMMAND, Ended, environment, execute, run

kernel = pytest.mark.kernel

MINE = """
import os, time
from pathlib import Path
from swa_decode_meta.kernel import launch as right

def wrong(*tensors_and_sizes):
    right(*tensors_and_sizes)
    lens = tensors_and_sizes[3]
    lens[: tensors_and_sizes[11]] += tensors_and_sizes[12] > 1

def hangs(*tensors_and_sizes):
    time.sleep(3600)

def slow(*tensors_and_sizes):
    time.sleep(0.05)
    wrong(*tensors_and_sizes)

def escapes(*tensors_and_sizes):
    raise ValueError("\\x1b[31mred\\ud800\\x07")

def wrong_until_edited(*tensors_and_sizes):
    Path("mine.py").write_text("1 / 0")
    wrong(*tensors_and_sizes)

def wrong_once(*tensors_and_sizes):
    first = not Path("seen").exists()
    Path("seen").touch()
    (wrong if first else right)(*tensors_and_sizes)

not_callable = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with targets of its own in mine.py."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "campaign.json").read_text())
    return found


def one_line(ended: Ended) -> str:
    """The error of a command that was refused, which is one line under click's two of usage."""
    lines = [line for line in ended.err.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(lines) == 1, ended.err
    assert len(lines[0]) < 600
    return lines[0]


# ------------------------------------------------------------ help and misuse


@pytest.mark.parametrize("verb", ["", "fuzz", "replay", "show", "check", "bench"])
def test_every_verb_has_help(verb: str) -> None:
    for flag in ("--help", "-h"):
        ended = run(*[verb] * bool(verb), flag)
        assert ended.code == 0
        assert ended.out.startswith("Usage:")
        assert ended.err == ""


def test_the_console_command_is_the_same_as_the_module() -> None:
    assert execute(["swa-decode-meta", "--version"]) == run("--version")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["fizz"], "fizz"),
        (["fuzz", "--profile", "odd"], "--profile"),
        (["fuzz", "--time", "soon"], "--time"),
        (["fuzz", "--time", "0s"], "--time"),
        (["fuzz", "--time", "nan"], "--time"),
        (["fuzz", "--examples", "0"], "--examples"),
        (["fuzz", "--seed", "-1"], "--seed"),
        (["fuzz", "--workers", "0"], "--workers"),
        (["fuzz", "--hang", "-1s"], "--hang"),
        (["fuzz", "--target", "kernel@tpu"], "target"),
        (["fuzz", "--target", "a b:c"], "target"),
        (["fuzz", "--target", "module"], "target"),
        (["replay"], "FILE"),
        (["replay", "absent.json"], "absent.json"),
        (["replay", "--target", "x", str(REPORTED_FILE)], "target"),
        (["show"], "FILE"),
        (["show", "absent.json"], "absent.json"),
        (["check", "absent.json"], "absent.json"),
        (["check", "--time", "0"], "--time"),
        (["bench", "--time", "x"], "--time"),
        (["bench", "gfx1100"], "gfx1100"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_misuse_is_refused_in_one_line(arguments: list[str], word: str, tmp_path: Path) -> None:
    ended = run(*arguments, cwd=tmp_path)
    assert ended.code == 2
    assert word in one_line(ended)
    assert list(tmp_path.iterdir()) == []


@kernel
@pytest.mark.parametrize("target", ["absent:launch", "mine:absent", "mine:not_callable", "broken:launch"])
def test_a_target_that_does_not_load_is_misuse(target: str, folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0")
    for verb in (["fuzz", "--out", "new"], ["replay", REPORTED_FILE]):
        ended = run(*verb, "--target", target, cwd=folder)
        assert ended.code == 2
        assert target in one_line(ended)
    assert not (folder / "new").exists()


@kernel
def test_a_campaign_wants_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (".", "file", "file/below", "x" * 300):
        ended = run("fuzz", "--examples", 1, "--out", out, cwd=tmp_path)
        assert ended.code == 2
        assert out in one_line(ended)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ------------------------------------------------------------ what is absent


@contextmanager
def blocked(folder: Path, *modules: str) -> Iterator[dict[str, str]]:
    """An environment in which these modules are not installed."""
    for module in modules:
        (folder / "blocked").mkdir(exist_ok=True)
        (folder / "blocked" / f"{module}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{module}'\")")
    yield {"PYTHONPATH": str(folder / "blocked")}


@pytest.mark.parametrize("module", ["torch", "triton", "hypothesis"])
def test_without_what_it_needs_a_campaign_ends_with_4(module: str, tmp_path: Path) -> None:
    with blocked(tmp_path, module) as variables:
        ended = run("fuzz", "--examples", 1, "--out", tmp_path / "out", **variables)
    assert ended.code == 4
    assert module in one_line(ended)
    assert "swa-decode-meta[" in ended.err
    assert not (tmp_path / "out").exists()


def test_without_torch_the_oracles_can_be_checked_and_cases_drawn(tmp_path: Path) -> None:
    with blocked(tmp_path, "torch", "triton") as variables:
        ended = run("check", REPORTED_FILE, "--time", "1s", **variables)
        assert ended.code == 0, ended.out
        assert run("replay", REPORTED_FILE, **variables).code == 4
    with blocked(tmp_path, "hypothesis") as variables:
        ended = run("show", REPORTED_FILE, **variables)
        assert ended.code == 0
        assert all(case.name in ended.out for case in REPORTED)
        assert run("check", **variables).code == 4


@kernel
def test_a_gpu_that_is_not_there_is_no_failure(tmp_path: Path, backend: str) -> None:
    ended = run(
        "fuzz", "--target", "kernel@gpu", "--out", tmp_path / "out", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES=""
    )
    assert ended.code == 4
    assert "no GPU" in one_line(ended)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------ a campaign that finds nothing


@kernel
def test_a_campaign_without_a_finding(tmp_path: Path) -> None:
    ended = run("fuzz", "--examples", 30, "--workers", 2, "--out", tmp_path / "new" / "campaign", "--seed", 5)
    assert ended.code == 0
    assert ended.last == "0 failures"
    for words in (
        "stopped: 15 cases",
        "seed 5",
        "30 cases in",
        "cases/s",
        f"of the {len(reachable(PROFILES))} that",
        "torch ",
    ):
        assert words in ended.out
    assert [path.name for path in (tmp_path / "new" / "campaign").iterdir()] == ["campaign.json"]
    found = state(tmp_path / "new" / "campaign")
    assert found["finished"] is True
    assert found["cases"] == 30
    assert found["failures"] == found["unreproducible"] == found["errors"] == []
    assert sum(found["features"].values()) > 30


@kernel
def test_a_seed_draws_the_same_cases(tmp_path: Path) -> None:
    features = []
    for name in ("one", "other"):
        run("fuzz", "--examples", 9, "--workers", 1, "--seed", 1, "--out", tmp_path / name)
        features.append(state(tmp_path / name)["features"])
    assert features[0] == features[1]


@kernel
def test_a_campaign_ends_when_its_time_is_over(tmp_path: Path) -> None:
    ended = run("fuzz", "--time", "2s", "--profile", "serving", "--workers", 1, "--out", tmp_path / "out")
    assert ended.code == 0
    assert "stopped: 2 s are over" in ended.out
    assert state(tmp_path / "out")["profiles"] == ["serving"]


# ------------------------------------------------------------ a campaign that finds something


@kernel
def test_a_failure_is_saved_shrunk_and_replayed_by_the_last_line(folder: Path) -> None:
    ended = run("fuzz", "--target", "mine:wrong", "--until-failure", "--workers", 1, "--out", "my out", cwd=folder)
    assert ended.code == 1
    assert "stopped: a failure was found" in ended.out
    [path] = (folder / "my out" / "failures").iterdir()
    assert path.stem in ended.last
    case = load_case(path)
    assert case.batch.num_tokens == 1
    assert case.finding["tensor"] == "lens"
    assert case.expected is not None
    assert case.expected.difference(decode_meta(case.batch)) is None
    assert set(case.versions) >= {"python", "torch", "triton"}
    assert case.target["name"] == "mine:wrong"

    again = execute(["sh", "-c", ended.last], folder)
    assert again.code == 1
    assert again.out.startswith(f"FAILED my out/failures/{path.name}: MISMATCH")
    fixed = run("replay", "my out", cwd=folder)
    assert fixed.code == 0
    assert fixed.out.startswith(f"FIXED my out/failures/{path.name}")
    shown = run("show", path, cwd=folder)
    assert shown.code == 0
    assert "MISMATCH" in shown.out


@kernel
def test_what_a_target_says_cannot_steer_the_terminal(folder: Path) -> None:
    ended = run("fuzz", "--target", "mine:escapes", "--until-failure", "--workers", 1, "--out", "out", cwd=folder)
    assert ended.code == 1
    assert "ValueError: ?[31mred??" in ended.out
    assert ended.out.replace("\n", "").isprintable()


@kernel
def test_a_reader_who_has_gone_does_not_end_a_campaign(folder: Path) -> None:
    command = " ".join([*COMMAND, "fuzz --examples 9 --workers 1 --out out | head -n 1; exit ${PIPESTATUS[0]}"])
    ended = execute(["bash", "-c", command], folder)
    assert ended.code == 0
    assert ended.out.count("\n") == 1
    assert state(folder / "out")["finished"] is True


@kernel
def test_a_hang_is_a_failure(folder: Path) -> None:
    ended = run(
        "fuzz", "--target", "mine:hangs@interpreter", "--hang", "0.5s", "--examples", 2, "--workers", 1, "--out", "out",
        cwd=folder,
    )  # fmt: skip
    assert ended.code == 1
    assert "HANG" in ended.out


@kernel
def test_what_was_found_outlives_a_target_that_no_longer_loads(folder: Path) -> None:
    target = ("--target", "mine:wrong_until_edited", "--examples", 5, "--workers", 1)
    ended = run("fuzz", *target, "--out", "out", cwd=folder)
    assert ended.code == 3
    assert "no longer loads" in ended.out
    [path] = (folder / "out" / "failures").iterdir()
    assert load_case(path).finding["tensor"] == "lens"
    assert f"found, neither shrunk nor run again: out/failures/{path.name}" in ended.out


@kernel
def test_a_failure_that_does_not_repeat_is_set_aside_and_ends_with_3(folder: Path) -> None:
    ended = run("fuzz", "--target", "mine:wrong_once", "--examples", 5, "--workers", 1, "--out", "out", cwd=folder)
    assert ended.code == 3
    assert "did not fail again" in ended.out
    [path] = (folder / "out" / "unreproducible").iterdir()
    assert load_case(path).finding["tensor"] == "lens"
    assert not (folder / "out" / "failures").exists()
    assert state(folder / "out")["unreproducible"] == [path.name]


BROKEN = """
import swa_decode_meta.oracle.plain as plain
plain.valid = lambda x, t: x.slot_mapping[t] > 0
"""


@kernel
def test_oracles_that_differ_are_never_a_failure_of_the_target(folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "sitecustomize.py").write_text(BROKEN)
    variables = {"PYTHONPATH": str(folder / "broken")}
    for target in ("kernel", "mine:wrong"):
        ended = run(
            "fuzz", "--target", target, "--examples", 50, "--workers", 1, "--out", target, cwd=folder, **variables
        )
        assert ended.code == 3
        assert "the plain and the vectorised oracle differ" in ended.out
        assert not (folder / target / "failures").exists()
        [path] = (folder / target / "errors").iterdir()
        assert f"the case is in {target}/errors/{path.name}" in ended.out
        assert load_case(path).batch.num_tokens
    ended = run("replay", "kernel", cwd=folder, **variables)
    assert ended.code == 3
    assert "ERROR" in ended.out
    assert run("check", "--time", "1s", cwd=folder, **variables).code == 3


# ------------------------------------------------------------ bad luck


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def started(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where the tests run in the background, the shell has them ignore Ctrl-C, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(what: Callable[[], object], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "did not happen"
        time.sleep(0.05)


def busy(folder: Path) -> Callable[[], bool]:
    """Whether a campaign has judged cases."""
    return lambda: (folder / "campaign.json").exists() and state(folder)["cases"] > 0


@kernel
def test_ctrl_c_is_a_clean_stop(tmp_path: Path) -> None:
    with started("fuzz", "--time", "1h", "--workers", 2, "--out", "out", cwd=tmp_path) as process:
        wait_until(busy(tmp_path / "out"))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stopped: interrupted" in out
    assert out.splitlines()[-1] == "0 failures"
    assert "Traceback" not in out
    assert state(tmp_path / "out")["finished"] is True
    assert not (tmp_path / "out" / "pending").exists()


@kernel
def test_a_killed_worker_is_a_harness_error_and_its_case_can_be_replayed(tmp_path: Path) -> None:
    with started("fuzz", "--time", "20s", "--workers", 2, "--out", "out", cwd=tmp_path) as process:
        wait_until(busy(tmp_path / "out"))
        os.kill(children(process.pid)[0], signal.SIGKILL)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "died" in out
    assert list((tmp_path / "out" / "pending").glob("*.npz"))
    ended = run("replay", "out", cwd=tmp_path)
    assert ended.code == 0
    assert "FIXED" in ended.out


@kernel
def test_what_was_found_outlives_a_killed_campaign_and_its_processes_do_not(folder: Path) -> None:
    with started("fuzz", "--target", "mine:slow", "--workers", 1, "--out", "out", cwd=folder) as process:
        wait_until(lambda: list((folder / "out" / "failures").glob("*.json")))
        [worker] = children(process.pid)
        below = [worker, *children(worker)]
        process.kill()
        process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 30)
    [path] = (folder / "out" / "failures").glob("*.json")
    assert load_case(path).finding["tensor"] == "lens"


@kernel
def test_a_full_disk_is_a_harness_error(tmp_path: Path) -> None:
    """A limit on the size of files refuses as a full disk does."""
    command = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *COMMAND]
    command += ["fuzz", "--examples", "9", "--workers", "1", "--profile", "serving", "--out", "out"]
    ended = execute(command, tmp_path)
    assert ended.code == 3, ended.out
    assert "error" in ended.out + ended.err


# ------------------------------------------------------------ replay and show


@kernel
def test_replay_says_fixed_for_every_reported_case(tmp_path: Path) -> None:
    ended = run("replay", REPORTED_FILE)
    assert ended.code == 0
    assert f"{len(REPORTED)} FIXED, 0 FAILED, 0 ERROR" in ended.last


@kernel
def test_replay_judges_every_file_and_ends_with_the_gravest(folder: Path) -> None:
    cases = folder / "cases"
    save_case(cases / "a.json", Case(served(2)))
    wrong = replace(decode_meta(served(2)), lens=np.array([1, 1], np.int32))
    save_case(cases / "b.json", Case(served(2), expected=wrong))
    (cases / "c.json").write_text("{")
    save_case(cases / "c2.json", Case(served(2), BufferLayout(spare_rows=2**20, indices_row_gap=2**20)))
    shutil.copy(REPORTED_FILE, cases / "d.json")
    ended = run("replay", cases, cwd=folder)
    assert ended.code == 3
    assert "ERROR" in ended.out
    assert "expects another lens than the oracles" in ended.out
    assert "c.json: is cut off" in ended.out
    assert f"{1 + len(REPORTED)} FIXED, 0 FAILED, 3 ERROR" in ended.last
    (cases / "b.json").unlink()
    assert run("replay", cases, cwd=folder).code == 2
    assert run("replay", cases, "--target", "mine:wrong", cwd=folder).code == 1


@pytest.mark.parametrize("verb", ["replay", "show", "check"])
@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("", "is cut off"),
        ("[]", ""),
        ('{"version": 2}', "version"),
        ('{"window": 1}', "is missing"),
        ("\x00\x01", "JSON"),
    ],
)
def test_a_bad_file_is_an_error_of_one_line(verb: str, content: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    if content == "[]":
        assert load_cases(path) == []
        return
    if verb == "replay":
        pytest.importorskip("torch")
        ended = run(verb, path)
        words = ended.out.splitlines()[0]
        assert words.startswith("ERROR")
    else:
        ended = run(verb, path)
        words = one_line(ended)
    assert ended.code == 2
    assert field in words
    assert "bad.json" in words


def test_a_folder_without_cases_is_misuse(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = run("replay", tmp_path)
    assert ended.code == 2
    assert "holds no case files" in one_line(ended)


# ------------------------------------------------------------ bench


def test_bench_prints_a_table_and_writes_its_figures(tmp_path: Path) -> None:
    ended = run("bench", "--time", "0.1s", "--json", tmp_path / "figures.json")
    assert ended.code == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["measurements"]) == 5
    assert "| rows: 32, window 128, table [32, 2050] |" in ended.out
