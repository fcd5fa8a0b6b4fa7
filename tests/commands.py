"""Running the command line as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "swa_decode_meta.fuzz")


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line on stdout."""
        return self.out.splitlines()[-1] if self.out else ""


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what conftest decided for it, and with the console script on PATH."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}", **changes}


def run(*arguments: object, cwd: Path = ROOT, **changes: str) -> Ended:
    """Run the command with these arguments."""
    return execute([*COMMAND, *map(str, arguments)], cwd, **changes)


def execute(command: Sequence[str], cwd: Path = ROOT, **changes: str) -> Ended:
    """Run any command; a traceback is never an answer."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=300, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)
