"""Command line: `python -m leakbench.benchmarks.speed [PART]`, from the root of the checkout."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer

from leakbench.malloc import keep_freed_memory

from . import architectures, federated, methods, plot, report, step, transformer_models
from .part import check_choices

# fmt: off
Benchmark = Literal[
    "all", "step", "architectures", "methods", "noise", "projection", "masked", "rgap", "inversion", "shadows",
    "informed", "transformers", "federated",
]
# fmt: on
PARTS = get_args(Benchmark)[1:]
"""Modules of this package with a function `measure`, in the order in which they run."""
# Plain tracebacks: typer's own are for users, and readers of these know the code.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def speed(
    what: Annotated[Benchmark, typer.Argument(help="What to measure.")] = "all",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Small and few: shows that all works, in a minute.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Of rgap: the paper's size, which takes minutes a round.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each comparison; 15, or 3 if quick.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Seconds for the rounds of one comparison; each part has its own.")
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case or network; may be repeated.")] = None,
    way: Annotated[list[str] | None, typer.Option(help="Only this way or method; may be repeated.")] = None,
    memory: Annotated[bool | None, typer.Option("--memory/--no-memory", help="Peak memory; unless quick.")] = None,
    sweeps: Annotated[bool, typer.Option("--sweeps/--no-sweeps", help="Cost by batch size and dimension.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch.")] = None,
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("results/speed"),
) -> None:
    """Measures, prints tables, and writes JSON, Markdown and figures. A target that is missed is no error."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"device must be cpu or cuda, got '{device}'")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("device must be cpu where torch finds no CUDA device, got 'cuda'")
    if budget is not None and not budget > 0:
        raise typer.BadParameter(f"budget must be a positive number of seconds, got {budget}")
    try:
        if what in ("methods", "federated") and case:
            raise ValueError("case must be left out, for every method is measured on the same networks; give ways")
        if full and what not in ("all", "rgap"):
            raise ValueError(f"full must be left out, for only rgap has a size of its own, got '{what}'")
        if full and quick:
            raise ValueError("full and quick must not go together")
        if what in ("architectures", "transformers") and way:
            raise ValueError("way must be left out, for every network is measured in the same three; give cases")
        if what in ("all", "methods"):
            methods.refuse_unknown((way or ()) if what == "methods" else (), rounds)
        if what in ("all", "federated"):
            federated.refuse_unknown((way or ()) if what == "federated" else (), rounds)
        if what == "architectures":
            check_choices("case", case or (), architectures.names(quick=quick))
        elif what == "transformers":
            check_choices("case", case or (), transformer_models.names())
        elif what not in ("methods", "federated"):
            step.refuse_unknown(case or (), way or (), quick=quick)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # Set in the command `leakbench` too; otherwise times depend on the memory that the process freed before.
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    own_options: dict[str, dict[str, Any]] = {
        "step": {"cases": case or (), "ways": way or (), "sweeps": sweeps},
        "architectures": {"only": (case or ()) if what == "architectures" else ()},
        "transformers": {"only": (case or ()) if what == "transformers" else ()},
        "methods": {"only": (way or ()) if what == "methods" else ()},
        "federated": {"only": (way or ()) if what == "federated" else ()},
        "rgap": {"full": full},
    }
    shared = {"device": device, "quick": quick, "rounds": rounds, "budget": budget, "memory": memory, "say": _say}
    for name in PARTS if what == "all" else (what,):
        part = importlib.import_module(f"{__package__}.{name}")
        _finish(part.measure(**shared, **own_options.get(name, {})), out)


def _finish(document: dict[str, Any], out: Path) -> None:
    """Prints and writes the results of a benchmark."""
    name = document["benchmark"]
    # Before the documents, which name them.
    figures = _figures(document, out)
    report.write_json(document, out / f"{name}.json")
    report.write(
        out / f"{name}.md", report.markdown(document, [figure for figure in figures if figure.endswith("png")])
    )
    # Results go to standard output and progress to standard error, so that tables can be piped.
    for table in report.tables(document):
        print(table.text())
    _say(f"wrote {', '.join([f'{name}.json', f'{name}.md', *figures])} to {out}")


def _figures(document: dict[str, Any], out: Path) -> list[str]:
    """Curves for the sweeps, or dots if there are no sweeps."""
    name, sweeps = document["benchmark"], document.get("sweeps", {})
    panels = {axis: [sweep for key, sweep in sweeps.items() if key.startswith(axis)] for axis in ("batch", "dimension")}
    files = [file for axis, chosen in panels.items() if chosen for file in plot.curves(chosen, out, f"{name}_{axis}")]
    return files or plot.dots(document, out, name)


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    app(prog_name="python -m leakbench.benchmarks.speed")
