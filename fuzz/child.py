"""The child process: loads a target and runs it on the batches that come through a socket, one at a time.

Whatever a target does to its process - abort, fault, hang, scribble - happens here and not to the fuzzer. Started by
`runner`; protocol: a Target comes in and Ready or Unusable goes out, then for each (number, Job) a (number, answer).

On a CPU the process forks once the target is loaded, the fork does the work, and when it dies another takes its place
at once: torch takes seconds to import, a shrink may need hundreds of deaths. SIGTERM ends a fork that hangs. A GPU's
context does not survive a fork.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import inspect
import os
import resource
import signal
import socket
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..spec import INPUTS, OWN, SHARED, printable
from .image import Array, Placement, key_of
from .target import EMULATED, Target

if TYPE_CHECKING:
    from .cdna.triton_kernels import Emulator


@dataclass(frozen=True)
class Job:
    """One launch: images to place, and the rest of its arguments; `block_sizes` has one for each group."""

    images: Mapping[str, Array]
    places: Mapping[str, Placement]
    num_tokens: int
    window_size: int
    block_sizes: tuple[int, ...]
    noncausal: bool
    middle_axis: bool
    misalignment: int
    guard: str
    shape: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Ready:
    """The target is loaded."""

    backend: str
    versions: Mapping[str, str]
    takes_step: bool = False


@dataclass(frozen=True)
class Unusable:
    """The target cannot be loaded: `absent` when torch, triton or a GPU is what is missing."""

    reason: str
    absent: bool


@dataclass(frozen=True)
class Done:
    """The launch returned. Images afterwards; `damage` is (tensor, byte offset) of a change outside a tensor."""

    images: Mapping[str, Array]
    damage: tuple[str, int] | None


@dataclass(frozen=True)
class Gone:
    """The process that had the launch ended, with this return code as subprocess has it; another is there.

    It has no number: a process may end between two launches as well.
    """

    returncode: int


@dataclass(frozen=True)
class Raised:
    """The launch raised."""

    error: str
    message: str


def main() -> None:
    """Serve on the socket whose descriptor is the first argument, until the other end closes."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the campaign's to handle
    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    try:
        target: Target = connection.recv()
        answer, launch = _load(target)
        connection.send(answer)
        if isinstance(answer, Ready) and launch is not None:
            if answer.backend == "gpu":
                _serve(connection, launch)
            else:
                _serve_in_forks(connection, launch)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _serve(connection: Connection, launch: Callable[[Job], Done | Raised]) -> None:
    while True:
        number, job = connection.recv()
        connection.send((number, launch(job)))


def _serve_in_forks(connection: Connection, launch: Callable[[Job], Done | Raised]) -> None:
    pid = 0

    def end_fork(signum: int, frame: object) -> None:
        if pid:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_fork)
    parent = os.getpid()
    while not _closed(connection):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent()
            if os.getppid() != parent:  # it died before this fork could ask to be told
                os._exit(0)
            try:
                _serve(connection, launch)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                os._exit(0)
            except BaseException:  # SystemExit too: what runs at exit belongs to the first process
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        pid = 0
        if not _closed(connection):
            connection.send((None, Gone(os.waitstatus_to_exitcode(status))))


def _closed(connection: Connection) -> bool:
    """Whether the other end has closed. Takes nothing off the socket."""
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        try:
            return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def die_with_parent() -> None:
    """Have Linux kill this process when its parent goes, even while a kernel hangs."""
    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)


def _load(target: Target) -> tuple[Ready | Unusable, Callable[[Job], Done | Raised] | None]:
    try:
        import torch
    except ImportError as error:
        return _without(error), None
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    has_gpu = torch.cuda.is_available()
    backend = target.backend or ("gpu" if has_gpu and not interpreted else "interpreter")
    if backend == "gpu" and not has_gpu:
        return Unusable(f"no GPU that torch {torch.__version__} can see; @interpreter needs none", True), None
    # Triton reads it when a kernel is defined, its own library's too: this comes before anything imports triton.
    os.environ["TRITON_INTERPRET"] = "1" if backend == "interpreter" else "0"
    try:
        import triton
    except ImportError as error:
        return _without(error), None
    emulator = None
    if backend in EMULATED:
        from .cdna.triton_kernels import install

        emulator = install(backend)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the target may be a module of the user's working directory
    try:
        function = getattr(importlib.import_module(target.module), target.function)
    except ModuleNotFoundError as error:
        return Unusable(
            f"target {target.name}: {_words(error)} (here, in {os.getcwd()}, or on PYTHONPATH)", False
        ), None
    except (Exception, SystemExit) as error:
        return Unusable(f"target {target.name}: {type(error).__name__}: {_words(error)}", False), None
    if not callable(function):
        return Unusable(f"target {target.name}: {target.function} is not callable", False), None
    if not _takes_a_launch(function):
        return Unusable(
            f"target {target.name}: {target.function} takes other arguments than launch or launch_step", False
        ), None
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    if backend == "gpu":
        versions["device"] = torch.cuda.get_device_name()
        if torch.version.hip:
            versions["arch"] = torch.cuda.get_device_properties(0).gcnArchName
    elif emulator is not None:
        versions["device"] = f"{backend}, emulated"
    return Ready(backend, versions, _takes_step(function)), _launcher(function, backend, emulator)


