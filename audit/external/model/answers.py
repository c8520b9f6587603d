"""Output formats of models: logits, probabilities or their logarithms, in a tensor or in an object that holds a tensor.

Attacks compare the audited model's answers with those of other models, so all are converted to logits;
log-probabilities are logits already. A binary classifier with a single output z has the logits [0, z], whose
cross-entropy is the binary cross-entropy of z.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from scipy import optimize
from torch import Tensor, nn

from leakbench.defenses.core import tensors_of

from ...targets.observe import logits_of
from ..examples.checked import REGRESSION
from .diagnosis import knowledge

Form = Literal[
    "logits",
    "probabilities",
    "percentages",
    "shares",
    "odds",
    "logits of each class",
    "binary logarithms",
    "decimal logarithms",
    "negative logarithms",
    "one logit",
    "one probability",
]
"""`shares` are probabilities times a constant; `logits of each class` are log(p / (1 - p))."""

_ONE = 5e-3
"""Relative tolerance on a sum of probabilities, which half precision rounds."""

_SINGLE: dict[Form, str] = {"one logit": "logit", "one probability": "probability"}
"""Formats with a single number per example, and the kind of number."""

_USUAL = (0.01, 10.0)
"""Range of the likeliest factor in which logits are not rescaled: overfitted models are overconfident, often by a
factor of ten."""


def form_of(answers: Float[Tensor, "... classes"]) -> Form:
    """Returns the format of answers, judged on all of them: the logits of all examples do not sum to 1 by accident."""
    rows = answers.reshape(-1, answers.shape[-1]).double()
    if rows.shape[1] == 1:
        # NaN compares false.
        shares = len(rows) and bool(((rows >= 0) & (rows <= 1)).all())
        return "one probability" if shares else "one logit"
    if not len(rows) or not bool(rows.isfinite().all()):
        return "logits"

    def whole(values: Tensor, size: float = 1.0) -> bool:
        return float((values.sum(1) - size).abs().max()) < size * _ONE

    if float(rows.min()) >= 0:
        if whole(rows):
            return "probabilities"
        if whole(rows, 100.0):
            return "percentages"
        if whole(rows / (1 + rows)):
            return "odds"
        if whole((-rows).exp()):
            return "negative logarithms"
        size = float(rows.sum(1).mean())
        return "shares" if len(rows) > 1 and size > 0 and whole(rows, size) else "logits"
    if float(rows.max()) <= 0:
        if whole(2**rows):
            return "binary logarithms"
        if whole(10**rows):
            return "decimal logarithms"
    # With two classes, any logits that sum to 0 fit this format as well, and would be halved.
    return "logits of each class" if rows.shape[1] > 2 and whole(rows.sigmoid()) else "logits"


def refuse_rounded(answers: Float[Tensor, "... outputs"], form: Form) -> None:
    """Refuses answers rounded to so few digits that most of the information for attacks is lost.

    Labels alone, which are 0 and 1, pass: label-only attacks read them.

    Raises:
        NoLogits: whole numbers, or probabilities of three digits or fewer.
    """
    values = answers.double().flatten()
    shown = values.unique()
    if len(shown) <= 2 or not bool(values.isfinite().all()):
        return
    if form in ("probabilities", "one probability", "percentages"):
        digits = values / (100 if form == "percentages" else 1) * 1000
        precision = "of three digits or fewer"
    else:
        digits, precision = values, "of whole numbers"
    # Large floats have no fractional digits, and tiny ones all round to a single number.
    whole = digits.round()
    if float((digits - whole).abs().max()) < 1e-3 and len(whole.unique()) > 2 and float(whole.abs().max()) < 2**20:
        raise NoLogits(
            f"model must answer with more digits, got {form} {precision}, of which attacks learn little: give the "
            "answers before they are rounded, or audit labels alone"
        )


def as_logits(answers: Float[Tensor, "... outputs"], form: Form) -> Float[Tensor, "... classes"]:
    """Converts answers to logits; a probability of 0 was rounded, and becomes the smallest positive normal number.

    Args:
        answers: single numbers in the formats of a single output, which become two logits.
        form: format of all answers.
    """
    if form == "logits":
        return answers
    whole = answers.float() if answers.dtype.itemsize < 4 else answers
    tiny = torch.finfo(whole.dtype).tiny
    match form:
        case "one logit":
            return torch.cat([torch.zeros_like(answers), answers], dim=-1)
        case "one probability":
            # Rounding near 1 is half the precision of the type, so 1 - p is at least that.
            complement = (1 - whole).clamp(min=torch.finfo(answers.dtype).eps / 2)
            return torch.cat([complement, whole.clamp(min=tiny)], dim=-1).log()
        case "odds":
            return (whole / (1 + whole)).clamp(min=tiny).log()
        case "logits of each class":
            return nn.functional.logsigmoid(whole)
        case "binary logarithms":
            return whole * math.log(2)
        case "decimal logarithms":
            return whole * math.log(10)
        case "negative logarithms":
            return -whole
        case _:
            return (whole / whole.sum(-1, keepdim=True).clamp(min=tiny)).clamp(min=tiny).log()


def reading(model: nn.Module, form: Form, factor: float = 1.0) -> nn.Module:
    """Returns a copy of a model that answers with logits; names of tensors stay.

    Args:
        model: left unchanged.
        form: format of its answers.
        factor: positive factor of the logits.
    """
    wrapped = copy.deepcopy(model)
    wrapped.register_forward_hook(partial(_as_logits, form=form, factor=factor))
    return wrapped


def _as_logits(_model: nn.Module, _inputs: Any, outputs: Any, *, form: Form, factor: float) -> Tensor:
    scores = scores_in(outputs)
    # A single output per example: [n, 1], [n], or a scalar if `squeeze` met a single example.
    logits = as_logits(scores.reshape(-1, 1) if form in _SINGLE else scores, form)
    return logits if factor == 1 else factor * logits


class NoLogits(ValueError):
    """Raised for models whose answers are neither a number per class nor a single number for two classes."""


def scores_in(outputs: Any) -> Tensor:
    """Returns the answers in a model's output: a tensor, else its `logits`, else the first matrix or vector.

    Raises:
        TypeError: the output holds none of these.
    """
    if isinstance(outputs, Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    if isinstance(named, Tensor):
        return named
    for axes in (2, 1):
        for tensor in tensors_of(outputs):
            if tensor.ndim == axes and tensor.is_floating_point():
                return tensor
    raise TypeError(f"a model must answer with logits, or with an object that holds some, got {type(outputs).__name__}")


def likeliest_factor(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Returns the positive factor of all logits that makes labels likeliest; 1 for constant or undefined logits.

    This is temperature scaling (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017), independent of
    membership.
    """
    rows = logits.double()
    spread = float((rows - rows.mean(1, keepdim=True)).square().mean().sqrt())
    if not 0 < spread < math.inf:
        return 1.0
    unit = rows / spread

    def loss(exponent: float) -> float:
        return float(nn.functional.cross_entropy(math.exp(exponent) * unit, labels))

    optimum: Any = optimize.minimize_scalar(loss, bounds=(-7.0, 7.0), method="bounded")
    return math.exp(float(optimum.x)) / spread


