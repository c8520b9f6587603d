"""Self-test certificate: results of the battery on every planted bug and on correct trainers.

A bug is caught in a repetition if any test of the battery has a violation. Repetitions after the first run only the
scenarios in which the first caught it, at their level in the whole battery: their power is measured, and the power of
the whole battery is at least that.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakbench.defenses.core import Defense, ToyRows, poisson, predict, rehearsed, seed_from
from leakbench.defenses.core.privacy.ledger import Ledger
from leakbench.defenses.core.training.step import Account
from leakbench.leaderboard.records.files import write_bytes

from ..catalog import methods as catalog
from ..catalog import plugins
from ..evidence.claim_bounds import clopper_pearson
from .battery import TESTS, BatteryOutcome, battery
from .bugs import BUGS
from .protocol import Trainer, of_function
from .trainers import VIEWS, of_catalogue, of_nominal_size, plain, settings_for, under_defense

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A trainer to be examined.

    Attributes:
        name: of the trainer.
        words: description of the mistake, or of the trainer.
        trainer: the trainer.
        planted: whether it has a planted bug.
    """

    name: str
    words: str
    trainer: Trainer
    planted: bool


@dataclass(frozen=True, kw_only=True)
class ExaminedTrainer:
    """Results of repetitions of the battery for a trainer.

    Attributes:
        candidate: the trainer.
        outcomes: one per repetition.
    """

    candidate: Candidate
    outcomes: tuple[BatteryOutcome, ...]

    @property
    def accused(self) -> int:
        """Repetitions with a violation."""
        return sum(bool(outcome.accused_by) for outcome in self.outcomes)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Clopper-Pearson interval of the probability of a violation."""
        return clopper_pearson(self.accused, len(self.outcomes))

    @property
    def by(self) -> dict[str, int]:
        """Tests with a violation, and the number of repetitions with it."""
        return dict(Counter(name for outcome in self.outcomes for name in outcome.accused_by))

    @property
    def as_it_should(self) -> bool:
        """True if a planted bug is caught in most repetitions, or a correct trainer is accused in none."""
        return 2 * self.accused > len(self.outcomes) if self.candidate.planted else self.accused == 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the results for JSON."""
        low, high = self.interval
        return {
            "name": self.candidate.name,
            "about": self.candidate.words,
            "planted": self.candidate.planted,
            "accused": self.accused,
            "repetitions": len(self.outcomes),
            "low": low,
            "high": high,
            "by": self.by,
            "runs": [outcome.runs for outcome in self.outcomes],
            "seconds": [round(outcome.seconds, 2) for outcome in self.outcomes],
            "first": self.outcomes[0].to_dict(),
        }


def planted(names: Sequence[str] | None = None) -> list[Candidate]:
    """Returns planted bugs.

    Args:
        names: of the requested bugs; None for all.

    Raises:
        ValueError: for an unknown name.
    """
    known = {bug.name: bug for bug in BUGS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"no planted bug named {name!r}; there are {', '.join(known)}")
    return [
        Candidate(name=bug.name, words=bug.words, trainer=bug.trainer, planted=True)
        for bug in BUGS
        if names is None or bug.name in names
    ]


def correct(defenses: Sequence[str] | None = None) -> list[Candidate]:
    """Returns correct trainers.

    Args:
        defenses: of the catalogue, or paths of files; None for leakbench's loop with and without views and with a
            nominal size, a defense of each kind of plan, and Opacus if it is installed.
    """
    if defenses is not None:
        return [_defended(name) for name in defenses]
    own = [
        Candidate(name="loop", words="one clipped block", trainer=under_defense(plain), planted=False),
        Candidate(
            name="loop with views",
            words="averaged over views of each image",
            trainer=under_defense(plain, augmentation=VIEWS),
            planted=False,
        ),
        Candidate(
            name="loop with a nominal size",
            words="nothing follows from the number of records",
            trainer=under_defense(plain, recipe=of_nominal_size),
            planted=False,
        ),
    ]
    return [*own, *(_defended(name) for name in representatives()), *_opacus()]


