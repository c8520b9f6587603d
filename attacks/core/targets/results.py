"""Results of attacks, and their validation before scoring; only the scorers hold the ground truth.

A result is copied into plain tensors before it is compared with the ground truth: a tensor subclass would receive the
truth during the comparison, through `__torch_function__`, and could adapt its values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from ..threat_model.requires import granted
from .target import Target

Status = Literal["ok", "degraded", "failed"]
Dependence = Literal["per_model", "per_step"]


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Inputs that an attacker believes to be in the batch.

    Attributes:
        inputs: [b, *input_shape], floats in model-input units, inside the box of valid inputs; at most as many as the
            batch has examples.
        labels: int64 [b], the labels assumed or recovered.
        objective: the value that the attack minimised, at `inputs`; smaller is a better match by the attacker's own
            measure.
        restarts: number of random starts; this result has the smallest objective among them.
        history: [restarts, iterations], the mismatch over time, or None.
        status: `ok`; `degraded`: the attacker itself can detect that it found no match, or that other inputs match as
            well; `failed`: no finite objective, so `inputs` are only the start.
        certified: bool [b], inputs that the attack proves to be in the batch, by the update alone; None without such a
            proof.
        determined: bool, in the shape of `inputs`: entries that the update determines; the others are guesses. None if
            all are.
        alternatives: [any, *input_shape], other inputs that explain the update as well; never scored, because the
            ground truth would select the best.
        residual_ratio: squared residual of the update, over its expectation at the private data under the noise; below
            1 the noise was fitted, too. None without noise, and if not known.
        expected_error: [b], root mean square error of the determined entries of each input that is expected under noise
            of known scale, in model-input units; infinite if the noise hides the input. None if not computed.
    """

    inputs: Tensor
    labels: Tensor
    objective: float
    restarts: int = 1
    history: Tensor | None = None
    status: Status = "ok"
    certified: Tensor | None = None
    determined: Tensor | None = None
    alternatives: Tensor | None = None
    residual_ratio: float | None = None
    expected_error: Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.ndim < 2 or not self.inputs.is_floating_point() or not self.inputs.isfinite().all():
            raise ValueError(
                "inputs must be finite floats, [batch, *input_shape], "
                f"got {self.inputs.dtype} of shape {list(self.inputs.shape)}"
            )
        if self.labels.shape != self.inputs.shape[:1] or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64, one an input: got {self.labels.dtype} {list(self.labels.shape)} "
                f"for {len(self.inputs)} inputs"
            )
        if not math.isfinite(self.objective) and self.status != "failed":
            raise ValueError(f"objective must be finite unless the status is 'failed', got {self.objective}")
        if self.restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {self.restarts}")
        if self.history is not None and (self.history.ndim != 2 or len(self.history) != self.restarts):
            raise ValueError(
                f"history must be [restarts, iterations] with {self.restarts} restarts, got {list(self.history.shape)}"
            )
        if self.status not in get_args(Status):
            raise ValueError(f"status must be one of {', '.join(get_args(Status))}, got {self.status!r}")
        if self.residual_ratio is not None and not 0 <= self.residual_ratio < math.inf:
            raise ValueError(f"residual_ratio must be finite and at least 0, got {self.residual_ratio}")
        for name, flags, shape in (
            ("certified", self.certified, self.labels.shape),
            ("determined", self.determined, self.inputs.shape),
        ):
            if flags is not None and (flags.dtype != torch.bool or flags.shape != shape):
                raise ValueError(
                    f"{name} must be bool of shape {list(shape)}, got {flags.dtype} of shape {list(flags.shape)}"
                )
        errors = self.expected_error
        if errors is not None and (errors.shape != self.labels.shape or not (errors >= 0).all()):
            raise ValueError(f"expected_error must be at least 0, one an input, got {errors.tolist()}")
        others = self.alternatives
        if others is not None and (others.shape[1:] != self.inputs.shape[1:] or not others.isfinite().all()):
            raise ValueError(
                f"alternatives must be finite and shaped as inputs, [any, *{list(self.inputs.shape[1:])}], "
                f"got {list(others.shape)}"
            )


