"""By which convention a file holds an update: what fits is named, and what cannot be told is not trusted."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from leakbench.attacks.core import Examples, LabelEstimate, Reconstruction
from leakbench.audit.external.examples.identity import content_ids
from leakbench.audit.external.update.attacks import attack_update, read_update
from leakbench.audit.external.update.scale import by_examples, by_labels, decay, logit_layer
from leakbench.audit.targets.observe import PublicKnowledge

from ....parameters import pairwise, subtests

RATE = 0.1


@pytest.fixture(scope="module")
def digits(overfitted):
    inputs, labels = (torch.cat(parts) for parts in zip(overfitted.members, overfitted.non_members, strict=True))
    return (
        inputs,
        labels,
        Examples(ids=content_ids(*overfitted.public), inputs=overfitted.public[0], labels=overfitted.public[1]),
    )


class TwoHeads(nn.Module):
    """Answers with the one head; the other has no gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.digit, self.parity = nn.Linear(32, 10), nn.Linear(32, 2)

    def forward(self, inputs):
        return self.digit(self.body(inputs))


def network(kind="mlp"):
    torch.manual_seed(1)
    if kind == "two heads":
        return TwoHeads()
    if kind == "conv":
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10, bias=kind != "no bias"))


def gradient_of(model, inputs, labels):
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stepped(model, inputs, labels, optimizer: Any = torch.optim.SGD, steps=1, **settings):
    """Weights after steps of an optimizer, and their difference to those before."""
    after = copy.deepcopy(model)
    rule = optimizer(after.parameters(), lr=RATE, **settings)
    for _ in range(steps):
        rule.zero_grad()
        nn.functional.cross_entropy(after(inputs), labels).backward()
        rule.step()
    weights = {name: p.detach() for name, p in after.named_parameters()}
    return weights, {name: weights[name] - p.detach() for name, p in model.named_parameters()}


def world_of(public):
    return PublicKnowledge(input_shape=(1, 8, 8), classes=10, low=0.0, high=1.0, population=public)


def label_finding(shared, public):
    (finding,) = attack_update(shared, world_of(public), [("label_recovery", {})])
    assert finding.result is None or isinstance(finding.result, LabelEstimate)
    return finding


def counts(shared, public):
    result = label_finding(shared, public).result
    assert isinstance(result, LabelEstimate)
    assert result.status == "ok"
    return result.counts.tolist()


def is_trusted(shared, public):
    result = label_finding(shared, public).result
    return isinstance(result, LabelEstimate) and result.status == "ok"


def off(shared, gradient):
    truth = torch.cat([gradient[name].flatten() for name in shared.layout.names])
    return float((shared.gradient - truth).norm() / truth.norm())


@pytest.mark.long
@subtests("kind, batch, factor", pairwise(["mlp", "no bias", "conv"], [1, 4, 12], [1.0, 0.5, -1.0, -RATE, "sum"]))
def test_the_factor_of_an_update_is_found_and_its_labels_are_right(digits, kind, batch, factor):
    inputs, labels, public = digits
    model, chosen = network(kind), slice(20, 20 + batch)
    gradient = gradient_of(model, inputs[chosen], labels[chosen])
    size = batch if factor == "sum" else factor
    shared = read_update(model, {name: size * g for name, g in gradient.items()}, batch_size=batch, public=public)
    if kind == "no bias" and batch == 12:  # whole numbers do not show through features that differ
        assert shared.convention.ambiguous or shared.convention.factor == pytest.approx(size, rel=0.2)
        return
    assert not shared.convention.ambiguous
    assert shared.convention.factor == pytest.approx(size, rel=0.02)
    assert off(shared, gradient) < 0.02
    assert counts(shared, public) == torch.bincount(labels[chosen], minlength=10).tolist()


