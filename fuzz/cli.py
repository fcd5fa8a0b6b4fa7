"""The command line, `swa-decode-meta`. Exit codes: 0 nothing found, 1 a failure found, 2 misuse, 3 a fault of the
harness or the oracles, 4 the backend is absent.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from ..spec import ArgumentError, BackendError, CaseFileError, printable, write_atomically
from .figures import FORMS, PLOTS, STEP_FORMS, kernel_table, need_matplotlib, read_figures
from .figures import plot as draw
from .target import EMULATED, Target, parse_target

FOUND, MISUSE, HARNESS, ABSENT = 1, 2, 3, 4
PROFILES = ("serving", "legal", "hostile")
_F = TypeVar("_F", bound=Callable[..., Any])


class _Seconds(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic in click 8.5, not before
    """A time: a number, or a number with s, m or h."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", str(value).strip())
        seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else 0.0
        if not 0 < seconds < 1e9:
            self.fail(f"{value!r} is not a time such as 60s, 10m or 8h", param, ctx)
        return seconds


def _target_option(command: _F) -> _F:
    return click.option(
        "--target",
        default="kernel",
        show_default=True,
        metavar="TARGET",
        help="kernel, or package.module:function with the signature of vLLM's launch; @gpu or @interpreter after it.",
    )(command)


def _hang_option(command: _F) -> _F:
    return click.option(
        "--hang",
        default="30s",
        type=_Seconds(),
        show_default=True,
        help="A launch without an answer for so long hangs.",
    )(command)


def _also(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for value in values:
        name, _, place = value.partition("=")
        if not re.fullmatch(r"\w[\w .+-]*", name) or name in (*FORMS, *STEP_FORMS, *found):
            raise click.BadParameter(f"{value!r} does not begin with a name of its own and =", ctx, param)
        try:
            found[name] = parse_target(place)
        except ArgumentError as error:
            raise click.BadParameter(f"{value!r}: {error}", ctx, param) from None
        if found[name].backend:
            raise click.BadParameter(f"{value!r}: the kernel is timed on the GPU: without @", ctx, param)
    return found


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="swa-decode-meta", prog_name="swa-decode-meta")
def cli() -> None:
    """Hold a sliding-window decode metadata kernel to its executable specification.

    Exit codes: 0 nothing found, 1 a failure found, 2 misuse, 3 a fault of the harness or the oracles,
    4 the backend (torch, triton, a GPU) is absent.
    """


@cli.command()
@_target_option
@click.option(
    "--time",
    "seconds",
    type=_Seconds(),
    help="Stop after this time: 60s, 10m, 8h. [default: 60s, if nothing else ends it]",
)
@click.option("--examples", type=click.IntRange(1), help="Stop after so many cases instead.")
@click.option("--profile", type=click.Choice([*PROFILES, "all"]), default="all", show_default=True)
@click.option("--seed", type=click.IntRange(0), help="Draw the same cases again. [default: a new one]")
@click.option(
    "--workers", type=click.IntRange(1, 1024), help="Processes side by side. [default: one a core, at most 8]"
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the campaign. [default: campaigns/DATE-TIME]")
@click.option("--until-failure", is_flag=True, help="Stop at the first failure, once it is shrunk.")
@_hang_option
def fuzz(
    target: str,
    seconds: float | None,
    examples: int | None,
    profile: str,
    seed: int | None,
    workers: int | None,
    out: Path | None,
    until_failure: bool,
    hang: float,
) -> int:
    """Fuzz a target: draw batches, diff what it writes against the oracle, shrink and save what fails."""
    _need_hypothesis()
    from .campaign import Campaign

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as clean a stop as Ctrl-C
    workers = workers or min(8, os.cpu_count() or 1)
    if examples is not None:
        workers = min(workers, examples)
    campaign = Campaign(
        target=parse_target(target),
        profiles=PROFILES if profile == "all" else (profile,),
        seed=secrets.randbits(32) if seed is None else seed,
        workers=workers,
        seconds=60.0 if seconds is None and examples is None and not until_failure else seconds,
        examples=examples,
        folder=out or Path("campaigns") / datetime.now().strftime("%Y%m%d-%H%M%S-%f"),
        until_failure=until_failure,
        hang_seconds=hang,
    )
    return campaign.run(_say, sys.stderr if sys.stderr.isatty() else None).exit_code


@cli.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="FILE...")
@_target_option
@_hang_option
def replay(paths: tuple[Path, ...], target: str, hang: float) -> int:
    """Run case files, or folders of them, on a target: FIXED, FAILED with the difference, or ERROR."""
    from .replay import replay as run

    return run(parse_target(target), paths, hang, _say)


@cli.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="FILE...")
def show(paths: tuple[Path, ...]) -> int:
    """Draw the batches of case files, or of folders of them: pages, windows, replay starts, holes, rows expected."""
    from .replay import files_of, read
    from .show import draw

    _say("\n\n".join(draw(case) for path in files_of(paths) for case in read(path)))
    return 0


