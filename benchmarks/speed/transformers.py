"""DP-SGD steps on transformers, an LSTM and ConvNeXt, plain and with low-rank adapters, against plain SGD and Opacus.

For each model the table has the engine that `auto` chooses, times against plain SGD and Opacus' hooks, and how far the
clipped sums of both are from those of a loop of autograd, in float32 and evaluation mode, where dropout draws nothing.
What refuses a model is listed with its sentence. "Opacus" is its `GradSampleModule` with its `DPOptimizer` as a user
calls them, without our checks: a difference from the loop is then a wrong sum.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakbench.defenses.core import Block, Engine, Everything, StepPlan, clip

from .harness import Ratio, SpeedComparison, TimedCall, reason
from .part import ROUNDS, Options, SpeedPart, check_choices
from .targets import SpeedTarget
from .transformer_models import data_of, missing, model_of, names
from .ways import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, WAYS, opacus_module

PLAIN, OURS, PEER, GHOST = "sgd", "auto", "opacus-hooks", "opacus-ghost"
BATCH = 32
_EXAMPLES = 6  # of the comparison with a loop
_LEAST = 0.02  # seconds of consecutive steps
_WRONG = 1e-3  # difference of the sums, of their largest entry, that rounding in float32 does not explain


def build(*, network: str, batch: int, quick: bool, way: str, device: str = "cpu") -> TimedCall:
    """Builds a way's step on a model, with random data.

    Args:
        network: of `transformer_models.names()`.
        batch: number of examples.
        quick: whether the model is smaller.
        way: key of `ways.WAYS`.
        device: "cpu" or "cuda".
    """
    inputs, labels = (values.to(device) for values in data_of(network, batch, quick=quick))
    with _silent():
        step = WAYS[way](model_of(network, quick=quick).to(device).train(), inputs, labels, NOISE_MULTIPLIER)
    return step


def measure(*, only: Sequence[str] = (), **options: Unpack[Options]) -> dict[str, Any]:
    """Compares the steps on every model whose library is installed.

    Args:
        only: names of models; all if empty.
        options: see `Options`; memory is not measured where None.

    Raises:
        ValueError: a model is not known.
    """
    part = SpeedPart(__name__, options, budget=15.0, memory=False)
    check_choices("case", only, names())
    batch = 4 if part.quick else BATCH
    rows, refusals, skipped = list[list[str]](), list[list[str]](), dict[str, str]()
    checks = dict[str, dict[str, float | str]]()
    for network in only or names():
        if package := missing(network):
            skipped[network] = f"{package} is not installed"
            continue
        part.say(network)
        arguments = {"network": network, "batch": batch, "quick": part.quick}
        trained = sum(p.numel() for p in model_of(network, quick=part.quick).parameters() if p.requires_grad)
        about = {"trained parameters": trained, "batch": batch}
        with _silent():
            compared = part.compare(
                network, (PLAIN, OURS, PEER, GHOST), arguments, peer=PEER, floor=PLAIN, about=about, least=_LEAST
            )
            differences = {way: _difference(way, network, part) for way in (OURS, PEER)}
            refusals += _refusals(network, compared, differences[PEER], part)
        for peer in (PEER, GHOST):
            part.targets.append(SpeedTarget(case=network, way=OURS, against=peer, quantity="time", limit=1.0))
        checks[network] = differences
        rows.append(_row(compared, differences))
    headings = [
        "model",
        "engine",
        "ms",
        "x plain (min)",
        "x Opacus (min)",
        "x ghost (min)",
        "off the loop",
        "Opacus off the loop",
    ]
    remarks = [f"Skipped: {name}, {why}." for name, why in skipped.items()]
    summary = {"title": "Transformers", "columns": headings, "rows": rows, "words": 2, "remarks": remarks}
    refused = {"title": "Refused", "columns": ["model", "by", "sentence"], "rows": refusals, "words": 3, "remarks": []}
    return part.document(
        title="A DP-SGD step on transformers",
        method=(
            "Clip at 1, noise multiplier 1, SGD, float32, random data, training mode with each model's own dropout. "
            "Ratios: median over rounds, and the ratio of the minima in brackets. Off the loop: largest difference of "
            f"the clipped sum of {_EXAMPLES} examples from a loop of autograd, of its largest entry, in evaluation "
            f"mode. {ROUNDS}"
        ),
        summaries=[summary, *([refused] if refusals else [])],
        differences=checks,
        skipped=skipped,
    )


def _row(compared: SpeedComparison, differences: dict[str, float | str]) -> list[str]:
    ours = compared.measurement(OURS)
    milliseconds = f"{1e3 * sorted(ours.seconds)[len(ours.seconds) // 2]:.1f}" if ours.seconds else "n/a"
    engine = ours.note or ours.reason
    ratios = [_ratio(compared, against) for against in (PLAIN, PEER, GHOST)]
    return [compared.name, engine, milliseconds, *ratios, *(_shown(differences[way]) for way in (OURS, PEER))]


def _ratio(compared: SpeedComparison, against: str) -> str:
    ratio = compared.time_ratio(OURS, against)
    if not isinstance(ratio, Ratio):
        return "n/a"
    minima = min(compared.measurement(OURS).seconds) / min(compared.measurement(against).seconds)
    return f"{ratio.median:.2f} ({minima:.2f})"


def _shown(difference: float | str) -> str:
    return difference if isinstance(difference, str) else f"{difference:.0e}"


def _difference(way: str, network: str, part: SpeedPart) -> float | str:
    """Returns how far a way's clipped sum is from that of a loop, relative to its largest entry; "n/a" if it fails."""
    model = model_of(network, quick=part.quick).to(part.device).eval()
    inputs, labels = (values.to(part.device) for values in data_of(network, _EXAMPLES, quick=part.quick))
    expected = _by_loop(copy.deepcopy(model), inputs, labels)
    try:
        computed = (_by_opacus if way == PEER else _by_engine)(model, inputs, labels)
    except Exception:  # anything that a tool raises on a model; the reason is among the refusals
        return "n/a"
    return float((computed - expected).abs().max() / expected.abs().max())


