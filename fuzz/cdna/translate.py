"""From a kernel's instructions to Python functions, one a basic block, each run many times.

In a block's function `w` is the wave; `s` its SGPRs, integers; `v`, `i`, `f` its VGPRs as unsigned, signed and single
precision columns of 64 lanes; `q`, `j` pairs of VGPRs, which start at an even number, as unsigned and signed 64 bits;
`m` the lanes that are on: True for all, else booleans. A block returns the number of the next one, None at the
kernel's end, and -1 - the next one at a barrier.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import scalar, vector
from .assembly import Instruction, Kernel, UnknownInstruction
from .scalar import BRANCHES, NOTHING, READS_DESTINATION, SAVE_EXEC, SCALAR
from .vector import CARRY, COMPARE, DPP_CONTROLS, MULTIPLY_ADD, VECTOR

VCC, M0, SCC = 106, 124, 127
_MASK = "0xffffffff"
_SPECIAL = {"vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "m0": M0}
_LOADS = {"ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True)}
_LOADS |= {"dword": (4, False), "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False)}
_STORES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_LDS = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
_ATOMICS = {"add", "sub", "swap", "cmpswap", "and", "or", "xor", "smin", "smax", "umin", "umax"}
_MEMORY_MODIFIERS = {"off", "offset", "sc0", "sc1", "nt", "glc", "slc", "offen", "idxen"}

Block = Callable[[Any], "int | None"]


@dataclass(frozen=True)
class Translated:
    """A kernel, ready to run.

    blocks: the functions. first: the block at which a wave starts, and `preloaded` the one where it starts that finds
    its first arguments in SGPRs; None where there is no such entry. members: the instructions of each block; classes:
    how many of each class they are. vgprs: columns that a wave needs. spare: those of waves that have ended.
    """

    kernel: Kernel
    blocks: Sequence[Block]
    first: int
    preloaded: int | None
    members: Sequence[Sequence[Instruction]]
    classes: Sequence[Mapping[str, int]]
    vgprs: int
    spare: list[Registers] = field(default_factory=list)


class Registers:
    """The VGPRs of a wave, 64 lanes by n, and views of them; `translate` says of what."""

    def __init__(self, count: int) -> None:
        self.whole = np.zeros((vector.LANES, count), np.uint32)
        pairs = self.whole.view(np.uint64)
        self.v = [self.whole[:, n] for n in range(count)]
        self.i = [column.view(np.int32) for column in self.v]
        self.f = [column.view(np.float32) for column in self.v]
        self.q = {n: pairs[:, n // 2] for n in range(0, count, 2)}
        self.j = {n: column.view(np.int64) for n, column in self.q.items()}


def translate(kernel: Kernel) -> Translated:
    """Raises UnknownInstruction, with its text and place, for what the emulator does not know."""
    starts = {0, kernel.preloaded, *kernel.labels.values()}
    for instruction in kernel.instructions:
        if instruction.opcode in BRANCHES or instruction.opcode in ("s_barrier", "s_endpgm"):
            starts.add(instruction.number + 1)
    ordered = sorted(start for start in starts if start < len(kernel.instructions))
    number_of = {start: number for number, start in enumerate(ordered)}
    numbers = [int(n) for each in kernel.instructions for n in _registers(each, "v")]
    numbers += [int(n) for each in kernel.instructions for n in _registers(each, "a")]
    most = 1 + max([0, *numbers])
    translator = _Translator(kernel, number_of, accumulators=most + most % 2)
    lines: list[str] = []
    members = []
    for number, start in enumerate(ordered):
        end = ordered[number + 1] if number + 1 < len(ordered) else len(kernel.instructions)
        body = kernel.instructions[start:end]
        lines += translator.block(number, body, number + 1)
        members.append(body)
    namespace = {**_names(), **translator.constants}
    exec(compile("\n".join(lines), f"<{kernel.name}>", "exec"), namespace)
    return Translated(
        kernel=kernel,
        blocks=[namespace[f"block_{number}"] for number in range(len(ordered))],
        first=number_of[0],
        preloaded=number_of[kernel.preloaded] if kernel.preloaded else None,
        members=members,
        classes=[Counter(class_of(each) for each in body) for body in members],
        vgprs=translator.accumulators * (2 if any(_registers(each, "a") for each in kernel.instructions) else 1),
    )


def class_of(instruction: Instruction) -> str:
    """What kind of work an instruction is."""
    name = instruction.opcode
    if name in BRANCHES or name in ("s_barrier", "s_endpgm"):
        return "branch" if name in BRANCHES else name[2:]
    if name in NOTHING:
        return "wait"
    for prefix, kind in (("s_load", "scalar memory"), ("s_", "scalar"), ("v_", "vector"), ("ds_", "LDS")):
        if name.startswith(prefix):
            return kind
    return "global memory"


def _names() -> dict[str, Any]:
    public = {name: getattr(np, name) for name in ("copyto", "add", "subtract", "multiply", "maximum", "minimum")}
    public |= {name: getattr(np, name) for name in ("invert", "bitwise_and", "bitwise_or", "bitwise_xor", "positive")}
    public |= {name: getattr(np, name) for name in ("less", "less_equal", "equal", "not_equal", "greater")}
    public |= {name: getattr(np, name) for name in ("greater_equal", "trunc", "floor", "where", "take", "uint64")}
    of_vector = {name: value for name, value in vars(vector).items() if not name.startswith("__")}
    return {
        **of_vector,
        **public,
        "scalar_field": scalar.field,
        "U32": np.uint32,
        "I32": np.int32,
        "M": 0xFFFFFFFF,
        "SCC": SCC,
        "full": lambda value: np.full(vector.LANES, value, np.uint32),
        "full_signed": lambda value: np.full(vector.LANES, value, np.int32),
        "signed": lambda value: (value ^ 0x80000000) - 0x80000000,
        "signed64": lambda value: (value ^ (1 << 63)) - (1 << 63),
        "single": lambda value: np.uint32(value).view(np.float32),
    }


def _registers(instruction: Instruction, letter: str) -> list[str]:
    found = []
    for operand in instruction.operands:
        found += [n for pair in re.findall(rf"\b{letter}\[(\d+):(\d+)\]", operand) for n in pair]
        found += re.findall(rf"\b{letter}(\d+)\b", operand)
    return found


class _Unknown(Exception):
    """An operand or a modifier that is not known."""


class _Translator:
    def __init__(self, kernel: Kernel, number_of: Mapping[int, int], accumulators: int) -> None:
        """accumulators: the column at which the AccVGPRs begin, behind the VGPRs."""
        self.kernel, self.number_of, self.accumulators = kernel, number_of, accumulators
        self.constants: dict[str, Any] = {}

    def block(self, number: int, body: Sequence[Instruction], after: int) -> list[str]:
        """The source of a block's function."""
        lines = [
            f"def block_{number}(w):",
            "    s, m, v, i, f, q, j = w.s, w.m, w.v, w.i, w.f, w.q, w.j",
        ]
        for instruction in body:
            try:
                lines += ["    " + line for line in self._lines(instruction, after)]
            except (_Unknown, KeyError, ValueError, IndexError) as error:
                raise UnknownInstruction(f"{instruction}: {error or 'not known'}") from None
        if not lines[-1].startswith("    return"):
            lines.append(f"    return {after}")
        return lines

    def _lines(self, at: Instruction, after: int) -> list[str]:
        name = at.opcode
        if name in NOTHING:
            return []
        if name == "s_endpgm":
            return ["return None"]
        if name == "s_barrier":
            return [f"return {-1 - after}"]
        if name in BRANCHES:
            target = self.number_of[self.kernel.labels[at.operands[0]]]
            taken = BRANCHES[name]
            return [f"return {target}" if taken == "True" else f"return {target} if {taken} else {after}"]
        if name in SCALAR:
            return self._scalar(at)
        if name in SAVE_EXEC:
            self._only(at, set())
            destination, source = at.operands
            return [
                f"a, e = {self._scalar_value(source, 'q')}, w.exec",
                *self._write_scalar(destination, "q", "e"),
                f"m = w.set_exec(({SAVE_EXEC[name]}) & 0xffffffffffffffff)",
                "s[SCC] = 1 if w.exec else 0",
            ]
        if name.startswith("s_load_dword"):
            count = int(name.removeprefix("s_load_dword").lstrip("x") or 1)
            destination, base, offset = at.operands
            self._only(at, {"offset"})
            extra = int(at.modifiers.get("offset", "0"), 0)
            first = self._number(destination, "s", count)
            constant = self._constant(offset, "i")  # signed; one from a register is not
            moved = self._scalar_value(offset, "u") if constant is None else f"({constant})"
            where = f"{self._scalar_value(base, 'q')} + {moved} + {extra}"
            return [f"w.at = {at.number}", f"s[{first}:{first + count}] = w.scalar_load({where}, {count})"]
        if name.startswith("v_"):
            return self._vector(at)
        if name.startswith("ds_"):
            return [f"w.at = {at.number}", *self._local(at)]
        if name.startswith(("global_", "buffer_")):
            return [f"w.at = {at.number}", *self._global(at)]
        raise _Unknown("not known")

    def _only(self, at: Instruction, known: set[str]) -> None:
        for key in at.modifiers:
            if key not in known:
                raise _Unknown(f"modifier {key} is not known")

    # -------------------------------------------------------- operands

    def _number(self, operand: str, letter: str, count: int = 1) -> int:
        """The first of `count` registers that an operand names."""
        if operand in _SPECIAL and letter == "s":
            return _SPECIAL[operand]
        found = re.fullmatch(rf"({'[va]' if letter == 'v' else 's'})(?:(\d+)|\[(\d+):(\d+)\])", operand)
        if found is None:
            raise _Unknown(f"operand {operand} is not known")
        first = int(found[2] if found[2] is not None else found[3])
        last = first if found[2] is not None else int(found[4])
        if last - first + 1 != count:
            raise _Unknown(f"operand {operand} should be {count} registers")
        return first + self.accumulators if found[1] == "a" else first

    def _constant(self, operand: str, kind: str) -> int | None:
        """The value of an inline constant or a literal, unsigned for u and q; None for anything else."""
        size = 64 if kind in "qj" else 32
        if re.fullmatch(r"-?(\d+|0x[0-9a-f]+)", operand):
            value = int(operand, 0)
        elif re.fullmatch(r"-?\d+\.\d+", operand):
            value = int.from_bytes(struct.pack("<d" if size == 64 else "<f", float(operand)), "little")
        elif operand == "0.15915494":
            value = 0x3E22F983
        else:
            return None
        if kind == "j" and operand.startswith("0x") and 1 << 31 <= value < 1 << 32:
            raise _Unknown(f"literal {operand} may be meant with its sign or without")
        value &= (1 << size) - 1
        return value - (1 << size) if kind in "ij" and value >> (size - 1) else value

    def _scalar_value(self, operand: str, kind: str) -> str:
        """An integer of Python."""
        constant = self._constant(operand, kind)
        if constant is not None:
            return str(constant)
        if operand.startswith("exec"):
            value = {"exec": "w.exec", "exec_lo": f"(w.exec & {_MASK})", "exec_hi": "(w.exec >> 32)"}[operand]
        elif operand == "scc":
            value = "s[SCC]"
        elif kind in "qj":
            first = self._number(operand, "s", 1 if operand == "vcc" else 2)
            value = f"(s[{first}] | s[{first + 1}] << 32)"
        else:
            value = f"s[{self._number(operand, 's')}]"
        return {"i": f"signed({value})", "j": f"signed64({value})"}.get(kind, value)

    def _write_scalar(self, operand: str, kind: str, value: str) -> list[str]:
        """Statements that write an unsigned integer of the right size."""
        if operand == "exec":
            return [f"m = w.set_exec({value})"]
        if operand in ("exec_lo", "exec_hi"):
            kept, put = (
                ("w.exec >> 32 << 32", value) if operand == "exec_lo" else (f"w.exec & {_MASK}", f"({value}) << 32")
            )
            return [f"m = w.set_exec(({kept}) | {put})"]
        if kind in "qj":
            first = self._number(operand, "s", 1 if operand == "vcc" else 2)
            return [f"t = {value}", f"s[{first}], s[{first + 1}] = t & {_MASK}, t >> 32"]
        return [f"s[{self._number(operand, 's')}] = {value}"]

    def _source(self, operand: str, kind: str) -> str:
        """A vector source: a column, or a scalar that NumPy can combine with one."""
        if kind == "f":
            return self._float(operand)
        letter = {"u": "v", "i": "i", "q": "q", "j": "j"}[kind]
        if re.match(r"[va][\[\d]", operand):
            number = self._number(operand, "v", 2 if kind in "qj" else 1)
            if kind in "qj" and number % 2:
                return f"w.odd_pair({number}, {kind == 'j'})"
            return f"{letter}[{number}]"
        return self._scalar_value(operand, kind)

    def _float(self, operand: str) -> str:
        negative, absolute = operand.startswith("-") and not self._is_number(operand), "|" in operand
        plain = operand.removeprefix("-").strip("|") if negative or absolute else operand
        if re.match(r"[va][\[\d]", plain):
            value = f"f[{self._number(plain, 'v')}]"
        else:
            constant = self._constant(plain, "u")
            value = f"single({constant if constant is not None else self._scalar_value(plain, 'u')})"
        value = f"abs({value})" if absolute else value
        return f"(-{value})" if negative else value

    @staticmethod
    def _is_number(operand: str) -> bool:
        return re.fullmatch(r"-?[\d.]+|-?0x[0-9a-f]+", operand) is not None

    # -------------------------------------------------------- scalar and vector arithmetic

    def _scalar(self, at: Instruction) -> list[str]:
        rule = SCALAR[at.opcode]
        self._only(at, set())
        operands = list(at.operands)
        destination = operands.pop(0) if rule.destination else ""
        if at.opcode in READS_DESTINATION:
            operands.insert(0 if at.opcode in ("s_addk_i32", "s_mulk_i32", "s_cmov_b32") else 1, destination)
        if len(operands) != len(rule.sources):
            raise _Unknown(f"{len(operands)} sources, not {len(rule.sources)}")
        lines = []
        if at.opcode.startswith(("s_movk", "s_cmpk", "s_addk", "s_mulk")):
            # 16 bits, widened by their sign, or for unsigned comparisons without one.
            given = int(operands[-1], 0) & 0xFFFF
            signed = not at.opcode.endswith("_u32")
            operands[-1] = str((given ^ 0x8000) - 0x8000 if signed else given)
        sources = [self._scalar_value(operand, kind) for operand, kind in zip(operands, rule.sources, strict=True)]
        lines.append("; ".join(f"{name} = {source}" for name, source in zip("abc", sources, strict=False)))
        if "scc" in rule.value or "scc" in rule.scc:
            lines.append("scc = s[SCC]")
        value = rule.value.replace("field(", "scalar_field(")
        if rule.destination:
            mask = "0xffffffffffffffff" if rule.destination in "qj" else _MASK
            lines += [f"t = {value}", f"d = t & {mask}"]
            flag = [f"s[SCC] = 1 if {rule.scc} else 0"] if rule.scc else []
            return [*lines, *flag, *self._write_scalar(destination, rule.destination, "d")]
        return [*lines, f"s[SCC] = 1 if {rule.scc} else 0"]

    def _vector(self, at: Instruction) -> list[str]:
        name = at.opcode
        if name in VECTOR:
            return self._simple(at)
        if name in COMPARE:
            return self._compare(at)
        if name in CARRY:
            return self._carry(at)
        if name in MULTIPLY_ADD:
            self._only(at, set())
            destination, carry, *sources = at.operands
            kinds = "iiq" if "i64" in name else "uuq"
            a, b, c = (self._source(each, kind) for each, kind in zip(sources, kinds, strict=True))
            return [
                f"t, over = {MULTIPLY_ADD[name]}({a}, {b}, {c})",
                *self._write_pair(destination, "t"),
                *self._write_scalar(carry, "q", "bits(over) & w.exec"),
            ]
        if name == "v_cndmask_b32":
            self._only(at, set())
            destination, a, b, *mask = at.operands
            chosen = f"lanes({self._scalar_value(mask[0] if mask else 'vcc', 'q')})"
            value = f"where({chosen}, {self._column(b)}, {self._column(a)})"
            return [f"copyto(v[{self._number(destination, 'v')}], {value}, where=m)"]
        if name in ("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32"):
            self._only(at, set())
        if name == "v_readfirstlane_b32":
            return self._write_scalar(at.operands[0], "u", f"int({self._source(at.operands[1], 'u')}[w.first_lane()])")
        if name == "v_readlane_b32":
            lane = f"{self._scalar_value(at.operands[2], 'u')} & 63"
            return self._write_scalar(at.operands[0], "u", f"int({self._source(at.operands[1], 'u')}[{lane}])")
        if name == "v_writelane_b32":
            lane = f"{self._scalar_value(at.operands[2], 'u')} & 63"
            return [f"v[{self._number(at.operands[0], 'v')}][{lane}] = {self._scalar_value(at.operands[1], 'u')}"]
        if name == "v_pk_mov_b32":
            self._only(at, {"op_sel", "op_sel_hi"})
            return self._packed_move(at)
        if name == "v_bitop3_b32":
            self._only(at, {"bitop3"})
            a, b, c = (self._column(each) for each in at.operands[1:])
            table = int(at.modifiers["bitop3"], 0)
            terms = [
                f"({a if k & 4 else f'~{a}'} & {b if k & 2 else f'~{b}'} & {c if k & 1 else f'~{c}'})"
                for k in range(8)
                if table >> k & 1
            ]
            return [f"copyto(v[{self._number(at.operands[0], 'v')}], {' | '.join(terms) or '0'}, where=m)"]
        if name in ("v_permlane16_swap_b32", "v_permlane32_swap_b32"):
            self._only(at, set())
            first, second = (self._number(each, "v") for each in at.operands)
            return [f"w.swap_lanes({first}, {second}, {16 if '16' in name else 32})"]
        raise _Unknown("not known")

    def _column(self, operand: str) -> str:
        """An unsigned source that is a column even where it is the same in all lanes."""
        source = self._source(operand, "u")
        return source if source.startswith("v[") else f"full({source})"

    def _simple(self, at: Instruction) -> list[str]:
        rule = VECTOR[at.opcode]
        destination, *operands = at.operands
        if len(operands) != len(rule.sources):
            raise _Unknown(f"{len(operands)} sources, not {len(rule.sources)}")
        modifiers = dict(at.modifiers)
        sources = []
        if at.encoding != "_sdwa":
            sources = [self._source(operand, kind) for operand, kind in zip(operands, rule.sources, strict=True)]
        lines: list[str] = []
        mask = "m"
        if at.encoding == "_dpp":
            sources[0], mask = self._dpp(at, operands[0], rule.sources[0], modifiers, lines)
        elif at.encoding == "_sdwa":
            for index, operand in enumerate(operands):
                signed = operand.startswith("sext(")
                plain = operand.removeprefix("sext(").removesuffix(")") if signed else operand
                select = modifiers.pop(f"src{index}_sel", "DWORD")
                if rule.sources[index] not in "ui":
                    raise _Unknown("SDWA of such a source is not known")
                whole = f"{self._column(plain)}{'.view(I32)' if rule.sources[index] == 'i' else ''}"
                self._sdwa(select)
                sources.append(f"sdwa_source({whole}, {select!r}, {signed})")
        clamp = modifiers.pop("clamp", None) is not None
        select, unused = modifiers.pop("dst_sel", "DWORD"), modifiers.pop("dst_unused", "UNUSED_PAD")
        self._sdwa(select, unused)
        if modifiers:
            raise _Unknown(f"modifier {next(iter(modifiers))} is not known")
        number = self._number(destination, "v", 2 if rule.destination in "qj" else 1)
        if number % 2 and rule.destination in "qj":
            raise _Unknown("a pair of registers that starts at an odd number")
        letter = {"u": "v"}.get(rule.destination, rule.destination)
        target = f"{letter}[{number}]"
        column = re.compile(r"(v|i|q|j|f|w\.odd_pair|x|full|sdwa_source)\b")
        scalar = [not column.match(source.lstrip("(-")) for source in sources]
        typed = {"u": "full", "i": "full_signed", "q": "U64", "j": "I64"}
        for index, kind in enumerate(rule.sources):
            # NumPy takes an integer of Python as it takes a column's, but neither alone nor where it is shifted.
            shifted = kind in "qj" and index < 2 and not rule.value.isidentifier()
            if kind != "f" and scalar[index] and (shifted or (index == 0 and all(scalar))):
                sources[index] = f"{typed[kind]}({sources[index]})"
            elif (
                # Two such integers would go beyond 32 bits between them; the 24-bit forms cut what NumPy has cut first.
                (kind in "ui" and scalar[index] and not rule.value.isidentifier())
                and ("low24" in rule.value or (index == scalar.index(True) and sum(scalar) > 1))
            ):
                sources[index] = f"{'U32' if kind == 'u' else 'I32'}({sources[index]})"
        if clamp:
            if at.opcode not in ("v_add_u32", "v_sub_u32"):
                raise _Unknown("clamp is not known here")
            word = "wide_sum" if at.opcode == "v_add_u32" else "wide_difference"
            value = f"{word}({sources[0]}, {sources[1]}).clip(0, M)"
        elif rule.value.isidentifier() and select == "DWORD":
            return [*lines, f"{rule.value}({', '.join(sources)}, out={target}, where={mask})"]
        elif rule.value.isidentifier():
            value = f"{rule.value}({', '.join(sources)})"
        else:
            lines.append("; ".join(f"{name} = {source}" for name, source in zip("abc", sources, strict=False)))
            if re.search(r"\bd\b", rule.value):
                lines.append(f"d = {target}")
            value = rule.value
        if select != "DWORD":
            value = f"sdwa_result({value}, {target}, {select!r}, {unused!r})"
        return [*lines, f"copyto({target}, {value}, where={mask}, casting='unsafe')"]

    @staticmethod
    def _sdwa(select: str, unused: str = "UNUSED_PAD") -> None:
        if re.fullmatch(r"BYTE_[0-3]|WORD_[01]|DWORD", select) is None:
            raise _Unknown(f"{select} is not known")
        if unused not in ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"):
            raise _Unknown(f"{unused} is not known")

    def _dpp(
        self, at: Instruction, operand: str, kind: str, modifiers: dict[str, str], lines: list[str]
    ) -> tuple[str, str]:
        """The permuted first source, and the lanes that are written."""
        control = next((key for key in DPP_CONTROLS if key in modifiers), None)
        if control is None:
            raise _Unknown("no DPP control that is known")
        source, valid = vector.dpp(control, modifiers.pop(control))
        zero = modifiers.pop("bound_ctrl", "") in ("0", "1")  # written either way; both set the bit
        writes = vector.dpp_writes(int(modifiers.pop("row_mask", "0xf"), 0), int(modifiers.pop("bank_mask", "0xf"), 0))
        lane, there, put = (f"K{at.number}_{part}" for part in ("lane", "there", "put"))
        self.constants |= {lane: source, there: valid, put: writes}
        column = self._source(operand, kind)
        everywhere = bool(valid.all())
        lines.append(f"on = w.on_lanes({lane})" + ("" if everywhere else f" & {there}"))
        lines.append(f"x = take({column}, {lane})")
        if zero:
            lines.append("x[~on] = 0")
            lines.append(f"p = {put} if m is True else m & {put}")
        else:
            lines.append(f"p = on & {put} if m is True else on & m & {put}")
        return "x", "p"

    def _compare(self, at: Instruction) -> list[str]:
        self._only(at, set())
        letter, condition = COMPARE[at.opcode]
        destination, a, b = at.operands
        lines = [f"a, b = {self._source(a, letter)}, {self._source(b, letter)}"]
        return [*lines, *self._write_scalar(destination, "q", f"bits({condition}) & w.exec")]

    def _carry(self, at: Instruction) -> list[str]:
        destination, out, a, b, *carry = at.operands
        lines: list[str] = []
        modifiers, mask = dict(at.modifiers), "m"
        first = self._source(a, "u")
        if at.encoding == "_dpp":
            first, mask = self._dpp(at, a, "u", modifiers, lines)
        if modifiers:
            raise _Unknown(f"modifier {next(iter(modifiers))} is not known")
        lines.append(f"a, b = {first}, {self._source(b, 'u')}")
        if carry:
            lines.append(f"carry = lanes({self._scalar_value(carry[0], 'q')})")
        over = "t < 0" if "sub" in at.opcode else "t > M"
        number = self._number(destination, "v")
        return [
            *lines,
            f"t = {CARRY[at.opcode]}",
            f"copyto(v[{number}], t, where={mask}, casting='unsafe')",
            f"over = bits({f'({over}) & {mask}' if mask != 'm' else over}) & w.exec",
            *self._write_scalar(out, "q", "over"),
        ]

    def _write_pair(self, destination: str, value: str) -> list[str]:
        number = self._number(destination, "v", 2)
        if number % 2:
            raise _Unknown("a pair of registers that starts at an odd number")
        return [f"copyto(q[{number}], {value}, where=m, casting='unsafe')"]

    def _packed_move(self, at: Instruction) -> list[str]:
        destination, *sources = at.operands
        number = self._number(destination, "v", 2)
        low = [int(bit) for bit in at.modifiers.get("op_sel", "[0,0]").strip("[]").split(",")]
        # The low half comes from the first source, the high half from the second, each by its op_sel bit.
        parts = []
        for source, half in zip(sources, (low[0], low[1]), strict=True):
            constant = self._constant(source, "u")
            if constant is not None:
                parts.append(str(constant))
                continue
            letter = "v" if re.match(r"[va]", source) else "s"
            first = self._number(source, letter, 2)
            parts.append(f"{letter}[{first + half}]")
        return [
            f"x, y = full({parts[0]}), full({parts[1]})",
            f"copyto(v[{number}], x, where=m); copyto(v[{number + 1}], y, where=m)",
        ]

    # -------------------------------------------------------- memory

    def _local(self, at: Instruction) -> list[str]:
        name = at.opcode
        if name == "ds_swizzle_b32":
            source = f"K{at.number}"
            self._only(at, {"offset"})
            self.constants[source] = vector.swizzle(at.modifiers["offset"])
            return [f"w.permute({self._number(at.operands[0], 'v')}, {self._source(at.operands[1], 'u')}, {source})"]
        if name == "ds_bpermute_b32":
            self._only(at, {"offset"})
            destination, address, data = at.operands
            lane = f"((({self._column(address)} + {int(at.modifiers.get('offset', '0'), 0)}) >> 2) & 63)"
            return [f"w.permute({self._number(destination, 'v')}, {self._column(data)}, {lane})"]
        found = re.fullmatch(r"ds_(read|write)(2?)(st64)?_(\w+)", name)
        if found is None or found[4] not in _LDS:
            raise _Unknown("not known")
        self._only(at, {"offset", "offset0", "offset1"})
        size = _LDS[found[4]]
        offsets = [int(at.modifiers.get("offset", "0"), 0)]
        if found[2]:
            unit = size * (64 if found[3] else 1)
            offsets = [int(at.modifiers.get(key, "0"), 0) * unit for key in ("offset0", "offset1")]
        registers = max(1, size // 4)
        if found[1] == "read":
            first = self._number(at.operands[0], "v", registers * len(offsets))
            address = self._column(at.operands[1])
            signed = found[4].startswith("i")
            return [
                f"w.local_load({first + n * registers}, {address} + {offset}, {size}, {signed})"
                for n, offset in enumerate(offsets)
            ][:: -1 if self._in_way(at, first, registers) else 1]
        address, *values = at.operands
        return [
            f"w.local_store({self._column(address)} + {offset}, {self._number(one, 'v', registers)}, {size})"
            for one, offset in zip(values, offsets, strict=True)
        ]

    def _in_way(self, at: Instruction, first: int, registers: int) -> bool:
        """Whether the first half of a double read overwrites the address of the second."""
        address = self._number(at.operands[1], "v")
        return first <= address < first + registers

    def _global(self, at: Instruction) -> list[str]:
        kind, _, rest = at.opcode.partition("_")
        self._only(at, _MEMORY_MODIFIERS)
        coherent = bool({"sc1", "glc"} & at.modifiers.keys())
        action, _, what = rest.partition("_")
        if action == "load" and what in _LOADS:
            size, signed = _LOADS[what]
            destination = self._number(at.operands[0], "v", max(1, size // 4))
            if kind == "buffer":
                base, limit = self._buffer(at, at.operands[1:])
                return [f"w.buffer_load({destination}, {base}, {limit}, {size}, {signed}, {coherent})"]
            address = self._address(at, at.operands[1:])
            return [f"w.load({destination}, {address}, {size}, {signed}, {coherent})"]
        if action == "store" and what in _STORES:
            size = _STORES[what]
            if kind == "buffer":
                data = self._number(at.operands[0], "v", max(1, size // 4))
                base, limit = self._buffer(at, at.operands[1:])
                return [f"w.buffer_store({base}, {limit}, {data}, {size})"]
            data = self._number(at.operands[1], "v", max(1, size // 4))
            return [f"w.store({self._address(at, [at.operands[0], *at.operands[2:]])}, {data}, {size})"]
        if action == "atomic":
            operation, _, width = what.partition("_")
            if operation not in _ATOMICS or width not in ("", "x2"):
                raise _Unknown("not known")
            size = 8 if width else 4
            operands = list(at.operands)
            returns = bool({"sc0", "glc"} & at.modifiers.keys())
            if kind == "buffer":  # what was there comes back where the data are
                first = self._number(operands[0], "v", (2 if operation == "cmpswap" else 1) * size // 4)
                there, limit = self._buffer(at, operands[1:])
                put = first if returns else -1
                return [f"w.buffer_atomic({operation!r}, {put}, {there}, {limit}, {first}, {size})"]
            destination = self._number(operands.pop(0), "v", size // 4) if returns else -1
            into, given, *others = operands
            count = (2 if operation == "cmpswap" else 1) * size // 4
            where, source = self._address(at, [into, *others]), self._number(given, "v", count)
            return [f"w.atomic({operation!r}, {destination}, {where}, {source}, {size})"]
        raise _Unknown("not known")

    def _address(self, at: Instruction, operands: Sequence[str]) -> str:
        """The addresses of a global access: from VGPR pairs, or from an SGPR pair and unsigned 32-bit offsets."""
        offset = int(at.modifiers.get("offset", "0"), 0)
        where, base = operands
        if base == "off":
            address = self._source(where, "q")
            return f"{address} + {offset & 0xFFFFFFFFFFFFFFFF}" if offset else address
        return f"U64({self._source(where, 'u')}) + ({self._scalar_value(base, 'q')} + {offset} & {2**64 - 1})"

    def _buffer(self, at: Instruction, operands: Sequence[str]) -> tuple[str, str]:
        """A raw buffer: the address of its byte 0 for this instruction and the offsets in it; and how many it has."""
        if "idxen" in at.modifiers:
            raise _Unknown("idxen is not known")
        where, descriptor, extra = operands
        offsets = f"{self._column(where)}.astype(uint64)" if "offen" in at.modifiers else "U64(full(0))"
        first = self._number(descriptor, "s", 4)
        shift = self._scalar_value(extra, "u")
        constant = int(at.modifiers.get("offset", "0"), 0)
        base = f"s[{first}] | (s[{first + 1}] & 0xffff) << 32"
        offsets = f"{offsets} + {constant}" if constant else offsets
        return f"({base}) + {shift}, {offsets}", f"s[{first + 2}] - {shift}, s[{first + 1}] >> 16"