@cli.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="[FILE]...")
@click.option("--time", "seconds", type=_Seconds(), default="20s", show_default=True, help="How long to draw batches.")
@click.option("--full", is_flag=True, help="Compare the oracles on the whole exhaustive preset (minutes).")
def check(paths: tuple[Path, ...], seconds: float, full: bool) -> int:
    """Check the oracles against each other, and case files against both. Needs neither torch nor a GPU."""
    _need_hypothesis()
    from .check import run

    return run(paths, seconds, _say, full=full)


@cli.command()
@click.argument("what", type=click.Choice(["oracles", "kernel", *EMULATED]), default="oracles", metavar="[WHAT]")
@click.option("--time", "seconds", type=_Seconds(), help="oracles: how long to measure. [default: 20s]")
@click.option("--rounds", type=click.IntRange(1), help="kernel: how often each form is timed. [default: 15]")
@click.option(
    "--also",
    multiple=True,
    callback=_also,
    metavar="NAME=TARGET",
    help="kernel: time this package.module:function too, a launch of vLLM's signature. May be given again.",
)
@click.option(
    "--figures",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="kernel: show what --json wrote before, on any machine, instead of measuring.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="kernel: draw GPU time over rows, as .svg or .png."
)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here too.")
def bench(
    what: str,
    seconds: float | None,
    rounds: int | None,
    also: dict[str, Target],
    figures: Path | None,
    plot: Path | None,
    path: Path | None,
) -> int:
    """Time the oracles or the kernel, or measure what the kernel compiles to.

    \b
    oracles   the two oracles side by side (the default)
    kernel    launches on this GPU side by side, for one group and for a step's 8
    gfx942    registers, spills and code of the kernel compiled for that GPU,
    gfx950    which need not be here, and by emulation what a launch asks of
    gfx90a    it; exit code 1 when a variant that service uses spills
    """
    given = {"--rounds": rounds, "--also": also or None, "--figures": figures, "--plot": plot}
    _only("oracles", what, {"--time": seconds})
    _only("kernel", what, given)
    if figures is not None and (rounds is not None or also):
        raise click.UsageError("--figures shows what was measured before: without --rounds and --also")
    if plot is not None and plot.suffix not in PLOTS:
        raise click.UsageError(f"--plot: {plot.name!r} ends neither in {' nor in '.join(PLOTS)}")
    code = 0
    if what == "oracles":
        from .bench import run_oracles, table

        found = run_oracles(seconds or 20.0)
        _say(table(found))
    elif what == "kernel":
        if plot is not None:
            need_matplotlib()
        found = read_figures(figures) if figures is not None else _measured(rounds or 15, also)
        _say(kernel_table(found))
    else:
        _need_kernel()
        from . import compiled
        from .cdna import cost

        found = {**compiled.figures(what), "costs": cost.costs(what)}
        _say(compiled.table(found) + "\n\n" + cost.table(found["costs"]))
        code = FOUND if compiled.spilling(found) else 0
    if path is not None:
        write_atomically(path, json.dumps(found, indent=1) + "\n")
    if plot is not None:
        draw(found, plot)
    return code


def _only(what: str, given: str, options: Mapping[str, object]) -> None:
    """Refuse options of one benchmark that are given with another."""
    for option, value in options.items():
        if value is not None and given != what:
            raise click.UsageError(f"{option} is for bench {what}, not for bench {given}")


def _measured(rounds: int, also: Mapping[str, Target]) -> dict[str, Any]:
    _need_kernel()
    from .bench_kernel import load, need_gpu, run_kernel

    need_gpu()
    return run_kernel(rounds, also={name: load(target) for name, target in also.items()})


def _say(text: str, err: bool = False) -> None:
    """Print text that may come from a target or a file. A reader who has gone does not end a campaign."""
    try:
        click.echo(printable(text), err=err)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno() if err else sys.stdout.fileno())


def _need_hypothesis() -> None:
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise BackendError("hypothesis is not installed; the fuzz extra, swa-decode-meta[fuzz], has it") from None


def _need_kernel() -> None:
    try:
        import torch  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:
        raise BackendError(f"{error}; the kernel extra, swa-decode-meta[kernel], has torch and triton") from None


def main() -> None:
    """The console command."""
    sys.exit(_run())


def _run() -> int:
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return MISUSE
    except BackendError as error:
        _say(f"error: {error}", err=True)
        return ABSENT
    except (ArgumentError, CaseFileError) as error:
        _say(f"error: {error}", err=True)
        return MISUSE
    except Exception as error:
        if os.environ.get("SWA_DECODE_META_TRACEBACK"):
            raise
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        _say(f"harness error: {words} (SWA_DECODE_META_TRACEBACK=1 shows where)", err=True)
        return HARNESS
    return int(code or 0)
