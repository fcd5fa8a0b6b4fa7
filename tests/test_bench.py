"""`bench`: figures as tables and as a plot, misuse, what is absent, and on a GPU a short measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swa_decode_meta.fuzz.figures import FIRST_LAUNCH, FORMS, STEP_FORMS, kernel_table, plot, read_figures
from swa_decode_meta.spec import CaseFileError
from tests.commands import run
from tests.test_cli import one_line

NOWHERE = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def forms(names: tuple[str, ...], to: tuple[str, ...], rows: int = 1) -> dict[str, Any]:
    """Made-up figures of forms: the one at place i takes i + 1 units of time."""
    units = {name: place + 1 for place, name in enumerate(names)}
    return {
        name: {
            "us": {"min": 0.5 * unit * rows, "median": 1.0 * unit * rows, "max": 123.456 * unit * rows},
            "ratio": {base: unit / units[base] for base in to},
        }
        for name, unit in units.items()
    }


def figures() -> dict[str, Any]:
    """Figures as run_kernel gives them, made up."""
    gpu = []
    for form, width in (("causal", 128), ("DSpark", 192)):
        for page, rows in ((64, 1), (64, 1024), (128, 1)):
            size = {"form": form, "width": width, "page": page, "rows": rows, "requests": rows, "sets": 4}
            gpu.append({**size, "groups": 1, "forms": forms((*FORMS, "mine"), ("empty", "unfused"), rows)})
            if page == 64:
                names = ("empty", "prepared", *STEP_FORMS, "8 mine")
                gpu.append({**size, "groups": 8, "forms": forms(names, ("empty", "prepared", "8 unfused"), rows)})
    return {
        "versions": {"python": "3.12", "torch": "2.9", "triton": "3.5", "hip": "7.0", "device": "A GPU"},
        "rounds": 15,
        "gpu": gpu,
        "host": {
            "rows": 32,
            "calls": 500,
            "forms": forms(("torch.add(out=)", "launch"), ("torch.add(out=)", "launch")),
        },
        "warm_up": {name: {"launch_s": 1.25, "prepare_s": 4.5, "kernels": 4} for name in ("causal", "DSpark")},
    }


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A file of figures."""
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(figures()))
    return path


# ------------------------------------------------------------ tables and plots


def test_the_table_has_every_measurement() -> None:
    text = kernel_table(figures())
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert lines[0][0].startswith("python 3.12, torch 2.9, triton 3.5, hip 7.0, device A GPU. 15 rounds;")
    assert ["causal", "64", "1", "unfused", "1 / 2 / 247", "2", "1"] in lines
    assert ["DSpark", "128", "1", "mine", "2.5 / 5 / 617", "5", "2.5"] in lines
    assert ["DSpark", "64", "1", "prepared step", "3 / 6 / 741", "6", "3", "2"] in lines
    assert ["launch", "1 / 2 / 247", "2", "1"] in lines
    assert ["causal", "1.25", "4.50", "4"] in lines
    assert sum(len(line) == 7 for line in lines) == 6 * 5 + 2
    assert sum(len(line) == 8 for line in lines) == 4 * 7 + 2


def test_every_table_is_a_markdown_table() -> None:
    for part in kernel_table(figures()).split("\n\n"):
        if part.startswith("|"):
            assert len({line.count("|") for line in part.splitlines()}) == 1
            assert len({len(line) for line in part.splitlines()}) == 1
            assert set(part.splitlines()[1]) == set("|-: ")


def test_a_plot_is_the_same_svg_each_time_and_labels_every_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the bench extra")
    one, other = tmp_path / "new" / "one.svg", tmp_path / "other.svg"
    plot(figures(), one)
    plot(figures(), other)
    text = one.read_text()
    assert text == other.read_text()
    for label in ("unfused", "launch", "prepared", "mine", *STEP_FORMS, "8 mine", "floor: an empty kernel"):
        assert f">{label}<" in text
    for label in ("causal", "DSpark", "rows", "GPU time, µs", "A GPU: decode metadata, pages of 64"):
        assert f">{label}<" in text
    assert "<dc:date>" not in text
    plot(figures(), tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CaseFileError, match="cannot be written"):
        plot(figures(), tmp_path / "one.png" / "below.svg")


def test_figures_measured_before_are_shown_anywhere(measured: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "torch.py").write_text("raise ModuleNotFoundError('no torch')")
    copy = tmp_path / "copy.json"
    ended = run("bench", "kernel", "--figures", measured, "--json", copy, PYTHONPATH=str(tmp_path / "blocked"))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == kernel_table(figures()) + "\n"
    assert read_figures(copy) == figures()


