"""Methods in the user's own files: `mine/half_dp.py:half_dp` is the function `half_dp` of that file.

Such a path is accepted wherever the name of a defense or an attack is. A relative path starts at the current folder.
The file runs once per process, like an import, and again after an edit. It may import files of its folder, but only by
import statements, and only files whose names no other module has: records identify the code by digests of the files
that the statements name, so no other code may run. An error in a file is reported in a sentence that names the file.
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

from .messages import CatalogError, in_one_line

PATTERN = "FILE.py:FUNCTION"

OURS = ("leakbench",)
"""Packages of this distribution, which no file in a user's folder may shadow."""

_read: dict[Path, str] = {}  # file imported by a method -> its digest at import


def is_path(name: str) -> bool:
    """True if a name is the path of a function, not a name in the catalogue."""
    path, colon, _ = name.rpartition(":")
    return name.endswith(".py") or (bool(colon) and path.endswith(".py"))


def check(kind: str, name: str) -> None:
    """Refuses a path to a missing file, or without a function name; runs nothing.

    Args:
        kind: kind of method, such as "defense".
        name: path of a Python file, a colon, the name of a function.

    Raises:
        CatalogError: naming the file or the function.
    """
    path, function = _parts(name)
    if not function.isidentifier():
        raise CatalogError(f"{kind} {name!r} must be written {PATTERN}, the function behind a colon")
    if not path.is_file():
        raise CatalogError(f"no file {str(path)!r} for {kind} {name!r}; a path is relative to {Path.cwd()}")


def load(kind: str, name: str) -> Any:
    """Returns the function, or decorated attack, at a path.

    Args:
        kind: kind of method, such as "defense".
        name: path of a Python file, a colon, the name of a function.

    Raises:
        CatalogError: as in `check`, or the file raises, or has no function of that name.
        ImportError: the file imports a package that is not installed.
    """
    check(kind, name)
    path, function = _parts(name)
    first = path.resolve()
    module = _module(first, " ".join(map(_content, _source_files(first))))
    method = getattr(module, function, None)
    if method is None:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise CatalogError(f"no function {function!r} in {path}; it has {', '.join(own) or 'none'}")
    return method


def source_files(name: str) -> list[Path]:
    """Returns the file of a path and its local imports, direct or indirect; sorted.

    Args:
        name: path of a Python file, a colon, the name of a function.
    """
    return _source_files(_parts(name)[0].resolve())


def digests(name: str) -> tuple[str, ...]:
    """Returns SHA-256 of each of `source_files`."""
    return tuple(map(_content, source_files(name)))


def folder(name: str) -> Path:
    """Returns the folder of a path's file and its local imports.

    Args:
        name: path of a Python file, a colon, the name of a function.
    """
    return _parts(name)[0].resolve().parent


def summary(name: str) -> str:
    """Returns the first line of a file's docstring, without running it."""
    text = docstring(name)
    return text.partition("\n")[0] if text else f"{_parts(name)[1]}() of {_parts(name)[0]}"


def docstring(name: str) -> str:
    """Returns the docstring of a function, or else of its file, without running it; empty if none, or not Python."""
    path, function = _parts(name)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    own = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return (ast.get_docstring(own[0]) if own else None) or ast.get_docstring(tree) or ""


def resolved(name: str) -> str:
    """Returns a path in a unique spelling; a name of the catalogue unchanged."""
    path, function = _parts(name)
    return f"{path.resolve()}:{function}" if is_path(name) else name


def place(error: BaseException, name: str) -> str:
    """Returns `place_in` for the file of a path; empty for a name of the catalogue."""
    return place_in(error, _parts(name)[0]) if is_path(name) else ""


def _parts(name: str) -> tuple[Path, str]:
    path, colon, function = name.rpartition(":")
    return (Path(path), function) if colon else (Path(name), "")