def test_what_fits_is_named(digits):
    inputs, labels, public = digits
    model = network()
    gradient = gradient_of(model, inputs[:4], labels[:4])
    after, difference = stepped(model, inputs[:4], labels[:4])

    def words(tensors, **said):
        shared = read_update(model, tensors, batch_size=4, public=public, **said)
        assert not shared.convention.ambiguous
        assert off(shared, gradient) < 1e-3
        return " ".join([shared.convention.words, *shared.notes])

    assert words(gradient) == "a mean gradient"
    assert words(after, lr=RATE) == "new weights"
    assert "a sum of gradients over the batch" in words({name: 4 * g for name, g in gradient.items()})
    assert "a mean gradient times 0.5" in words({name: 0.5 * g for name, g in gradient.items()})
    assert "(after minus before) at a rate of 0.1" in words(difference)
    assert "(after minus before), by what" in words(difference, lr=RATE)
    assert "new weights after a step at a rate of 0.1" in words(after, update_is="weights")
    assert "--lr 0.01 is another" in words(after, lr=0.01)
    assert "--lr 0.1 was not used" in words(gradient, lr=RATE)
    # What is said is held, too.
    assert words(difference, update_is="difference", lr=RATE) == "a difference of weights (after minus before)"


@subtests("form", ["weights", "difference", "gradient"])
def test_weight_decay_is_found_and_taken_out(digits, form):
    inputs, labels, public = digits
    model = network()
    gradient = gradient_of(model, inputs[:4], labels[:4])
    after, difference = stepped(model, inputs[:4], labels[:4], weight_decay=5e-3)
    decayed = {name: g + 5e-3 * dict(model.named_parameters())[name].detach() for name, g in gradient.items()}
    tensors, said = {
        "weights": (after, {"lr": RATE}),
        "difference": (difference, {}),
        "gradient": (decayed, {}),
    }[form]
    shared = read_update(model, tensors, batch_size=4, public=public, **said)
    assert shared.convention.weight_decay == pytest.approx(5e-3, rel=1e-3)
    assert off(shared, gradient) < 1e-4
    assert "0.005 times the weights" in " ".join(shared.notes)
    declared = read_update(model, tensors, batch_size=4, public=public, weight_decay=5e-3, **said)
    assert off(declared, gradient) < 1e-4
    other = read_update(model, tensors, batch_size=4, public=public, weight_decay=1e-2, **said)
    assert "shows a weight decay of 0.005, and --weight-decay 0.01 was taken out" in " ".join(other.notes)


def test_decay_of_weights_alone_leaves_biases(digits):
    inputs, labels, public = digits
    model = network()
    gradient = gradient_of(model, inputs[:4], labels[:4])
    own = dict(model.named_parameters())
    decayed = {name: g + (5e-3 * own[name].detach() if g.ndim > 1 else 0) for name, g in gradient.items()}
    shared = read_update(model, decayed, batch_size=4, public=public)
    assert off(shared, gradient) < 1e-4
    assert "without biases" in " ".join(shared.notes)


def test_the_first_step_of_momentum_is_the_gradient(digits):
    inputs, labels, public = digits
    model = network()
    after, _ = stepped(model, inputs[:4], labels[:4], momentum=0.9)
    shared = read_update(model, after, batch_size=4, public=public, lr=RATE)
    assert not shared.convention.ambiguous
    assert off(shared, gradient_of(model, inputs[:4], labels[:4])) < 1e-4


@subtests("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@subtests("form", [0, 1])
def test_the_first_step_of_adam_is_signs_and_attacks_say_so(digits, optimizer, form):
    inputs, labels, public = digits
    model = network()
    tensors = stepped(model, inputs[:4], labels[:4], optimizer)[form]
    shared = read_update(model, tensors, batch_size=4, public=public, lr=RATE)
    finding = label_finding(shared, public)
    assert finding.result is None
    assert "as after a first step of Adam" in finding.why_not


def test_later_steps_of_adam_are_not_trusted(digits):
    inputs, labels, public = digits
    model = network()
    _, difference = stepped(model, inputs[:12], labels[:12], torch.optim.Adam, steps=5)
    shared = read_update(model, difference, batch_size=12, public=public)
    assert "must add up to 0 over the classes" in shared.convention.ambiguous
    assert not is_trusted(shared, public)


def test_what_is_said_and_does_not_fit_is_not_trusted(digits):
    inputs, labels, public = digits
    model = network()
    gradient = gradient_of(model, inputs[:12], labels[:12])
    summed = {name: 12 * g for name, g in gradient.items()}
    shared = read_update(model, summed, batch_size=12, public=public, update_is="gradient")
    assert "--update-is gradient does not fit the update" in shared.convention.ambiguous
    assert "a sum of gradients" in shared.convention.ambiguous
    with pytest.raises(ValueError, match="--update-is weights must hold, and the update has nothing in common"):
        read_update(model, gradient, batch_size=12, update_is="weights", lr=RATE)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="--update-is sum must hold, and the update looks like the model's weights"):
        read_update(model, weights, batch_size=12, update_is="sum")
    with pytest.raises(ValueError, match="--update-is must be one of gradient, difference, weights, sum, got 'mean'"):
        read_update(model, gradient, batch_size=12, update_is="mean")  # pyright: ignore[reportArgumentType]


