"""The search that attacks share: descent, restarts, its word on its own result; another attack is a few lines."""

import math

import pytest
import torch
from torch import Tensor

from leakbench.attacks.core import Access, Box, Knows, Observation, Reconstruction, attack, granted
from leakbench.attacks.core.search.gradient_matching import squared_distance
from leakbench.attacks.core.search.restarts import Descent, best_of, signed_adam, signed_adams

from ..parameters import subtests
from . import toys


@attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE)
def dlg(target: Observation, coins: torch.Generator, *, iterations: int = 250, restarts: int = 2) -> Reconstruction:
    """Deep Leakage from Gradients (Zhu, Liu & Han, NeurIPS 2019) by this search: labels are found, too."""
    box, distance, size = Box(target.input_low, target.input_high), squared_distance(target), granted(target.batch_size)

    def objective(point: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        value = distance(box.inputs(point), logits.softmax(dim=1))
        return value, value

    def descend() -> Descent:
        start = [torch.randn(size, *shape, generator=coins) for shape in (target.input_shape, (target.classes,))]
        return signed_adam(objective, start, iterations=iterations, lr=0.1, project_=lambda x, _: box.project_(x))

    found = best_of(restarts, descend)
    inputs, labels = box.clamp(box.inputs(found.unknowns[0])), found.unknowns[1].argmax(dim=1)
    return Reconstruction(inputs=inputs, labels=labels, objective=found.objective, restarts=restarts)


@pytest.mark.long
def test_deep_leakage_from_gradients_is_a_few_lines_and_finds_an_image_and_its_label():
    target, truth = toys.conv_step(dtype=torch.float32, seed=1)
    found = dlg(target, toys.generator(0))
    assert found.labels.equal(truth.labels)
    assert toys.psnr(found.inputs, truth.inputs) > 25
    assert dlg.check(target) is None and dlg.kind == "reconstruction"


def bowl(*unknowns: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest where every unknown is 1; the mismatch is a tenth of it."""
    value = torch.stack([(unknown - 1).square().sum() for unknown in unknowns]).sum()
    return value, value / 10


def test_all_unknowns_are_moved_to_the_minimum():
    found = signed_adam(bowl, [torch.zeros(3), torch.full((2, 2), 3.0)], iterations=200, lr=0.1)
    for unknown in found.unknowns:
        torch.testing.assert_close(unknown, torch.ones_like(unknown), rtol=0, atol=1e-2)
    assert found.objective == pytest.approx(10 * found.history.min().item())


def test_the_step_is_cut_at_three_five_and_seven_eighths_of_the_way():
    """On a slope a signed step is as long as the learning rate, whatever the slope."""
    positions = []

    def slope(point: Tensor) -> tuple[Tensor, Tensor]:
        positions.append(point.item())
        return 1e-6 * point.sum(), point.sum()

    signed_adam(slope, [torch.zeros(1, dtype=torch.float64)], iterations=80, lr=1.0)
    steps = -torch.tensor(positions, dtype=torch.float64).diff()
    expected = torch.tensor([1.0] * 30 + [0.1] * 20 + [0.01] * 20 + [0.001] * 9, dtype=torch.float64)
    torch.testing.assert_close(steps, expected, rtol=1e-6, atol=0)


def test_every_iterate_is_valid_and_the_best_one_is_kept():
    seen = []

    def jumpy(point: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(point.detach().clone())
        return (point - 1).square().sum(), point.sum()

    found = signed_adam(jumpy, [torch.full((1,), 5.0)], iterations=9, lr=0.7, project_=lambda point: point.clamp_(0, 2))
    assert seen[0] == 2 and all(0 <= point <= 2 for point in seen)
    best = min(seen, key=lambda point: abs(point.item() - 1))
    assert found.unknowns[0].equal(best) and not best.equal(seen[-1])


def test_the_best_of_several_starts_is_returned_with_the_history_of_all():
    starts = iter([4.0, 1.5, -3.0])
    descents = []

    def descend() -> Descent:
        descents.append(signed_adam(bowl, [torch.full((1,), next(starts))], iterations=3, lr=1e-3))
        return descents[-1]

    found = best_of(3, descend)
    assert found.unknowns == descents[1].unknowns and found.objective == descents[1].objective
    assert found.history.shape == (3, 3) and found.history[2].equal(descents[2].history)


@subtests(
    "objective, history, status",
    [
        (1.0, [0.1, 2.0, 2.0], "ok"),
        (1.0, [2.0] * 9 + [0.9], "ok"),
        (1.0, [2.0] * 10, "degraded"),
        (1.0, [0.5] + [2.0] * 9, "degraded"),  # a lucky start is not a find: its first tenth does not count
        (1.0, [math.nan] * 10, "degraded"),
        (0.3, [0.2] * 10, "degraded"),  # the release does not depend on what was moved
        (0.2, [0.2], "ok"),  # of which one iterate says nothing
        (math.inf, [0.1] * 10, "failed"),
    ],
)
def test_it_says_itself_whether_it_found_anything(objective, history, status):
    descent = Descent(unknowns=(torch.zeros(1),), objective=objective, history=torch.tensor(history))
    assert best_of(1, lambda: descent, hopeless=1.0).status == status


def test_without_one_finite_gradient_the_start_is_no_result():
    broken = signed_adam(lambda x: (x.sum().sqrt(), x.sum()), [torch.zeros(2)], iterations=4, lr=0.1)
    assert broken.objective == math.inf


def test_a_start_that_nothing_moves_is_no_result():
    flat = signed_adam(lambda x: (0 * x.sum(), 0 * x.sum()), [torch.ones(2)], iterations=4, lr=0.1)
    assert flat.objective == math.inf and flat.unknowns[0].tolist() == [1, 1]


def test_starts_that_descend_side_by_side_know_nothing_of_one_another():
    """Each of three goes as it goes alone, whatever the slopes of the others."""

    def valley(points: Tensor) -> tuple[Tensor, Tensor]:
        values = (points - 1).square().sum(dim=1) + (3.0 - points[:, 0]).sqrt()
        return values, 2 * values

    starts = torch.tensor([[0.0, 5.0], [2.95, 1.0], [-4.0, 0.3]])
    together = signed_adams(valley, [starts.clone()], iterations=60, lr=0.1)
    for start, found in zip(starts, together, strict=True):
        (alone,) = signed_adams(valley, [start.clone()[None]], iterations=60, lr=0.1)
        torch.testing.assert_close(found.unknowns[0], alone.unknowns[0])
        assert found.objective == pytest.approx(alone.objective)
        torch.testing.assert_close(found.history, alone.history, equal_nan=True)


def test_a_start_without_a_finite_gradient_fails_alone():
    def half_broken(points: Tensor) -> tuple[Tensor, Tensor]:
        values = (points * torch.tensor([[1.0], [math.nan]])).square().sum(dim=1)
        return values, values

    good, bad = signed_adams(half_broken, [torch.ones(2, 3)], iterations=30, lr=0.1)
    assert good.objective < 0.1
    assert bad.objective == math.inf and bad.unknowns[0].equal(torch.ones(3))
