"""Imports of optional dependencies, with an error that names the extra that provides them."""

import importlib
from typing import Any


def optional(module: str, *, needed_by: str) -> Any:
    """Imports a module of the extra `images`.

    Args:
        module: its full name.
        needed_by: feature that needs it, for the error.

    Raises:
        ModuleNotFoundError: it is not installed; `name` is the distribution's top-level package.
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or top).partition(".")[0] != top:
            raise  # installed, but one of its own dependencies is missing
        text = f"{needed_by} needs {top}, which is not installed: pip install 'leakbench[images]'"
        raise ModuleNotFoundError(text, name=top) from error
