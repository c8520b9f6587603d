"""Data sets by name: `load("digits", seed=0)`. A file here is a data set; nothing else needs an edit."""

from ..core import Catalogue, Split, Splits

__all__ = ["Split", "Splits", "describe", "load", "names"]

_CATALOGUE = Catalogue(__name__, __path__, "data set")


def names() -> tuple[str, ...]:
    """Names of all data sets, sorted."""
    return _CATALOGUE.names()


def describe(name: str) -> str:
    """One line about a data set; raises `ValueError` for an unknown name."""
    return _CATALOGUE.describe(name)


def load(name: str, *, seed: int = 0) -> Splits:
    """The data set called `name`, split by `seed`.

    Args:
        name: one of `names()`.
        seed: decides who is a member; everything else about the data set is fixed.

    Returns:
        Its three disjoint pools. The same name and seed give the same pools everywhere.

    Raises:
        ValueError: if there is no such data set, or its content is not what it must be.
    """
    return _CATALOGUE.find(name)(seed=seed)
