"""Methods of the user's own files: `mine/half_dp.py:half_dp` is the function `half_dp` of that file.

Such a path is taken wherever the name of a defense or an attack is. A relative path starts at the current folder. The
file runs once a process, as an import would run it, and may import what lies beside it, by statements and under names
that no other module has: records name the code by its files, so it must be the code that runs. Whatever goes wrong in
it is one sentence that names the file.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .messages import in_one_line
from .settings import CatalogError

PATTERN = "FILE.py:FUNCTION"

OURS = ("leakbench",)
"""Packages of this distribution, which nothing beside a file takes the place of."""

_read: dict[Path, str] = {}  # files beside a method as they were when they were imported


def is_path(name: str) -> bool:
    """Whether a name says where a function lies, and not what it is called in the catalogue."""
    path, colon, _ = name.rpartition(":")
    return name.endswith(".py") or (bool(colon) and path.endswith(".py"))


def check(what: str, name: str) -> None:
    """Refuses a path that leads to no file, or names no function; runs nothing.

    Args:
        what: it is, as "defense".
        name: path of a Python file, a colon, the name of a function.

    Raises:
        CatalogError: naming the file or the function.
    """
    path, function = _parts(name)
    if not function.isidentifier():
        raise CatalogError(f"{what} {name!r} must be written {PATTERN}, the function behind a colon")
    if not path.is_file():
        raise CatalogError(f"no file {str(path)!r} for {what} {name!r}; a path is relative to {Path.cwd()}")


def load(what: str, name: str) -> Any:
    """The function, or decorated attack, that a path leads to.

    Args:
        what: it is, as "defense".
        name: path of a Python file, a colon, the name of a function.

    Raises:
        CatalogError: as `check`, or the file raises, or has no function of that name.
        ImportError: the file imports what is not installed.
    """
    check(what, name)
    path, function = _parts(name)
    first = path.resolve()
    module = _module(first, " ".join(map(_content, _source_files(first))))
    found = getattr(module, function, None)
    if found is None:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise CatalogError(f"no function {function!r} in {path}; it has {', '.join(own) or 'none'}")
    return found


def source_files(name: str) -> list[Path]:
    """The file of a path and every file beside it that it imports, directly or by way of others; sorted.

    Args:
        name: path of a Python file, a colon, the name of a function.
    """
    return _source_files(_parts(name)[0].resolve())


def digests(name: str) -> tuple[str, ...]:
    """SHA-256 of each of `source_files`."""
    return tuple(map(_content, source_files(name)))


def folder(name: str) -> Path:
    """Where the file of a path lies, and what it imports beside it.

    Args:
        name: path of a Python file, a colon, the name of a function.
    """
    return _parts(name)[0].resolve().parent


def summary(name: str) -> str:
    """The first line of a file's docstring, without running it."""
    text = docstring(name)
    return text.partition("\n")[0] if text else f"{_parts(name)[1]}() of {_parts(name)[0]}"


def docstring(name: str) -> str:
    """The docstring of a function, or else of its file, without running it; empty where there is none, or no Python."""
    path, function = _parts(name)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    own = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return (ast.get_docstring(own[0]) if own else None) or ast.get_docstring(tree) or ""


def resolved(name: str) -> str:
    """A path in the one spelling that all of its spellings have; a name of the catalogue as it is."""
    path, function = _parts(name)
    return f"{path.resolve()}:{function}" if is_path(name) else name


def place(error: BaseException, name: str) -> str:
    """Where in the file of a path an exception came from, as `place_in`; empty for names of the catalogue."""
    return place_in(error, _parts(name)[0]) if is_path(name) else ""


def _parts(name: str) -> tuple[Path, str]:
    path, colon, function = name.rpartition(":")
    return (Path(path), function) if colon else (Path(name), "")


