"""Bias division: the gradient of a first linear layer, divided by that of its bias, is the input.

Phong, Aono, Hayashi, Wang & Moriai, "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", IEEE TIFS
2018, Section 3; for batches, Fowl, Geiping, Czaja, Goldblum & Goldstein, "Robbing the Fed", ICLR 2022, whose pure rows
are found here in an unmodified network. For z = W x + b and one example, [dL/dW | dL/db] is the matrix k (x, 1)^T of
rank 1, in which clipping, learning rate and divisor change k alone.

One example: least squares over the rows, and under noise of a known scale total least squares, because the bias's
gradient is as noisy as the rest. If a mask leaves out entries, rank-1 completion finds the part of the input that the
other entries determine. Coefficients in a basis of this layer alone give a bilinear problem in (k, x). In a batch whose
layer is followed by a ReLU, rows that a single example activates are multiples of that example alone; an example
usually has several such rows, and their ratios are equal.

Deviation: ratios are not averaged over rows, as in much public code: if a bias's gradient is small the noise of its
ratio is large. Inputs from a batch's rows are checked: without noise, a group of rows whose ratio no label explains
belongs to more than one example (with two classes, the mixtures of two rows are equal, too), and is dropped. Under
noise of a known scale the same is done up to its expected residual, and the expected error of an input is reported.
Caveat: the label of an input is found by trying every class, at the cost of a per-example gradient for each.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .core import (
    Access,
    InconsistentObservation,
    Knows,
    Network,
    NotApplicable,
    Observation,
    Operation,
    Reconstruction,
    Structure,
    attack,
    granted,
)
from .core.closed_form.acceptance import EXPONENT
from .core.closed_form.layer_basis import layer_basis
from .core.closed_form.rank_one import bilinear, completed, repeated, standard_errors, total_least_squares
from .core.search.single_example_rows import SingleExampleRows, best_labels, checked_on_own_rows

ESTIMATORS = ("auto", "least_squares", "total_least_squares")
ROUNDING = 1e3
"""Relative difference that is attributed to rounding, in machine epsilons of the update's dtype."""
EXPLAINED = 1e-2
"""Largest residual of a kept input without noise, as a fraction of the release; `ok` requires a smaller residual."""
RELIABLE = 0.1
"""Largest root mean square error expected under the noise for the status `ok`, as a fraction of the input range."""
BY_CHANCE = 5.0
"""Largest excess of a sum of squared residuals over its mean that noise may cause, in standard deviations."""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Released part of [dL/dW | dL/db] of a layer.

    Attributes:
        values: [rows, inputs + 1].
        observed: released entries that share the bias's clip factor.
        std: standard deviations of their noise.
        places: int64, index of each entry in the released vector; -1 if not released.
    """

    values: Tensor
    observed: Tensor
    std: Tensor
    places: Tensor


@dataclass(frozen=True, kw_only=True)
class _SoleInput:
    """Estimated input of a batch of one example.

    Attributes:
        right: the input, flat, [inputs].
        known: bool, entries that the release determines.
        errors: [inputs], standard errors under the noise; None without noise.
        shows: whether the release stands out of the noise and fits one example.
    """

    right: Tensor
    known: Tensor
    errors: Tensor | None
    shows: bool


@attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE | Knows.DEFENSE)
def bias_division(
    target: Observation, generator: torch.Generator, *, estimator: str = "auto", restarts: int = 8
) -> Reconstruction:
    """Divides the gradient of the first linear layer by that of its bias.

    Args:
        target: a shared update and the model it was taken at, whose first layer is linear on the flattened input.
        generator: source of the random starts in a basis.
        estimator: `least_squares`; `total_least_squares`, for noise of a known scale; `auto`: the latter if there is
            noise. In a basis both are the same.
        restarts: largest number of starts of the alternation in a basis.

    Returns:
        Inputs with a mask of their determined entries; undetermined entries are set to the middle of the box. The
        objective is the norm of the residual of the release, relative to the norm of the release. A batch yields the
        inputs that have rows of their own, the best explained first, possibly none. An input is certified if it
        explains its rows (a batch of one: the whole release) up to rounding. Under noise `expected_error` is the error
        that the noise causes, and `ok` allows at most a tenth of the range of inputs. For a batch `ok` also requires
        that every input explains its rows as well as noise and missing entries permit, and that these are small enough
        for a row of several examples to be noticed.

    Raises:
        NotApplicable: the first layer is not linear, has no bias, or has an upstream gradient of or near zero; or the
            release does not show its gradient.
        RankDeficient: a basis has fewer coefficients than the layer has inputs and outputs.
        InconsistentObservation: without noise, no single input gives this update.
        ValueError: a setting out of range.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if restarts < 1:
        raise ValueError(f"restarts must be at least 1, got {restarts}")
    if target.structure is None:
        raise NotApplicable("the structure of the update must be known to read a layer's gradient from it")
    structure, batch_size = granted(target.structure)(), granted(target.batch_size)
    network = structure.known_network()
    first, names = input_layer(network, structure.names)
    if any(part.kind == "directions" and part.of_gradient for part in structure.parts):
        if batch_size > 1:
            raise NotApplicable(f"the batch must be of one example behind a basis, got {batch_size}")
        return _single(target, _from_basis(target, structure, names, generator, restarts), restarts=restarts)
    layer = _observed_layer(target, structure, names)
    if batch_size > 1:
        return _batch(target, layer, network, first, batch_size, generator)
    return _single(target, _from_entries(layer, estimator, target.released.dtype))


