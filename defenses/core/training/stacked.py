"""Many models of one architecture trained at once, each on examples, coins and a sampler of its own: shadow models.

A training of a small network spends most of its time between operations, not in them: 16 or 64 networks that take each
operation together, with a leading model axis, take little longer than one. For chains of linear layers all that a step
needs is a few batched products. With signals s (derivatives of the losses by a layer's outputs) and inputs x, the
gradient of an example is s xᵀ, whose norm is |s| |x|, under a mask M (s∘s)ᵀ M (x∘x), and the clipped sum of a batch is
one product. Convolutions are slower stacked than one after another on a CPU, so they are not taken.

What is trained here has no ledger and proves nothing: it is for models whose answers an attacker compares with, trained
by the very plans that `train` executes. Equal to `train` up to rounding, but for what one generator draws for all
models at once: the noise, and the coins of Poisson sampling. Other samplers deal the very batches of `train`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as _of_all_modules

from ..gradients.full_precision import full_precision
from ..gradients.model_checks import Refused, refuse_model
from ..gradients.reference import Loss
from ..plan.bound import Bound
from ..plan.codec import Codec, Coordinates, Everything
from ..plan.defense import Context, Defense, NoisyPlan, State, Stateless, StepPlan
from ..plan.layout import Layout
from ..plan.post import identity
from ..plan.query import gradient
from ..privacy.keys import key_from, keyed
from .average import ParameterAverage
from .sampling import Sampling
from .settings import Recipe

_ELEMENTWISE = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Softplus, nn.Identity)


class NotTogether(ValueError):
    """These models, or this defense, cannot be trained as one stack; one after another they can."""


def train_together(
    models: Sequence[nn.Module],
    pool: tuple[Tensor, Tensor],
    chosen: Int[Tensor, "models n"],
    defense: Defense,
    *,
    sampling: Sampling,
    steps: int,
    lr: float,
    noise: torch.Generator,
    seeds: Sequence[int],
    sampler_keys: Sequence[int],
    recipe: Recipe | None = None,
) -> None:
    """Trains models in place, each as `train` would with its seed, up to the coins that they share.

    Args:
        models: of one architecture, chains of linear layers and elementwise functions; on the device of the pool.
        pool: (inputs [m, ...], labels [m]) that all of them draw from.
        chosen: which of the pool each model is trained on.
        defense: with its noise multiplier set.
        sampling: who takes part in a step.
        steps: length of the run.
        lr: learning rate, of the update averaged over the expected batch.
        noise: CPU generator of the noise of all models.
        seeds: key of each model's public randomness.
        sampler_keys: of each model's sampler; under Poisson sampling all of them key one generator.
        recipe: as of `train`.

    Raises:
        NotTogether: another architecture or recipe, or a plan that a stack does not execute, found when it is made.
        ValueError: numbers of models, seeds and keys that do not fit, or a method that reads public data.
    """
    given = {"models": len(models), "chosen": len(chosen), "seeds": len(seeds), "sampler_keys": len(sampler_keys)}
    if not models or len(set(given.values())) > 1:
        raise ValueError(f"there must be a seed, a key and examples for each model, got {given}")
    recipe = recipe or Recipe()
    if recipe.augmentation is not None or recipe.statistics is not None or callable(recipe.optimizer):
        raise NotTogether("models with views, standardised features or an optimizer of one's own are trained alone")
    stack = _Stack(models, recipe.loss)
    inputs, labels = pool
    members = chosen.to(inputs.device)
    count = members.shape[1]
    expected = sampling.expected_batch(count) if recipe.expected_batch is None else recipe.expected_batch
    runs = [
        _StackedRun.begin(
            defense,
            Context(
                step=0,
                steps=steps,
                steps_per_epoch=sampling.steps_per_epoch,
                layout=stack.layout,
                parameters=stack.parameters[number].detach().clone(),
                expected_batch=expected,
                noise_multiplier=defense.calibrated_multiplier,
                architecture=partial(copy.deepcopy, model),
                input_shape=tuple(inputs.shape[1:]),
                seed=seed,
                one_off=_refuse_one_off,
                device=inputs.device,
            ),
        )
        for number, (model, seed) in enumerate(zip(models, seeds, strict=True))
    ]
    average = ParameterAverage(recipe.average)
    shared: _SharedPlan | None = None
    parameters = nn.Parameter(stack.parameters)
    optimizer = recipe.optimizer_of([parameters], lr)
    for step in range(steps):
        before = parameters.detach().clone()
        plans = [run.planned(defense, step, at) for run, at in zip(runs, before, strict=True)]
        for at, plan in zip(before, plans, strict=True):
            if plan.start_at is not None:
                at.copy_(plan.start_at)
        parameters.data.copy_(before)
        shared = _SharedPlan.of(plans, defense.calibrated_multiplier, before, shared)
        rows, there = _drawn(sampling, step, members, sampler_keys)
        with full_precision():
            sums = stack.clipped_sums(before, inputs[rows], labels[rows], there, shared)
        total = shared.noised(sums, noise)
        update = total / expected
        for number, (run, plan) in enumerate(zip(runs, plans, strict=True)):
            run.observed(defense, plan, total[number], update[number])
        factor = recipe.rate(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        # A copy, because an optimizer may change gradients in place, and methods may look at the last update.
        parameters.grad = update.clone()
        optimizer.step()
        if (moves := _masks([plan.moves for plan in plans], before)) is not None:
            parameters.data = torch.where(moves > 0, parameters.data, before)
        average.add(step, before.flatten(), parameters.detach().flatten())
    final = parameters.detach() if average.value is None else average.value.view_as(parameters)
    for model, values in zip(models, final, strict=True):
        stack.layout.write(model, values)
        model.eval()


def _refuse_one_off(plan: NoisyPlan, step: int) -> tuple[Tensor, ...]:
    raise NotTogether("a method that releases something of all the data at once is trained alone")


def _drawn(
    sampling: Sampling, step: int, members: Int[Tensor, "models n"], keys: Sequence[int]
) -> tuple[Int[Tensor, "models largest"], Bool[Tensor, "models largest"]]:
    """Rows of the pool in each model's batch, filled up to the largest, and which of them are there."""
    models, count = members.shape
    if sampling.kind == "poisson":
        # One generator for all: to make one takes longer than to draw the coins of a small batch.
        coins = keyed(key_from("stack", step, *keys))
        heads = torch.rand(models, count, generator=coins, dtype=torch.float64) < sampling.rate
        sizes, joined = heads.sum(1), heads.nonzero()[:, 1]
    else:
        batches = [sampling.indices(step, count, key) for key in keys]
        sizes, joined = torch.tensor([len(one) for one in batches]), torch.cat(batches)
    there = torch.arange(max(1, int(sizes.max()))) < sizes[:, None]
    places = torch.zeros(there.shape, dtype=torch.int64)
    places[there] = joined
    return members.gather(1, places.to(members.device)), there.to(members.device)


