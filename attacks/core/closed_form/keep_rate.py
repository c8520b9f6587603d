"""Limit of exact batch recovery: fraction of random updates recovered, by keep rate and batch size, without data.

Random sparsification drops coordinates. A gradient of rank b has only b (m + n - b) degrees of freedom, so up to some
limit all dropped entries follow from the kept entries. The limit is measured: random inputs, a random network with a
hidden layer, a mask that the server knows, no noise.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..targets.network import Network, Operation, ReleasedPart, Structure
from ..targets.observation import Observation
from ..targets.target import Examples
from ..threat_model.attack_errors import NotApplicable
from .exact_batch import recovered_batch
from .sparse_columns import kernels


def recovered_share(
    keeps: Sequence[float],
    batches: Sequence[int],
    *,
    width: int = 200,
    inputs: int = 100,
    trials: int = 5,
    draws: int = 2**14,
    seed: int = 0,
) -> Tensor:
    """Returns the fraction of random updates of which every input is recovered and certified.

    Args:
        keeps: fractions of the coordinates that are released, in (0, 1].
        batches: examples in an update.
        width: neurons of the hidden layer.
        inputs: dimension of an input.
        trials: updates for each pair of keep rate and batch.
        draws: candidate directions for each update; too few underestimate the limit.
        seed: seed of networks, inputs, masks and draws; trials differ in all of these.

    Returns:
        float64 [keeps, batches].

    Raises:
        ValueError: a keep rate outside of (0, 1], or a number below 1.
    """
    if wrong := [keep for keep in keeps if not 0 < keep <= 1]:
        raise ValueError(f"keeps must be in (0, 1], got {wrong[0]}")
    for name, least in (("batches", min(batches, default=0)), ("width", width), ("inputs", inputs), ("trials", trials)):
        if least < 1:
            raise ValueError(f"{name} must be at least 1, got {least}")
    won = [
        sum(_recovered(keep, batch, width, inputs, draws, seed + trial) for trial in range(trials)) / trials
        for keep, batch in itertools.product(keeps, batches)
    ]
    return torch.tensor(won, dtype=torch.float64).view(len(keeps), len(batches))


def _recovered(keep: float, batch: int, width: int, inputs: int, draws: int, seed: int) -> bool:
    update, shared = random_update(batch, width=width, inputs=inputs, keep=keep, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    try:
        reconstruction = recovered_batch(
            update, generator, lambda left, outputs: kernels(left, generator, outputs), budget=draws
        )
    except NotApplicable:
        return False
    # The certificate decides, as it would for an attacker; tests of the attack cover its correctness.
    return (
        reconstruction.certified is not None
        and len(reconstruction.inputs) == len(shared)
        and bool(reconstruction.certified.all())
    )


def random_update(
    batch: int,
    *,
    width: int,
    inputs: int,
    classes: int = 10,
    keep: float = 1.0,
    clip_norm: float | None = None,
    noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Observation, Examples]:
    """Returns an update of a random network with a hidden layer, in closed form, and its standard normal inputs.

    Args:
        batch: number of examples.
        width: neurons of the hidden layer.
        inputs: dimension of an input.
        classes: number of classes of the output.
        keep: probability of each coordinate to be released.
        clip_norm: L2 bound of each example's release; None for none.
        noise: standard deviation on the sums.
        seed: seed of everything.
        dtype: dtype in which gradients are summed and released.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    values = {
        "0.weight": normal(width, inputs) / inputs**0.5,
        "0.bias": 0.1 * normal(width),
        "2.weight": normal(classes, width) / width**0.5,
        "2.bias": 0.1 * normal(classes),
    }
    shapes = tuple(tuple(value.shape) for value in values.values())
    x, labels = normal(batch, inputs), torch.randint(classes, (batch,), generator=generator)
    dim = sum(value.numel() for value in values.values())
    kept = (torch.rand(dim, generator=generator) < keep).nonzero()[:, 0]

    def contributions(x: Tensor, y: Tensor) -> Tensor:
        before = x @ values["0.weight"].T + values["0.bias"]
        hidden = before.relu()
        logits = hidden @ values["2.weight"].T + values["2.bias"]
        top = logits.softmax(dim=1) - torch.eye(classes, dtype=dtype)[y]
        low = (top @ values["2.weight"]) * (before > 0)
        outer = [low[:, :, None] * x[:, None], low, top[:, :, None] * hidden[:, None], top]
        rows = torch.cat([part.flatten(1) for part in outer], dim=1)[:, kept]
        return rows if clip_norm is None else rows * (clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)

    released = contributions(x, labels).sum(dim=0) + noise * normal(len(kept))
    network = _network(values)
    part = ReleasedPart(start=0, stop=len(kept), kind="coordinates", coordinates=kept)
    structure = Structure(network=network, names=tuple(values), shapes=shapes, parts=(part,))
    update = Observation(
        released=released,
        simulate=lambda x, y: contributions(x, y).sum(dim=0),
        contributions=contributions,
        residual=lambda predicted: released - predicted,
        logits=lambda x: (x @ values["0.weight"].T + values["0.bias"]).relu() @ values["2.weight"].T + values["2.bias"],
        input_shape=(inputs,),
        # Practically no normal number leaves this box.
        input_low=-8.0,
        input_high=8.0,
        classes=classes,
        step=0,
        expected_batch=1.0,
        structure=lambda: structure,
    )
    return update, Examples(ids=torch.arange(batch), inputs=x, labels=labels)


def _network(parameters: Mapping[str, Tensor]) -> Network:
    """Returns the graph of a network with a hidden layer of ReLUs, given its parameters by name."""
    width, inputs = parameters["0.weight"].shape
    names = ("input", "0", "1", "2")
    kinds = ("input", "linear", "relu", "linear")
    sizes = (inputs, width, width, len(parameters["2.bias"]))
    operations = tuple(
        Operation(
            name=name,
            kind=kind,
            inputs=names[:place][-1:],
            shape=(size,),
            weight=f"{name}.weight" if kind == "linear" else None,
            bias=f"{name}.bias" if kind == "linear" else None,
            words=f"layer {name}",
        )
        for place, (name, kind, size) in enumerate(zip(names, kinds, sizes, strict=True))
    )
    return Network(operations=operations, parameters=parameters, loss="cross_entropy")
