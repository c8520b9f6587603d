"""What gradient and weights say about the input of each layer of CNN6 and CNN6-d: the ranks that decide over R-GAP."""

from functools import cache

import numpy as np
import pytest
import torch

from leakbench.benchmarks import models

from ..parameters import subtests
from . import ranks

# Unknowns, rows of W, rows of K, rank of the stacked system; of the first layer to the last convolution.
SYSTEMS = {
    "cnn6": [
        (3072, 3468, 576, 3072),
        (3468, 2916, 3888, 3468),
        (2916, 2916, 11664, 2916),
        (2916, 2916, 11664, 2916),
        (2916, 1600, 20736, 2916),
        (1600, 3200, 73728, 1600),
    ],
    "cnn6_d": [
        (3072, 3468, 576, 3072),
        (3468, 1620, 2160, 3188),
        (1620, 2916, 6480, 1620),
        (2916, 2916, 11664, 2916),
        (2916, 1600, 20736, 2916),
        (1600, 3200, 73728, 1600),
    ],
}
EACH = [(name, layer) for name, systems in SYSTEMS.items() for layer in range(1, len(systems) + 1)]


@cache
def uses(name):
    coins = torch.Generator().manual_seed(0)
    image = torch.rand(3, 32, 32, generator=coins, dtype=torch.float64)
    model = models.build(name, input_shape=(3, 32, 32), classes=1, seed=0).double()
    return ranks.observed(model, image, label=1.0)


def system(name, layer):
    return uses(name)[layer - 1], SYSTEMS[name][layer - 1]


@subtests("name, layer", EACH)
def test_the_system_of_a_layer_has_the_stated_size(name, layer):
    use, (unknowns, rows_of_weights, rows_of_gradient, _) = system(name, layer)
    assert ranks.of_weights(use).shape == (rows_of_weights, unknowns)
    assert len(ranks.of_gradient(use).toarray()) * len(use.inputs) == rows_of_gradient


# Layer 2 of `cnn6_d` fails: `tests/attacks/test_r_gap.py` asks the attack itself, and the bound below is tight there.
@pytest.mark.parametrize(
    ("name", "layer"),
    [pytest.param(*which, marks=[] if which == ("cnn6_d", 3) else [pytest.mark.slow]) for which in EACH],
)
def test_the_system_of_a_layer_has_the_stated_rank(name, layer):
    use, (unknowns, _, _, rank) = system(name, layer)
    assert ranks.rank_of_system(use) == rank
    assert (unknowns - rank == 280) == ((name, layer) == ("cnn6_d", 2))


def test_the_bound_of_the_rank_is_tight_at_the_layer_that_fails():
    """rank A <= rank W + channels rank K0 - filters**2, although 3780 rows would be enough for 3468 unknowns."""
    use, (unknowns, rows_of_weights, rows_of_gradient, rank) = system("cnn6_d", 2)
    assert rows_of_weights + rows_of_gradient > unknowns
    # W has fewer rows than columns here: the smaller of its two Gram matrices has the same rank.
    of_weights = ranks.rank_of(ranks.gram(ranks.of_weights(use).T))
    of_gradient = len(use.inputs) * ranks.rank_of(ranks.gram(ranks.of_gradient(use)))
    filters = len(use.outputs)
    assert (of_weights, of_gradient, filters) == (1620, 1968, 20)
    assert of_weights + of_gradient - filters**2 == rank


@subtests("name, layer", EACH)
def test_the_matrices_give_the_outputs_and_the_gradient(name, layer):
    use, _ = system(name, layer)
    np.testing.assert_allclose(
        ranks.of_weights(use) @ use.inputs.flatten().numpy(), use.outputs.flatten().numpy(), rtol=0, atol=1e-13
    )
    outputs = use.layer(use.inputs.unsqueeze(0))
    (gradient,) = torch.autograd.grad(outputs, use.layer.weight, use.derivatives.unsqueeze(0))
    found = (ranks.of_gradient(use) @ use.inputs.flatten(1).numpy().T).reshape(len(use.outputs), -1, len(use.inputs))
    scale = gradient.abs().max().item()
    np.testing.assert_allclose(found, gradient.flatten(2).mT.numpy(), rtol=0, atol=1e-12 * scale)


@subtests("name, layer", EACH)
def test_every_pair_of_filters_makes_one_row_redundant(name, layer):
    """sum_cab W[g,c,a,b] (K x)[f,c,a,b] = sum_pos k[f,pos] (W x)[g,pos], for any x."""
    use, _ = system(name, layer)
    x = np.random.default_rng(0).standard_normal(use.inputs.shape)
    weights = use.layer.weight.detach().flatten(1).numpy()
    by_gradient = (ranks.of_gradient(use) @ x.reshape(len(x), -1).T).reshape(len(use.outputs), -1, len(x))
    left = by_gradient.swapaxes(1, 2).reshape(len(use.outputs), -1) @ weights.T
    right = use.derivatives.flatten(1).numpy() @ (ranks.of_weights(use) @ x.ravel()).reshape(len(use.outputs), -1).T
    np.testing.assert_allclose(left, right, rtol=0, atol=1e-12 * np.abs(right).max())
