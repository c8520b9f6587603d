"""The shared updates of a reconstruction cell: which batch, whose noise, what is claimed, what is kept."""

import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri

from leakbench.attacks.core import Observation, Reconstruction
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.evidence.claim_bounds import gaussian_epsilon
from leakbench.audit.plan.expand import plan
from leakbench.audit.run.job import compute
from leakbench.audit.subjects.outcome import Outcome
from leakbench.benchmarks import data

from ..conftest import SHARE, SUITE

CPU = torch.device("cpu")
TEXT = SUITE.replace('{ name = "likelihood_ratio" }, { name = "loss_threshold" }', '{ name = "inverting_gradients" }')
TEXT = TEXT.replace("controls = false", "controls = true") + SHARE.replace("images = 1", "images = 2, batch = 2")
PHOTOS = data.load("photos", seed=0)


class Double:
    """Stands in for an attack: keeps what it is given and answers with the middle of the box."""

    def __init__(self, real):
        self.requires, self.kind, self.check, self.seen = real.requires, real.kind, real.check, []

    def __call__(self, target: Observation, coins: torch.Generator, **settings) -> Reconstruction:
        assert target.labels is not None
        self.seen.append((target, coins.initial_seed()))
        grey = torch.full((len(target.labels), *target.input_shape), 0.5)
        return Reconstruction(inputs=grey, labels=target.labels, objective=float(len(self.seen)))


@pytest.fixture
def watched(monkeypatch):
    double = Double(catalog.attack("inverting_gradients"))
    monkeypatch.setattr(catalog, "attack", lambda name: double)
    return double


def outcome(suite, defense="dp_sgd", noise="calibrated", control=None) -> Outcome:
    (cell,) = (
        cell
        for cell in plan(suite).cells
        if cell.kind == "reconstruction"
        and (cell.request.defense.name, cell.request.release_noise, cell.request.control) == (defense, noise, control)
    )
    ((_, found),) = compute((cell,), CPU)
    assert not found.error
    return found


def released(double: Double) -> list[torch.Tensor]:
    return [target.released for target, _ in double.seen]


@pytest.mark.long
def test_every_target_is_shared_attacked_and_averaged(suite_of, watched):
    found = outcome(suite_of(TEXT))
    first, second = (target for target, _ in watched.seen)
    assert (first.step, first.batch_size, first.expected_batch) == (1, 2, 2.0)
    assert first.population is None  # not declared, so there is no copy of it
    assert not torch.equal(first.released, second.released)
    assert len({seed for _, seed in watched.seen}) == 2
    objective = found.metrics["objective"]
    assert objective.value == 1.5 and objective.n == 2
    psnr = found.metrics["psnr"]
    assert psnr.low is not None and psnr.value is not None and psnr.low < psnr.value


@pytest.mark.long
def test_the_sum_of_local_steps_is_shared_and_charged(suite_of, watched):
    text = TEXT.replace("step = 1", "step = 2, local = { epochs = 3, batch = 1 }")
    found, once = outcome(suite_of(text)), outcome(suite_of(TEXT))
    first = watched.seen[0][0]
    assert (first.step, first.batch_size, first.expected_batch) == (2, 2, 1.0)
    assert first.surrogate is not None
    assert found.claim is not None and once.claim is not None
    # Three epochs of an example a step, and one step of two.
    assert found.claim["epsilon"] > 1.5 * once.claim["epsilon"]
    assert found.claim["sampling"] == "partition"


def test_the_pictures_are_kept_with_their_targets(suite_of, watched):
    arrays = outcome(suite_of(TEXT)).arrays
    assert arrays["target"] == [0, 0, 1, 1]
    original = np.array(arrays["original"])
    assert original.shape == (4, 3 * 32 * 32)
    private = PHOTOS.private.inputs.flatten(1)
    for row, label in zip(original, arrays["label"], strict=True):
        ((at,),) = torch.nonzero((private == torch.tensor(row).float()).all(1)).unsqueeze(0).tolist()
        assert PHOTOS.private.labels[at] == label
    assert len({tuple(row) for row in original}) == 4
    assert (np.array(arrays["reconstruction"]) == 0.5).all()


def test_the_same_targets_and_weights_are_asked_of_every_defense(suite_of, watched):
    suite = suite_of(TEXT)
    first, second = outcome(suite), outcome(suite, "sgd", "none", "positive")
    assert first.arrays["original"] == second.arrays["original"]
    start = [target.logits(PHOTOS.public.inputs[:2]) for target, _ in watched.seen]
    assert not torch.equal(start[0], start[2])  # a step later they have parted
    suite = suite_of(TEXT.replace("step = 1", "step = 0"))
    watched.seen.clear()
    outcome(suite)
    outcome(suite, "sgd", "none", "positive")
    start = [target.logits(PHOTOS.public.inputs[:2]) for target, _ in watched.seen]
    assert all(torch.equal(start[0], other) for other in start)


