"""How often each lower bound exceeds the truth, over 2,000 audits of Gaussian mechanisms of known epsilon.

The table that `docs/evidence.md` shows: `pytest -m slow -s tests/audit/evidence/test_coverage.py`.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy import stats

from leakbench.audit.evidence.claim_bounds import gaussian_epsilon
from leakbench.audit.evidence.counts import Errors, clopper_pearson, gaussian, sampled_gaussian
from leakbench.audit.evidence.one_run import Guesses, one_run, one_run_f_dp, order_statistics
from leakbench.audit.evidence.pairs import canary_guesses, pair_guesses

AUDITS, N, DELTA = 2000, 1000, 1e-5
OF_ERRORS = {"clopper_pearson": clopper_pearson, "gaussian": gaussian, "pld": sampled_gaussian(1.0, 1)}
OF_GUESSES = {"one_run": one_run, "one_run_f_dp": one_run_f_dp, "order_statistics": order_statistics}


def of_runs(shift: float, method: str, audits: int) -> list[float]:
    """Bounds from 500 runs with the record and 500 without, at the threshold half the shift."""
    coins, rate, bound = np.random.default_rng(1), float(stats.norm.sf(shift / 2)), cache(OF_ERRORS[method])
    counts = coins.binomial(N // 2, rate, (audits, 2)).tolist()
    return [bound(Errors(misses, N // 2, alarms, N // 2), DELTA, 0.95) for misses, alarms in counts]


def of_canaries(shift: float, method: str, audits: int) -> list[float]:
    """Bounds from 1,000 canaries, 50 of the highest and 50 of the lowest scores guessed."""
    coins, bound, found = np.random.default_rng(2), cache(OF_GUESSES[method]), []
    for _ in range(audits):
        included = coins.random(N) < 0.5
        scores = coins.normal(size=N) + shift * included
        found.append(bound(canary_guesses(scores, included, highest=50, lowest=50), DELTA, 0.95))
    return found


def of_random_split(shift: float, method: str, audits: int) -> list[float]:
    """Bounds from 1,000 members and 1,000 non-members, 100 pairs answered; two scores differ by sqrt(2) deviations."""
    coins, bound, found = np.random.default_rng(3), cache(OF_GUESSES[method]), []
    for seed in range(audits):
        guesses: Guesses = pair_guesses(coins.normal(shift, 1, N), coins.normal(size=N), answered=100, seed=seed)
        found.append(bound(guesses, DELTA, 0.95))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("trials", "methods", "factor"),
    [(of_runs, OF_ERRORS, 1.0), (of_canaries, OF_GUESSES, 1.0), (of_random_split, OF_GUESSES, math.sqrt(2))],
)
def test_a_bound_exceeds_the_truth_in_at_most_its_share_of_audits(
    trials: Callable[[float, str, int], list[float]], methods: dict[str, object], factor: float, shift: float
):
    truth = gaussian_epsilon(factor * shift, DELTA)
    for method in methods:
        audits = 200 if method == "pld" else AUDITS  # half a second each
        values = np.array(trials(shift, method, audits))
        above = float((values > truth).mean())
        print(f"\n{trials.__name__} | {method} | {truth:.2f} | {values.mean():.2f} | {100 * above:.1f} %", end="")
        # A higher share has a chance below 1e-5 at a rate of 5 %.
        assert above <= stats.binom.isf(1e-5, audits, 0.05) / audits
        if shift >= 1:
            assert values.mean() > 0.1 * truth
