"""Stacked training of many models of the same architecture, each on its own examples and sampler: shadow models.

Training a small network spends most of its time on launching operations: 16 or 64 networks that share each operation,
with a leading model axis, take little longer than a single network. For chains of linear layers, a step needs only a
few batched products. With signals s (gradients of the losses at a layer's outputs) and inputs x,
the gradient of an example is s xᵀ, whose norm is |s| |x|, under a mask M (s∘s)ᵀ M (x∘x), and the clipped sum of a batch
is a single product. Convolutions become products with patches of images, of which a stack holds as many at a time as a
memory limit allows; on a CPU that is slower than separate training, so they are stacked on CUDA, or on request.

Stacked training has no ledger and proves nothing: it is for an attacker's reference models, trained by the same plans
that `train` executes. The result equals `train`'s up to rounding, except for the draws that all models share from the
same generator: the noise, and the coins of Poisson sampling. Other samplers draw the same batches as `train`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ...gradients.augmentation import global_draws
from ...gradients.numerics.full_precision import full_precision, refuse_autocast
from ...plan.codec import Coordinates
from ...plan.defense import Context, Defense, NoisyPlan, State, Stateless, StepPlan
from ...plan.post import identity
from ...privacy.sampling import Sampling
from ...randomness.keys import global_generators, key_from, keyed
from ..average import ParameterAverage
from ..settings import Recipe
from ..step import posted
from .network import StackedNetwork
from .shared_plan import SharedPlan, masks
from .stack_error import StackError


def train_stacked(
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
    even_if_slower: bool = False,
) -> None:
    """Trains models in place, each as `train` would with its seed, up to the shared random draws.

    Args:
        models: models of the same architecture, chains of layers supported by `layers.py`; on the device of the pool.
        pool: (inputs [m, ...], labels [m]) that all of them draw from.
        chosen: indices of each model's training examples in the pool.
        defense: with its noise multiplier set.
        sampling: the batch sampler.
        steps: length of the run.
        lr: learning rate, of the update averaged over the expected batch.
        noise: CPU generator of the noise of all models.
        seeds: key of each model's public randomness.
        sampler_keys: key of each model's sampler; under Poisson sampling they together key a single generator.
        recipe: as of `train`.
        even_if_slower: whether to accept networks that train faster separately, such as convolutions on a CPU.

    Raises:
        StackError: for different architectures, an unsupported recipe, or an unsupported plan, found when it is made.
        ValueError: for numbers of models, seeds and keys that do not fit, models without examples, a method that reads
            public data, or `torch.autocast`.
    """
    recipe = recipe or Recipe()
    _check(models, chosen, seeds, sampler_keys, recipe)
    inputs = pool[0]
    if not isinstance(inputs, Tensor):
        raise StackError(f"a stack must have one input tensor, got {type(inputs).__name__}")
    refuse_autocast(inputs)
    stack = StackedNetwork(models, recipe.loss, inputs.device, requested=even_if_slower)
    members = chosen.to(inputs.device)
    expected = recipe.divisor(sampling, members.shape[1])
    runs = _begin(
        defense,
        stack,
        models,
        seeds,
        steps=steps,
        steps_per_epoch=sampling.steps_per_epoch,
        expected_batch=expected,
        input_shape=tuple(inputs.shape[1:]),
        device=inputs.device,
    )
    average = ParameterAverage(recipe.average)
    shared: SharedPlan | None = None
    parameters = nn.Parameter(stack.parameters)
    optimizer = recipe.optimizer_of([parameters], lr)
    for step in range(steps):
        before = parameters.detach().clone()
        plans = [run.planned(defense, step, at) for run, at in zip(runs, before, strict=True)]
        if any(plan.start_at is not None for plan in plans):
            before = _starts(plans, before)
            parameters.data.copy_(before)
        shared = SharedPlan.of(plans, defense.calibrated_multiplier, before, shared)
        rows, in_batch = drawn(sampling, step, members, sampler_keys)
        with full_precision():
            sums = stack.clipped_sums(before, pool, rows, in_batch, shared.bound, shared.kept)
        total = shared.noised(sums, noise)
        update = total / expected
        for number, (run, plan) in enumerate(zip(runs, plans, strict=True)):
            run.observed(defense, plan, total[number], update[number])
        _descend(parameters, update, optimizer, lr * recipe.rate(step, steps))
        if (moves := masks([plan.moves for plan in plans], before)) is not None:
            parameters.data = torch.where(moves > 0, parameters.data, before)
        average.add(step, before.flatten(), parameters.detach().flatten())
    final = parameters.detach() if average.value is None else average.value.view_as(parameters)
    for model, values in zip(models, final, strict=True):
        stack.layout.write(model, values)
        model.eval()


def _check(
    models: Sequence[nn.Module], chosen: Tensor, seeds: Sequence[int], sampler_keys: Sequence[int], recipe: Recipe
) -> None:
    """Refuses what cannot be trained together, before anything is built."""
    counts = {"models": len(models), "chosen": len(chosen), "seeds": len(seeds), "sampler_keys": len(sampler_keys)}
    if not models or len(set(counts.values())) > 1:
        raise ValueError(f"there must be a seed, a key and examples for each model, got {counts}")
    if not chosen.shape[1]:
        raise ValueError(f"chosen must have an example for each model, got {list(chosen.shape)}")
    if recipe.augmentation is not None or recipe.statistics is not None or callable(recipe.optimizer):
        raise StackError("models with views, standardised features or an optimizer of one's own are trained alone")


def _begin(
    defense: Defense, stack: StackedNetwork, models: Sequence[nn.Module], seeds: Sequence[int], **shared: Any
) -> list[_StackedRun]:
    """Starts the method of each model; `shared` are the fields of `Context` that all of them have in common."""
    context = partial(
        Context,
        step=0,
        layout=stack.layout,
        noise_multiplier=defense.calibrated_multiplier,
        one_off=_refuse_one_off,
        **shared,
    )
    return [
        _StackedRun.begin(
            defense, context(parameters=point.clone(), architecture=partial(copy.deepcopy, model), seed=seed)
        )
        for model, seed, point in zip(models, seeds, stack.parameters.detach(), strict=True)
    ]


def _starts(plans: Sequence[StepPlan], parameters: Tensor) -> Tensor:
    """Returns the points at which the plans start, in a new tensor: a method may keep the parameters it was given."""
    return torch.stack(
        [
            point if plan.start_at is None else plan.start_at.to(point)
            for point, plan in zip(parameters, plans, strict=True)
        ]
    )


def _descend(parameters: nn.Parameter, update: Tensor, optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    # A copy, because an optimizer may change gradients in place, and methods may read the last update.
    parameters.grad = update.clone()
    optimizer.step()


def _refuse_one_off(plan: NoisyPlan, step: int) -> tuple[Tensor, ...]:
    raise StackError("a method that releases something of all the data at once is trained alone")


def drawn(
    sampling: Sampling, step: int, members: Int[Tensor, "models n"], keys: Sequence[int]
) -> tuple[Int[Tensor, "models largest"], Bool[Tensor, "models largest"]]:
    """Returns pool rows of each model's batch, padded to the largest batch, and a mask of the rows that are in it."""
    models, count = members.shape
    if sampling.kind == "poisson":
        # A shared generator: creating a generator takes longer than drawing the coins of a small batch.
        generator = keyed(key_from("stack", step, *keys))
        heads = torch.rand(models, count, generator=generator, dtype=torch.float64) < sampling.rate
        sizes, joined = heads.sum(1), heads.nonzero()[:, 1]
    else:
        batches = [sampling.indices(step, count, key) for key in keys]
        sizes, joined = torch.tensor([len(batch) for batch in batches]), torch.cat(batches)
    in_batch = torch.arange(max(1, int(sizes.max()))) < sizes[:, None]
    places = torch.zeros(in_batch.shape, dtype=torch.int64)
    places[in_batch] = joined
    return members.gather(1, places.to(members.device)), in_batch.to(members.device)


