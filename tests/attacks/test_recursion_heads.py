"""The last layer's gradient: roots, clip factors, gaps that a mask left; and activations backwards."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbench.attacks.core import InconsistentObservation, NotApplicable
from leakbench.attacks.core.closed_form.recursion.completion import components, spread
from leakbench.attacks.core.closed_form.recursion.gaps import filled, open_features
from leakbench.attacks.core.closed_form.recursion.head import LEAST, TURN, HeadGradient, candidates, margins
from leakbench.attacks.core.closed_form.recursion.invert import layers_of
from leakbench.attacks.core.closed_form.recursion.operations import invert
from leakbench.attacks.core.targets.network import Operation

from ..parameters import subtests
from .recursion_cases import case, drawn


@subtests("mu", [-30.0, -1.0, -1e-6, 0.3, 1.0, 1.27, 1.4, 5.0, 40.0])
def test_the_margin_of_one_logit_is_among_the_roots(mu):
    h = -mu / (1 + math.exp(mu))
    found = margins(h)
    assert len(found) == (1 if h > 0 else 2)
    # Near the turn the function is flat, and a root has half the digits.
    near = 1e-13 if abs(mu - TURN) > 0.1 else 1e-9
    assert min(abs(one - mu) for one in found) < near * abs(mu)
    assert pytest.approx(-0.2784645, abs=1e-7) == LEAST and pytest.approx(1.2784645, abs=1e-7) == TURN


def test_a_scalar_below_the_least_is_of_no_example():
    assert len(margins(-0.2)) == 2 and len(margins(0.2)) == 1 and margins(0.0) == [0.0]
    with pytest.raises(
        InconsistentObservation, match=re.escape("must be at least -0.278465 for one example, got -0.3")
    ):
        margins(-0.3)


def head_case(
    classes: int, *, bias: bool, factor: float, seed: int, shown: bool = True
) -> tuple[HeadGradient, torch.Tensor, int]:
    """A random head, its gradient, its input and label."""
    coins = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, 30, generator=coins, dtype=torch.float64) / 30**0.5
    shift = torch.randn(classes, generator=coins, dtype=torch.float64) * bias
    x = torch.randn(30, generator=coins, dtype=torch.float64)
    label = int(torch.randint(classes, (1,), generator=coins))
    k = (weight @ x + shift).softmax(dim=0)
    k[label] -= 1
    gradient = factor * k[:, None] * x
    shared = factor * k if bias and shown else None
    return HeadGradient(weight=weight, bias=shift, gradient=gradient, bias_gradient=shared), x, label


@subtests("classes", [3, 10])
@subtests("bias, shown", [(False, False), (True, True), (True, False)])
@subtests("factor", [1.0, 0.9995, 0.2])
def test_a_softmax_head_gives_its_input_its_label_and_the_clip_factor(classes, bias, shown, factor):
    for seed in range(20):
        head, x, label = head_case(classes, bias=bias, factor=factor, seed=seed, shown=shown)
        (found,) = candidates(head, loss="cross_entropy", clipped=None)
        assert found.label == label
        # The scale rests on a difference of logits of two classes, which may be small for three classes.
        assert float((found.x - x).norm() / x.norm()) < (1e-12 if factor == 1 else 1e-9)
        assert found.factor == pytest.approx(factor, rel=1e-9)


def test_two_classes_are_one_logit_with_its_two_roots_and_signs():
    twins = 0
    for seed in range(20):
        head, x, label = head_case(2, bias=False, factor=1.0, seed=seed)
        found = candidates(head, loss="cross_entropy", clipped=None)
        assert len(found) in (2, 4)
        twins += len(found) == 4
        assert min(float((one.x - x).norm() / x.norm()) for one in found if one.label == label) < 1e-7
    assert 0 < twins < 20
    with pytest.raises(NotApplicable, match="not identifiable"):
        candidates(head_case(2, bias=False, factor=1.0, seed=0)[0], loss="cross_entropy", clipped=True)


def test_a_factor_above_one_is_of_no_clipping():
    head, _, _ = head_case(5, bias=False, factor=1.5, seed=1)
    with pytest.raises(InconsistentObservation, match=re.escape("it is 1.5 times as long")):
        candidates(head, loss="cross_entropy", clipped=None)
    shorter, _, _ = head_case(5, bias=True, factor=0.5, seed=1)
    with pytest.raises(InconsistentObservation, match=re.escape("it is 0.5 times as long")):
        candidates(shorter, loss="cross_entropy", clipped=False)


def test_a_gradient_of_two_examples_is_no_head_of_one():
    (one, _, _), (other, _, _) = (head_case(5, bias=False, factor=1.0, seed=seed) for seed in (1, 2))
    both = HeadGradient(weight=one.weight, bias=one.bias, gradient=one.gradient + other.gradient, bias_gradient=None)
    with pytest.raises(InconsistentObservation, match="must be that of one example"):
        candidates(both, loss="cross_entropy", clipped=None)
    nothing = HeadGradient(weight=one.weight, bias=one.bias, gradient=0 * one.gradient, bias_gradient=None)
    with pytest.raises(NotApplicable, match="must not vanish"):
        candidates(nothing, loss="cross_entropy", clipped=None)


def test_gaps_of_a_rank_one_matrix_are_filled_where_they_are_connected():
    matrix = drawn(4, 1) @ drawn(1, 40, seed=1)
    seen = torch.rand(4, 40, generator=torch.Generator().manual_seed(2)) < 0.4
    seen[:, 7] = False
    found = spread(matrix, seen, 2)
    assert bool(found.rows.all()) and torch.equal(found.columns, seen.any(dim=0))
    product = torch.outer(found.left, found.right)
    torch.testing.assert_close(product[:, found.columns], matrix[:, found.columns], rtol=1e-12, atol=1e-12)
    assert not product[:, ~found.columns].any()
    # Two blocks that share no entry: each by itself, and what is zero connects nothing.
    apart = torch.zeros(4, 40, dtype=torch.bool)
    apart[:2, :20] = apart[2:, 20:] = True
    apart[0, 25] = True
    matrix[:, 25] = 0.0
    assert [int(one.rows.sum()) for one in components(matrix, apart)] == [2, 2]


def test_features_that_stay_open_are_as_many_as_the_equations_of_a_last_layer_lack():
    """A column of no entry is one unknown; C - 1 logits are equations of these, of a constant and of the scale."""
    seen = torch.ones(6, 12, dtype=torch.bool)
    for lost, bias, left in ((3, False, 0), (4, False, 4), (4, True, 0), (5, True, 5)):
        seen[:, :lost] = False
        shown = torch.full((6,), bias)
        assert open_features(seen, shown) == left
        torch.manual_seed(lost)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6, bias=bias))
        keep = torch.cat([seen.flatten(), shown[: 6 * bias]])
        made = case(model, (1, 3, 4), keep=keep)
        head = layers_of(made.network)[-1]
        found = filled(made.network, head, made.gradients, exact=True)
        assert int(found.open.sum()) == left
        if not left:
            whole = case(model, (1, 3, 4)).gradients[head.name].weight
            torch.testing.assert_close(found.gradient, whole, rtol=1e-9, atol=1e-12)
    # A class of no entry: one follows because all add up to 0, two by the logits of the others alone.
    seen[:, :5] = True
    seen[:2] = False
    assert open_features(seen, torch.zeros(6, dtype=torch.bool)) == 0
    assert open_features(seen[:4], torch.zeros(4, dtype=torch.bool)) == 12


@subtests("offset", [0.0, -3.0, 0.7, 5.0])
def test_margins_beside_a_bias_are_the_roots_of_the_scalar(offset):
    for h in (2.0, 0.0, -0.01, -0.2):
        try:
            roots = margins(h, offset)
        except InconsistentObservation:
            grid = torch.linspace(-50, 200, 200_001, dtype=torch.float64)
            assert float((-grid * torch.sigmoid(-grid - offset)).min()) > h
            continue
        assert len(roots) == (2 if h < 0 else 1)
        for mu in roots:
            assert -mu / (1 + math.exp(mu + offset)) == pytest.approx(h, abs=1e-12)


@subtests("kind", ["leaky_relu", "relu", "tanh", "sigmoid"])
def test_activations_are_inverted_with_their_slopes(kind):
    before = drawn(50).requires_grad_()
    operation = Operation(name="a", kind=kind, inputs=("x",), shape=(50,), settings={"slope": 0.1})
    after = functional.leaky_relu(before, 0.1) if kind == "leaky_relu" else getattr(torch, kind)(before)
    found = invert(operation, after.detach())
    where = torch.ones(50, dtype=torch.bool) if found.known is None else found.known
    torch.testing.assert_close(found.before[where], before.detach()[where], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.slope, torch.autograd.grad(after.sum(), before)[0], rtol=1e-12, atol=1e-12)
    assert int(where.sum()) == (50 if kind != "relu" else int((before > 0).sum()))


def test_results_out_of_range_are_clamped_and_counted():
    operation = Operation(name="a", kind="tanh", inputs=("x",), shape=(3,))
    found = invert(operation, torch.tensor([0.5, 1.5, -1.0], dtype=torch.float64))
    assert found.clamped == 2 and bool(found.before.isfinite().all())