@dataclass(frozen=True, kw_only=True)
class MembershipScores:
    """Membership scores, a score per candidate; larger: more likely a member.

    Attributes:
        ids: int64 [n], distinct: those of the candidates, all of them, in any order.
        scores: float64 [n], finite.
        exact: whether the test is the most powerful for the attacker's knowledge (Neyman-Pearson), so that its power
            tests the claimed epsilon.
        deterministic: whether the release decides membership without noise; no epsilon bounds such scores.
        dependence: randomness that scores of different candidates share: that of a training run (`per_model`), or of a
            step's noise (`per_step`). A confidence interval over candidates is conditional on it.
    """

    ids: Tensor
    scores: Tensor
    exact: bool
    deterministic: bool = False
    dependence: Dependence = "per_model"

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64:
            raise ValueError(f"ids must be int64, got {self.ids.dtype}")
        if self.ids.ndim != 1 or self.ids.shape != self.scores.shape:
            raise ValueError(f"scores must be one an id, [n]: got {list(self.scores.shape)} for {list(self.ids.shape)}")
        if self.ids.unique().numel() != self.ids.numel():
            raise ValueError("ids must be distinct, got an id twice")
        if self.scores.dtype != torch.float64:
            raise ValueError(f"scores must be float64, got {self.scores.dtype}: rounding makes ties")
        if not self.scores.isfinite().all():
            raise ValueError("scores must be finite, got NaN or infinity")
        if self.dependence not in get_args(Dependence):
            raise ValueError(f"dependence must be one of {', '.join(get_args(Dependence))}, got {self.dependence!r}")


@dataclass(frozen=True, kw_only=True)
class InclusionScores(MembershipScores):
    """Inclusion scores, a score per canary; larger: more likely in the training. Fields as of `MembershipScores`."""


Scores = TypeVar("Scores", bound=MembershipScores)


@dataclass(frozen=True, kw_only=True)
class LabelEstimate:
    """Estimated number of examples of each class in the batch.

    Attributes:
        counts: int64 [classes], with a sum of at most the batch size; less if some labels remain unknown.
        lower: int64 [classes], lower limits, at most `counts`.
        upper: int64 [classes], upper limits, at least `counts`.
        observed: bool [classes], classes about which the update contains information.
        posterior: float64 [classes], probability that the class is in the batch.
        status: `ok`, or `degraded` if no class is named; never `failed`.
    """

    counts: Tensor
    lower: Tensor
    upper: Tensor
    observed: Tensor
    posterior: Tensor
    status: Status = "ok"

    def __post_init__(self) -> None:
        for name in ("counts", "lower", "upper", "observed", "posterior"):
            values, dtype = getattr(self, name), _OF_LABELS.get(name, torch.int64)
            if values.dtype != dtype or values.shape != self.counts.shape or values.ndim != 1:
                raise ValueError(
                    f"{name} must be {dtype} of shape [classes], got {values.dtype} of shape {list(values.shape)}"
                )
        if not ((self.lower >= 0) & (self.lower <= self.counts) & (self.counts <= self.upper)).all():
            raise ValueError("counts must be between lower and upper, which must be at least 0")
        if not ((self.posterior >= 0) & (self.posterior <= 1)).all():
            raise ValueError("posterior must be probabilities")
        if self.status not in ("ok", "degraded"):
            raise ValueError(f"status must be 'ok' or 'degraded', got {self.status!r}")

    @property
    def labels(self) -> Tensor:
        """Labels that were named, in increasing order: int64, at most as many as the batch has examples."""
        return torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(self.counts)


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """Estimated classes of a client's data.

    Attributes:
        scores: float64 [classes], finite; larger: a larger share of the client's examples.
        named: bool [classes], the classes that the attack names as the client's largest; at least one.
    """

    scores: Tensor
    named: Tensor

    def __post_init__(self) -> None:
        if self.scores.dtype != torch.float64 or self.scores.ndim != 1 or not self.scores.isfinite().all():
            raise ValueError(
                f"scores must be finite float64 of shape [classes], got {self.scores.dtype} {list(self.scores.shape)}"
            )
        if self.named.dtype != torch.bool or self.named.shape != self.scores.shape or not self.named.any():
            raise ValueError(
                "named must be bool of the same shape with at least one class, "
                f"got {self.named.dtype} {list(self.named.shape)}"
            )


_OF_LABELS = {"observed": torch.bool, "posterior": torch.float64}


