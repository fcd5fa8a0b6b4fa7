"""Reading the assembly that Triton's AMD backend prints, of one kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ENCODINGS = ("_e32", "_e64", "_dpp", "_sdwa")


class UnknownInstruction(Exception):
    """An instruction, or a form of one, that the emulator does not know: its text, address and source line."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    opcode: without the suffix of its encoding, which is `encoding` ("" for what has one alone). operands: as written;
    modifiers: by name, what follows the colon, or "" where there is none. text: the whole; number: its place in the
    kernel, from 0. line: of the assembly. source: file:line:column of the Triton source, innermost first.
    """

    opcode: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, str]
    text: str
    number: int
    line: int
    source: str

    def __str__(self) -> str:
        return f"`{self.text}` (instruction {self.number}, line {self.line} of the assembly; {self.source})"


@dataclass(frozen=True)
class Argument:
    """A kernel argument's place in the kernarg segment, in bytes, and what the ABI calls it."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Kernel:
    """A kernel as the compiler printed it.

    labels: the instruction that each stands before. preloaded: the instruction at which hardware starts that has put
    the first arguments in SGPRs itself, 0 where there is no such entry. directives: the .amdhsa_* of its descriptor.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    preloaded: int
    directives: Mapping[str, int]
    arguments: tuple[Argument, ...]

    @property
    def kernarg_size(self) -> int:
        """Bytes of the kernarg segment."""
        return self.directives["kernarg_size"]


def read(assembly: str) -> Kernel:
    """The kernel of an assembly. Raises ValueError for what is not the assembly of one kernel."""
    found = re.search(r"^\t\.amdhsa_kernel (\S+)$", assembly, re.MULTILINE)
    if found is None:
        raise ValueError("not the assembly of an AMD kernel")
    name = found[1]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    preloaded, source, inside = 0, "?", False
    for number, line in enumerate(assembly.splitlines(), 1):
        code, _, comment = line.partition(";")
        code = code.strip()
        if not inside:
            inside = code == f"{name}:"
            continue
        if code.startswith((".Lfunc_end", ".section")):
            break
        if code.endswith(":"):
            labels[code[:-1]] = len(instructions)
        elif code.startswith(".loc"):
            place = comment.strip()
            if not re.match(r"\S*:0:", place):  # line 0: nothing in the source stands for it
                source = place or source
        elif code.startswith((".p2align\t8", ".p2align 8")):
            preloaded = len(instructions)
        elif code and not code.startswith("."):
            instructions.append(_instruction(code, len(instructions), number, source))
    directives = {key: int(value) for key, value in re.findall(r"^\t\t\.amdhsa_(\w+) (\d+)$", assembly, re.MULTILINE)}
    return Kernel(name, tuple(instructions), labels, preloaded, directives, _arguments(assembly))


def _instruction(code: str, number: int, line: int, source: str) -> Instruction:
    opcode, _, rest = code.partition(" ")
    encoding = next((suffix for suffix in ENCODINGS if opcode.endswith(suffix)), "")
    operands = [part.strip() for part in re.split(r",(?![^\[(]*[\])])", rest)] if rest.strip() else []
    modifiers: dict[str, str] = {}
    if operands:
        operands[-1], *words = operands[-1].split()
        for word in words:
            key, _, value = word.partition(":")
            modifiers[key] = value
    opcode = opcode.removesuffix(encoding)
    text = " ".join(code.split())
    return Instruction(opcode, encoding, tuple(operands), modifiers, text, number, line, source)


def _arguments(assembly: str) -> tuple[Argument, ...]:
    """Of the metadata, YAML in which each argument is a list item that begins with a dash."""
    metadata = assembly.partition(".amdgpu_metadata")[2].partition(".args:")[2]
    found = []
    for item in re.split(r"^ +- ", metadata, flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"\.(\w+): +(\S+)", item))
        if "offset" not in fields:
            break
        found.append(Argument(int(fields["offset"]), int(fields["size"]), fields["value_kind"]))
    return tuple(found)
