"""Counts of each class in a batch, from the signs and sizes of the last layer's gradient.

For a linear last layer under cross-entropy the gradient of the bias of class c is u_c = sum_i f_i (p_ic - 1[y_i = c]),
with p_ic the model's probability and f_i the clip factor of example i. Zhao, Mopuri & Bilen, "iDLG: Improved Deep
Leakage from Gradients", 2020 (arXiv:2001.02610), Section 3.1, for one example: only the entry of its label is negative.
For batches sum_i p_ic is estimated by B pbar_c, so that without clipping n_c = B pbar_c - u_c. The logistic loss of a
single logit z is the cross-entropy of the two logits 0 and z.

Rows of the weight's gradient contain the same factor, times the features: (p_c - 1[c = y]) x for one example. Under a
mask they narrow down the possible labels.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..targets.network import Network, Operation, Structure
from ..threat_model.attack_errors import InconsistentObservation, NotApplicable
from .recursion.completion import components


@dataclass(frozen=True, kw_only=True)
class LastLayer:
    """Released part of the gradient of the layer that gives the logits, undivided.

    Attributes:
        weight: [classes, features], 0 if not released.
        weight_observed: mask of its released entries.
        bias: [classes].
        bias_observed: mask of its released entries; all False if the layer has no trained bias.
    """

    weight: Float[Tensor, "classes features"]
    weight_observed: Bool[Tensor, "classes features"]
    bias: Float[Tensor, " classes"]
    bias_observed: Bool[Tensor, " classes"]

    @property
    def observed(self) -> Bool[Tensor, " classes"]:
        """Classes of which anything was released."""
        return self.bias_observed | self.weight_observed.any(dim=1)


def last_layer(structure: Structure, sums: Float[Tensor, " m"]) -> LastLayer:
    """Returns the gradient of a classifier's last layer, as far as it was released.

    Args:
        structure: structure of the update.
        sums: numbers in the order of the released vector, undivided; float64 is kept.

    Returns:
        The layer with a row per class; a single logit of two classes is expanded to two rows of opposite sign.

    Raises:
        NotApplicable: the logits are of no trained linear layer, the loss is another, or its gradient was not released.
    """
    network = structure.known_network()
    operation = _gives_logits(network)
    if network.loss == "other":
        raise NotApplicable("the loss must be cross-entropy for the last layer's gradient to show labels")
    if operation.weight not in structure.names:
        raise NotApplicable(f"the last layer must be trained, and {operation.words or operation.name} is not")
    gradients = structure.gradients(sums)
    weight = gradients[operation.weight]
    bias = gradients.get(operation.bias or "")
    values = weight.values.new_zeros(len(weight.values)) if bias is None else bias.values
    bias_observed = torch.zeros_like(values, dtype=torch.bool) if bias is None else bias.observed
    layer = LastLayer(weight=weight.values, weight_observed=weight.observed, bias=values, bias_observed=bias_observed)
    if not layer.observed.any():
        raise NotApplicable("the last layer's gradient must be released, and none of it is")
    if network.loss == "cross_entropy":
        return layer
    sign = values.new_tensor([-1.0, 1.0])
    return LastLayer(
        weight=sign[:, None] * layer.weight,
        weight_observed=layer.weight_observed.expand(2, -1),
        bias=sign * layer.bias,
        bias_observed=layer.bias_observed.expand(2),
    )


def one_label(layer: LastLayer) -> int:
    """Returns the label of a batch of size 1, without noise: exact, for any features and any clipping.

    Raises:
        NotApplicable: the release leaves several labels possible, or the gradient is 0.
        InconsistentObservation: no single example gives this gradient.
    """
    possible = possible_labels(layer).nonzero()[:, 0]
    if len(possible) == 1:
        return int(possible[0])
    raise NotApplicable(
        f"what was released of the last layer's {len(layer.bias)} rows must tell the label's from the others, and "
        f"{len(possible)} may be it"
    )


def possible_labels(layer: LastLayer) -> Bool[Tensor, " classes"]:
    """Returns the possible labels of a batch of size 1, without noise, for any features and any clipping.

    [dL/dW | dL/db] = f (p - e_y) (x, 1)^T is of rank 1, and p - e_y is negative at the label alone. The bias's gradient
    shows the signs. If it was not released, only the ratios of rows that share released entries are known: the row of
    opposite sign is the label's, and it is the longest, since 1 - p_y is the sum of the others' probabilities; two or
    more rows of equal sign are not the label's. The usual argmin of row sums requires nonnegative features.

    Raises:
        NotApplicable: the gradient is 0, or nothing was released.
        InconsistentObservation: no label is possible.
    """
    shown = torch.cat([layer.weight, layer.bias[:, None]], dim=1)
    observed = torch.cat([layer.weight_observed, layer.bias_observed[:, None]], dim=1)
    if not bool((shown * observed).any()):
        raise NotApplicable(
            "zero gradient of the last layer: the model is certain of the label, or nothing was released"
        )
    classes = len(shown)
    possible = torch.ones(classes, dtype=torch.bool, device=shown.device)
    for component in components(shown, observed):
        negative, positive = component.rows & (component.left < 0), component.rows & (component.left > 0)
        # A zero row that is connected to nonzero rows is not the label's.
        possible &= ~component.rows | negative | positive
        if bool(component.columns[-1] & (component.right[-1] != 0)):
            negative, positive = (negative, positive) if float(component.right[-1]) > 0 else (positive, negative)
            possible &= ~positive
            label = negative
            if int(label.sum()) > 1:
                raise InconsistentObservation(
                    "one entry of the last bias's gradient must be negative for a batch of one, got "
                    f"{int(label.sum())}: is the batch larger, or is there noise?"
                )
        elif bool(negative.any() and positive.any()):
            # Two rows of equal length leave the label open: with two classes, or if all other rows are zero.
            label = component.left.abs() > (1 - 1e-6) * component.left.abs().max()
            same = negative if bool(negative[int(component.left.abs().argmax())]) else positive
            if int(same.sum()) > 1 and int((label & ~same).sum()) == 0:
                raise InconsistentObservation(
                    "one row of the last layer's gradient must be opposed to all others for a batch of one, got "
                    f"{int(same.sum())} of {int(component.rows.sum())}: is the batch larger, or is there noise?"
                )
        else:
            if int((negative | positive).sum()) > 1:
                possible &= ~(negative | positive)
            continue
        if bool(label.any()):
            possible &= label
    if not bool(possible.any()):
        raise InconsistentObservation(
            "one row of the last layer's gradient must be opposed to all others for a batch of one, got none: is the "
            "batch larger, or is there noise?"
        )
    return possible


def fixed_label(
    structure: Structure, sums: Float[Tensor, " m"], noise_std: Float[Tensor, " m"], *, level: float = 0.05
) -> int:
    """Returns the label of a batch of size 1, as `one_label`; under noise only if its sign is significant.

    Args:
        structure: structure of the update. Coefficients in a square basis are decoded to coordinates.
        sums: released numbers, undivided, float64.
        noise_std: standard deviation of the noise on them.
        level: probability that noise alone names a label, over all classes.

    Raises:
        NotApplicable: as `last_layer` and `one_label`, or the noise hides the label.
        InconsistentObservation: no single example gives this gradient.
    """
    structure, sums, noise_std = _with_squares_decoded(structure, sums, noise_std)
    layer, noise = last_layer(structure, sums), last_layer(structure, noise_std)
    if not noise.bias.any() and not noise.weight.any():
        return one_label(layer)
    above = normal_quantile(level / len(layer.bias)) * noise.bias.abs()
    named = (layer.bias_observed & (-layer.bias > above)).nonzero()[:, 0]
    if len(named) > 1:
        raise InconsistentObservation(
            f"one entry of the last bias's gradient must be negative beyond noise for a batch of one, got {len(named)}"
        )
    if len(named) == 0:
        raise NotApplicable(
            "the label must show in the last bias's gradient above the noise, and none does; a search can find labels "
            "together with inputs"
        )
    return int(named[0])


def _with_squares_decoded(structure: Structure, sums: Tensor, noise_std: Tensor) -> tuple[Structure, Tensor, Tensor]:
    """Replaces coefficients in square bases by the coordinates that they decode to, and drops other coefficients.

    A square basis is a rotation and hides nothing, such as the basis of a small bias if each parameter tensor has its
    own.
    """
    parts, values, stds, start = [], [], [], 0
    for part in structure.parts:
        shown, noise = sums[part.start : part.stop], noise_std[part.start : part.stop]
        if part.kind == "directions":
            bases = [basis.to(shown) for basis in part.bases]
            widths = [basis.shape[1] for basis in bases]
            spans = zip(part.spans, bases, shown.split(widths), noise.split(widths), strict=True)
            square = [(span, b, s, n) for span, b, s, n in spans if b.shape[0] == b.shape[1]]
            none = [shown.new_zeros(0)]
            positions = [torch.arange(*span, device=shown.device) for span, *_ in square]
            shown = torch.cat([*none, *(b @ s for _, b, s, _ in square)])
            noise = torch.cat([*none, *((b.square() @ n.square()).sqrt() for _, b, _, n in square)])
            coordinates = torch.cat([torch.zeros(0, dtype=torch.int64, device=shown.device), *positions])
            part = replace(part, kind="coordinates", coordinates=coordinates, spans=(), bases=())
        parts.append(replace(part, start=start, stop=start + len(shown)))
        start += len(shown)
        values.append(shown)
        stds.append(noise)
    return replace(structure, parts=tuple(parts)), torch.cat(values), torch.cat(stds)


def normal_quantile(level: float) -> float:
    """Returns the value that a standard normal number exceeds with this probability."""
    return float(math.sqrt(2) * torch.erfinv(torch.tensor(1 - 2 * level, dtype=torch.float64)))


def class_sums(
    layer: LastLayer, noise: LastLayer, features: Float[Tensor, " features"] | None
) -> tuple[Float[Tensor, " classes"], Float[Tensor, " classes"], Bool[Tensor, " classes"]]:
    """Returns the sum u of each class, from the bias if it was released and else from the row of the weight.

    A row is about u_c times the mean features of the batch, so u_c is estimated as its least squares coefficient on the
    mean features of public examples. The sums of all classes add up to 0, so a single missing sum follows from the
    others.

    Args:
        layer: last layer of the update.
        noise: standard deviations of its entries.
        features: mean features of public examples; None to use the bias alone.

    Returns:
        u, the standard deviation of its noise, and the mask of classes whose u is known.
    """
    sums, std, known = layer.bias.clone(), noise.bias.clone(), layer.bias_observed.clone()
    if features is not None:
        observed = layer.weight_observed.to(features)
        energy = observed @ features.square()
        # Classes without a released bias entry use their row of the weight.
        rows = ~known & (energy > 0)
        size = energy[rows]
        sums[rows] = (layer.weight @ features)[rows] / size
        std[rows] = ((noise.weight * observed).square() @ features.square())[rows].sqrt() / size
        known |= rows
    if int((~known).sum()) == 1:
        sums = torch.where(known, sums, -sums[known].sum())
        std = torch.where(known, std, std[known].norm())
        known = torch.ones_like(known)
    return sums, std, known


def largest_remainder(expected: Float[Tensor, " classes"], total: int) -> Int[Tensor, " classes"]:
    """Rounds expected counts to whole numbers that add up to `total`: the largest remainders are rounded up.

    Args:
        expected: any finite numbers; negative numbers count as 0, and the rest is scaled to add up to `total`.
        total: at least 0.
    """
    positive = expected.double().clamp(min=0)
    size = positive.sum()
    shares = positive * (total / size) if size > 0 else torch.full_like(positive, total / len(positive))
    # A share of 2.9999999 counts as 3.
    floors = (shares + 1e-9).floor()
    missing = total - int(floors.sum())
    order = (shares - floors).argsort(descending=True, stable=True)
    floors[order[:missing]] += 1
    return floors.long()


def _gives_logits(network: Network) -> Operation:
    by_name = {operation.name: operation for operation in network.operations}
    operation = network.operations[-1]
    while operation.kind == "identity":
        operation = by_name[operation.inputs[0]]
    if operation.kind != "linear":
        raise NotApplicable(
            f"the last layer must be linear for its gradient to show labels, got {operation.words or operation.kind}"
        )
    if operation.weight is None:
        raise NotApplicable("the last layer must have a weight")
    return operation