def foreign(path: str) -> Candidate:
    """Returns a trainer from a user's file, which is executed.

    Args:
        path: `FILE.py:FUNCTION`.
    """
    function = plugins.load("trainer", path)
    return Candidate(name=path, words=plugins.summary(path), trainer=of_function(function, path), planted=False)


def _defended(name: str) -> Candidate:
    catalog.check("defenses", name)
    return Candidate(name=name, words="defense of the catalogue", trainer=of_catalogue(name), planted=False)


def _opacus() -> list[Candidate]:
    if importlib.util.find_spec("opacus") is None:
        return []
    from .opacus_trainer import train

    trainer = of_function(train, "Opacus")
    return [Candidate(name="Opacus", words="its PrivacyEngine, over real numbers", trainer=trainer, planted=False)]


def representatives() -> list[str]:
    """Returns the first defense of each kind of plan that proves something."""
    by_kind: dict[object, str] = {}
    for name in catalog.central_names():
        if catalog.foreign("defenses", name):
            continue
        defense = catalog.defense(name, settings_for(name, 1.0), noise_multiplier=1.0)
        if kind := _kind(defense):
            by_kind.setdefault(kind, name)
    return sorted(by_kind.values())


def _kind(defense: Defense) -> frozenset[object]:
    """Returns the component types of the plans of its first two steps; empty if nothing is proved."""
    sampling, account = poisson(0.5), Account(Ledger(poisson(0.5)))
    if any(entry.reason for entry in predict(defense, sampling=sampling, steps=2).entries):
        return frozenset()
    steps = list(rehearsed(defense, account, steps=2, public=ToyRows(64)))
    plans = [step.plan.plan for step in steps if step.plan]
    return frozenset(
        (type(block.codec), type(block.query), type(plan.post), plan.correlated is None, plan.trial is None)
        for plan in plans
        for block in plan.blocks
    )


def examine(
    candidate: Candidate, *, repeat: int, seed: int, level: float, progress: Callable[[str], None] | None = None
) -> ExaminedTrainer:
    """Runs the battery on a trainer.

    Args:
        candidate: the trainer.
        repeat: number of repetitions, with different canaries and public randomness.
        seed: of the first.
        level: level of each battery.
        progress: called with a progress message.
    """
    scenario_of = {test.name: test.scenario for test in TESTS}
    outcomes: list[BatteryOutcome] = []
    for repetition in range(repeat):
        only = None
        if repetition and candidate.planted and outcomes[0].accused_by:
            only = frozenset(scenario_of[name] for name in outcomes[0].accused_by)
        own = seed if not repetition else seed_from("selftest", seed, repetition)
        outcomes.append(battery(candidate.trainer, seed=own, level=level, only=only, progress=progress))
    return ExaminedTrainer(candidate=candidate, outcomes=tuple(outcomes))


def document(examinations: Sequence[ExaminedTrainer], *, seed: int, level: float) -> dict[str, Any]:
    """Returns all measurements as plain data."""
    return {
        "schema": SCHEMA,
        "seed": seed,
        "level": level,
        "as_it_should": all(trainer.as_it_should for trainer in examinations),
        "tests": [{"name": test.name, "question": test.question} for test in TESTS],
        "trainers": [trainer.to_dict() for trainer in examinations],
    }


def line(examination: ExaminedTrainer) -> str:
    """Returns a trainer's result as a line of text."""
    low, high = examination.interval
    verdict = (
        ("caught" if examination.as_it_should else "NOT CAUGHT")
        if examination.candidate.planted
        else _accused(examination)
    )
    first, many = examination.outcomes[0], len(examination.outcomes) > 1
    by = ", ".join(f"{name} {count}" if many else name for name, count in examination.by.items())
    coverage = f"{first.tests_run} of {len(TESTS)} tests"
    coverage += f" (it raised in {', '.join(first.failed)})" if first.failed else ""
    share = f"{examination.accused}/{len(examination.outcomes)} [{low:.2f}, {high:.2f}]"
    measurements = f"{by or '-':<34} {coverage}, {first.runs} runs, {first.seconds:.0f} s"
    return f"{examination.candidate.name:<24} {verdict:<12} {share:<20} {measurements}"