def unusual_factor(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Returns the likeliest factor of logits whose scale is far from usual; 1 for a usual scale."""
    factor = likeliest_factor(logits, labels)
    # A model at chance has no likeliest scale.
    if _USUAL[0] <= factor <= _USUAL[1] or not knowledge(logits.argmax(1), labels, logits.shape[1]).known:
        return 1.0
    return factor


def answering_logits(
    model: nn.Module, inputs: Tensor, labels: Int[Tensor, " n"] | None = None
) -> tuple[nn.Module, str]:
    """Returns a model that answers with logits, and a sentence on the original format; empty for logits.

    Logits of a very unusual scale, as of a last layer that was multiplied, are rescaled to make labels likeliest: a
    positive factor changes no prediction, and must not change the result of an audit.

    Args:
        model: in evaluation mode.
        inputs: of all candidates, preprocessed: the logits of a few might look like probabilities by accident.
        labels: of these inputs, to judge scales; None to leave scales alone.

    Raises:
        NoLogits: an answer of another shape, or rounded to few digits.
    """
    # Two examples, so that shape [2] means a number per example, not the logits of a single example.
    probe = inputs[:2]
    with torch.no_grad():
        outputs = model(probe)
    plain, scores = isinstance(outputs, Tensor), scores_in(outputs)
    single = scores.is_floating_point() and scores.shape in ((len(probe),), (len(probe), 1))
    if not single and (scores.ndim != 2 or scores.shape[1] < 2):
        form_of_scores = f"{list(scores.shape)} of {scores.dtype}".replace("torch.", "")
        raise NoLogits(
            f"model must answer with logits [n, classes], or of two classes with one [n] or [n, 1], got "
            f"{form_of_scores} for {len(probe)} examples"
        )
    remarks = [] if plain else [f"it answers with {type(outputs).__name__}, of which its logits are taken"]
    if single:
        if labels is not None:
            _refuse_more_than_two(labels)
        answers = logits_of(reading(model, "one logit"), inputs)[:, 1:]
        form = form_of(answers)
        wrapped = reading(model, form)
        remarks.append(f"it answers with one number an example, which is taken for the {_SINGLE[form]} of class 1")
        refuse_rounded(answers, form)
    else:
        wrapped = model if plain else reading(model, "logits")
        answers = logits_of(wrapped, inputs)
        form = form_of(answers)
        refuse_rounded(answers, form)
        if form != "logits":
            wrapped = reading(model, form)
            remarks.append(f"it answers with {form}, which are read as logarithms of probabilities")
    logits = as_logits(answers, form)
    if labels is None or int(labels.max()) >= logits.shape[1]:
        return wrapped, "; ".join(remarks)
    if (factor := unusual_factor(logits, labels)) != 1:
        wrapped = reading(model, form, factor)
        remarks.append(f"its logits are multiplied by {factor:.3g}, the size at which labels are likeliest")
    return wrapped, "; ".join(remarks)


def _refuse_more_than_two(labels: Int[Tensor, " n"]) -> None:
    """Raises `NoLogits` for labels that a single output does not distinguish."""
    low, high = int(labels.min()), int(labels.max())
    if high <= 1:
        return
    way_out = "subtract 1" if (low, high) == (1, 2) else REGRESSION
    raise NoLogits(
        f"labels must be 0 or 1 where the model answers with one number an example, got {low} to {high}; {way_out}"
    )
