"""Choice of the subcommand of `leakbench audit` by the first argument, and errors that name an option's subcommand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from ...catalog.messages import near_miss, no_such

OLD = "(old spelling)"
"""Name of the hidden command for arguments that begin with none of the others."""


class AuditGroup(TyperGroup):
    """Commands of `leakbench audit`.

    (Any: typer's own classes are of another package in some versions.)
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the hidden command before arguments in the old spelling."""
        first = args[0] if args else ""
        names = [name for name in self.commands if name != OLD]
        word = first.isidentifier() and first not in names and not Path(first).exists()
        if word and near_miss(first, names):
            raise ValueError(no_such("audit", first, names))
        return super().parse_args(ctx, args if first in (*names, "--help") else [OLD, *args])

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; an option of another command is refused with that command's name."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Only typer's error for an unknown option has these two; its class has moved between versions.
            if not (hasattr(error, "possibilities") and hasattr(error, "option_name")):
                raise
            option: str = error.option_name  # pyright: ignore[reportAttributeAccessIssue] -- looked for above
            owners = [name for name, command in self.commands.items() if name != OLD and _has(command, option)]
            if ctx.invoked_subcommand == OLD or not owners:
                raise
            others = " and ".join(filter(None, [", ".join(owners[:-1]), owners[-1]]))
            raise ValueError(
                f"leakbench audit {ctx.invoked_subcommand} has no {option}, which is of leakbench audit {others}"
            ) from None


def _has(command: Any, option: str) -> bool:
    """Returns whether a command has an option, or is itself an option in the old spelling."""
    declared = (name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))
    return option == f"--{command.name}" or option in declared
