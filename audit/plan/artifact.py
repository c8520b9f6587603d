"""Artifacts: intermediate results that cells wait for, named by a hash of the request that decides them.

A point of a hyperparameter search is one, some models of a shadow bank are another. Cells of several jobs may wait for
the same one: by its name it is known to be the same, and computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from .request import MethodAsked, digest_of


@dataclass(frozen=True)
class Artifact:
    """One result that is to be computed.

    Attributes:
        request: everything that decides it, as plain JSON values.
        words: what it is, for progress and errors.
        make: computes it on a device, as plain JSON values; picklable, because workers are sent it.
        methods: defenses and attacks whose code decides it, too; a kept result of other code is refused.
    """

    request: dict[str, Any]
    words: str
    make: Callable[[torch.device], dict[str, Any]]
    methods: tuple[MethodAsked, ...] = field(default=())

    @property
    def name(self) -> str:
        """Hash of the request, and name of its file."""
        return digest_of(self.request)


@runtime_checkable
class Artifacts(Protocol):
    """Results that cells waited for, by name; a mapping, of which each is read when it is asked for."""

    def __getitem__(self, name: str, /) -> dict[str, Any]: ...
