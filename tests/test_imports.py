"""Which part may import which, what each loads, and that a part has one import name."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

import swa_decode_meta.spec

PACKAGE = "swa_decode_meta"
ROOT = Path(swa_decode_meta.spec.__file__).parents[1]
PARTS: dict[str, set[str]] = {
    "spec": set(),
    "oracle": {"spec"},
    "kernel": {"spec"},
    "fuzz": {"spec", "oracle", "kernel"},
}
LIBRARIES = {
    "spec": {"numpy"},
    "oracle": {"numpy"},
    "kernel": {"torch", "triton"},
    "fuzz": {"numpy", "click", "hypothesis", "torch", "triton", "matplotlib", "vllm"},
}
UNKNOWN = "?"
"""Stands for an import whose name is worked out at run time."""

part_by_part = pytest.mark.parametrize("part", PARTS)


def imports(source: str, module: str, is_package: bool = False) -> set[str]:
    """The full names that the source of `module` imports, wherever in it the import stands."""
    package = module if is_package else module.rpartition(".")[0]

    def names() -> Iterator[str]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{origin}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                name = node.args[0] if node.args else None
                constant = isinstance(name, ast.Constant) and isinstance(name.value, str)
                yield resolve_name(name.value, package) if constant else UNKNOWN

    return set(names())


def part_of(name: str) -> str | None:
    """The part of the project that an imported name lies in, by its right name or by a second one."""
    first, _, rest = name.partition(".")
    part = rest.partition(".")[0] if first == PACKAGE else first
    return part if part in PARTS or first == PACKAGE else None


def strangers(source: str, module: str, is_package: bool = False) -> set[str]:
    """The imports of `module` that its part is not allowed: of other parts, of second names, of other libraries."""
    part = module.split(".")[1]
    allowed = PARTS[part] | {part}
    found = set()
    for name in imports(source, module, is_package):
        top = name.partition(".")[0]
        ours = part_of(name)
        if name == UNKNOWN:  # a target of the fuzzer's, vLLM in a server
            right = part == "fuzz" or module == f"{PACKAGE}.kernel.build"
        elif ours is not None:
            right = ours in allowed and top == PACKAGE
        else:
            right = top in LIBRARIES[part] or top in sys.stdlib_module_names
        if not right:
            found.add(name)
    return found


def modules(part: str) -> dict[str, Path]:
    """Every module of a part, by its import name."""
    found = {}
    for path in sorted((ROOT / part).rglob("*.py")):
        names = path.relative_to(ROOT).with_suffix("").parts
        found[".".join((PACKAGE, *names)).removesuffix(".__init__")] = path
    return found


def run(code: str) -> str:
    """What a fresh interpreter prints that runs `code` with the parts' folders beside it."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.stdout + (done.stderr.strip().splitlines() or [""])[-1]


def loaded(names: set[str], unwanted: set[str]) -> str:
    """Which of the unwanted libraries a fresh interpreter has loaded once it has imported `names`."""
    statements = "\n".join(f"import {name}" for name in sorted(names))
    return run(f"{statements}\nimport sys\nprint(*sorted({unwanted!r} & set(sys.modules)))").strip()


# ------------------------------------------------------------------ the checker


@pytest.mark.parametrize(
    "source",
    [
        "from ..kernel import launch",
        "from ..kernel.launch import launch",
        "from .. import kernel",
        "from .. import spec, kernel as other",
        "import swa_decode_meta.kernel",
        "import numpy, swa_decode_meta.kernel.launch as launch",
        "from swa_decode_meta import kernel",
        "from swa_decode_meta.kernel.shape import LaunchShape",
        "def late():\n    from ..kernel import launch",
        "class Late:\n    if True:\n        from ..kernel import launch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..kernel import launch",
        "try:\n    import swa_decode_meta.kernel\nexcept ImportError:\n    pass",
        "import importlib\nimportlib.import_module('swa_decode_meta.kernel')",
        "from importlib import import_module\nimport_module('..kernel', __package__)",
        "__import__('swa_decode_meta.kernel')",
        "import kernel",
        "from kernel.launch import launch",
    ],
)
def test_the_checker_sees_an_import_however_it_is_written(source: str) -> None:
    for importer in ("spec", "oracle"):
        assert {part_of(name) for name in strangers(source, f"{PACKAGE}.{importer}.made_up")} == {"kernel"}


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..oracle import plain", "spec.made_up"),
        ("from ...oracle import plain", "spec.inner.made_up"),
        ("from ..oracle import plain", "kernel.made_up"),
        ("from ..spec import Batch\nimport torch", "oracle.made_up"),
        ("import yaml", "fuzz.made_up"),
        ("import spec", "fuzz.made_up"),
        ("import importlib\nimportlib.import_module(name)", "kernel.made_up"),
    ],
)
def test_the_checker_refuses_what_a_part_may_not_import(source: str, module: str) -> None:
    assert strangers(source, f"{PACKAGE}.{module}")