def _masks(coordinates: Sequence[Coordinates | None], like: Float[Tensor, "models dim"]) -> Tensor | None:
    """Which coordinates each model has, as ones and zeros; None where all have all."""
    if all(one is None for one in coordinates):
        return None
    masks = torch.zeros_like(like)
    for mask, one in zip(masks, coordinates, strict=True):
        if one is None:
            mask.fill_(1.0)
        else:
            mask.index_fill_(0, one.kept.to(like.device), 1.0)
    return masks


@dataclass
class _StackedRun:
    """What one model's method remembers, and what it may look at."""

    state: State
    context: Context
    update: Tensor | None = None

    @classmethod
    def begin(cls, defense: Defense, context: Context) -> _StackedRun:
        return cls(defense.start(context), context)

    def planned(self, defense: Defense, step: int, parameters: Tensor) -> StepPlan:
        self.context = self.context.at(step, parameters=parameters, update=self.update)
        self.state, plan = defense.plan(self.state, self.context)
        if plan.start_at is not None:
            self.context = self.context.at(step, parameters=plan.start_at.to(parameters).clone())
        return plan

    def observed(self, defense: Defense, plan: StepPlan, total: Tensor, update: Tensor) -> None:
        """Post-processes the update in place, and lets the method see what was released."""
        if plan.post is not identity:
            update.copy_(plan.post(update))
        self.update = update
        if getattr(type(defense.method), "observe", None) is not Stateless.observe:
            codec = plan.blocks[0].codec
            noisy = total[codec.kept.to(total.device)] if isinstance(codec, Coordinates) else total.clone()
            self.state = defense.observe(self.state, self.context, (noisy,), update)


