"""Private steps of leakbench and of Opacus, by hooks and by ghost clipping, against plain SGD: times and peak memory.

Each way is built, warmed up, timed and freed before the next: Opacus's hooks keep the gradients of all examples between
steps, which would be missing from what the other ways find free.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator

import torch

from ..speed.harness import TimedCall, clock_of, interleaved, reason
from ..speed.memory import Memory, Unavailable, measure_here
from ..speed.ways import NOISE_MULTIPLIER, WAYS, Ours, others_warnings
from .networks import VISION_TRANSFORMER, build, data
from .products import engine_settings, names, products
from .rows import CheckedFigure, CheckedRow, NotMeasured, PartSettings

CASES = (
    ("resnet18", 256),
    ("dp_cnn", 256),
    ("dp_cnn", 2048),
    (VISION_TRANSFORMER, 256),
    ("dp_cnn_small", 1024),
    ("wrn_16_4", 256),
    ("mlp", 1024),
    ("cnn6", 512),
    ("resnet18", 1024),
    ("dp_cnn", 8192),
)
SMALL_CASES = (("dp_cnn_small", 4), ("mlp", 8))
SGD, HOOKS, GHOST, OURS = "SGD", "hooks", "ghost", "leakbench"
_WAYS = {SGD: "sgd", HOOKS: "opacus-hooks", GHOST: "opacus-ghost", OURS: "auto"}
_ROUNDS, _WARM_UP = 9, 4  # a step may be captured as a graph in one of the first
_MIB = 2**20


def measure(settings: PartSettings) -> Iterator[CheckedRow]:
    """Yields a row for each network and precision.

    Args:
        settings: of the part.
    """
    cases = SMALL_CASES if settings.small else CASES
    # For the rounds alone: first steps, with all preparations, take about as long.
    budget = settings.seconds / (4 * len(cases) * len(_WAYS))
    for network, batch in cases:
        for precision in names(settings.device):
            with products(precision), others_warnings():
                yield _row(network, batch, precision, settings.device, budget)


def _row(network: str, batch: int, precision: str, device: str, budget: float) -> CheckedRow:
    """Measures all ways of taking a step."""
    milliseconds: dict[str, CheckedFigure] = {}
    mebibytes: dict[str, CheckedFigure] = {}
    wrong: list[str] = []
    remarks: list[str] = []
    for way in _WAYS:
        milliseconds[way] = mebibytes[way] = None
        try:
            seconds, memory, note = _measured(network, batch, way, precision, device, budget)
        except NotMeasured as missing:
            return CheckedRow(name=f"{network}, {batch}, {precision}", remarks=(str(missing),))
        except Exception as error:  # a tool may raise anything on unknown models
            (wrong if way == OURS else remarks).append(f"{way} takes no step: {reason(error)}")
            continue
        finally:
            gc.collect()  # models and hooks form reference cycles
            if device != "cpu":
                torch.cuda.empty_cache()
        milliseconds[way] = 1e3 * seconds
        mebibytes[way] = None if memory is None else memory.extra / _MIB
        remarks += [f"{way} is {note}"] * bool(note)
    figures: dict[str, CheckedFigure] = {f"{way} ms": value for way, value in milliseconds.items()}
    figures[f"{OURS} / {SGD}"] = _ratio(milliseconds[OURS], milliseconds[SGD])
    figures |= {f"{way} / {OURS}": _ratio(milliseconds[way], milliseconds[OURS]) for way in (HOOKS, GHOST)}
    figures |= {f"{way} MiB": value for way, value in mebibytes.items()}
    return CheckedRow(
        name=f"{network}, {batch}, {precision}", figures=figures, wrong=tuple(wrong), remarks=tuple(remarks)
    )


def _measured(
    network: str, batch: int, way: str, precision: str, device: str, budget: float
) -> tuple[float, Memory | None, str]:
    """Returns the median time of a step in seconds, its memory, and the way's note."""
    step = step_of(network, batch, way, precision, device)
    try:
        memory = measure_here(lambda: step, device=device, calls=_WARM_UP)
    except Unavailable:
        memory = None
        for _ in range(_WARM_UP):
            step()
    timed = interleaved({way: lambda: step}, rounds=_ROUNDS, budget=budget, warmup=0, clock=clock_of(device))
    if way in timed.failed:
        raise RuntimeError(timed.failed[way])
    return statistics.median(timed.seconds[way]), memory, timed.notes.get(way, "")


def step_of(network: str, batch: int, way: str, precision: str, device: str) -> TimedCall:
    """Builds a way's step.

    Args:
        network: as in `networks`.
        batch: number of examples.
        way: `SGD`, `HOOKS`, `GHOST` or `OURS`.
        precision: as in `products`, which the caller sets.
        device: "cpu" or "cuda".

    Raises:
        NotMeasured: the network is of a package that is not installed.
        ModuleNotFoundError: Opacus is not installed.
    """
    model = build(network).to(device).train()
    inputs, labels = data(network, batch, device)
    if way == OURS:
        return Ours(model, inputs, labels, NOISE_MULTIPLIER, engine="auto", **engine_settings(precision))
    return WAYS[_WAYS[way]](model, inputs, labels, NOISE_MULTIPLIER)


def _ratio(numerator: CheckedFigure, denominator: CheckedFigure) -> CheckedFigure:
    if isinstance(numerator, float) and isinstance(denominator, float):
        return numerator / denominator
    return None