def test_an_update_that_cannot_be_told_names_what_it_may_be_and_the_option(digits, overfitted):
    """Twelve examples of a model that is sure of most: their counts are no whole numbers, and equations are too few."""
    inputs, labels, public = digits
    model = copy.deepcopy(overfitted.model)
    gradient = gradient_of(model, inputs[-12:], labels[-12:])
    shared = read_update(model, gradient, batch_size=12, public=public)
    assert "it may be a mean gradient" in shared.convention.ambiguous
    assert "pass --update-is gradient|difference|weights|sum" in shared.convention.ambiguous
    assert not is_trusted(shared, public)
    assert not read_update(model, gradient, batch_size=12, public=public, update_is="gradient").convention.ambiguous


@subtests("width", [torch.float16, torch.bfloat16])
def test_half_precision_is_read(digits, width):
    inputs, labels, public = digits
    model = network()
    gradient = gradient_of(model, inputs[:4], labels[:4])
    shared = read_update(model, {n: g.to(width) for n, g in gradient.items()}, batch_size=4, public=public)
    assert shared.gradient.dtype == torch.float32
    assert off(shared, gradient) < 1e-2
    assert counts(shared, public) == torch.bincount(labels[:4], minlength=10).tolist()


def test_noise_tells_the_scale_by_sums_of_columns(digits):
    inputs, labels, public = digits
    model = network("conv")
    noise = torch.Generator().manual_seed(0)
    noisy = {
        name: g + torch.randn(g.shape, generator=noise) * 0.5 / 4
        for name, g in gradient_of(model, inputs[:4], labels[:4]).items()
    }
    said = {"batch_size": 4, "public": public, "clip_norm": 1.0, "noise_multiplier": 0.5}
    assert read_update(model, noisy, **said).convention.words == "a mean gradient"
    summed = {name: 4 * g for name, g in noisy.items()}
    assert read_update(model, summed, **said).convention.words == "a sum of gradients over the batch"


def test_names_behind_a_prefix_and_tensors_beside_the_models(digits):
    inputs, labels, public = digits
    model = network()
    gradient = gradient_of(model, inputs[:4], labels[:4])
    named = {f"client.net.{name}": g for name, g in gradient.items()} | {"epoch": torch.tensor(3)}
    shared = read_update(model, named, batch_size=4, public=public)
    assert off(shared, gradient) == 0
    assert shared.notes == (
        "The prefix 'client.net.' was taken off the names of the update's tensors.",
        "Tensors beside the model's were left out: epoch.",
    )
    with pytest.raises(ValueError, match="must have a parameter of the model"):
        read_update(model, {"other": torch.ones(3)}, batch_size=4)


def test_equations_of_the_last_layer_on_paper():
    """One example of three classes at weights of zero: p is a third each, and the input is that of the layer."""
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    layer = logit_layer(model, torch.zeros(1, 2), None)
    assert layer is not None and layer.weight == ".weight"
    errors = np.array([1 / 3 - 1, 1 / 3, 1 / 3])
    shown = 7 * np.outer(errors, [0.5, -2.0, 1.0])
    (fit,) = by_examples(layer, shown, 1, 1e-12)
    assert fit.factor == pytest.approx(7)
    assert by_labels(layer, shown, 1, 1e-12) == []  # there are no public examples
    layer.values[:] = [[1, 2, 3], [4, 5, 6], [7, 8, 10]]
    multiple, left = decay(layer, shown + 0.25 * layer.values, 1e-12)
    assert multiple == pytest.approx(0.25)
    assert left < 1e3


