"""Leakage from a shared gradient of this architecture: ranks of its equations, and a few reconstructions.

The setting is fine-tuning in a federation: the gradient of a single example at the model's parameters, without noise.
Ranks need no data. Reconstructions are of single members, by the attacks of the quick suite with its settings.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakbench.attacks.core import AccessError, NotApplicable, Reconstruction, checked_reconstruction
from leakbench.attacks.core.closed_form.recursion.ranks import RankReport, rank_analysis
from leakbench.defenses.core import Block, Defense, Everything, Layout, StepPlan, clip, cross_entropy, keyed

from ...catalog import methods as catalog
from ...catalog.messages import in_one_line
from ...plan.request import seed_of
from ...scoring.score import score
from ...targets.observe import PublicKnowledge
from ...targets.simulated_update import simulate_share
from ...targets.structure import structure
from .attacks import Audited


@dataclass(frozen=True, kw_only=True)
class GradientLeak:
    """Outcome of an attack on the gradients of single members.

    Attributes:
        name: of the attack.
        settings: all of them.
        psnr: of each image, dB, capped at 120.
        reconstructions: [n, *shape]; None if it did not run.
        why_not: why it did not run, in a sentence; empty if it ran.
        seconds: wall clock.
    """

    name: str
    settings: Mapping[str, Any]
    psnr: tuple[float, ...] = ()
    reconstructions: Tensor | None = None
    why_not: str = ""
    seconds: float = 0.0


def ranks(model: nn.Module, input_shape: tuple[int, ...], *, seed: int = 0) -> list[RankReport] | str:
    """Returns, for every layer, whether an example's gradient determines its input; else why that is unknown.

    Args:
        model: at its parameters.
        input_shape: of an example.
        seed: of the random input.
    """
    own = copy.deepcopy(model).eval()
    layout = Layout.of(own)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(1.0)))
    try:
        network = structure(plan, own, layout, layout.read(own), cross_entropy, input_shape).known_network()
        return rank_analysis(network, None, seed=seed)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return in_one_line(error)


def shared_gradients(
    audited: Audited,
    defense: Defense,
    attacks: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    images: int = 4,
    seed: int = 0,
) -> tuple[Tensor, list[GradientLeak]]:
    """Attacks the gradients of a few members, each shared alone.

    Args:
        audited: the model and its members.
        defense: that releases the gradient.
        attacks: names of reconstruction attacks, each with its settings.
        images: number of members.
        seed: of their choice and of the attacks' generators.

    Returns:
        The members [n, *shape], and an outcome per attack.
    """
    order = torch.randperm(len(audited.members), generator=keyed(seed_of({"seed": seed}, "shared gradients")))
    chosen = order[:images].to(audited.members.inputs.device)
    inputs, labels = audited.members.inputs[chosen], audited.members.labels[chosen]
    return inputs, [_attacked(audited, defense, name, settings, inputs, labels, seed) for name, settings in attacks]


def _attacked(
    audited: Audited, defense: Defense, name: str, chosen: Mapping[str, Any], inputs: Tensor, labels: Tensor, seed: int
) -> GradientLeak:
    attack = catalog.attack(name)
    settings = attack.settings(**chosen)
    public_knowledge: PublicKnowledge = audited.public_knowledge
    begun, reconstructions, values = time.perf_counter(), [], []
    try:
        for place in range(len(inputs)):
            batch = slice(place, place + 1)
            shared = simulate_share(
                audited.model,
                inputs[batch],
                labels[batch],
                defense,
                public_knowledge=public_knowledge,
                population=public_knowledge.population,
            )
            generator = keyed(seed_of({"attack": name, "seed": seed, "place": place}, "shared gradient"))
            result = attack(shared.observation, generator, **copy.deepcopy(settings))
            metric = score(result, shared.truth)["psnr"]
            if metric.value is None:
                return GradientLeak(name=name, settings=settings, why_not=f"{name}: {metric.reason}")
            own: Reconstruction = checked_reconstruction(result, 1, inputs[batch])
            reconstructions.append(own.inputs[0].detach())
            values.append(float(metric.value))
    except (NotApplicable, AccessError) as error:
        return GradientLeak(name=name, settings=settings, why_not=f"{name} does not apply: {error}")
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return GradientLeak(name=name, settings=settings, why_not=f"{name} failed: {in_one_line(error)}")
    return GradientLeak(
        name=name,
        settings=settings,
        psnr=tuple(values),
        reconstructions=torch.stack(reconstructions),
        seconds=time.perf_counter() - begun,
    )
