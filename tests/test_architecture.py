"""Who may import whom: four leaves that know nothing of one another, and one hub that knows their types.

Modules are named here as their files lie; they are imported as `leakbench.defenses`, `leakbench.audit` and so on.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = ("defenses", "attacks", "benchmarks", "leaderboard")
PACKAGES = (*LEAVES, "audit")
# What the hub may see of the leaves; it finds methods by name. Only the command line prints boards.
HUB_MAY_IMPORT = (
    "defenses.core",
    "attacks.core",
    "benchmarks.core",
    "benchmarks.data",
    "benchmarks.models",
    "leaderboard.kinds",
    "leaderboard.records.arrays",
    "leaderboard.records.audit_findings",
    "leaderboard.records.audit_report",
    "leaderboard.records.details",
    "leaderboard.records.files",
    "leaderboard.records.folder",
    "leaderboard.records.manifest",
    "leaderboard.metrics",
    "leaderboard.records.record",
    "leaderboard.records.report",
    "leaderboard.records.task",
    "leaderboard.records.transcript_report",
    "leaderboard.records.update_report",
    "leaderboard.records.validation",
    "leaderboard.submissions",
)
COMMAND_LINE_MAY_IMPORT = (*HUB_MAY_IMPORT, "leaderboard")
# Measure the engines and closed forms against other tools; nothing imports them.
MEASUREMENTS = ("benchmarks.speed", "benchmarks.gpu_check", "benchmarks.federated_claims")
# Compares measured records with a paper's claims; nothing imports it.
COMPARISONS = ("benchmarks.federated_claims",)
# Each of these folders imports those before it, and none behind it.
ORDER = {
    "defenses.core": ("kernels", "randomness", "plan", "gradients", "privacy", "training", "federated"),
    "audit": (
        *("isolation", "catalog", "suite", "zoo", "evidence", "scoring", "targets", "plan", "subjects", "run"),
        *("selftest", "theory", "external", "submission", "cli"),
    ),
    "leaderboard": ("records", "board", "checks", "exports", "submissions", "page", "site"),
}
UPWARDS = {
    (
        "audit.isolation.child",
        "audit.catalog.methods",
    ): "the program of another process, which imports an attack by name",
    ("audit.zoo.checkpoint", "audit.external.files.read"): "a checkpoint's weights are read as those of any stranger",
    ("audit.plan.threat_models", "audit.subjects.shadow_bank"): "its table says what each access waits for",
}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "misc"}


def modules() -> list[str]:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted(dotted(file.relative_to(ROOT)) for file in files)


def dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_of(module: str) -> Path:
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(source: str, package: str) -> Iterator[tuple[str, bool]]:
    """Every name imported anywhere in `source`, without `leakbench.`, and whether it was written relatively."""
    for name, relative in _written(source, package):
        yield name.removeprefix("leakbench."), relative


@cache
def _written(source: str, package: str) -> list[tuple[str, bool]]:
    return list(_read(source, package))


def _read(source: str, package: str) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.level > 0) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from ((str(name.value), True) for name in node.args[:1] if isinstance(name, ast.Constant))


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


def faults(module: str, source: str, package: str) -> list[str]:
    """What is wrong with the imports of `module`, one sentence each; `package` is the one it lies in."""
    own, found = module.split(".")[0], []
    written = {name for name, _ in _written(source, package)}
    for name, relative in imports(source, package):
        top = name.split(".")[0]
        if top == own and not relative:
            found.append(f"{module} imports {name} of its own package; write it relatively")
        if top == own and within(module, (f"{own}.core",)) and not within(name, (f"{own}.core",)):
            found.append(f"{module} is shared machinery and imports {name}, which is built on it")
        if f"leakbench.{name}" in written and top not in (*PACKAGES, "method_package", "malloc", "lazy_names"):
            found.append(f"{module} imports leakbench.{name}; import it from where it is defined")
        if top in PACKAGES and not relative and f"leakbench.{name}" not in written:
            found.append(f"{module} imports {name}; write leakbench.{name}")
        if top == "tests":
            found.append(f"{module} imports {name}, which is not shipped")
        if top in PACKAGES and top != own:
            if within(module, MEASUREMENTS) and within(name, ("defenses.core", "attacks.core")):
                continue
            if within(module, COMPARISONS) and within(name, ("leaderboard.records.record",)):
                continue
            if own in LEAVES:
                found.append(f"{module} imports {name}; {own} must not know {top}")
            else:
                on_command_line = within(module, ("audit.cli",))
                allowed = COMMAND_LINE_MAY_IMPORT if on_command_line else HUB_MAY_IMPORT
                if not within(name, allowed):
                    found.append(f"{module} imports {name}; of the others it may import {', '.join(allowed)}")
        if own == "leaderboard" and top == "torch":
            found.append(f"{module} imports torch; a board is made where there is none")
        if module == "leaderboard.records.record" and not relative and top not in sys.stdlib_module_names:
            found.append(f"{module} imports {name}; records are read by the standard library alone")
    return found


@cache
def tree() -> dict[str, tuple[str, str]]:
    """Source of every module, and the package that it lies in."""
    files = {module: source_of(module) for module in modules()}
    return {module: (file.read_text(encoding="utf-8"), package_of(module, file)) for module, file in files.items()}


def package_of(module: str, file: Path) -> str:
    return module if file.name == "__init__.py" else module.rpartition(".")[0]


def test_every_module_imports_only_what_it_may():
    found = [fault for module, (source, package) in tree().items() for fault in faults(module, source, package)]
    assert found == []
    assert {module.split(".")[0] for module in modules()} == set(PACKAGES)


def upwards(order: dict[str, tuple[str, ...]]) -> list[str]:
    """Imports of a folder by one that comes before it."""
    found = []
    for module, (source, package) in tree().items():
        for parent, folders in order.items():
            if not module.startswith(f"{parent}."):
                continue
            own = module.removeprefix(f"{parent}.").split(".")[0]
            for name, _ in imports(source, package):
                other = name.removeprefix(f"{parent}.").split(".")[0]
                ranked = name.startswith(f"{parent}.") and own in folders and other in folders
                if (module, name.rpartition(".")[0]) in UPWARDS or (module, name) in UPWARDS:
                    continue
                if ranked and folders.index(own) < folders.index(other):
                    found.append(f"{module} imports {name}; {own} comes before {other}")
    return found


def test_folders_import_one_another_in_one_direction():
    assert upwards(ORDER) == []
    for parent, folders in ORDER.items():
        there = (ROOT / parent.replace(".", "/")).iterdir()
        assert {path.name for path in there if (path / "__init__.py").exists()} == {*folders}
    assert upwards({parent: folders[::-1] for parent, folders in ORDER.items()})


def test_no_module_is_a_drawer_for_everything():
    assert not [module for module in modules() if FORBIDDEN_NAMES & set(module.split("."))]


def types_in(source: str) -> set[str]:
    """Classes and aliases of types that a module defines at its top level."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            found |= {name} if re.fullmatch(r"_?[A-Z][a-z]\w*", name) else set()
    return found


