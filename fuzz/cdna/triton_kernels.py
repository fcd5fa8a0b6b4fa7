"""In a GPU's stead: every Triton kernel that is launched in this process is compiled for a CDNA GPU and emulated.

Tensors lie on the CPU. Arguments are specialised as Triton's own launcher would for such a GPU: ones and multiples of
16, aligned pointers, tensors of less than 2 GB, where the kernel does not say otherwise.
"""

from __future__ import annotations

import inspect
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ...spec import ArgumentError, BackendError
from ..target import EMULATED
from .assembly import read
from .machine import Cost, Launch
from .regions import Region
from .translate import Translated, translate

WAVE = 64
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "waves_per_eu", "matrix_instr_nonkdim", "kpack")
_DTYPES = {
    torch.bool: "*i1",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint32: "*u32",
    torch.uint64: "*u64",
    torch.float32: "*fp32",
}
_PACK = {"i1": "<?", "u1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u64": "<Q", "fp32": "<f"}


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled and translated. shared: bytes of LDS. types: of the arguments that the machine code takes."""

    code: Translated
    shared: int
    num_warps: int
    types: tuple[str, ...]


class Emulator:
    """What launches go to. `install` makes it so.

    seed: of the order in which waves run, and of what hardware leaves open; each launch takes the next.
    reciprocal_off: as of `Launch`. after: called after each launch with its kernel's name and its cost. edit: what is
    done to the assembly of each kernel before it is read.
    """

    def __init__(self, arch: str) -> None:
        if arch not in EMULATED:
            raise ArgumentError("arch", f"one of {', '.join(EMULATED)}", arch)
        self.arch = arch
        self.seed = 0
        self.reciprocal_off: int | None = None
        self._named: Sequence[tuple[str, torch.Tensor, bool]] = ()
        self.after: Callable[[str, Cost], None] | None = None
        self.edit: Callable[[str], str] = str
        self._made: dict[int, torch.UntypedStorage] = {}
        self._compiled: dict[Any, Compiled] = {}

    @contextmanager
    def checking(self, seed: int, named: Sequence[tuple[str, torch.Tensor, bool]] = ()) -> Iterator[None]:
        """Launches meanwhile are checked by the names and roles of these tensors, (name, tensor, writable), too.

        A kernel may also touch what torch makes meanwhile, whose address it may be given. seed: as that of `Emulator`.
        """
        self.seed, self._named = seed, named
        try:
            with _Made(self._made):
                yield
        finally:
            self._named = ()
            self._made.clear()

    def run(self, function: Any, grid: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """What `kernel[grid](*arguments, **keywords)` does. Raises AccessFault and UnknownInstruction."""
        options = {name: keywords[name] for name in _OPTIONS if name in keywords}
        rest = {name: value for name, value in keywords.items() if name not in options}
        bound = inspect.signature(function.fn).bind(*arguments, **rest)
        bound.apply_defaults()
        grid = grid(bound.arguments) if callable(grid) else grid
        compiled, values = self._compile(function, bound.arguments, options)
        packed, tensors = self._pack(compiled, values)
        cost = Launch(
            compiled.code,
            grid,
            compiled.num_warps,
            packed,
            compiled.shared,
            self._regions(tensors),
            self.seed,
            self.reciprocal_off,
            detailed=self.after is not None,
        ).run()
        self.seed += 1
        if self.after is not None:
            self.after(compiled.code.kernel.name, cost)

    def _compile(
        self, function: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Compiled, dict[str, Any]]:
        """The compiled kernel for such arguments, and those that it takes."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        values: dict[str, Any] = {}
        for number, (parameter, (name, value)) in enumerate(zip(function.params, arguments.items(), strict=True)):
            special = not parameter.do_not_specialize
            one = special and type(value) is int and value == 1 and not parameter.annotation_type
            if parameter.is_constexpr or value is None or one:
                signature[name], constants[name] = "constexpr", value
                continue
            signature[name] = _type_of(name, value, parameter.annotation_type)
            values[name] = value
            hints = _hints(value, special, not parameter.do_not_specialize_on_alignment)
            if hints:
                attributes[(number,)] = hints
        key = (
            function,
            tuple(signature.items()),
            tuple(constants.items()),
            tuple((at, tuple(map(tuple, hints))) for at, hints in attributes.items()),
            tuple(options.items()),
            self.edit,
        )
        if key not in self._compiled:
            source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
            assembly, shared, num_warps = compile_kernel(source, self.arch, options)
            types = tuple(kind for kind in signature.values() if kind != "constexpr")
            self._compiled[key] = Compiled(translate(read(self.edit(assembly))), shared, num_warps, types)
        return self._compiled[key], values

    @staticmethod
    def _pack(compiled: Compiled, values: Mapping[str, Any]) -> tuple[bytes, dict[str, torch.Tensor]]:
        """The kernarg segment, and the tensors in it."""
        kernel = compiled.code.kernel
        segment = bytearray(kernel.kernarg_size)
        tensors: dict[str, torch.Tensor] = {}
        if len(values) > len(kernel.arguments):
            raise ValueError(f"{len(values)} arguments for a kernel that takes {len(kernel.arguments)}")
        for (name, value), kind, place in zip(values.items(), compiled.types, kernel.arguments, strict=False):
            if isinstance(value, torch.Tensor):
                tensors[name] = value
                data = struct.pack("<Q", value.data_ptr())
            else:
                data = struct.pack(_PACK[kind], value)
            segment[place.offset : place.offset + place.size] = data.ljust(place.size, b"\0")
        return bytes(segment), tensors

    def _regions(self, tensors: Mapping[str, torch.Tensor]) -> list[Region]:
        named = [_region(name, tensor, writable) for name, tensor, writable in self._named]
        mine = [_region(name, tensor, True) for name, tensor in tensors.items()]
        made = [
            Region("a tensor made during the launch", storage.data_ptr(), storage.nbytes(), keep=storage)
            for storage in self._made.values()
        ]
        return [*named, *mine, *made]


