"""Self-test of the tool, read from a run's output: planted bugs detected, and correct trainers accused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records.files import read_bytes
from ..records.record import RecordError

FILE = "selftest.json"
"""File that `leakbench selftest --out RESULTS` writes."""


@dataclass(frozen=True, kw_only=True)
class CertificateLine:
    """Result of a self-test on a trainer.

    Attributes:
        name: of the trainer.
        about: planted bug, or description of the trainer.
        accused: number of accusations and of repetitions, in words.
        interval: of the share of accusations, 95 %.
        by: tests that accused it.
        good: whether the result is right: a planted bug is accused in more than half of the repetitions, a correct
            trainer in none.
    """

    name: str
    about: str
    accused: str
    interval: str
    by: str
    good: bool


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Results of a self-test.

    Attributes:
        level: significance level of the battery: largest probability of accusing a correct trainer.
        bugs: trainers with planted bugs.
        others: correct trainers.
    """

    level: str
    bugs: tuple[CertificateLine, ...]
    others: tuple[CertificateLine, ...]

    @property
    def words(self) -> str:
        """Numbers of bugs caught and of correct trainers accused."""
        caught = sum(line.good for line in self.bugs)
        accused = sum(not line.good for line in self.others)
        return (
            f"{caught} of {len(self.bugs)} planted bugs were caught; {accused} of {len(self.others)} correct trainers "
            "were accused"
        )


def certificate(results: Path) -> Certificate | None:
    """Reads the self-test beside a run's records.

    Args:
        results: output of the run.

    Returns:
        The self-test; None if there is none.

    Raises:
        RecordError: the file does not have its format.
    """
    path = results / FILE
    if not path.exists():
        return None
    try:
        data = json.loads(read_bytes(path, "self-test"))
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"cannot read self-test {path}: {error}") from None
    # Checked key by key: `audit` writes this file, and a leaf package does not import its types.
    trainers = data.get("trainers") if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(trainers, list):
        raise RecordError(f"bad self-test {path}: it must have schema 1 and trainers; delete it and run it again")
    try:
        lines = [(trainer["planted"] is True, _line(trainer)) for trainer in trainers]
        level = f"{float(data['level']):g}"
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"bad self-test {path}: {error!r}; delete it and run it again") from None
    return Certificate(
        level=level,
        bugs=tuple(line for planted, line in lines if planted),
        others=tuple(line for planted, line in lines if not planted),
    )


def _line(trainer: Any) -> CertificateLine:
    accused, repetitions = int(trainer["accused"]), int(trainer["repetitions"])
    return CertificateLine(
        name=str(trainer["name"]),
        about=str(trainer["about"]),
        accused=f"{accused} of {repetitions}",
        interval=f"[{float(trainer['low']):.2f}, {float(trainer['high']):.2f}]",
        by=", ".join(str(name) for name in trainer["by"]),
        good=2 * accused > repetitions if trainer["planted"] is True else accused == 0,
    )
