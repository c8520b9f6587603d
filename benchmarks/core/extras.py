"""Imports of optional dependencies, with an error that names the extra that brings them."""

import importlib
from typing import Any


def optional(module: str, *, needed_by: str) -> Any:
    """A module of the extra `images`.

    Args:
        module: its full name.
        needed_by: what asks for it, for the error.

    Raises:
        ModuleNotFoundError: without it; its `name` is the distribution's top-level package.
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or top).partition(".")[0] != top:
            raise  # it is there, and one of its own dependencies is not
        text = f"{needed_by} needs {top}, which is not installed: pip install 'leakbench[images]'"
        raise ModuleNotFoundError(text, name=top) from error
