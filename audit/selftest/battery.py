"""A battery of declared tests, the same for every trainer, with a correction for multiple testing.

A privacy claim bounds how well any test distinguishes two neighbouring data sets from the releases. So every test here
is a membership test: a statistic of a release, a threshold calibrated on separate runs, and the rates at which runs
with and without the canary exceed it. The lower confidence limit of the true positive rate and the upper limit of the
false positive rate (Clopper & Pearson) are compared with the claim's own trade-off curve. Whatever the statistic, a
trainer that keeps its claim is accused with at most the declared probability; the statistic decides only which mistakes
can be detected. No test uses knowledge of the mistake, or of its existence.

The level is divided by the number of tests and by the number of interim looks at each of them (Bonferroni), even if a
test does not apply: so an accusation does not depend on which other tests ran. Group-sequential looks end a scenario as
soon as a test has a violation, which makes gross mistakes cheap to find.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..evidence.claim_bounds import clopper_pearson_lower, clopper_pearson_upper
from . import statistics
from .protocol import Trainer, TrainerAnswer, TrainerClaim
from .scenarios import Scenario, scenarios

LEVEL = 1e-3
"""Bound on the probability of accusing a trainer that keeps its claim, over the whole battery."""

FAILED = "failed: "
"""Prefix of the reason why a test did not run, if the trainer raised."""

_LEFT_OUT = "not asked for"

Found = Literal["violation", "no violation found", "n/a"]


@dataclass(frozen=True, kw_only=True)
class DeclaredTest:
    """A membership test of the battery, given by its statistic of a run's releases.

    Attributes:
        name: of the test.
        scenario: name of the scenario on whose runs the statistic is computed.
        question: that the test answers, in words.
        feature: maps a release to a number, or to a vector whose direction is learned on the calibration runs.
        least_releases: fewest releases for which it can be computed.
        of_released: whether it tests the released floating-point numbers, which a claim about real numbers does not
            cover.
    """

    name: str
    scenario: str
    question: str
    feature: Callable[[Scenario, TrainerAnswer, TrainerAnswer | None], Tensor]
    least_releases: int = 1
    of_released: bool = False


TESTS = (
    DeclaredTest(
        name="canary",
        scenario="canary",
        question="how much does a record with a huge gradient add, along its own direction?",
        feature=statistics.along_canary,
    ),
    DeclaredTest(
        name="layers",
        scenario="layers",
        question="how much does it add in all layers together?",
        feature=statistics.along_canary,
    ),
    DeclaredTest(
        name="positions",
        scenario="positions",
        question="how much does a record add whose positions cancel?",
        feature=statistics.along_canary,
    ),
    DeclaredTest(
        name="support",
        scenario="traces",
        question="which coordinates are exactly zero?",
        feature=statistics.support,
    ),
    DeclaredTest(
        name="exact_values",
        scenario="traces",
        question="on how many coordinates is the canary's contribution there without noise?",
        feature=statistics.exact_values,
    ),
    DeclaredTest(
        name="low_bits",
        scenario="traces",
        question="do the last bits of small numbers tell what was added to them?",
        feature=statistics.low_bits,
        of_released=True,
    ),
    DeclaredTest(
        name="repeat",
        scenario="traces",
        question="can the run be repeated from what is published?",
        feature=statistics.repeats,
    ),
    DeclaredTest(
        name="size",
        scenario="count",
        question="does the size of an update tell how many records there were?",
        feature=statistics.size,
    ),
    DeclaredTest(
        name="differences",
        scenario="steps",
        question="does the difference between two steps tell more than each?",
        feature=statistics.differences,
        least_releases=2,
    ),
    DeclaredTest(
        name="participation",
        scenario="participation",
        question="does the canary take part more often than it was charged for?",
        feature=statistics.largest,
    ),
    DeclaredTest(
        name="order",
        scenario="order",
        question="does one more record change what others contribute?",
        feature=statistics.sum_of_releases,
    ),
    DeclaredTest(
        name="buffers",
        scenario="buffers",
        question="does the model keep anything beside its parameters?",
        feature=statistics.buffers,
    ),
)


@dataclass(frozen=True, kw_only=True)
class TestOutcome:
    """Result of a single test.

    Attributes:
        test: its name.
        found: the verdict.
        why: the reason if it does not apply.
        runs: number of evaluated runs with the canary, and of those without.
        with_canary: runs with the canary above the threshold.
        without_canary: runs without the canary above the threshold.
        at_least: lower confidence limit of the true positive rate.
        at_most_fpr: upper confidence limit of the false positive rate.
        allowed: the largest true positive rate that the claim allows there.
    """

    __test__ = False  # not a pytest test

    test: str
    found: Found
    why: str = ""
    runs: int = 0
    with_canary: int = 0
    without_canary: int = 0
    at_least: float | None = None
    at_most_fpr: float | None = None
    allowed: float | None = None


@dataclass(frozen=True, kw_only=True)
class BatteryOutcome:
    """Result of the battery for a trainer.

    Attributes:
        outcomes: one per test, in the order of `TESTS`.
        level: of the whole battery.
        runs: number of trainings.
        seconds: total time.
    """

    outcomes: tuple[TestOutcome, ...]
    level: float
    runs: int
    seconds: float

    @property
    def accused_by(self) -> tuple[str, ...]:
        """Tests with a violation."""
        return tuple(outcome.test for outcome in self.outcomes if outcome.found == "violation")

    @property
    def tests_run(self) -> int:
        """Number of tests that ran: those with a verdict."""
        return sum(outcome.found != "n/a" for outcome in self.outcomes)

    @property
    def failed(self) -> tuple[str, ...]:
        """Tests in which the trainer raised, in scenarios that allow no refusal."""
        return tuple(outcome.test for outcome in self.outcomes if outcome.why.startswith(FAILED))

    def to_dict(self) -> dict[str, Any]:
        """Returns the outcomes for JSON."""
        return {
            "accused_by": list(self.accused_by),
            "level": self.level,
            "runs": self.runs,
            "seconds": round(self.seconds, 3),
            "tests": [asdict(outcome) for outcome in self.outcomes],
        }


def battery(
    trainer: Trainer,
    *,
    seed: int,
    level: float = LEVEL,
    only: Collection[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> BatteryOutcome:
    """Runs all declared tests on a trainer.

    Args:
        trainer: the trainer to be tested.
        seed: of canaries and public randomness; a trainer draws its own secrets.
        level: probability of accusing a trainer that keeps its claim.
        only: names of scenarios to run, at their level in the whole battery; None for all.
        progress: called with a progress message.

    Raises:
        ValueError: if the trainer could not be run at all.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    begun, by_test, runs = time.perf_counter(), {}, 0
    for scenario in scenarios(seed):
        own = [test for test in TESTS if test.scenario == scenario.name]
        if only is not None and scenario.name not in only:
            by_test |= {test.name: _not_run(test, _LEFT_OUT) for test in own}
            continue
        asking = _Asking(trainer, scenario, own, level / len(TESTS))
        by_test |= asking.outcomes()
        runs += asking.runs
        if progress is not None:
            progress(f"{scenario.name}: {asking.runs} runs, {runs} so far")
    outcomes = tuple(by_test[test.name] for test in TESTS)
    if all(outcome.found == "n/a" for outcome in outcomes):
        reasons = dict.fromkeys(outcome.why for outcome in outcomes if outcome.why != _LEFT_OUT)
        raise ValueError(f"no test of the battery could be asked: {'; '.join(reasons)}")
    return BatteryOutcome(outcomes=outcomes, level=level, runs=runs, seconds=time.perf_counter() - begun)


