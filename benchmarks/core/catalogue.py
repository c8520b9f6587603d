"""Finds data sets and architectures by name: in the file of that name, or in the table of a family's file.

The module `digits` holds the function `digits`. The module `resnet` holds a table `VARIANTS`, name -> `Variant`: the
networks of a family differ in a few numbers, and another one is another row.
"""

import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .nets.shapes import Natural


@dataclass(frozen=True)
class Variant:
    """One architecture of a family, a row of `VARIANTS`.

    Attributes:
        function: builds the family; `model`, which it is called with besides, is the row's name, for errors.
        natural: the data that this one is quoted on.
        title: what it is and who uses it, one line.
        summary: its layers and its size, one line; the first line of the function's docstring where empty.
        fixed: the arguments that make it this one; what else the function takes are settings.
    """

    function: Callable[..., Any]
    natural: Natural
    title: str
    summary: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def factory(self, name: str) -> Callable[..., Any]:
        """The function with the row's arguments in place, and a signature and docstring that say so."""
        fixed = {**self.fixed, "model": name}
        signature, doc = inspect.signature(self.function), inspect.getdoc(self.function) or ""

        @functools.wraps(self.function)
        def build(**arguments: Any) -> Any:
            return self.function(**arguments, **fixed)

        # The signature is read off what a function wraps, where it says that it wraps one.
        del build.__wrapped__
        # What is fixed is no setting: `defaults` reads settings and their values off this signature.
        own = [p for p in signature.parameters.values() if p.name not in fixed]
        vars(build)["__signature__"] = signature.replace(parameters=own)
        # Lists show the first line, and a family's own is about none of its variants.
        first, _, rest = doc.partition("\n")
        build.__doc__ = f"{self.summary or first}\n{rest}"
        return build


class Catalogue:
    """The modules of one folder, each of which holds a function of its own name, or a table `VARIANTS`.

    Args:
        package: full name of the package whose modules hold the entries.
        path: the package's `__path__`.
        kind: what an entry is called in errors, in the singular ("data set").
        families: whether there are tables. Names are then known once every module is imported; without, nothing is
            imported before it is asked for, and a data set that needs an extra costs others nothing.
    """

    def __init__(self, package: str, path: Iterable[str], kind: str, *, families: bool = False) -> None:
        self._package = package
        self._path = list(path)
        self._kind = kind
        self._families = families

    def names(self) -> tuple[str, ...]:
        """Names of all entries, sorted."""
        return tuple(sorted(self._modules()))

    def module(self, name: str) -> Any:
        """The module that holds the entry called `name`.

        Raises:
            ValueError: where there is no such entry; it proposes the nearest name.
        """
        modules = self._modules()
        if name not in modules:
            near = difflib.get_close_matches(name, sorted(modules), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(modules))}"
            raise ValueError(f"no {self._kind} named {name!r}; {hint}")
        return self._imported(modules[name])

    def find(self, name: str) -> Callable[..., Any]:
        """The function that makes the entry called `name`; raises as `module`."""
        module = self.module(name)
        variants = _variants(module)
        return variants[name].factory(name) if variants else getattr(module, name)

    def natural(self, name: str) -> Natural:
        """The data that an architecture is quoted on; raises as `module`."""
        module = self.module(name)
        variants = _variants(module)
        return variants[name].natural if variants else module.NATURAL

    def describe(self, name: str) -> str:
        """First line of what the entry says of itself."""
        return (inspect.getdoc(self.find(name)) or "").partition("\n")[0]

    def about(self, name: str) -> str:
        """What its file says, a variant's title in the place of the family's, and the line of `describe`."""
        module = self.module(name)
        variants = _variants(module)
        title, _, rest = (inspect.getdoc(module) or "").partition("\n")
        title = variants[name].title if variants else title
        paragraphs = (title, rest.strip(), self.describe(name))
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)

    def defaults(self, name: str) -> dict[str, Any]:
        """Settings of the entry that have a default, with that default."""
        parameters = inspect.signature(self.find(name)).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    def _modules(self) -> dict[str, str]:
        """Name of each entry -> name of the module that holds it."""
        # Subpackages are other catalogues, such as `data/own`.
        files = sorted(module.name for module in pkgutil.iter_modules(self._path) if not module.ispkg)
        if not self._families:
            return {file: file for file in files}
        # A file without a table is an entry by itself.
        return {name: file for file in files for name in _variants(self._imported(file)) or (file,)}

    def _imported(self, file: str) -> Any:
        return importlib.import_module(f"{self._package}.{file}")


def _variants(module: Any) -> Mapping[str, Variant]:
    """The table of a family; empty for a file that holds one function."""
    return getattr(module, "VARIANTS", {})
