"""Attacks on a shared gradient or weight update from outside: reconstruction, label recovery, and membership.

A client of a federation sends the mean gradient of its batch, or its weights after a step of SGD; the server has the
model before. The ground truth is unknown here, so nothing is scored: a reconstruction comes with the attack's own
evidence (its certificate, its status, the unexplained part), and a candidate with a p-value.

A candidate's p-value is its rank among public examples that were not in the batch, which are attacked as decoys. For a
candidate outside the batch, its score and those of the decoys are exchangeable if it comes from the same population,
which is tested first (`exchangeable`). For many candidates, q-values correct for multiple testing (Benjamini &
Hochberg, JRSS B 1995).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor, nn

from leakbench.attacks.core import (
    AccessError,
    Examples,
    LabelEstimate,
    MembershipScores,
    NotApplicable,
    Observation,
    Reconstruction,
)
from leakbench.defenses.core import Block, Everything, Layout, NoisyPlan, Step, StepPlan, clip, keyed, unbounded

from ...catalog import methods as catalog
from ...catalog.messages import in_one_line
from ...plan.request import seed_of
from ...subjects.outcome import join
from ...targets.observe import PublicKnowledge, observe
from ..examples.exchangeable import unlike
from .convention import Convention, Declared, UpdateIs, mean_gradient
from .scale import logit_layer
from .tensors import freeze_others, moved_parameters, parameters_of
from .training_mode import batch_statistics, labels_in_training, observed_in_training, of_batches, statistics_moved


@dataclass(frozen=True, kw_only=True)
class SharedFile:
    """Update as known to its server.

    Attributes:
        model: before the step.
        gradient: mean over the batch, as it was shared [dim]; in the order of `layout`.
        layout: of the model's trained parameters.
        batch_size: examples in the batch.
        clip_norm: of each example; None without clipping.
        noise_multiplier: standard deviation of the noise on the undivided sum / clip norm.
        labels: of the batch, if the server knows them.
        convention: convention by which the file holds the update.
        lacking: trained parameters that were not shared; `layout` is of the others.
        in_training: the model with batch statistics, if the step was in training mode; else None.
        batch_statistics: mean and variance of the batch at each batch norm, as far as the file reveals them.
        unsure_labels: whether `labels` were recovered and may be wrong.
        notes: on the processing, a sentence each.
    """

    model: nn.Module
    gradient: Float[Tensor, " dim"]
    layout: Layout
    batch_size: int
    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    labels: Tensor | None = None
    convention: Convention = field(default_factory=Convention)
    lacking: tuple[str, ...] = ()
    in_training: nn.Module | None = None
    batch_statistics: Mapping[str, Tensor] = field(default_factory=dict)
    unsure_labels: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UpdateFinding:
    """Result of an attack on an update.

    Attributes:
        name: of the attack.
        settings: all of them.
        kind: of its result.
        result: as returned; None if the attack did not run.
        why_not: a sentence on why it did not run; empty if it ran.
        p_values: of the candidates, in their order; empty for other kinds.
        q_values: the same, corrected for the number of candidates.
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
    update_is: UpdateIs | None = None,
    weight_decay: float | None = None,
    public: Examples | None = None,
    input_shape: tuple[int, ...] | None = None,
    training_mode: bool = False,
) -> SharedFile:
    """Reads an update from tensors by parameter name.

    Args:
        model: before the step, with its parameters.
        tensors: by name, in any precision: the gradient, the weights after a step of SGD, or their difference.
        batch_size: examples in the batch.
        lr: learning rate of that step; None if unknown.
        clip_norm: of each example; None without clipping.
        noise_multiplier: standard deviation of the noise on the undivided sum / clip norm.
        labels: of the batch, if known.
        update_is: content of the file; None to infer it from the last layer.
        weight_decay: coefficient that the step added to the gradient; None to infer it from the last layer.
        public: public examples, which help to infer the content.
        input_shape: of an example, in the absence of public ones; None skips the inference of the content.
        training_mode: whether batch norms used the batch's statistics; implied if the file's running ones moved.

    Raises:
        ValueError: names or shapes that are not the model's, or a number out of range.
        InconsistentObservation: an update of zeros or NaN.
    """
    _check(batch_size, clip_norm, noise_multiplier, labels)
    declared = Declared(
        update_is=update_is,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
    )
    own = copy.deepcopy(model).eval()
    sent, notes = parameters_of(own, tensors)
    sent, still = moved_parameters(own, sent)
    notes += still
    lacking = freeze_others(own, sent)
    layout = Layout.of(own)
    moved = statistics_moved(own, sent)
    computed, in_training = own, training_mode or bool(moved)
    if in_training:
        computed = of_batches(own)
        notes = (*notes, _about_training_mode(moved, clip_norm))
    device = next(own.parameters()).device
    probe = None if public is None else public.inputs[:2]
    if probe is None and input_shape is not None:
        probe = torch.zeros(2, *input_shape, device=device)
    vector, convention = mean_gradient(computed, layout, sent, declared, probe=probe, public=public)
    return SharedFile(
        model=own,
        gradient=vector.to(device),
        layout=layout,
        batch_size=batch_size,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        labels=None if labels is None else torch.tensor(list(labels), dtype=torch.int64),
        convention=convention,
        lacking=lacking,
        in_training=computed if in_training else None,
        batch_statistics=batch_statistics(own, sent) if moved else {},
        notes=(*notes, *convention.notes),
    )