def input_layer(network: Network, trained: tuple[str, ...]) -> tuple[Operation, tuple[str, str]]:
    """Returns the linear layer on the flattened input, and the names of its weight and bias.

    Args:
        network: any; only the operations before the layer matter, because each path to the loss goes through its rows.
        trained: names of the parameters that have a gradient.

    Raises:
        NotApplicable: there is none, with the reason.
    """
    reached = {operation.name: operation for operation in network.operations if operation.kind == "input"}
    for operation in network.operations:
        if operation.inputs and operation.inputs[0] in reached:
            if operation.kind in ("flatten", "identity"):
                reached[operation.name] = operation
            # On an input that is not flat, a linear layer has as many input vectors as there are positions.
            elif operation.kind == "linear" and len(reached[operation.inputs[0]].shape) == 1:
                return operation, _parameters_of(operation, network, trained)
    first = next((operation for operation in network.operations if operation.name not in reached), None)
    next_operation = "nothing behind it" if first is None else first.words or first.kind
    raise NotApplicable(f"the first layer must be linear on the flattened input, got {next_operation}")


def _parameters_of(operation: Operation, network: Network, trained: tuple[str, ...]) -> tuple[str, str]:
    words = operation.words or operation.name
    if operation.weight is None or operation.bias is None:
        raise NotApplicable(f"the first layer must have a bias, whose gradient divides, and {words} has none")
    if frozen := [name for name in (operation.weight, operation.bias) if name not in trained]:
        raise NotApplicable(f"the first layer must be trained, and {' and '.join(frozen)} is not")
    users = [user for user in network.operations if operation.weight in (user.weight, user.bias)]
    users += [user for user in network.operations if operation.bias in (user.weight, user.bias)]
    if any(user is not operation for user in users):
        raise NotApplicable(f"the first layer's parameters must be its own, and {words} shares them")
    return operation.weight, operation.bias


