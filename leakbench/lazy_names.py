"""Public names of a package, each imported on first use.

A package declares its names once, as imports under `if TYPE_CHECKING` in its `__init__.py`, which type checkers and
editors read too. At run time the declarations are parsed from the source, in about a millisecond, and a name is
imported when it is used.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package, for the names that it imports under `if TYPE_CHECKING`.

    Args:
        package: its `__name__`.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes(package):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes(package)[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes(package)})


@cache
def homes(package: str) -> dict[str, str]:
    """Returns the full name of the module that each public name of a package is imported from."""
    file = sys.modules[package].__file__
    if file is None:
        raise ImportError(f"{package} has no __init__.py")
    blocks = [
        statement.body
        for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    ]
    return {
        alias.name: resolve_name("." * line.level + (line.module or ""), package)
        for block in blocks
        for line in block
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