@cache
def _module(path: Path, digest: str) -> ModuleType:
    """A file as a module, run once for each content that it and what it imports beside it have had."""
    # A name that no other module has, which stays: dataclasses and pickle look modules up.
    label = f"leakbench_method_{hashlib.sha256(f'{path} {digest}'.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None:
        raise CatalogError(f"{path} must be a Python file")
    module = importlib.util.module_from_spec(spec)
    files = set(_source_files(path))
    _forget_edited(path.parent)
    _check_names(path, files)
    before = set(_beside(path.parent).values())  # what other methods of this folder import
    sys.modules[label] = module
    # What it prints is no part of a command's result, which may be one JSON document.
    with _importable(path.parent), redirect_stdout(sys.stderr):
        try:
            spec.loader.exec_module(module)
        except ImportError:
            raise
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            raise CatalogError(f"{path} raised {in_one_line(error)}{place_in(error, path)}") from error
    for file in _beside(path.parent).values():
        if file not in files and file not in before:
            raise CatalogError(
                f"{path} imports {file} in a way that does not show in its text, so records could not name the code; "
                "write it as an import statement"
            )
        _read.setdefault(file, _content(file))
    return module


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _beside(folder: Path) -> dict[str, Path]:
    """Modules that were imported from a folder, by name, with their files as they are named there."""
    found = {}
    start = os.path.normpath(folder)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # The text first: few modules of thousands are from the folder, and to make paths of all takes long.
        if not file or name.partition(".")[0] in OURS or (start != "." and start not in _normal(file)):
            continue
        if (path := Path(file)).is_relative_to(folder) and path in _files_of(folder.joinpath(*name.split("."))):
            found[name] = path
    return found


@cache
def _normal(file: str) -> str:
    return os.path.normpath(file)


def _forget_edited(folder: Path) -> None:
    """Drops what was imported from a folder where any of it was edited since, so that it is read again."""
    there = _beside(folder)
    if any(file in _read and not (file.is_file() and _content(file) == _read[file]) for file in there.values()):
        for name, file in there.items():
            sys.modules.pop(name, None)
            _read.pop(file, None)
        importlib.invalidate_caches()


def _check_names(path: Path, files: set[Path]) -> None:
    """Refuses what lies beside a file under the name of another module, which would be imported in its place.

    Raises:
        CatalogError: naming both.
    """
    for name in sorted({file.relative_to(path.parent).parts[0].partition(".")[0] for file in files - {path}}):
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module that says nothing of where it is from
            spec = None
        own = {str(file) for file in _files_of(path.parent / name)}
        if (name in sys.modules and not spec) or (spec and spec.origin is not None and spec.origin not in own):
            raise CatalogError(
                f"{path.parent / name} cannot be imported by {path.name}: its name is that of another module, of "
                f"{spec.origin if spec else 'this process'}; give it a name of its own"
            )


def place_in(error: BaseException, path: Path) -> str:
    """Where in a file an exception came from, as " (line 3, in plan)"; empty where it did not pass through it."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    for frame in reversed(frames):
        if Path(frame.filename).resolve() == path.resolve():
            return f" (line {frame.lineno}, in {frame.function})"
    return ""  # a SyntaxError says its line itself


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path.append(str(folder))  # at the end, where it hides no library that is imported meanwhile
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _source_files(first: Path) -> list[Path]:
    found, waiting = {first}, [first]
    while waiting:
        for path in _imported(waiting.pop(), first.parent):
            if path not in found:
                found.add(path)
                waiting.append(path)
    return sorted(found)


def _imported(path: Path, folder: Path) -> list[Path]:
    """Files of a folder that a file imports, anywhere in it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # or no Python at all
        return []
    places = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places |= {(folder, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Of a package's own: from the folder of the file, or from one above.
            start = folder if not node.level else [path.parent, *path.parent.parents][node.level - 1]
            module = [node.module] if node.module else []
            places |= {(start, ".".join([*module, *more])) for more in ([], *([alias.name] for alias in node.names))}
    found = []
    for start, name in places:
        parts = [part for part in name.split(".") if part]
        if (start == folder and parts and parts[0] in OURS) or not start.is_relative_to(folder):
            continue
        for i in range(start == folder, len(parts) + 1):
            found += [file for file in _files_of(start.joinpath(*parts[:i])) if file.is_file()]
    return found


def _files_of(place: Path) -> list[Path]:
    """Files that a module of this place may be read from."""
    return [
        file
        for suffix in importlib.machinery.all_suffixes()
        for file in (place.with_name(place.name + suffix), place / f"__init__{suffix}")
    ]
