"""Forms in which models answer: logits, probabilities or their logarithms, in a tensor or in an object with one.

Attacks compare answers of the audited model with those of others, so all are brought into one form: logits, of which
logarithms of probabilities are a kind. A binary classifier with one output z has the logits [0, z], whose cross-entropy
is the binary one of z.
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

from defenses.core import tensors_of

from ..observe import logits_of
from .diagnosis import knowledge
from .sources.raw import REGRESSION

Form = Literal["logits", "probabilities", "percentages", "one logit", "one probability"]

_ONE = 5e-3
"""Distance from 1 of a sum of probabilities, which half precision rounds."""

_SINGLE: dict[Form, str] = {"one logit": "logit", "one probability": "probability"}
"""Forms of one number an example, and what the number is."""

_USUAL = (0.01, 10.0)
"""Factors of logits that leave them as they are: an overfitted model is too sure of itself, and often by ten times."""


def form_of(answers: Float[Tensor, "... classes"]) -> Form:
    """Returns the form of answers, judged by all of them: logits do not all add up to 1 by accident."""
    rows = answers.reshape(-1, answers.shape[-1]).double()
    if rows.shape[1] == 1:
        # NaN is in no range.
        shares = len(rows) and bool(((rows >= 0) & (rows <= 1)).all())
        return "one probability" if shares else "one logit"
    if not len(rows) or not bool(rows.isfinite().all()) or float(rows.min()) < 0:
        return "logits"
    sums = rows.sum(1)
    if float((sums - 1).abs().max()) < _ONE:
        return "probabilities"
    return "percentages" if float((sums - 100).abs().max()) < 100 * _ONE else "logits"


def as_logits(answers: Float[Tensor, "... outputs"], form: Form) -> Float[Tensor, "... classes"]:
    """Logits whose softmax they are; a probability of 0 has been rounded, and is taken for the least that is none.

    Args:
        answers: one number an example where the form is that of one, which then has two logits.
        form: of all of them.
    """
    if form == "logits":
        return answers
    if form == "one logit":
        return torch.cat([torch.zeros_like(answers), answers], dim=-1)
    whole = answers.float() if answers.dtype.itemsize < 4 else answers
    shares = torch.cat([1 - whole, whole], dim=-1) if form == "one probability" else whole
    shares = shares / (100 if form == "percentages" else 1)
    return shares.clamp(min=torch.finfo(shares.dtype).tiny).log()


def reading(model: nn.Module, form: Form, factor: float = 1.0) -> nn.Module:
    """A copy of a model that answers with logits, made of one that answers otherwise; names of tensors stay.

    Args:
        model: not changed.
        form: of its answers.
        factor: that logits are multiplied by, positive.
    """
    taken = copy.deepcopy(model)
    taken.register_forward_hook(partial(_as_logits, form=form, factor=factor))
    return taken


def _as_logits(_model: nn.Module, _inputs: Any, outputs: Any, *, form: Form, factor: float) -> Tensor:
    scores = scores_in(outputs)
    # One number an example: [n, 1], or [n], which `squeeze` makes a number of one example.
    logits = as_logits(scores.reshape(-1, 1) if form in _SINGLE else scores, form)
    return logits if factor == 1 else factor * logits


class NoLogits(ValueError):
    """A model that answers with something else than a number for each class, or one for the second of two."""


def scores_in(outputs: Any) -> Tensor:
    """The answers in what a model puts out: a tensor, else what is called logits, else the first matrix or vector.

    Raises:
        TypeError: there is none.
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
    """The positive factor of all logits under which labels are likeliest; 1 where logits are constant or undefined.

    A temperature (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017). It goes by no membership.
    """
    rows = logits.double()
    spread = float((rows - rows.mean(1, keepdim=True)).square().mean().sqrt())
    if not 0 < spread < math.inf:
        return 1.0
    unit = rows / spread

    def loss(exponent: float) -> float:
        return float(nn.functional.cross_entropy(math.exp(exponent) * unit, labels))

    found: Any = optimize.minimize_scalar(loss, bounds=(-7.0, 7.0), method="bounded")
    return math.exp(float(found.x)) / spread


def unusual_factor(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """The likeliest factor of logits that are of another size by far; 1 of those of a usual one."""
    factor = likeliest_factor(logits, labels)
    # A model that knows nothing has no likeliest size.
    if _USUAL[0] <= factor <= _USUAL[1] or not knowledge(logits.argmax(1), labels, logits.shape[1]).known:
        return 1.0
    return factor


def answering_logits(
    model: nn.Module, inputs: Tensor, labels: Int[Tensor, " n"] | None = None
) -> tuple[nn.Module, str]:
    """The model as one that answers with logits, and a sentence on what it answers with; empty for logits.

    Logits of another size by far, as of a last layer that was multiplied by something, are brought to the size at which
    labels are likeliest: a positive factor changes no answer, and must not change what an audit finds.

    Args:
        model: in evaluation mode.
        inputs: as it is fed, of all whom it is asked about: a few might look like probabilities by accident.
        labels: of these, by which sizes are judged; None to leave sizes alone.

    Raises:
        NoLogits: of an answer of another shape.
    """
    # Two, of which one number each is no vector of logits of one example.
    some = inputs[:2]
    with torch.no_grad():
        outputs = model(some)
    plain, scores = isinstance(outputs, Tensor), scores_in(outputs)
    single = scores.is_floating_point() and scores.shape in ((len(some),), (len(some), 1))
    if not single and (scores.ndim != 2 or scores.shape[1] < 2):
        got = f"{list(scores.shape)} of {scores.dtype}".replace("torch.", "")
        raise NoLogits(
            f"model must answer with logits [n, classes], or of two classes with one [n] or [n, 1], got {got} for "
            f"{len(some)} examples"
        )
    said = [] if plain else [f"it answers with {type(outputs).__name__}, of which its logits are taken"]
    if single:
        if labels is not None:
            _refuse_more_than_two(labels)
        answers = logits_of(reading(model, "one logit"), inputs)[:, 1:]
        form = form_of(answers)
        taken = reading(model, form)
        said.append(f"it answers with one number an example, which is taken for the {_SINGLE[form]} of class 1")
    else:
        taken = model if plain else reading(model, "logits")
        answers = logits_of(taken, inputs)
        form = form_of(answers)
        if form != "logits":
            taken = reading(model, form)
            said.append(f"it answers with {form}, whose logarithms are taken for logits")
    logits = as_logits(answers, form)
    if labels is None or int(labels.max()) >= logits.shape[1]:
        return taken, "; ".join(said)
    if (factor := unusual_factor(logits, labels)) != 1:
        taken = reading(model, form, factor)
        said.append(f"its logits are multiplied by {factor:.3g}, the size at which labels are likeliest")
    return taken, "; ".join(said)


def _refuse_more_than_two(labels: Int[Tensor, " n"]) -> None:
    """Raises `NoLogits` for labels that one number an example does not tell apart."""
    low, high = int(labels.min()), int(labels.max())
    if high <= 1:
        return
    way_out = "subtract 1" if (low, high) == (1, 2) else REGRESSION
    raise NoLogits(
        f"labels must be 0 or 1 where the model answers with one number an example, got {low} to {high}; {way_out}"
    )
