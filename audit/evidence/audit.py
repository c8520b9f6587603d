"""Lower bounds on epsilon, by the name of a method, from the scores and ground truth of trials, with all assumptions.

Four kinds of trials give scores. `runs`: independent trainings with the record and without it, a score each.
`canaries`: a single training, in which each canary was included by a fair coin. `random split`: a single training on a
set drawn at random from a pool. `labels`: a single training, each record shown with its label or a proxy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy import ndarray
from scipy import stats

from . import counts, one_run
from .counts import CountBound, Errors
from .estimate import EpsilonEstimate, Kind, Relation, check_level
from .label_trials import revealed_coins
from .one_run import GuessBound, Guesses
from .pairs import canary_guesses, pair_guesses
from .thresholds import Choice, judged

Trials = Literal["runs", "canaries", "random split", "labels"]

_UNFAIR = 1e-6
"""P-value below which coins are refused as unfair; fair coins are refused with at most this probability."""

_GAUSSIAN = "the mechanism is a composition of Gaussians, without sampling"


@dataclass(frozen=True)
class _Method:
    """A method: its bound, the outcomes that it takes, and what it assumes of the mechanism."""

    bound: CountBound | GuessBound
    of: Literal["errors", "guesses"]
    assumption: str = ""
    kind: Kind = "confidence"


METHODS = {
    "clopper_pearson": _Method(counts.clopper_pearson, "errors"),
    "gaussian": _Method(counts.gaussian, "errors", _GAUSSIAN),
    "bayesian": _Method(counts.bayesian, "errors", "Jeffreys' priors of both error rates", "credible"),
    "one_run": _Method(one_run.one_run, "guesses"),
    "one_run_f_dp": _Method(one_run.one_run_f_dp, "guesses", _GAUSSIAN),
    "order_statistics": _Method(
        one_run.order_statistics, "guesses", f"{_GAUSSIAN}, and the surest of its likelihood ratios were guessed"
    ),
}
"""Method -> its row; `pld`, which needs the sampling of the mechanism, is not in the table."""

_TRIALS: dict[Trials, str] = {
    "runs": "trials are independent, and each is of the mechanism that the claim is about",
    "canaries": "each canary was put in by a fair coin of its own",
    "random split": "the training set was drawn uniformly from the pool, and nothing else of it was seen",
    "labels": "each label shown was the training label or the proxy's by a fair coin, labels are independent given the "
    "inputs, and the proxy saw none of them",
}


def audit_runs(
    positives: ndarray,
    negatives: ndarray,
    *,
    method: str,
    choice: Choice,
    delta: float,
    level: float = 0.95,
    relation: Relation = "add_remove",
    sample_rate: float | None = None,
    steps: int | None = None,
) -> EpsilonEstimate:
    """Returns a lower bound from scores of independent trainings.

    Args:
        positives: scores of trainings with the record [p], larger for "with".
        negatives: scores of trainings without it [q].
        method: `clopper_pearson`, `gaussian`, `bayesian`, or `pld` with the two last arguments.
        choice: rule that chooses the threshold; there is no default.
        delta: of the claim.
        level: confidence.
        relation: between the two data sets.
        sample_rate: of the mechanism, for `pld`.
        steps: of the mechanism, for `pld`.

    Raises:
        ValueError: for an argument out of range, or of another method.
    """
    check_level(level)
    row = _row(method, "errors", sample_rate, steps)
    bound: CountBound = row.bound  # pyright: ignore[reportAssignmentType] -- checked by `_row`
    best = judged(positives, negatives, choice, lambda errors, each: bound(errors, delta, each), level=level)
    return EpsilonEstimate(
        value=best.value,
        delta=delta,
        level=level,
        method=method,
        assumption="; ".join(filter(None, (_TRIALS["runs"], row.assumption))),
        relation=relation,
        positives=len(positives),
        negatives=len(negatives),
        looks=best.looks,
        ceiling=_ceiling(lambda errors: bound(errors, delta, best.level), best.errors),
        kind=row.kind,
        detail={
            "threshold": best.threshold,
            "misses": best.errors.misses,
            "of_positives": best.errors.positives,
            "alarms": best.errors.alarms,
            "of_negatives": best.errors.negatives,
            "choice": choice.words,
            **({"sample_rate": sample_rate, "steps": steps} if method == "pld" else {}),
        },
    )


def audit_canaries(
    scores: ndarray,
    included: ndarray,
    *,
    method: str,
    guesses: Sequence[tuple[int, int]],
    delta: float,
    level: float = 0.95,
    relation: Relation = "add_remove",
    seed: int = 0,
) -> EpsilonEstimate:
    """Returns a lower bound from the scores of canaries in a single training.

    Args:
        scores: [m], larger for "in".
        included: bool [m], the coins.
        method: `one_run`, `one_run_f_dp` or `order_statistics`.
        guesses: numbers of highest and of lowest scores that are guessed, as declared before the coins were seen; the
            best of several pairs of numbers is taken, at a level divided by the number of pairs.
        delta: of the claim.
        level: confidence.
        relation: `replace_one` if a canary that is left out is replaced by another record.
        seed: of the random order of equal scores; `pairs.seed_of_split` if row positions may depend on the coins.

    Raises:
        ValueError: for an argument out of range, or coins that are clearly not fair.
    """
    declared = _declared(guesses)
    guess_sets = [canary_guesses(scores, included, highest=high, lowest=low, seed=seed) for high, low in declared]
    fairness = fair(included)
    flags = np.asarray(included)
    sizes = int(flags.sum()), int((~flags).sum())
    bound = _of_guesses(guess_sets, declared, method, "canaries", delta, level, relation, sizes)
    return replace(bound, detail=bound.detail | {"p_of_fair_coins": fairness})


def audit_random_split(
    members: ndarray,
    non_members: ndarray,
    *,
    method: str,
    answered: Sequence[int],
    delta: float,
    level: float = 0.95,
    seed: int = 0,
    member_strata: ndarray | None = None,
    non_member_strata: ndarray | None = None,
) -> EpsilonEstimate:
    """Returns a lower bound from the scores of a finished model with a randomly drawn training set; replace-one.

    Args:
        members: scores of records that were trained on [p], by an attack that was not calibrated on these records.
        non_members: scores of the rest of the pool [q], without copies of members.
        method: `one_run`, `one_run_f_dp` or `order_statistics`.
        answered: number of answered pairs, as declared before scores were seen; the best of several numbers is taken,
            at a level divided by how many there are.
        delta: of the claim.
        level: confidence.
        seed: of the random matching; `pairs.seed_of_split` if row positions may depend on scores.
        member_strata: [p], if the draw was within strata.
        non_member_strata: [q].

    Raises:
        ValueError: for an argument out of range.
    """
    declared = [(count, 0) for count in answered]
    guess_sets = [
        pair_guesses(
            members,
            non_members,
            answered=count,
            seed=seed,
            member_strata=member_strata,
            non_member_strata=non_member_strata,
        )
        for count, _ in _declared(declared)
    ]
    sizes = len(members), len(non_members)
    return _of_guesses(guess_sets, declared, method, "random split", delta, level, "replace_one", sizes)


def audit_labels(
    scores: ndarray,
    included: ndarray,
    *,
    method: str,
    guesses: Sequence[tuple[int, int]],
    proxy_error: float,
    delta: float,
    level: float = 0.95,
    seed: int = 0,
) -> EpsilonEstimate:
    """Returns a lower bound on the epsilon of labels, from records shown with their label or a proxy's; replace-one.

    Args:
        scores: [m], larger for the training label; `label_scores`.
        included: bool [m], the coins; `shown_labels`.
        method: `one_run`. Others assume a mechanism that the proxy's error invalidates.
        guesses: as for `audit_canaries`.
        proxy_error: upper limit on the total variation distance between the proxy and the truth, as a mean over
            records. There is no default, because data cannot reveal it: the bound assumes it.
        delta: of the claim.
        level: confidence; half of the error rate is spent on the proxy's error, if there is any.
        seed: as for `audit_canaries`.

    Raises:
        ValueError: for an argument out of range, or coins that are clearly not fair.
    """
    check_level(level)
    if method != "one_run":
        raise ValueError(f"method must be one_run for trials at labels, got {method!r}")
    declared = _declared(guesses)
    rate = 1 - level
    spent = 0.0 if proxy_error == 0 else rate / 2
    lost = (
        revealed_coins(len(np.asarray(scores)), proxy_error, 1 - spent)
        if spent
        else revealed_coins(1, proxy_error, level)
    )
    guess_sets = [canary_guesses(scores, included, highest=high, lowest=low, seed=seed) for high, low in declared]
    fairness = fair(included)
    kept = [
        Guesses(guess_set.canaries, guess_set.guessed, max(0, guess_set.correct - lost)) for guess_set in guess_sets
    ]
    flags = np.asarray(included)
    sizes = int(flags.sum()), int((~flags).sum())
    bound = _of_guesses(kept, declared, method, "labels", delta, 1 - (rate - spent), "replace_one", sizes)
    chosen = max(0, bound.detail["guessed"] - lost)
    largest = one_run.one_run(
        Guesses(bound.detail["coins"], bound.detail["guessed"], chosen), delta, 1 - (rate - spent) / bound.looks
    )
    return replace(
        bound,
        level=level,
        ceiling=largest,
        assumption=f"{bound.assumption}, and the proxy errs by at most {proxy_error:g} in total variation",
        detail=bound.detail | {"given_away": lost, "proxy_error": proxy_error, "p_of_fair_coins": fairness},
    )


def fair(included: ndarray) -> float:
    """Returns the p-value of a two-sided binomial test that the coins are fair.

    Args:
        included: bool [m], the coins.

    Raises:
        ValueError: if it is below 1e-6: guesses are then right without any leak.
    """
    ones, count = int(np.asarray(included).sum()), len(included)
    chance = float(stats.binomtest(ones, count).pvalue)
    if chance < _UNFAIR:
        raise ValueError(
            f"coins must be fair, and {ones} of {count} are 1, which has a chance of {chance:.2g}: whoever guesses the "
            "commoner side is right without any leak; give the trials as they were drawn, or take pairs of them"
        )
    return chance


def _of_guesses(
    guess_sets: Sequence[Guesses],
    declared: Sequence[tuple[int, int]],
    method: str,
    trials: Trials,
    delta: float,
    level: float,
    relation: Relation,
    sizes: tuple[int, int],
) -> EpsilonEstimate:
    check_level(level)
    row = _row(method, "guesses", None, None)
    bound: GuessBound = row.bound  # pyright: ignore[reportAssignmentType] -- checked by `_row`
    each = 1 - (1 - level) / len(guess_sets)
    values = [bound(guess_set, delta, each) for guess_set in guess_sets]
    best = int(np.argmax(values))
    chosen, declared_guesses = guess_sets[best], declared[best]
    return EpsilonEstimate(
        value=values[best],
        delta=delta,
        level=level,
        method=method,
        assumption="; ".join(filter(None, (_TRIALS[trials], row.assumption))),
        relation=relation,
        positives=sizes[0],
        negatives=sizes[1],
        looks=len(guess_sets),
        ceiling=bound(chosen.perfect, delta, each),
        detail={
            "coins": chosen.canaries,
            "asked": sum(declared_guesses),
            "guessed": chosen.guessed,
            "correct": chosen.correct,
        },
    )


def _row(method: str, of: str, sample_rate: float | None, steps: int | None) -> _Method:
    if method == "pld":
        if of != "errors":
            raise ValueError("method 'pld' is for independent runs, got guesses at coins; take one_run")
        if sample_rate is None or steps is None:
            raise ValueError("method 'pld' must be told sample_rate and steps of the mechanism")
        sampled = f"the mechanism is {steps} Gaussian steps with Poisson sampling at rate {sample_rate:g}"
        return _Method(counts.sampled_gaussian(sample_rate, steps), "errors", sampled)
    if sample_rate is not None or steps is not None:
        raise ValueError(f"sample_rate and steps are of method 'pld', got {method!r}")
    names = [name for name, row in METHODS.items() if row.of == of]
    if method not in names:
        raise ValueError(f"method must be one of {', '.join(names)}, got {method!r}")
    return METHODS[method]


def _ceiling(bound: Callable[[Errors], float], errors: Errors) -> float:
    try:
        return bound(errors.none)
    except ValueError:  # a test without errors refutes the assumed mechanism
        return math.inf


def _declared(guesses: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    if not guesses or len(set(guesses)) != len(guesses):
        raise ValueError(f"numbers of guesses must be declared, each once, got {list(guesses)}")
    check_each = [count for pair in guesses for count in pair]
    if any(count < 0 for count in check_each):
        raise ValueError(f"numbers of guesses must be at least 0, got {list(guesses)}")
    return guesses
