"""Robbing the Fed: a first layer whose rows differ in their bias alone sorts the images of a batch into bins.

Fowl, Geiping, Czaja, Goldblum & Goldstein, "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with
Modified Models", ICLR 2022. All rows of a linear layer before a ReLU measure the same number h(x), here the mean pixel,
and their biases are minus the quantiles of h on public examples: row i is active for images with h above its quantile
c_i. The layer behind it treats all rows alike, so that the upstream gradient delta of an image is the same in all of
its active rows. The gradients of two rows i < j then differ by the sum of delta (x, 1) over the images with h in
[c_i, c_j); if that is a single image, the difference of the weights' gradients over that of the biases' is the image.
Clipping multiplies the delta of an image, and cancels in the ratio.

The layer is the network's own first layer if it is linear with a ReLU and a linear layer behind it; else a block of
two linear layers in front of the network, which every client trains with the rest.

Deviation: of masked releases, each bin lies between rows whose bias's gradient is released, and a pixel is known if
rows that release it enclose no other occupied bin. Of projected releases, the gradient is estimated in the span of the
directions; these images are never called reliable. Under noise of a known scale a bin counts as occupied if its bias's
difference exceeds `SIGNIFICANT` standard deviations.
Caveat: two images in a bin give a mixture of both, which lies in the bin, too; the number of bins found tells only
that some images share them.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .core import (
    Access,
    ActiveServer,
    Controls,
    ImprintBlock,
    Knows,
    Network,
    NotApplicable,
    Observation,
    Reconstruction,
    attack,
    granted,
)
from .core.closed_form.layer_rows import LayerRows, layer_rows

SIGNIFICANT = 4.0
"""Standard deviations of noise by which the bias's gradients of two rows must differ for a bin to be occupied."""
ROUNDING = 1e3
"""Relative difference that is attributed to rounding, in machine epsilons of the release's dtype."""
RELIABLE = 0.1
"""Largest root mean square error expected under the noise for the status `ok`, as a fraction of the input range."""


@dataclass(frozen=True, kw_only=True)
class _Bins:
    """Images of occupied bins.

    Attributes:
        images: estimates.
        known: pixels that the release determines.
        errors: standard errors of the pixels under noise; 0 without noise.
        strength: of the bias's difference, over its noise or rounding.
    """

    images: Float[Tensor, "n inputs"]
    known: Bool[Tensor, "n inputs"]
    errors: Float[Tensor, "n inputs"]
    strength: Float[Tensor, " n"]


@attack(
    access=Access.ACTIVE_SERVER,
    knows=Knows.BATCH_SIZE | Knows.DEFENSE | Knows.POPULATION,
    controls=Controls.MODEL,
)
def imprint(target: ActiveServer, generator: torch.Generator, *, bins: int = 64, gain: float = 1.0) -> Reconstruction:
    """Sends a layer of bins, and reads the images of a batch off the differences of its rows' gradients.

    Args:
        target: the client; a single message is asked for.
        generator: source of the layer behind the bins.
        bins: rows of a block in front of the network; a first layer has its own number.
        gain: size of the outputs of the layer behind the bins, relative to those of a usual initialisation.

    Returns:
        An image for each occupied bin, the clearest first, at most as many as the batch has examples, with the pixels
        that the release determines; others are those of the mean public image, and labels, which are not sought, are 0.
        The objective is the fraction of examples without a bin. `degraded` where it is above 0, pixels are unknown,
        directions are too few, or noise of a known scale hides an image.

    Raises:
        NotApplicable: the release shows no gradient of the layer.
        ValueError: a setting out of range.
    """
    if bins < 2 or not gain > 0:
        raise ValueError(f"bins must be at least 2 and gain positive, got {bins} and {gain}")
    sent, public = dict(granted(target.parameters)), granted(target.population).inputs.flatten(1)
    own = _own_layer(target.network(), tuple(sent))
    if own is None:
        inputs = public.shape[1]
        biases, size = _biases(public, bins)
        column = _column(inputs, gain / size, generator).to(public)
        block = ImprintBlock(
            weight=torch.full((bins, inputs), 1 / inputs).to(public),
            bias=biases.to(public),
            back=column[:, None].repeat(1, bins),
            shift=public.mean(dim=0),
        )
        observed = granted(target.release)(sent, block.tensors)
    else:
        weight, bias, behind = own
        rows, inputs = sent[weight].shape
        biases, size = _biases(public, rows)
        column = _column(len(sent[behind]), gain / size, generator)
        sent[weight], sent[bias] = torch.full_like(sent[weight], 1 / inputs), biases.to(sent[bias])
        sent[behind] = column.to(sent[behind])[:, None].repeat(1, rows)
        observed = granted(target.release)(sent, None)
    if not isinstance(observed, Observation):
        raise NotApplicable("the client's examples are not sought here, and its message is none of a batch")
    structure = granted(observed.structure)()
    # A block comes before all other layers.
    names = (structure.names[0], structure.names[1]) if own is None else own[:2]
    std = granted(observed.noise_std).double() / observed.expected_batch
    layer = layer_rows(structure, names, observed.released.double(), std)
    return _result(target, layer, _occupied(layer, torch.finfo(observed.released.dtype).eps))


