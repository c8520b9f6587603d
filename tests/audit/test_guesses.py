"""What a step answers of several guesses at once, against what it answers of one after another."""

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.core.search.gradient_matching import direction_mismatch, direction_mismatches
from leakbench.defenses.core import (
    Block,
    Defense,
    Everything,
    Layout,
    Stateless,
    StepPlan,
    Subspace,
    cross_entropy,
    unbounded,
)
from leakbench.defenses.core.gradients.candidate_gradients import CandidateGradients, candidate_gradients_of
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.random_sparsification import random_sparsification

from ..parameters import subtests

SHAPE, CLASSES = (2, 6, 6), 3


def net(seed: int = 0) -> nn.Module:
    """Every known layer, with and without bias, a stride, a dilation, and an activation in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(6 * 9, 5),
            nn.Softplus(),
            nn.Linear(5, CLASSES, bias=False),
        ).double()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class AlongAll(Stateless):
    """Releases the coefficients along every axis: V = I."""

    def plan(self, context):
        basis = torch.eye(context.dim, dtype=torch.float64)
        return StepPlan(Block(codec=Subspace.of(basis), bound=unbounded()))


class AsTheyAre(Stateless):
    """Releases gradients as they are."""

    def plan(self, context):
        return StepPlan(Block(codec=Everything(context.dim), bound=unbounded()))


DEFENSES = {
    "dense": lambda: dp_sgd(clip_norm=1e9, noise_multiplier=0.0),
    "clipped": lambda: dp_sgd(clip_norm=0.05, noise_multiplier=0.0),
    "noisy": lambda: dp_sgd(clip_norm=0.05, noise_multiplier=0.1),
    "normalized": lambda: dp_sgd(clip_norm=0.5, bound="normalize", noise_multiplier=0.0),
    "masked": lambda: random_sparsification(clip_norm=0.05, final_sparsity=0.5, noise_multiplier=0.0),
    "two parts": lambda: dpdr(noise_multiplier=0.5),
}


def shared(defense: Defense, *, batch: int = 1, step: int = 1, model: nn.Module | None = None):
    inputs, labels = drawn(batch, *SHAPE), torch.arange(batch) % CLASSES
    target, _ = audit.share_update(model or net(), inputs, labels, defense, step=step, seed=0)
    return target, labels


@pytest.mark.long
@subtests("batch", [1, 3])
@subtests("name", DEFENSES)
def test_several_guesses_at_once_give_what_each_gives_alone(name, batch):
    target, labels = shared(DEFENSES[name](), batch=batch)
    guesses = drawn(4, batch, *SHAPE, seed=2).requires_grad_()
    apart = torch.stack([target.simulate(one, labels) for one in guesses])
    assert target.simulate_many is not None
    torch.testing.assert_close(target.simulate_many(guesses, labels), apart, rtol=1e-9, atol=1e-12)
    # Values and gradients of the objective itself, of the way without updates where there is one.
    one = direction_mismatch(target)
    alone = torch.stack([one(guess, labels) for guess in guesses])
    together = direction_mismatches(target)(guesses, labels)
    torch.testing.assert_close(together, alone, rtol=1e-8, atol=1e-11)
    expected, found = (torch.autograd.grad(v.sum(), guesses)[0] for v in (alone, together))
    assert expected.abs().max() > 1e-6
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


def test_each_guess_may_have_labels_of_its_own():
    target, _ = shared(DEFENSES["clipped"](), batch=2)
    guesses = drawn(3, 2, *SHAPE, seed=3)
    own, soft = torch.tensor([[0, 1], [2, 2], [1, 0]]), drawn(3, 2, CLASSES, seed=4).softmax(dim=2)
    assert target.simulate_many is not None
    for labels in (own, soft):
        apart = torch.stack([target.simulate(x, y) for x, y in zip(guesses, labels, strict=True)])
        torch.testing.assert_close(target.simulate_many(guesses, labels), apart, rtol=1e-9, atol=1e-12)


def test_only_a_dense_release_is_compared_without_its_updates():
    offers = {name: shared(make())[0].compare_many is not None for name, make in DEFENSES.items()}
    assert offers == {name: name not in ("masked", "two parts") for name in DEFENSES}


def test_the_objective_of_a_basis_of_all_axes_is_that_of_the_dense_update():
    dense, labels = shared(Defense(AsTheyAre(), noise_multiplier=0.0), step=0)
    along, _ = shared(Defense(AlongAll(), noise_multiplier=0.0), step=0)
    assert along.compare_many is None and dense.compare_many is not None
    # Engines differ, and so does the last digit of a sum; simulated updates are the same numbers.
    torch.testing.assert_close(along.released, dense.released, rtol=1e-12, atol=1e-14)
    guesses = drawn(4, 1, *SHAPE, seed=2)
    one, other = direction_mismatch(dense), direction_mismatch(along)
    for guess in guesses:
        assert torch.equal(dense.simulate(guess, labels), along.simulate(guess, labels))
        torch.testing.assert_close(one(guess, labels), other(guess, labels), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        direction_mismatches(along)(guesses, labels), direction_mismatches(dense)(guesses, labels)
    )


def test_the_bound_is_that_of_each_guessed_example():
    """Both examples are longer than the clip norm: the sum is that of two rows of exactly this length."""
    target, labels = shared(DEFENSES["clipped"](), batch=2)
    rows = target.contributions(drawn(2, *SHAPE, seed=5), labels)
    torch.testing.assert_close(rows.norm(dim=1), torch.full((2,), 0.05, dtype=torch.float64))
    guess = drawn(1, 2, *SHAPE, seed=5)
    assert target.compare_many is not None
    torch.testing.assert_close(target.compare_many(guess, labels)[1], (rows.sum(0) / 2).square().sum()[None])


class _Twice(nn.Module):
    """Uses one layer twice, so that its gradient is a sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(inputs).tanh()))


