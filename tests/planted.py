"""Faults planted in copies of the kernel: what the fuzzer must find.

Each is a textual change to the kernel's own source, made when it is asked for, so that no copy grows stale. From the
repository's root any of them is a target: `swa-decode-meta fuzz --target tests.planted:window_one_too_long`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import swa_decode_meta.spec

KERNEL = Path(swa_decode_meta.spec.__file__).parents[1] / "kernel"


@dataclass(frozen=True)
class Fault:
    """Replace `old` by `new`, everywhere in `file` of the kernel's folder.

    routine: whether every run of the tests looks for it; the others are looked for with `pytest --all-faults`.
    function: what of the faulty copy is the target.
    """

    old: str
    new: str
    file: str = "decode_meta.py"
    routine: bool = True
    function: str = "launch"


FAULTS = {
    "window_one_too_long": Fault("end - window_size, 0)", "end - window_size - 1, 0)", routine=False),
    "window_from_less_than": Fault("tl.maximum(end - first, 0)", "tl.maximum(end - first - 1, 0)", routine=False),
    "replay_clamp_missing": Fault(
        "tl.maximum(tl.maximum(end - window_size, 0), replay)", "tl.maximum(end - window_size, 0)"
    ),
    "padding_not_masked": Fault("live = valid & (named >= 0)", "live = (named >= 0)", routine=False),
    "request_bound_off_by_one": Fault("(named < num_reqs)", "(named <= num_reqs)", routine=False),
    "negative_request_accepted": Fault("& (named >= 0) &", "&", routine=False),
    "tail_not_zeroed": Fault("mask=tail < lens_size)", "mask=tail < num_tokens)", routine=False),
    "tail_one_too_far": Fault("mask=tail < lens_size)", "mask=tail <= lens_size)", routine=False),
    "page_division": Fault("return position >> block_shift", "return (position + 1) >> block_shift", routine=False),
    "page_division_of_odd_sizes": Fault(
        "return position // block_size", "return (position + 1) // block_size", routine=False
    ),
    "holes_kept": Fault(
        "tl.where((page >= 0) & (slot < 2147483648), slot, -1)", "tl.where(slot < 2147483648, slot, -1)", routine=False
    ),
    "holes_counted": Fault("tl.where((page >= 0) & (count > 0)", "tl.where((count > 0)", routine=False),
    "offset_of_the_wrong_row": Fault("t < end,", "t < end - 1,", routine=False),
    "offset_counts_own_row": Fault("t < end,", "t <= end,", routine=False),
    "int32_product": Fault(
        "page.to(tl.int64) * block_size.to(tl.int64)",
        "(page * block_size).to(tl.int64)",
        routine=False,
    ),
    "slot_bound_missing": Fault("(page >= 0) & (slot < 2147483648)", "(page >= 0)", routine=False),
    "block_form_ends_early": Fault("end = seq_len\n", "end = prefix + t - q0 + 1\n", routine=False),
    "width_cut_missing": Fault(
        "tl.minimum(tl.maximum(end - first, 0), width)", "tl.maximum(end - first, 0)", routine=False
    ),
    "stray_write_after_the_row": Fault("(i < width))", "(i <= width))", routine=False),
    "input_mutated": Fault(
        "    tl.store(is_valid + t, valid, mask=inside)",
        "    tl.store(is_valid + t, valid, mask=inside)\n    tl.store(token_to_req + t, 0, mask=inside & (valid == 0))",
        routine=False,
    ),
    "read_past_the_table": Fault("(j < left", "(j <= left"),
    "depends_on_the_sentinel": Fault("other=-1) >= 0\n", "other=-1) != -1\n", routine=False),
    "depends_on_a_padded_request": Fault(
        "    tl.store(lens + t, length.to(tl.int32), mask=inside)",
        "    stray = tl.load(token_to_req + num_tokens - 1, mask=num_tokens > 0, other=0) < -2\n"
        "    tl.store(lens + t, tl.where(stray, 0, length).to(tl.int32), mask=inside)",
        routine=False,
    ),
    "depends_on_an_unseen_page": Fault(
        "tl.where((page >= 0) & (slot < 2147483648), slot, -1)",
        "tl.where((page >= 0) & (slot < 2147483648) & (tl.load(pages[:, None] + j + 1, "
        "mask=(i < length[:, None]) & (j + 1 < left[:, None]), other=0) >= 0), slot, -1)",
        routine=False,
    ),
    "indptr_starts_unwritten": Fault("if program == 0:", "if program < 0:", routine=False),
    "never_ends": Fault("        begin += COUNT_ROWS\n", "        begin += 0 * COUNT_ROWS\n", routine=False),
    "nothing_without_rows": Fault(
        "max(1, -(-num_tokens // self.rows_per_program))",
        "-(-num_tokens // self.rows_per_program)",
        "shape.py",
        routine=False,
    ),
    "published_before_the_count": Fault("<< 40) + kept", "<< 40)", routine=False),
    "bunches_ignored": Fault("(of_bunch, item < bunch,", "(of_bunch, item < 0,", routine=False),
    "tile_counts_itself": Fault("(item < tile) & (done == 0)", "(item <= tile) & (done == 0)", routine=False),
    "page_size_of_the_first_group": Fault(
        "block_size = tl.load(group + 9)", "block_size = tl.load(groups + 9)", routine=False, function="launch_step"
    ),
    "width_of_the_first_group": Fault(
        "width = tl.load(group + 11)", "width = tl.load(groups + 11)", routine=False, function="launch_step"
    ),
    "table_stride_ignored": Fault("block_table.stride(0),", "block_table.shape[1],", "binding.py", routine=False),
}


# Changes that are no faults: what they make of the kernel must be right too.
VARIANTS = {
    # Every tile before a program's own comes after it, so that nothing that it looks for is published.
    "programs_in_reverse": Fault(
        "program = tl.program_id(0).to(tl.int64)", "program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)"
    ),
}


def source(name: str) -> dict[str, str]:
    """The files of the changed copy. Raises KeyError for an unknown name, ValueError for one that no longer applies."""
    fault = {**FAULTS, **VARIANTS}[name]
    files = {path.name: path.read_text() for path in KERNEL.glob("*.py")}
    if fault.old not in files[fault.file]:
        raise ValueError(f"fault {name} no longer applies: {fault.old!r} is not in {fault.file}")
    files[fault.file] = files[fault.file].replace(fault.old, fault.new)
    text = files["__init__.py"]
    files["__init__.py"] = text[: text.index("if __name__ !=")] + text[text.index("from .") :]
    return {file: text.replace("from ..spec", "from swa_decode_meta.spec") for file, text in files.items()}


def _written(package: str, files: dict[str, str]) -> Path:
    """A folder with these files, the same one for the same files: a process that a fault kills tidies nothing up."""
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"{package}-{os.getuid()}-{digest}"
    if not folder.exists():
        new = Path(tempfile.mkdtemp(prefix=f"{package}-"))
        for file, text in files.items():
            (new / file).write_text(text)
        try:
            new.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return folder


def build(name: str) -> Callable[..., Any]:
    """The faulty copy's target. Triton reads a kernel's source from its file, so the copy is a real package."""
    package = f"planted_{name}"
    if package not in sys.modules:
        folder = _written(package, source(name))
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module
        spec.loader.exec_module(module)
    target: Callable[..., Any] = getattr(sys.modules[package], {**FAULTS, **VARIANTS}[name].function)
    return target


def __getattr__(name: str) -> Callable[..., Any]:
    if name in FAULTS or name in VARIANTS:
        return build(name)
    raise AttributeError(name)