def checked_scores(result: object, ids: Tensor, kind: type[Scores] = MembershipScores) -> Scores:
    """Returns a copy of the scores, of exactly the candidates of the test and in their order.

    Args:
        result: the attack's return value.
        ids: int64 [n] of the candidates, distinct; known to the caller before the attack ran.
        kind: class of the scores.

    Raises:
        TypeError: the result is not scores in plain tensors.
        ValueError: a candidate has no score, or a score has no candidate.
    """
    # Exactly this class: attributes of a subclass may return different values at each access.
    if type(result) is not kind:
        raise TypeError(f"a membership attack must return {kind.__name__}, got {type(result).__name__}")
    scored_ids, scores = _copied("ids", result.ids, ids), _copied("scores", result.scores, ids)
    scored_ids, scores = scored_ids.to(ids.device), scores.to(ids.device)
    # Constructed anew, so that the class's checks apply to the copied values.
    own = kind(
        ids=scored_ids,
        scores=scores,
        exact=bool(result.exact),
        deterministic=bool(result.deterministic),
        dependence=result.dependence,
    )
    unknown, unanswered = int((~torch.isin(scored_ids, ids)).sum()), int((~torch.isin(ids, scored_ids)).sum())
    if unknown or unanswered:
        raise ValueError(
            f"ids must be those of the {len(ids)} candidates, each once, got {len(scored_ids)}: "
            f"{unknown} are of no candidate, and {unanswered} candidates have no score"
        )
    # argsort twice is the rank: the k-th smallest id found belongs to the k-th smallest candidate.
    order = scored_ids.argsort()[ids.argsort().argsort()]
    return kind(
        ids=scored_ids[order],
        scores=scores[order],
        exact=own.exact,
        deterministic=own.deterministic,
        dependence=own.dependence,
    )


def checked_reconstruction(result: object, batch_size: int | None, like: Tensor | None = None) -> Reconstruction:
    """Returns a copy of a reconstruction, of at most as many examples as the batch has.

    Args:
        result: the attack's return value.
        batch_size: number of examples behind the target, known to the attacker or not; None if there is no batch.
        like: a tensor of the target; its class counts as plain, because a device may have a tensor class of its own.

    Raises:
        TypeError: the result is not a reconstruction in plain tensors.
        ValueError: there are more guesses than examples.
    """
    if type(result) is not Reconstruction:
        raise TypeError(f"a reconstruction attack must return Reconstruction, got {type(result).__name__}")
    own = Reconstruction(
        inputs=_copied("inputs", result.inputs, like),
        labels=_copied("labels", result.labels, like),
        objective=float(result.objective),
        restarts=int(result.restarts),
        status=result.status,
        residual_ratio=None if result.residual_ratio is None else float(result.residual_ratio),
        **{name: _copied_if_there(name, getattr(result, name), like) for name in _OPTIONAL},
    )
    # Scoring matches guesses to images by least error, so the ground truth would choose among surplus guesses.
    if batch_size is not None and len(own.inputs) > batch_size:
        raise ValueError(
            f"inputs must be at most as many as the batch has examples, {batch_size}, got {len(own.inputs)}: "
            "the truth would pick the best of them"
        )
    return own


def checked_labels(
    result: object, batch_size: int | None, classes: int | None = None, like: Tensor | None = None
) -> LabelEstimate:
    """Returns a copy of a label estimate, of at most as many examples as the batch has.

    Args:
        result: the attack's return value.
        batch_size: number of examples behind the target; None if there is no batch.
        classes: number of classes of the target; None for any.
        like: as for `checked_reconstruction`.

    Raises:
        TypeError: the result is not an estimate in plain tensors.
        ValueError: there are more labels than examples, or counts of other classes.
    """
    if type(result) is not LabelEstimate:
        raise TypeError(f"a label attack must return LabelEstimate, got {type(result).__name__}")
    names = ("counts", "lower", "upper", "observed", "posterior")
    own = LabelEstimate(**{n: _copied(n, getattr(result, n), like) for n in names}, status=result.status)
    if classes is not None and len(own.counts) != classes:
        raise ValueError(f"counts must be of the {classes} classes, got {len(own.counts)}")
    # A list with every label would overlap with any batch.
    if batch_size is not None and int(own.counts.sum()) > batch_size:
        raise ValueError(
            f"counts must add up to at most the batch's {batch_size} examples, got {int(own.counts.sum())}"
        )
    return own