def _by_loop(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the clipped sum by autograd on one example at a time."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(())
    for x, y in zip(inputs.split(1), labels.split(1), strict=True):
        gradients = torch.autograd.grad(cross_entropy(model(x), y), trained, materialize_grads=True)
        row = torch.cat([gradient.flatten() for gradient in gradients])
        total = total.to(row) + row * min(1.0, CLIP_NORM / float(row.double().norm()))
    return total


def _by_engine(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    engine = Engine(model)
    return engine.clipped_sums(
        StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP_NORM))), inputs, labels
    )[0]


def _by_opacus(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    hooked = opacus_module("grad_sample").GradSampleModule(model)
    # Opacus' hooks record in training mode only, so layers with parameters are in it, and those that draw are not.
    for module in hooked.modules():
        module.training = any(p.requires_grad for p in module.parameters(recurse=False))
    optimizer = opacus_module("optimizers").DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(inputs),
    )
    cross_entropy(hooked(inputs), labels).backward()
    optimizer.clip_and_accumulate()
    return torch.cat([p.summed_grad.flatten() for p in optimizer.params])


def _refusals(
    network: str, compared: SpeedComparison, peers_difference: float | str, part: SpeedPart
) -> Iterator[list[str]]:
    """Yields who refuses a model, and the sentence; a wrong sum too."""
    for way in (OURS, PEER, GHOST):
        if why := compared.measurement(way).reason:
            yield [network, way, _first_sentence(why)]
    for engine in ("layerwise", "opacus"):
        if why := _checked(network, engine, part):
            yield [network, f"engine {engine}", _first_sentence(why)]
    if not isinstance(peers_difference, str) and not peers_difference <= _WRONG:
        yield [network, PEER, f"accepts the model; its clipped sum is off by {peers_difference:.0e}"]


def _checked(network: str, engine: str, part: SpeedPart) -> str | None:
    """Returns the sentence with which one of our engines refuses a model; None if it does not."""
    inputs, labels = (values.to(part.device) for values in data_of(network, _EXAMPLES, quick=part.quick))
    checked = Engine(model_of(network, quick=part.quick).to(part.device).train(), engine=engine)
    try:
        checked.run(
            StepPlan(Block(codec=Everything(checked.layout.dim), bound=clip(CLIP_NORM))).at(0.0), inputs, labels, seed=0
        )
    except Exception as error:  # anything that a tool raises on a model
        return reason(error)
    return None


def _first_sentence(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


@contextmanager
def _silent() -> Iterator[None]:
    """Silences warnings of the libraries, which do not concern timings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
