"""Updates of clients whose batch norms were in training mode: a single gradient, in which the examples are mixed.

A batch norm in training mode uses mean and variance of the batch itself, so the gradient is not a sum over examples,
and an attack in evaluation mode would search for inputs of another network. Running statistics that moved with a step
reveal the mode, and the statistics of the batch: new = (1 - momentum) old + momentum batch. They are matched together
with the gradient, which alone leaves the brightness and contrast of images open behind a batch norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leakbench.attacks.core import NotApplicable, Observation, ReleasedPart, Structure
from leakbench.defenses.core import Layout, Loss

from .scale import LogitLayer

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def statistics_moved(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Lists batch norms whose running statistics in a file differ from the model's."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _NORMS)
        and any(
            f"{name}.{of}" in tensors and not torch.equal(tensors[f"{name}.{of}"].to(value), value)
            for of, value in module.named_buffers()
        )
    ]


def of_batches(model: nn.Module) -> nn.Module:
    """Returns a copy whose batch norms use the statistics of each batch, as in training mode, and store none.

    Raises:
        ValueError: it has no batch norm.
    """
    own = copy.deepcopy(model)
    norms = [norm for norm in own.modules() if isinstance(norm, _NORMS)]
    if not norms:
        raise ValueError("--training-mode must be of a model with batch norms, and it has none; leave it out")
    for norm in norms:
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return own


def batch_statistics(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Computes mean and variance of the batch at each batch norm whose running statistics moved, [2 channels] by name.

    Args:
        model: before the step.
        tensors: after it, with running statistics.
    """
    statistics = {}
    for name in statistics_moved(model, tensors):
        norm = model.get_submodule(name)
        keys = [f"{name}.running_mean", f"{name}.running_var"]
        # Without a momentum, running statistics are averages over all batches so far, which other owners may have fed.
        if isinstance(norm, _NORMS) and norm.momentum and norm.running_mean is not None and set(keys) <= set(tensors):
            old = torch.cat([value for value in (norm.running_mean, norm.running_var) if value is not None]).double()
            new = torch.cat([tensors[key] for key in keys]).to(old)
            statistics[name] = ((new - (1 - norm.momentum) * old) / norm.momentum).float()
    return statistics


def observed_in_training(
    target: Observation,
    model: nn.Module,
    layout: Layout,
    loss: Loss,
    batch_size: int,
    statistics: Mapping[str, Tensor],
) -> Observation:
    """Returns a target for attacks on inputs, whose functions use batch statistics.

    Args:
        target: in evaluation mode.
        model: from `of_batches`.
        layout: of the released gradient.
        loss: per-example.
        batch_size: examples in the batch.
        statistics: of the batch, from `batch_statistics`; weighted to equal the norm of the gradient.
    """
    shown = torch.cat(
        [target.released.new_zeros(0), *(statistic.to(target.released) for statistic in statistics.values())]
    )
    weight = target.released.norm() / shown.norm().clamp(min=torch.finfo(shown.dtype).tiny)
    released = torch.cat([target.released, weight * shown])

    def simulate(inputs: Tensor, labels: Tensor) -> Tensor:
        tracked, entered = torch.is_grad_enabled(), dict[str, Tensor]()

        def entering(name: str) -> Callable[..., None]:
            return lambda _, arguments: entered.__setitem__(name, arguments[0])

        handles = [model.get_submodule(name).register_forward_pre_hook(entering(name)) for name in statistics]
        try:
            with torch.enable_grad():
                point = {n: p.detach().clone() for n, p in model.named_parameters()}
                trained = [point[name].requires_grad_() for name in layout.names]
                total = loss(functional_call(model, point, (inputs,)), labels).sum() / batch_size
                gradients = torch.autograd.grad(total, trained, create_graph=tracked)
        finally:
            for handle in handles:
                handle.remove()
        by_channel = [entered[name].movedim(1, 0).flatten(1) for name in statistics]
        own = [weight * torch.cat([activations.mean(dim=1), activations.var(dim=1)]) for activations in by_channel]
        simulated = torch.cat([*(gradient.reshape(-1) for gradient in gradients), *own])
        return simulated if tracked else simulated.detach()

    def contributions(inputs: Tensor, labels: Tensor) -> Tensor:
        raise NotApplicable(
            "batch norms in training mode mix the examples of a batch: what one of them adds depends on the others"
        )

    equations = target.structure

    def structure() -> Structure:
        words = "the gradient of a batch whose batch norms were in training mode"
        part = ReleasedPart(start=0, stop=len(released), kind="other", of_gradient=False, words=words)
        assert equations is not None  # noqa: S101 -- see below
        return replace(equations(), parts=(part,))

    return replace(
        target,
        released=released,
        noise_std=None if target.noise_std is None else torch.zeros_like(released),
        simulate=simulate,
        contributions=contributions,
        logits=lambda inputs: _by_batch(model, inputs, batch_size),
        residual=lambda predicted: released - predicted,
        simulate_many=None,
        compare_many=None,
        structure=None if equations is None else structure,
    )


def labels_in_training(
    target: Observation, model: nn.Module, layout: Layout, layer: LogitLayer | None, batch_size: int
) -> Observation:
    """Returns a target for label attacks: the last layer's gradient is a sum over examples, whatever precedes it.

    Args:
        target: in evaluation mode.
        model: from `of_batches`.
        layout: of the released gradient.
        layer: that gives the logits; None if unknown.
        batch_size: examples in the batch.

    Raises:
        NotApplicable: there is no such layer.
    """
    if layer is None:
        raise NotApplicable("in training mode the model must end in a linear layer for labels to show")
    spans = dict(zip(layout.names, layout.slices, strict=True))
    last = model.get_submodule(layer.weight.rpartition(".")[0])

    def contributions(inputs: Tensor, labels: Tensor) -> Tensor:
        entered: list[Tensor] = []
        handle = last.register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0].detach()))
        try:
            logits = _by_batch(model, inputs, batch_size)
        finally:
            handle.remove()
        targets = nn.functional.one_hot(labels, logits.shape[1]).to(logits)
        errors, features = logits.softmax(dim=1) - targets, torch.cat(entered)[: len(inputs)]
        rows = target.released.new_zeros(len(inputs), len(target.released))
        for name, values in ((layer.weight, torch.einsum("nc,nf->ncf", errors, features)), (layer.bias, errors)):
            if name in spans:
                rows[:, slice(*spans[name])] = values.flatten(1)
        return rows

    return replace(target, logits=lambda inputs: _by_batch(model, inputs, batch_size), contributions=contributions)


def _by_batch(model: nn.Module, inputs: Tensor, batch_size: int) -> Tensor:
    """Computes logits in batches of the attacked batch's size; the last batch is padded from the first inputs."""
    missing = -len(inputs) % batch_size
    full = torch.cat([inputs, inputs[torch.arange(missing, device=inputs.device) % len(inputs)]])
    with torch.no_grad():
        return torch.cat([model(batch) for batch in full.split(batch_size)])[: len(inputs)]
