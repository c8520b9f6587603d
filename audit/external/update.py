"""One shared gradient or weight update of somebody's own: what can be reconstructed of it, and who was in it.

A client of a federation sends the mean gradient of its batch, or its weights after one step of SGD; the server has the
model before. Nothing is known of the truth here, so nothing is scored: a reconstruction comes with what the attack
itself can tell (its certificate, its status, what it left unexplained), and a candidate with a p-value.

A candidate's p-value is its rank among public examples that were not in the batch, which are attacked as decoys: the
candidates' and decoys' scores are exchangeable where the candidate was not in the batch either and comes from the same
population, which is looked at before (`exchangeable`). Many candidates are many questions: q-values are Benjamini &
Hochberg's (JRSS B 1995).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor, nn

from attacks.core import (
    AccessError,
    Examples,
    InconsistentObservation,
    LabelEstimate,
    MembershipScores,
    NotApplicable,
    Observation,
    Reconstruction,
)
from defenses.core import Block, Everything, Layout, NoisyPlan, Step, StepPlan, clip, keyed, unbounded

from ..catalog import methods as catalog
from ..catalog.messages import in_one_line
from ..observe import World, observe
from ..plan.request import seed_of
from ..subjects.checkpoint import update_between
from ..subjects.outcome import join
from .exchangeable import unlike


@dataclass(frozen=True, kw_only=True)
class SharedFile:
    """An update as its server has it.

    Attributes:
        model: before the step.
        gradient: mean over the batch, as it was shared [dim]; in the order of `layout`.
        layout: of the model's trained parameters.
        batch_size: examples in the batch.
        clip_norm: of each example; None where nothing was clipped.
        noise_multiplier: standard deviation of the noise on the undivided sum, over the clip norm.
        labels: of the batch, where the server knows them.
    """

    model: nn.Module
    gradient: Float[Tensor, " dim"]
    layout: Layout
    batch_size: int
    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    labels: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateFinding:
    """What one attack made of an update.

    Attributes:
        name: of the attack.
        settings: all of them.
        kind: of its result.
        result: as it returned it; None where it did not run.
        why_not: the sentence that says why; empty where it ran.
        p_values: of the candidates, in their order; empty for other kinds.
        q_values: the same, corrected for how many were asked about.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: str
    result: Reconstruction | LabelEstimate | MembershipScores | None = None
    why_not: str = ""
    p_values: tuple[float, ...] = ()
    q_values: tuple[float, ...] = ()


def read_update(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    batch_size: int,
    lr: float | None = None,
    clip_norm: float | None = None,
    noise_multiplier: float = 0.0,
    labels: Sequence[int] | None = None,
) -> SharedFile:
    """An update from tensors by parameter name.

    Args:
        model: before the step, with its parameters.
        tensors: the mean gradient; or with `lr` the weights after one step of SGD.
        batch_size: examples in the batch.
        lr: learning rate of that step; None for a gradient.
        clip_norm: of each example; None where nothing was clipped.
        noise_multiplier: standard deviation of the noise on the undivided sum, over the clip norm.
        labels: of the batch, where they are known.

    Raises:
        ValueError: names or shapes that are not the model's, NaN, or a number out of range.
    """
    if batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {batch_size}")
    if clip_norm is not None and not 0 < clip_norm < float("inf"):
        raise ValueError(f"--clip-norm must be positive and finite, got {clip_norm}")
    if not 0 <= noise_multiplier < float("inf"):
        raise ValueError(f"--noise-multiplier must be at least 0 and finite, got {noise_multiplier}")
    if noise_multiplier > 0 and clip_norm is None:
        raise ValueError("--noise-multiplier is in clip norms; give --clip-norm, too")
    if labels is not None and len(labels) != batch_size:
        raise ValueError(f"--labels must be one an example of the batch, {batch_size}, got {len(labels)}")
    own = copy.deepcopy(model).eval()
    layout = Layout.of(own)
    wanted = dict(zip(layout.names, layout.shapes, strict=True))
    given = {name: tensor for name, tensor in tensors.items() if name in wanted}
    if missing := [name for name in wanted if name not in given]:
        raise ValueError(f"the update must have every trained parameter of the model, and lacks {missing[0]!r}")
    if other := [name for name in given if tuple(given[name].shape) != tuple(wanted[name])]:
        name = other[0]
        raise ValueError(
            f"{name!r} of the update must have the shape of the model's, {list(wanted[name])}, got "
            f"{list(given[name].shape)}"
        )
    if lr is None:
        strange = [name for name in tensors if name not in wanted]
        if strange:
            raise ValueError(f"the update must be a gradient of the model's parameters, and has {strange[0]!r} as well")
        vector = layout.flatten({name: given[name].float() for name in wanted})
        if not bool(vector.isfinite().all()):
            raise InconsistentObservation("the update must be finite, got NaN or infinity")
    else:
        before = {name: parameter.detach() for name, parameter in own.named_parameters() if name in wanted}
        vector = update_between(before, {name: given[name] for name in wanted}, lr=lr).update.float()
    if not bool((vector != 0).any()):
        raise InconsistentObservation(
            "the update must tell something, and is zero everywhere"
            + ("" if lr is None else ": its weights are those of the checkpoint before the step")
        )
    if lr is None and _likeness(vector, layout.read(own).to(vector)) > _WEIGHTS:
        # A gradient has next to nothing in common with the weights that it is taken at.
        raise ValueError("the update must be a gradient, and looks like the model's weights; give --lr, of that step")
    return SharedFile(
        model=own,
        gradient=vector.to(next(own.parameters()).device),
        layout=layout,
        batch_size=batch_size,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        labels=None if labels is None else torch.tensor(list(labels), dtype=torch.int64),
    )


