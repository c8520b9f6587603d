"""`leakbench rank`: whether one example's gradient determines the input of every layer, dense and under masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import OK, Json, print_json, say

Curve = Mapping[float, Sequence[Any]]
"""Sparsity -> `RankReport`s by layer, whose module imports PyTorch, which `--help` does not wait for."""

HEADINGS = (
    "layer",
    "unknowns",
    "outputs",
    "rank W",
    "gradients",
    "rank K",
    "rank A",
    "condition",
    "deficit",
    "virtual",
    "RA",
)


def rank(
    model: Annotated[str, typer.Argument(help="Name of an architecture, or FILE.py:FUNCTION.")],
    sparsity: Annotated[
        list[str] | None, typer.Option(help="Fraction of the gradient that a random mask drops; may be repeated.")
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(help="As 3,32,32; that of the model's own data if left out.")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Logits; 1 for a binary one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, masks and the random input.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Picture of deficit against sparsity, .png or .svg.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> int:
    """Ranks of each layer's equations for R-GAP's recursion, without data; counting equations decides nothing."""
    from attacks.core.recursion.ranks import random_mask, rank_analysis

    from ..run.harness import pick_device

    rates = _rates(sparsity or ["0"])
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot must end in .png or .svg, got {plot.name}")
    network = _network(model, input_shape, classes, seed, pick_device(device))
    curve: dict[float, Sequence[Any]] = {}
    for rate in rates:
        mask = random_mask(network, rate, seed) if rate > 0 else None
        curve[rate] = rank_analysis(network, mask, seed=seed, like=next(iter(curve.values()), ()))
        if not as_json:
            print(_table(model, rate, curve[rate]) + "\n", flush=True)
    if plot is not None:
        _draw(model, curve, plot)
        say(f"written: {plot}")
    if as_json:
        masks = [{"sparsity": rate, "layers": [one.to_dict() for one in reports]} for rate, reports in curve.items()]
        print_json({"model": model, "seed": seed, "masks": masks})
    return OK


def _rates(given: Sequence[str]) -> list[float]:
    """Sparsities, each once, in order."""
    found = []
    for text in ",".join(given).split(","):
        try:
            rate = float(text)
        except ValueError:
            rate = -1.0
        if not 0 <= rate < 1:
            raise ValueError(f"--sparsity must be in [0, 1), got {text!r}")
        found.append(rate)
    return sorted(set(found))


def _network(model: str, input_shape: str | None, classes: int | None, seed: int, device: Any) -> Any:
    """The equations of a freshly initialised model."""
    from benchmarks import models
    from defenses.core import Block, Everything, Layout, StepPlan, clip, cross_entropy, logistic

    from ..subjects.structure import structure

    models.check(model)
    if (input_shape is None or classes is None) and model not in models.names():
        raise ValueError(f"--input-shape and --classes must be given for {model}, which has no data of its own")
    shape = models.natural(model).input_shape if input_shape is None else _shape(input_shape)
    logits = models.natural(model).classes if classes is None else classes
    built = models.build(model, input_shape=shape, classes=logits, seed=seed).to(device)
    layout = Layout.of(built)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(1.0)))
    loss = logistic if logits == 1 else cross_entropy
    return structure(plan, built, layout, layout.read(built), loss, shape).known_network()


def _shape(text: str) -> tuple[int, ...]:
    sides = text.split(",")
    if not all(side.strip().isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"--input-shape must be positive numbers with commas between, as 3,32,32, got {text!r}")
    return tuple(int(side) for side in sides)


def _table(model: str, rate: float, reports: Sequence[Any]) -> str:
    """One mask's reports and the two verdicts, which are not the same question."""
    lines = [HEADINGS] + [
        tuple(
            map(
                str,
                (
                    one.layer,
                    one.unknowns,
                    one.outputs,
                    one.rank_outputs,
                    one.gradients,
                    one.rank_gradients,
                    one.rank,
                    "n/a" if one.condition is None else f"{one.condition:.3g}",
                    one.deficit,
                    one.virtual,
                    one.index,
                ),
            )
        )
        for one in reports
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    # The recursion starts at the last layer and ends at the first one that it cannot pass.
    stuck = max((one.layer for one in reports if one.deficit > 0), default=None)
    largest = max(one.index for one in reports)
    recursion = "reaches the input" if stuck is None else f"stops at layer {stuck}"
    search = "is excluded by these equations" if largest > 0 else "is not excluded by these equations"
    return f"{model}, sparsity {rate:g}\n{text}\nthe recursion {recursion}; a search {search} (largest RA {largest})"


def _draw(model: str, curve: Curve, file: Path) -> None:
    """Rank over unknowns of every layer against sparsity."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    draw_ranks(figure.subplots(), curve)
    figure.suptitle(f"{model}: what one gradient determines of each layer's input")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {"Software": None})


def draw_ranks(axes: Any, curve: Curve) -> None:
    """Draws into axes of a figure, beside which others may lie.

    Args:
        axes: of matplotlib.
        curve: reports by sparsity.
    """
    rates = list(curve)
    for number, one in enumerate(curve[rates[0]]):
        shares = [curve[rate][number].rank / curve[rate][number].unknowns for rate in rates]
        axes.plot(rates, shares, marker="o", label=f"layer {one.layer}")
    axes.set_xlabel("sparsity (fraction dropped)")
    axes.set_ylabel("rank / unknowns")
    axes.set_ylim(-0.02, 1.05)
    axes.legend(fontsize="small", ncols=2)
