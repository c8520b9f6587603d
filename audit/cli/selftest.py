"""`leakbench selftest`: tests against planted bugs, correct trainers, or a user's own trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..external.out_folder import check_folder
from .options import FAILED, OK, Json, print_json, say


def selftest(
    trainer: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Only this trainer, of a file of one's own.")
    ] = None,
    bug: Annotated[list[str] | None, typer.Option(help="Only this planted bug; may be repeated.")] = None,
    defense: Annotated[
        list[str] | None, typer.Option(help="Only our loop under this defense; may be repeated.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions, for power and false alarms.")] = 1,
    level: Annotated[
        float, typer.Option(help="Probability of accusing a correct trainer, over the whole battery.")
    ] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of canaries and public randomness; secrets are drawn anew.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for selftest.json and selftest.md.")] = None,
    as_json: Json = False,
) -> int:
    """Tests whether releases satisfy the claim; exit 1 for a violation, a missed bug or a false alarm."""
    import torch

    from ..selftest import certificate

    if trainer is not None and (bug or defense):
        raise ValueError("--trainer is examined by itself, got --bug or --defense beside it")
    if not 0 < level < 1:
        raise ValueError(f"--level must be in (0, 1), got {level}")
    check_folder(out)
    if trainer is not None:
        candidates = [certificate.foreign(trainer)]
    elif bug or defense:
        candidates = [*(certificate.planted(bug) if bug else ()), *(certificate.correct(defense) if defense else ())]
    else:
        candidates = [*certificate.planted(), *certificate.correct()]
    torch.set_num_threads(1)
    examinations = []
    for candidate in candidates:
        # A user's trainer may take seconds per run, for thousands of runs.
        progress = say if trainer is not None else None
        examination = certificate.examine(candidate, repeat=repeat, seed=seed, level=level, progress=progress)
        examinations.append(examination)
        if not as_json:
            print(
                certificate.verdict_on(examination) if trainer is not None else certificate.line(examination),
                flush=True,
            )
    if out is not None:
        for file in certificate.write(examinations, out, seed=seed, level=level):
            say(f"written: {file}")
    if as_json:
        print_json(certificate.document(examinations, seed=seed, level=level))
    elif trainer is None:
        print(certificate.summary(examinations))
    return OK if all(examination.as_it_should for examination in examinations) else FAILED