def test_figures_measured_before_are_drawn(measured: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the bench extra")
    assert run("bench", "kernel", "--figures", measured, "--plot", tmp_path / "plot.svg").code == 0
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


# ------------------------------------------------------------ misuse, and what is absent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["oracles", "--rounds", "3"], "--rounds is for bench kernel, not for bench oracles"),
        (["--also", "mine=a:b"], "--also is for bench kernel"),
        (["gfx942", "--plot", "x.svg"], "--plot is for bench kernel"),
        (["gfx90a", "--time", "3s"], "--time is for bench oracles, not for bench gfx90a"),
        (["kernel", "--time", "3s"], "--time is for bench oracles"),
        (["kernel", "--rounds", "0"], "--rounds"),
        (["kernel", "--plot", "x.pdf"], "ends neither in .svg nor in .png"),
        (["kernel", "--figures", "absent.json"], "absent.json"),
        (["kernel", "--also", "a:b"], "--also"),
        (["kernel", "--also", "=a:b"], "--also"),
        (["kernel", "--also", "launch=a:b"], "--also"),
        (["kernel", "--also", "x=a:b", "--also", "x=c:d"], "--also"),
        (["kernel", "--also", "x=a.py:b"], "--also"),
        (["kernel", "--also", "x=a:b@gpu"], "--also"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_is_refused_in_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    ended = run("bench", *arguments, cwd=tmp_path)
    assert ended.code == 2
    assert words in one_line(ended)
    assert list(tmp_path.iterdir()) == []


def test_figures_are_not_measured_and_read_at_once(measured: Path) -> None:
    for more in (["--rounds", 3], ["--also", "x=a:b"]):
        ended = run("bench", "kernel", "--figures", measured, *more)
        assert ended.code == 2
        assert "without --rounds and --also" in one_line(ended)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "holds no figures of bench kernel"),
        ("{}", "holds no figures of bench kernel"),
        ('{"versions": {}, "measurements": []}', "holds no figures of bench kernel"),
        (json.dumps({**figures(), "gpu": [{"rows": 1}]}), "holds no figures of bench kernel"),
        (json.dumps({**figures(), "warm_up": 3}), "holds no figures of bench kernel"),
    ],
    ids=["empty", "cut off", "deep", "no UTF-8", "list", "no keys", "the oracles'", "odd sizes", "odd warm-up"],
)
def test_a_bad_file_of_figures_is_an_error_of_one_line(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content.encode("latin-1"))
    ended = run("bench", "kernel", "--figures", path)
    assert ended.code == 2
    assert "bad.json" in one_line(ended)
    assert words in one_line(ended)


@pytest.mark.kernel
def test_without_a_gpu_the_kernel_is_not_measured(tmp_path: Path) -> None:
    for arguments in ([], ["--also", "x=absent:launch"]):
        ended = run("bench", "kernel", *arguments, "--json", tmp_path / "figures.json", **NOWHERE)
        assert ended.code == 4
        assert "no GPU" in one_line(ended)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["kernel", "gfx942"])
def test_without_torch_there_is_no_kernel_to_measure(what: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    ended = run("bench", what, PYTHONPATH=str(tmp_path))
    assert ended.code == 4
    assert "swa-decode-meta[kernel]" in one_line(ended)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("absent_module:launch", "absent_module"),
        ("json:absent", "absent"),
        ("sys:path", "not callable"),
        ("swa_decode_meta.kernel:launch_step", "takes launch's 15 arguments"),
    ],
)
def test_what_is_no_launch_is_refused(text: str, words: str) -> None:
    from swa_decode_meta.fuzz.bench_kernel import load
    from swa_decode_meta.fuzz.target import parse_target
    from swa_decode_meta.spec import ArgumentError

    with pytest.raises(ArgumentError, match=words) as caught:
        load(parse_target(text))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_a_short_measurement_of_the_kernel(tmp_path: Path) -> None:
    from swa_decode_meta.fuzz.bench_kernel import run_kernel
    from swa_decode_meta.kernel import unfused

    found = run_kernel(rounds=1, rows=(1, 64), also={"mine": unfused.launch})
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(found))
    assert read_figures(path) == found
    measured = [(entry["form"], entry["page"], entry["groups"], entry["rows"]) for entry in found["gpu"]]
    assert measured == [
        (form, page, groups, rows)
        for groups, sizes in ((1, ((64, 1), (64, 64), (128, 1))), (8, ((64, 1), (64, 64))))
        for form in ("causal", "DSpark")
        for page, rows in sizes
    ]
    for entry in found["gpu"]:
        names = {*FORMS, "mine"} if entry["groups"] == 1 else {"empty", "prepared", *STEP_FORMS, "8 mine"}
        assert set(entry["forms"]) == names
        for form in entry["forms"].values():
            assert 0 < form["us"]["min"] <= form["us"]["median"] <= form["us"]["max"] < 1e5
    calls = {"torch.add(out=)", FIRST_LAUNCH, "mine", *FORMS, "launch_step", "prepared step"}
    assert set(found["host"]["forms"]) == calls
    for cold in found["warm_up"].values():
        assert cold["launch_s"] > 0
        assert cold["prepare_s"] > 0
        assert cold["kernels"] == (4 if "hip" in found["versions"] else 5)


@pytest.mark.gpu
def test_what_is_wrong_is_not_timed() -> None:
    from swa_decode_meta.fuzz import bench_kernel
    from swa_decode_meta.fuzz.runner import HarnessError
    from swa_decode_meta.kernel import launch

    def wrong(*arguments: Any) -> None:
        launch(*arguments)
        arguments[3][-1:].fill_(1)

    size = bench_kernel._Size(32, 64, noncausal=False, groups=1)
    with pytest.raises(HarnessError, match="mine, causal, 1 group, pages of 64, 32 rows: lens is not what"):
        bench_kernel._on_gpu(size, 1, {"mine": wrong})
