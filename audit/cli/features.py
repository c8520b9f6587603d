"""`leakbench features`: writes a public encoder's features of a data set to a file that suites read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import OK, Json, print_json, say


def features(
    data: Annotated[str, typer.Argument(help="A data set as in a suite, all of whose examples are encoded.")],
    encoder: Annotated[str, typer.Option(help="torchvision:NAME, or FILE.py:FUNCTION with --weights.")],
    out: Annotated[Path, typer.Option(help="File to write, .npz; suites name it as features:FILE.")],
    weights: Annotated[
        Path | None, typer.Option(help="Safetensors; without, torchvision's published weights, downloaded.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, max=1024, help="Side to resize images to, in pixels.")] = None,
    public: Annotated[
        str | None, typer.Option(help="Another data set, by whose features these are to be standardised.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> int:
    """Encodes a data set once, so that private training fits only a head on public features."""
    from ..encode import write_features
    from ..run.harness import pick_device

    origin = write_features(
        data,
        out,
        name=encoder,
        weights=weights,
        side=size,
        public=public,
        batch=batch,
        device=pick_device(device),
    )
    if as_json:
        print_json({"out": str(out), **origin})
    else:
        say(f'written: {out}, {origin["dim"]} features an example; task.data = "features:{out}"')
    return OK
