"""`leakbench audit`: a command for each kind of thing that is audited."""

from __future__ import annotations

import typer

from .group import OLD, AuditGroup
from .model import model
from .old_spelling import old_spelling
from .scores import scores
from .transcript import transcript
from .update import update

app = typer.Typer(cls=AuditGroup, help="Audits of models trained elsewhere, and of what their trainings shared.")
app.command("model")(model)
app.command("update")(update)
app.command("scores")(scores)
app.command("transcript")(transcript)
app.command(OLD, hidden=True)(old_spelling)

__all__ = ["app"]
