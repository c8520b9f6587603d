"""Finds data sets and architectures by file name: the module `digits` holds the function `digits`."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any


class Catalogue:
    """The modules of one folder, each of which holds a function of its own name.

    Nothing is imported before it is asked for, so that a data set that needs an extra costs others nothing.

    Args:
        package: full name of the package whose modules are the entries.
        path: the package's `__path__`.
        kind: what an entry is called in errors, in the singular ("data set").
    """

    def __init__(self, package: str, path: Iterable[str], kind: str) -> None:
        self._package = package
        self._path = list(path)
        self._kind = kind

    def names(self) -> tuple[str, ...]:
        """Names of all entries, sorted."""
        return tuple(sorted(module.name for module in pkgutil.iter_modules(self._path) if not module.ispkg))

    def module(self, name: str) -> Any:
        """The module called `name`.

        Raises:
            ValueError: where there is no such file; it proposes the nearest name.
        """
        known = self.names()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"no {self._kind} named {name!r}; {hint}")
        return importlib.import_module(f"{self._package}.{name}")

    def find(self, name: str) -> Callable[..., Any]:
        """The function called `name` of the module called `name`; raises as `module`."""
        return getattr(self.module(name), name)

    def describe(self, name: str) -> str:
        """First line of what the entry says of itself."""
        return (inspect.getdoc(self.find(name)) or "").partition("\n")[0]

    def defaults(self, name: str) -> dict[str, Any]:
        """Settings of the entry that have a default, with that default."""
        parameters = inspect.signature(self.find(name)).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