def _accused(trainer: ExaminedTrainer) -> str:
    return "ACCUSED" if trainer.accused else "not accused"


def summary(examinations: Sequence[ExaminedTrainer]) -> str:
    """Returns a sentence on the results."""
    bugs, others = (
        [trainer for trainer in examinations if trainer.candidate.planted is kind] for kind in (True, False)
    )
    caught = sum(trainer.as_it_should for trainer in bugs)
    sentences = [f"{caught} of {len(bugs)} planted bugs caught"] if bugs else []
    if others:
        accused = sum(not trainer.as_it_should for trainer in others)
        sentences.append(f"{accused} of {len(others)} correct trainers accused")
    return "; ".join(sentences)


def verdict_on(examination: ExaminedTrainer) -> str:
    """Returns the result for a user's trainer: a line for each test, and a verdict that is never "verified"."""
    # The first repetition that accuses: a repetition without a violation does not contradict it.
    shown = next((each for each in examination.outcomes if each.accused_by), examination.outcomes[0])
    lines: list[str] = []
    for outcome in shown.outcomes:
        if outcome.found == "n/a":
            lines.append(f"{outcome.test:<14} n/a: {outcome.why}")
            continue
        counts = f"{outcome.with_canary} of {outcome.runs} with, {outcome.without_canary} of {outcome.runs} without"
        rates = f"TPR at least {outcome.at_least:.3f} at FPR at most {outcome.at_most_fpr:.3f}, "
        lines.append(f"{outcome.test:<14} {outcome.found}: {counts}; {rates}allowed {outcome.allowed:.3f}")
    accused = shown.accused_by
    end = f"violation: {', '.join(accused)}" if accused else "no violation found"
    coverage = (
        f"{shown.tests_run} of {len(TESTS)} declared tests asked at level {shown.level:g} in all, {shown.runs} runs"
    )
    if len(examination.outcomes) > 1:
        end += f" in {examination.accused} of {len(examination.outcomes)} repetitions"
    return "\n".join([*lines, f"{end} ({coverage}, {shown.seconds:.0f} s)"])


def markdown(examinations: Sequence[ExaminedTrainer], *, seed: int, level: float) -> str:
    """Returns two tables: of bugs, and of correct trainers."""
    lines = ["# Self-test", "", f"Seed {seed}, level {level:g} of a battery. {summary(examinations)}.", ""]
    for kind, heading in ((True, "caught"), (False, "accused")):
        rows = [trainer for trainer in examinations if trainer.candidate.planted is kind]
        if not rows:
            continue
        lines += [f"| trainer | | {heading} | 95 % interval | by | runs | seconds |", "|---|---|--:|--:|---|--:|--:|"]
        for trainer in rows:
            low, high = trainer.interval
            by = ", ".join(f"`{name}`" for name in trainer.by) or "-"
            cells = [
                f"`{trainer.candidate.name}`",
                trainer.candidate.words,
                f"{trainer.accused} of {len(trainer.outcomes)}",
                f"{low:.2f} to {high:.2f}",
                by,
                str(trainer.outcomes[0].runs),
                f"{trainer.outcomes[0].seconds:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def write(examinations: Sequence[ExaminedTrainer], folder: Path, *, seed: int, level: float) -> list[Path]:
    """Writes the document and the tables, as selftest.json and selftest.md."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[tuple[str, Callable[[], str]]] = [
        (
            "selftest.json",
            lambda: json.dumps(document(examinations, seed=seed, level=level), indent=2, allow_nan=False) + "\n",
        ),
        ("selftest.md", lambda: markdown(examinations, seed=seed, level=level)),
    ]
    for name, text in files:
        write_bytes(folder / name, text().encode())
    return [folder / name for name, _ in files]
