"""The figures of `bench_kernel`, read, as tables and as a plot. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..spec import BackendError, CaseFileError, read_bytes

FORMS = ("empty", "unfused", "launch", "prepared")
"""What builds one group, after the floor."""

STEP_FORMS = ("8 unfused", "8 launches", "launch_step", "prepared step")
"""What builds the eight groups of a step."""

FIRST_LAUNCH = "launch, first time"
"""On the host: `launch` of buffers that it does not know, with all checks and Triton's own binding of arguments."""

PLOTS = (".svg", ".png")


def read_figures(path: Path) -> dict[str, Any]:
    """The figures that `bench kernel --json` wrote. Raises CaseFileError."""
    try:
        figures: dict[str, Any] = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CaseFileError(path, "", f"is not JSON: {error}") from None
    try:
        kernel_table(figures)
        _lines(figures, "causal")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise CaseFileError(path, "", "holds no figures of bench kernel") from None
    return figures


def kernel_table(figures: Mapping[str, Any]) -> str:
    """The figures as Markdown tables under a line of versions."""
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    host, warm_up = figures["host"], figures["warm_up"]
    parts = [
        f"{versions}. {figures['rounds']} rounds; times are min / median / max, ratios medians of the rounds' ratios.",
        "GPU time of one group, from graphs:",
        _gpu_table(figures, 1),
        "GPU time of a step's 8 groups, from graphs:",
        _gpu_table(figures, 8),
        f"Time of a call from Python, {host['rows']} rows, {host['calls']} calls and then one synchronize:",
        _table(("called",), [((), host["forms"])]),
        "Warm-up with an empty Triton cache:",
        markdown(
            ("batch", "first launch, s", "prepare, s", "kernels"),
            [
                (form, f"{cold['launch_s']:.2f}", f"{cold['prepare_s']:.2f}", cold["kernels"])
                for form, cold in warm_up.items()
            ],
        ),
    ]
    return "\n\n".join(parts)


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Draw GPU time over rows at pages of 64, causal and DSpark side by side, as SVG or PNG by the path's suffix.

    The same figures make the same SVG. Raises BackendError without matplotlib, CaseFileError when it cannot be written.
    """
    need_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "swa_decode_meta", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, form in zip(panels, ("causal", "DSpark"), strict=True):
            for name, points in _lines(figures, form).items():
                floor = name == "empty"
                of_step = name in STEP_FORMS or name.startswith("8 ")
                style = {"linestyle": "--", "color": "black"} if floor else {"marker": "s" if of_step else "o", "ms": 4}
                axes.plot(*zip(*points, strict=True), label="floor: an empty kernel" if floor else name, **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_title(form)
            axes.set_xlabel("rows")
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("GPU time, µs")
        figure.suptitle(f"{figures['versions'].get('device', '')}: decode metadata, pages of 64")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The date alone would make two drawings of the same figures differ.
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise CaseFileError(path, "", f"cannot be written: {error.strerror or error}") from None


def need_matplotlib() -> None:
    """Raises BackendError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BackendError("matplotlib is not installed; the bench extra, swa-decode-meta[bench], has it") from None


def markdown(heads: Sequence[str], lines: Iterable[Sequence[object]], words: int = 1) -> str:
    """A Markdown table that also reads well as it is. The first `words` columns hold words, the others numbers."""
    cells = [list(map(str, line)) for line in (heads, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * n if i < words else "-" * (n - 1) + ":" for i, n in enumerate(widths)])
    padded = (
        [cell.ljust(n) if i < words else cell.rjust(n) for i, (cell, n) in enumerate(zip(line, widths, strict=True))]
        for line in cells
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _gpu_table(figures: Mapping[str, Any], groups: int) -> str:
    measured = [entry for entry in figures["gpu"] if entry["groups"] == groups]
    return _table(
        ("batch", "pages of", "rows", "built by"),
        [((entry["form"], entry["page"], entry["rows"]), entry["forms"]) for entry in measured],
    )


def _table(heads: Sequence[str], measured: Sequence[tuple[Sequence[object], Mapping[str, Any]]]) -> str:
    """Forms measured side by side, one line each: what was measured, the form, its time, its ratios to others."""
    bases = list(dict.fromkeys(base for _, forms in measured for form in forms.values() for base in form["ratio"]))
    lines = [
        (
            *what,
            name,
            " / ".join(f"{form['us'][key]:.3g}" for key in ("min", "median", "max")),
            *(f"{form['ratio'][base]:.3g}" for base in bases),
        )
        for what, forms in measured
        for name, form in forms.items()
    ]
    return markdown((*heads, "µs", *(f"times {base}" for base in bases)), lines, words=len(heads))


def _lines(figures: Mapping[str, Any], form: str) -> dict[str, list[tuple[int, float]]]:
    """By name, the points (rows, µs) of each line of a panel; the floor and `prepared` are those of one group."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for groups in (1, 8):
        for entry in figures["gpu"]:
            if (entry["form"], entry["page"], entry["groups"]) != (form, 64, groups):
                continue
            for name, measured in entry["forms"].items():
                if groups == 1 or name not in FORMS:
                    lines.setdefault(name, []).append((entry["rows"], measured["us"]["median"]))
    return lines
