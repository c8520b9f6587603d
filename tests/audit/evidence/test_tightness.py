"""How near lower bounds come to the truth: gradient canaries in trainings by DP-SGD, against the claim of those runs.

A canary is an example whose input is zero but for one entry of its own, so that its gradient lies in two coordinates
that no other example moves. It is bounded, drawn and summed by the trainer as every example is. In a linear model with
opposite weights that gradient has one direction, whatever the model has learnt: what a run shows of a canary, summed
over its steps, is normal, and higher by sqrt(steps) / noise multiplier deviations where it was included. Canaries of a
run share nothing but the trainer, and so are independent trials.
"""

import numpy as np
import pytest
import torch
from torch import nn

from leakbench.audit.evidence.audit import audit_runs
from leakbench.audit.evidence.thresholds import FixedThreshold
from leakbench.defenses.core import Defense, Recipe, Recording, Run, Whole, calibrate, clip, full, seeded, train

CANARIES, STEPS, DELTA = 500, 4, 1e-5


def run_of(included: torch.Tensor, defense: Defense, seed: int) -> Run:
    """A training whose examples are the canaries that are included; the divisor is a public constant."""
    model = nn.Linear(CANARIES, 2, bias=False)
    nn.init.zeros_(model.weight)
    inputs = 100 * torch.eye(CANARIES)[included]
    return train(
        model,
        (inputs, torch.ones(len(inputs), dtype=torch.int64)),
        defense,
        sampling=full(),
        steps=STEPS,
        lr=1e-3,
        noise=seeded(seed),
        seed=seed,
        recipe=Recipe(expected_batch=float(CANARIES)),
        recording=Recording(observer="updates"),
    )


def scores_of(run: Run) -> torch.Tensor:
    """Of each canary: the sum of releases along its gradient, (1, -1) / sqrt 2 in its column."""
    shown = [step.noisy for step in run.transcript.steps]
    released = torch.stack([noisy[0] for noisy in shown if noisy is not None]).sum(0).view(2, CANARIES)
    return (released[0] - released[1]).double() / 2**0.5


def canary_scores(epsilon: float, runs: int) -> tuple[np.ndarray, np.ndarray, Defense, float]:
    """Scores of included and of left out canaries, the defense, and the epsilon that its runs claim."""
    defense = calibrate(
        Defense(Whole(bound=clip(1.0))), epsilon=epsilon, delta=DELTA, sampling=full(), steps=STEPS, precision=1e-4
    )
    sides: tuple[list, list] = ([], [])
    claimed = 0.0
    for seed in range(runs):
        included = torch.rand(CANARIES, generator=torch.Generator().manual_seed(seed)) < 0.5
        run = run_of(included, defense, seed)
        claimed = claimed or run.claim(DELTA).epsilon
        scores = scores_of(run)
        sides[0].append(scores[included])
        sides[1].append(scores[~included])
    positives, negatives = (torch.cat(side).numpy() for side in sides)
    return positives, negatives, defense, claimed


@pytest.mark.long
@pytest.mark.parametrize(
    ("epsilon", "runs"),
    [(4.0, 40), *(pytest.param(one, 400, marks=pytest.mark.slow) for one in (1.0, 4.0, 8.0))],
)
def test_the_gaussian_bound_of_gradient_canaries_is_within_a_tenth_of_the_truth(epsilon, runs):
    positives, negatives, defense, claimed = canary_scores(epsilon, runs)
    sigma = defense.calibrated_multiplier
    # Fixed before any score is seen: half way between the means that the claim implies.
    found = audit_runs(
        positives, negatives, method="gaussian", choice=FixedThreshold(STEPS / 2), delta=DELTA, relation="add_remove"
    )
    print(f"claimed {claimed:.3f}, gaussian bound {found.value:.3f} of {len(positives) + len(negatives)} canaries")
    assert claimed == pytest.approx(epsilon, rel=0.01)
    assert 0.9 * claimed < found.value <= claimed
    # Half of the noise that is claimed is found out.
    assert positives.mean() - negatives.mean() == pytest.approx(
        STEPS, abs=5 * sigma * (4 * STEPS / len(positives)) ** 0.5
    )
    assert negatives.std() == pytest.approx(sigma * STEPS**0.5, rel=5 * (0.5 / len(negatives)) ** 0.5)
    half = audit_runs(
        positives + (positives - STEPS) * -0.5,
        negatives * 0.5,
        method="gaussian",
        choice=FixedThreshold(STEPS / 2),
        delta=DELTA,
        relation="add_remove",
    )
    assert half.value > 1.5 * claimed