def test_the_last_layer_alone_gives_labels_and_others_say_what_they_lack(digits):
    inputs, labels, public = digits
    model = network()
    gradient = gradient_of(model, inputs[:4], labels[:4])
    head = {name: g for name, g in gradient.items() if name.startswith("3.")}
    shared = read_update(model, head, batch_size=4, public=public)
    assert shared.lacking == ("1.weight", "1.bias")
    assert counts(shared, public) == torch.bincount(labels[:4], minlength=10).tolist()
    (division,) = attack_update(shared, world_of(public), [("bias_division", {})])
    assert division.result is None
    assert division.why_not.endswith("; the update lacks '1.weight', '1.bias'")


def test_the_first_layer_alone_gives_inputs_and_no_labels(digits):
    inputs, labels, public = digits
    model = network()
    gradient = gradient_of(model, inputs[:1], labels[:1])
    front = {name: g for name, g in gradient.items() if name.startswith("1.")}
    shared = read_update(model, front, batch_size=1, public=public)
    division, named = attack_update(shared, world_of(public), [("bias_division", {}), ("label_recovery", {})])
    assert isinstance(division.result, Reconstruction)
    torch.testing.assert_close(division.result.inputs, inputs[:1], atol=1e-5, rtol=0)
    assert "the update lacks '3.weight', of the last layer" in shared.convention.ambiguous
    assert named.result is None or named.result.status == "degraded"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_head_without_a_gradient_is_lacking_and_in_nobodys_way(digits):
    inputs, labels, public = digits
    model = network("two heads")
    gradient = gradient_of(model, inputs[:4], labels[:4])
    assert "parity.weight" not in gradient
    shared = read_update(model, gradient, batch_size=4, public=public)
    assert shared.lacking == ("parity.weight", "parity.bias")
    assert counts(shared, public) == torch.bincount(labels[:4], minlength=10).tolist()
    # In new weights the head that did not move has no gradient either.
    after, _ = stepped(model, inputs[:4], labels[:4])
    shared = read_update(model, after, batch_size=4, public=public, lr=RATE)
    assert counts(shared, public) == torch.bincount(labels[:4], minlength=10).tolist()


@pytest.mark.long
def test_buffers_in_an_update_are_no_parameters(digits):
    inputs, labels, public = digits
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval()
    gradient = gradient_of(model, inputs[:4], labels[:4])
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    assert "1.num_batches_tracked" in buffers
    shared = read_update(model, gradient | buffers, batch_size=4, public=public)
    assert off(shared, gradient) == 0
    with pytest.raises(ValueError, match="must have a parameter of the model, as '0\\.weight'"):
        read_update(model, buffers, batch_size=4, public=public)


@subtests("form", ["weights", "difference"])
def test_what_a_step_did_not_move_is_frozen(digits, form):
    inputs, labels, public = digits
    model = network()
    after, difference = stepped(model, inputs[:4], labels[:4])
    before = {name: p.detach() for name, p in model.named_parameters()}
    tensors = after if form == "weights" else difference
    still = before if form == "weights" else {name: torch.zeros_like(p) for name, p in before.items()}
    tensors = {name: tensors[name] if name.startswith("3.") else still[name] for name in tensors}
    shared = read_update(model, tensors, batch_size=4, public=public, lr=RATE)
    assert shared.layout.names == ("3.weight", "3.bias")
    assert "did not move 1.weight, 1.bias, which is taken to be frozen" in " ".join(shared.notes)
    assert counts(shared, public) == torch.bincount(labels[:4], minlength=10).tolist()


@subtests("sign", [1, -1])
def test_of_clipped_gradients_the_sign_is_found_and_the_length_bounds_the_mean(digits, sign):
    inputs, labels, public = digits
    model = network()
    rows = [gradient_of(model, inputs[i : i + 1], labels[i : i + 1]) for i in range(4)]
    norms = [torch.cat([g.flatten() for g in row.values()]).norm() for row in rows]
    clip_norm = float(min(norms)) * 0.9
    clipped = {
        name: torch.stack([row[name] * clip_norm / norm for row, norm in zip(rows, norms, strict=True)]).sum(0) / 4
        for name in rows[0]
    }
    shared = read_update(
        model, {name: sign * g for name, g in clipped.items()}, batch_size=4, public=public, clip_norm=clip_norm
    )
    assert bool(shared.convention.ambiguous) == (sign < 0)
    too_short = read_update(model, clipped, batch_size=4, public=public, clip_norm=clip_norm / 100)
    assert "by length and sign none does" in too_short.convention.ambiguous