def test_a_type_has_one_name_and_a_name_one_type():
    homes: dict[str, list[str]] = {}
    for module, (source, _) in tree().items():
        for name in types_in(source):
            homes.setdefault(name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}
    assert types_in("class A: ...\nBatch = int\nMOST = 3\n_Key = str\n") == {"A", "Batch", "_Key"}


def test_no_module_imports_itself_by_way_of_others():
    """Also by imports inside functions, which hide a cycle until somebody moves them to the top."""
    known = set(modules())
    edges = {module: set() for module in known}
    for module, (source, package) in tree().items():
        for name, _ in imports(source, package):
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and name != module:
                edges[module].add(name)
    assert cycles(edges) == []


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """What is left when modules that import nothing else that is left are taken out again and again."""
    left = {module: set(others) for module, others in edges.items()}
    while leaves := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in leaves}
    return [sorted(left)] if left else []


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "d"]]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


FORBIDDEN = [
    ("defenses.dp_sgd", "from leakbench import attacks", "defenses must not know attacks"),
    ("defenses.dp_sgd", "def f():\n    from leakbench.audit.share import x", "defenses must not know audit"),
    ("attacks.dlg", "from leakbench.defenses.core import clip", "attacks must not know defenses"),
    ("benchmarks.data.digits", "import leakbench.leaderboard.records.record", "benchmarks must not know leaderboard"),
    ("benchmarks.data.digits", "from leakbench.defenses.core import clip", "benchmarks must not know defenses"),
    ("benchmarks.speed.step", "from leakbench.defenses.dp_sgd import dp_sgd", "benchmarks must not know defenses"),
    ("leaderboard.board.table", "from leakbench.audit import cli", "leaderboard must not know audit"),
    ("leaderboard.board.table", "import torch.nn", "a board is made where there is none"),
    ("leaderboard.records.record", "import pandas", "the standard library alone"),
    ("audit.run.harness", "from leakbench.defenses.dp_sgd import dp_sgd", "of the others it may import"),
    ("audit.run.harness", "from leakbench.defenses import dp_sgd", "of the others it may import"),
    ("audit.run.harness", "import leakbench.leaderboard.board.table", "of the others it may import"),
    ("defenses.dp_sgd", "from leakbench.defenses.core import clip", "write it relatively"),
    ("defenses.core.gradients.executor", "from ...dp_sgd import dp_sgd", "is shared machinery"),
    ("defenses.core.gradients.executor", "from ... import dp_sgd", "is shared machinery"),
    ("audit.run.harness", "from tests.conftest import x", "not shipped"),
    ("defenses.dp_sgd", "from leakbench import audit_model", "import it from where it is defined"),
    ("audit.run.harness", "from defenses.core import clip", "write leakbench.defenses.core.clip"),
]