def test_the_checker_resolves_a_dot_in_a_package_to_the_package_itself() -> None:
    assert imports("from . import plain", f"{PACKAGE}.oracle", is_package=True) == {f"{PACKAGE}.oracle.plain"}
    assert imports("from . import plain", f"{PACKAGE}.oracle") == {f"{PACKAGE}.plain"}
    assert strangers("from .. import kernel", f"{PACKAGE}.oracle.made_up") == {f"{PACKAGE}.kernel"}


def test_the_checker_accepts_what_a_part_may_import() -> None:
    source = (
        "import json\nimport numpy as np\nfrom . import plain\nfrom ..spec import Batch\nfrom ..spec.batch import Batch"
    )
    assert not strangers(source, f"{PACKAGE}.oracle.made_up")


# ---------------------------------------------------------------- who imports whom


@part_by_part
def test_a_part_imports_only_the_parts_and_libraries_that_it_may(part: str) -> None:
    found = modules(part)
    assert len(found) > 2
    for module, path in found.items():
        assert not strangers(path.read_text(), module, path.name == "__init__.py"), path


def test_the_oracles_and_the_kernel_never_import_each_other_nor_one_oracle_the_other() -> None:
    sides = {name: {f"{PACKAGE}.oracle.{name}"} for name in ("plain", "vectorised")} | {
        "kernel": set(modules("kernel"))
    }
    paths = modules("oracle") | modules("kernel")
    for side, members in sides.items():
        others = set().union(*(names for name, names in sides.items() if name != side))
        for module in members:
            path = paths[module]
            seen = imports(path.read_text(), module, path.name == "__init__.py")
            assert not {name for name in seen if any(f"{name}.".startswith(f"{other}.") for other in others)}, module


# -------------------------------------------------------------------- one name


@part_by_part
def test_a_part_under_a_second_name_is_refused_with_its_right_one(part: str) -> None:
    assert f"ImportError: import this package as {PACKAGE}.{part}" in run(f"import {part}")


@part_by_part
def test_running_a_part_or_a_module_of_it_under_a_second_name_is_refused(part: str) -> None:
    inner = next(name for name in modules(part) if name.count(".") == 2).rpartition(".")[2]
    for name in (part, f"{part}.{inner}"):
        code = f"import runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
        assert f"import this package as {PACKAGE}.{part}" in run(code), name


def test_no_file_of_the_project_is_loaded_twice() -> None:
    code = f"""
import sys, {PACKAGE}.fuzz.cli, {PACKAGE}.fuzz.replay, {PACKAGE}.oracle, {PACKAGE}.spec
files = [module.__file__ for module in list(sys.modules.values()) if str(getattr(module, '__file__', '')).startswith(
    {str(ROOT)!r})]
print(len(files) > 10 and len(files) - len(set(files)))
"""
    assert run(code).strip() == "0"


# ------------------------------------------------------------------ what is loaded


def test_what_is_loaded_is_seen() -> None:
    assert loaded({"json", "decimal"}, {"json", "decimal", "torch"}) == "decimal json"


@pytest.mark.parametrize("part", ["spec", "oracle"])
def test_spec_and_oracle_load_neither_torch_nor_triton_nor_the_kernel(part: str) -> None:
    unwanted = {"torch", "triton", "hypothesis", "click", f"{PACKAGE}.kernel", f"{PACKAGE}.fuzz"}
    assert loaded(set(modules(part)), unwanted) == ""


def test_spec_loads_no_oracle() -> None:
    assert loaded(set(modules("spec")), {f"{PACKAGE}.{part}" for part in PARTS if part != "spec"}) == ""


@pytest.mark.kernel
def test_the_kernel_loads_no_oracle_and_no_fuzzer() -> None:
    unwanted = {f"{PACKAGE}.oracle", f"{PACKAGE}.fuzz", "hypothesis", "click"}
    assert loaded({f"{PACKAGE}.kernel"}, unwanted) == ""


def test_the_command_line_loads_neither_torch_nor_triton_nor_hypothesis() -> None:
    assert loaded({f"{PACKAGE}.fuzz.cli"}, {"torch", "triton", "hypothesis", f"{PACKAGE}.kernel"}) == ""


def test_of_the_fuzzer_only_what_launches_loads_torch() -> None:
    """In the child, or to time it."""
    parents = set(modules("fuzz")) - {
        f"{PACKAGE}.fuzz.{name}"
        for name in ("memory", "forms", "bench_kernel", "__main__", "vllm_ops", "cdna.triton_kernels")
    }
    assert loaded(parents, {"torch", "triton", f"{PACKAGE}.kernel"}) == ""