def _observed_layer(target: Observation, structure: Structure, names: tuple[str, str]) -> _Layer:
    """Returns [dL/dW | dL/db] of the layer, restricted to entries that share the bias's clip factor."""
    released = target.released.double()
    about = []
    # Indices start at 1, because 0 marks entries that were not released; `plain` has no factors, because they would
    # scale the indices.
    plain = replace(structure, parts=tuple(replace(p, factors=None) for p in structure.parts))
    numbers = torch.arange(1, len(released) + 1, device=released.device, dtype=released.dtype)
    std = granted(target.noise_std).double() / target.expected_batch
    for of, values in ((structure, released), (structure, std), (plain, numbers)):
        gradients = of.gradients(values)
        weight, bias = (gradients[name] for name in names)
        about.append(torch.cat([weight.values, bias.values[:, None]], dim=1))
    gradients = structure.gradients(released)
    group = torch.cat([gradients[names[0]].group, gradients[names[1]].group[:, None]], dim=1)
    # Each part has its own clip factor, so ratios are those of inputs only within a part.
    bias_groups = group[:, -1].unique()
    own = [int(number) for number in bias_groups if number >= 0]
    if not own:
        raise NotApplicable("the gradient of the first layer's bias must be released, and none of it is")
    counts = [int(((group == number) & (group[:, -1:] >= 0)).sum()) for number in own]
    number = own[counts.index(max(counts))]
    observed = group == number
    if not observed[:, :-1].any():
        raise NotApplicable("the first layer's weights must be bounded together with its bias, and none of them is")
    values = torch.where(observed, about[0], 0.0)
    if not (values[:, -1] != 0).any():
        raise NotApplicable(
            "zero upstream gradient: the first layer is dead, or nothing of its bias's gradient is left"
        )
    places = torch.where(observed, about[2].long() - 1, -1)
    return _Layer(values=values, observed=observed, std=about[1].abs(), places=places)


def _from_entries(layer: _Layer, estimator: str, dtype: torch.dtype) -> _SoleInput:
    """Returns the input of an example from entries of its layer."""
    right, known = completed(layer.values, layer.observed)
    noisy = bool((layer.std[layer.observed] > 0).any())
    if not noisy:
        _refuse_underflow(layer, dtype)
        _refuse_other_rank(layer, right, known, dtype)
        return _SoleInput(right=right[:-1], known=known[:-1], errors=None, shows=True)
    std, entries = _with_rounding(layer.std, layer.values, dtype), layer.observed & known
    total, strength = total_least_squares(layer.values, entries, std, right)
    total = total / torch.where(total[-1] == 0, torch.finfo(total.dtype).tiny, total[-1])
    errors, excess = standard_errors(layer.values, entries, std, total)
    if estimator == "least_squares":
        # It takes the bias's gradient for exact, whose noise pulls the others towards 0.
        errors = (errors.square() + (right - total).square()).sqrt()
    else:
        right = total
    return _SoleInput(right=right[:-1], known=known[:-1], errors=errors[:-1], shows=strength > 1 and excess < BY_CHANCE)