def _likeness(one: Tensor, other: Tensor) -> float:
    """Cosine of two vectors; 0 where one of them is zero."""
    return float(nn.functional.cosine_similarity(one.double(), other.double(), dim=0))


_WEIGHTS = 0.9
"""Cosine of an update with the model's own weights, from which on it is no gradient."""


def observed(shared: SharedFile, world: World, candidates: Examples | None = None) -> Observation:
    """What attacks are given of an update.

    Args:
        shared: the update.
        world: what everybody knows, with public examples.
        candidates: who may have been in the batch.
    """
    bound = unbounded() if shared.clip_norm is None else clip(shared.clip_norm)
    plan = StepPlan(Block(codec=Everything(shared.layout.dim), bound=bound))
    step = Step(
        step=0,
        parameters=shared.layout.read(shared.model),
        noise_multiplier=shared.noise_multiplier,
        expected_batch=float(shared.batch_size),
        sample_rate=1.0,
        plan=NoisyPlan(plan, shared.noise_multiplier),
        noisy=(shared.gradient * shared.batch_size,),
    )
    return observe(
        step,
        shared.model,
        shared.layout,
        world,
        labels=shared.labels,
        batch_size=shared.batch_size,
        candidates=candidates,
    )


def attack_update(
    shared: SharedFile,
    world: World,
    asked: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    candidates: Examples | None = None,
    seed: int = 0,
) -> list[UpdateFinding]:
    """Runs attacks on an update, one after another; what one cannot do ends none of the others.

    Args:
        shared: the update.
        world: what everybody knows; its population is split in two where candidates are asked about: one half is known
            to the attack, the other half are decoys.
        asked: names of attacks, each with its settings.
        candidates: who may have been in the batch; None for no such question.
        seed: of coins and of that split.
    """
    found = []
    for name, given in asked:
        attack = catalog.attack(name)
        settings = attack.settings(**given)
        about: dict[str, Any] = {"name": name, "settings": settings, "kind": attack.kind}
        coins = keyed(seed_of({"attack": name, "seed": seed}, "update"))
        own, everybody = world, candidates
        try:
            if attack.kind == "membership":
                own, everybody = _with_decoys(world, candidates, seed)
            target = observed(shared, own, everybody)
            result = attack(target, coins, **copy.deepcopy(settings))
        except (NotApplicable, AccessError) as error:
            found.append(UpdateFinding(**about, why_not=f"{name} does not apply: {error}"))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            found.append(UpdateFinding(**about, why_not=f"{name} failed: {in_one_line(error)}"))
        else:
            values = _p_values(result, candidates) if attack.kind == "membership" and candidates is not None else ()
            corrected = tuple(map(float, stats.false_discovery_control(values))) if values else ()
            found.append(UpdateFinding(**about, result=result, p_values=values, q_values=corrected))
    return found


def _with_decoys(world: World, candidates: Examples | None, seed: int) -> tuple[World, Examples]:
    """A world with half of the public examples, and candidates with the other half behind them."""
    public = world.population
    if candidates is None:
        raise NotApplicable("nobody is asked about; give --candidates")
    if public is None:
        raise NotApplicable("candidates are compared with public examples that were not in the batch; give --public")
    if why := unlike(candidates, public):
        raise NotApplicable(why)
    order = torch.randperm(len(public), generator=keyed(seed_of({"seed": seed}, "decoys"))).to(public.ids.device)
    known, decoys = (
        Examples(ids=public.ids[some], inputs=public.inputs[some], labels=public.labels[some])
        for some in order.tensor_split(2)
    )
    own = World(
        input_shape=world.input_shape,
        classes=world.classes,
        low=world.low,
        high=world.high,
        loss=world.loss,
        population=known,
    )
    return own, join(candidates, decoys)


def _p_values(result: MembershipScores, candidates: Examples) -> tuple[float, ...]:
    """Rank of each candidate among the decoys, as a p-value of not having been in the batch."""
    inside = torch.isin(result.ids, candidates.ids)
    decoys = result.scores[~inside].sort().values
    places = {int(i): place for place, i in enumerate(result.ids.tolist())}
    own = result.scores[[places[int(i)] for i in candidates.ids.tolist()]]
    above = len(decoys) - torch.searchsorted(decoys, own, side="left")
    return tuple(((1 + above) / (1 + len(decoys))).tolist())
