"""Forms in which models answer: logits, probabilities or their logarithms, in a tensor or in an object with one.

Attacks compare answers of the audited model with those of others, so all are brought into one form: logits, of which
logarithms of probabilities are a kind.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from defenses.core import tensors_of

from ..observe import logits_of

Form = Literal["logits", "probabilities", "percentages"]

_ONE = 5e-3
"""How far from 1 probabilities may add up, which half precision rounds."""


def form_of(answers: Float[Tensor, "... classes"]) -> Form:
    """What answers are, by all of them: logits do not all add up to 1 by accident."""
    rows = answers.reshape(-1, answers.shape[-1]).double()
    if not len(rows) or not bool(rows.isfinite().all()) or float(rows.min()) < 0:
        return "logits"
    sums = rows.sum(1)
    if float((sums - 1).abs().max()) < _ONE:
        return "probabilities"
    return "percentages" if float((sums - 100).abs().max()) < 100 * _ONE else "logits"


def as_logits(answers: Float[Tensor, "... classes"], form: Form) -> Float[Tensor, "... classes"]:
    """Logits whose softmax they are; a probability of 0 has been rounded, and is taken for the least that is none."""
    if form == "logits":
        return answers
    whole = answers.float() if answers.dtype.itemsize < 4 else answers
    shares = whole / (1 if form == "probabilities" else 100)
    return shares.clamp(min=torch.finfo(shares.dtype).tiny).log()


class AsLogits(nn.Module):
    """A model that answers with logits, made of one that answers otherwise.

    Attributes:
        model: the other one.
        form: of its answers.
    """

    form: Form

    def __init__(self, model: nn.Module, form: Form) -> None:
        """Wraps a model."""
        super().__init__()
        self.model, self.form = model, form

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [n, classes]."""
        return as_logits(scores_in(self.model(inputs)), self.form)


class NoLogits(ValueError):
    """A model that answers with something else than a number for each of several classes."""


def scores_in(outputs: Any) -> Tensor:
    """The answers [n, classes] in what a model puts out: a tensor, else what is called logits, else the first matrix.

    Raises:
        TypeError: there is none.
    """
    if isinstance(outputs, Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    if isinstance(named, Tensor):
        return named
    for tensor in tensors_of(outputs):
        if tensor.ndim == 2 and tensor.is_floating_point():
            return tensor
    raise TypeError(f"a model must answer with logits, or with an object that holds some, got {type(outputs).__name__}")


def answering_logits(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, str]:
    """The model as one that answers with logits, and a sentence on what it answers with; empty for logits.

    Args:
        model: in evaluation mode.
        inputs: as it is fed, of all whom it is asked about: a few might look like probabilities by accident.

    Raises:
        NoLogits: of an answer of another shape.
    """
    with torch.no_grad():
        told = model(inputs[:1])
    plain = isinstance(told, Tensor)
    taken = model if plain else AsLogits(model, "logits")
    if (scores := scores_in(told)).ndim != 2 or scores.shape[1] < 2:
        raise NoLogits(f"model must answer with logits [n, classes], got {list(scores.shape)} for one example")
    form = form_of(logits_of(taken, inputs))
    said = [] if plain else [f"it answers with {type(told).__name__}, of which its logits are taken"]
    if form != "logits":
        taken = AsLogits(model, form)
        said.append(f"it answers with {form}, whose logarithms are taken for logits")
    return taken, "; ".join(said)
