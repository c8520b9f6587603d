"""Command line: `python -m leakbench.benchmarks.federated_claims RESULTS...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..speed import report
from .cells import read
from .claims import by_records
from .direct import by_arithmetic
from .document import document, markdown

# Plain tracebacks, as of the speed benchmarks.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def federated_claims(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Outputs of federated suites, as of fed_claims_*.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where claims.md and claims.json go.")] = Path("results/federated_claims"),
    direct: Annotated[bool, typer.Option(help="Also measure T6, T7 and T9's norm, which need no records.")] = True,
) -> None:
    """Prints the verdict on each claim: holds, does not hold, cannot be told, or n/a with its reason."""
    if not results and not direct:
        raise typer.BadParameter("results must have a folder with --no-direct, got none")
    try:
        settings = read(results or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    verdicts = [
        *(by_arithmetic() if direct else ()),
        *(result for setting in settings for result in by_records(setting)),
    ]
    text = markdown(verdicts, settings)
    report.write_json(document(verdicts, settings), out / "claims.json")
    report.write(out / "claims.md", text)
    print(text)
    print(f"written to {out}")


if __name__ == "__main__":
    app(prog_name="python -m leakbench.benchmarks.federated_claims")
