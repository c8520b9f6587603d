"""What models and losses keep of a batch, where gradients are on, in the pass backward, or of large batches alone."""

import dataclasses
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbench.defenses.core import Block, Engine, Everything, StepPlan, clip, cross_entropy

from .....parameters import subtests

CLIP = 0.1
COINS = torch.Generator().manual_seed(0)
X, Y = torch.randn(48, 6, generator=COINS), torch.randint(0, 3, (48,), generator=COINS)
X[0] *= 100
CHANGED = "a pass in training mode must change nothing, got another"
FIRST = "must keep nothing of their first batch"


def network(layer):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), nn.Linear(8, 3))


def moves(model, loss=lambda: cross_entropy):
    """How far a first batch without its first example moves that step and the next, in clip norms; and the engine."""
    steps, name = [], ""
    for start in (0, 1):
        engine = Engine(model(), loss=loss(), expected_batch=48)
        plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP)))
        steps.append([engine.clipped_sums(plan, X[first:], Y[first:])[0] for first in (start, 0)])
        name = engine.name
    return [float((a - b).norm()) / CLIP for a, b in zip(*steps, strict=True)], name


class Scaled(nn.Module):
    """Divides by the size of the first batch's values, or of their average, where a condition holds."""

    def __init__(self, condition, *, average=False):
        super().__init__()
        self.condition, self.average, self.scale = condition, average, None

    def forward(self, x):
        if (self.scale is None or self.average) and self.condition(x):
            now = x.detach().abs().mean()
            self.scale = now if self.scale is None else 0.9 * self.scale + 0.1 * now
        return x if self.scale is None else x / self.scale


@dataclasses.dataclass
class Statistics:
    scale: Any = dataclasses.field(default=None, init=False, compare=False)


class InField(nn.Module):
    """Statistics in a field that is no setting."""

    def __init__(self):
        super().__init__()
        self.statistics = Statistics()

    def forward(self, x):
        now, before = x.detach().abs().mean(), self.statistics.scale
        self.statistics.scale = now if before is None else 0.9 * before + 0.1 * now
        return x / self.statistics.scale


class Bank(nn.Module):
    """A queue of batches, which is asked once it is full."""

    def __init__(self):
        super().__init__()
        self.kept = deque(maxlen=512)

    def forward(self, x):
        self.kept.append(x.detach().abs().mean())
        return x / torch.stack(list(self.kept)).mean() if len(self.kept) == 512 else x


class OfItsSize(nn.Module):
    """The first batch's size."""

    def __init__(self):
        super().__init__()
        self.size = None

    def forward(self, x):
        self.size = self.size or len(x)
        return x * 48 / self.size


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.change(grads[0]), None


class Passed(nn.Module):
    """Divides derivatives on their way back by the first batch's, or by their average; by a function or a hook."""

    def __init__(self, *, average, hook):
        super().__init__()
        self.average, self.hook, self.scale = average, hook, None

    def forward(self, x):
        if not self.hook:
            return Backward.apply(x, self.change)
        if x.requires_grad:
            x.register_hook(self.change)
        return x

    def change(self, gradient):
        now = gradient.norm() / len(gradient) ** 0.5
        if self.scale is None or self.average:
            self.scale = now if self.scale is None else 0.9 * self.scale + 0.1 * now
        return gradient / (self.scale + 1e-12)


@subtests(
    ("layer", "why"),
    [
        (lambda: Scaled(lambda x: torch.is_grad_enabled()), FIRST),
        (lambda: Scaled(lambda x: x.requires_grad), FIRST),
        (lambda: Scaled(lambda x: torch.is_grad_enabled(), average=True), CHANGED),
        (lambda: Scaled(lambda x: len(x) >= 16), FIRST),
        (InField, CHANGED),
        (Bank, CHANGED),
        (OfItsSize, FIRST),
        (lambda: Passed(average=False, hook=False), FIRST),
        (lambda: Passed(average=True, hook=False), CHANGED),
        (lambda: Passed(average=False, hook=True), FIRST),
        (lambda: Passed(average=True, hook=True), CHANGED),
    ],
)
def test_what_a_model_keeps_is_refused(layer, why):
    with pytest.raises(ValueError, match=why):
        moves(lambda: network(layer()))


