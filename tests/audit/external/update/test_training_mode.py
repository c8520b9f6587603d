"""A step whose batch norms were in training mode is attacked in that mode."""

import copy

import pytest
import torch
from torch import nn

from leakbench.attacks.core import Examples, LabelEstimate, Reconstruction
from leakbench.audit.external.examples.identity import content_ids
from leakbench.audit.external.update.attacks import attack_update, observed, read_update, with_labels
from leakbench.audit.external.update.training_mode import of_batches, statistics_moved
from leakbench.audit.targets.observe import PublicKnowledge

RATE = 0.1


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    ).eval()


def public_of(overfitted):
    inputs, labels = overfitted.public
    return Examples(ids=content_ids(inputs, labels), inputs=inputs, labels=labels)


def world_of(public):
    return PublicKnowledge(input_shape=(1, 8, 8), classes=10, low=0.0, high=1.0, population=public)


def stepped(model, inputs, labels, *, training):
    """The state after one step, and the mean gradient."""
    after = copy.deepcopy(model).train(training)
    nn.functional.cross_entropy(after(inputs), labels).backward()
    gradient = {name: p.grad.clone() for name, p in after.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.sub_(RATE * parameter.grad)
    return {name: value.clone() for name, value in after.state_dict().items()}, gradient


@pytest.mark.parametrize("batch", [1, 3])
def test_moved_statistics_show_the_mode_and_the_true_batch_explains_the_update_in_it(overfitted, batch):
    (inputs, labels), public, model = overfitted.members, public_of(overfitted), network()
    inputs, labels = inputs[:batch], labels[:batch]
    state, gradient = stepped(model, inputs, labels, training=True)
    assert statistics_moved(model, state) == ["1"]
    shared = read_update(model, state, batch_size=batch, lr=RATE, public=public)
    assert "the running statistics of '1' moved" in " ".join(shared.notes)
    target = observed(shared, world_of(public), kind="reconstruction")
    truth = torch.cat([gradient[name].flatten() for name in shared.layout.names])
    simulated = target.simulate(inputs, labels)
    torch.testing.assert_close(simulated[: len(truth)], truth, rtol=1e-4, atol=1e-6)
    # Behind the gradient stand mean and variance of the batch, eight channels each.
    assert len(simulated) == len(truth) + 16
    torch.testing.assert_close(target.residual(simulated), torch.zeros_like(simulated), rtol=0, atol=1e-4)
    # In evaluation mode the very batch leaves most of its own update unexplained.
    evaluated = observed(shared, world_of(public))
    assert evaluated.residual(evaluated.simulate(inputs, labels)).norm() > 0.3 * truth.norm()
    guess = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(target.simulate(guess, labels).square().sum(), guess)
    assert slope.abs().max() > 0


@pytest.mark.long
def test_an_image_is_found_in_training_mode(overfitted):
    (inputs, labels), public, model = overfitted.members, public_of(overfitted), network()
    state, _ = stepped(model, inputs[:1], labels[:1], training=True)
    shared = read_update(model, state, batch_size=1, lr=RATE, labels=labels[:1].tolist(), public=public)
    asked = [("inverting_gradients", {"iterations": 400, "tv_weight": 1e-4})]
    (found,) = attack_update(shared, world_of(public), asked)
    assert isinstance(found.result, Reconstruction)
    assert (found.result.inputs - inputs[:1]).square().mean() < 5e-4


def test_statistics_that_stay_are_of_evaluation_mode_and_the_option_says_otherwise(overfitted):
    (inputs, labels), public, model = overfitted.members, public_of(overfitted), network()
    state, gradient = stepped(model, inputs[:2], labels[:2], training=False)
    shared = read_update(model, state, batch_size=2, lr=RATE, public=public)
    assert shared.in_training is None
    assert read_update(model, gradient, batch_size=2, public=public, training_mode=True).in_training is not None
    with pytest.raises(ValueError, match="with batch norms, and it has none"):
        of_batches(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="--clip-norm must be left out of a step in training mode"):
        read_update(model, gradient, batch_size=2, public=public, training_mode=True, clip_norm=1.0)


def test_labels_show_in_training_mode_and_closed_forms_of_inputs_say_why_not(overfitted):
    (inputs, labels), public, model = overfitted.members, public_of(overfitted), network()
    state, _ = stepped(model, inputs[:4], labels[:4], training=True)
    shared = read_update(model, state, batch_size=4, lr=RATE, public=public)
    (named,) = attack_update(shared, world_of(public), [("label_recovery", {})])
    assert isinstance(named.result, LabelEstimate)
    assert named.result.counts.tolist() == torch.bincount(labels[:4], minlength=10).tolist()
    (gap,) = attack_update(shared, world_of(public), [("r_gap", {"mode": "combination"})])
    assert "batch norms were in training mode" in gap.why_not


@pytest.mark.long
def test_recovered_labels_are_given_to_attacks_on_inputs(overfitted):
    (inputs, labels), public = overfitted.members, public_of(overfitted)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    nn.functional.cross_entropy(model(inputs[:4]), labels[:4]).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    shared = read_update(model, gradient, batch_size=4, public=public)
    informed = with_labels(shared, world_of(public))
    assert informed.labels is not None
    assert informed.labels.tolist() == sorted(labels[:4].tolist())
    assert "label_recovery found, which are sure" in informed.notes[-1]
    (found,) = attack_update(informed, world_of(public), [("inverting_gradients", {"iterations": 5})])
    assert isinstance(found.result, Reconstruction)
    # What is known is left as it is.
    known = read_update(model, gradient, batch_size=4, labels=[1, 2, 3, 4], public=public)
    assert with_labels(known, world_of(public)) is known


def test_doubted_labels_are_given_with_a_doubt(overfitted):
    """A model that is sure of most examples: the counts are estimates."""
    (inputs, labels), public = overfitted.non_members, public_of(overfitted)
    model = copy.deepcopy(overfitted.model)
    nn.functional.cross_entropy(model(inputs[:12]), labels[:12]).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    shared = read_update(model, gradient, batch_size=12, public=public, update_is="gradient")
    informed = with_labels(shared, world_of(public))
    assert informed.unsure_labels
    assert "which may be others" in informed.notes[-1]
    (found,) = attack_update(informed, world_of(public), [("inverting_gradients", {"iterations": 20})])
    assert isinstance(found.result, Reconstruction)
    assert found.result.status == "degraded"