def _check(batch_size: int, clip_norm: float | None, noise_multiplier: float, labels: Sequence[int] | None) -> None:
    """Refuses numbers out of range, before a tensor is read."""
    if batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {batch_size}")
    if not 0 <= noise_multiplier < float("inf"):
        raise ValueError(f"--noise-multiplier must be at least 0 and finite, got {noise_multiplier}")
    if noise_multiplier > 0 and clip_norm is None:
        raise ValueError("--noise-multiplier is in clip norms; give --clip-norm, too")
    if labels is not None and len(labels) != batch_size:
        raise ValueError(f"--labels must be one an example of the batch, {batch_size}, got {len(labels)}")


def _about_training_mode(moved: Sequence[str], clip_norm: float | None) -> str:
    """Returns a note on a step in training mode; refuses clipping, which has no meaning there.

    Args:
        moved: batch norms whose running statistics moved, by name.
        clip_norm: of each example; None without clipping.
    """
    if clip_norm is not None:
        raise ValueError(
            "--clip-norm must be left out of a step in training mode: batch norms mix the examples of a batch, so that "
            "none has a gradient of its own to clip"
        )
    why = f"the running statistics of {', '.join(map(repr, moved[:4]))} moved" if moved else "as --training-mode says"
    how = "match the batch's statistics, too" if moved else "simulate it, and brightness and contrast may stay open"
    return f"Batch norms were in training mode ({why}): attacks on inputs {how}."


