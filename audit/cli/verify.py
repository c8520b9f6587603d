"""`leakbench verify`: computes drawn cells of somebody else's submission again, and writes a stamp."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from .options import BAD_FILE, FAILED, OK, Json, print_json, say


def verify(
    folder: Annotated[Path, typer.Argument(help="A submission.")],
    verifier: Annotated[str, typer.Option(metavar="HANDLE", help="Who verifies, as a handle.")],
    cells: Annotated[int, typer.Option(min=1, help="Number of cells that are drawn and computed again.")] = 5,
    fresh: Annotated[int, typer.Option(min=0, help="Number of fresh seeds at which they are computed, too.")] = 2,
    salt: Annotated[str | None, typer.Option(help="Text on which the draw depends; drawn at random if absent.")] = None,
    run_their_code: Annotated[
        bool, typer.Option("--run-their-code", help="Agree to run the submission's method file on this machine.")
    ] = False,
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="Sign the stamp with this SSH key.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.")] = None,
    as_json: Json = False,
) -> int:
    """Computes drawn cells of a submission again, compares them, and writes VERIFIED.json beside it.

    Exit 1 if a number differs, 3 if the submission is set aside by leakbench submit --check.
    """
    import dataclasses

    from leakbench.leaderboard.submissions.check import check_submission
    from leakbench.leaderboard.submissions.declaration import is_handle
    from leakbench.leaderboard.submissions.signature import OF_STAMP
    from leakbench.leaderboard.submissions.signature import sign as sign_bytes
    from leakbench.leaderboard.submissions.stamp import NAME, SIGNATURE, write_stamp

    from ..run.harness import pick_device
    from ..run.progress import show
    from ..submission.verify import verify as compute
    from .submit import rules_of

    if not is_handle(verifier):
        raise ValueError(f"--verifier must be a handle in lower case, as in a submission's path, got {verifier!r}")
    place = folder.resolve()
    if folder.is_symlink() or not place.is_dir():
        raise ValueError(f"verify must be given the folder of a submission, got {folder}")
    checked = check_submission(place, place.parents[1], rules_of())
    if not checked.counts or checked.declaration is None:
        for fault in checked.faults:
            say(f"{fault.severity}: {fault}")
        say(f"{checked.path} is set aside, so nothing is computed")
        return BAD_FILE
    if verifier == checked.declaration.handle:
        raise ValueError(f"--verifier must be somebody else than the submitter, got {verifier!r}")
    method = checked.declaration.method
    if method is not None and not run_their_code:
        raise ValueError(
            f"verification runs {method.file}, a stranger's code, with your rights on this machine: read it, take a "
            "machine without secrets, and add --run-their-code"
        )
    with show(quiet=as_json) as report:
        stamp = compute(
            checked,
            verifier=verifier,
            cells=cells,
            fresh=fresh,
            salt=salt or secrets.token_hex(16),
            device=None if device == "auto" else pick_device(device),
            jobs=jobs,
            report=report,
        )
    path = write_stamp(stamp, place)
    if sign is not None:
        sign_bytes(path.read_bytes(), sign, place / SIGNATURE, OF_STAMP)
    if as_json:
        print_json({"stamp": str(folder / NAME), "holds": stamp.holds, "content": dataclasses.asdict(stamp)})
    else:
        for c in stamp.comparisons:
            numbers = f"{_short(c.reported)}, again {_short(c.again)}"
            interval = "" if c.low is None else f", difference in [{c.low:.4g}, {c.high:.4g}]"
            print(f"{c.verdict:>10}  {c.words}, {c.metric}, {c.seeds} seed: {numbers}{interval}")
        print(f"stamp: {folder / NAME}{'' if sign else ', not signed: boards ignore it'}")
    return OK if stamp.holds else FAILED


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
