"""Label recovery against known answers; the duties of every attack are in test_every_attack.py."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.core import Examples, InconsistentObservation, NotApplicable, Observation, RankDeficient
from leakbench.attacks.core.closed_form.label_counts import (
    LastLayer,
    class_sums,
    largest_remainder,
    one_label,
    possible_labels,
)
from leakbench.attacks.label_recovery import label_recovery
from leakbench.defenses.core import Defense, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.per_layer import per_layer
from leakbench.defenses.random_freeze import random_freeze

from ..parameters import subtests
from . import toys

QUIET = dp_sgd(noise_multiplier=0.0, clip_norm=1e6)
SHAPE = (1, 8, 8)


def drawn(count: int, classes: int = 10, *, seed: int = 0, first: int = 0) -> Examples:
    coins = toys.generator(seed)
    inputs = torch.rand(count, *SHAPE, generator=coins)
    return Examples(
        ids=torch.arange(first, first + count),
        inputs=inputs,
        labels=torch.randint(classes, (count,), generator=coins),
    )


PUBLIC = drawn(64, seed=99, first=1000)


def net(*layers: nn.Module, seed: int = 0) -> nn.Sequential:
    """Layers with weights as PyTorch draws them, by a generator of their own."""
    coins = toys.generator(seed + 5)
    with torch.no_grad():
        for layer in layers:
            for p in layer.parameters():
                bound = next(layer.parameters())[0].numel() ** -0.5
                p.copy_(bound * (2 * torch.rand(p.shape, generator=coins) - 1))
    return nn.Sequential(*layers)


def tanh_net(classes: int = 10, *, bias: bool = True, seed: int = 0) -> nn.Sequential:
    return net(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, classes, bias=bias), seed=seed)


def conv(classes: int = 10, *, bias: bool = True, seed: int = 0) -> nn.Sequential:
    layers = (nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return net(*layers, nn.Linear(4, classes, bias=bias), seed=seed)


def linear(classes: int = 10, *, bias: bool = True, seed: int = 0) -> nn.Sequential:
    return net(nn.Flatten(), nn.Linear(64, classes, bias=bias), seed=seed)


def shared(
    model: nn.Module,
    labels: list[int],
    defense: Defense = QUIET,
    *,
    seed: int = 0,
    public: Examples = PUBLIC,
    step: int = 0,
) -> Observation:
    batch = drawn(len(labels), seed=seed)
    inputs = batch.inputs.to(next(model.parameters()).dtype)
    target, _ = audit.share_update(
        model, inputs, torch.tensor(labels), defense, population=public, seed=seed, step=step, noise=seeded(seed)
    )
    return target


def overlap(found: Tensor, truth: list[int]) -> float:
    return sum((Counter(found.tolist()) & Counter(truth)).values()) / len(truth)


@pytest.mark.long
@subtests("bias", [True, False])
@subtests("built", [linear, tanh_net, conv])
def test_the_label_of_one_example_is_certain_whatever_stands_before_the_last_layer(built, bias):
    for seed in range(3):
        model = built(bias=bias, seed=seed)
        for clip_norm in (1e6, 1e-2):
            target = shared(model, [seed + 3], dp_sgd(noise_multiplier=0.0, clip_norm=clip_norm), seed=seed)
            result = label_recovery(target)
            assert result.labels.tolist() == [seed + 3] and torch.equal(result.lower, result.upper)
            assert result.posterior[seed + 3] == 1 and result.status == "ok"


def test_counts_of_eight_distinct_labels_under_an_untrained_network_are_right():
    """At least 95 % of the labels on ten classes; the shares of classes alone get 80 %."""
    right, guessed = [], []
    for seed in range(12):
        labels = torch.randperm(10, generator=toys.generator(seed))[:8].tolist()
        target = shared(tanh_net(seed=seed), labels, seed=seed)
        result = label_recovery(target)
        right.append(overlap(result.labels, labels))
        guessed.append(overlap(torch.arange(8), labels))
        truth = torch.bincount(torch.tensor(labels), minlength=10)
        assert ((result.lower <= truth) & (truth <= result.upper)).all()
    assert sum(right) / 12 >= 0.95 and sum(guessed) / 12 < 0.85


def test_a_batch_with_a_class_several_times_is_counted():
    labels = [1, 1, 1, 1, 4, 4, 7, 9, 9, 9, 9, 9, 9, 2]
    for built in (tanh_net, conv):
        result = label_recovery(shared(built(), labels))
        assert overlap(result.labels, labels) >= 13 / 14


def test_without_a_bias_rows_are_held_against_public_features():
    labels = [1, 1, 1, 1, 4, 4, 7, 9]
    result = label_recovery(shared(tanh_net(bias=False), labels))
    assert overlap(result.labels, labels) >= 7 / 8 and int(result.counts.sum()) == 8


def test_clipped_batches_have_intervals_that_hold_the_truth_and_certain_lower_ends():
    covered = []
    for seed in range(10):
        labels = torch.randint(10, (8,), generator=toys.generator(seed)).tolist()
        defense = dp_sgd(noise_multiplier=0.0, clip_norm=0.2)
        result = label_recovery(shared(tanh_net(seed=seed), labels, defense, seed=seed))
        truth = torch.bincount(torch.tensor(labels), minlength=10)
        covered.append(((result.lower <= truth) & (truth <= result.upper)).double().mean())
        # Whatever the factors are: a negative sum is a class that is there.
        assert (truth[result.lower > 0] > 0).all()
        assert int(result.counts.sum()) == 8
    assert sum(covered) / 10 > 0.97


def test_a_clip_norm_a_layer_changes_nothing_for_one_example():
    defense = per_layer(clip_norm=0.05, noise_multiplier=0.0)
    assert label_recovery(shared(tanh_net(), [6], defense)).labels.tolist() == [6]


def named(noise: float, *, seed: int, labels: list[int]) -> tuple[int, int]:
    """How many labels were named at this noise on the last bias, and how many of them are right."""
    defense = dp_sgd(clip_norm=1.0, noise_multiplier=noise)
    result = label_recovery(shared(LEARNED, labels, defense, seed=seed))
    found = result.labels.tolist()
    return len(found), sum((Counter(found) & Counter(labels)).values())


LEARNED = tanh_net(seed=3)


@pytest.mark.long
def test_noise_names_no_label_and_little_noise_names_them_all():
    """At level 0.05 over all classes: among 40 updates of noise, more than 8 with a name have a chance below 0.1 %."""
    wrong = 0
    for seed in range(40):
        count, right = named(200.0, seed=seed, labels=[3])
        wrong += count > right
    assert wrong <= 8
    quiet = [named(0.02, seed=seed, labels=[3, 3, 8, 1]) for seed in range(10)]
    assert sum(right for _, right in quiet) >= 38 and all(count == right for count, right in quiet)


def test_what_noise_leaves_open_is_said_by_the_posterior_and_the_interval():
    loud = label_recovery(shared(LEARNED, [3], dp_sgd(noise_multiplier=200.0)))
    assert loud.status == "degraded" and len(loud.labels) == 0
    share = (torch.bincount(PUBLIC.labels, minlength=10) + 1).double() / 74
    assert (loud.posterior - share).abs().max() < 0.05
    assert (loud.lower == 0).all() and (loud.upper == 1).all()
    clear = label_recovery(shared(LEARNED, [3], dp_sgd(noise_multiplier=0.02)))
    assert clear.posterior.argmax() == 3 and clear.posterior[3] > 0.99


def test_of_a_mask_only_rows_that_were_released_count():
    seen = torch.ones(5, 3, dtype=torch.bool)
    seen[2] = seen[4] = False
    bias_observed = torch.tensor([True, True, False, True, False])
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1]).double()
    counts = torch.tensor([0, 1, 1, 2, 0])
    sums = 4 * probabilities - counts
    features = torch.tensor([1.0, 2.0, -1.0]).double()
    layer = LastLayer(
        weight=sums[:, None] * features * seen,
        weight_observed=seen,
        bias=sums * bias_observed,
        bias_observed=bias_observed,
    )
    silent = replace(layer, weight=torch.zeros(5, 3).double(), bias=torch.zeros(5).double())
    found, _, known = class_sums(layer, silent, features)
    assert known.tolist() == [True, True, False, True, False] and torch.allclose(found[known], sums[known])
    assert layer.observed.tolist() == known.tolist()
    # Without the biases the rows say the same, and a single class without either follows from the others.
    rows = replace(layer, bias_observed=torch.zeros(5, dtype=torch.bool), weight=sums[:, None] * features)
    rows = replace(rows, weight_observed=torch.tensor([True, True, True, True, False])[:, None].expand(5, 3))
    found, _, known = class_sums(rows, silent, features)
    assert known.all() and torch.allclose(found, sums)


def test_a_masked_update_of_one_example_gives_its_label_away_and_a_batch_says_what_it_does_not_show():
    for seed in range(5):
        defense = random_freeze(final_sparsity=0.5, cooling_epochs=1, noise_multiplier=0.0)
        assert label_recovery(shared(tanh_net(seed=seed), [seed], defense, seed=seed, step=3)).labels.tolist() == [seed]
    few = random_freeze(final_sparsity=0.97, cooling_epochs=1, noise_multiplier=0.0)
    result = label_recovery(shared(tanh_net(), [1, 1, 1, 5, 5, 8], few, step=3))
    assert not result.observed.all() and result.observed.any()
    assert (result.counts[~result.observed] == 0).all() and (result.upper[~result.observed] > 0).all()


@pytest.mark.long
def test_projected_updates_are_held_against_what_public_examples_would_release():
    labels = [1, 1, 1, 1, 4, 4, 7, 9]
    for seed in range(3):
        defense = pcdp(rank=40, scope="global", noise_multiplier=0.0, clip_norm=1e6)
        target = shared(tanh_net(seed=seed), labels, defense, seed=seed)
        assert len(target.released) == 40
        result = label_recovery(target)
        assert overlap(result.labels, labels) >= 7 / 8 and int(result.counts.sum()) == 8
        loud = label_recovery(
            shared(tanh_net(seed=seed), labels, pcdp(rank=40, scope="global", noise_multiplier=1e3), seed=seed)
        )
        assert loud.status == "degraded"


def test_too_few_coefficients_for_the_classes_are_refused():
    with pytest.raises(RankDeficient, match="tell the 10 classes apart") as raised:
        label_recovery(shared(tanh_net(), [1, 2], pcdp(rank=4, scope="global", noise_multiplier=0.0)))
    assert raised.value.deficit == 5


def test_two_classes_of_one_logit_are_counted_by_its_sign():
    public = Examples(ids=PUBLIC.ids, inputs=PUBLIC.inputs, labels=PUBLIC.labels % 2)
    for labels in ([0], [1], [1, 1, 0, 1, 1, 1]):
        result = label_recovery(shared(tanh_net(1), labels, public=public))
        assert result.labels.tolist() == sorted(labels)


def layer_of(factors: list[float], features: list[float], *, bias: bool = False) -> LastLayer:
    left, right = torch.tensor(factors).double(), torch.tensor(features).double()
    return LastLayer(
        weight=torch.outer(left, right),
        weight_observed=torch.ones(len(factors), len(features), dtype=torch.bool),
        bias=left * bias,
        bias_observed=torch.full((len(factors),), bias),
    )


def test_the_row_of_the_label_is_the_one_that_is_opposed_to_all_others():
    # Features of both signs, whose sum is positive: the smallest sum of a row is that of another class.
    assert one_label(layer_of([0.2, -0.5, 0.3], [-3.0, 1.0, 1.0])) == 1
    assert int(layer_of([0.2, -0.5, 0.3], [-3.0, 1.0, 1.0]).weight.sum(1).argmin()) == 2
    assert one_label(layer_of([0.2, -0.5, 0.3], [0.0, 0.0], bias=True)) == 1
    with pytest.raises(NotApplicable, match="must tell the label's from the others"):
        one_label(layer_of([0.4, -0.4], [1.0, 2.0]))
    with pytest.raises(NotApplicable, match="certain of the label"):
        one_label(layer_of([0.0, 0.0, 0.0], [1.0, 2.0], bias=True))


def test_entries_that_a_mask_leaves_decide_as_many_labels_as_they_connect():
    """Factors 0.1, 0.2, -0.6, 0.3 of four classes and features 1, -2, 3, 1."""
    whole = layer_of([0.1, 0.2, -0.6, 0.3], [1.0, -2.0, 3.0, 1.0])

    def left(*rows: str, bias: str = "....") -> list[int]:
        seen = torch.tensor([[mark == "x" for mark in row] for row in rows])
        bias_observed = torch.tensor([mark == "x" for mark in bias])
        factors = torch.tensor([0.1, 0.2, -0.6, 0.3]).double()
        layer = replace(whole, weight=whole.weight * seen, weight_observed=seen)
        layer = replace(layer, bias=factors * bias_observed, bias_observed=bias_observed)
        return possible_labels(layer).nonzero()[:, 0].tolist()

    # No two rows share a feature, and yet all are connected: 0-1 by the first, 1-2 by the third, 2-3 by the last.
    assert left("x...", "x.x.", "..xx", "...x") == [2]
    # Two that are opposed: the longer one. Two that are not: another one.
    assert left("....", ".x..", ".x..", "....") == [2]
    assert left("x...", "x...", "....", "....") == [2, 3]
    # A single row says nothing, unless the bias gives its sign: by its own entry, or by that of another row.
    assert left("x...", "....", ".x..", "....") == [0, 1, 2, 3]
    assert left("....", "....", "....", "....", bias="xx..") == [2, 3]
    assert left("x...", "....", "....", "x...", bias="x...") == [1, 2]
    assert left("....", "....", ".x..", ".x..", bias="...x") == [2]
    with pytest.raises(NotApplicable, match="4 may be it"):
        one_label(replace(whole, weight=whole.weight * torch.eye(4), weight_observed=torch.eye(4, dtype=torch.bool)))


def test_a_mask_that_leaves_several_labels_says_which_and_names_none():
    defense, open_ones = random_freeze(final_sparsity=0.96, cooling_epochs=1, noise_multiplier=0.0), 0
    for seed in range(8):
        target = shared(tanh_net(seed=seed), [seed], defense, seed=seed, step=3)
        try:
            result = label_recovery(target)
        except NotApplicable as refused:
            assert "it leaves all" in str(refused)
            continue
        assert result.upper[seed] == 1 and result.posterior.sum() == pytest.approx(1.0)
        assert bool((result.posterior[result.upper == 0] == 0).all())
        if int(result.upper.sum()) > 1:
            open_ones += 1
            assert result.status == "degraded" and len(result.labels) == 0
        else:
            assert result.labels.tolist() == [seed]
    assert 0 < open_ones < 8


def test_a_batch_that_is_said_to_be_one_example_is_found_out():
    with pytest.raises(InconsistentObservation, match="got 2: is the batch larger"):
        one_label(layer_of([0.4, -0.5, -0.3, 0.4], [1.0], bias=True))
    with pytest.raises(InconsistentObservation, match="opposed to all others"):
        one_label(layer_of([0.4, -0.5, -0.3, 0.4], [1.0, 2.0]))
    told = replace(shared(linear(), [1, 2, 5]), batch_size=2, labels=None)
    with pytest.raises(InconsistentObservation, match="said to have, 2, and 3 show"):
        label_recovery(told)


@subtests(
    "expected, total, counts",
    [
        ([1.4, 0.7, 0.9], 3, [1, 1, 1]),
        ([2.9999999999, 0.0], 3, [3, 0]),
        ([-1.0, 0.5, 0.5], 2, [0, 1, 1]),
        ([0.0, 0.0], 3, [2, 1]),
        ([5.0, 1.0], 0, [0, 0]),
    ],
)
def test_counts_add_up_by_largest_remainders(expected, total, counts):
    assert largest_remainder(torch.tensor(expected), total).tolist() == counts


@subtests("settings, sentence", [({"level": 0.0}, "level must be in"), ({"public": 0}, "public must be at least 1")])
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        label_recovery(shared(linear(), [1]), **settings)
