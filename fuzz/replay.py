"""Runs case files again: FIXED, FAILED with the difference, or ERROR."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..spec import ArgumentError, Case, CaseFileError, load_cases
from .harness import expect, judge
from .image import placements
from .journal import read_journal
from .runner import HarnessError, Runner
from .target import Target, check_shape

MAX_ELEMENTS = 2**27  # of all tensors of a case with their gaps and spare rows: it is held several times over


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The case files among `paths`, folders searched; journals of a killed campaign too. Raises CaseFileError."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*.json") if p.name != "campaign.json")
            inside += sorted(p for p in path.rglob("*.npz") if p.parent.name == "pending")
            if not inside:
                raise CaseFileError(path, "", "holds no case files")
            files += inside
        else:
            files.append(path)
    return files


def read(path: Path) -> list[Case]:
    """The cases of one file. Raises CaseFileError."""
    cases = [read_journal(path)] if path.suffix == ".npz" else load_cases(path)
    for i, case in enumerate(cases):
        try:
            check_shape(case.target)
        except ArgumentError as error:
            raise CaseFileError(
                path, f"[{i}].{error.argument}", f"expected {error.expected}, got {error.got}"
            ) from None
        elements = sum(place.size for batch in case.step for place in placements(batch, case.buffers).values())
        if elements > MAX_ELEMENTS:
            raise CaseFileError(path, f"[{i}].buffers", f"tensors of {elements} elements, above {MAX_ELEMENTS}")
    return cases


def replay(target: Target, paths: Sequence[Path], hang_seconds: float, echo: Callable[[str], None]) -> int:
    """Judge every case of `paths` on `target`. Returns the exit code: 0, 1 for a FAILED, 2 or 3 for an ERROR.

    Raises ArgumentError or BackendError when the target cannot run, CaseFileError for a folder without cases.
    """
    code = 0
    counts = {"FIXED": 0, "FAILED": 0, "ERROR": 0}
    files = files_of(paths)
    with Runner(target, hang_seconds) as runner:
        for name, outcome, exit_code in _outcomes(runner, files):
            word = outcome.split(":")[0]
            counts[word] += 1
            echo(f"{word} {name}{outcome[len(word) :]}")
            # A failure found outranks an error, and a fault of ours outranks a bad file.
            code = exit_code if code == 0 or exit_code == 1 else (code if code == 1 else max(code, exit_code))
        versions = ", ".join(f"{key} {version}" for key, version in runner.versions.items())
    echo(f"target {target.name} on {runner.backend} ({versions}): " + ", ".join(f"{n} {w}" for w, n in counts.items()))
    return code


def _outcomes(runner: Runner, files: Sequence[Path]) -> Iterator[tuple[str, str, int]]:
    for path in files:
        try:
            cases = read(path)
        except CaseFileError as error:
            yield str(path), f"ERROR: {': '.join(part for part in (error.field, error.problem) if part)}", 2
            continue
        for i, case in enumerate(cases):
            name = str(path) if len(cases) == 1 else f"{path}[{i}] {' '.join(case.name.split())}".rstrip()
            yield (name, *_outcome(case, runner))


def _outcome(case: Case, runner: Runner) -> tuple[str, int]:
    try:
        if case.expected is not None:
            tensor = expect(case.batch, plain_too=True).difference(case.expected)
            if tensor is not None:
                return f"ERROR: the file expects another {tensor} than the oracles", 3
        verdict = judge(case, runner)
    except HarnessError as error:
        return f"ERROR: {error}", 3
    return ("FIXED", 0) if verdict is None else (f"FAILED: {verdict}", 1)
