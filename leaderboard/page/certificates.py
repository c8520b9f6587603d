"""The self-test of the tool, where its document lies beside a run's records: what it caught, and whom it accused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records.files import read_bytes
from ..records.record import RecordError

FILE = "selftest.json"
"""What `leakbench selftest --out RESULTS` leaves."""


@dataclass(frozen=True, kw_only=True)
class CertificateLine:
    """What a self-test found of one trainer.

    Attributes:
        name: of the trainer.
        about: what is wrong with it, or what it is.
        accused: in words: how often, of how many repetitions.
        interval: of that share, 95 %.
        by: names of the tests.
        good: whether it is as it should be.
    """

    name: str
    about: str
    accused: str
    interval: str
    by: str
    good: bool


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A self-test.

    Attributes:
        level: of a battery: the probability of accusing a correct trainer.
        bugs: planted ones.
        others: correct trainers.
    """

    level: str
    bugs: tuple[CertificateLine, ...]
    others: tuple[CertificateLine, ...]

    @property
    def words(self) -> str:
        """How many were caught, and how many were accused."""
        caught = sum(one.good for one in self.bugs)
        accused = sum(not one.good for one in self.others)
        return (
            f"{caught} of {len(self.bugs)} planted bugs were caught; {accused} of {len(self.others)} correct trainers "
            "were accused"
        )


def certificate(results: Path) -> Certificate | None:
    """The self-test beside a run's records.

    Args:
        results: the run's output.

    Returns:
        None where there is none.

    Raises:
        RecordError: the file is not what such a file must be.
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
    # Key by key: who writes this file is `audit`, whose types a leaf does not import.
    trainers = data.get("trainers") if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(trainers, list):
        raise RecordError(f"bad self-test {path}: it must have schema 1 and trainers; delete it and run it again")
    try:
        lines = [(one["planted"] is True, _line(one)) for one in trainers]
        level = f"{float(data['level']):g}"
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"bad self-test {path}: {error!r}; delete it and run it again") from None
    return Certificate(
        level=level,
        bugs=tuple(line for planted, line in lines if planted),
        others=tuple(line for planted, line in lines if not planted),
    )


def _line(one: Any) -> CertificateLine:
    accused, repetitions = int(one["accused"]), int(one["repetitions"])
    return CertificateLine(
        name=str(one["name"]),
        about=str(one["about"]),
        accused=f"{accused} of {repetitions}",
        interval=f"[{float(one['low']):.2f}, {float(one['high']):.2f}]",
        by=", ".join(str(name) for name in one["by"]),
        good=2 * accused > repetitions if one["planted"] is True else accused == 0,
    )
