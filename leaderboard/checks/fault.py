"""Fault of a file of records or of a submission. Standard library only."""

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["refused", "flagged"]
"""Consequence: `refused` keeps the file off a board; `flagged` shows it there, with the problem."""


@dataclass(frozen=True, kw_only=True, order=True)
class Fault:
    """Problem of a field of a file, by which a submitter can find and mend it.

    Attributes:
        file: path below the checked folder, with `/`; never an absolute path.
        field: path of the field in the file, such as `metrics.auc.value`; empty for the file as a whole.
        problem: sentence with the rule and the value, without the file and the field.
        severity: its consequence.
    """

    file: str
    field: str
    problem: str
    severity: Severity = "refused"

    def __str__(self) -> str:
        place = f"{self.file}, {self.field}" if self.field else self.file
        return f"{place}: {self.problem}"

    def to_dict(self) -> dict[str, str]:
        """Returns the fields as strings, for JSON."""
        return asdict(self)
