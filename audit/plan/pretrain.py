"""Pretraining: the initial model of a private training, trained on public examples without privacy.

De et al., "Unlocking High-Accuracy Differentially Private Image Classification through Scale", 2022; Tramèr & Boneh,
"Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021: features come from public data,
and the private training moves all parameters (fine-tuning) or only the last linear layer (linear probing). Yu et al.,
"Differentially Private Fine-tuning of Language Models", ICLR 2022: that layer, and a low-rank product added to each
other weight, which stays fixed (LoRA).
Deviation: the public examples are those of the task, not of another data set.

Guarantee:
    The initial model is a function of public things: the public examples with their labels, the architecture, the
    suite's seed and settings. No private example is read, so it costs no privacy. Assumes, as stated in a claim on it,
    that the public examples reveal nothing about the private ones.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from leakbench.attacks.core import Examples
from leakbench.benchmarks.core import Split, Splits, content_digest
from leakbench.benchmarks.core.nets.lora import adapt
from leakbench.defenses.core import (
    Defense,
    Execution,
    Recipe,
    Whole,
    keyed,
    seed_from,
    seeded,
    shuffle,
    train,
    unbounded,
)

from ..suite.task import PretrainTable, Task
from .build import build_model, initialised
from .request import TrainingRequest

# Cached weights: two, for runs that alternate between two seeds or settings.
_MOST = 2

_kept: dict[str, dict[str, Tensor]] = {}  # in order of last use


def starting_model(request: TrainingRequest, splits: Splits, public: Examples | Split) -> nn.Module:
    """Returns the initial model of a request's training: fresh or pretrained; the same for every defense of a seed.

    Args:
        request: names the architecture, the seed and the settings.
        splits: determine the shape of inputs and the number of classes.
        public: labelled examples for pretraining; unread without pretraining.

    Raises:
        ValueError: there is no linear layer to train alone, or no layer of sufficient rank.
    """
    model, settings = build_model(request, splits), request.training.pretrain
    if settings is None:
        return model
    model.load_state_dict(_pretrained(model, request, settings, public))
    if settings.train != "all":
        freeze_untrained(model.to(public.inputs.device), settings, public.inputs[:2], request.seed)
    return model


def freeze_untrained(model: nn.Module, settings: PretrainTable, inputs: Tensor, seed: int) -> None:
    """Freezes the parameters of a pretrained model that the defense does not train, in place; adds `lora` products.

    Args:
        model: on the device of the inputs.
        settings: of pretraining, which name the trainable part.
        inputs: public examples [n, *shape] for a trace of the layers.
        seed: from the suite; the random draws are public, and the same for every defense.

    Raises:
        ValueError: the model has no such part.
    """
    if settings.train == "last":
        freeze_features(model, inputs)
    if settings.train == "lora" and settings.rank is not None:
        with _looking(inputs):
            head = last_linear(model, inputs, of="train = 'lora'")
        scale = 1.0 if settings.alpha is None else settings.alpha / settings.rank
        try:
            adapt(model, head, rank=settings.rank, scale=scale, generator=keyed(seed_from("low rank", seed)))
            with _looking(inputs):
                model(inputs)
        # AttributeError: from a network that reads its layers' weights directly, which are replaced.
        except (ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(f"train = 'lora' does not fit the model: {' '.join(str(error).split())}") from error


def check_pretraining(task: Task, splits: Splits) -> None:
    """Refuses impossible pretraining before any computation.

    Raises:
        ValueError: no public examples with labels, fewer than a batch, features that are standardised later, a last
            layer that is not linear, or a rank that a layer does not have.
    """
    settings, public = task.pretrain, splits.public
    if settings is None:
        return
    if not len(public):
        raise ValueError("pretraining must have public examples to read, got none; set task.public")
    lowest, highest = int(public.labels.min()), int(public.labels.max())
    if lowest < 0 or highest >= splits.classes:
        raise ValueError(f"public labels must be in [0, {splits.classes}), got {lowest if lowest < 0 else highest}")
    if settings.batch > len(public):
        raise ValueError(f"batch must be at most {len(public)}, the public examples, got {settings.batch}")
    if task.statistics is not None:
        raise ValueError(
            "features must be the same before and after the first step, and task.statistics standardises them in "
            "between; leave one of the two out"
        )
    if settings.train != "all":
        model = initialised(task.model.name, task.model.settings, splits, 0)
        freeze_untrained(model, settings, public.inputs[:2].cpu(), seed=0)


def freeze_features(model: nn.Module, inputs: Tensor) -> None:
    """Freezes all but a model's last linear layer, in place: no gradients, and evaluation mode, so without dropout.

    Args:
        model: on the device of the inputs.
        inputs: public examples [n, *shape] for a trace of the layers.

    Raises:
        ValueError: the last layer with parameters is no `nn.Linear`, is used more than once, or gets other features in
            a second pass over the same inputs.
    """
    with _looking(inputs):
        head = last_linear(model, inputs)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    model.eval()
    head.train()
    # Trap: the trainer may put a model in evaluation mode into training mode, with all its submodules; so the model
    # itself is marked as in training mode.
    model.training = True
    with _looking(inputs):
        first, again = (layer_input(head, model, inputs) for _ in range(2))
    if not torch.allclose(first, again, equal_nan=True):  # kernels of a GPU may round differently in two passes
        raise ValueError(
            "train = 'last' must have features that stay as they are, got others in a second pass over the same "
            "inputs; draw nothing in evaluation mode, or take train = 'all'"
        )


@contextmanager
def _looking(inputs: Tensor) -> Iterator[None]:
    """Disables gradients and restores generators: dropout may draw, and tracing must not affect the run."""
    with torch.no_grad(), torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        yield


def last_linear(model: nn.Module, inputs: Tensor, *, of: str = "train = 'last'") -> nn.Linear:
    """Returns the layer with parameters whose forward pass ends last.

    Args:
        model: on the device of the inputs.
        inputs: [n, *shape], for a trace of the layers.
        of: the requesting setting, for errors.

    Raises:
        ValueError: that layer is no `nn.Linear`, or is used more than once.
    """
    ran: list[nn.Module] = []
    # A layer's own parameters: a container has only those of its layers, and ends after all of them.
    layers = [part for part in model.modules() if any(True for _ in part.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(lambda part, *_: ran.append(part)) for layer in layers]
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    last = ran[-1] if ran else None
    if not isinstance(last, nn.Linear):
        layer_type = "none" if last is None else type(last).__name__
        raise ValueError(f"{of} must have an nn.Linear as the last layer with parameters, got {layer_type}")
    if ran.count(last) > 1:
        raise ValueError(f"{of} must have a last layer that is used once, got {ran.count(last)} times")
    return last


def layer_input(head: nn.Linear, model: nn.Module, inputs: Tensor) -> Tensor:
    """Returns a layer's input in a pass over inputs."""
    layer_inputs: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, arguments: layer_inputs.append(arguments[0]))
    try:
        model(inputs)
    finally:
        hook.remove()
    return layer_inputs[0]