installed: Emulator | None = None
"""What `install` made last, for a target that wants more of it than to run kernels."""


def install(arch: str) -> Emulator:
    """Have an emulator run every Triton kernel from now on. Comes before the kernels' modules are imported.

    Raises ArgumentError for an unknown architecture, BackendError where kernels are interpreted.
    """
    global installed
    emulator = Emulator(arch)
    if triton.knobs.runtime.interpret:
        raise BackendError("TRITON_INTERPRET is set, under which Triton compiles nothing that could be emulated")

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        if not warmup:
            emulator.run(self, grid, arguments, keywords)

    JITFunction.run = run
    JITFunction.emulated = arch
    installed = emulator
    return emulator


def compile_kernel(source: ASTSource, arch: str, options: Mapping[str, Any]) -> tuple[str, int, int]:
    """A kernel's assembly, bytes of LDS and warps. Needs no GPU, and no ROCm."""
    with _without_linking():
        kernel = triton.compile(source, target=GPUTarget("hip", arch, WAVE), options=dict(options))
    return kernel.asm["amdgcn"], int(kernel.metadata.shared), int(kernel.metadata.num_warps)


@contextmanager
def _without_linking() -> Iterator[None]:
    """Have a Triton without a linker of its own, as up to 3.4, stop at the assembly, in a cache apart."""
    try:
        getattr(HIPBackend, "path_to_rocm_lld", str)()
    except Exception:
        link, find = HIPBackend.make_hsaco, HIPBackend.path_to_rocm_lld
        HIPBackend.make_hsaco = staticmethod(lambda *given: b"")
        HIPBackend.path_to_rocm_lld = staticmethod(lambda: sys.executable)  # asked for its version alone
        try:
            with triton.knobs.cache.scope():
                triton.knobs.cache.dir = os.path.join(triton.knobs.cache.dir, "assembly")
                yield
        finally:
            HIPBackend.make_hsaco, HIPBackend.path_to_rocm_lld = staticmethod(link), staticmethod(find)
    else:
        yield


class _Made(TorchDispatchMode):  # type: ignore[misc]
    """Notes the storage of every tensor that an operator returns."""

    def __init__(self, made: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._made[storage.data_ptr()] = storage
        return result


def _type_of(name: str, value: Any, annotation: str | None) -> str:
    if isinstance(value, torch.Tensor):
        if value.dtype not in _DTYPES:
            raise ArgumentError(name, f"a tensor of {', '.join(map(str, _DTYPES))}", value.dtype)
        return _DTYPES[value.dtype]
    if annotation:
        return annotation
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    raise ArgumentError(name, "a tensor or a number", type(value).__name__)


def _hints(value: Any, special: bool, aligned: bool) -> list[list[Any]]:
    """What Triton's launcher for AMD tells the compiler of an argument."""
    if not special:
        return []
    hints: list[list[Any]] = []
    if isinstance(value, torch.Tensor):
        if aligned and value.data_ptr() % 16 == 0:
            hints.append(["tt.divisibility", 16])
        if value.untyped_storage().nbytes() < 2**31:
            hints.append(["tt.pointer_range", 32])
    elif type(value) is int and aligned and value % 16 == 0:
        hints.append(["tt.divisibility", 16])
    return hints


def _region(name: str, tensor: torch.Tensor, writable: bool) -> Region:
    """What of memory a tensor is: of one in rows with gaps between them, the rows."""
    size = tensor.element_size()
    if not tensor.numel():
        return Region(name, tensor.data_ptr(), 0)
    span = 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    row = step = 0
    if tensor.ndim > 1 and tensor.shape[0] > 1:
        row, step = tensor.shape[-1] * size, tensor.stride(0) * size
    if row >= step:
        row = step = 0
    return Region(name, tensor.data_ptr(), span * size, size, writable, row, step, keep=tensor)
