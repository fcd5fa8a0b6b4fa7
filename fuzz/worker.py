"""One worker of a campaign: draws cases, judges them, shrinks what fails. Started by `campaign`, one process each."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, configuration, errors, given, seed, settings

from ..spec import ArgumentError, BackendError, Case, CaseFileError, load_case, save_case
from .child import die_with_parent
from .features import features_of
from .harness import expect, judge
from .journal import Journal
from .runner import HarnessError, Runner
from .strategies import cases
from .target import Target
from .verdict import Verdict

ROUND = 20  # examples of one profile before the next has its turn
REPORT_SECONDS = 0.5
RERUNS = 3


@dataclass(frozen=True)
class Orders:
    """What a worker is to do. examples: its share, or None for no limit; seconds: its time, or None."""

    index: int
    target: Target
    profiles: tuple[str, ...]
    seed: int
    examples: int | None
    seconds: float | None
    shrink_seconds: float
    hang_seconds: float
    folder: Path


@dataclass(frozen=True)
class Started:
    """The target is loaded."""

    backend: str
    versions: Mapping[str, str]
    takes_step: bool


@dataclass
class Progress:
    """What was done since the last report."""

    cases: int = 0
    features: Counter[str] = field(default_factory=Counter)
    doing: str = "drawing"


@dataclass(frozen=True)
class Found:
    """A failure that was shrunk and failed again in a fresh process (or, if not `reproduced`, did not)."""

    path: Path
    words: str
    reproduced: bool


@dataclass(frozen=True)
class Ended:
    """The worker is done; `error` says why if it is for a fault of the harness."""

    reason: str
    error: str = ""


@dataclass(frozen=True)
class Refused:
    """The target cannot be run at all: it does not load, or its backend is absent."""

    error: ArgumentError | BackendError


class _Stop(BaseException):
    """Ends a Hypothesis run at once. Not an Exception, which Hypothesis would take for a failing example."""


class _Broken(BaseException):
    """Carries a harness error out of a Hypothesis run, which must not shrink it."""


class _Failing(Exception):
    """The failure that Hypothesis is to shrink."""


def main() -> None:
    """Serve the campaign at the other end of the socket whose descriptor is the first argument."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign passes Ctrl-C on as a word
    connection = Connection(int(sys.argv[1]))
    orders: Orders = connection.recv()
    with tempfile.TemporaryDirectory() as home:
        configuration.set_hypothesis_home_dir(home)
        worker = Worker(orders, connection)
        try:
            ended: Ended | Refused = worker.work()
        except (ArgumentError, BackendError) as error:
            ended = Ended("error", f"the target no longer loads: {error}") if worker.started else Refused(error)
        except (BrokenPipeError, ConnectionResetError, EOFError):
            return  # the campaign is gone
        except (HarnessError, CaseFileError, OSError) as error:
            ended = Ended("error", str(error).splitlines()[0] if str(error) else type(error).__name__)
        connection.send(ended)


