"""Selection of an update's tensors that are a model's parameters: without a prefix, and without unmoved parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn


def parameters_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Returns an update's tensors under the model's names, and sentences on the processing.

    Raises:
        ValueError: none is the model's, or a tensor has another shape or type.
    """
    own = model.state_dict()
    # The most frequent prefix of the model's names is taken as the prefix of all of them.
    prefixes = {
        name.removesuffix(known) for name in tensors for known in own if name == known or name.endswith("." + known)
    }
    hits = {prefix: sum(prefix + name in tensors for name in own) for prefix in sorted(prefixes)}
    if not hits:
        raise ValueError(
            f"the update must have a parameter of the model, as {next(iter(own), '')!r}, and has "
            f"{', '.join(map(repr, list(tensors)[:3])) or 'no tensors'}"
        )
    prefix = max(hits, key=lambda prefix: (hits[prefix], -len(prefix)))
    parameters = {name: tensors[prefix + name] for name in own if prefix + name in tensors}
    for name, tensor in parameters.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{name!r} of the update must have the shape of the model's, {list(own[name].shape)}, got "
                f"{list(tensor.shape)}"
            )
        if own[name].is_floating_point() and not tensor.is_floating_point():
            raise ValueError(f"{name!r} of the update must have floating-point entries, got {tensor.dtype}")
    notes = [f"The prefix {prefix!r} was taken off the names of the update's tensors."] if prefix else []
    if others := [name for name in tensors if name.removeprefix(prefix) not in parameters]:
        notes.append(f"Tensors beside the model's were left out: {', '.join(others[:8])}.")
    return parameters, tuple(notes)


def moved_parameters(model: nn.Module, sent: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Returns the tensors without parameters unchanged by the step, and a sentence that names these.

    A frozen parameter is unchanged in new weights and 0 in a difference, whereas simulated updates would move it.
    """
    own = {name: parameter.detach() for name, parameter in model.named_parameters() if name in sent}
    still = [
        name for name, value in own.items() if not bool(sent[name].any()) or torch.equal(sent[name].to(value), value)
    ]
    if not still or len(still) == len(own):
        return sent, ()
    names = ", ".join(still[:8]) + (f" and {len(still) - 8} more" if len(still) > 8 else "")
    note = f"The step did not move {names}, which is taken to be frozen."
    return {name: tensor for name, tensor in sent.items() if name not in still}, (note,)


def freeze_others(model: nn.Module, sent: Collection[str]) -> tuple[str, ...]:
    """Freezes the parameters that an update lacks, so that no attack simulates them, and returns their names.

    Raises:
        ValueError: the update has no parameter of the model.
    """
    parameters = dict(model.named_parameters())
    if not any(name in sent for name in parameters):
        raise ValueError(
            f"the update must have a parameter of the model, as {next(iter(parameters), '')!r}, and has "
            f"{', '.join(map(repr, sorted(sent)[:3]))}"
        )
    # If all shared parameters are frozen in the model, they were trained nevertheless.
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    trained = trained if trained & set(sent) else set(parameters)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained and name in sent)
    return tuple(name for name in parameters if name in trained and name not in sent)