def test_a_forbidden_import_is_found():
    for module, source, fault in FORBIDDEN:
        (found,) = faults(module, source, module.rpartition(".")[0])
        assert fault in found


PERMITTED = [
    ("defenses.dp_sgd", "import torch\nfrom .core import clip"),
    ("defenses.core.gradients.executor", "from .rows import rows\nfrom . import noise"),
    ("benchmarks.data.digits", "from ..core import Splits"),
    ("benchmarks.speed.step", "from leakbench.defenses.core.gradients.layerwise.layers.linear import Outer"),
    ("benchmarks.speed.rgap", "from leakbench.attacks.core.closed_form.recursion.invert import inverted_inputs"),
    (
        "audit.run.harness",
        "from leakbench.defenses.core import train\nfrom leakbench.leaderboard.records.record import Record",
    ),
    ("audit.run.harness", "from leakbench.benchmarks import data, models\nfrom .catalog import find"),
    ("audit.cli.app", "from leakbench.leaderboard.board.table import Board"),
    ("leaderboard.records.record", "import json\nfrom dataclasses import dataclass"),
    ("leaderboard.board.table", "import pandas\nfrom .record import Record"),
]


def test_a_permitted_import_passes():
    for module, source in PERMITTED:
        assert faults(module, source, module.rpartition(".")[0]) == []


@pytest.mark.long
def test_the_leaderboard_runs_without_torch():
    """Also through what it imports: read in a process of its own, module by module."""
    names = [name for name in modules() if name.startswith("leaderboard")]
    assert len(names) > 5
    program = f"""
import sys, importlib
for name in {names}:
    importlib.import_module(f"leakbench.{{name}}")
    if "torch" in sys.modules:
        sys.exit(f"{{name}} imports torch")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
