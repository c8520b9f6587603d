"""`leakbench cache`: artifacts that a folder of results keeps for later runs, such as shadow models' answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import OK, Json, print_json, say

app = typer.Typer(help="Shadow models' answers and tuning points that a folder of results keeps.", no_args_is_help=True)

Results = Annotated[Path, typer.Argument(help="Folder of results, as --out of leakbench run named it.")]


@app.command("ls")
def ls(results: Results, as_json: Json = False) -> int:
    """Lists the artifacts: name, size, whether a run would use it, and its content."""
    from ..run.cache import stored

    artifacts = stored(results)
    if as_json:
        print_json([_plain(artifact) for artifact in artifacts])
        return OK
    for artifact in artifacts:
        print(f"{artifact.name[:12]}  {_size(artifact.size):>9}  {artifact.state:<15}  {artifact.words or 'unnamed'}")
    print(f"{len(artifacts)} artifacts, {_size(sum(artifact.size for artifact in artifacts))}")
    return OK


@app.command("explain")
def explain(
    results: Results, name: Annotated[str, typer.Argument(help="First letters of a name.")], as_json: Json = False
) -> int:
    """Explains an artifact: the request that made it, and why a run would not use it."""
    from ..run.cache import one_of

    artifact = one_of(results, name)
    if as_json:
        print_json(_plain(artifact) | {"request": artifact.request})
        return OK
    print(f"{artifact.name}: {artifact.words or 'unnamed'}\n{artifact.path}, {_size(artifact.size)}, {artifact.state}")
    for line in (*artifact.differs, *([artifact.error] if artifact.error else [])):
        print(f"  {line}")
    for key, value in sorted((artifact.request or {}).items()):
        print(f"{key}: {value}")
    return OK


@app.command("gc")
def gc(
    results: Results,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also what a run would take; records stay as they are.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> int:
    """Removes artifacts that no run would use: of another code, failed, edited or torn."""
    from ..run.cache import removable, stored
    from ..run.lock import locked

    stored(results)  # raises if it is not a folder; the lock would create it
    # Under the lock of runs: a run in progress may need the artifacts.
    with locked(results):
        going = removable(results, everything=everything)
        if not dry_run:
            for artifact in going:
                artifact.path.unlink(missing_ok=True)
    if as_json:
        print_json(
            {
                "removed": [] if dry_run else [artifact.name for artifact in going],
                "found": [_plain(artifact) for artifact in going],
            }
        )
        return OK
    for artifact in going:
        print(f"{artifact.name[:12]}  {_size(artifact.size):>9}  {artifact.state:<15}  {artifact.words or 'unnamed'}")
    say(f"{'would remove' if dry_run else 'removed'} {len(going)}, {_size(sum(artifact.size for artifact in going))}")
    return OK


def _plain(artifact: Any) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "path": str(artifact.path),
        "bytes": artifact.size,
        "state": artifact.state,
        "what": artifact.words or None,
        "error": artifact.error or None,
        "differs": list(artifact.differs),
    }


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"
