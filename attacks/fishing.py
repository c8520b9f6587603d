"""Fishing for user data: a last layer under which a single example of a batch keeps a gradient.

Wen, Geiping, Fowl, Goldblum & Goldstein, "Fishing for User Data in Large-Batch Federated Learning via Gradient
Magnification", ICML 2022. Class fishing: the last layer has weights for a class c alone, and so large biases for all
others that p_c is 0; the gradient that reaches the layers before it, (p_c - y_c) W_c, is then that of the examples of c
alone. Feature fishing: the logit of c is beta (u f - theta) for features f, so that examples of c above theta are
classified with certainty, and have no gradient either; theta is lowered or raised, model by model, until one example
is left. It is inverted as a batch of one by `bias_division`.

Deviation: u is the ridge regression of class c on the features of public examples instead of a single feature, because
examples of other classes must stay below theta. Without noise an example is known to be alone by the rank of the first
layer's gradient, so theta is bisected, from the quantile of public examples of c that leaves one. Contributions of
other examples to the first layer are 0 rather than small. So clipping, under which no example outweighs the rest of a
batch, does not bring them back, and only noise hides the example.
Caveat: the labels of the batch are given, and the rarest class is fished for; a server without them would try classes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .bias_division import bias_division
from .core import (
    Access,
    ActiveServer,
    Controls,
    InconsistentObservation,
    Knows,
    NotApplicable,
    Observation,
    Reconstruction,
    attack,
    granted,
    parts_of,
)
from .core.closed_form.last_layer import last_layer

_CERTAIN = 40.0  # difference of logits at which a probability is 0 up to e^-40
_STEPS = 100.0  # part of the spread of scores within which an example is half alive
_RIDGE = 1e-3  # of the regression, relative to the mean square of a feature


@attack(
    access=Access.ACTIVE_SERVER,
    knows=Knows.LABELS | Knows.BATCH_SIZE | Knows.DEFENSE | Knows.POPULATION,
    controls=Controls.MODEL,
)
def fishing(target: ActiveServer, generator: torch.Generator) -> Reconstruction:
    """Sends a last layer under which one example of the rarest class keeps a gradient, and inverts that example.

    Args:
        target: the client, whose network begins and ends with a linear layer; a class with several examples takes as
            many messages as the bisection needs, up to the number allowed.
        generator: source of the random starts of the inversion.

    Returns:
        One image of the batch with its class, as `bias_division` gives it; no image, and `degraded`, where none was
        isolated within the messages allowed.

    Raises:
        NotApplicable: the first or last layer is not linear with a bias, there are no public examples of the class, or
            the release shows no gradient of the first layer.
        RankDeficient: directions are too few to invert an example.
    """
    labels, sent = granted(target.labels), dict(granted(target.parameters))
    weight, bias = last_layer(target.network(), tuple(sent))
    counts = torch.bincount(labels, minlength=target.classes)
    label = int(torch.where(counts > 0, counts, len(labels) + 1).argmin())
    feature = None if counts[label] == 1 else _Feature.of(target, label, int(counts[label]), weight, bias)
    for _ in range(target.calls):
        layer = _of_class(target, label, weight, bias) if feature is None else feature.layer(target, label)
        observed = granted(target.release)(sent | layer, None)
        if not isinstance(observed, Observation):
            raise NotApplicable("the client's examples are not sought here, and its message is none of a batch")
        alone = _as_batch_of_one(observed)
        try:
            return _labelled(bias_division(alone, generator), label)
        except InconsistentObservation:  # several examples are left
            if feature is None:
                raise
            feature = feature.between(feature.lower, feature.threshold)
        except NotApplicable as reason:
            if feature is None or "zero upstream gradient" not in str(reason):
                raise
            feature = feature.between(feature.threshold, feature.upper)
    nothing = torch.zeros(0, *target.input_shape).to(next(iter(sent.values())))
    none = torch.zeros(0, dtype=torch.int64, device=nothing.device)
    return Reconstruction(inputs=nothing, labels=none, objective=1.0, status="degraded")


def _of_class(target: ActiveServer, label: int, weight: str, bias: str) -> dict[str, Tensor]:
    """Returns a last layer under which examples of a class alone send a gradient to the layers before it."""
    parameters, public = granted(target.parameters), granted(target.population).inputs
    rows, biases = torch.zeros_like(parameters[weight]), torch.zeros_like(parameters[bias])
    rows[label] = parameters[weight][label]
    scores = target.logits({**parameters, weight: rows, bias: biases}, public)[:, label]
    biases += _CERTAIN + 2 * float(scores.abs().max())
    biases[label] = 0.0
    return {weight: rows, bias: biases}


@dataclass(frozen=True, kw_only=True)
class _Feature:
    """A score of the last layer's inputs and the threshold below which examples of a class send a gradient.

    Attributes:
        names: of the last layer's weight and bias.
        direction: u, coefficients of the score.
        slope: beta, of the logit in the score.
        threshold: theta.
        lower: threshold below which no example is.
        upper: threshold below which several examples are.
    """

    names: tuple[str, str]
    direction: Tensor
    slope: float
    threshold: float
    lower: float
    upper: float

    @classmethod
    def of(cls, target: ActiveServer, label: int, count: int, weight: str, bias: str) -> "_Feature":
        """Fits the score to public examples; the first threshold leaves one of `count` examples below it on average."""
        public = granted(target.population)
        own = public.labels == label
        if not bool(own.any()):
            raise NotApplicable(f"public examples must be of the class that is fished for, {label}, and none is")
        features = _features(target, public.inputs, weight, bias).double()
        centered, indicator = features - features.mean(dim=0), own.double() - own.double().mean()
        gram = centered.T @ centered
        ridge = _RIDGE * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram)).to(gram)
        direction = torch.linalg.solve(gram + ridge, centered.T @ indicator)
        scores = features @ direction
        least, most = float(scores.min()), float(scores.max())
        spread = max(most - least, 1e-12)
        return cls(
            names=(weight, bias),
            direction=direction,
            slope=_CERTAIN * _STEPS / spread,
            threshold=float(scores[own].quantile(1 / count)),
            lower=least - spread,
            upper=most + spread,
        )

    def between(self, lower: float, upper: float) -> "_Feature":
        """Returns the same score with the threshold in the middle of two others."""
        return replace(self, threshold=(lower + upper) / 2, lower=lower, upper=upper)

    def layer(self, target: ActiveServer, label: int) -> dict[str, Tensor]:
        """Returns the last layer under which examples of a class below the threshold alone send a gradient."""
        weight, bias = self.names
        parameters = granted(target.parameters)
        rows, biases = torch.zeros_like(parameters[weight]), torch.zeros_like(parameters[bias])
        rows[label], biases[label] = (self.slope * self.direction).to(rows), -self.slope * self.threshold
        return {weight: rows, bias: biases}


def _features(target: ActiveServer, inputs: Tensor, weight: str, bias: str) -> Tensor:
    """Returns the inputs of the last layer, [n, width], as logits of last layers that select some of them."""
    parameters = granted(target.parameters)
    rows = parameters[weight]
    classes, width = rows.shape
    parts = []
    for start in range(0, width, classes):
        chosen = torch.zeros_like(rows)
        count = min(classes, width - start)
        chosen[torch.arange(count), start + torch.arange(count)] = 1.0
        logits = target.logits({**parameters, weight: chosen, bias: torch.zeros_like(parameters[bias])}, inputs)
        parts.append(logits[:, :count])
    return torch.cat(parts, dim=1)


def _as_batch_of_one(observed: Observation) -> Observation:
    """Returns a message as one of a single example, whose label is not given."""
    _, shown, _ = parts_of(observed)
    return Observation(**{**shown, "batch_size": 1, "labels": None})


def _labelled(result: Reconstruction, label: int) -> Reconstruction:
    """Returns the result of the inversion under the class that was fished for."""
    return Reconstruction(
        inputs=result.inputs,
        labels=torch.full_like(result.labels, label),
        objective=result.objective,
        restarts=result.restarts,
        status=result.status,
        determined=result.determined,
        expected_error=result.expected_error,
    )