@dataclass
class _StackedRun:
    """State and context of a model's method."""

    state: State
    context: Context
    update: Tensor | None = None
    generator_states: Sequence[Tensor] = ()

    @classmethod
    def begin(cls, defense: Defense, context: Context) -> _StackedRun:
        with global_generators(global_draws(context.seed, None), context.device):
            return cls(defense.start(context), context)

    def planned(self, defense: Defense, step: int, parameters: Tensor) -> StepPlan:
        self.context = context = self.context.at(step, parameters=parameters, update=self.update)
        with global_generators(global_draws(context.seed, step), context.device) as self.generator_states:
            self.state, plan = defense.plan(self.state, context)
        if plan.start_at is not None:
            self.context = self.context.at(step, parameters=plan.start_at.to(parameters).clone())
        return plan

    def observed(self, defense: Defense, plan: StepPlan, total: Tensor, update: Tensor) -> None:
        """Post-processes the update in place, and lets the method observe the release."""
        self.update = update
        observes = getattr(type(defense.method), "observe", None) is not Stateless.observe
        if plan.post is identity and not observes:
            return
        # Public draws continue from where the plan left them, as for a model that is trained alone.
        with global_generators(self.generator_states, self.context.device):
            if plan.post is not identity:
                update.copy_(posted(plan.post, update))
            if observes:
                codec = plan.blocks[0].codec
                noisy = total[codec.kept.to(total.device)] if isinstance(codec, Coordinates) else total.clone()
                self.state = defense.observe(self.state, self.context, (noisy,), update)
