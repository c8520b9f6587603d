"""Catalogue of data sets and architectures by name.

An entry is a module with a function of its own name (`digits.digits`), or a row of the table `VARIANTS`, name ->
`Variant`, in the module of a family (`resnet`): its networks differ in a few numbers, so a new network is a row.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Natural:
    """Reference data of an architecture, at which its parameter count is stated: NATURAL in its file, or in its row.

    Args:
        input_shape: of a single input.
        classes: number of logits; 1 for a network with a binary logit, which `build` then accepts.
        settings: of the architecture, if they differ from its defaults.
    """

    input_shape: tuple[int, ...]
    classes: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """Architecture of a family, a row of `VARIANTS`.

    Attributes:
        function: builds the family; also called with `model`, the row's name, for errors.
        natural: reference data of this variant.
        title: the variant and the papers that use it, in a line.
        summary: its layers and its size, in a line; the first line of the function's docstring where empty.
        fixed: arguments that define the variant; the function's remaining arguments are settings.
    """

    function: Callable[..., Any]
    natural: Natural
    title: str
    summary: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def factory(self, name: str) -> Callable[..., Any]:
        """Returns the function with the row's arguments bound, and a matching signature and docstring."""
        fixed = {**self.fixed, "model": name}
        signature, doc = inspect.signature(self.function), inspect.getdoc(self.function) or ""

        @functools.wraps(self.function)
        def build(**arguments: Any) -> Any:
            return self.function(**arguments, **fixed)

        # `inspect.signature` would follow `__wrapped__` to the unbound function.
        del build.__wrapped__
        # Bound arguments are no settings: `defaults` reads settings and their values off this signature.
        own = [p for p in signature.parameters.values() if p.name not in fixed]
        vars(build)["__signature__"] = signature.replace(parameters=own)
        # Lists show the first line of the docstring, and the family's first line describes no single variant.
        first, _, body = doc.partition("\n")
        build.__doc__ = f"{self.summary or first}\n{body}"
        return build


class Catalogue:
    """Modules of a folder, each of which holds a function of its own name, or a table `VARIANTS`.

    Args:
        package: full name of the package whose modules hold the entries.
        path: the package's `__path__`.
        kind: noun for an entry in errors, in the singular ("data set").
        families: whether modules hold tables.

    Names and descriptions are read from the sources; a module is imported only when it is used, so that a list needs
    neither PyTorch nor the extras of its entries.
    """

    def __init__(self, package: str, path: Iterable[str], kind: str, *, families: bool = False) -> None:
        self._package = package
        self._path = list(path)
        self._kind = kind
        self._families = families

    def names(self) -> tuple[str, ...]:
        """Returns the names of all entries, sorted."""
        return tuple(sorted(self._modules()))

    def module(self, name: str) -> Any:
        """Returns the module that holds the entry called `name`.

        Raises:
            ValueError: there is no such entry; the message suggests the nearest name.
        """
        return importlib.import_module(f"{self._package}.{self._file(name)}")

    def find(self, name: str) -> Callable[..., Any]:
        """Returns the function that makes the entry called `name`; raises as `module`."""
        module = self.module(name)
        variants = _variants(module)
        return variants[name].factory(name) if variants else getattr(module, name)

    def natural(self, name: str) -> Natural:
        """Returns the reference data of an architecture; raises as `module`."""
        module = self.module(name)
        variants = _variants(module)
        return variants[name].natural if variants else module.NATURAL

    def describe(self, name: str) -> str:
        """Returns a line about the entry: its row's summary, or the first line of its function's docstring.

        Raises:
            ValueError: as `module`.
        """
        source = self._source(self._file(name))
        row = source.rows.get(name)
        if row is None:
            return source.summaries.get(name, "")
        written = {keyword.arg: keyword.value for keyword in row.keywords}
        if isinstance(summary := written.get("summary"), ast.Constant):
            return str(summary.value)
        return source.summaries.get(ast.unparse(row.args[0]), "")

    def about(self, name: str) -> str:
        """Returns the docstring of the entry's file, under a variant's own title, and its line of `describe`."""
        module = self.module(name)
        variants = _variants(module)
        title, _, body = (inspect.getdoc(module) or "").partition("\n")
        title = variants[name].title if variants else title
        paragraphs = (title, body.strip(), self.describe(name))
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)

    def defaults(self, name: str) -> dict[str, Any]:
        """Returns the settings of the entry that have a default, with their defaults."""
        parameters = inspect.signature(self.find(name)).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    def _file(self, name: str) -> str:
        """Name of the module that holds an entry; raises as `module`."""
        modules = self._modules()
        if name not in modules:
            near = difflib.get_close_matches(name, sorted(modules), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(modules))}"
            raise ValueError(f"no {self._kind} named {name!r}; {hint}")
        return modules[name]

    def _modules(self) -> dict[str, str]:
        """Name of each entry -> name of its module."""
        # Subpackages are other catalogues, such as `data/own`.
        files = sorted(module.name for module in pkgutil.iter_modules(self._path) if not module.ispkg)
        if not self._families:
            return {file: file for file in files}
        # A file without a table is itself an entry.
        return {name: file for file in files for name in self._source(file).rows or (file,)}

    def _source(self, file: str) -> _Source:
        path = next(path for folder in self._path if (path := Path(folder, f"{file}.py")).is_file())
        return _read(path, path.stat().st_mtime_ns)


@dataclass(frozen=True)
class _Source:
    """Parsed module: the rows of its table, by name, and the first docstring line of each of its functions."""

    rows: Mapping[str, ast.Call]
    summaries: Mapping[str, str]


@functools.lru_cache(maxsize=128)
def _read(path: Path, _modified: int) -> _Source:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [statement for statement in body if isinstance(statement, ast.FunctionDef)]
    tables = [
        statement.value
        for statement in body
        if isinstance(statement, ast.Assign)
        and [ast.unparse(target) for target in statement.targets] == ["VARIANTS"]
        and isinstance(statement.value, ast.Dict)
    ]
    return _Source(
        rows={
            key.value: row
            for table in tables
            for key, row in zip(table.keys, table.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(row, ast.Call)
        },
        summaries={function.name: (ast.get_docstring(function) or "").partition("\n")[0] for function in functions},
    )


def _variants(module: Any) -> Mapping[str, Variant]:
    """Table of a family; empty for a file with a single function."""
    return getattr(module, "VARIANTS", {})