@dataclass(frozen=True)
class _SharedPlan:
    """What the plans of all models in a step have in common, and the mask of each, in the dtype of the parameters."""

    codecs: list[Codec]
    bound: Bound
    std: float
    kept: Float[Tensor, "models dim"] | None

    @classmethod
    def of(
        cls,
        plans: Sequence[StepPlan],
        noise_multiplier: float,
        like: Float[Tensor, "models dim"],
        last: _SharedPlan | None,
    ) -> _SharedPlan:
        first = plans[0].blocks[0]
        for plan in plans:
            (block, *more) = plan.blocks
            apart = plan.correlated is not None or plan.trial is not None
            if more or apart or block.query is not gradient or type(block.codec) not in (Everything, Coordinates):
                raise NotTogether("a stack executes one block of gradients in all or some coordinates a step")
            if type(block.bound) is not Bound or block.bound != first.bound:
                raise NotTogether("a stack executes plans with one bound for all models")
        codecs = [plan.blocks[0].codec for plan in plans]
        if last is not None and all(a is b for a, b in zip(codecs, last.codecs, strict=True)):
            kept = last.kept
        else:
            kept = _masks([codec if isinstance(codec, Coordinates) else None for codec in codecs], like)
        return cls(codecs, first.bound, first.noise_std(noise_multiplier), kept)

    def noised(self, sums: Float[Tensor, "models dim"], noise: torch.Generator) -> Float[Tensor, "models dim"]:
        """The sums with noise in the coordinates that are released."""
        if not self.std:
            return sums
        drawn = torch.randn(sums.shape, generator=noise, dtype=sums.dtype).to(sums.device).mul_(self.std)
        return drawn.add_(sums) if self.kept is None else drawn.mul_(self.kept).add_(sums)


class _Stack:
    """The layers of models of one architecture, and their parameters with a leading model axis.

    Attributes:
        layout: of one model.
        parameters: [models, dim].
    """

    def __init__(self, models: Sequence[nn.Module], loss: Loss) -> None:
        for model in models:
            _refuse_unseen(model)
        layers, self.loss = _chain(models[0]), loss
        self.layout = Layout.of(models[0])
        # By what they say of themselves: functions differ in more than their number, as in a slope.
        if any(Layout.of(model) != self.layout or repr(_chain(model)) != repr(layers) for model in models):
            raise NotTogether("models of a stack must have one architecture")
        self.parameters = torch.stack([self.layout.read(model) for model in models])
        spans = dict(zip(self.layout.names, zip(self.layout.slices, self.layout.shapes, strict=True), strict=True))
        names = {part: name for name, part in models[0].named_modules()}
        if unknown := set(self.layout.names) - {
            f"{names[layer]}.{of}" for layer in layers for of in ("weight", "bias") if isinstance(layer, nn.Linear)
        }:
            raise NotTogether(f"a stack must be of parameters of linear layers, got '{min(unknown)}'")
        self._layers: list[nn.Module | tuple[_Place, _Place | None]] = []
        for layer in layers:
            if not isinstance(layer, nn.Linear):
                self._layers.append(layer)
                continue
            weight, bias = (f"{names[layer]}.{of}".removeprefix(".") for of in ("weight", "bias"))
            self._layers.append((_Place(*spans[weight]), _Place(*spans[bias]) if layer.bias is not None else None))

    def clipped_sums(
        self,
        at: Float[Tensor, "models dim"],
        inputs: Float[Tensor, "models rows ..."],
        labels: Int[Tensor, "models rows"],
        there: Bool[Tensor, "models rows"],
        shared: _SharedPlan,
    ) -> Float[Tensor, "models dim"]:
        """The sum of bounded gradients of each model's batch, in the coordinates that its plan releases."""
        products = self._products(at, inputs, labels)
        squares = torch.zeros(there.shape, dtype=torch.float64, device=at.device)
        for weight, bias, went_in, signals in products:
            if shared.kept is None:
                squares += signals.square().sum(-1).double() * (went_in.square().sum(-1) + (bias is not None))
                continue
            kept, energy = shared.kept, signals.square()
            squares += (energy.bmm(weight.of(kept)) * went_in.square()).sum(-1)
            if bias is not None:
                squares += energy.bmm(bias.of(kept)[..., None])[..., 0]
        norms = squares.sqrt()
        finite = norms.isfinite()
        # A row that is not finite counts as zero, by itself, and so does one that only fills a batch up.
        clean = bool(finite.all())
        scale = shared.bound.scale(norms.masked_fill(~finite, 0.0).flatten(), at.dtype).view_as(norms)
        factors = (scale * (there & finite))[..., None]
        sums = torch.empty_like(at)
        for weight, bias, went_in, signals in products:
            if not clean:  # zero times infinity is no zero
                signals, went_in = (one.masked_fill(~finite[..., None], 0.0) for one in (signals, went_in))
            scaled = signals * factors
            weight.of(sums).copy_(scaled.transpose(1, 2).bmm(went_in))
            if bias is not None:
                bias.of(sums).copy_(scaled.sum(1))
        return sums if shared.kept is None else sums.mul_(shared.kept)

    def _products(
        self, at: Tensor, inputs: Tensor, labels: Tensor
    ) -> list[tuple[_Place, _Place | None, Tensor, Tensor]]:
        """Of each linear layer: where its parameters are, what went in, and the derivatives by what came out."""
        passing, linear, outputs = inputs.flatten(2), [], []
        with torch.enable_grad():
            for layer in self._layers:
                if isinstance(layer, nn.Module):
                    passing = layer(passing)
                    continue
                weight, bias = layer
                out = passing.bmm(weight.of(at).transpose(1, 2))
                if bias is not None:
                    out = out + bias.of(at)[:, None]
                linear.append((weight, bias, passing.detach()))
                # The first is a leaf, so that nothing is differentiated by the inputs.
                passing = out if outputs else out.requires_grad_()
                outputs.append(passing)
            value = self.loss(passing.flatten(0, 1), labels.flatten()).sum()
        signals = torch.autograd.grad(value, outputs)
        return [(*one, signal) for one, signal in zip(linear, signals, strict=True)]


