"""`leakbench zoo`: lists trained checkpoints, and trains those of a suite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import OK, Json, print_json, say

app = typer.Typer(help="Trained checkpoints by name, for attacks that train nothing.", no_args_is_help=True)


@app.command("ls")
def ls(as_json: Json = False) -> int:
    """Lists the checkpoints: name, claimed epsilon, accuracy; those not on this machine are downloaded."""
    from ..zoo.download import located
    from ..zoo.index import find, names
    from ..zoo.manifest import read_manifest

    rows = []
    for name in names():
        entry = find(name)
        record = read_manifest(located(entry), entry).stored_record()
        epsilon = None if record.claim is None else record.claim.epsilon
        rows.append({"name": name, "epsilon": epsilon, "accuracy": record.metrics["accuracy"].value})
    if as_json:
        print_json(rows)
        return OK
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        epsilon = "inf" if row["epsilon"] is None else f"{row['epsilon']:.3g}"
        print(f"{row['name']:<{width}}  epsilon {epsilon:<5}  accuracy {row['accuracy']:.3f}")
    return OK


@app.command("build")
def build(
    suite: Annotated[str, typer.Argument(help="Name of a suite with zoo, or path of a suite file.")],
    out: Annotated[Path, typer.Option(help="Folder of the zoo, which gets an index.json and the checkpoints.")],
    shadows: Annotated[int, typer.Option(min=0, help="Shadow models of each; an even number, or 0.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
) -> int:
    """Trains the checkpoints of a suite, and writes them."""
    from ..run import harness
    from ..run.checkpoints import build as write_checkpoints
    from ..suite.suite import load

    names = write_checkpoints(load(suite), out, device=harness.pick_device(device), shadows=shadows, say=say)
    print(f"{len(names)} checkpoints in {out}; LEAKBENCH_ZOO={out} offers them by name")
    return OK
