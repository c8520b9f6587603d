"""Bias division says `ok` of what is right alone, and by how much noise leaves it off: random networks and releases."""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.bias_division import RELIABLE, bias_division
from leakbench.attacks.core import (
    InconsistentObservation,
    NotApplicable,
    Observation,
    RankDeficient,
    Reconstruction,
    granted,
)
from leakbench.attacks.core.closed_form.rank_one import completed, standard_errors, total_least_squares
from leakbench.attacks.core.search.single_example_rows import SingleExampleRows, checked_on_own_rows
from leakbench.audit.external.text import attack_text
from leakbench.audit.external.update.attacks import UpdateFinding
from leakbench.audit.external.update.command import result_of
from leakbench.defenses.core import Defense, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.per_layer import per_layer
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.leaderboard.records.update_report import ReconstructedInputs

from . import toys

SHAPE = (1, 6, 6)


def network(coins: random.Random, batch: int, seed: int) -> tuple[nn.Module, int]:
    """One of the toys, or up to three linear layers of random weights, and how many logits it has."""
    torch.manual_seed(seed)
    classes, width = coins.choice([1, 2, 3, 10]), coins.choice([20, 40, 100, 200])
    kind = coins.choice(["toy", "two", "two", "three"])
    if kind == "toy":
        linear = batch == 1 and coins.random() < 0.5
        return toys.linear_net(SHAPE, seed=seed) if linear else toys.relu_net(SHAPE, seed=seed, width=width), 4
    act = nn.ReLU if batch > 1 else coins.choice([nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity])
    layers = [nn.Flatten(), nn.Linear(36, width), act()]
    if kind == "three":
        return nn.Sequential(*layers, nn.Linear(width, 30), nn.ReLU(), nn.Linear(30, classes)), classes
    return nn.Sequential(*layers, nn.Linear(width, classes)), classes


def pictures(coins: random.Random, count: int, seed: int) -> Tensor:
    inputs = torch.rand(count, *SHAPE, dtype=torch.float64)
    kind = coins.choice(["uniform", "uniform", "smooth", "dark", "one line", "binary"])
    if kind == "smooth":
        return toys.examples(count, SHAPE, seed=seed).inputs.double()
    if kind == "dark":
        return inputs / 10
    if kind == "one line":
        return inputs[:1] * torch.rand(count, 1, 1, 1, dtype=torch.float64)
    return (inputs > 0.7).double() if kind == "binary" else inputs


def attacked(seed: int, *, noisy: bool) -> tuple[str, Reconstruction | None, Tensor]:
    """A random network, batch and release, and what the attack says of it."""
    coins = random.Random(seed)  # noqa: S311 - draws no secret
    batch = coins.choice([1, 1, 2, 3, 5])
    model, classes = network(coins, batch, seed)
    dtype = coins.choice([torch.float32, torch.float64])
    inputs, labels = pictures(coins, batch, seed).to(dtype), torch.randint(max(2, classes), (batch,))
    noise = 10 ** coins.uniform(-6, 0.5) if noisy else 0.0
    model, open_defense = model.to(dtype), dp_sgd(clip_norm=1e9, noise_multiplier=0.0)
    norm = float(audit.share_update(model, inputs, labels, open_defense, noise=seeded(0))[0].released.norm()) * batch
    release = coins.choice(["open", "clipped", "masked", "by layer"])
    defense: Defense = dp_sgd(clip_norm=norm * (1 if release == "open" else coins.uniform(0.05, 1)))
    more = {"step": 3, "steps": 4} if release == "masked" else {}
    if release == "masked":
        defense = random_sparsification(clip_norm=norm, final_sparsity=coins.choice([0.2, 0.5, 0.7]))
    elif release == "by layer":
        defense = per_layer(clip_norm=0.5 * norm)
    update, _ = audit.share_update(model, inputs, labels, defense.with_noise(noise), noise=seeded(seed), **more)
    try:
        return release, bias_division(update, toys.generator(seed)), inputs
    except (InconsistentObservation, NotApplicable, RankDeficient):
        return release, None, inputs


def errors(result: Reconstruction, truth: Tensor) -> Tensor:
    """Root mean square error of what is determined of each input, against the one of the batch that is nearest."""
    known = torch.ones_like(result.inputs, dtype=torch.bool) if result.determined is None else result.determined
    squares = ((result.inputs[:, None] - truth[None]).square() * known[:, None]).flatten(2).sum(2)
    return (squares / known.flatten(1).sum(1).clamp(min=1)[:, None]).sqrt().amin(1)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 1000), marks=pytest.mark.slow)])
def test_under_noise_ok_goes_with_what_the_noise_allows_whatever_the_network_and_the_release(seeds):
    """Rows of several examples look like one's under noise, and what shows at all may be far off."""
    right = Counter[str]()
    for seed in seeds:
        release, result, truth = attacked(seed, noisy=True)
        if result is None or result.status != "ok":
            continue
        off, expected = errors(result, truth), result.expected_error
        assert expected is not None and len(off) and bool((expected <= RELIABLE).all())
        # Three times what is expected, or what another example adds unseen.
        assert bool((off <= (3 * expected).clamp(min=0.02)).all()), (seed, release, off, expected)
        right["one" if len(truth) == 1 else "batch"] += 1
    assert right["one"] > 0.2 * len(seeds) and right["batch"] > 0.05 * len(seeds)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 1000), marks=pytest.mark.slow)])
