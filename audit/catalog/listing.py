"""Entries of the catalogue: names, files and a line about each, read without importing any of them.

Files are parsed, so `leakbench list` imports neither PyTorch nor optional dependencies.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.resources
import pkgutil
import sys
import tomllib
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from . import plugins
from .messages import CatalogError, no_such

EntryKind = Literal["defenses", "attacks", "suites", "data", "models"]
MethodKind = Literal["defenses", "attacks"]

KINDS: dict[EntryKind, str] = {
    "defenses": "defense",
    "attacks": "attack",
    "suites": "suite",
    "data": "data set",
    "models": "model",
}
"""Kind of entry -> its noun in the singular, for messages."""

HAS_SMALL = " Has --small."
"""End of the description of a suite with a `[small]` table."""


def names(kind: EntryKind) -> tuple[str, ...]:
    """Returns all names of a kind, sorted; imports no method."""
    if kind == "suites":
        folder = importlib.resources.files("leakbench.benchmarks.suites")
        entry_names = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    elif kind in ("data", "models"):
        entry_names = importlib.import_module(f"leakbench.benchmarks.{kind}").names()
    else:
        entry_names = {*method_files(kind), *entry_points(kind)}
    return tuple(sorted(entry_names))


def check(kind: MethodKind, name: str) -> None:
    """Refuses a name outside the catalogue, or a path to a missing file; imports no method.

    Raises:
        CatalogError: with the nearest name, or the file.
    """
    if plugins.is_path(name):
        plugins.check(KINDS[kind], name)
    elif name not in (known := names(kind)):
        raise CatalogError(
            no_such(KINDS[kind], name, known) + f" (a path is written {plugins.PATTERN})" * ("/" in name)
        )


def describe(kind: EntryKind, name: str) -> str:
    """Returns a line about an entry; imports no method, so it works without optional dependencies.

    Raises:
        CatalogError: no such name.
    """
    if kind in ("defenses", "attacks") and plugins.is_path(name):
        plugins.check(KINDS[kind], name)
        return plugins.summary(name)
    known = names(kind)
    if name not in known:
        raise CatalogError(no_such(KINDS[kind], name, known))
    if kind == "suites":
        suite = tomllib.loads(text_of_suite(name))
        return suite.get("about", "") + HAS_SMALL * ("small" in suite)
    if kind in ("data", "models"):
        return importlib.import_module(f"leakbench.benchmarks.{kind}").describe(name)
    # Parsed, not imported: a method whose optional dependency is missing is listed, too.
    if name in method_files(kind):
        return file_text(kind, name).partition("\n")[0]
    return f"added by {entry_points(kind)[name][0].value}"


def patterns(kind: EntryKind) -> dict[str, str]:
    """Returns the patterns of names that are not listed, such as `folder:PATH`, with a line about each."""
    if kind in ("data", "models"):
        return importlib.import_module(f"leakbench.benchmarks.{kind}").patterns()
    return {} if kind == "suites" else {plugins.PATTERN: f"Your own {KINDS[kind]}, by the path of its file."}


def module_of(kind: MethodKind, name: str) -> str | None:
    """Returns the module of a third party's entry point; None for built-in methods, paths, and unknown names."""
    points = entry_points(kind).get(name, [])
    return points[0].module if points and name not in method_files(kind) else None


def foreign(kind: MethodKind, name: str) -> bool:
    """True if a method is a third party's: from another distribution, or from a user's file."""
    return plugins.is_path(name) or module_of(kind, name) is not None


def origin(kind: MethodKind, name: str) -> str:
    """Returns a method's origin, for a message: its path, the module of its entry point, or the built-in file."""
    return name if plugins.is_path(name) else module_of(kind, name) or f"{kind}/{name}.py"


def method_files(kind: MethodKind) -> dict[str, Path]:
    """Returns the files of the built-in methods, by name."""
    folders = [Path(folder) for folder in importlib.import_module(f"leakbench.{kind}").__path__]
    # Adding or removing a file changes the folder's modification time, which invalidates the cache.
    return _method_files(tuple((folder, folder.stat().st_mtime_ns) for folder in folders))


@lru_cache(maxsize=8)
def _method_files(folders: tuple[tuple[Path, int], ...]) -> dict[str, Path]:
    """Returns the files of methods in folders, given with their modification times."""
    return {
        module.name: folder / f"{module.name}.py"
        for folder, _ in folders
        for module in pkgutil.iter_modules([str(folder)])
        # `core` is a package; methods are flat files, named like their method.
        if not module.ispkg and not module.name.startswith("_")
    }


def central_names() -> tuple[str, ...]:
    """Returns the defenses of central training: all but the federated methods; imports no method."""
    return tuple(name for name in names("defenses") if not is_federated(name))


def is_federated(name: str) -> bool:
    """True if a built-in defense is a federated method: its function is annotated to return `Federated`."""
    path = method_files("defenses").get(name)
    return path is not None and _returns_federated(path, name, path.stat().st_mtime_ns)


@cache
def _returns_federated(path: Path, name: str, _modified: int) -> bool:
    functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    return any(
        function.name == name and function.returns is not None and ast.unparse(function.returns) == "Federated"
        for function in functions
    )


def entry_points(kind: MethodKind) -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Returns entry points of third-party distributions, by name of the method; cached at the first call."""
    return _entry_points(kind, tuple(sys.path))


@cache
def _entry_points(kind: MethodKind, _path: tuple[str, ...]) -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Returns the entry points of the distributions on a path.

    A search opens a file of every distribution and takes 16 ms for a hundred of them; a run would repeat it ten times
    per cell, so its result is cached.
    """
    # Lists, because two distributions may use the same name, which `_from_catalogue` refuses by naming both.
    points: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=f"leakbench.{kind}"):
        points.setdefault(point.name, []).append(point)
    return points


def parameters(name: str) -> int | None:
    """Returns the number of trained parameters of a model at its reference input; None for other kinds of names."""
    models = importlib.import_module("leakbench.benchmarks.models")
    if name not in models.names():
        return None
    # A model is built only if the README's table lacks it: importing PyTorch takes longer than the whole list.
    written = column(models.__name__, "parameters").get(name)
    return models.count(name) if written is None else int(written.replace(",", ""))


def text_of_suite(name: str) -> str:
    """Returns the content of a suite's file."""
    return importlib.resources.files("leakbench.benchmarks.suites").joinpath(f"{name}.toml").read_text(encoding="utf-8")


@cache
def column(package: str, title: str) -> dict[str, str]:
    """Returns a column of the tables in a package's README: name of an entry -> text of its table cell."""
    text = importlib.resources.files(package).joinpath("README.md").read_text(encoding="utf-8")
    by_name, place = {}, None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or cells[0] in ("name", "attack"):
            place = cells.index(title) if title in cells else None
        elif place is not None and cells[0].startswith("`"):
            by_name[cells[0].strip("`")] = cells[place]
    return by_name


def file_text(kind: MethodKind, name: str) -> str:
    """Returns the docstring of a built-in method's file; empty for others."""
    path = method_files(kind).get(name)
    return "" if path is None else ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
