"""Low-rank adaptation: nothing changes at the start, and two small layers are trained beside each frozen weight."""

from typing import Any

import pytest
import torch
from torch import nn

from leakbench.benchmarks import models
from leakbench.benchmarks.core.nets.lora import LoRALayer, adapt
from leakbench.benchmarks.core.nets.standardise import standardise

from ...parameters import subtests


def coins(seed=0):
    return torch.Generator().manual_seed(seed)


def adapted(model, rank=2, scale=1.0, seed=0):
    return adapt(model, model[-1], rank=rank, scale=scale, generator=coins(seed))


def trained(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@subtests("name", ["dp_cnn_small", "dpdr_cnn4", "mlp", "wrn_16_4"])
def test_at_the_start_it_is_the_network_that_it_was_made_of_bit_for_bit(name):
    natural = models.natural(name)
    settings: dict[str, Any] = {"standardised": True} if name == "wrn_16_4" else {}
    model = models.build(name, input_shape=natural.input_shape, classes=10, **settings)
    inputs = torch.randn(3, *natural.input_shape, generator=coins())
    with torch.no_grad():
        before = model(inputs)
        heads = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        adapt(model, heads[-1], rank=2, scale=3.0, generator=coins())
        assert torch.equal(model(inputs), before)
        # And anything else is another one.
        for layer in model.modules():
            if isinstance(layer, LoRALayer):
                nn.init.ones_(layer.up.get_parameter("weight"))
        assert not torch.allclose(model(inputs), before)


def test_what_is_trained_counted_by_hand():
    model = models.build("dp_cnn_small", input_shape=(1, 28, 28), classes=10)
    adapt(
        model,
        [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1],
        rank=4,
        scale=1.0,
        generator=coins(),
    )
    # Convolutions of 1x8x8 to 16 and of 16x4x4 to 32, a linear layer of 512 to 32, and the head of 32 to 10.
    products = 4 * (64 + 16) + 4 * (256 + 32) + 4 * (512 + 32)
    assert sum(value.numel() for value in trained(model).values()) == products + 32 * 10 + 10
    assert sum(value.numel() for value in model.parameters()) == 26_010 + products


@subtests(
    "layer",
    [
        nn.Linear(6, 5),
        nn.Conv2d(6, 4, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(6, 4, (3, 2), padding=(1, 0), dilation=(1, 2), groups=2, padding_mode="circular"),
        nn.Conv2d(6, 4, 3, padding="same"),
    ],
)
def test_a_product_is_a_weight_of_that_rank_that_is_added(layer):
    """The same layer with W + scale B A in the place of W computes the same."""
    rank, scale = 2, 0.7
    made = LoRALayer(layer, "it", rank=rank, scale=scale, generator=coins())
    up, down = made.up.get_parameter("weight"), made.down.weight
    nn.init.normal_(up)
    inputs = torch.randn(3, 6) if isinstance(layer, nn.Linear) else torch.randn(3, 6, 7, 8)
    groups = getattr(layer, "groups", 1)
    added = torch.cat(
        [(b.flatten(1) @ a.flatten(1)) for a, b in zip(down.chunk(groups), up.chunk(groups), strict=True)]
    )
    assert torch.linalg.matrix_rank(added[: len(added) // groups]) == rank
    with torch.no_grad():
        found = made(inputs)
        layer.weight += scale * added.view_as(layer.weight)
        torch.testing.assert_close(found, layer(inputs), atol=1e-5, rtol=1e-5)


def test_frozen_weights_norms_and_biases_get_no_gradient_and_the_head_does():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)
    )
    adapted(model)
    assert set(trained(model)) == {
        "0.down.weight", "0.up.weight", "3.down.weight", "3.up.weight", "5.weight", "5.bias"
    }  # fmt: skip
    # By the first step only what is behind the zeros moves: the gradient of A is B's, of which there is none yet.
    model(torch.randn(2, 1, 4, 4)).square().sum().backward()
    moved = {name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()}
    assert moved == {"0.up.weight", "3.up.weight", "5.weight", "5.bias"}


def test_a_layer_in_two_places_stays_one():
    shared = nn.Linear(5, 5)
    model = adapted(nn.Sequential(shared, nn.Tanh(), nn.Sequential(shared), nn.Linear(5, 3)))
    one, other = model.get_submodule("0"), model.get_submodule("2.0")
    assert one is other and isinstance(one, LoRALayer)


def test_its_first_weights_are_those_of_the_seed_whatever_else_was_drawn():
    def first(seed):
        return adapted(nn.Sequential(nn.Linear(400, 50), nn.Linear(50, 3)), rank=20, seed=seed).get_parameter(
            "0.down.weight"
        )

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    torch.random.set_rng_state(before)
    adapted(layer)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first(0), first(0)) and not torch.equal(first(0), first(1))
    # Gaussian, of variance 1 / 400: 8000 of them, within five standard errors.
    assert abs(float(first(0).detach().var()) * 400 - 1) < 5 * (2 / 8000) ** 0.5


def test_weights_that_are_computed_stay_frozen_behind_their_parametrisation():
    model = adapted(nn.Sequential(standardise(nn.Conv2d(2, 4, 3)), nn.Flatten(), nn.Linear(4, 3)))
    assert isinstance(model.get_submodule("0"), LoRALayer) and set(trained(model)) == {
        "0.down.weight", "0.up.weight", "2.weight", "2.bias"
    }  # fmt: skip
    assert model(torch.randn(2, 2, 3, 3)).shape == (2, 3)


@subtests(
    "layer, rank, most",
    [
        (nn.Linear(6, 5), 6, 5),
        (nn.Linear(4, 5), 5, 4),
        (nn.Conv2d(1, 9, 2), 5, 4),
        (nn.Conv2d(8, 8, 3, groups=8), 2, 1),
    ],
)
def test_a_rank_that_a_layer_does_not_have_is_refused_by_its_name(layer, rank, most):
    with pytest.raises(ValueError, match=rf"^rank must be at most {most}, that of layer '0', got {rank}$"):
        adapted(nn.Sequential(layer, nn.Flatten(), nn.Linear(1, 3)), rank=rank)
    adapted(nn.Sequential(layer, nn.Flatten(), nn.Linear(1, 3)), rank=most)


def test_a_model_of_one_layer_has_nothing_to_adapt():
    with pytest.raises(ValueError, match="must be a linear layer or convolution before the last layer, got none"):
        adapted(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
