"""The tool's own certificate: the battery against every planted bug and against correct trainers, in numbers.

A bug counts as caught in a repetition if any test of the battery has a violation. Repetitions after the first ask only
the scenarios by which the first caught it, at the level that they have in the whole battery: their power is measured,
and that of the whole is at least that.
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
from ..scoring.allowed import clopper_pearson
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
        words: what is wrong with it, or what it is.
        trainer: itself.
        planted: whether it is wrong.
    """

    name: str
    words: str
    trainer: Trainer
    planted: bool


@dataclass(frozen=True, kw_only=True)
class ExaminedTrainer:
    """What repetitions of the battery found of one trainer.

    Attributes:
        candidate: whom.
        outcomes: one a repetition.
    """

    candidate: Candidate
    outcomes: tuple[BatteryOutcome, ...]

    @property
    def accused(self) -> int:
        """Repetitions with a violation."""
        return sum(bool(one.accused_by) for one in self.outcomes)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the probability of a violation, 95 %, Clopper and Pearson."""
        return clopper_pearson(self.accused, len(self.outcomes))

    @property
    def by(self) -> dict[str, int]:
        """Tests with a violation, and in how many repetitions."""
        return dict(Counter(name for one in self.outcomes for name in one.accused_by))

    @property
    def as_it_should(self) -> bool:
        """A planted bug is caught in the larger half of the repetitions, and a correct trainer accused in none."""
        return 2 * self.accused > len(self.outcomes) if self.candidate.planted else self.accused == 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
            "runs": [one.runs for one in self.outcomes],
            "seconds": [round(one.seconds, 2) for one in self.outcomes],
            "first": self.outcomes[0].to_dict(),
        }


def planted(names: Sequence[str] | None = None) -> list[Candidate]:
    """Planted bugs.

    Args:
        names: of those that are wanted; None for all.

    Raises:
        ValueError: an unknown name.
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
    """Correct trainers.

    Args:
        defenses: of the catalogue, or paths of files; None for our loop with and without views and with a nominal size,
            one defense of each kind of plan, and Opacus where it is installed.
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
    """A trainer of somebody's own file, which is run.

    Args:
        path: of a file, a colon, the name of a function.
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
    """The first defense of each kind of plan that proves something."""
    found: dict[object, str] = {}
    for name in catalog.names("defenses"):
        if catalog.foreign("defenses", name):
            continue
        made = catalog.defense(name, settings_for(name, 1.0), noise_multiplier=1.0)
        if kind := _kind(made):
            found.setdefault(kind, name)
    return sorted(found.values())


def _kind(defense: Defense) -> frozenset[object]:
    """What plans of its first two steps are made of; empty where nothing is proved."""
    sampling, account = poisson(0.5), Account(Ledger(poisson(0.5)))
    if any(entry.reason for entry in predict(defense, sampling=sampling, steps=2).entries):
        return frozenset()
    taken = list(rehearsed(defense, account, steps=2, public=ToyRows(64)))
    plans = [step.plan.plan for step in taken if step.plan]
    return frozenset(
        (type(block.codec), type(block.query), type(plan.post), plan.correlated is None, plan.trial is None)
        for plan in plans
        for block in plan.blocks
    )


def examine(
    candidate: Candidate, *, repeat: int, seed: int, level: float, progress: Callable[[str], None] | None = None
) -> ExaminedTrainer:
    """The battery against one trainer.

    Args:
        candidate: whom.
        repeat: how often, with other canaries and other public randomness.
        seed: of the first.
        level: of a battery.
        progress: is told in words what was done.
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


def document(found: Sequence[ExaminedTrainer], *, seed: int, level: float) -> dict[str, Any]:
    """Everything that was measured, as plain data."""
    return {
        "schema": SCHEMA,
        "seed": seed,
        "level": level,
        "as_it_should": all(one.as_it_should for one in found),
        "tests": [{"name": test.name, "question": test.question} for test in TESTS],
        "trainers": [one.to_dict() for one in found],
    }


def line(one: ExaminedTrainer) -> str:
    """A trainer in a line of text."""
    low, high = one.interval
    verdict = ("caught" if one.as_it_should else "NOT CAUGHT") if one.candidate.planted else _accused(one)
    first, many = one.outcomes[0], len(one.outcomes) > 1
    by = ", ".join(f"{name} {count}" if many else name for name, count in one.by.items())
    asked = f"{first.asked} of {len(TESTS)} tests"
    asked += f" (it raised in {', '.join(first.failed)})" if first.failed else ""
    share = f"{one.accused}/{len(one.outcomes)} [{low:.2f}, {high:.2f}]"
    rest = f"{by or '-':<34} {asked}, {first.runs} runs, {first.seconds:.0f} s"
    return f"{one.candidate.name:<24} {verdict:<12} {share:<20} {rest}"


def _accused(one: ExaminedTrainer) -> str:
    return "ACCUSED" if one.accused else "not accused"


def summary(found: Sequence[ExaminedTrainer]) -> str:
    """One sentence."""
    bugs, others = ([one for one in found if one.candidate.planted is kind] for kind in (True, False))
    caught = sum(one.as_it_should for one in bugs)
    said = [f"{caught} of {len(bugs)} planted bugs caught"] if bugs else []
    if others:
        accused = sum(not one.as_it_should for one in others)
        said.append(f"{accused} of {len(others)} correct trainers accused")
    return "; ".join(said)


def verdict_on(one: ExaminedTrainer) -> str:
    """What the battery says of somebody's own trainer: a line for each test, and a verdict that is never "verified"."""
    # Of several repetitions the first that accuses: what another one has not found is no answer to it.
    shown = next((each for each in one.outcomes if each.accused_by), one.outcomes[0])
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
    asked = f"{shown.asked} of {len(TESTS)} declared tests asked at level {shown.level:g} in all, {shown.runs} runs"
    if len(one.outcomes) > 1:
        end += f" in {one.accused} of {len(one.outcomes)} repetitions"
    return "\n".join([*lines, f"{end} ({asked}, {shown.seconds:.0f} s)"])


def markdown(found: Sequence[ExaminedTrainer], *, seed: int, level: float) -> str:
    """Two tables: of bugs, and of correct trainers."""
    lines = ["# Self-test", "", f"Seed {seed}, level {level:g} of a battery. {summary(found)}.", ""]
    for kind, heading in ((True, "caught"), (False, "accused")):
        rows = [one for one in found if one.candidate.planted is kind]
        if not rows:
            continue
        lines += [f"| trainer | | {heading} | 95 % interval | by | runs | seconds |", "|---|---|--:|--:|---|--:|--:|"]
        for one in rows:
            low, high = one.interval
            by = ", ".join(f"`{name}`" for name in one.by) or "-"
            cells = [
                f"`{one.candidate.name}`",
                one.candidate.words,
                f"{one.accused} of {len(one.outcomes)}",
                f"{low:.2f} to {high:.2f}",
                by,
                str(one.outcomes[0].runs),
                f"{one.outcomes[0].seconds:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def write(found: Sequence[ExaminedTrainer], folder: Path, *, seed: int, level: float) -> list[Path]:
    """The document and the tables, as selftest.json and selftest.md."""
    folder.mkdir(parents=True, exist_ok=True)
    told: list[tuple[str, Callable[[], str]]] = [
        (
            "selftest.json",
            lambda: json.dumps(document(found, seed=seed, level=level), indent=2, allow_nan=False) + "\n",
        ),
        ("selftest.md", lambda: markdown(found, seed=seed, level=level)),
    ]
    for name, text in told:
        write_bytes(folder / name, text().encode())
    return [folder / name for name, _ in told]
