"""Methods in files of the user's own, by path: `mine/half_dp.py:half_dp` is the function `half_dp` of that file.

Such a path is taken wherever the name of a defense or an attack is. A relative path starts at the current folder. The
file is run once a process, as an import would run it, and may import what lies beside it. Whatever it raises becomes
one sentence that names the file.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
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
_LABEL = "leakbench_method_"  # begins the name of a module that a file is run as


def is_path(name: str) -> bool:
    """Whether a name is a path of a Python file, and not a name of the catalogue."""
    # Also without a function, so that `check` can say that it lacks one.
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
    # The digest is part of the cache's key: a file that was edited, as between cells of a notebook, is run again.
    module = _module(path.resolve(), hashlib.sha256(path.read_bytes()).hexdigest())
    found = getattr(module, function, None)
    if found is None:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise CatalogError(f"no function {function!r} in {path}; it has {', '.join(own) or 'none'}")
    return found


def resolved(name: str) -> str:
    """A path in the one spelling that all of its spellings have; a name of the catalogue as it is."""
    path, function = _parts(name)
    return f"{path.resolve()}:{function}" if is_path(name) else name


def source_files(name: str) -> list[Path]:
    """The file of a path and every file beside it that it imports, directly or by way of others; sorted.

    A record names the code of a third party's method by a digest over these.

    Args:
        name: path of a Python file, a colon, the name of a function.
    """
    return _with_neighbours(_parts(name)[0].resolve())


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


def _parts(name: str) -> tuple[Path, str]:
    path, colon, function = name.rpartition(":")
    return (Path(path), function) if colon else (Path(name), "")


@cache
def _module(path: Path, digest: str) -> ModuleType:
    """A file as a module, run once for each content that it has had."""
    # A unique name, registered before the file runs and kept: dataclasses and pickle look classes' modules up by it.
    label = f"{_LABEL}{hashlib.sha256(f'{path} {digest}'.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None:
        raise CatalogError(f"{path} must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    _refuse_hidden(path)
    with _importable(path), redirect_stdout(sys.stderr):  # what it prints is no part of a command's result
        try:
            spec.loader.exec_module(module)
        except ImportError:
            raise
        except SystemExit as error:
            raise CatalogError(f"{path} must not end the program, and called sys.exit({error.code!r})") from None
        except Exception as error:  # whatever a user's code raises
            raise CatalogError(f"{path} raised {in_one_line(error)}{place_in(error, path)}") from error
    return module


def place(error: BaseException, name: str) -> str:
    """Where in the file of a path an exception came from, as `place_in`; empty for names of the catalogue."""
    return place_in(error, _parts(name)[0]) if is_path(name) else ""


def place_in(error: BaseException, path: Path) -> str:
    """Where in a file an exception came from, as " (line 3, in plan)"; empty where it did not pass through it."""
    # Innermost first: the user's own line, and not the library's that it called.
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    for frame in reversed(frames):
        if Path(frame.filename).resolve() == path.resolve():
            return f" (line {frame.lineno}, in {frame.function})"
    return ""  # a SyntaxError says its line itself


@contextmanager
def _importable(path: Path) -> Iterator[None]:
    """Lets a file import its neighbours, while it runs only: they must not shadow what is imported later."""
    before, folder = set(sys.modules), path.parent
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        # A neighbour keeps no name of its own: another folder may have one of the same name, and other content.
        files = set(map(str, _with_neighbours(path)))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and str(Path(file).resolve()) in files and not name.startswith(_LABEL):
                del sys.modules[name]


def _refuse_hidden(path: Path) -> None:
    """Refuses a file beside it whose name another module has already, because that one would be imported instead."""
    for other in _imported(path, path.parent):
        name = other.relative_to(path.parent).parts[0].removesuffix(".py")
        loaded = sys.modules.get(name)
        if name in sys.stdlib_module_names or (
            loaded is not None and Path(getattr(loaded, "__file__", None) or "/").resolve() != other
        ):
            raise CatalogError(f"{path} imports {name}, and {other} beside it is hidden by another module; rename it")


def _imported(path: Path, folder: Path) -> list[Path]:
    """Files of a folder that a file imports, also within functions, where imports run late or never."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # The syntax does not say whether an alias is a module or something in one: both are looked for.
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = []
    for name in names:
        parts = name.split(".")
        # Every prefix: importing `a.b` runs `a/__init__.py` as well.
        places = [folder.joinpath(*parts[:i]) for i in range(1, len(parts) + 1)]
        found += [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return [file.resolve() for file in found if file.is_file()]


def _with_neighbours(first: Path) -> list[Path]:
    """A file and every file of its folder that it imports, directly or by way of others; sorted."""
    found, waiting = {first}, [first]
    while waiting:
        for path in _imported(waiting.pop(), first.parent):
            if path not in found:
                found.add(path)
                waiting.append(path)
    return sorted(found)