@subtests(
    ("model", "shape"),
    [
        (_Twice(), (4,)),
        (nn.Sequential(nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, CLASSES)), (4,)),
        (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, CLASSES)), SHAPE),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, CLASSES)), (3, 4)),
    ],
)
def test_what_is_not_known_is_left_to_the_reference_which_gives_the_same(model, shape):
    model = model.double()
    layout = Layout.of(model)
    assert candidate_gradients_of(model, cross_entropy, layout, layout.read(model), shape) is None
    inputs, labels = drawn(1, *shape), torch.tensor([1])
    target, _ = audit.share_update(model, inputs, labels, dp_sgd(clip_norm=0.3, noise_multiplier=0.0))
    guesses = drawn(3, 1, *shape, seed=6)
    one = direction_mismatch(target)
    torch.testing.assert_close(
        direction_mismatches(target)(guesses, labels), torch.stack([one(guess, labels) for guess in guesses])
    )


def test_a_wrong_factor_is_found_before_anything_is_searched(monkeypatch):
    model = net()
    layout = Layout.of(model)
    point = layout.read(model)
    assert isinstance(candidate_gradients_of(model, cross_entropy, layout, point, SHAPE), CandidateGradients)
    monkeypatch.setattr(
        "leakbench.defenses.core.gradients.candidate_gradients.LayerFactors._normalised", lambda self: self.entering
    )
    assert candidate_gradients_of(model, cross_entropy, layout, point, SHAPE) is None


def test_no_hook_is_left_behind():
    model = net()
    layout = Layout.of(model)
    found = CandidateGradients(model, cross_entropy, layout, layout.read(model))
    found.rows(drawn(2, *SHAPE), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError):
        found.rows(drawn(2, 5, 6, 6), torch.tensor([0, 1]))
    assert not any(m._forward_hooks for m in model.modules())
