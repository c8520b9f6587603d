"""Audit of a finished model: membership attacks, the strongest of them, a bound on epsilon, exposure, and a verdict.

`audit_model` takes a model in memory; `leakbench audit model` does the same on files and writes a report.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from leakbench.attacks.core import Examples
from leakbench.defenses.core.gradients.checks.devices import refuse_other_device
from leakbench.defenses.core.training.labelled import LabelledData, as_tensors
from leakbench.leaderboard.records.details import AucDetail
from leakbench.leaderboard.records.record import Metric

from ...catalog import methods as catalog
from ...catalog.messages import no_such
from ...plan.expand import BASELINE
from ...scoring.shift import Shift, shift_between
from ...scoring.utility import score_utility
from ...subjects.outcome import join
from ...targets.observe import logits_of
from ..claim import StatedClaim
from ..examples.checked import whole_labels
from ..examples.groups import Groups
from ..examples.identity import content_ids
from ..rule_numbers import numbers_of_rules, unless_proved
from ..transcript.attacks import run_on_transcript, transcript_attacks
from ..transcript.format import WatchedTranscript
from .attacks import AttackOutcome, Audited, answers, final_model_attacks, run_attacks
from .findings import (
    COMPARED,
    EpsilonBound,
    Exposure,
    SplitKind,
    Strongest,
    allowed_by,
    epsilon_bound,
    exposure,
    strongest,
)
from .preflight import preflight, refuse_stops, sentences
from .shadow_answers import AnsweredBank, refuse_other_answers
from .shared_gradients import GradientLeak, ranks, shared_gradients
from .verdict import AuditVerdict, backwards, right_answers, verdict, why_tied


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """Settings of an audit.

    Attributes:
        attacks: names, each with its settings; None for all whose requirements are met.
        split: `random` if the owner states that members were drawn at random from a pool whose rest are the
            non-members.
        claim: the owner's privacy claim; None for none.
        delta: of bounds on epsilon if there is no claim.
        level: confidence of the bound on epsilon.
        gradients: whether shared gradients of this architecture are attacked, too.
        images: number of members whose gradients are shared.
        seed: of candidates' order, attacks' generators and the choice of these members.
    """

    attacks: Sequence[tuple[str, Mapping[str, Any]]] | None = None
    split: SplitKind = "unknown"
    claim: StatedClaim | None = None
    delta: float = 1e-5
    level: float = 0.95
    gradients: bool = True
    images: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in get_args(SplitKind):
            raise ValueError(f"split must be {' or '.join(get_args(SplitKind))}, got {self.split!r}")
        if self.claim is not None and not isinstance(self.claim, StatedClaim):
            raise ValueError(f"claim must be a StatedClaim, as StatedClaim(epsilon=3.0), got {self.claim!r}")
        if self.attacks is not None and not all(
            isinstance(attack, (tuple, list)) and len(attack) == 2 and isinstance(attack[0], str)
            for attack in self.attacks
        ):
            raise ValueError(f"attacks must be pairs of a name and its settings, got {self.attacks!r}")
        if not 0 < self.level < 1:
            raise ValueError(f"level must be in (0, 1), got {self.level}")
        if not 0 <= self.delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {self.delta}")
        if self.images < 1:
            raise ValueError(f"images must be at least 1, got {self.images}")

    @property
    def delta_of_bounds(self) -> float:
        """Delta of the bounds of single attacks: the claim's if there is a claim."""
        return self.delta if self.claim is None else self.claim.delta


@dataclass(frozen=True, kw_only=True)
class ModelAudit:
    """Result of an audit.

    Attributes:
        audited: the model and its candidates.
        settings: of the audit.
        outcomes: of all attacks; those that did not run hold the reason.
        strongest: the strongest attack by each metric.
        bound: lower bound on epsilon; else why there is none.
        shift: distribution shift between members and non-members, without the model.
        exposure: of single members and classes, by the strongest attack; None if none ran.
        accuracy: of members and of non-members.
        ranks: of the equations of a shared gradient, one report per layer; else why they are unknown.
        shared: attacks on gradients of single members.
        shared_inputs: these members; None if no gradient was shared.
        verdict: of the audit.
    """

    audited: Audited
    settings: AuditSettings
    outcomes: tuple[AttackOutcome, ...]
    strongest: tuple[Strongest, ...]
    bound: EpsilonBound | str
    shift: Shift
    exposure: Exposure | None
    accuracy: Mapping[str, Metric]
    ranks: Sequence[Any] | str
    shared: tuple[GradientLeak, ...] = ()
    shared_inputs: Tensor | None = None
    verdict: AuditVerdict

    @property
    def measured(self) -> dict[tuple[str, str], Metric]:
        """Measurements for rules by (attack, metric); attack is empty for the strongest attack and the whole audit."""
        whole = {"epsilon_lower": epsilon_metric(self.bound), "accuracy_gap": accuracy_gap(self.accuracy)}
        return numbers_of_rules(self.outcomes, self.strongest, whole)