class Worker:
    """Draws and judges until its orders or the campaign end it."""

    def __init__(self, orders: Orders, connection: Connection) -> None:
        self.orders, self.connection = orders, connection
        self.started = 0.0
        self.done = 0
        self.progress = Progress()
        self.reported = 0.0
        self.why = ""
        self.known: set[str] = set()
        self.shrinking: str | None = None
        self.shrink_until = 0.0
        self.best: tuple[Case, Verdict] | None = None

    def work(self) -> Ended:
        """Run to the end; a harness error is raised as HarnessError."""
        orders = self.orders
        self.journal = Journal(orders.folder / "pending" / f"worker-{orders.index}.npz")
        with Runner(orders.target, orders.hang_seconds) as runner:
            self.runner = runner
            self.started = time.monotonic()  # loading a target may take longer than a short campaign
            self.connection.send(Started(runner.backend, dict(runner.versions), runner.takes_step))
            for turn in itertools.count():
                profile = orders.profiles[turn % len(orders.profiles)]
                size = ROUND if orders.examples is None else min(ROUND, self._share(turn))
                if size <= 0:
                    self.why = f"{orders.examples} cases"
                else:
                    entropy = random.Random(f"{orders.seed}/{orders.index}/{turn}").getrandbits(64)
                    if not self._round(profile, size, entropy):
                        self._settle()
                if self.why:
                    break
        self.journal.close()
        self._report(force=True)
        return Ended(self.why)

    def _share(self, turn: int) -> int:
        """How many examples this turn may take, so that few examples are still spread over the profiles."""
        assert self.orders.examples is not None
        left = self.orders.examples - self.done
        turns = len(self.orders.profiles) - turn % len(self.orders.profiles)
        return -(-left // turns)

    def _round(self, profile: str, examples: int, entropy: int) -> bool:
        """Let Hypothesis draw `examples` cases; False when it found a failure that is now in `best`."""

        # Every setting is given: a campaign must not change with CI's environment variables.
        @settings(
            max_examples=examples,
            database=None,
            derandomize=False,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=Verbosity.quiet,
        )
        @seed(entropy)
        @given(cases(profile, self.runner.backend, self.runner.takes_step))
        def run(case: Case) -> None:
            try:
                self._judge(case)
            except HarnessError as error:
                raise _Broken(self._keep(case, error)) from error
            except (CaseFileError, OSError) as error:
                raise _Broken(error) from error

        try:
            run()
        except (_Failing, errors.Flaky):
            return False
        except _Stop:
            return self.shrinking is None
        except _Broken as broken:
            raise broken.args[0] from None
        return True

    def _keep(self, case: Case, error: HarnessError) -> HarnessError:
        """Save the case that a harness error came with, and say where."""
        path = self.orders.folder / "errors" / f"worker-{self.orders.index}.json"
        try:
            save_case(path, replace(case, name=str(error)))
        except CaseFileError as problem:
            return HarnessError(f"{error}; the case is lost: {problem}")
        return HarnessError(f"{error}; the case is in {path}")

    def _judge(self, case: Case) -> None:
        self._stop_if_due()
        verdict = judge(case, self.runner, self.journal.write)
        if self.shrinking is None:
            self.done += 1
            self.progress.cases += 1
            self.progress.features.update(features_of(case))
        self._report()
        if verdict is None:
            return
        fingerprint = verdict.fingerprint
        if self.shrinking is None:
            if not self._claim(fingerprint, case, verdict):
                return
            self.shrinking = fingerprint
            self.shrink_until = time.monotonic() + self._shrink_seconds(verdict)
            self.progress.doing = f"shrinking {fingerprint}"
        if fingerprint == self.shrinking:
            if self.best is None or _size(case) <= _size(self.best[0]):
                self.best = (case, verdict)
            raise _Failing(fingerprint)

    def _shrink_seconds(self, verdict: Verdict) -> float:
        """How long to shrink: longer for a hang, of which every attempt that succeeds takes the whole limit."""
        usual = self.orders.shrink_seconds
        return max(usual, min(4 * usual, 90 * self.orders.hang_seconds)) if verdict.verdict == "HANG" else usual

    def _stop_if_due(self) -> None:
        orders, now = self.orders, time.monotonic()
        while self.connection.poll(0):
            self.why = str(self.connection.recv())  # the campaign's one word: why to stop
        if self.why:
            raise _Stop
        if self.shrinking is not None:
            if now > self.shrink_until:
                raise _Stop
            return
        if orders.seconds is not None and self.done and now - self.started >= orders.seconds:
            self.why = f"{orders.seconds:g} s are over"
            raise _Stop
        if orders.examples is not None and self.done >= orders.examples:
            self.why = f"{orders.examples} cases"
            raise _Stop

    def _path(self, fingerprint: str) -> Path:
        return self.orders.folder / "failures" / f"{fingerprint}.json"

    def _claim(self, fingerprint: str, case: Case, verdict: Verdict) -> bool:
        """Put a new failure on disk as it was found; False when this worker or another has it already."""
        if fingerprint in self.known or self._path(fingerprint).exists():
            self.known.add(fingerprint)
            return False
        self.known.add(fingerprint)
        self._save(self._path(fingerprint), case, verdict)
        return True

    def _save(self, path: Path, case: Case, verdict: Verdict) -> None:
        target = {"name": self.orders.target.name, "backend": self.runner.backend}
        target |= {"shape": case.target["shape"]} if "shape" in case.target else {}
        save_case(
            path,
            replace(
                case,
                name=str(verdict),
                expected=expect(case.batch),
                target=target,
                versions=dict(self.runner.versions),
                finding=verdict.as_finding(),
            ),
        )

    def _settle(self) -> None:
        """Write the shrunk failure, see whether it fails again in a fresh process, and announce it."""
        assert self.best is not None
        assert self.shrinking is not None
        case, verdict = self.best
        path = self._path(self.shrinking)
        self._save(path, case, verdict)
        self.progress.doing = f"re-running {self.shrinking}"
        self._report(force=True)
        again = None
        saved = load_case(path)  # what counts is that the file fails
        for _ in range(RERUNS):
            with Runner(self.orders.target, self.orders.hang_seconds) as fresh:
                again = judge(saved, fresh)
            if again is not None:
                break
        if again is None:
            aside = self.orders.folder / "unreproducible" / path.name
            aside.parent.mkdir(exist_ok=True)
            path = path.replace(aside)
        self.connection.send(Found(path, str(again or verdict), again is not None))
        self.shrinking = self.best = None
        self.progress.doing = "drawing"

    def _report(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self.reported >= REPORT_SECONDS:
            self.reported = now
            doing = self.progress.doing
            self.connection.send(self.progress)
            self.progress = Progress(doing=doing)


def _size(case: Case) -> tuple[int, ...]:
    """Smaller is easier to read."""
    batch = case.batch
    entries = sum(array.size for array in batch.inputs().values())
    sizes = (len(case.groups), batch.num_reqs, batch.num_tokens, entries, batch.width)
    return (*sizes, int(abs(batch.seq_lens.astype(int)).sum()))
