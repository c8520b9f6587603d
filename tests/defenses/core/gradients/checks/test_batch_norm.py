"""Layers that mix examples are refused with a way out that works."""

import copy

import pytest
import torch
from torch import nn

from leakbench.defenses.core import (
    Engine,
    Execution,
    Layout,
    cross_entropy,
    full,
    group_norm_instead,
    per_example_gradients,
    poisson,
    seeded,
    train,
)
from leakbench.defenses.core import refuse_batch_norm as refuse
from leakbench.defenses.dp_sgd import dp_sgd

from .....parameters import subtests
from .... import duties


def mixing():
    """Small models with a layer that mixes examples second, and the shape of their inputs; always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            "BatchNorm1d": (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), (6,)),
            "BatchNorm2d": (
                nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 3)),
                (3, 4, 4),
            ),
            "BatchNorm3d": (
                nn.Sequential(nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(32, 3)),
                (1, 3, 3, 3),
            ),
            "SyncBatchNorm": (
                nn.Sequential(nn.Conv2d(3, 6, 3), nn.SyncBatchNorm(6), nn.Flatten(), nn.Linear(24, 3)),
                (3, 4, 4),
            ),
            "InstanceNorm2d": (
                nn.Sequential(
                    nn.Conv2d(3, 8, 3),
                    nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
                    nn.Flatten(),
                    nn.Linear(32, 3),
                ),
                (3, 4, 4),
            ),
        }


MIXING = mixing()
each = pytest.mark.parametrize("kind", MIXING)


@each
def test_what_mixes_examples_is_refused_by_place_with_the_way_out(kind):
    model, _ = MIXING[kind]
    message = f"model must not mix examples, got {kind} at '1'; convert it first: .*group_norm_instead"
    with pytest.raises(ValueError, match=message):
        refuse(model)
    with pytest.raises(ValueError, match=message):
        Engine(model)


@each
def test_a_frozen_one_in_evaluation_mode_is_taken_and_no_other(kind):
    model, _ = MIXING[kind]
    norm = model[1]
    refuse(model.eval().requires_grad_(False))
    for change in (norm.train, lambda: norm.weight.requires_grad_(), lambda: setattr(norm, "running_var", None)):
        fixed = norm.running_var
        change()
        with pytest.raises(ValueError, match="must not mix examples"):
            refuse(model)
        norm.running_var = fixed
        norm.eval().requires_grad_(False)
    model.train().requires_grad_(True)


def with_published_statistics():
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    for norm in norms:
        own = {"running_mean": torch.randn(8), "running_var": torch.rand(8) + 0.5}
        norm.load_state_dict({**norm.state_dict(), **own})
    features = nn.Sequential(nn.Conv2d(3, 8, 3), norms[0], nn.ReLU(), norms[1], nn.Flatten())
    return nn.Sequential(features.requires_grad_(False), nn.Linear(32, 3))


@pytest.mark.long
@subtests("engine", ["auto", "layerwise", "torch.func", "one_by_one"])
@subtests("parts", [False, True])
def test_a_head_on_published_statistics_is_trained_as_behind_the_map_that_they_are(engine, parts):
    """On features computed beforehand the same head has the same parameters afterwards, and no statistic moves."""
    model = with_published_statistics().eval()
    if parts:  # in training mode but for its frozen layers
        model.train()
        model[0].eval()
    inputs, labels = torch.randn(16, 3, 4, 4), torch.arange(16) % 3
    head, features = copy.deepcopy(model[1]), copy.deepcopy(model[0]).eval()(inputs)
    before = {name: value.clone() for name, value in model[0].state_dict().items()}
    defense = dp_sgd(noise_multiplier=3.0)

    def trained(network, data, execution):
        return train(network, data, defense, sampling=full(), steps=3, lr=0.5, noise=seeded(0), execution=execution)

    run = trained(model, (inputs, labels), Execution(engine=engine))
    alone = trained(head, (features, labels), Execution())
    assert run.claim(1e-5).epsilon == alone.claim(1e-5).epsilon < 10
    for name, value in model[0].state_dict().items():
        assert torch.equal(value, before[name])
    torch.testing.assert_close(model[1].weight, head.weight, rtol=1e-4, atol=1e-5)


def test_one_that_is_put_into_training_mode_within_a_run_is_refused():
    model = with_published_statistics()
    model[0].eval()
    engine, data = Engine(model), (torch.randn(6, 3, 4, 4), torch.arange(6) % 3)
    engine.gradients(*data)
    model.train()
    with pytest.raises(
        ValueError, match=r"must not mix examples, got BatchNorm2d at '0\.1'.*put it in evaluation mode"
    ):
        engine.gradients(*data)


@each
def test_the_way_out_gives_rows_that_depend_on_their_example_and_on_every_parameter(kind):
    model, shape = MIXING[kind]
    converted = group_norm_instead(model).double()
    refuse(converted)
    assert any(isinstance(module, nn.GroupNorm) for module in converted.modules())
    inputs = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([0, 1, 2, 0])
    layout = Layout.of(converted)
    rows = per_example_gradients(converted, cross_entropy, layout, inputs, labels)
    alone = per_example_gradients(converted, cross_entropy, layout, inputs[:1], labels[:1])
    torch.testing.assert_close(rows[:1], alone, rtol=1e-8, atol=1e-10)
    # The first layer still gets a signal: a group of one value each would have made it a constant.
    start, stop = layout.layers[0]
    assert (rows[:, start:stop].norm(dim=1) > 1e-3).all()


@each
def test_the_conversion_leaves_the_original_and_the_number_of_parameters_alone(kind):
    model, _ = MIXING[kind]
    converted = group_norm_instead(model)
    assert type(model[1]).__name__ == kind
    assert sum(p.numel() for p in converted.parameters()) == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        next(converted.parameters()).add_(1.0)
    assert not torch.equal(next(converted.parameters()), next(model.parameters()))


def test_affine_parameters_are_carried_over():
    norm = nn.BatchNorm2d(6)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6.0))
        norm.bias.copy_(-torch.arange(6.0))
    converted = group_norm_instead(norm)
    assert isinstance(converted, nn.GroupNorm)
    assert torch.equal(converted.weight, torch.arange(6.0))
    assert torch.equal(converted.bias, -torch.arange(6.0))
    plain = group_norm_instead(nn.BatchNorm2d(6, affine=False))
    assert not list(plain.parameters())


@subtests(("channels", "wanted", "got"), [(64, 32, 32), (48, 32, 24), (7, 4, 1), (6, 4, 3), (5, 32, 5)])
def test_groups_are_the_largest_divisor_up_to_the_wanted_number(channels, wanted, got):
    converted = group_norm_instead(nn.BatchNorm2d(channels), groups=wanted)
    assert isinstance(converted, nn.GroupNorm)
    assert converted.num_groups == got


def test_a_nested_layer_is_found_and_converted():
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"got BatchNorm1d at '0\.1'"):
        refuse(model)
    refuse(group_norm_instead(model))


def test_an_instance_norm_that_tracked_computes_what_it_did_in_training():
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    inputs = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(group_norm_instead(norm)(inputs), norm(inputs))


def test_layers_that_look_at_one_example_pass():
    refuse(nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4), nn.Dropout(0.5)))


def test_training_refuses_before_it_touches_the_model():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    with pytest.raises(ValueError, match="group_norm_instead"):
        train(model, duties.DATA, dp_sgd(noise_multiplier=1.0), sampling=poisson(0.5), steps=2)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


def spread(model, *shape):
    """Standard deviation over inputs of what the model puts out."""
    torch.manual_seed(0)
    return float(model(torch.randn(64, *shape)).std(0).mean().detach())


POOLED = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16))


@subtests(
    ("model", "shape", "groups"),
    [
        (POOLED, (3, 9, 9), 2),
        (nn.Sequential(nn.Conv2d(3, 64, 32), nn.BatchNorm2d(64)), (3, 32, 32), 8),
        (nn.Sequential(nn.Conv2d(3, 64, 32), nn.BatchNorm2d(64)), (3, 35, 35), 32),  # 4 x 4 maps
        (nn.Sequential(nn.Conv2d(3, 6, 32), nn.BatchNorm2d(6)), (3, 32, 32), 1),
        (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), (5,), 1),
    ],
)
def test_groups_are_as_large_as_what_is_left_of_an_image_wants(model, shape, groups):
    converted = group_norm_instead(model, input_shape=shape)
    (norm,) = (layer for layer in converted.children() if isinstance(layer, nn.GroupNorm))
    assert norm.num_groups == groups
    assert spread(converted, *shape) > 0.05


def test_without_a_shape_a_small_image_is_tried():
    assert spread(group_norm_instead(POOLED), 3, 9, 9) > 0.05
    assert spread(group_norm_instead(POOLED, groups=2), 3, 9, 9) > 0.05


@pytest.mark.parametrize(
    ("model", "settings", "way_out"),
    [
        (POOLED, {"groups": 16}, "got 16 channels of one position; take fewer groups"),
        (
            nn.Sequential(nn.Linear(5, 1), nn.BatchNorm1d(1)),
            {},
            "remove it, or freeze it and put it in evaluation mode",
        ),
    ],
)
def test_a_layer_that_would_put_out_zeros_is_refused(model, settings, way_out):
    with pytest.raises(ValueError, match=f"must have more than one value to normalise, .*{way_out}"):
        group_norm_instead(model, **settings)


def test_a_shape_that_the_model_does_not_take_is_refused():
    with pytest.raises(ValueError, match=r"input_shape must be of an example of the model, got \(4, 9, 9\)"):
        group_norm_instead(POOLED, input_shape=(4, 9, 9))


def test_a_layer_in_two_places_stays_one():
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 8, 3), norm)
    converted = group_norm_instead(model)
    assert isinstance(converted.get_submodule("1"), nn.GroupNorm)
    assert converted.get_submodule("1") is converted.get_submodule("3")


def test_a_model_whose_shape_nobody_knows_has_the_usual_groups():
    model = nn.Sequential(nn.Unflatten(1, (16, 4, 4)), nn.BatchNorm2d(16))
    norm = group_norm_instead(model).get_submodule("1")
    assert isinstance(norm, nn.GroupNorm) and norm.num_groups == 16
