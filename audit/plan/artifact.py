"""Artifacts: intermediate results that cells depend on, named by a hash of the request that determines them.

Examples are a point of a hyperparameter search, and eight models of a shadow bank. Cells of several jobs may depend on
the same artifact, which its name identifies; it is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from .request import RequestedMethod, TrainingRequest, digest_of


@dataclass(frozen=True)
class Artifact:
    """A result to compute.

    Attributes:
        request: full specification, as plain JSON values.
        words: description, for progress and errors.
        make: function of the device that computes it, as plain JSON values; picklable, because it is sent to workers.
        methods: defenses and attacks whose code also determines it; a stored result of other code is refused.
        training: whose cost decides the device; None if nothing is trained.
        models: number of models that are trained at once.
    """

    request: dict[str, Any]
    words: str
    make: Callable[[torch.device], dict[str, Any]]
    methods: tuple[RequestedMethod, ...] = field(default=())
    training: TrainingRequest | None = None
    models: int = 1

    @property
    def name(self) -> str:
        """Hash of the request, and name of its file."""
        return digest_of(self.request)


@runtime_checkable
class Artifacts(Protocol):
    """Results that cells depend on, by name; a mapping whose entries are read on access."""

    def __getitem__(self, name: str, /) -> dict[str, Any]: ...
