"""`leakbench rank`: tests whether a per-example gradient determines the input of every layer, dense and masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import OK, Json, print_json, say

Curve = Mapping[float, Sequence[Any]]
"""Sparsity -> `RankReport`s by layer; untyped, since their module imports PyTorch, which would delay `--help`."""

WIDTH, INPUTS = 200, 100
"""Neurons and inputs of the layer on which SPEAR's success rate is measured; the rate depends on the mask and the
batch, not on the model."""

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
    batches: Annotated[
        str | None,
        typer.Option(help="As 2,5,8: also the share of batches of these sizes that SPEAR recovers."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Random updates for each share of SPEAR.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Picture of rank against sparsity, .png or .svg.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> int:
    """Computes ranks of each layer's equations for R-GAP's recursion, without data; counts alone decide nothing."""
    from leakbench.attacks.core.closed_form.recursion.ranks import random_mask, rank_analysis

    from ..run.harness import pick_device

    rates, sizes = _rates(sparsity or ["0"]), [] if batches is None else list(_positive("--batches", batches))
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot must end in .png or .svg, got {plot.name}")
    network = _network(model, input_shape, classes, seed, pick_device(device))
    curve: dict[float, Sequence[Any]] = {}
    for rate in rates:
        mask = random_mask(network, rate, seed) if rate > 0 else None
        curve[rate] = rank_analysis(network, mask, seed=seed, like=next(iter(curve.values()), ()))
        if not as_json:
            print(_table(model, rate, curve[rate]) + "\n", flush=True)
    shares = _phase_line(rates, sizes, trials, seed) if sizes else {}
    if shares and not as_json:
        print(_phase_table(shares, sizes, trials))
    if plot is not None:
        _draw(model, curve, shares, sizes, plot)
        say(f"written: {plot}")
    if as_json:
        masks = [
            {"sparsity": rate, "layers": [report.to_dict() for report in reports]} for rate, reports in curve.items()
        ]
        line = {"width": WIDTH, "inputs": INPUTS, "trials": trials, "batches": sizes}
        line["shares"] = [{"sparsity": rate, "recovered": fractions} for rate, fractions in shares.items()]
        print_json({"model": model, "seed": seed, "masks": masks, **({"phase_line": line} if shares else {})})
    return OK


def _phase_line(rates: Sequence[float], sizes: Sequence[int], trials: int, seed: int) -> dict[float, list[float]]:
    """Returns sparsity -> share of random updates from which SPEAR recovers every input, by batch size."""
    from leakbench.attacks.core.closed_form.keep_rate import recovered_share

    kept = [1 - rate for rate in rates]
    fractions = recovered_share(kept, sizes, width=WIDTH, inputs=INPUTS, trials=trials, seed=seed)
    return dict(zip(rates, fractions.tolist(), strict=True))


def _phase_table(shares: Mapping[float, Sequence[float]], sizes: Sequence[int], trials: int) -> str:
    title = (
        f"SPEAR on a linear layer of {INPUTS} inputs and {WIDTH} neurons with ReLU behind it, {trials} random updates"
    )
    lines = ["sparsity  " + "  ".join(f"batch {size}".rjust(9) for size in sizes)]
    lines += [f"{rate:>8g}  " + "  ".join(f"{share:9.2f}" for share in fractions) for rate, fractions in shares.items()]
    return f"{title} each: share of which every input is recovered\n" + "\n".join(lines)


def _rates(texts: Sequence[str]) -> list[float]:
    """Parses sparsities, each once, in order."""
    rates = []
    for text in ",".join(texts).split(","):
        try:
            rate = float(text)
        except ValueError:
            rate = -1.0
        if not 0 <= rate < 1:
            raise ValueError(f"--sparsity must be in [0, 1), got {text!r}")
        rates.append(rate)
    return sorted(set(rates))


def _network(model: str, input_shape: str | None, classes: int | None, seed: int, device: Any) -> Any:
    """Returns the layers of a freshly initialised model as equations for the rank analysis."""
    from leakbench.benchmarks import models
    from leakbench.defenses.core import Block, Everything, Layout, StepPlan, clip, cross_entropy, logistic

    from ..targets.structure import structure

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
    return _positive("--input-shape", text)


def _positive(option: str, text: str) -> tuple[int, ...]:
    """Parses positive numbers separated by commas."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"{option} must be positive numbers with commas between, as 3,32,32, got {text!r}")
    return tuple(int(number) for number in numbers)


def _table(model: str, rate: float, reports: Sequence[Any]) -> str:
    """Formats the ranks under a mask, and two separate verdicts: on the recursion and on a search."""
    lines = [HEADINGS] + [
        tuple(
            map(
                str,
                (
                    report.layer,
                    report.unknowns,
                    report.outputs,
                    report.rank_outputs,
                    report.gradients,
                    report.rank_gradients,
                    report.rank,
                    "n/a" if report.condition is None else f"{report.condition:.3g}",
                    report.deficit,
                    report.virtual,
                    report.index,
                ),
            )
        )
        for report in reports
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    # The recursion runs from the last layer to the first that it cannot pass.
    stuck = max((report.layer for report in reports if report.deficit > 0), default=None)
    largest = max(report.index for report in reports)
    recursion = "reaches the input" if stuck is None else f"stops at layer {stuck}"
    search = "is excluded by these equations" if largest > 0 else "is not excluded by these equations"
    return f"{model}, sparsity {rate:g}\n{text}\nthe recursion {recursion}; a search {search} (largest RA {largest})"


def _draw(model: str, curve: Curve, shares: Mapping[float, Sequence[float]], sizes: Sequence[int], file: Path) -> None:
    """Plots rank over unknowns of every layer against sparsity, with SPEAR's recovery next to it."""
    import altair as alt

    ranks = [
        (f"layer {report.layer}", rate, report.rank / report.unknowns)
        for rate, reports in curve.items()
        for report in reports
    ]
    panels = [("rank / unknowns", ranks)]
    if shares:
        recovered = [
            (f"batch {size}", rate, share)
            for rate, fractions in shares.items()
            for size, share in zip(sizes, fractions, strict=True)
        ]
        panels.append(("batches that SPEAR recovers", recovered))
    drawn = [
        alt.Chart(alt.Data(values=[{"line": line, "x": x, "y": y} for line, x, y in rows]), width=360, height=260)
        .mark_line(point=True)
        .encode(
            alt.X("x:Q", title="sparsity (fraction dropped)"),
            alt.Y("y:Q", title=title, scale=alt.Scale(domain=[0, 1])),
            alt.Color("line:N", title=None, sort=[line for line, *_ in rows]),
        )
        for title, rows in panels
    ]
    chart = alt.hconcat(*drawn, title=f"{model}: what one gradient determines of each layer's input")
    file.parent.mkdir(parents=True, exist_ok=True)
    chart.resolve_scale(color="independent").save(file, scale_factor=2)
