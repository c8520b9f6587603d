"""Architectures: the sizes of the papers, weights that depend on the seed alone, no mixing of examples."""

import re

import pytest
import torch
from torch import nn

from benchmarks import models

COLOUR, GREY, SMALL = (3, 32, 32), (1, 28, 28), (1, 8, 8)
COUNTS = [
    ("mlp", SMALL, {}, 64 * 32 + 32 + 32 * 10 + 10),
    ("mlp", SMALL, {"hidden": 5}, 64 * 5 + 5 + 5 * 10 + 10),
    ("convnet", COLOUR, {}, 44_098),
    ("dp_cnn", COLOUR, {}, 550_570),
    ("dp_cnn_small", GREY, {}, 26_010),
    ("lenet", COLOUR, {}, 62_006),
    ("dpdr_cnn4", GREY, {}, 26_106),
    ("dpdr_cnn5", COLOUR, {"group_norm": False}, 411_466),
    ("dpdr_cnn5", COLOUR, {"group_norm": True}, 412_426),
]
NATURAL = {name: shape for name, shape, _, _ in COUNTS}
EVERY = pytest.mark.parametrize("name", models.names())


def images(shape, n=3, seed=0):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def test_every_architecture_has_a_stated_size():
    assert set(models.names()) == set(NATURAL)


@pytest.mark.parametrize(("name", "shape", "settings", "expected"), COUNTS)
def test_parameters_are_as_many_as_stated(name, shape, settings, expected):
    model = models.build(name, input_shape=shape, classes=10, seed=0, **settings)
    assert sum(p.numel() for p in model.parameters()) == expected


@EVERY
def test_it_maps_a_batch_to_finite_logits_and_every_parameter_matters(name):
    model = models.build(name, input_shape=NATURAL[name], classes=7, seed=0)
    logits = model(images(NATURAL[name]))
    assert logits.shape == (3, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2])).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).any()


@EVERY
def test_the_seed_alone_decides_the_weights(name):
    def weights(seed):
        model = models.build(name, input_shape=NATURAL[name], classes=10, seed=seed)
        return nn.utils.parameters_to_vector(model.parameters())

    first = weights(5)
    torch.manual_seed(1234)
    assert torch.equal(first, weights(5))
    assert not torch.equal(first, weights(6))


@EVERY
def test_building_leaves_torchs_generator_alone(name):
    before = torch.get_rng_state()
    models.build(name, input_shape=NATURAL[name], classes=10, seed=0)
    assert torch.equal(before, torch.get_rng_state())


@EVERY
def test_no_example_changes_the_logits_of_another(name):
    model = models.build(name, input_shape=NATURAL[name], classes=10, seed=0).double()
    batch = images(NATURAL[name]).double()
    alone = torch.cat([model(row[None]) for row in batch])
    torch.testing.assert_close(model(batch), alone, rtol=0, atol=1e-12)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@EVERY
def test_it_is_the_same_in_training_and_evaluation(name):
    model = models.build(name, input_shape=NATURAL[name], classes=10, seed=0)
    batch = images(NATURAL[name])
    torch.testing.assert_close(model.train()(batch), model.eval()(batch), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dp_cnn", (3, 7, 32)),
        ("dp_cnn", (64,)),
        ("dp_cnn_small", (1, 28, 15)),
        ("dpdr_cnn4", (1, 15, 28)),
        ("dpdr_cnn5", (3, 32, 7)),
        ("lenet", (1, 15, 15)),
        ("convnet", (32, 32)),
        ("convnet", (0, 32, 32)),
    ],
)
def test_an_input_that_does_not_fit_is_refused_in_one_sentence(name, shape):
    message = f"input_shape of {name} must be (channels, height, width) with at least"
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        models.build(name, input_shape=shape, classes=10, seed=0)
    assert str(tuple(shape)) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "smallest"),
    [("dp_cnn", 8), ("dp_cnn_small", 16), ("dpdr_cnn4", 16), ("dpdr_cnn5", 8), ("lenet", 16), ("convnet", 4)],
)
def test_the_smallest_input_that_is_accepted_works(name, smallest):
    model = models.build(name, input_shape=(2, smallest, smallest), classes=10, seed=0)
    assert model(images((2, smallest, smallest))).shape == (3, 10)


def test_gradients_of_convnet_can_be_differentiated_again():
    model = models.build("convnet", input_shape=COLOUR, classes=10, seed=0)
    batch = images(COLOUR, n=1).requires_grad_()
    loss = nn.functional.cross_entropy(model(batch), torch.tensor([3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(nn.utils.parameters_to_vector(gradients).square().sum(), batch)
    assert (second != 0).double().mean() > 0.99


def test_unknown_names_and_settings_and_too_few_classes_are_refused():
    with pytest.raises(ValueError, match=r"no model named 'lenett'; did you mean 'lenet'\?"):
        models.build("lenett", input_shape=COLOUR, classes=10, seed=0)
    with pytest.raises(ValueError, match="model 'mlp' has no setting 'width'; it has hidden"):
        models.build("mlp", input_shape=SMALL, classes=10, seed=0, width=3)
    with pytest.raises(ValueError, match="model 'lenet' has no setting 'hidden'; it has none"):
        models.build("lenet", input_shape=COLOUR, classes=10, seed=0, hidden=3)
    with pytest.raises(ValueError, match="classes must be at least 2, got 1"):
        models.build("mlp", input_shape=SMALL, classes=1, seed=0)
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        models.build("mlp", input_shape=SMALL, classes=10, seed=0, hidden=0)


@EVERY
def test_it_says_what_it_is(name):
    assert models.describe(name).endswith((".", ")"))


def test_defaults_name_the_settings():
    assert models.defaults("mlp") == {"hidden": 32}
    assert models.defaults("dp_cnn") == {}