def checked_class_scores(result: object, classes: int | None = None, like: Tensor | None = None) -> ClassScores:
    """Returns a copy of the scores of a client's classes.

    Args:
        result: the attack's return value.
        classes: number of classes; None for any.
        like: as for `checked_reconstruction`.

    Raises:
        TypeError: the result is not scores in plain tensors.
        ValueError: scores of other classes.
    """
    if type(result) is not ClassScores:
        raise TypeError(f"an attack on a client's classes must return ClassScores, got {type(result).__name__}")
    own = ClassScores(scores=_copied("scores", result.scores, like), named=_copied("named", result.named, like))
    if classes is not None and len(own.scores) != classes:
        raise ValueError(f"scores must be of the {classes} classes, got {len(own.scores)}")
    return own


_OPTIONAL = ("history", "certified", "determined", "alternatives", "expected_error")


def _copied_if_there(name: str, values: object, like: Tensor | None) -> Tensor | None:
    return None if values is None else _copied(name, values, like)


def _copied(name: str, values: object, like: Tensor | None) -> Tensor:
    if not isinstance(values, Tensor) or type(values) not in (Tensor, nn.Parameter, type(like)):
        raise TypeError(f"{name} must be a plain tensor, got {type(values).__name__}")
    # Copied, because the attack may keep its tensor and write into it during scoring. The methods are those of the
    # class, because attributes of the instance may shadow them.
    return Tensor.clone(Tensor.detach(values))


def _expected_scores(target: Target) -> Callable[[object], MembershipScores]:
    ids = granted(target.candidates).ids.clone()
    return lambda result: checked_scores(result, ids)


def _expected_inclusion(target: Target) -> Callable[[object], InclusionScores]:
    ids = granted(target.candidates).ids.clone()
    return lambda result: checked_scores(result, ids, InclusionScores)


def _expected_reconstruction(target: Target) -> Callable[[object], Reconstruction]:
    # The target's batch size, even if the attack may not read it.
    size, like = target.batch_size_shown, getattr(target, "released", None)
    if like is None:  # the message of an active server's client is not there yet
        like = next(iter((getattr(target, "parameters", None) or {}).values()), None)
    shape = getattr(target, "input_shape", None)

    def checked(result: object) -> Reconstruction:
        reconstruction = checked_reconstruction(result, size, like)
        if shape is not None and tuple(reconstruction.inputs.shape[1:]) != tuple(shape):
            raise ValueError(
                f"inputs must have the target's shape [batch, *{list(shape)}], got {list(reconstruction.inputs.shape)}"
            )
        return reconstruction

    return checked


def _expected_labels(target: Target) -> Callable[[object], LabelEstimate]:
    size, like, classes = target.batch_size_shown, getattr(target, "released", None), getattr(target, "classes", None)
    return lambda result: checked_labels(result, size, classes, like)


def _expected_class_scores(target: Target) -> Callable[[object], ClassScores]:
    final = getattr(target, "final", None)
    classes = None if final is None else final.classes
    like = None if final is None or not final.parameters else next(iter(final.parameters.values()))
    return lambda result: checked_class_scores(result, classes, like)


@dataclass(frozen=True, kw_only=True)
class ResultType:
    """Description of a type of result.

    Attributes:
        kind: its name in records.
        result: the class that attacks are annotated to return.
        expected: target -> a check, which copies a result or refuses it. The check is made before the attack runs,
            because the attack may write into its target.
        of_candidates: whether the result has a score per candidate, so that a target without candidates is refused.
    """

    kind: str
    result: type
    expected: Callable[[Target], Callable[[object], Any]]
    of_candidates: bool = False


RESULTS = {
    row.kind: row
    for row in (
        ResultType(kind="membership", result=MembershipScores, expected=_expected_scores, of_candidates=True),
        ResultType(kind="reconstruction", result=Reconstruction, expected=_expected_reconstruction),
        ResultType(kind="labels", result=LabelEstimate, expected=_expected_labels),
        ResultType(kind="client_property", result=ClassScores, expected=_expected_class_scores),
        ResultType(kind="canaries", result=InclusionScores, expected=_expected_inclusion, of_candidates=True),
    )
}
"""Kind -> its row; an attack with another kind of result needs another row."""
