"""Cost of ten training steps of every defense relative to plain DP-SGD, including sampling and optimizer.

Methods are found by their files and run at their default settings. A method that can keep its directions for several
steps is also timed with directions kept for ten, so that the ten steps include a refresh; a method that draws random
directions is timed with Gaussian ones and with those of a count sketch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Unpack

import torch

from leakbench.defenses.core import (
    TOY_DIM,
    Account,
    Context,
    Coordinates,
    Defense,
    Execution,
    Federated,
    Ledger,
    Recipe,
    Recording,
    Whole,
    clip,
    poisson,
    rehearsed,
    seeded,
)
from leakbench.defenses.core.training.ongoing import OngoingRun, TrainingSettings

from .harness import TimedCall
from .networks import Workload, parameters
from .part import ROUNDS, Options, SpeedPart, check_choices
from .targets import SpeedTarget

PLAIN = "plain DP-SGD"
KEPT = 10
"""Number of steps per call, and of steps for which the second way of such methods keeps its directions."""
AFTER = f", kept {KEPT} steps"
SKETCHED = ", sketch"
"""Suffix of a method with random directions that are those of a count sketch instead of Gaussian."""

CASES = (Workload("dp_cnn_small", 256),)
QUICK_CASES = (Workload("dp_cnn_small", 32),)
SPARSE, PROJECTED, PROJECTED_ANEW = 1.1, 1.6, 2.5
_PER_BATCH = 20  # private examples per expected example of a batch
_PUBLIC = 1024
_STEPS = 400  # planned steps, for methods that change in the course of a run
_MOST_ROUNDS = _STEPS // KEPT - 2  # leaves two calls to warm up


def names() -> list[str]:
    """Returns all methods of central training, by the names of their files."""
    folder = Path(inspect.getfile(Context)).parents[2]  # of `defenses/core/plan/`
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__" and _is_central(path.stem))


def _is_central(name: str) -> bool:
    returned = inspect.signature(_function(name)).return_annotation
    return getattr(returned, "__name__", returned) != Federated.__name__


def ways() -> list[str]:
    """Returns plain DP-SGD, every method, and the further ways of methods with directions."""
    variants = []
    for name in names():
        options = inspect.signature(_function(name)).parameters
        of_name = [name, *([name + SKETCHED] if "directions" in options else [])]
        variants += sorted(
            way + after for way in of_name for after in (("", AFTER) if "interval" in options else ("",))
        )
    return [PLAIN, *variants]


def _function(name: str) -> Callable[..., Defense]:
    return getattr(importlib.import_module(f"leakbench.defenses.{name}"), name)


def refuse_unknown(only: Sequence[str], rounds: int | None) -> None:
    """Raises `ValueError` for an unknown way, or for more rounds than a run has steps."""
    if rounds is not None and rounds > _MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {_MOST_ROUNDS}, of {KEPT} steps each, got {rounds}")
    check_choices("way", only, ways())


def defense_of(way: str) -> Defense:
    """Returns the defense of a way, at noise multiplier 1 if it has one."""
    if way == PLAIN:
        return Defense(Whole(bound=clip(1.0)), 1.0, name=PLAIN)
    name, *options = way.split(", ")
    function = _function(name)
    settings: dict[str, Any] = {"interval": KEPT} if way.endswith(AFTER) else {}
    if SKETCHED[2:] in options:
        settings["directions"] = "sketch"
    if "noise_multiplier" in inspect.signature(function).parameters:
        settings["noise_multiplier"] = 1.0
    return function(**settings)


def build(*, network: str, batch: int, way: str, device: str = "cpu") -> TimedCall:
    """Builds a training run of a method on random data, of which every call takes the next `KEPT` steps.

    Args:
        network: see `Workload`.
        batch: expected number of examples, drawn by Poisson sampling.
        way: in `ways()`.
        device: "cpu" or "cuda".
    """
    load = Workload(network, batch * _PER_BATCH)
    public = Workload(network, _PUBLIC).data()
    settings = TrainingSettings(
        defense=defense_of(way),
        sampling=poisson(1 / _PER_BATCH),
        steps=_STEPS,
        lr=0.01,  # so low that no method diverges
        noise=seeded(0),
        seed=1,
        sampler_key=2,
        recipe=Recipe(),
        execution=Execution(device=torch.device(device)),
        recording=Recording(),
    )
    # Shifted by 1, because public images that equal private ones are refused.
    training = OngoingRun(load.model(), load.data(), (public[0] + 1, public[1]), settings)
    numbers = count(training.begin())  # after a release before the first step, if there is one

    def next_steps() -> None:
        for number in islice(numbers, KEPT):
            training.step(number)

    return next_steps


def targets(load: Workload) -> list[SpeedTarget]:
    """Limits by type of method, released coordinates and how long directions are kept; or the bound of a method."""
    goals: dict[str, dict[str, Any]] = {}
    for way in ways()[1:]:
        options = inspect.signature(_function(way.split(", ")[0])).parameters
        if way.endswith(AFTER) and "directions" in options and SKETCHED not in way:
            # A product of every gradient with dense directions, of two operations an entry.
            operations = 2 * options["rank"].default * parameters(load.model())
            goals[way] = {"bound": f"{operations // 10**6} Mflop an example"}
        elif way.endswith(AFTER):
            goals[way] = {"limit": PROJECTED}
        elif "auxiliary" in options:
            goals[way] = {"limit": PROJECTED_ANEW}
        elif _is_sparse(way):
            goals[way] = {"limit": SPARSE}
    return [SpeedTarget(case=load.name, way=w, against=PLAIN, quantity="time", **goal) for w, goal in goals.items()]


def _is_sparse(way: str) -> bool:
    """Returns whether only some of the coordinates are released by the end of a run."""
    *_, last = rehearsed(defense_of(way), Account(Ledger(poisson(0.1))), steps=20)
    codecs = [block.codec for block in last.plan.blocks] if last.plan else []
    return all(isinstance(c, Coordinates) for c in codecs) and sum(c.size for c in codecs) < TOY_DIM


def measure(*, only: Sequence[str] = (), **options: Unpack[Options]) -> dict[str, Any]:
    """Compares steps of every method with those of plain DP-SGD.

    Args:
        only: subset of `ways()`; all if empty.
        options: see `Options`; memory is not measured where None.

    Raises:
        ValueError: an unknown way.
    """
    refuse_unknown(only, options.get("rounds"))
    part = SpeedPart(__name__, options, budget=300.0, memory=False)
    chosen = [way for way in ways() if way == PLAIN or not only or way in only]
    for load in QUICK_CASES if part.quick else CASES:
        part.say(f"{load.name}, {len(chosen)} ways")
        about = {"parameters": parameters(load.model()), "batch": load.batch}
        arguments = {"network": load.network, "batch": load.batch}
        part.compare(load.name, chosen, arguments, peer=PLAIN, floor=PLAIN, about=about)
    part.targets += [target for load in CASES for target in targets(load) if target.way in chosen]
    return part.document(
        title=f"{KEPT} steps of every defense",
        method=(
            f"Batches by Poisson sampling, random data, SGD, float32, default settings. Of {KEPT} steps, one has a "
            f"refresh where directions are {AFTER[2:]}. {ROUNDS}"
        ),
    )