def _own_layer(network: Network, trained: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Returns weight and bias of the first layer and the weight behind its ReLU; None for other networks."""
    operations = [operation for operation in network.operations if operation.kind not in ("flatten", "identity")]
    if [operation.kind for operation in operations[:4]] != ["input", "linear", "relu", "linear"]:
        return None
    names = operations[1].weight, operations[1].bias, operations[3].weight
    users = [operation for operation in network.operations if {operation.weight, operation.bias} & {*names}]
    if len(users) != 2 or len(operations[1].shape) != 1:
        return None
    return (names[0], names[1], names[2]) if all(name in trained for name in names) else None  # pyright: ignore[reportReturnType] - None is not in `trained`


def _biases(public: Float[Tensor, "n inputs"], rows: int) -> tuple[Float[Tensor, " rows"], float]:
    """Returns minus the quantiles of the mean pixel, and the size of a sum of the rows' activations.

    Args:
        public: flat public examples.
        rows: number of bins.
    """
    measured = public.double().mean(dim=1)
    quantiles = measured.quantile(torch.linspace(0, 1, rows, dtype=torch.float64).to(measured))
    quantiles[0] -= 3 * measured.std()  # below all other examples, too
    summed = (measured[:, None] - quantiles).clamp(min=0).sum(dim=1)
    return -quantiles, float(summed.square().mean().sqrt().clamp(min=1e-12))


def _column(count: int, size: float, generator: torch.Generator) -> Float[Tensor, " count"]:
    """Returns the common column of the layer behind the bins: random, so that no class has the others' gradient."""
    return size * torch.randn(count, generator=generator, dtype=torch.float64)


def _occupied(layer: LayerRows, eps: float) -> _Bins:
    """Returns the images of the bins between rows whose bias's gradients differ.

    Args:
        layer: gradient of the layer; rows in order of their quantiles.
        eps: relative rounding of the release.
    """
    count = len(layer.values)
    # No example is above the last bin: a row of zeros without noise.
    values, variance = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (layer.values, layer.std.square()))
    rounding = ROUNDING * eps * float(layer.values[:, -1].abs().max())
    rows = [*layer.observed[:, -1].nonzero()[:, 0].tolist(), count]
    bins, strength = [], []
    for a, b in pairwise(rows):
        step, noise = float((values[a] - values[b])[-1]), float((variance[a] + variance[b])[-1].sqrt())
        if abs(step) > max(SIGNIFICANT * noise, rounding):
            bins.append((a, b))
            strength.append(abs(step) / max(noise, rounding))
    index, shown = torch.arange(count, device=values.device)[:, None], layer.observed[:, :-1]
    images, known, errors = (values.new_zeros(len(bins), values.shape[1] - 1) for _ in range(3))
    pixels = torch.arange(values.shape[1] - 1, device=values.device)
    for number, (a, b) in enumerate(bins):
        above = torch.where(shown & (index <= a), index, -1).amax(dim=0)
        below = torch.where(shown & (index >= b), index, count).amin(dim=0)
        alone = above >= 0
        for first, last in bins[:number] + bins[number + 1 :]:
            alone &= (last <= above) | (first >= below)
        above = above.clamp(min=0)
        step = (values[a] - values[b])[-1]
        image = (values[above, pixels] - values[below, pixels]) / step
        spread = variance[above, pixels] + variance[below, pixels]
        spread = spread + image.square() * (variance[a] + variance[b])[-1]
        images[number], known[number], errors[number] = image, alone.to(image), spread.sqrt() / step.abs()
    return _Bins(images=images, known=known > 0, errors=errors, strength=values.new_tensor(strength))


def _result(target: ActiveServer, layer: LayerRows, bins: _Bins) -> Reconstruction:
    """Returns the clearest images, with a diagnosis."""
    low, high, batch = target.input_low, target.input_high, granted(target.batch_size)
    public = granted(target.population).inputs
    order = bins.strength.argsort(descending=True, stable=True)[:batch]
    known, mean = bins.known[order], public.mean(dim=0).flatten().to(bins.images)
    images = torch.where(known, bins.images[order], mean).clamp(low, high)
    noisy = bool(layer.std.any())
    errors = (torch.where(known, bins.errors[order], 0.0).square().sum(dim=1) / known.sum(dim=1).clamp(min=1)).sqrt()
    sure = len(order) == batch and layer.whole and bool(known.all()) and bool((errors <= RELIABLE * (high - low)).all())
    shape = (len(order), *target.input_shape)
    return Reconstruction(
        inputs=images.to(public).view(shape).clamp(low, high),
        labels=torch.zeros(len(order), dtype=torch.int64, device=public.device),
        objective=1 - len(order) / batch,
        status="ok" if sure else "degraded",
        determined=known.view(shape),
        expected_error=errors if noisy else None,
    )