def test_success_stands_beside_its_floors_and_what_the_claim_allows(suite_of, watched):
    suite = suite_of(TEXT)
    quiet, noisy = outcome(suite, noise="none"), outcome(suite)
    for found in (quiet, noisy):
        assert found.metrics["iip"].detail["size_of_d"] == 2 + 64
        assert found.metrics["psnr_match"].detail["of"] == 1
        matches = np.array(found.arrays["public_match"], dtype=np.float32)
        public = PHOTOS.public.inputs.flatten(1).numpy()
        assert all((public == one).all(axis=1).any() for one in matches)
        gray = found.metrics["gain_over_mean"].value
        assert gray is not None and abs(gray) < 3  # what the double returns
    assert quiet.metrics["rero_bound"].value is None
    assert "nothing is proved" in str(quiet.metrics["rero_bound"].reason)
    bound, sigma = noisy.metrics["rero_bound"], noisy.noise_multiplier
    assert sigma is not None and bound.value == pytest.approx(2 * ndtr(ndtri(1 / 65) + 1 / sigma))  # of two truths
    assert "claim_violated" not in noisy.flags


def test_without_noise_nothing_is_drawn_and_nothing_is_claimed(suite_of, watched):
    suite = suite_of(TEXT)
    quiet, noisy = outcome(suite, noise="none"), outcome(suite)
    assert (quiet.noise, quiet.noise_multiplier) == ("none", 0.0)
    assert quiet.claim is not None and quiet.claim["epsilon"] is None
    assert "switched off" in quiet.claim["reason"]
    assert noisy.noise == "seeded" and noisy.noise_multiplier is not None and noisy.noise_multiplier > 0
    # What was executed: one release in which the target is known to be, not the training that its noise is of.
    assert noisy.claim is not None
    assert noisy.claim["epsilon"] == pytest.approx(gaussian_epsilon(1 / noisy.noise_multiplier, 1e-5), abs=1e-3)
    assert noisy.claim["sampling"] == "full" and noisy.claim["events"][0].startswith("1 x Gaussian")
    std = watched.seen[0][0].noise_std, watched.seen[-1][0].noise_std
    assert not std[0].any() and std[1].all()


def test_in_the_negative_control_another_batch_is_shared_than_the_one_asked_for(suite_of, watched):
    suite = suite_of(TEXT)
    positive, negative = (outcome(suite, "sgd", "none", control) for control in ("positive", "negative"))
    assert positive.arrays["original"] == negative.arrays["original"]
    labels = [target.labels for target, _ in watched.seen]
    batches = [PHOTOS.non_member.inputs[at : at + 2] for at in (0, 2)]
    for (target, _), batch, told in zip(watched.seen[2:], batches, labels[2:], strict=True):
        torch.testing.assert_close(target.simulate(batch, told), target.released)
    assert not torch.isin(PHOTOS.non_member.ids, PHOTOS.private.ids).any()


def test_the_same_cell_twice_is_the_same_and_secure_noise_is_not(suite_of, watched):
    suite = suite_of(TEXT)
    outcome(suite)
    outcome(suite)
    first, _, again, _ = released(watched)
    assert torch.equal(first, again)
    watched.seen.clear()
    (cell,) = (
        c
        for c in plan(suite, secure_noise=True).cells
        if c.kind == "reconstruction" and c.request.release_noise == "calibrated"
    )
    for _ in range(2):
        ((_, found),) = compute((cell,), CPU)
        assert found.noise == "secure"
    first, _, again, _ = released(watched)
    assert not torch.equal(first, again)


@pytest.mark.long
def test_flags_say_that_an_attack_found_nothing_or_that_noise_was_matched(suite_of, watched, monkeypatch):
    found = outcome(suite_of(TEXT.replace('"dp_sgd"', '"noisy_sgd"')), "noisy_sgd")
    assert found.flags == ["noise_matched"]
    quiet = outcome(suite_of(TEXT.replace('"dp_sgd"', '"noisy_sgd"')), "noisy_sgd", "none")
    assert quiet.flags == []
    real = Double.__call__

    def hopeless(self, target, coins, **settings):
        result = real(self, target, coins, **settings)
        return Reconstruction(inputs=result.inputs, labels=result.labels, objective=0.5, status="degraded")

    monkeypatch.setattr(Double, "__call__", hopeless)
    assert outcome(suite_of(TEXT)).flags == ["degraded"]


@pytest.mark.long
def test_labels_of_shared_updates_are_recovered_scored_and_kept(suite_of):
    suite = suite_of(TEXT.replace('"inverting_gradients"', '"label_recovery"'))
    cells = [
        cell
        for cell in plan(suite).cells
        if cell.kind == "labels" and cell.request.control == "positive" and cell.request.defense.name == "sgd"
    ]
    (cell,) = [cell for cell in cells if cell.request.release_noise == "none"]
    ((_, found),) = compute((cell,), CPU)
    assert not found.error and not found.skipped
    assert {"label_overlap", "label_exact", "label_overlap_floor"} == set(found.metrics)
    overlap, floor = found.metrics["label_overlap"], found.metrics["label_overlap_floor"]
    assert (
        overlap.n == 2 and overlap.value is not None and floor.value is not None and overlap.value > floor.value + 0.2
    )
    assert found.arrays["target"] == [0, 0, 1, 1] and len(found.arrays["named"]) == 4
