"""Packages with one method per file: `leakbench.defenses.dp_sgd` is the function `dp_sgd` of `dp_sgd.py`."""

import pkgutil
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _MethodPackage(ModuleType):
    """Package whose attributes are the functions of its files, each named as its file."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets an imported module as an attribute of its package.
        if isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}":
            value = vars(value).get(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in _files(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        import_module(f"{self.__name__}.{name}")
        return vars(self)[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_files(self)})


def _files(package: ModuleType) -> set[str]:
    return {file.name for file in pkgutil.iter_modules(package.__path__)}


def offer_methods(package: str) -> None:
    """Makes the methods of a package its attributes, each imported on first use.

    Args:
        package: its `__name__`.
    """
    sys.modules[package].__class__ = _MethodPackage
