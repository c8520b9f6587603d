"""`leakbench submit`: drafts a submission, signs it, and checks one or all of them as a pull request is checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import BAD_FILE, OK, Json, print_json, say

if TYPE_CHECKING:
    from leakbench.leaderboard.submissions.check import CheckedSubmission, Rules

PUBLISHED = Path("leaderboard/published")
"""Folder of the committed board, if the command runs in a checkout."""


def submit(
    folder: Annotated[Path, typer.Argument(help="A submission, or the folder of all submissions.")],
    new: Annotated[bool, typer.Option("--new", help="Draft a submission below this folder.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check offline what a pull request has to pass.")] = False,
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="Sign the submission with this SSH key.")] = None,
    handle: Annotated[
        str | None, typer.Option(help="With --new: your name as a folder, such as your account's.")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="With --new: name of a suite.")] = None,
    small: Annotated[bool, typer.Option("--small", help="With --new: the suite's small form.")] = False,
    defense: Annotated[str | None, typer.Option(help="With --new: FILE.py:NAME, or a TOML table.")] = None,
    attack: Annotated[str | None, typer.Option(help="With --new: FILE.py:NAME, or a TOML table.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="With --new: file of a trained model.")] = None,
    licence: Annotated[str, typer.Option(help="With --new: SPDX identifier.")] = "Apache-2.0",
    board: Annotated[Path | None, typer.Option(help="With --check: published records to compare with.")] = None,
    verifiers: Annotated[Path | None, typer.Option(help="With --check: trusted verifiers' keys.")] = None,
    as_json: Json = False,
) -> int:
    """Drafts (--new), signs (--sign) or checks (--check) submissions to the leaderboard; runs none of their code.

    Exit 3 if a check refuses a submission.
    """
    if new:
        return _new(folder, handle, suite, small, defense, attack, checkpoint, licence, as_json)
    if sign is not None:
        _sign(folder, sign)
    if check:
        return _check(folder, board, verifiers, as_json)
    if sign is None:
        raise ValueError("leakbench submit must be given --new, --check or --sign KEY")
    return OK


def _new(
    root: Path,
    handle: str | None,
    suite: str | None,
    small: bool,
    defense: str | None,
    attack: str | None,
    checkpoint: Path | None,
    licence: str,
    as_json: bool,
) -> int:
    from leakbench.leaderboard.submissions.identity import REPORTED

    from ..submission.draft import new_submission

    if handle is None or suite is None:
        raise ValueError("--new must come with --handle and --suite")
    draft = new_submission(
        root,
        handle=handle,
        suite=suite,
        small=small,
        defense=defense,
        attack=attack,
        checkpoint=checkpoint,
        licence=licence,
    )
    if as_json:
        content = {"folder": str(draft.folder), "seeds": list(draft.seeds), "command": draft.command}
        print_json(content | {"trial": draft.trial})
    else:
        print(f"draft: {draft.folder}/SUBMISSION.toml, with fields to fill in")
        origin = (
            "follow from the request"
            if all(seed in REPORTED for seed in draft.seeds)
            else "are the only ones of its zoo"
        )
        print(f"seeds, which {origin}: {', '.join(map(str, draft.seeds))}")
        if draft.trial:
            print(f"try:     {draft.trial}")
        print(f"compute: {draft.command}")
        print(f"check:   leakbench submit {draft.folder} --check")
    return OK


def _sign(folder: Path, key: Path) -> None:
    from leakbench.leaderboard.submissions.declaration import read_declaration
    from leakbench.leaderboard.submissions.identity import request_digest
    from leakbench.leaderboard.submissions.signature import SIGNATURE, statement
    from leakbench.leaderboard.submissions.signature import sign as sign_bytes

    digest = request_digest(read_declaration(folder))
    say(f"signed: {sign_bytes(statement(folder, digest), key, folder / SIGNATURE)}")


def _check(folder: Path, board: Path | None, verifiers: Path | None, as_json: bool) -> int:
    from leakbench.leaderboard.submissions.check import check_submission, check_tree
    from leakbench.leaderboard.submissions.declaration import NAME
    from leakbench.leaderboard.submissions.rows import rows_beside

    if not folder.is_dir() or folder.is_symlink():
        raise ValueError(f"submit must be given a folder, got {folder}")
    if board is not None and not board.is_dir():
        raise ValueError(f"--board must be a folder of published records, got {board}")
    rules = rules_of(verifiers)
    place = folder.resolve()
    if (folder / NAME).exists() or (folder / "records").exists():
        checked, others = [check_submission(place, place.parents[1], rules)], []
    elif any((inner / NAME).is_file() for inner in place.iterdir() if inner.is_dir()):
        raise ValueError(
            f"submit --check must be given a submission or the folder of all of them, got {folder}, the folder of a "
            f"handle; take the folder above, or one of {place.name}/DIGEST"
        )
    else:
        checked, others = check_tree(place, rules)
    published = board or (PUBLISHED if PUBLISHED.is_dir() else None)
    rows = rows_beside([submission for submission in checked if submission.counts], published)
    refused = [fault for fault in others if fault.severity == "refused"]
    if as_json:
        print_json(
            {
                "submissions": [_document(submission) for submission in checked],
                "others": [fault.to_dict() for fault in others],
                "board": rows.board,
                "drift": rows.drift,
                "attacks": {path: [cell.to_dict() for cell in cells] for path, cells in rows.attacks.items()},
            }
        )
    else:
        _print(checked, [str(fault) for fault in others])
        print(rows.text)
    return BAD_FILE if refused or not all(submission.counts for submission in checked) else OK


def rules_of(verifiers: Path | None = None) -> Rules:
    """Returns the rules of a check, which run no code of a submission."""
    from leakbench.leaderboard.submissions.check import Rules

    from ..run.claims import multiplier_fault
    from ..run.verify import contradiction
    from ..submission.suites import facts, single_file

    return Rules(
        facts=facts, recompute=contradiction, beside=multiplier_fault, single_file=single_file, verifiers=verifiers
    )


def _document(submission: CheckedSubmission) -> dict[str, Any]:
    return {
        "path": submission.path,
        "counts": submission.counts,
        "digest": submission.digest,
        "tier": submission.tier and vars(submission.tier),
        "faults": [fault.to_dict() for fault in submission.faults],
    }


def _print(checked: list[CheckedSubmission], others: list[str]) -> None:
    for submission in checked:
        verdict = "counts" if submission.counts else "is set aside"
        tier = f": {submission.tier.tier}; {submission.tier.reason}" if submission.tier and submission.counts else ""
        print(f"{submission.path} {verdict}{tier}")
        for fault in submission.faults:
            print(f"  {fault.severity}: {fault}")
    for text in others:
        print(f"  {text}")