def _without(error: ImportError) -> Unusable:
    return Unusable(f"{error}; the kernel extra, swa-decode-meta[kernel], has torch and triton", absent=True)


def _words(error: BaseException) -> str:
    """The last line of what an error says, which is where compilers put it; nothing, if it fails to say it."""
    try:
        return printable((str(error).strip().splitlines() or [""])[-1][:500])
    except Exception:
        return ""


def _takes_a_launch(function: Callable[..., object]) -> bool:
    """Whether a function can be called with the arguments of its form of launch, by position, as far as can be told."""
    try:
        inspect.signature(function).bind(*range(8 if _takes_step(function) else 15))
    except TypeError:
        return False
    except ValueError:  # not a Python function
        return True
    return True


def _takes_step(function: Callable[..., object]) -> bool:
    """Whether a function takes the groups of a step first, as launch_step does."""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "groups"
    except (TypeError, ValueError):  # not a Python function
        return False


def _launch_shape(function: Callable[..., object]) -> Callable[..., object] | None:
    """The class in which a function takes how its work is cut; this project's launch does, and edited copies of it."""
    try:
        takes = "shape" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # not a Python function
        return None
    return getattr(function, "__globals__", {}).get("LaunchShape") if takes else None


def _launcher(
    function: Callable[..., object], backend: str, emulator: Emulator | None
) -> Callable[[Job], Done | Raised]:
    import torch

    from .memory import GuardedMemory, Memory, as_tensor, gpu_memory

    memory: Memory = gpu_memory(torch.device("cuda", 0)) if backend == "gpu" else GuardedMemory()

    launch_shape = _launch_shape(function)
    takes_step = _takes_step(function)
    make_group = getattr(function, "__globals__", {}).get("Group", SimpleNamespace)

    def keywords(job: Job) -> dict[str, Any]:
        return {} if launch_shape is None or job.shape is None else {"shape": launch_shape(**job.shape)}

    def call(job: Job, tensors: Mapping[str, Any]) -> None:
        if takes_step:
            groups = [
                make_group(**{name: tensors[key_of(index, name)] for name in OWN}, block_size=block_size)
                for index, block_size in enumerate(job.block_sizes)
            ]
            shared = (tensors[name] for name in SHARED)
            function(groups, *shared, job.num_tokens, job.window_size, job.noncausal, **keywords(job))
        else:
            scalars = (job.num_tokens, job.window_size, *job.block_sizes, job.noncausal)
            function(*tensors.values(), *scalars, **keywords(job))

    def checked(job: Job, tensors: Mapping[str, Any]) -> AbstractContextManager[None]:
        if emulator is None:
            return nullcontext()
        # The same job meets the same machine every time, another one another.
        seed = zlib.crc32(b"".join(image.tobytes() for image in job.images.values()))
        named = [(name, tensor, name.rpartition(".")[2] not in INPUTS) for name, tensor in tensors.items()]
        return emulator.checking(seed, named)

    def launch(job: Job) -> Done | Raised:
        flat = memory.place(job.images, job.misalignment, job.guard)
        tensors = {
            name: as_tensor(flat[name], place, name.endswith("indices") and job.middle_axis)
            for name, place in job.places.items()
        }
        try:
            with checked(job, tensors):
                call(job, tensors)
            if backend == "gpu":
                torch.cuda.synchronize()
        except Exception as error:
            return Raised(printable(type(error).__name__)[:100].replace("\n", "?"), _words(error))
        images, damage = memory.read()
        return Done(images, (damage.tensor, damage.offset) if damage else None)

    return launch
