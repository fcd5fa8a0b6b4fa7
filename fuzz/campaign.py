"""A campaign: workers that fuzz a target side by side, what they report, and what is left on disk.

The folder of a campaign holds campaign.json (arguments, versions, totals), failures/ and unreproducible/ (a case file
for each fingerprint), errors/ (the cases that the harness or the oracles failed on) and, while cases are in flight,
pending/.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

from ..spec import ArgumentError, BackendError, CaseFileError, write_atomically
from .devices import pin
from .features import reachable
from .target import Target
from .worker import Ended, Found, Orders, Progress, Refused, Started

LIVE_SECONDS = 1.0  # between live lines on a terminal
PLAIN_SECONDS = 10.0  # between lines elsewhere
GRACE_SECONDS = 30.0  # for a worker to finish its case once told to stop
_WORKER = "from swa_decode_meta.fuzz.worker import main; main()"


@dataclass
class Totals:
    """What all workers have done so far. started: when the first of them had its target loaded (time.monotonic)."""

    cases: int = 0
    features: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    backend: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    takes_step: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.started

    @property
    def failures(self) -> list[Found]:
        """Failures that failed again in a fresh process."""
        return [found for found in self.found if found.reproduced]

    @property
    def exit_code(self) -> int:
        """1 for a failure found, 3 for a harness error or a failure that would not repeat, else 0."""
        if self.failures:
            return 1
        idle = not self.cases and "interrupted" not in self.reasons
        return 3 if self.errors or self.found or idle else 0


class _Member:
    """A worker process and the campaign's end of its socket."""

    def __init__(self, orders: Orders) -> None:
        self.index = orders.index
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        pin(str(self.index), environment)
        self.log = open(orders.folder / f"worker-{orders.index}.log", "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.connection.send(orders)
        self.told = False
        self.doing = "starting"

    def tell(self, why: str) -> None:
        """Ask the worker to stop after its case."""
        if not self.told:
            self.told = True
            with suppress(OSError):
                self.connection.send(why)

    def close(self) -> None:
        """End the process, and drop its log if it said nothing."""
        self.connection.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        path = Path(self.log.name)
        with suppress(OSError):  # the folder may be gone
            if path.stat().st_size == 0:
                path.unlink()


@dataclass(frozen=True)
class Campaign:
    """What to run. seconds, examples: limits, either may be None. folder: must not exist, or be empty.

    until_failure: whether the first failure that is shrunk and confirmed ends the campaign.
    """

    target: Target
    profiles: tuple[str, ...]
    seed: int
    workers: int
    seconds: float | None
    examples: int | None
    folder: Path
    until_failure: bool = False
    shrink_seconds: float = 60.0
    hang_seconds: float = 30.0

    def run(self, echo: Callable[[str], None], terminal: TextIO | None) -> Totals:
        """Run to the end, Ctrl-C included, and say on the way what happens.

        Raises CaseFileError for the folder; ArgumentError or BackendError, and leaves no folder, when the target
        cannot be run.
        """
        self._make_folder()
        totals = Totals()
        members: list[_Member] = []
        live = _Live(echo, terminal)
        plural = "s" * (self.workers > 1)
        echo(f"campaign {self.folder}: target {self.target.name}, seed {self.seed}, {self.workers} worker{plural}")
        self._write_state(totals, 0.0, finished=False)
        try:
            try:
                members += [_Member(orders) for orders in self._orders()]
                self._watch(members, totals, live)
            except KeyboardInterrupt:
                live.clear()
                echo("stopping: finishing the cases in flight")
                self._stop(members, totals, live)
            except (ArgumentError, BackendError):
                for member in members:
                    member.process.kill()  # the others would find the same, later
                raise
            finally:
                for member in members:
                    member.close()
        except (ArgumentError, BackendError):
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        elapsed = totals.elapsed
        self._tidy()
        self._write_state(totals, elapsed, finished=True)
        live.clear()
        self._summarise(totals, elapsed, echo)
        return totals

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise CaseFileError(self.folder, "", "is not empty: a campaign wants a folder of its own")
            (self.folder / "failures").mkdir()
        except OSError as error:
            raise CaseFileError(self.folder, "", f"cannot hold a campaign: {error.strerror}") from None

    def _tidy(self) -> None:
        """Remove the folders that nothing was left in."""
        for name in ("pending", "failures"):
            with suppress(OSError):  # it does not exist, or holds something
                (self.folder / name).rmdir()

    def _orders(self) -> list[Orders]:
        share, more = divmod(self.examples, self.workers) if self.examples is not None else (None, 0)
        return [
            Orders(
                index=index,
                target=self.target,
                profiles=self.profiles,
                seed=self.seed,
                examples=None if share is None else share + (index < more),
                seconds=self.seconds,
                shrink_seconds=self.shrink_seconds,
                hang_seconds=self.hang_seconds,
                folder=self.folder,
            )
            for index in range(self.workers)
        ]

    def _watch(self, members: list[_Member], totals: Totals, live: _Live) -> None:
        """Take reports until every worker has ended."""
        active = list(members)
        written = 0.0
        while active:
            for member in [m for m in active if m.connection in wait([m.connection for m in active], timeout=0.25)]:
                if not self._take(member, totals, live):
                    active.remove(member)
            if self.until_failure and totals.failures:
                for member in active:
                    member.tell("a failure was found")
            if time.monotonic() - written >= LIVE_SECONDS:
                written = time.monotonic()
                self._write_state(totals, totals.elapsed, finished=False)
            live.show(lambda: self._line(totals, members))

    def _take(self, member: _Member, totals: Totals, live: _Live) -> bool:
        """Take one report; False when the worker has ended."""
        try:
            report = member.connection.recv()
        except (EOFError, OSError):
            code = member.process.wait()
            totals.errors.append(f"worker {member.index} died ({code}); its case is in {self.folder / 'pending'}")
            live.echo(totals.errors[-1])
            return False
        if isinstance(report, Progress):
            totals.cases += report.cases
            totals.features += report.features
            member.doing = report.doing
        elif isinstance(report, Started):
            if not totals.backend:
                totals.started = time.monotonic()
            totals.backend, totals.versions = report.backend, report.versions
            totals.takes_step = report.takes_step
            member.doing = "drawing"
        elif isinstance(report, Found):
            totals.found.append(report)
            word = "failure" if report.reproduced else "did not fail again"
            live.echo(f"{word}: {report.words}\n  {report.path}")
        elif isinstance(report, Refused):
            if not totals.backend:  # nobody has begun, so there is nothing to lose
                raise report.error
            totals.errors.append(f"worker {member.index}: {report.error}")
            live.echo(totals.errors[-1])
            return False
        elif isinstance(report, Ended):
            totals.reasons[report.reason] += 1
            if report.error:
                totals.errors.append(f"worker {member.index}: {report.error}")
                live.echo(totals.errors[-1])
            return False
        return True

    def _stop(self, members: list[_Member], totals: Totals, live: _Live) -> None:
        """Tell every worker to stop, and take what they still report."""
        until = time.monotonic() + GRACE_SECONDS
        active = [member for member in members if member.process.poll() is None]
        for member in active:
            member.tell("interrupted")
        try:
            while active and time.monotonic() < until:
                for member in [m for m in active if m.connection in wait([m.connection for m in active], timeout=0.25)]:
                    if not self._take(member, totals, live):
                        active.remove(member)
        except KeyboardInterrupt:  # the second one: now
            pass
        totals.reasons["interrupted"] = 1

    def _line(self, totals: Totals, members: list[_Member]) -> str:
        elapsed = totals.elapsed
        limit = f"/{self.seconds:g}" if self.seconds is not None else ""
        features = reachable(self.profiles, totals.backend, totals.takes_step)
        busy = {member.doing for member in members} - {"drawing"}
        return (
            f"{elapsed:.0f}{limit} s, {totals.cases} cases, {totals.cases / max(elapsed, 1e-9):.1f} cases/s, "
            f"{_failures(totals)}, {len(totals.features)}/{len(features)} features"
            + (f", {'; '.join(sorted(busy))}" if busy else "")
        )

    def _summarise(self, totals: Totals, elapsed: float, echo: Callable[[str], None]) -> None:
        versions = ", ".join(f"{name} {version}" for name, version in totals.versions.items())
        reasons = ", ".join(totals.reasons) or "the workers ended"
        echo(f"stopped: {reasons}")
        echo(f"target {self.target.name} on {totals.backend or 'no backend'} ({versions}); seed {self.seed}")
        rate = totals.cases / max(elapsed, 1e-9)
        echo(
            f"{totals.cases} cases in {elapsed:.1f} s by {self.workers} worker{'s' * (self.workers > 1)}, "
            f"{rate:.1f} cases/s, profiles {', '.join(self.profiles)}"
        )
        features = reachable(self.profiles, totals.backend, totals.takes_step)
        echo(f"features seen, {len(totals.features)} of the {len(features)} that these profiles can have:")
        for name, count in totals.features.most_common():
            echo(f"  {count:8d}  {name}")
        missed = [name for name in features if name not in totals.features]
        if missed:
            echo(f"not seen: {', '.join(missed)}")
        for error in totals.errors:
            echo(f"harness error: {error}")
        unfinished = set((self.folder / "failures").glob("*.json")) - {found.path for found in totals.found}
        for path in sorted(unfinished):
            echo(f"found, neither shrunk nor run again: {path}")
        for found in totals.found:
            echo(f"{'failure' if found.reproduced else 'did not fail again'}: {found.words}")
        echo(_failures(totals))
        if totals.failures:
            command = ["swa-decode-meta", "replay", "--target", self.target.name]
            command += [str(found.path) for found in totals.failures]
            echo(shlex.join(command))

    def _write_state(self, totals: Totals, elapsed: float, finished: bool) -> None:
        state: dict[str, Any] = {
            "version": 1,
            "target": self.target.name,
            "backend": totals.backend,
            "versions": dict(totals.versions),
            "profiles": self.profiles,
            "seed": self.seed,
            "workers": self.workers,
            "seconds": self.seconds,
            "examples": self.examples,
            "elapsed": round(elapsed, 3),
            "cases": totals.cases,
            "features": dict(totals.features),
            "failures": [found.path.name for found in totals.failures],
            "unreproducible": [found.path.name for found in totals.found if not found.reproduced],
            "errors": totals.errors,
            "reasons": dict(totals.reasons),
            "finished": finished,
        }
        try:
            write_atomically(self.folder / "campaign.json", json.dumps(state, indent=1) + "\n")
        except CaseFileError as error:  # what was found is worth more than this file
            if str(error) not in totals.errors:
                totals.errors.append(str(error))


def _failures(totals: Totals) -> str:
    count = len(totals.failures)
    return f"{count} failure{'s' * (count != 1)}"


class _Live:
    """The line that is always there: rewritten on a terminal, a new one now and then elsewhere."""

    def __init__(self, echo: Callable[[str], None], terminal: TextIO | None) -> None:
        self._echo, self._terminal = echo, terminal
        self._last = time.monotonic()
        self._shown = False

    def echo(self, text: str) -> None:
        """Say something that stays."""
        self.clear()
        self._echo(text)

    def show(self, line: Callable[[], str]) -> None:
        """Show the line if it is due."""
        now = time.monotonic()
        if now - self._last < (LIVE_SECONDS if self._terminal else PLAIN_SECONDS):
            return
        self._last = now
        if self._terminal is None:
            self._echo(line())
            return
        self._terminal.write("\r\x1b[K" + line())
        self._terminal.flush()
        self._shown = True

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._shown and self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._shown = False
