"""R-GAP: the input of a network from a single example's gradient, by linear equations from the last layer to the first.

Zhu & Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021, Algorithm 1. Going back from the last layer,
the derivatives k of the loss with respect to a layer's output are known, so that the gradient of its weight is linear
in its input, and so is its output. Together these equations determine the input if their rank is full; no search is
needed.

Deviation: any stride, padding, dilation, groups, biases, skip connections whose activation follows the sum (with the
branches solved together if neither is determined alone), average pooling and batch norms in evaluation mode; masks, and
bases of single layers. Padded pixels are removed from the unknowns instead of adding equations. Both roots of the
scalar equation are found, and for three classes or more its solution without labels and under an unknown clip factor.
Normal matrices come from the structure of convolutions, in float64, while the authors' code has dense matrices in
float32. Masked entries of the last layer's gradient are completed from its rank of 1, the logits, and the layer before.
A clip factor that the logit equation leaves open is chosen so that the equations of the other layers agree. A result is
`ok` only if its simulated release, under the given defense, matches the update.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch

from .core import (
    Access,
    InconsistentObservation,
    Knows,
    NotApplicable,
    Observation,
    RankDeficient,
    Reconstruction,
    attack,
    granted,
)
from .core.closed_form.acceptance import ReleaseMatch
from .core.closed_form.recursion.clip_factor import identifiable, sharpest, untold
from .core.closed_form.recursion.invert import TOLERANCE, InvertedInput, inverted_inputs, layers_of
from .core.closed_form.recursion.observed_gradients import LayerGradient, observed_gradients
from .core.closed_form.recursion.walk import Solver
from .core.targets.network import Network

Mode = Literal["single", "combination"]
ClipFactor = Literal["auto", "one", "unknown"]

EXACT = 1e-4
"""Largest relative residual of a layer at which a clip factor of 1 is accepted; float32 stays below."""


@attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE | Knows.DEFENSE)
def r_gap(
    target: Observation,
    generator: torch.Generator,
    *,
    solver: str = "ls",
    mode: str = "single",
    clip_factor: str = "auto",
    allow_min_norm: bool = False,
) -> Reconstruction:
    """Solves for the input, layer by layer from the logits, in closed form.

    Args:
        target: a shared update and the model it was taken at.
        generator: not used: nothing is drawn.
        solver: `ls`: least squares; `gls`: weighted by the variances of the noise and of the following layer; `map`:
            with a Gaussian prior on every layer's input, from random inputs, and a box around the input. Without noise
            all are `ls`.
        mode: `single`: a batch of one example; `combination`: a single input for the whole batch, which mixes them.
        clip_factor: `one`: the gradient was not shortened; `unknown`: it may have been, by a factor that is solved for,
            refused if it cannot be; `auto`: solved for if it can be, else taken for 1, and the result is `degraded` if
            an input of another scale would have been clipped to the same update.
        allow_min_norm: whether a layer whose input is not determined gets the shortest input, and the result is
            `degraded`, instead of an error; `determined` marks the entries of the input that are right all the same:
            none if another layer comes before it.

    Returns:
        The input, clamped to the valid range, and its label, both from the update alone; the relative misfit of its own
        update as objective. `alternatives` has other inputs that explain the update; the range of inputs decides which
        comes first. `ok` means that the input explains the update up to rounding or noise, and that no other input in
        the range does. If the input's scale is undetermined, the result is the largest multiple in the range, and the
        first alternative the input whose gradient was not clipped.

    Raises:
        NotApplicable: a layer, loss, batch or release that the attack does not invert, or one whose digits are lost to
            rounding: by a model certain of the label, or by saturated units.
        RankDeficient: the equations of a layer leave its input open.
        InconsistentObservation: no example gives this update, up to rounding.
    """
    for name, value, known in (
        ("solver", solver, get_args(Solver)),
        ("mode", mode, get_args(Mode)),
        ("clip_factor", clip_factor, get_args(ClipFactor)),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    batch, noise = granted(target.batch_size), granted(target.noise_std)
    if batch != 1 and mode == "single":
        raise NotApplicable(f"the batch must be one example, got {batch}; mode = 'combination' gives one for all")
    structure = granted(target.structure)()
    network = structure.known_network()
    sums = target.released.double() * target.expected_batch
    explained = partial(
        _explanations,
        network,
        observed_gradients(structure, sums, noise.double(), layers_of(network)),
        solver=next(choice for choice in get_args(Solver) if choice == solver),
        clipped={"auto": None, "one": False, "unknown": True}[clip_factor],
        combination=mode == "combination",
        allow_min_norm=allow_min_norm,
        box=(target.input_low, target.input_high),
    )
    try:
        explanations = explained()
    except InconsistentObservation:
        # Equations that rounding may hide are left out only if they disagree: under a mask, each may be needed.
        explanations = explained(rounding=torch.finfo(target.released.dtype).eps)
    if not all(bool(explanation.x.isfinite().all()) for explanation in explanations):
        raise InconsistentObservation("the input must be finite, and the equations give none that is")
    inputs = (
        torch.stack([explanation.x for explanation in explanations])
        .to(target.released)
        .clamp(target.input_low, target.input_high)
    )
    best, labels = inputs[:1], torch.tensor([explanations[0].label], device=target.released.device)
    match = ReleaseMatch.of(target, noise)
    degraded = bool(explanations[0].degraded) or not match.fits(best, labels)
    # Solutions outside of the range do not count; the order of two within it is a guess.
    degraded = (
        degraded or sum(explanation.is_within(target.input_low, target.input_high) for explanation in explanations) > 1
    )
    if not degraded and clip_factor != "one" and match.leaves_scale_open(best, labels):
        degraded, longest = True, match.stretched(best, labels)
        inputs = inputs if longest is None else torch.cat([longest, inputs])
        best = inputs[:1]
    with torch.no_grad():
        residual = target.released - target.simulate(best, labels)
    return Reconstruction(
        inputs=best,
        labels=labels,
        objective=float(residual.norm() / target.released.norm()),
        status="degraded" if degraded else "ok",
        alternatives=inputs[1:] if len(inputs) > 1 else None,
        determined=None if explanations[0].determined is None else explanations[0].determined[None],
    )


def _explanations(
    network: Network, gradients: Mapping[str, LayerGradient], *, clipped: bool | None, **settings: Any
) -> list[InvertedInput]:
    """Returns explanations of a gradient, with a clip factor from other layers if the last does not determine it."""
    noisy = any(float(gradient.std.max()) > 0 for gradient in gradients.values())
    determined = not untold(network, gradients) or not identifiable(network, gradients)
    if clipped is False or determined or noisy or settings["combination"] or settings["allow_min_norm"]:
        return inverted_inputs(network, gradients, clipped=clipped, **settings)
    refused: NotApplicable | InconsistentObservation | None = None
    if clipped is None:
        try:
            explanations = inverted_inputs(network, gradients, clipped=False, **settings)
            if explanations[0].residual < EXACT:
                return explanations
        except (InconsistentObservation, RankDeficient) as error:
            refused = error

    def inverted_by(factor: float, tolerance: float = float("inf")) -> list[InvertedInput]:
        scaled = {name: gradient.scaled(factor) for name, gradient in gradients.items()}
        return inverted_inputs(network, scaled, clipped=False, tolerance=tolerance, **settings)

    factor = sharpest(lambda factor: min(explanation.residual for explanation in inverted_by(factor)))
    try:
        return [replace(explanation, factor=factor) for explanation in inverted_by(factor, TOLERANCE)]
    except (InconsistentObservation, RankDeficient):
        if refused is None:
            raise
        raise refused from None  # the failure on the whole gradient is more informative than that for a tried factor
