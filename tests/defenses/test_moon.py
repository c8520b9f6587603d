"""What is particular to MOON: its loss as published, rows against autograd, and the term inside the bound."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, one_hot

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    Recipe,
    RoundSchedule,
    StepPlan,
    clip,
    federate,
    full,
    poisson,
)
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.moon import Contrastive, ContrastiveLoss, WithFeatures, moon

from .duties import DATA, network
from .federated_runs import FEDERATION, LAYOUT, SHARDS, federated, parameters

DRAW = torch.Generator().manual_seed(1)
INPUTS, LABELS = DATA[0][:8], DATA[1][:8]
OF_GLOBAL, OF_PREVIOUS = (torch.randn(8, 4, generator=DRAW) for _ in range(2))
TARGETS = torch.cat([one_hot(LABELS, 3).float(), OF_GLOBAL, OF_PREVIOUS], dim=1)


def published(model, mu, inputs, labels, of_global, of_previous):
    """Cross-entropy minus mu log(e^(cos/t) / (e^(cos/t) + e^(cos_prev/t))) of one record, t 0.5."""
    features = model[1](model[0](inputs))
    near, far = (cosine_similarity(features, z) / 0.5 for z in (of_global, of_previous))
    contrast = -torch.log(near.exp() / (near.exp() + far.exp()))
    return cross_entropy(model(inputs), labels) + mu * contrast.sum()


def test_rows_are_those_of_the_published_loss_by_a_loop_of_autograd():
    model = network()
    rule = Contrastive(mu=3.0)
    wrapped, loss = rule.network(model, nn.CrossEntropyLoss())
    engine = Engine(wrapped, loss=loss)
    rows = engine.gradients(INPUTS, TARGETS)(None)
    for i in range(8):
        one = slice(i, i + 1)
        value = published(model, 3.0, INPUTS[one], LABELS[one], OF_GLOBAL[one], OF_PREVIOUS[one])
        gradients = torch.autograd.grad(value, list(model.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(rows[i], expected, rtol=1e-4, atol=1e-5)
    assert engine.name == "layerwise"
    plan = StepPlan(Block(codec=Everything(LAYOUT.dim), bound=clip(0.2)))
    (sums,) = engine.clipped_sums(plan, INPUTS, TARGETS)
    clipped = rows * (0.2 / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    torch.testing.assert_close(sums.float(), clipped.sum(dim=0), rtol=1e-4, atol=1e-5)


def test_equal_features_of_both_models_have_no_contrastive_gradient():
    wrapped, loss = Contrastive(mu=50.0).network(network(), nn.CrossEntropyLoss())
    same = torch.cat([TARGETS[:, :3], OF_GLOBAL, OF_GLOBAL], dim=1)
    rows = Engine(wrapped, loss=loss).gradients(INPUTS, same)(None)
    plain = Engine(network()).gradients(INPUTS, LABELS)(None)
    torch.testing.assert_close(rows, plain, rtol=0, atol=2e-5)


def test_a_clients_first_round_is_fed_avg_and_its_second_is_not():
    run, plain = federated(moon(mu=5.0, noise_multiplier=1.3)), federated(fed_avg(noise_multiplier=1.3))
    assert torch.allclose(run.rounds[1].parameters, plain.rounds[1].parameters, rtol=0, atol=1e-6)
    assert (run.rounds[2].parameters - plain.rounds[2].parameters).norm() > 1e-3
    off = federated(moon(mu=0.0, noise_multiplier=1.3))
    torch.testing.assert_close(parameters(off), parameters(plain), rtol=0, atol=1e-6)


@pytest.mark.long
def test_features_of_the_local_model_come_nearer_to_those_of_the_global_one():
    schedule = RoundSchedule(((0, 1, 2, 3),) * 2)
    gaps = []
    for mu in (0.0, 50.0):
        run = federated(
            moon(mu=mu, clip_norm=5.0, noise_multiplier=1e-5), schedule=schedule, sampling=full(),
            federation=replace(FEDERATION, rounds=2, local_steps=8), lr=0.1,
        )  # fmt: skip
        first, second = run.rounds
        local = second.parameters + second.messages[0].tensors["values"]
        previous = first.parameters + first.messages[0].tensors["values"]
        near, far = (similarity(local, other) for other in (second.parameters, previous))
        gaps.append(near - far)
    assert gaps[1] > gaps[0]


def similarity(first, second):
    """Mean cosine of the features of two models on the data."""
    features = []
    for vector in (first, second):
        model = network()
        LAYOUT.write(model, vector)
        features.append(model[1](model[0](INPUTS)).detach())
    return float(cosine_similarity(*features).mean())


def test_the_network_has_the_models_parameters_in_their_order_and_its_logits_first():
    model = network()
    wrapped = WithFeatures(model)
    assert [p.data_ptr() for p in wrapped.parameters()] == [p.data_ptr() for p in model.parameters()]
    outputs = wrapped(INPUTS)
    assert torch.equal(outputs[:, :3], model(INPUTS)) and torch.equal(outputs[:, 3:], model[1](model[0](INPUTS)))
    assert not model[2]._forward_pre_hooks


def test_dropout_in_the_network_leaves_features_of_both_models_as_they_are():
    plain = network()
    model = nn.Sequential(plain[0], plain[1], nn.Dropout(0.5), plain[2])
    run = federated_on(model)
    assert torch.isfinite(run.rounds[1].parameters).all() and not run.remarks


def federated_on(model):
    return federate(
        model, SHARDS, moon(noise_multiplier=1.0), federation=FEDERATION, sampling=poisson(0.4), seed=1, key=1,
        keep_messages=True,
    )  # fmt: skip


def test_settings_and_recipes_that_are_not_its_own_are_refused():
    with pytest.raises(ValueError, match="mu must be at least 0"):
        moon(mu=-1.0)
    with pytest.raises(ValueError, match="temperature must be a positive"):
        moon(temperature=0.0)
    with pytest.raises(ValueError, match="moon must have the cross-entropy and no augmentation"):
        federated(moon(noise_multiplier=1.0), recipe=Recipe(loss=nn.MSELoss(reduction="none")))
    with pytest.raises(ValueError, match="must have a model with a linear layer"):
        WithFeatures(nn.Sequential(nn.Conv2d(1, 1, 1)))
    loss = ContrastiveLoss(mu=1.0, temperature=0.5, classes=3)
    assert loss(torch.zeros(2, 7), torch.zeros(2, 11)).shape == (2,)
