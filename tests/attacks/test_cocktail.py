"""What is particular to CocktailParty; the duties of every attack are in test_every_attack.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from leakbench.attacks.cocktail import cocktail
from leakbench.attacks.core import (
    AccessError,
    Examples,
    InconsistentObservation,
    NotApplicable,
    Observation,
    RankDeficient,
)

from ..parameters import subtests
from . import toys

SIDE, WIDTH = 10, 24


def pictures(count: int, *, seed: int) -> Examples:
    """Images of a few rectangles: edges are at few pixels, as in photos."""
    coins = toys.generator(seed)
    images = torch.zeros(count, 1, SIDE, SIDE, dtype=torch.float64)
    for image in images:
        for _ in range(4):
            (top, left), (high, wide) = (
                torch.randint(*span, (2,), generator=coins).tolist() for span in ((0, 7), (2, 6))
            )
            image[0, top : top + high, left : left + wide] = torch.rand((), generator=coins, dtype=torch.float64)
    labels = torch.randint(toys.CLASSES, (count,), generator=coins)
    return Examples(ids=torch.arange(count), inputs=images, labels=labels)


def network(activation: nn.Module, *, seed: int = 0, width: int = WIDTH, bias: bool = True) -> nn.Module:
    first = nn.Linear(SIDE * SIDE, width, bias=bias)
    net = nn.Sequential(nn.Flatten(), first, activation, nn.Linear(width, toys.CLASSES)).double()
    return toys._drawn(net, seed)


def shared(
    count: int,
    *,
    activation: nn.Module | None = None,
    keep: float = 1.0,
    noise: float = 0.0,
    clip_norm: float | None = None,
    seed: int = 0,
    width: int = WIDTH,
    batch: Examples | None = None,
) -> tuple[Observation, Examples]:
    model = network(activation or nn.Tanh(), seed=seed, width=width)
    batch = batch or pictures(count, seed=seed)
    dim = sum(p.numel() for p in model.parameters())
    kept = torch.rand(dim, generator=toys.generator(seed + 9)) < keep
    encoder = torch.eye(dim, dtype=torch.float64)[kept]
    std = torch.full((len(encoder),), noise, dtype=torch.float64)
    step = toys.Step(
        model=model, batch=batch, encoder=encoder, noise_std=std, clip_norm=clip_norm, expected_batch=count, seed=seed
    )
    return step.observe(batch_size=count), batch


def worst(found: Tensor, truth: Tensor) -> float:
    """Largest MSE of a true image to the nearest found one."""
    return float((found.flatten(1)[:, None] - truth.flatten(1)[None]).square().mean(dim=2).amin(dim=0).max())


@pytest.mark.parametrize(("activation", "count"), [(nn.Tanh(), 1), (nn.ReLU(), 3), (nn.Tanh(), 4)])
def test_images_of_edges_are_exact_in_small_batches(activation, count):
    target, batch = shared(count, activation=activation, seed=1)
    result = cocktail(target, toys.generator(2))
    assert worst(result.inputs, batch.inputs) < 1e-12
    assert result.status == "ok" and result.objective < 1e-6 and result.certified is None
    assert sorted(result.labels.tolist()) == sorted(batch.labels.tolist())


def test_clipping_of_each_example_changes_nothing():
    target, batch = shared(3, clip_norm=1e-3, seed=3)
    assert worst(cocktail(target, toys.generator(1)).inputs, batch.inputs) < 1e-12


@pytest.mark.long
def test_a_known_mask_hides_nothing_while_enough_is_kept():
    target, batch = shared(2, keep=0.6, clip_norm=0.1, seed=4, width=40)
    assert worst(cocktail(target, toys.generator(1)).inputs, batch.inputs) < 1e-10


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_of_a_wide_layer_half_and_a_third_are_enough_for_every_image(keep):
    target, batch = shared(2, keep=keep, clip_norm=0.1, seed=4, width=20 if keep == 0.5 else 40)
    result = cocktail(target, toys.generator(1))
    assert worst(result.inputs, batch.inputs) < 1e-10
    assert result.determined is not None and bool(result.determined.all())


@pytest.mark.long
def test_independence_alone_is_a_start_and_the_network_makes_it_exact():
    target, batch = shared(4, seed=1)
    start, end = (cocktail(target, toys.generator(2), steps=steps) for steps in (0, 30))
    assert worst(end.inputs, batch.inputs) < 1e-3 * worst(start.inputs, batch.inputs)
    assert end.objective < 1e-3 * start.objective
    # The start is closer than any image of the middle of the box.
    assert worst(start.inputs, batch.inputs) < worst(torch.full_like(batch.inputs, 0.5), batch.inputs)


@pytest.mark.long
def test_noise_decides_how_well_images_are_found_and_much_of_it_is_told():
    target, batch = shared(2, seed=5)
    size = float(target.released.square().mean().sqrt())
    found = []
    for relative in (1e-4, 1e-2, 10.0):
        noisy, _ = shared(2, noise=2 * relative * size, seed=5)
        result = cocktail(noisy, toys.generator(1))
        found.append((worst(result.inputs, batch.inputs), result.status))
    assert found[0][0] < 1e-4 and found[0][0] < found[1][0] < found[2][0]
    assert [status for _, status in found] == ["ok", "ok", "degraded"]


@pytest.mark.long
def test_one_image_that_is_not_matched_is_told_however_well_the_others_are():
    target, _ = shared(6, activation=nn.ReLU(), seed=3)
    result = cocktail(target, toys.generator(2))
    assert result.determined is not None
    matched = result.determined.flatten(1).all(dim=1)
    # The mean alone would have called all six of them matched.
    assert result.objective < 0.5 and int(matched.sum()) == 5 and result.status == "degraded"
    assert torch.equal(result.determined.flatten(1).any(dim=1), matched)
    whole = cocktail(shared(6, activation=nn.ReLU(), seed=2)[0], toys.generator(2))
    assert whole.status == "ok" and whole.determined is not None and bool(whole.determined.all())


@pytest.mark.long
def test_an_update_of_others_gives_their_images_and_none_of_the_sought():
    target, decoys = shared(2, seed=6)
    sought = pictures(2, seed=60)
    result = cocktail(target, toys.generator(1))
    assert worst(result.inputs, decoys.inputs) < 1e-10 and worst(result.inputs, sought.inputs) > 1e-2


def test_an_image_that_is_in_the_batch_twice_is_a_missing_direction():
    one = pictures(1, seed=7)
    twice = Examples(ids=torch.arange(2), inputs=one.inputs.repeat(2, 1, 1, 1), labels=one.labels.repeat(2))
    target, _ = shared(2, batch=twice, seed=7)
    with pytest.raises(RankDeficient, match="must have 2 directions, one for each example, and it has 1"):
        cocktail(target, toys.generator(1))


def test_what_it_cannot_separate_is_refused_in_one_sentence():
    large, _ = shared(6, seed=8, width=5)
    with pytest.raises(NotApplicable, match="a batch of 6 must not be larger than"):
        cocktail(large, toys.generator(1))
    few, _ = shared(2, seed=8, keep=0.05)
    with pytest.raises(NotApplicable, match="it shows"):
        cocktail(few, toys.generator(1))
    conv = toys.update_target(net="conv")[0]
    with pytest.raises(NotApplicable, match="which cannot be undone"):
        cocktail(conv, toys.generator(1))
    unknown = replace(shared(1, seed=8)[0], structure=None)
    with pytest.raises(ValueError, match="declared is empty"):
        cocktail(unknown, toys.generator(1))


def test_labels_are_found_and_not_asked_for_and_the_size_of_the_batch_is():
    target, batch = shared(2, seed=3, width=8)
    assert target.labels is None
    free = cocktail(target, toys.generator(1))
    assert sorted(free.labels.tolist()) == sorted(batch.labels.tolist())
    granted = cocktail(replace(target, labels=batch.labels), toys.generator(1))
    assert torch.equal(granted.labels, free.labels) and torch.equal(granted.inputs, free.inputs)
    with pytest.raises(AccessError, match="cocktail needs the number of examples in the batch"):
        cocktail(replace(target, batch_size=None), toys.generator(1))


def test_an_update_that_is_not_finite_or_of_another_length_is_a_named_error():
    target, _ = shared(2, seed=5, width=8)
    broken = target.released.clone()
    broken[7] = float("nan")
    with pytest.raises(InconsistentObservation, match="released must be finite, got NaN or infinity"):
        cocktail(replace(target, released=broken), toys.generator(1))
    for other in (target.released[:-1], torch.cat([target.released, target.released[:1]])):
        with pytest.raises(
            InconsistentObservation, match=rf"released must have {len(broken)} numbers.*got {len(other)}"
        ):
            cocktail(replace(target, released=other), toys.generator(1))


@subtests("settings, sentence", [({"iterations": 0}, "iterations must be"), ({"steps": -1}, "steps")])
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        cocktail(shared(1)[0], toys.generator(1), **settings)
