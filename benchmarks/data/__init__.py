"""Data sets by name: `load("digits", seed=0)`. Each file here is a data set; adding a file needs no other edit.

Users' own data are named by kind and path: `folder:PATH`, `parquet:PATH`, `npz:PATH`, `features:PATH`; each file in
`own` is a kind. Options follow a question mark: `folder:PATH?size=32` resizes images of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from leakbench.lazy_names import lazy_names

from ..core.catalogue import Catalogue
from ..core.data.data_paths import Address, existing, parse
from ..core.data.sizes import DEFAULT_SIZES, Sizes
from . import own

if TYPE_CHECKING:
    from ..core.data.splits import Split, Splits
    from ..core.data.stored import StoredExamples

__all__ = ["Sizes", "Split", "Splits", "about", "check", "describe", "factory", "load", "names", "patterns"]

# Names and descriptions are listed without PyTorch.
__getattr__, __dir__ = lazy_names(__name__)

_CATALOGUE = Catalogue(__name__, __path__, "data set")
_OWN = Catalogue(own.__name__, own.__path__, "kind of data set")
_NOT_OPTIONS = {"seed", "sizes"}


def names() -> tuple[str, ...]:
    """Returns the names of all data sets, sorted; users' own data are named by `patterns`."""
    return _CATALOGUE.names()


def patterns() -> dict[str, str]:
    """Returns the address of users' own data for each kind, with a line about it."""
    return {f"{kind}:PATH": _OWN.describe(kind) for kind in _OWN.names()}


def describe(name: str) -> str:
    """Returns a line about a data set; raises `ValueError` for an unknown name."""
    address = parse(name)
    return (_CATALOGUE if address.path is None else _OWN).describe(address.kind)


def about(name: str) -> str:
    """Returns the docstring of the file of a data set in `names()`; raises `ValueError` for another name."""
    return _CATALOGUE.about(name)


def factory(name: str) -> Callable[..., Splits]:
    """Returns the function that loads a data set in `names()`, with its options as keywords; raises as `about`."""
    return _CATALOGUE.find(name)


def examples_reader(start: bytes) -> Callable[..., StoredExamples] | None:
    """Returns the audits' reader of files that begin with these bytes; None for an unknown format."""
    modules = (_OWN.module(kind) for kind in _OWN.names())
    return next((module.read_examples for module in modules if start in getattr(module, "STARTS", ())), None)


def check(name: str, *, exists: bool = True) -> None:
    """Checks that a name can be loaded, without loading anything.

    Args:
        name: as for `load`.
        exists: whether something must exist at the path of a user's own data.

    Raises:
        ValueError: no such data set or option, or nothing at its path.
    """
    _find(name)
    address = parse(name)
    if exists and address.path is not None:
        existing(address.path, noun=address.kind)


def load(name: str, *, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """Loads the data set called `name`, split by `seed`.

    Args:
        name: in `names()`, or `folder:PATH`, `parquet:PATH`, `npz:PATH`, `features:PATH`, with options after a question
            mark.
        seed: decides which examples are members; the rest of the data set is fixed.
        sizes: requested number of examples in each pool.

    Returns:
        Its disjoint pools. The same content, seed and sizes give the same pools everywhere.

    Raises:
        ValueError: there is no such data set, it cannot be obtained, its content is not the expected content, or it has
        fewer examples than requested.
    """
    return _find(name)(seed=seed, sizes=sizes)


def _find(name: str) -> Callable[..., Splits]:
    address = parse(name)
    if address.path is None:
        if address.kind in _OWN.names():
            raise ValueError(f"data set {name!r} needs a path: write {address.kind}:PATH")
        loader, catalogue = _CATALOGUE.find(address.kind), _CATALOGUE
    else:
        loader, catalogue = partial(_OWN.find(address.kind), address.path, address=name), _OWN
        if not address.path:
            raise ValueError(f"{address.kind} needs a path: write {address.kind}:PATH")
    _check_options(name, address, [o for o in catalogue.defaults(address.kind) if o not in _NOT_OPTIONS])
    return partial(loader, **address.options)


def _check_options(name: str, address: Address, known: list[str]) -> None:
    for option in address.options:
        if option not in known:
            raise ValueError(f"data set {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