def _not_run(test: DeclaredTest, why: str) -> TestOutcome:
    return TestOutcome(test=test.name, found="n/a", why=why)


class _Asking:
    """The runs of a scenario, and the evaluation of its tests on them."""

    def __init__(self, trainer: Trainer, scenario: Scenario, tests: Sequence[DeclaredTest], level: float) -> None:
        self.trainer, self.scenario, self.tests, self.level = trainer, scenario, tests, level
        self.negative = scenario.sets.without
        self.runs = 0
        self.claim: TrainerClaim | None = None

    def outcomes(self) -> dict[str, TestOutcome]:
        """Returns outcomes of the tests by name; if the trainer raises, the reason for each."""
        try:
            return self._outcomes()
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            begins = "refused: " if self.scenario.may_be_refused else FAILED
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            reason = f"it asked for the end of the program ({reason})" if isinstance(error, SystemExit) else reason
            return {test.name: _not_run(test, begins + reason) for test in self.tests}

    def _outcomes(self) -> dict[str, TestOutcome]:
        scenario = self.scenario
        first = self._run(scenario.sets.present)
        claim, by_test, open_tests = first.claim, {}, []
        for test in self.tests:
            why = self._inapplicable(test, first)
            if why:
                by_test[test.name] = _not_run(test, why)
            else:
                open_tests.append(test)
        if not open_tests:
            return by_test
        if claim.relation != "add_remove" and scenario.sets.blanked is not None:
            self.negative = scenario.sets.blanked
        calibration = self._features(open_tests, scenario.calibration)
        rules = {test.name: _rule(*calibration[test.name]) for test in open_tests}
        scores: dict[str, tuple[Tensor, Tensor]] = {test.name: (torch.zeros(0), torch.zeros(0)) for test in open_tests}
        done = 0
        for look in scenario.looks:
            fresh = self._features(open_tests, look - done)
            done = look
            for test in open_tests:
                old, new = scores[test.name], fresh[test.name]
                rule = rules[test.name]
                scores[test.name] = torch.cat([old[0], rule(new[0])]), torch.cat([old[1], rule(new[1])])
                by_test[test.name] = self._judged(test, claim, *scores[test.name])
            if any(by_test[test.name].found == "violation" for test in open_tests):
                break
        return by_test

    def _inapplicable(self, test: DeclaredTest, answer: TrainerAnswer) -> str:
        claim = answer.claim
        if not claim.claims_something:
            return "nothing is claimed"
        if claim.relation != "add_remove" and self.scenario.sets.blanked is None:
            return f"the claim is of {claim.relation}, and no record of this test contributes nothing"
        if test.of_released and claim.arithmetic != "released":
            return "the claim is about real numbers, not about those that are released"
        if len(answer.releases) < test.least_releases:
            return f"it takes {test.least_releases} releases, and a run shows {len(answer.releases)}"
        return ""

    def _run(self, examples: tuple[Tensor, Tensor], published: dict[str, Any] | None = None) -> TrainerAnswer:
        self.runs += 1
        task = self.scenario.task
        if published:
            task = replace(task, published=published)
        inputs, labels = examples
        answer = self.trainer(self.scenario.model(), (inputs.clone(), labels.clone()), task)
        if self.claim is None:
            self.claim = answer.claim
        # All runs are tested against the same claim: a claim that depends on the data leaks, and could follow the
        # canary.
        if answer.claim != self.claim:
            raise ValueError("a trainer must claim the same in every run of a task, and this one's claim changed")
        return answer

    def _features(self, tests: Sequence[DeclaredTest], count: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns features of `count` runs with the canary and as many without, the former first."""
        kept: dict[str, list[list[Tensor]]] = {test.name: [[], []] for test in tests}
        for _ in range(count):
            for side, examples in enumerate((self.scenario.sets.present, self.negative)):
                answer = self._run(examples)
                again = None
                if self.scenario.repeated:
                    again = self._run(self.negative, dict(answer.published))
                for test in tests:
                    kept[test.name][side].append(test.feature(self.scenario, answer, again).double().reshape(-1))
        finite = {"nan": 0.0, "posinf": 1e30, "neginf": -1e30}
        return {
            name: (torch.stack(sides[0]).nan_to_num(**finite), torch.stack(sides[1]).nan_to_num(**finite))
            for name, sides in kept.items()
        }

    def _judged(self, test: DeclaredTest, claim: TrainerClaim, present: Tensor, without: Tensor) -> TestOutcome:
        runs = len(present)
        hits, alarms = int((present > 0).sum()), int((without > 0).sum())
        alpha = self.level / len(self.scenario.looks) / 2  # half for each rate
        tpr = clopper_pearson_lower(hits, runs, alpha)
        fpr = clopper_pearson_upper(alarms, runs, alpha)
        allowed = claim.most(fpr)
        return TestOutcome(
            test=test.name,
            found="violation" if tpr > allowed else "no violation found",
            runs=runs,
            with_canary=hits,
            without_canary=alarms,
            at_least=tpr,
            at_most_fpr=fpr,
            allowed=allowed,
        )


def _rule(present: Tensor, without: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a linear score fitted to calibration runs: a positive score classifies a run as one with the canary."""
    high, low = present.mean(dim=0), without.mean(dim=0)
    direction, middle = high - low, (high + low) / 2
    length = torch.linalg.vector_norm(direction)
    direction = direction / length if length > 0 else direction
    return lambda features: (features - middle) @ direction