class ScaledLoss:
    """Divides by the first batch's mean loss."""

    def __init__(self):
        self.scale = None

    def __call__(self, outputs, targets):
        losses = cross_entropy(outputs, targets)
        self.scale = float(losses.detach().mean()) if self.scale is None else self.scale
        return losses / self.scale


class WeightedLoss(nn.Module):
    """Weighs classes by the first batch's counts."""

    def __init__(self):
        super().__init__()
        self.weights: torch.Tensor
        self.register_buffer("weights", torch.zeros(3))

    def forward(self, outputs, targets):
        if not self.weights.any():
            self.weights = 1 / (torch.bincount(targets, minlength=3) + 1.0)
        return functional.cross_entropy(outputs, targets, weight=self.weights.to(outputs), reduction="none")


def averaging():
    """A function that remembers the average loss."""
    kept = []

    def loss(outputs, targets):
        losses = cross_entropy(outputs, targets)
        kept.append(losses.detach().mean())
        return losses / torch.stack(kept).mean()

    return loss


@subtests(("loss", "why"), [(ScaledLoss, FIRST), (WeightedLoss, FIRST), (averaging, CHANGED)])
def test_what_a_loss_keeps_is_refused_for_its_equals_too(loss, why):
    for _ in range(2):
        with pytest.raises(ValueError, match=why):
            moves(lambda: network(nn.Identity()), loss)


def first_mean():
    """A function that remembers its first mean loss, which no copy can forget."""
    kept = []

    def loss(outputs, targets):
        losses = cross_entropy(outputs, targets)
        kept[:] = kept or [losses.detach().mean()]
        return losses / kept[0].to(losses)

    return loss


def test_a_function_that_remembers_has_met_made_up_examples_before_any_data():
    (step, later), name = moves(lambda: network(nn.Identity()), first_mean)
    assert name == "layerwise"
    assert step <= 1 + 1e-4 and later == 0


class Guard(nn.Module):
    """Shrinks a batch in which something is large, where gradients are on: on the way there, or back."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        if self.way == "forward":
            return self.shrunk(x) if x.requires_grad else x
        if self.way == "function":
            return Backward.apply(x, self.shrunk)
        if x.requires_grad:
            x.register_hook(self.shrunk)
        return x

    @staticmethod
    def shrunk(values):
        largest = values.detach().abs().max()
        return values / largest if largest > 50 else values


@pytest.mark.parametrize("way", ["forward", "function", "hook"])
def test_who_reads_values_where_gradients_are_on_gets_one_example_at_a_time(way):
    (step, later), name = moves(lambda: network(Guard(way)))
    assert name == "one_by_one (no layerwise: reads values of its inputs, by _local_scalar_dense)"
    assert step <= 1 + 1e-4 and later == 0


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.inner, self.dropout = nn.Linear(6, 6), dropout

    def forward(self, x):
        tokens = self.inner(x).unflatten(1, (3, 2))
        mixed = functional.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=self.dropout)
        return mixed.flatten(1)


def test_attention_draws_nothing_without_dropout():
    assert moves(lambda: nn.Sequential(Attention(0.0), nn.Linear(6, 3)))[1] == "layerwise"
    with pytest.raises(
        ValueError, match="must draw nothing where its entries are given as they are, got random layers"
    ):
        moves(lambda: nn.Sequential(Attention(0.1), nn.Linear(6, 3)))


class BySize(nn.Module):
    """Ones, made once for each size of a batch."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x):
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.ones(len(x), 1)
        return x * self.kept[len(x)].to(x)


def test_what_is_computed_once_for_a_size_may_be_kept():
    (step, later), name = moves(lambda: network(BySize()))
    assert name == "layerwise"
    assert step <= 1 + 1e-4 and later == 0