def observed(
    shared: SharedFile,
    public_knowledge: PublicKnowledge,
    candidates: Examples | None = None,
    *,
    kind: str = "membership",
) -> Observation:
    """Builds the observation of an update that attacks receive.

    Args:
        shared: the update.
        public_knowledge: public knowledge, with public examples.
        candidates: possible members of the batch.
        kind: of the attack. For a step in training mode, membership attacks get the target in evaluation mode, which
            keeps ranks among decoys valid; others get a target with batch statistics.
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
    target = observe(
        step,
        shared.model,
        shared.layout,
        public_knowledge,
        labels=shared.labels,
        batch_size=shared.batch_size,
        candidates=candidates,
    )
    model, size = shared.in_training, shared.batch_size
    if model is None or kind == "membership":
        return target
    if kind == "reconstruction":
        return observed_in_training(target, model, shared.layout, public_knowledge.loss, size, shared.batch_statistics)
    probe = shared.gradient.new_zeros(2, *public_knowledge.input_shape)
    return labels_in_training(target, model, shared.layout, logit_layer(model, probe, None), size)


def with_labels(shared: SharedFile, public_knowledge: PublicKnowledge, *, seed: int = 0) -> SharedFile:
    """Adds the labels recovered by a label attack, for attacks on inputs that need labels.

    Args:
        shared: the update.
        public_knowledge: public knowledge, with public examples.
        seed: of the generator.

    Returns:
        The update with labels; unchanged if labels are known, or not all of them are recovered.
    """
    if shared.labels is not None or shared.convention.unreadable:
        return shared
    named = next(name for name in catalog.names("attacks") if catalog.attack(name).kind == "labels")
    (finding,) = attack_update(shared, public_knowledge, [(named, {})], seed=seed)
    result = finding.result
    if not isinstance(result, LabelEstimate) or int(result.counts.sum()) != shared.batch_size:
        return shared
    labels = torch.arange(len(result.counts), device=result.counts.device).repeat_interleave(result.counts)
    unsure = result.status != "ok"
    words = ", ".join(map(str, labels.tolist()[:20])) + (", ..." if len(labels) > 20 else "")
    how = "which may be others" if unsure else "which are sure"
    note = f"Attacks on inputs that need labels were given those that {named} found, {how}: {words}."
    return replace(shared, labels=labels, unsure_labels=unsure, notes=(*shared.notes, note))


def attack_update(
    shared: SharedFile,
    public_knowledge: PublicKnowledge,
    attacks: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    candidates: Examples | None = None,
    seed: int = 0,
) -> list[UpdateFinding]:
    """Runs attacks on an update in turn; an attack that cannot run does not end the others.

    Args:
        shared: the update.
        public_knowledge: public knowledge. For membership attacks its population is split in two: half is known to the
            attack, the other half serve as decoys.
        attacks: names of attacks, each with its settings.
        candidates: possible members of the batch; None without membership attacks.
        seed: of the generators and of that split.
    """
    findings = []
    for name, chosen in attacks:
        attack = catalog.attack(name)
        settings = attack.settings(**chosen)
        about: dict[str, Any] = {"name": name, "settings": settings, "kind": attack.kind}
        generator = keyed(seed_of({"attack": name, "seed": seed}, "update"))
        own, everybody = public_knowledge, candidates
        try:
            if shared.convention.unreadable:
                raise NotApplicable(shared.convention.unreadable)
            if attack.kind == "membership":
                own, everybody = _with_decoys(public_knowledge, candidates, seed)
            target = observed(shared, own, everybody, kind=attack.kind)
            result = _trusted(attack(target, generator, **copy.deepcopy(settings)), shared)
        except (NotApplicable, AccessError) as error:
            findings.append(UpdateFinding(**about, why_not=f"{name} does not apply: {error}{_lacks(shared)}"))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            findings.append(UpdateFinding(**about, why_not=f"{name} failed: {in_one_line(error)}"))
        else:
            values = _p_values(result, candidates) if attack.kind == "membership" and candidates is not None else ()
            corrected = tuple(map(float, stats.false_discovery_control(values))) if values else ()
            findings.append(UpdateFinding(**about, result=result, p_values=values, q_values=corrected))
    return findings


def _lacks(shared: SharedFile) -> str:
    """Names the missing parameters, as a suffix of the reason why an attack does not apply."""
    names = ", ".join(map(repr, shared.lacking[:4])) + (" and others" if len(shared.lacking) > 4 else "")
    return f"; the update lacks {names}" if shared.lacking else ""


def _trusted(result: Any, shared: SharedFile) -> Any:
    """Marks a result as `degraded` if the update's convention is ambiguous or its labels may be wrong."""
    if isinstance(result, MembershipScores) or result.status != "ok":
        return result
    if isinstance(result, Reconstruction):
        sure = result.certified is not None and len(result.certified) > 0 and bool(result.certified.all())
    else:
        # Under noise the named labels passed a test, and the others are not named.
        sure = not shared.convention.ambiguous and (
            shared.noise_multiplier > 0 or bool((result.lower == result.upper).all())
        )
        return result if sure else replace(result, status="degraded")
    doubted = bool(shared.convention.ambiguous) or shared.unsure_labels
    return result if sure or not doubted else replace(result, status="degraded")


def _with_decoys(
    public_knowledge: PublicKnowledge, candidates: Examples | None, seed: int
) -> tuple[PublicKnowledge, Examples]:
    """Returns public knowledge with half of the public examples, and candidates followed by the other half."""
    public = public_knowledge.population
    if candidates is None:
        raise NotApplicable("nobody is asked about; give --candidates")
    if public is None:
        raise NotApplicable("candidates are compared with public examples that were not in the batch; give --public")
    if why := unlike(candidates, public):
        raise NotApplicable(why)
    order = torch.randperm(len(public), generator=keyed(seed_of({"seed": seed}, "decoys"))).to(public.ids.device)
    known, decoys = (
        Examples(ids=public.ids[half], inputs=public.inputs[half], labels=public.labels[half])
        for half in order.tensor_split(2)
    )
    own = PublicKnowledge(
        input_shape=public_knowledge.input_shape,
        classes=public_knowledge.classes,
        low=public_knowledge.low,
        high=public_knowledge.high,
        loss=public_knowledge.loss,
        population=known,
    )
    return own, join(candidates, decoys)


def _p_values(result: MembershipScores, candidates: Examples) -> tuple[float, ...]:
    """Computes a p-value for each candidate, of not having been in the batch: its rank among the decoys."""
    inside = torch.isin(result.ids, candidates.ids)
    decoys = result.scores[~inside].sort().values
    places = {int(i): place for place, i in enumerate(result.ids.tolist())}
    own = result.scores[[places[int(i)] for i in candidates.ids.tolist()]]
    above = len(decoys) - torch.searchsorted(decoys, own, side="left")
    return tuple(((1 + above) / (1 + len(decoys))).tolist())
