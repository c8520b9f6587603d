"""Environment variables set for a while. Standard library only: worker processes import this before anything else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable of this process, and so of children started in this context; then restores it.

    Args:
        name: of the variable.
        value: in this context.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
