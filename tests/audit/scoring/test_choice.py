"""Scores of choices: whose image it is counts, pictures' metrics are not measured, and the truth chooses nothing."""

import pytest
import torch

from leakbench import audit
from leakbench.attacks.core import NotApplicable, Reconstruction
from leakbench.attacks.rero import rero
from leakbench.audit.scoring.choice import PICKED, chosen, compare_choice, place_of
from leakbench.audit.scoring.images import summed_up
from leakbench.audit.scoring.robustness import bound_metric, gaussian_bound
from leakbench.audit.targets.candidate_prior import Prior
from leakbench.audit.targets.local_steps import LocalTraining
from leakbench.audit.targets.simulated_update import simulate_share
from leakbench.defenses.core import seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.leaderboard.metrics import METRICS

PRIOR = torch.rand(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))


def answer(inputs: torch.Tensor, **fields) -> Reconstruction:
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    return Reconstruction(**{"inputs": inputs, "labels": labels, "objective": 0.5, **fields})


def test_the_nearest_candidate_is_what_was_picked_and_two_as_near_are_nobody():
    assert chosen(answer(PRIOR[2:3]), PRIOR, 2).right
    assert chosen(answer(PRIOR[2:3] + 0.01), PRIOR, 2).picked == 2
    assert not chosen(answer(PRIOR[1:2]), PRIOR, 2).right
    assert chosen(answer(PRIOR[:1]), PRIOR[[0, 0, 1]], 0).picked is None
    assert chosen(answer(PRIOR[2:3], status="failed"), PRIOR, 2).picked is None
    with pytest.raises(ValueError, match=r"inputs must be one of the candidates, \[1, \*\[1, 12, 12\]\], got \[2"):
        chosen(answer(PRIOR[:2]), PRIOR, 2)


def test_the_place_of_the_truth_is_found_and_has_to_be_there_once():
    assert place_of(PRIOR[3], PRIOR) == 3
    for prior in (PRIOR[:3], PRIOR[[3, 3]]):
        with pytest.raises(ValueError, match="prior must hold the first of the inputs once, got it"):
            place_of(PRIOR[3], prior)


def test_a_share_of_targets_has_its_interval_and_its_chance_and_no_picture_is_scored():
    parts = [compare_choice(chosen(answer(PRIOR[k : k + 1]), PRIOR, 0), answer(PRIOR[:1])) for k in (0, 0, 0, 1)]
    metrics = summed_up(parts)
    known = {name for name, metric in METRICS.items() if metric.kind == "reconstruction"}
    assert metrics.keys() == known - {"rero_bound"}
    assert {name for name, metric in metrics.items() if metric.value is not None} == {"prior_success", "objective"}
    assert metrics["psnr"].reason == PICKED and metrics["iip"].reason == PICKED and metrics["leak"].reason == PICKED
    success = metrics["prior_success"]
    assert (success.value, success.n, success.detail["kappa"]) == (0.75, 4, 0.25)
    assert success.low == pytest.approx(0.1941, abs=1e-4) and success.high == pytest.approx(0.9937, abs=1e-4)
    failed = answer(PRIOR[:1], status="failed")
    parts.append(compare_choice(chosen(failed, PRIOR, 0), failed))
    lost = summed_up(parts)["prior_success"]  # a mean over the targets that worked would be one over the easy ones
    assert lost.value is None and "chose nobody" in str(lost.reason)


def shared(prior: Prior, batch, multiplier: float, **fields):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 5))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) / 12)
    defense = dp_sgd(clip_norm=1.0, noise_multiplier=multiplier)
    inputs, labels = batch
    return simulate_share(model, inputs, labels, defense, prior=prior.given, **fields)


def test_by_hand_an_update_with_a_prior_is_scored_as_a_choice_and_the_others_are_taken_off():
    draw = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand(4, 1, 12, 12, generator=draw), torch.tensor([0, 1, 2, 3])
    others = torch.rand(40, 1, 12, 12, generator=draw), torch.randint(5, (40,), generator=draw)
    prior = Prior.draw((inputs, labels), others, 8, 5)
    quiet = shared(prior, (inputs, labels), 0.0)
    seen = quiet.observation
    own = seen.contributions(inputs[:1], labels[:1])[0].double()
    torch.testing.assert_close(seen.remainder, own, atol=1e-6, rtol=0)
    result = rero(seen)
    assert torch.equal(result.inputs, inputs[:1])
    metrics = audit.score(result, quiet.truth)
    assert metrics["prior_success"].value == 1 and metrics["psnr"].value is None
    # With noise the remainder has that of the release, and nothing of the others.
    noisy = shared(prior, (inputs, labels), 1.0, noise=seeded(7))
    assert noisy.observation.remainder is not None
    left = noisy.observation.remainder - own
    assert 0.85 < float(left.std()) < 1.15 and abs(float(left @ own)) < 5
    # What an attack got is a copy.
    assert seen.prior is not None and seen.prior.inputs.data_ptr() != prior.given.inputs.data_ptr()
    assert bound_metric(noisy.ledger, 7).value == pytest.approx(gaussian_bound(1 / 8, 1.0))


def test_of_several_local_steps_nobody_picks():
    inputs, labels = PRIOR[:2], torch.tensor([0, 1])
    prior = Prior.draw((inputs, labels), (PRIOR[2:], labels), 2, 0)
    with pytest.raises(NotApplicable, match="a prior is for one step: of the sum of 2 local steps nothing is left"):
        shared(prior, (inputs, labels), 0.0, local=LocalTraining(batch=1))


def test_without_a_prior_there_is_no_remainder():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 5))
    seen, truth = audit.share_update(model, PRIOR[:1], torch.tensor([1]), dp_sgd(clip_norm=1.0, noise_multiplier=0.0))
    assert seen.prior is None and seen.remainder is None and truth.prior is None
    assert "Knows.PRIOR" in str(rero.check(seen))