def test_without_noise_ok_is_right_behind_masks_too_and_what_is_certified_is_exact(seeds):
    right = Counter[str]()
    for seed in seeds:
        release, result, truth = attacked(seed, noisy=False)
        if result is None:
            continue
        off = errors(result, truth)
        assert result.certified is not None and bool((off[result.certified] < 1e-3).all()), (seed, release, off)
        assert result.status != "ok" or bool((off < 1e-3).all()), (seed, release, off)
        right[release] += result.status == "ok"
    assert min(right.values()) > 0 and sum(right.values()) > 0.6 * len(seeds)


@pytest.mark.parametrize("masked", [False, True])
def test_the_error_that_is_expected_is_the_error(masked):
    """Over 60 draws of a matrix of rank one; with 2/3 or 3/2 of it, the ratio would be off by a fifth and more."""
    coins, ratios = toys.generator(5), []
    left = torch.randn(60, generator=coins, dtype=torch.float64)
    pixels = torch.rand(40, generator=coins, dtype=torch.float64)
    right = torch.cat([pixels, torch.ones(1).double()])
    seen = torch.rand(60, 41, generator=coins) < (0.5 if masked else 2.0)
    std = torch.full((60, 41), 0.05, dtype=torch.float64)
    for _ in range(60):
        values = torch.outer(left, right) + std * torch.randn(60, 41, generator=coins, dtype=torch.float64)
        start, known = completed(values, seen)
        total, _ = total_least_squares(values, seen, std, start)
        expected, excess = standard_errors(values, seen, std, total / total[-1])
        assert known.all() and abs(excess) < 5
        ratios.append(((total / total[-1] - right)[:-1] / expected[:-1]).square().mean().sqrt())
    # Errors of one draw share those of the scale: a ratio has a standard deviation of 0.15.
    assert 0.9 < float(torch.stack(ratios).mean()) < 1.1


def test_a_matrix_of_rank_two_is_told_from_noise_on_one():
    coins = toys.generator(6)
    values = sum(torch.outer(torch.randn(60, generator=coins), torch.rand(41, generator=coins)) for _ in range(2))
    assert isinstance(values, Tensor)
    seen, std = torch.ones(60, 41, dtype=torch.bool), torch.full((60, 41), 0.05, dtype=torch.float64)
    noisy = values.double() + std * torch.randn(60, 41, generator=coins, dtype=torch.float64)
    total, _ = total_least_squares(noisy, seen, std, torch.ones(41).double())
    assert standard_errors(noisy, seen, std, total / total[-1])[1] > 50


def shared(batch: int, noise: float) -> tuple[Observation, Tensor]:
    """An update of photos by a network with one logit: all upstream gradients are multiples of one vector."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 60), nn.ReLU(), nn.Linear(60, 1)).double()
    inputs, labels = torch.rand(batch, *SHAPE, dtype=torch.float64), torch.arange(batch) % 2
    defense = dp_sgd(clip_norm=10.0, noise_multiplier=noise)
    return audit.share_update(model, inputs, labels, defense, noise=seeded(1))[0], inputs


def test_what_is_expected_of_a_place_is_what_noise_and_errors_leave_there():
    """Of the input itself noise; of one that is off what its error does; of a mixture of two much more."""
    update, truth = shared(2, 1e-6)
    std, m = granted(update.noise_std), len(update.released)
    # Rows that the first alone has on.
    on = [nn.functional.relu(layer_output(update, one)) > 0 for one in truth]
    alone = torch.cat([(on[0] & ~on[1]).repeat_interleave(36), on[0] & ~on[1], torch.zeros(m - 60 * 37) > 0])
    guesses = torch.stack([truth[0], (truth[0] + 0.01).clamp(0, 1), truth.mean(0)])
    errors = torch.stack([torch.full(SHAPE, e, dtype=torch.float64) for e in (0.0, 0.01, 0.0)])
    about = checked_on_own_rows(update, guesses, errors, alone.expand(3, m), std, toys.generator(0))
    assert about.fits(0.0).tolist() == [True, True, False]
    assert 0.3 < float(about.unexplained[0] / about.expected[0]) < 3
    assert float(about.expected[1]) > 10 * float(about.expected[0])


def layer_output(update: Observation, one: Tensor) -> Tensor:
    network = granted(update.structure)().known_network()
    return network.parameters["1.weight"] @ one.flatten() + network.parameters["1.bias"]


def test_of_two_guesses_that_claim_the_same_the_first_is_kept_and_neither_is_decided():
    about = SingleExampleRows(
        labels=torch.tensor([0, 1, 1]),
        unexplained=torch.tensor([0.01, 0.01, 0.01]),
        expected=torch.tensor([0.01, 0.01, 0.5]),
        shared=torch.tensor([[0.0, 0.0, 0.0], [0.9, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    )
    assert about.unclaimed().tolist() == [True, False, True]
    assert about.decided(1e-6).tolist() == [False, False, False]
    assert about[torch.tensor([0])].decided(1e-6).tolist() == [True]


def test_the_command_says_what_the_noise_leaves():
    update, _ = shared(1, 1e-4)
    one = result_of(
        UpdateFinding(name="bias_division", kind="reconstruction", result=bias_division(update)), None, (), 0.1
    )
    assert isinstance(one, ReconstructedInputs) and one.expected_error is not None
    assert 0 < one.expected_error < 0.1
    said = attack_text(one)
    assert f"expected to be off by {one.expected_error:.2g} or less (root mean square) under this noise" in said
    exact = result_of(
        UpdateFinding(name="r", kind="reconstruction", result=bias_division(shared(1, 0.0)[0])), None, (), 0.1
    )
    assert isinstance(exact, ReconstructedInputs) and exact.expected_error is None
