"""`leakbench theory`: papers' claims, each measured on our own plans against a closed form, with a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..external.out_folder import check_folder
from .options import FAILED, OK, Json, print_json, say


def theory(
    claim: Annotated[list[str] | None, typer.Option(help="Only this claim; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for theory.json, theory.md and symmetry.png.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data set of the symmetry test; mnist where LEAKBENCH_DATA has it, else digits."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> int:
    """Measures claims of theory; exit 1 if a claim that should hold fails, or a wrong claim holds."""
    import torch

    from leakbench.benchmarks import data as datasets

    from ..run.harness import pick_device
    from ..theory import report
    from ..theory.claim import Setup
    from ..theory.claims import chosen, examined

    # Validated before the computation, which takes half a minute.
    claims = chosen(claim or [])
    if data is not None:
        datasets.check(data)
    check_folder(out)
    torch.set_num_threads(1)
    setup, measurements = Setup(seed=seed, device=pick_device(device), data=data), []
    for measurement in examined(claims, setup):
        measurements.append(measurement)
        if not as_json:
            print(report.words(measurement) + "\n", flush=True)
    for file in report.write(measurements, setup, out) if out is not None else ():
        say(f"written: {file}")
    if as_json:
        print_json(report.document(measurements, setup))
    else:
        print(report.summary(measurements))
    return OK if all(measurement.expected for measurement in measurements) else FAILED
