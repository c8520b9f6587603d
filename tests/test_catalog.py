"""Every method has its function, its test and its row of docs; and no other place knows it."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

from .parameters import subtests

ROOT = Path(__file__).parents[1]
METHODS = [
    (package, path.stem)
    for package in ("defenses", "attacks")
    for path in sorted((ROOT / package).glob("*.py"))
    if not path.name.startswith("_")
]
# A claim of a paper is about that paper's method, and a comparison of speeds about chosen methods: a new method needs
# no entry there.
CHOOSE = {
    ROOT / "audit" / "theory",
    ROOT / "benchmarks" / "federated_claims",
    ROOT / "benchmarks" / "speed" / "federated.py",
}
MODULES = {
    path: path.read_text(encoding="utf-8")
    for package in ("defenses", "attacks", "audit", "benchmarks", "leaderboard")
    for path in (ROOT / package).rglob("*.py")
    if not CHOOSE & {path, *path.parents}
}
ON_MODELS = ("BLACK_BOX", "WHITE_BOX", "LABEL_ONLY")  # accesses to a finished model alone
SHARED_WORDS = {"sgd"}  # also the name of an optimizer, and what a positive control trains with


def mentions(source: str, package: str, name: str, *, beside: bool = False) -> list[int]:
    """Lines on which a module names a method: as a string of its own, or by importing it.

    A method of the same package, `beside` it, may build on it by a relative import.
    """
    found = [node for node in parsed(source) if names(node, package, name)]
    return [
        getattr(node, "lineno", 0)
        for node in found
        if not (beside and isinstance(node, ast.ImportFrom) and node.level == 1)
    ]


@cache
def parsed(source: str) -> list[ast.AST]:
    """What a method can be named by."""
    kinds = (ast.Constant, ast.ImportFrom, ast.Import)
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def names(node: ast.AST, package: str, name: str) -> bool:
    if isinstance(node, ast.Constant):
        return node.value == name and name not in SHARED_WORDS
    if isinstance(node, ast.ImportFrom):
        return node.module in (name, f"leakbench.{package}.{name}")
    return isinstance(node, ast.Import) and any(alias.name == f"leakbench.{package}.{name}" for alias in node.names)


@subtests("package, name", METHODS)
def test_every_method_file_has_a_function_of_its_name(package, name):
    found = getattr(importlib.import_module(f"leakbench.{package}.{name}"), name, None)
    assert callable(found), f"{package}/{name}.py must hold a function named {name}"


@subtests("package, name", METHODS)
def test_every_method_has_a_test_of_its_own(package, name):
    path = ROOT / "tests" / package / f"test_{name}.py"
    assert path.is_file(), f"{package}/{name}.py needs {path.relative_to(ROOT)}"


@subtests("package, name", METHODS)
def test_every_method_has_one_row_in_the_readme_beside_it(package, name):
    rows = re.findall(rf"^\| `{name}` \|", (ROOT / package / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 1, f"{package}/README.md needs a row that starts with | `{name}` |, got {len(rows)}"


@subtests("package, name", METHODS)
def test_no_other_module_names_a_method(package, name):
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, source in MODULES.items()
        if name in source and path != ROOT / package / f"{name}.py"
        for line in mentions(source, package, name, beside=path.parent == ROOT / package)
    ]
    assert not found, f"{name} is found by its file name, so nothing should list it: {found}"


def test_no_readme_has_a_row_for_a_method_that_is_not_there():
    for package in ("defenses", "attacks"):
        rows = re.findall(r"^\| `(\w+)` \|", (ROOT / package / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(rows) == {name for owner, name in METHODS if owner == package}


def compared_methods() -> dict[str, str]:
    """Cells of docs/comparison.md that follow from the catalogue, by the title of their row."""
    modules = {method: importlib.import_module(f"leakbench.{method[0]}.{method[1]}") for method in METHODS}
    rows: dict[str, list[str]] = {"correlated noise": []}
    for (package, name), module in modules.items():
        if package == "defenses":
            rows["correlated noise"] += [name] * hasattr(module, "Streamed")
            continue
        attack = getattr(module, name)
        source = "the final model" if attack.requires.access.name in ON_MODELS else "updates"
        titles = {
            "membership": f"membership from {source}",
            "reconstruction": "inputs from an update",
            "client_property": "classes of a client from its messages",
        }
        if "MODEL" in attack.requires.to_dict()["controls"]:
            rows.setdefault("malicious servers", []).append(name)
        elif attack.kind != "canaries":
            rows.setdefault(titles.get(attack.kind, f"{attack.kind} from an update"), []).append(name)
    cells = {title: f"{len(names)}: {', '.join(f'`{name}`' for name in names)}" for title, names in rows.items()}
    defenses = sum(package == "defenses" for package, _ in METHODS)
    return cells | {
        "private training": f"{defenses} ([defenses](../defenses/README.md)), baselines and ablations included"
    }


def test_the_comparison_with_other_tools_follows_from_the_catalogue():
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    rows = [f"| {title} | {cell} |" for title, cell in compared_methods().items()]
    assert [row for row in rows if row not in page] == []


def test_the_search_for_mentions_finds_them():
    assert mentions('METHODS = ["dp_sgd"]', "defenses", "dp_sgd") == [1]
    assert mentions("import os\nfrom leakbench.defenses.dp_sgd import dp_sgd", "defenses", "dp_sgd") == [2]
    assert mentions("from .dp_sgd import DpSgd", "defenses", "dp_sgd") == [1]
    assert mentions("from .dp_sgd import DpSgd", "defenses", "dp_sgd", beside=True) == []
    assert mentions("from leakbench.defenses.dp_sgd import DpSgd", "defenses", "dp_sgd", beside=True) == [1]
    assert mentions('"""Like dp_sgd, but not."""', "defenses", "dp_sgd") == []


@subtests("name", [name for package, name in METHODS if package == "defenses"])
def test_every_defense_says_what_it_guarantees(name):
    told = ast.get_docstring(ast.parse((ROOT / "defenses" / f"{name}.py").read_text(encoding="utf-8"))) or ""
    assert re.search(r"^Guarantee:", told, re.MULTILINE)
