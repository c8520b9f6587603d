"""What is particular to the gradient norm; the duties of every attack are in test_every_attack.py."""

import dataclasses

import pytest
import torch
from torch import nn

from leakbench.attacks.core import AccessError, Examples, ModelAccess
from leakbench.attacks.gradient_norm import gradient_norm
from leakbench.audit.targets.gradient_norms import GradientNorms
from leakbench.defenses.core import cross_entropy

from ..parameters import subtests
from . import toys


def white_box(model: nn.Module, candidates: Examples) -> ModelAccess:
    norms = GradientNorms(model, cross_entropy)
    return ModelAccess(
        logits=model,
        input_shape=tuple(candidates.inputs.shape[1:]),
        classes=toys.CLASSES,
        candidates=candidates,
        parameters=dict(model.named_parameters()),
        gradients_squared=norms.of,
    )


@subtests("make", [toys.conv_net, lambda: toys.relu_net((1, 8, 8)), lambda: toys.linear_net((1, 8, 8))])
def test_scores_are_minus_the_norms_of_autograd_s_gradients_one_example_at_a_time(make):
    model, candidates = make(), toys.examples(7, (1, 8, 8), seed=1)
    target = white_box(model, candidates)
    named = {name: p.double() for name, p in model.named_parameters()}
    last = list(named)[-1].rpartition(".")[0] + "."
    whole, of_last = gradient_norm(target, batch_size=3).scores, gradient_norm(target, layer=last).scores
    twin = make().double()
    for one in range(7):
        twin.zero_grad()
        loss = nn.functional.cross_entropy(
            twin(candidates.inputs[one : one + 1].double()), candidates.labels[one : one + 1]
        )
        loss.backward()
        squares = {name: float(p.grad.square().sum()) for name, p in twin.named_parameters()}  # type: ignore[union-attr]
        assert float(whole[one]) == pytest.approx(-(sum(squares.values()) ** 0.5), rel=1e-9)
        in_last = sum(value for name, value in squares.items() if name.startswith(last))
        assert float(of_last[one]) == pytest.approx(-(in_last**0.5), rel=1e-9)


def test_a_model_that_is_sure_of_all_still_ranks_them():
    model, candidates = toys.linear_net((1, 8, 8)), toys.examples(40, (1, 8, 8), seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(60.0)
        labels = model(candidates.inputs).argmax(dim=1)
    target = white_box(model, dataclasses.replace(candidates, labels=labels))
    scores = gradient_norm(target).scores
    assert len(scores.unique()) == 40 and float(scores.max()) < 0


def test_frozen_parameters_have_no_gradient_and_do_not_count():
    model, candidates = toys.relu_net((1, 8, 8)), toys.examples(5, (1, 8, 8), seed=1)
    whole = gradient_norm(white_box(model, candidates), layer="3").scores
    model[1].requires_grad_(False)  # type: ignore[index]
    assert torch.allclose(gradient_norm(white_box(model, candidates)).scores, whole)


def test_layers_that_are_not_there_and_black_boxes_are_refused():
    model, candidates = toys.conv_net(), toys.examples(5, (1, 8, 8), seed=1)
    target = white_box(model, candidates)
    with pytest.raises(ValueError, match=r"layer must begin the name of a parameter, 0\.weight, .*got 'fc'"):
        gradient_norm(target, layer="fc")
    model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(ValueError, match="layer must begin the name of a parameter that is trained"):
        gradient_norm(white_box(model, candidates), layer="0.")
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        gradient_norm(target, batch_size=0)
    with pytest.raises(AccessError, match="needs access to the parameters"):
        gradient_norm(dataclasses.replace(target, parameters=None))
    with pytest.raises(AccessError, match="a field that the attack declared is empty"):
        gradient_norm(dataclasses.replace(target, gradients_squared=None))
