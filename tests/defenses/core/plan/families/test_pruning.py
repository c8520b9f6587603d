"""Which weights are dropped: fractions of each or of all, by the lowest scores; of every layer something is left."""

from dataclasses import dataclass

import pytest
import torch

from leakbench.defenses.core import Context, Coordinates, Layout, Sparse, clip, drop_in_each, drop_overall

from .....parameters import subtests

LAYOUT = Layout(("a.weight", "a.bias", "gain", "b.weight"), ((2, 5), (2,), (4, 1, 1, 1), (3, 4)))
SCORES = torch.arange(float(LAYOUT.dim))


def left(mask):
    return [int(mask[a:b].sum()) for a, b in LAYOUT.slices]


def test_a_fraction_of_each_weight_goes_by_the_lowest_scores():
    assert left(drop_in_each(LAYOUT, 0.5, SCORES)) == [5, 2, 4, 6]
    assert drop_in_each(LAYOUT, 0.5, SCORES)[:10].tolist() == [False] * 5 + [True] * 5
    assert left(drop_in_each(LAYOUT, 0.999, SCORES)) == [1, 2, 4, 1]


def test_of_what_is_gone_already_no_fraction_is_taken():
    among = torch.ones(LAYOUT.dim, dtype=torch.bool)
    among[:6] = False
    assert left(drop_in_each(LAYOUT, 0.5, SCORES, among=among)) == [2, 2, 4, 6]


@pytest.mark.parametrize("odd", [None, float("nan"), float("inf"), -float("inf")])
def test_of_what_is_there_the_lowest_go_whatever_the_scores_of_the_rest(odd):
    coins = torch.Generator().manual_seed(0)
    layout = Layout(("weight",), ((6, 5),))
    for _ in range(100):
        scores = torch.randint(0, 6, (30,), generator=coins).float()
        if odd is not None:
            scores[torch.rand(30, generator=coins) < 0.1] = odd
        among = torch.rand(30, generator=coins) < 0.6
        places = among.nonzero().flatten()
        dropped = min(int(0.4 * len(places)), len(places) - 1)
        expected = among.clone()
        expected[places[scores[places].argsort(stable=True)[:dropped]]] = False
        assert torch.equal(drop_in_each(layout, 0.4, scores, among=among), expected)


def test_overall_the_weakest_layer_goes_first_but_for_its_best_entry():
    assert left(drop_overall(LAYOUT, 0.5, SCORES)) == [1, 2, 4, 11]
    assert bool(drop_overall(LAYOUT, 0.5, SCORES)[9])
    assert left(drop_overall(LAYOUT, 0.0, SCORES)) == [10, 2, 4, 12]


def test_ties_infinities_and_nan_fall_as_a_stable_sort_has_them():
    coins = torch.Generator().manual_seed(0)
    layout = Layout(("weight",), ((6, 5),))
    for _ in range(200):
        scores = torch.randint(0, 4, (30,), generator=coins).float()
        for odd in (float("nan"), float("inf"), -float("inf")):
            scores[torch.rand(30, generator=coins) < 0.1] = odd
        dropped = int(torch.randint(0, 30, (1,), generator=coins))
        expected = torch.ones(30, dtype=torch.bool)
        expected[scores.argsort(stable=True)[:dropped]] = False
        assert torch.equal(drop_in_each(layout, (dropped + 0.5) / 30, scores), expected)
        # Selected by PyTorch, as on a GPU.
        assert torch.equal(drop_in_each(layout, (dropped + 0.5) / 30, scores.requires_grad_()), expected)


def test_a_layout_without_weights_loses_nothing():
    flat = Layout.flat(5)
    assert bool(drop_in_each(flat, 0.9, torch.zeros(5)).all()) and bool(drop_overall(flat, 0.9, torch.zeros(5)).all())


def test_a_rate_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"drop_rate must be in \[0, 1\), got 1.0"):
        Sparse(bound=clip(1.0), drop_rate=1.0)


@dataclass(frozen=True)
class Fixed:
    """Keeps what it is told to."""

    mask: torch.Tensor

    def keeps(self, context):
        return self.mask


@subtests("pruned", [None, "zero", "initial"])
@subtests("dropping", [None, "random", "magnitude"])
@subtests("hold", [True, False])
@subtests("rates", [(0.4, 0.3), (0.0, 0.0), (0.999, 0.999)])
def test_a_step_releases_and_moves_what_is_left(pruned, dropping, hold, rates):
    there = torch.ones(LAYOUT.dim, dtype=torch.bool)
    coins = torch.Generator().manual_seed(0)
    for start, stop in LAYOUT.weights:
        there[start : stop - 1] = torch.rand(stop - start - 1, generator=coins) >= rates[0]
    method = Sparse(
        bound=clip(1.0),
        pruning=None if pruned is None else Fixed(there),
        pruned=pruned or "zero",
        dropping=dropping,
        drop_rate=rates[1],
        hold_dropped=hold,
    )
    parameters = torch.randn(LAYOUT.dim, generator=coins)
    state = method.start(Context(step=0, steps=3, layout=LAYOUT, parameters=parameters))
    for step in range(3):
        context = Context(step=step, steps=3, layout=LAYOUT, parameters=parameters)
        state, plan = method.plan(state, context)
        left = there.clone() if pruned else torch.ones_like(there)
        kept, scores = left.clone(), parameters.abs()
        if dropping == "random":
            scores = torch.rand(LAYOUT.dim, generator=context.coins(f"dropped {step}"))
        for start, stop in LAYOUT.weights if dropping else ():
            places = [i for i in range(start, stop) if left[i]]
            lowest = sorted(places, key=lambda i: float(scores[i]))
            kept[lowest[: min(int(rates[1] * len(places)), len(places) - 1)]] = False
        (block,) = plan.blocks
        assert isinstance(block.codec, Coordinates) and torch.equal(block.codec.kept, kept.nonzero().flatten())
        moves = kept if hold else left
        if bool(moves.all()):
            assert plan.moves is None
        else:
            assert plan.moves is not None and torch.equal(plan.moves.kept, moves.nonzero().flatten())
        if pruned == "zero" and step == 0:
            assert plan.start_at is not None and torch.equal(plan.start_at, torch.where(there, parameters, 0.0))
        else:
            assert plan.start_at is None
