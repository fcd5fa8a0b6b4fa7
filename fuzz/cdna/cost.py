"""What a launch asks of a CDNA GPU, counted by emulation: instructions, memory, barriers, chains of loads.

It says nothing of time: how long a load takes, what overlaps and what waits is the hardware's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...spec import ArgumentError, BackendError, brief, printable
from ..figures import markdown
from ..target import EMULATED
from .assembly import Instruction
from .scalar import BRANCHES, SCALAR

ROWS = (1, 4, 8, 24, 32, 64)
FUNCTIONS = ("launch", "unfused")

# Imported and not run with -m, so that the module has one name. In a fresh process, since the emulator is for good.
_CHILD = "from swa_decode_meta.fuzz.cdna.cost import main; main()"


def costs(arch: str, rows: Sequence[int] = ROWS) -> list[dict[str, Any]]:
    """The costs of a build of serving batches of so many rows, causal and DSpark, pages of 64, for `arch`.

    Returns plain values, one for each form, row count and function of FUNCTIONS: "form", "rows", "function",
    "kernels" (how many were launched, those of torch not among them), "waves", "per_wave" (instructions by class,
    the mean of all waves), "chain" (the most loads of which each waits for the one before), "lines" (of 128 bytes),
    "bytes" ("read", "written", "scalar", "LDS"), "barriers" (summed over the workgroups).
    Raises ArgumentError, and BackendError where the kernels cannot be compiled or emulated.
    """
    if arch not in EMULATED:
        raise ArgumentError("arch", f"one of {', '.join(EMULATED)}", brief(arch))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, arch, *map(str, rows)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = printable(done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
        raise BackendError(f"emulating {arch}: {words[-1]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: Iterable[Mapping[str, Any]]) -> str:
    """The costs as a Markdown table."""
    lines = [
        (
            each["form"],
            each["function"],
            each["rows"],
            each["kernels"],
            each["waves"],
            *(round(each["per_wave"].get(name, 0)) for name in ("vector", "scalar", "global memory", "scalar memory")),
            each["chain"],
            each["lines"],
            each["bytes"]["LDS"],
            each["barriers"],
        )
        for each in found
    ]
    head = ("form", "function", "rows", "kernels", "waves", "vector", "scalar", "global", "s_load")
    return markdown((*head, "chain", "lines", "LDS", "barriers"), lines, words=2)


def main() -> None:
    """In the fresh process: print the costs as JSON."""
    arch, *rows = sys.argv[1:]
    from .triton_kernels import install

    emulator = install(arch)
    from ...kernel import launch, unfused
    from ..bench import WINDOW, serving

    functions = dict(zip(FUNCTIONS, (launch, unfused.launch), strict=True))
    found = []
    for form, noncausal in (("causal", False), ("DSpark", True)):
        for count in map(int, rows):
            arguments = _arguments(serving(count, 1, 64, noncausal, seed=1), WINDOW)
            for name, function in functions.items():
                seen: list[Any] = []
                emulator.after = lambda _, cost, seen=seen: seen.append(cost)
                with emulator.checking(0):
                    function(*arguments)
                found.append({"form": form, "rows": count, "function": name, **_summed(seen)})
    print(json.dumps(found))


def _arguments(batch: Any, window: int) -> list[Any]:
    """Those of `launch`, on the CPU, with buffers of just the batch's rows."""
    import torch

    from ...spec import OUTPUTS, TENSORS, symbols

    sizes = symbols(batch.num_tokens, batch.num_reqs, batch.width)
    tensors = []
    for name, spec in TENSORS.items():
        if name in OUTPUTS:
            shape = [sizes[symbol] for _, symbol in spec.sizes]
            tensors.append(torch.zeros(shape, dtype=getattr(torch, spec.dtype)))
        else:
            tensors.append(torch.from_numpy(getattr(batch, name).copy()))
    return [*tensors, batch.num_tokens, window, batch.block_size, batch.noncausal]


def _summed(costs: Sequence[Any]) -> dict[str, Any]:
    waves = sum(cost.waves for cost in costs)
    classes = {name for cost in costs for name in cost.instructions}
    return {
        "kernels": len(costs),
        "waves": waves,
        "per_wave": {n: sum(cost.instructions.get(n, 0) for cost in costs) / waves for n in sorted(classes)},
        "chain": sum(cost.chain for cost in costs),
        "lines": sum(cost.lines for cost in costs),
        "bytes": {name: sum(cost.bytes[name] for cost in costs) for name in ("read", "written", "scalar", "LDS")},
        "barriers": sum(cost.barriers for cost in costs),
    }


# ------------------------------------------------------------ chains of loads


def longest_chain(trace: Iterable[Instruction]) -> int:
    """Of the instructions that a wave ran, the most loads of which each needs the one before.

    A load needs another whose value is in its address, in what the address was computed from, in the lanes that are
    on, or in a condition that a branch on the way here took: a wave waits for it.
    """
    depth: dict[str, int] = {}
    branched = 0
    for instruction in trace:
        reads, writes = _dependences(instruction)
        deepest = max([branched, *(depth.get(name, 0) for name in reads)])
        if instruction.opcode in BRANCHES:
            branched = deepest
            continue
        if "load" in instruction.opcode or instruction.opcode.startswith("ds_read"):
            deepest += 1
        for name in writes:
            depth[name] = deepest
    return max([branched, *depth.values()])


def _dependences(instruction: Instruction) -> tuple[set[str], set[str]]:
    """Names of the registers that an instruction reads and writes, as far as chains of loads go."""
    known = _KNOWN.get(instruction.text)
    if known is None:
        known = _KNOWN[instruction.text] = _find_dependences(instruction)
    return known


_KNOWN: dict[str, tuple[set[str], set[str]]] = {}


def _find_dependences(instruction: Instruction) -> tuple[set[str], set[str]]:
    name = instruction.opcode
    operands = [_registers(operand) for operand in instruction.operands]
    reads: set[str] = set()
    writes: set[str] = set()
    if name in BRANCHES:
        kind = name.removeprefix("s_cbranch_")[:3]
        reads = {"scc": {"scc"}, "vcc": {"s106", "s107"}, "exe": {"exec"}}.get(kind, set())
        return reads, writes
    stores = "store" in name or ("write" in name and name.startswith("ds_")) or name.startswith("s_cmp")
    outputs = 0 if stores else 2 if re.match(r"v_(add|sub|subrev)b?c?_co|v_mad_[ui]64", name) else 1
    writes.update(*operands[:outputs])
    reads.update(*operands[outputs:])
    rule = SCALAR.get(name)
    if (rule is not None and rule.scc) or "saveexec" in name:
        writes.add("scc")
    if rule is not None and "scc" in rule.value:
        reads.add("scc")
    if "saveexec" in name:
        reads.add("exec")
        writes.add("exec")
    if not name.startswith("s_"):
        reads.add("exec")
        if not stores:
            reads |= writes  # lanes that are off keep what they had
    if name == "v_cndmask_b32" and len(operands) == 3:
        reads |= {"s106", "s107"}
    return reads, writes


def _registers(operand: str) -> set[str]:
    if operand.startswith("vcc"):
        return {"s106", "s107"}
    if operand.startswith("exec"):
        return {"exec"}
    found = re.fullmatch(r"-?\|?([vas])(?:(\d+)|\[(\d+):(\d+)\])\|?", operand)
    if found is None:
        return set()
    first = int(found[2] or found[3])
    return {f"{found[1]}{n}" for n in range(first, int(found[2] or found[4]) + 1)}