def _pretrained(
    model: nn.Module, request: TrainingRequest, settings: PretrainTable, public: Examples | Split
) -> dict[str, Tensor]:
    """Returns the weights after pretraining, cached for the other trainings of a seed in this process.

    Args:
        model: fresh; not modified.
        request: names the architecture and the seed.
        settings: of pretraining.
        public: labelled examples.
    """
    key = _content(request, settings, public)
    where = f"{public.inputs.device} {key}"
    weights = _kept.pop(where, None)  # reinserted at the end below: a dictionary keeps the order of insertion
    if weights is None:
        weights = pretrained(copy.deepcopy(model), settings, public, seed_from("pretraining", key)).state_dict()
    _kept[where] = weights
    while len(_kept) > _MOST:
        del _kept[next(iter(_kept))]
    return weights


def _content(request: TrainingRequest, settings: PretrainTable, public: Examples | Split) -> str:
    """Returns everything that the pretrained weights depend on, as text.

    Includes a digest of the public examples, not that of the splits, which depends on the private pool, too. Excludes
    the choice of the parameters trained afterwards: fine-tuning and linear probing start from the same weights.
    """
    training = request.training
    content = {
        "public": content_digest(public.inputs, public.labels),
        "model": training.model.name,
        "model_settings": training.model.settings,
        "model_digest": training.model_digest,
        "seed": request.seed,
        "pretrain": settings.model_dump(exclude={"train", "rank", "alpha"}, exclude_none=True),
    }
    return json.dumps(content, sort_keys=True)


def pretrained(model: nn.Module, settings: PretrainTable, public: Examples | Split, seed: int) -> nn.Module:
    """Trains a model in place on public examples, by cross-entropy and without a bound or noise.

    Args:
        model: fresh; its submodules keep their mode.
        settings: epochs, learning rate, batch and optimizer.
        public: labelled examples.
        seed: for the order of the examples, and for dropout.
    """
    modes = {part: part.training for part in model.modules()}
    # The private trainer is used, without bound and noise, so that devices, models and dropout are treated alike.
    train(
        model,
        (public.inputs, public.labels),
        Defense(Whole(bound=unbounded()), noise_multiplier=0.0),
        sampling=shuffle(min(1.0, settings.batch / len(public))),
        epochs=settings.epochs,
        lr=settings.lr,
        noise=seeded(seed),
        seed=seed,
        sampler_key=seed,
        recipe=Recipe(optimizer=settings.optimizer),
        # Nothing is claimed about public examples.
        execution=Execution(device=public.inputs.device, unchecked=True),
    )
    for part, mode in modes.items():
        part.training = mode
    return model
