"""Dictionaries of arrays between the two sides of a federated run, and the settings that both have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..privacy.sampling import Sampling
from ..training.settings import Execution, Recipe
from .client import Elsewhere
from .federated_settings import FederatedSettings
from .messages.message import Message, from_arrays, to_arrays
from .method import Federated
from .schedule import Federation
from .secure_sum import added

Arrays = Mapping[str, np.ndarray]
"""Named arrays of a message, or of a global model."""
MODEL, BROADCAST = "parameters", "broadcast/"
"""Names of the global model, and of what is sent beside it."""


def summed(replies: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Returns the sum of messages as arrays: for tests and simulations, in place of secure aggregation.

    Args:
        replies: arrays of `local_round`, at least one.
    """
    return to_arrays(added([from_arrays(arrays) for arrays in replies]))


def elsewhere(sizes: Sequence[int]) -> list[Any]:
    """Returns shards of which other processes have the data; None for clients without data."""
    return [Elsewhere(size) if size else None for size in sizes]


def settings_of(
    method: Federated,
    federation: Federation,
    sampling: Sampling,
    recipe: Recipe | None,
    execution: Execution | None,
    *,
    lr: float,
    seed: int,
    key: int | None,
    exact: bool,
) -> FederatedSettings:
    """Returns the settings of a side; schedule and checkpoint are its own."""
    return FederatedSettings(
        method=method,
        federation=federation,
        sampling=sampling,
        lr=lr,
        seed=seed,
        key=key,
        exact=exact,
        schedule=None,
        recipe=recipe or Recipe(),
        execution=execution or Execution(),
        keep_messages=False,
        checkpoint=None,
        checkpoint_every=None,
        progress=None,
    )


def tensor_like(array: np.ndarray, like: Tensor) -> Tensor:
    """Returns an array as a tensor of another's dtype and device."""
    return torch.from_numpy(np.array(array)).to(like)


def parameters_of(arrays: Arrays, like: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
    """Returns the global model that a server has sent, which may be any finite one.

    Raises:
        ValueError: it has another size, or numbers that are not finite in the model's type; no example was read.
    """
    parameters = arrays.get(MODEL)
    if parameters is None or parameters.shape != like.shape:
        size = "none" if parameters is None else list(parameters.shape)
        raise ValueError(f"arrays must have the {len(like)} numbers of the model under '{MODEL}', got {size}")
    sent = tensor_like(parameters, like)
    refuse_non_finite(sent)
    return sent


def refuse_non_finite(parameters: Float[Tensor, " dim"]) -> None:
    """Refuses a global model with NaN or infinity.

    Raises:
        ValueError: it has some; the message counts them.
    """
    if broken := int((~parameters.isfinite()).sum()):
        raise ValueError(
            f"a global model must be finite, got NaN or infinity in {broken} of its {len(parameters)} numbers; a "
            "client takes no step from it"
        )


def on_device_of(message: Message, like: Tensor) -> Message:
    """Returns a message with its tensors on a device."""
    tensors = {name: part.to(like.device) for name, part in message.tensors.items()}
    return replace(
        message, tensors=tensors, extras={name: part.to(like.device) for name, part in message.extras.items()}
    )