def epsilon_metric(bound: EpsilonBound | str) -> Metric:
    """Returns the bound as a metric for rules, without a value unless the split is stated to be random."""
    if isinstance(bound, str):
        return Metric(value=None, better="lower", reason=bound)
    if bound.split != "random":
        return Metric(value=None, better="lower", reason="the split is not said to be random (--split random)")
    return Metric(value=bound.value, n=bound.pairs, better="lower", reason="it is a low end by itself")


def accuracy_gap(accuracy: Mapping[str, Metric]) -> Metric:
    """Returns accuracy on members minus that on non-members; its interval combines opposite ends of both intervals."""
    inside, outside = accuracy["members"], accuracy["non_members"]
    if inside.value is None or outside.value is None:
        return Metric(value=None, better="lower", reason=inside.reason or outside.reason)
    ends = [inside.low, inside.high, outside.low, outside.high]
    value, n = inside.value - outside.value, (inside.n or 0) + (outside.n or 0)
    if any(end is None for end in ends):
        return Metric(value=value, n=n, better="lower", reason="accuracies without intervals have none of their gap")
    low, high, other_low, other_high = (float(end or 0.0) for end in ends)
    return Metric(value=value, low=low - other_high, high=high - other_low, n=n, better="lower")


def audit_model(
    model: nn.Module,
    *,
    members: LabelledData,
    non_members: LabelledData,
    population: LabelledData | None = None,
    settings: AuditSettings | None = None,
    bank: AnsweredBank | None = None,
    transcript: WatchedTranscript | None = None,
    accept: Collection[str] = (),
    report: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> ModelAudit:
    """Audits a model in memory, given pairs of inputs and labels; see `audit_groups`.

    Args:
        model: a classifier: inputs -> logits [n, classes], or a single logit [n] for two classes.
        members: training examples: (inputs [n, ...], labels [n]) as tensors or arrays, or a dataset of pairs. Inputs
            are preprocessed as for the model; labels are classes from 0, as whole numbers of any type or one-hot.
        non_members: examples outside the training set.
        population: public examples in neither group, which some attacks need.
        settings: settings of the audit; single options by name, such as `split="random"`, replace its fields.
        bank: answers of shadow models.
        transcript: of the training, by `read_transcript`, for attacks that read updates.
        accept: kinds of pre-flight stops to ignore, such as chance.
        report: called with each remark of the pre-flight, and with the name of each attack as it begins.
        **options: fields of `AuditSettings`.

    Raises:
        StoppedError: the pre-flight finds that an audit would be meaningless.
        ValueError: invalid examples or settings, or examples on another device than the model.
    """
    audit_settings = replace(settings or AuditSettings(), **options)
    groups: dict[str, Examples] = {}
    for name, pair in (("members", members), ("non_members", non_members), ("population", population)):
        if pair is not None:
            groups[name] = _examples(name, pair)
    shapes = {name: tuple(group.inputs.shape[1:]) for name, group in groups.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"all groups must have inputs of one shape, got {shapes}")
    first_tensor = next(itertools.chain(model.parameters(), model.buffers()), groups["members"].inputs)
    refuse_other_device(first_tensor.device, "the model", **{name: group.inputs for name, group in groups.items()})
    # Single precision: half precision rounds gradients, and some operations do not support it.
    own = copy.deepcopy(model).float().eval()
    together = Groups(members=groups["members"], non_members=groups["non_members"], population=groups.get("population"))
    looked = preflight(own, together, delta=audit_settings.delta_of_bounds, level=audit_settings.level, accept=accept)
    refuse_stops(looked.remarks)
    for line in sentences(looked.remarks):
        report(line)
    audited = Audited(
        model=looked.model,
        members=together.members,
        non_members=together.non_members,
        population=together.population,
        classes=looked.classes,
    )
    return audit_groups(audited, audit_settings, shift=looked.shift, bank=bank, transcript=transcript, report=report)


def _examples(name: str, data: LabelledData) -> Examples:
    inputs, labels = as_tensors(_dataset(name, data), name, None)
    if inputs.dtype in (torch.bfloat16, torch.float16, torch.float64):
        inputs = inputs.float()
    if not inputs.is_floating_point():
        raise ValueError(
            f"inputs of {name} must be finite floats, as the model is fed, got {inputs.dtype}; where it is fed bytes "
            "as fractions, divide them by 255"
        )
    if inputs.ndim < 2 or not bool(inputs.isfinite().all()):
        fault = f"shape {list(inputs.shape)}" if inputs.ndim < 2 else "NaN or infinite ones"
        raise ValueError(f"inputs of {name} must be finite floats [n, ...], as the model is fed, got {fault}")
    plain = labels.detach().cpu()
    plain = plain.float() if plain.dtype == torch.bfloat16 else plain  # NumPy has no bfloat16
    classes = torch.from_numpy(whole_labels(name, plain.numpy())).to(inputs.device)
    return Examples(ids=content_ids(inputs, classes).to(inputs.device), inputs=inputs.detach(), labels=classes)


def _dataset(name: str, data: LabelledData) -> LabelledData:
    """Returns the dataset of a loader that yields each of its examples once, unchanged, in any order."""
    if not isinstance(data, DataLoader):
        return data
    whole = type(data.sampler) is SequentialSampler or (
        type(data.sampler) is RandomSampler and not data.sampler.replacement
    )
    if whole and data.collate_fn is default_collate and len(data.sampler) == len(data.dataset):  # pyright: ignore[reportArgumentType]  samplers of these kinds know it
        return data.dataset
    raise ValueError(
        f"{name} must be a dataset or tensors, got a DataLoader with a sampler or a collate_fn of its own; give the "
        "examples that it takes as (inputs, labels)"
    )


def audit_groups(
    audited: Audited,
    settings: AuditSettings,
    *,
    shift: Shift | None = None,
    bank: AnsweredBank | None = None,
    transcript: WatchedTranscript | None = None,
    refuted: Sequence[str] = (),
    report: Callable[[str], None] = lambda name: None,
) -> ModelAudit:
    """Audits a finished model.

    Args:
        audited: the model and its candidates.
        settings: of the audit.
        shift: distribution shift between members and non-members, if it is known already.
        bank: answers of shadow models; None for none.
        transcript: of the training, for attacks that read updates; None for none.
        refuted: sentences on evidence that refutes the claim already, as from a transcript.
        report: called with the name of each attack as it begins.

    Returns:
        The result of the audit.

    Raises:
        ValueError: an unknown attack, or shadow models whose answers have another form.
    """
    known = [*final_model_attacks(), *([] if transcript is None else transcript_attacks())]
    outcomes = _run_all(audited, settings, known, bank, transcript, report)
    shift = shift_between(audited.members, audited.non_members) if shift is None else shift
    outcomes = unless_proved(outcomes, settings.split, shift)
    members = audited.members.ids.cpu().numpy()
    claim = settings.claim
    allowed = {} if claim is None else allowed_by(claim.trade_off)
    by = tuple(filter(None, (strongest(outcomes, metric, allowed.get(metric)) for metric in COMPARED)))
    bound = epsilon_bound(
        outcomes,
        members,
        delta=settings.delta_of_bounds,
        level=settings.level,
        split=settings.split,
        claim=None if claim is None else claim.of_replacement,
    )
    if shift.found and isinstance(bound, EpsilonBound) and bound.split == "random":
        # The data contradict the statement that the split was random.
        bound = "members and non-members are told apart without the model, so the split was not drawn at random"
    shared = _attack_gradients(audited, settings, report)
    accuracy = {
        name: score_utility(logits_of(audited.model, group.inputs), group.labels)["accuracy"]
        for name, group in (("members", audited.members), ("non_members", audited.non_members))
    }
    least = _detectable(outcomes)
    decided = verdict(
        by,
        bound,
        shift,
        # Without duplicates: a transcript's sentences include the claim's own errors.
        list(dict.fromkeys([*refuted, *(claim.errors if claim else ())])),
        least,
        backwards(outcomes, members, least),
        right_answers(outcomes, members),
        _weak(outcomes, known),
        why_tied(outcomes, len(members), least),
    )
    return ModelAudit(
        audited=audited,
        settings=settings,
        outcomes=outcomes,
        strongest=by,
        bound=bound,
        shift=shift,
        exposure=_exposed(audited, outcomes, decided.by or by[0].attack) if by else None,
        accuracy=accuracy,
        verdict=_with_accuracy(decided, accuracy),
        **shared,
    )


def _run_all(
    audited: Audited,
    settings: AuditSettings,
    known: Sequence[str],
    bank: AnsweredBank | None,
    transcript: WatchedTranscript | None,
    report: Callable[[str], None],
) -> tuple[AttackOutcome, ...]:
    """Runs the chosen membership attacks, on the model or on the transcript; all known ones if none are chosen."""
    chosen = [(name, {}) for name in known] if settings.attacks is None else list(settings.attacks)
    for name, _ in chosen:
        if name not in known and name not in catalog.names("attacks"):
            raise ValueError(no_such("attack", name, known))
    if bank is not None:
        candidates = join(audited.members, audited.non_members)
        refuse_other_answers(answers(audited.model, candidates), candidates, bank, audited.classes)
    on_steps = [] if transcript is None else transcript_attacks()
    common: dict[str, Any] = {"delta": settings.delta_of_bounds, "seed": settings.seed}
    outcomes: list[AttackOutcome] = []
    for attack in chosen:
        report(attack[0])
        if transcript is not None and attack[0] in on_steps:
            outcomes += run_on_transcript(audited, transcript, [attack], claim=settings.claim, **common)
        else:
            outcomes += run_attacks(audited, [attack], bank=bank, **common)
    return tuple(outcomes)


def _exposed(audited: Audited, outcomes: Sequence[AttackOutcome], attack: str) -> Exposure:
    """Returns the exposure of single members and classes by an attack that ran."""
    leading = next(outcome for outcome in outcomes if outcome.name == attack)
    groups = (audited.members, audited.non_members)
    labels = {int(i): int(y) for g in groups for i, y in zip(g.ids.tolist(), g.labels.tolist(), strict=True)}
    return exposure(leading, audited.members.ids.cpu().numpy(), labels)


def _attack_gradients(audited: Audited, settings: AuditSettings, report: Callable[[str], None]) -> dict[str, Any]:
    """Returns the fields of `ModelAudit` on gradients of single members that the model's architecture would share."""
    if not settings.gradients:
        return {"ranks": "not asked for"}
    report("gradients")
    equations = ranks(audited.model, tuple(audited.members.inputs.shape[1:]), seed=settings.seed)
    plain = catalog.defense(BASELINE).with_noise(0.0)
    inputs, attacked = shared_gradients(audited, plain, gradient_attacks(), images=settings.images, seed=settings.seed)
    return {"ranks": equations, "shared": tuple(attacked), "shared_inputs": inputs}


def _weak(outcomes: Sequence[AttackOutcome], known: Sequence[str]) -> str:
    """Returns the count of attacks that ran, as "3 of 10 attacks", if none had shadow models; empty otherwise."""
    ran = [outcome for outcome in outcomes if outcome.scores is not None]
    if any("SHADOWS" in outcome.requires.knows for outcome in ran):
        return ""
    return f"{len(ran)} of {len(known)} attacks"


def _with_accuracy(verdict: AuditVerdict, accuracy: Mapping[str, Metric]) -> AuditVerdict:
    """Adds the model's accuracy to "no leak found", since preprocessing unlike the training's hides leaks."""
    inside, outside = accuracy["members"].value, accuracy["non_members"].value
    if verdict.word != "no leak found" or inside is None or outside is None:
        return verdict
    caveat = (
        f"The model is right on {inside:.1%} of members and {outside:.1%} of non-members; where its training had other "
        "numbers, it was fed otherwise, and this says nothing."
    )
    return replace(verdict, sentence=f"{verdict.sentence} {caveat}")


def gradient_attacks() -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the reconstruction attacks of the quick suite, which are cheap, with its settings."""
    from ...suite import suite as suites

    attacks = suites.load("quick").attack_grid()
    return [
        (attack.name, attack.settings) for attack in attacks if catalog.attack(attack.name).kind == "reconstruction"
    ]


def _detectable(outcomes: Sequence[AttackOutcome]) -> float:
    """Returns the AUC that would have shown a leak in four audits of five, on the half that is reported."""
    details = [AucDetail.of(outcome.metrics["auc"].detail) for outcome in outcomes if "auc" in outcome.metrics]
    whole = max((detail.detectable for detail in details if detail.detectable is not None), default=1.0)
    return min(1.0, 0.5 + math.sqrt(2) * (whole - 0.5))  # from all candidates to half of them


__all__ = ["AuditSettings", "ModelAudit", "audit_groups", "audit_model"]