@cache
def _module(path: Path, digest: str) -> ModuleType:
    """Imports a file as a module, run once per content of the file and its local imports."""
    # A unique and permanent name, because dataclasses and pickle look modules up by it.
    label = f"leakbench_method_{hashlib.sha256(f'{path} {digest}'.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None:
        raise CatalogError(f"{path} must be a Python file")
    module = importlib.util.module_from_spec(spec)
    files = set(_source_files(path))
    _forget_edited(path.parent)
    _check_names(path, files)
    before = set(_beside(path.parent).values())  # local imports of other methods in this folder
    sys.modules[label] = module
    # Text that the file prints must not enter the output of a command, which may be a JSON document.
    with _importable(path.parent), redirect_stdout(sys.stderr):
        try:
            spec.loader.exec_module(module)
        except ImportError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise any exception
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
    """Returns the modules that were imported from a folder, by name, with their files as `sys.modules` spells them."""
    modules = {}
    start = os.path.normpath(folder)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Strings are compared first: few of thousands of modules are from the folder, and building all paths is slow.
        if not file or name.partition(".")[0] in OURS or (start != "." and start not in _normal(file)):
            continue
        if (path := Path(file)).is_relative_to(folder) and path in _files_of(folder.joinpath(*name.split("."))):
            modules[name] = path
    return modules


@cache
def _normal(file: str) -> str:
    return os.path.normpath(file)


def _forget_edited(folder: Path) -> None:
    """Drops imports from a folder if any of its files was edited since, so that they are read again."""
    modules = _beside(folder)
    if any(file in _read and not (file.is_file() and _content(file) == _read[file]) for file in modules.values()):
        for name, file in modules.items():
            sys.modules.pop(name, None)
            _read.pop(file, None)
        importlib.invalidate_caches()


def _check_names(path: Path, files: set[Path]) -> None:
    """Refuses a local file with the name of another module, because that module would be imported in its place.

    Raises:
        CatalogError: naming both.
    """
    for name in sorted({file.relative_to(path.parent).parts[0].partition(".")[0] for file in files - {path}}):
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module without a spec
            spec = None
        own = {str(file) for file in _files_of(path.parent / name)}
        if (name in sys.modules and not spec) or (spec and spec.origin is not None and spec.origin not in own):
            raise CatalogError(
                f"{path.parent / name} cannot be imported by {path.name}: its name is that of another module, of "
                f"{spec.origin if spec else 'this process'}; give it a name of its own"
            )


def place_in(error: BaseException, path: Path) -> str:
    """Returns the location of an exception in a file, as " (line 3, in plan)"; empty if not on the traceback."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    for frame in reversed(frames):
        if Path(frame.filename).resolve() == path.resolve():
            return f" (line {frame.lineno}, in {frame.function})"
    return ""  # a SyntaxError contains its line


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    before, compiled = list(sys.path), sys.dont_write_bytecode
    sys.path.append(str(folder))  # at the end, so that its files shadow no library
    sys.dont_write_bytecode = True  # a compiled file beside a submission's method would be no part of it
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:], sys.dont_write_bytecode = before, compiled


def _source_files(first: Path) -> list[Path]:
    files, waiting = {first}, [first]
    while waiting:
        for path in _imported(waiting.pop(), first.parent):
            if path not in files:
                files.add(path)
                waiting.append(path)
    return sorted(files)


def _imported(path: Path, folder: Path) -> list[Path]:
    """Returns the files of a folder that import statements of a file name, also inside functions."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # or not Python
        return []
    places = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places |= {(folder, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A relative import: from the folder of the file, or from one of its parents, of which there may be fewer.
            above = [path.parent, *path.parent.parents]
            if node.level > len(above):
                continue
            start = folder if not node.level else above[node.level - 1]
            module = [node.module] if node.module else []
            places |= {(start, ".".join([*module, *more])) for more in ([], *([alias.name] for alias in node.names))}
    files = []
    for start, name in places:
        parts = [part for part in name.split(".") if part]
        if (start == folder and parts and parts[0] in OURS) or not start.is_relative_to(folder):
            continue
        for i in range(start == folder, len(parts) + 1):
            place = start.joinpath(*parts[:i])
            # `os.path` answers for names that no file system has; a stranger may write 100,000 parts of a name.
            files += [file for file in _files_of(place) if os.path.isfile(file)]  # noqa: PTH113 - as above
            if not os.path.isdir(place):  # noqa: PTH112
                break
    return files


def _files_of(place: Path) -> list[Path]:
    """Returns files that a module at this path may be read from."""
    return [
        file
        for suffix in importlib.machinery.all_suffixes()
        for file in (place.with_name(place.name + suffix), place / f"__init__{suffix}")
    ]