def _with_rounding(std: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Raises the noise to at least rounding; entries without noise next to noisy entries get a millionth of it."""
    return std.clamp(min=max(1e-6 * float(std.max()), 16 * torch.finfo(dtype).eps * float(values.abs().max())))


def _refuse_underflow(layer: _Layer, dtype: torch.dtype) -> None:
    """Refuses a gradient so small that its squares are 0 and its entries have lost digits."""
    largest, least = float(layer.values.abs().max()), math.sqrt(torch.finfo(dtype).tiny)
    if largest < least:
        raise NotApplicable(
            f"the first layer's gradient must be above {least:.1g}, where its squares are no numbers of the update's "
            f"format, got {largest:.2g}: the model is certain of the label"
        )


def _refuse_other_rank(layer: _Layer, right: Tensor, known: Tensor, dtype: torch.dtype) -> None:
    """Refuses an update whose rows are no multiples of an input."""
    entries = (layer.observed & known).to(right)
    upstream = (layer.values * entries) @ right / (entries @ right.square()).clamp(min=torch.finfo(right.dtype).tiny)
    missing = (layer.values - torch.outer(upstream, right)) * entries
    apart = float(missing.norm() / (layer.values * entries).norm())
    if apart > (most := ROUNDING * torch.finfo(dtype).eps):
        raise InconsistentObservation(
            "rows of the first layer's gradient must be multiples of one input for a batch of one without noise, and "
            f"they are off by {apart:.2g} of their norm, where rounding is {most:.2g}: is the batch larger?"
        )


def _from_basis(
    target: Observation, structure: Structure, names: tuple[str, str], generator: torch.Generator, restarts: int
) -> _SoleInput:
    """Returns the input of an example from the coefficients of a basis that the layer has for itself."""
    own = layer_basis(structure, names, target.released.double())
    coefficients, weight_basis = own.coefficients, own.of_weight
    rows, columns, _ = weight_basis.shape
    if not coefficients.any():
        raise NotApplicable("zero upstream gradient: the first layer is dead")
    # The back-projection is the matrix itself if the basis is whole; otherwise its top singular pair is a start.
    spectral = torch.linalg.svd(torch.einsum("oik,k->oi", weight_basis, coefficients), full_matrices=False)[2][0]
    low, high = target.input_low, target.input_high
    grey = torch.full_like(spectral, (low + high) / 2)
    drawn = low + (high - low) * torch.rand((restarts, columns), generator=generator, dtype=torch.float64).to(spectral)
    aligned = spectral * (grey.norm() / spectral.norm()) * spectral.sum().sign()
    tried = [aligned, grey, *drawn][:restarts] if restarts > 1 else [aligned]
    std = (granted(target.noise_std).double() / target.expected_batch)[own.places]
    # The relative residual of a fit under noise alone, plus a tenth.
    enough = max(1e-9, 1.1 * float(std.norm() / coefficients.norm()))
    right, error, jacobian = bilinear(coefficients, weight_basis, own.of_bias, tried, enough)
    everything = torch.ones_like(right, dtype=torch.bool)
    if not std.any():
        return _SoleInput(right=right, known=everything, errors=None, shows=error < 1e-6)
    std = _with_rounding(std, coefficients, target.released.dtype)
    # For k squares of noise alone: mean k, variance 2 k.
    energy, count = float((coefficients / std).square().sum()), len(coefficients)
    residual_energy, free = float((error * coefficients.norm() / std.max()).square()), max(1, count - rows - columns)
    shows = energy > count + BY_CHANCE * (2 * count) ** 0.5 and residual_energy <= free + BY_CHANCE * (2 * free) ** 0.5
    errors = torch.linalg.pinv(jacobian / std[:, None], rtol=1e-12).norm(dim=1)
    return _SoleInput(right=right, known=everything, errors=errors[rows:], shows=shows)


def _single(target: Observation, sole_input: _SoleInput, *, restarts: int = 1) -> Reconstruction:
    """Returns the result of a batch of size 1."""
    inputs = _inputs(target, sole_input.right[None], sole_input.known[None])
    everything = torch.ones_like(target.released, dtype=torch.bool)[None]
    labels, unexplained = best_labels(target, inputs, everything)
    objective = float(unexplained[0])
    noisy = bool(granted(target.noise_std).any())
    exact = not noisy and bool(sole_input.known.all()) and objective < _rounding(target)
    off = None if sole_input.errors is None else _root_mean_square(sole_input.errors[None], sole_input.known[None])
    reliable = off is None or float(off[0]) <= RELIABLE * (target.input_high - target.input_low)
    return Reconstruction(
        inputs=inputs,
        labels=labels,
        objective=objective,
        restarts=restarts,
        status="ok" if sole_input.shows and reliable else "degraded",
        certified=torch.tensor([exact], device=inputs.device),
        determined=sole_input.known.view(1, *target.input_shape),
        expected_error=off,
    )


def _root_mean_square(errors: Tensor, known: Tensor) -> Tensor:
    """Returns the root mean square of the errors [n, inputs] over the known entries of each input."""
    return (torch.where(known, errors, 0.0).square().sum(dim=1) / known.sum(dim=1).clamp(min=1)).sqrt()


def _batch(
    target: Observation, layer: _Layer, network: Network, first: Operation, batch_size: int, generator: torch.Generator
) -> Reconstruction:
    """Returns the examples of a batch that have rows of their own."""
    users = [operation for operation in network.operations if first.name in operation.inputs]
    if [operation.kind for operation in users] != ["relu"]:
        kinds = ", ".join(operation.words or operation.kind for operation in users) or "nothing"
        raise NotApplicable(
            f"the first layer must be followed by a ReLU for rows of single examples in a batch, got {kinds}"
        )
    right, known, own, errors = _pure(target, layer)
    std = granted(target.noise_std)
    noisy = bool(std.any())
    inputs = _inputs(target, right, known)
    spread = torch.where(known, errors, torch.inf).view_as(inputs)
    about = checked_on_own_rows(target, inputs, spread, own, std, generator)
    # Rows of several examples can be equal, and no single example explains them.
    order = _best_first(known, about)
    order = order[about[order].fits(max(EXPLAINED, _rounding(target)))]
    order = order[about[order].unclaimed()][:batch_size]
    inputs, known, errors, about = inputs[order], known[order], errors[order], about[order]
    whole = known.all(dim=1)
    off = _root_mean_square(errors, known)
    reliable = about.decided(torch.finfo(target.released.dtype).eps ** EXPONENT) & (
        off <= RELIABLE * (target.input_high - target.input_low)
    )
    certified = whole & (about.unexplained < _rounding(target)) & (not noisy)
    summed = target.simulate(inputs, about.labels).detach() if len(inputs) else torch.zeros_like(target.released)
    return Reconstruction(
        inputs=inputs,
        labels=about.labels,
        objective=float((target.released - summed).norm() / target.released.norm()),
        status="ok" if len(inputs) and bool(reliable.all()) else "degraded",
        certified=certified,
        determined=known.view(len(known), *target.input_shape),
        expected_error=off if noisy else None,
    )


def _best_first(known: Tensor, about: SingleExampleRows) -> Tensor:
    """Orders guesses: partly determined inputs are explained only in part, and come after fully determined inputs."""
    return torch.where(known.all(dim=1), about.unexplained, 2 + about.unexplained).argsort(stable=True)


def _pure(target: Observation, layer: _Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns groups of rows with equal ratios: inputs [n, inputs], their known entries, places [n, m], and errors."""
    bias = layer.values[:, -1]
    variance = layer.std[:, -1].square()
    width = target.input_high - target.input_low
    # Rows whose bias's gradient does not stand out from its noise have ratios of noise.
    usable = layer.observed[:, -1] & (bias != 0) & (bias.square() > 100 * variance)
    values, observed, std = layer.values[usable], layer.observed[usable], layer.std[usable]
    bias = values[:, -1:]
    ratios = torch.where(observed, values / bias, 0.0)[:, :-1]
    noise_all = (std.square() + (values / bias).square() * std[:, -1:].square()) / bias.square()
    noise = noise_all[:, :-1]
    # Ratios that are known to a tenth of the range of inputs separate examples.
    precise = (
        torch.where(observed[:, :-1], noise, 0.0).sum(1) / observed[:, :-1].sum(1).clamp(min=1)
    ).sqrt() < 0.1 * width
    rows = usable.nonzero()[:, 0][precise]
    tolerance = max(1e-6, ROUNDING * torch.finfo(target.released.dtype).eps)
    group = repeated(ratios[precise], observed[precise][:, :-1], noise[precise], tolerance)
    chosen = group[group >= 0].unique()
    mine = (group[None] == chosen[:, None]).to(ratios)  # [groups, rows]
    # Least squares over the rows of a group, pixel by pixel: those of other groups have weight 0.
    own_seen = observed[precise].to(ratios)
    shown = torch.where(observed[precise], values[precise], 0.0)
    above = mine @ (shown * bias[precise])
    below = mine @ (own_seen * bias[precise].square())
    known = (below > 0)[:, :-1]
    right = torch.where(below > 0, above / torch.where(below > 0, below, 1.0), 0.0)[:, :-1]
    # Noise of a row's ratio, weighted as the ratio is: by the square of the bias's gradient.
    varied = mine @ torch.where(observed[precise], bias[precise].square().square() * noise_all[precise], 0.0)
    errors = torch.where(below > 0, varied.sqrt() / torch.where(below > 0, below, 1.0), torch.inf)[:, :-1]
    own = torch.zeros(len(chosen), len(target.released), dtype=torch.bool, device=ratios.device)
    for number, in_group in enumerate(mine > 0):  # groups, about as many as examples
        places = layer.places[rows[in_group]]
        own[number, places[places >= 0]] = True
    return right, known, own, errors


def _inputs(target: Observation, right: Tensor, known: Tensor) -> Tensor:
    """Returns inputs in their shape and box; the middle of the box for unknown entries."""
    low, high = target.input_low, target.input_high
    filled = torch.where(known, right.clamp(low, high), (low + high) / 2)
    return filled.to(target.released.dtype).view(len(right), *target.input_shape).clamp(low, high)


def _rounding(target: Observation) -> float:
    return ROUNDING * torch.finfo(target.released.dtype).eps
