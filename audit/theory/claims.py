"""Table of all claims, file by file; a new claim is a function decorated by `claim` in the file of its subject."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import communication, momentum, norms, reconstruction, sparsification, symmetry
from .claim import Examined, Setup, TheoryClaim

_FILES = (sparsification, reconstruction, momentum, norms, communication, symmetry)

CLAIMS: dict[str, TheoryClaim] = {
    found.name: found for file in _FILES for found in vars(file).values() if isinstance(found, TheoryClaim)
}
"""Name -> claim."""


def chosen(names: Sequence[str]) -> list[TheoryClaim]:
    """Returns the claims of these names in the order of the table, each once; all claims if no names are given.

    Raises:
        ValueError: an unknown name; the message lists all names.
    """
    for name in names:
        if name not in CLAIMS:
            raise ValueError(f"no claim named {name!r}; there are {', '.join(CLAIMS)}")
    return [claim for name, claim in CLAIMS.items() if not names or name in names]


def examined(claims: Sequence[TheoryClaim], setup: Setup) -> Iterator[Examined]:
    """Measures the claims in turn."""
    for claim in claims:
        yield claim.examine(setup)
