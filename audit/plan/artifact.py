"""Artifacts: results that cells wait for, named by a hash of the request that decides them.

A point of a tuning is one; a shadow model will be another. Several cells, and several jobs, may wait for the same one:
it is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .request import MethodAsked, digest_of


@dataclass(frozen=True)
class Artifact:
    """One result to be.

    Attributes:
        request: everything that decides it, as plain JSON values.
        words: what it is, for progress and errors.
        make: computes it on a device, as plain JSON values; a function that processes can be sent.
        methods: whose code decides it, too.
    """

    request: dict[str, Any]
    words: str
    make: Callable[[torch.device], dict[str, Any]]
    methods: tuple[MethodAsked, ...] = field(default=())

    @property
    def name(self) -> str:
        """Hash of the request, and name of its file."""
        return digest_of(self.request)
