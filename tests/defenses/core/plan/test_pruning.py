"""Which weights are dropped: fractions of each or of all, by the lowest scores; of every layer something is left."""

import pytest
import torch

from defenses.core import Layout, Sparse, clip, drop_in_each, drop_overall

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


def test_a_layout_without_weights_loses_nothing():
    flat = Layout.flat(5)
    assert bool(drop_in_each(flat, 0.9, torch.zeros(5)).all()) and bool(drop_overall(flat, 0.9, torch.zeros(5)).all())


def test_a_rate_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"drop_rate must be in \[0, 1\), got 1.0"):
        Sparse(bound=clip(1.0), drop_rate=1.0)
