"""Data sets by name: `load("digits", seed=0)`. A file here is a data set; nothing else needs an edit.

One's own data are named by kind and path: `folder:PATH`, `parquet:PATH`, `npz:PATH`, `features:PATH`; a file in `own`
is a kind. Images of several sizes are brought to one by `folder:PATH?size=32`.
"""

from collections.abc import Callable
from functools import partial

from ..core import DEFAULT_SIZES, Catalogue, Sizes, Split, Splits
from ..core.data.data_paths import Address, existing, parse
from . import own

__all__ = ["Sizes", "Split", "Splits", "about", "check", "describe", "factory", "load", "names", "patterns"]

_CATALOGUE = Catalogue(__name__, __path__, "data set")
_OWN = Catalogue(own.__name__, own.__path__, "kind of data set")
_NOT_OPTIONS = {"seed", "sizes"}


def names() -> tuple[str, ...]:
    """Names of all data sets, sorted; one's own are named by `patterns`."""
    return _CATALOGUE.names()


def patterns() -> dict[str, str]:
    """How data of one's own are named, with one line about each kind."""
    return {f"{kind}:PATH": _OWN.describe(kind) for kind in _OWN.names()}


def describe(name: str) -> str:
    """One line about a data set; raises `ValueError` for an unknown name."""
    address = parse(name)
    return (_CATALOGUE if address.path is None else _OWN).describe(address.kind)


def about(name: str) -> str:
    """What its file says of one of `names()`; raises `ValueError` for another name."""
    return _CATALOGUE.about(name)


def factory(name: str) -> Callable[..., Splits]:
    """The function that loads one of `names()`, whose keywords are its options; raises as `about`."""
    return _CATALOGUE.find(name)


def check(name: str, *, there: bool = True) -> None:
    """Refuses a name that cannot be loaded, without loading anything.

    Args:
        name: as for `load`.
        there: whether something must be at the path of one's own data.

    Raises:
        ValueError: if there is no such data set, or no such option of it, or nothing at its path.
    """
    _find(name)
    address = parse(name)
    if there and address.path is not None:
        existing(address.path, what=address.kind)


def load(name: str, *, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """The data set called `name`, split by `seed`.

    Args:
        name: one of `names()`, or `folder:PATH`, `parquet:PATH`, `npz:PATH`, `features:PATH`, with options
            after a question mark.
        seed: decides who is a member; everything else about the data set is fixed.
        sizes: how many examples each pool is to have.

    Returns:
        Its disjoint pools. The same content, seed and sizes give the same pools everywhere.

    Raises:
        ValueError: if there is no such data set, it is not to be had, its content is not what it must be, or it has
            fewer examples than asked for.
    """
    return _find(name)(seed=seed, sizes=sizes)


def _find(name: str) -> Callable[..., Splits]:
    address = parse(name)
    if address.path is None:
        if address.kind in _OWN.names():
            raise ValueError(f"data set {name!r} needs a path: write {address.kind}:PATH")
        found, catalogue = _CATALOGUE.find(address.kind), _CATALOGUE
    else:
        found, catalogue = partial(_OWN.find(address.kind), address.path, address=name), _OWN
        if not address.path:
            raise ValueError(f"{address.kind} needs a path: write {address.kind}:PATH")
    _check_options(name, address, [o for o in catalogue.defaults(address.kind) if o not in _NOT_OPTIONS])
    return partial(found, **address.options)


def _check_options(name: str, address: Address, known: list[str]) -> None:
    for option in address.options:
        if option not in known:
            raise ValueError(f"data set {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