@dataclass(frozen=True)
class _Place:
    """Where a parameter is in a flat vector, and its shape."""

    span: tuple[int, int]
    shape: tuple[int, ...]

    def of(self, vectors: Float[Tensor, "models dim"]) -> Tensor:
        """The parameter of each model, a view."""
        return vectors[:, slice(*self.span)].unflatten(1, self.shape)


def _refuse_unseen(model: nn.Module) -> None:
    """Refuses what a module does beside its type's own computation, whatever layer it is of.

    Raises:
        NotTogether: a hook, or a function of its own in the place of its class's.
    """
    try:
        refuse_model(model)
    except Refused as error:
        raise NotTogether(str(error)) from error
    everywhere = [*_of_all_modules._global_forward_hooks, *_of_all_modules._global_forward_pre_hooks]
    for part in model.modules():
        own = vars(part)
        if everywhere or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            raise NotTogether("a stack must be of models without hooks")
        if replaced := [name for name in own if callable(getattr(type(part), name, None))]:
            raise NotTogether(f"a stack must be of layers that compute what their type does, got another {replaced[0]}")


def _chain(model: nn.Module) -> list[nn.Module]:
    """The layers of a chain, one after another, without the flattening in front.

    Raises:
        NotTogether: it is no chain, or has another layer, or one that is not trained.
    """
    if type(model) is not nn.Sequential:
        raise NotTogether(f"a stack must be of nn.Sequential models, got {type(model).__name__}")
    layers = [part for child in model for part in ([child] if type(child) is not nn.Sequential else _chain(child))]
    if layers and type(layers[0]) is nn.Flatten and layers[0].start_dim == 1 and layers[0].end_dim == -1:
        layers = layers[1:]
    for layer in layers:
        if type(layer) is not nn.Linear and type(layer) not in _ELEMENTWISE:
            raise NotTogether(f"a stack must be of linear layers and elementwise functions, got {type(layer).__name__}")
        if any(not p.requires_grad for p in layer.parameters()):
            raise NotTogether("a stack must be of models that are trained as a whole, got a frozen layer")
        # It would write over the outputs by which a layer's gradient is taken.
        if getattr(layer, "inplace", False):
            raise NotTogether(f"a stack must be of functions that change nothing in place, got {layer}")
    weights = [id(p) for layer in layers for p in layer.parameters()]
    if len(set(weights)) < len(weights):
        raise NotTogether("a stack must be of layers with parameters of their own, got shared ones")
    if not any(isinstance(layer, nn.Linear) for layer in layers):
        raise NotTogether("a stack must have a linear layer")
    return layers
