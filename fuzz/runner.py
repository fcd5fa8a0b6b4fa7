"""The parent's end of a child process: starts it, hands it launches, and says how each ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from ..spec import ArgumentError, BackendError, printable
from .child import Done, Gone, Job, Raised, Ready, Unusable
from .target import Target

START_SECONDS = 180.0  # importing torch from a cold disk, making a GPU context
COMPILE_SECONDS = 60.0  # on top of the hang limit, on a GPU, emulated or not: any launch may have to compile


# Imported and not run with -m: what crosses the socket must have one module name at both ends.
_CHILD = "from swa_decode_meta.fuzz.child import main; main()"


class HarnessError(Exception):
    """Something of ours failed, so that nothing can be said of the target."""


@dataclass(frozen=True)
class Died:
    """The process ended during the launch."""

    how: str
    last_words: str


@dataclass(frozen=True)
class Hung:
    """The process gave no answer in time and was killed."""

    seconds: float


Outcome = Done | Raised | Died | Hung


class Runner:
    """A target in a child process, which is replaced when it dies or hangs. Use as a context manager."""

    def __init__(self, target: Target, hang_seconds: float = 30.0) -> None:
        """Raises ArgumentError when the target cannot be loaded, BackendError when its backend is absent."""
        self.target, self.hang_seconds = target, hang_seconds
        self._launches = 0
        self._start()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def backend(self) -> str:
        """The backend that the target runs on: one of target.BACKENDS."""
        return self._ready.backend

    @property
    def takes_step(self) -> bool:
        """Whether the target takes all groups of a step, as launch_step does, or one, as launch does."""
        return self._ready.takes_step

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of python, torch and triton, and the device's name."""
        return self._ready.versions

    def run(self, job: Job) -> Outcome:
        """Run one launch. After a death, a hang or an error on a GPU the next one has a fresh process."""
        if self._process.poll() is not None:
            self._restart()
        limit = self.hang_seconds + (0.0 if self.backend == "interpreter" else COMPILE_SECONDS)
        try:
            self._launches += 1
            self._connection.send((self._launches, job))
            number, answer = self._receive(limit)
            while number not in (self._launches, None):  # an earlier launch, after a process ended between the two
                number, answer = self._receive(limit)
        except TimeoutError:
            return self._hung(limit)
        except (EOFError, OSError):
            return self._ended(limit, limit)
        except Exception as error:
            self._reap(0)
            raise HarnessError(f"the child's answer cannot be read: {type(error).__name__}: {error}") from None
        if isinstance(answer, Gone):
            return Died(_how(answer.returncode), self._last_words())
        if isinstance(answer, Raised) and self.backend == "gpu":
            self._reap(0)  # an illegal access leaves the GPU context unusable
        return answer

    def _receive(self, limit: float) -> tuple[int | None, Done | Raised | Gone]:
        """The next answer, and to which launch; raises TimeoutError."""
        if not self._connection.poll(limit):
            raise TimeoutError
        answer: tuple[int | None, Done | Raised | Gone] = self._connection.recv()
        return answer

    def close(self) -> None:
        """End the child."""
        self._connection.close()
        if self._process.returncode is None:
            self._reap(2)
        self._stderr.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # part of a message must not keep us waiting either
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(self.hang_seconds) + 1, 0))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        try:
            self._connection.send(self.target)
            if not self._connection.poll(START_SECONDS):
                self._reap(0)
                raise HarnessError(f"the child process did not start within {START_SECONDS:.0f} s")
            answer: Ready | Unusable = self._connection.recv()
        except (EOFError, OSError):
            self._reap(self.hang_seconds)
            words = self._last_words().strip().splitlines()
            ended = _how(self._process.returncode)
            raise HarnessError(f"the child process ended at its start, {ended}: {words[-1] if words else ''}") from None
        if isinstance(answer, Unusable):
            self.close()
            if answer.absent:
                raise BackendError(answer.reason)
            raise ArgumentError("target", "one that loads", answer.reason)
        self._ready = answer

    def _restart(self) -> None:
        self._connection.close()
        self._stderr.close()
        try:
            self._start()
        except (ArgumentError, BackendError) as error:  # it loaded before
            raise HarnessError(f"the target no longer loads: {error}") from None

    def _hung(self, limit: float) -> Died | Hung:
        """End a launch that hangs; on a CPU the process that has loaded the target stays."""
        if self.backend != "gpu":
            self._process.terminate()
            with suppress(TimeoutError, EOFError, OSError):
                while not isinstance(self._receive(limit)[1], Gone):
                    pass
                self._last_words()
                return Hung(limit)
        return self._ended(limit, 0)

    def _ended(self, limit: float, patience: float) -> Died | Hung:
        """How a launch without an answer ended, once the process has had `patience` more seconds to end."""
        return Died(_how(self._process.returncode), self._last_words()) if self._reap(patience) else Hung(limit)

    def _reap(self, seconds: float) -> bool:
        """Give the process so long to end, then end it and whatever it started; whether it ended of itself."""
        try:
            self._process.wait(seconds)
            of_itself = True
        except subprocess.TimeoutExpired:
            of_itself = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return of_itself

    def _last_words(self) -> str:
        """The end of what the child has printed since the last time."""
        file = self._stderr.fileno()  # the child writes where this end stands, so rewinding rewinds both
        size = os.lseek(file, 0, os.SEEK_END)
        os.lseek(file, max(0, size - 4000), os.SEEK_SET)
        words = os.read(file, 4000)
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        return words.decode("utf-8", "replace")


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def crash_site(last_words: str) -> str:
    """The innermost Python line of a faulthandler report that lies outside libraries and this harness."""
    harness = re.escape(os.path.dirname(__file__))
    for file, line, function in re.findall(r'File "([^"]+)", line (\d+) in (\S+)', last_words):
        if not re.search(rf"{harness}/|/lib/python3|/(site|dist)-packages/|<frozen", file):
            return printable(f"{os.path.basename(file)}:{line} in {function}"[:200])
    return ""
