"""Tables of membership scores, losses or logits of a user's model, with member flags: an audit without the model.

CSV or Parquet, detected by content. A row per example: `member` (0 or 1), and either `score` (larger: a member), `loss`
(nats; smaller: a member), or logits `logit_0`, `logit_1`, ... with `label`. `id` is optional.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from leakbench.attacks.core import MembershipScores
from leakbench.leaderboard.records.arrays import read_table
from leakbench.leaderboard.records.files import digest_of_bytes, refuse_special

from ...scoring.score import score
from ...scoring.truth import GroundTruth
from ..examples.identity import ids_of
from ..model.attacks import AttackOutcome

COLUMNS = ("score", "loss", "loss_of_logits")
"""Names of the scores of a table, used like names of attacks."""

FORMS = "score, or loss, or label with logit_0, logit_1, ..."


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """Content of a file of scores.

    Attributes:
        outcomes: per column of scores, as if an attack had run.
        ids: int64 [n], hashes of the owner's ids, or of the rows' content.
        names: the file's own ids of the rows; row numbers if it has none.
        member: bool [n].
        labels: int64 [n]; None if the file has no labels.
        sha256: of the file.
    """

    outcomes: tuple[AttackOutcome, ...]
    ids: Int[Tensor, " n"]
    names: tuple[str, ...]
    member: Bool[Tensor, " n"]
    labels: Int[Tensor, " n"] | None
    sha256: str


def read_scores(path: Path, *, delta: float) -> ScoreTable:
    """Reads a table of scores and measures how well they reveal membership.

    Args:
        path: of the file.
        delta: of the claim.

    Raises:
        ValueError: no table, a missing column, a value that is not a number, or a single group.
    """
    try:
        refuse_special(path)
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"scores must be a file that can be read, and {path} cannot: {error.strerror}") from None
    table = _table(path, content)
    if "member" not in table.columns:
        raise ValueError(f"{path.name} must have a column member, 0 or 1; it has {', '.join(map(str, table.columns))}")
    if not len(table):
        raise ValueError(f"{path.name} must have a row an example, got none")
    flags = (
        table["member"]
        .astype(str)
        .str.strip()
        .str.lower()
        .map({"0": 0, "1": 1, "false": 0, "true": 1, "0.0": 0, "1.0": 1})
    )
    if flags.isna().any():
        row = int(np.flatnonzero(flags.isna())[0])
        raise ValueError(f"member of {path.name} must be 0 or 1, got {table['member'].iloc[row]!r} in row {row + 1}")
    owned = "id" in table.columns
    if owned and table["id"].isna().any():
        row = int(np.flatnonzero(table["id"].isna())[0])
        raise ValueError(f"every row of {path.name} must have an id, and row {row + 1} has none")
    names: Any = table["id"].astype(str) if owned else pd.Series(np.arange(len(table)).astype(str))
    if names.duplicated().any():
        raise ValueError(f"ids of {path.name} must be distinct, and {names[names.duplicated()].iloc[0]!r} occurs twice")
    member = torch.from_numpy(flags.to_numpy(dtype=bool).copy())
    for kind, words in ((True, "1"), (False, "0")):
        if not bool((member == kind).any()):
            raise ValueError(f"{path.name} must have rows with member {words}, got none among {len(table)}")
    labels = _labels(table, path) if "label" in table.columns else None
    columns = _scores_of(table, labels, path)
    ids = ids_of(text.encode() for text in (names if owned else _contents(table)))
    truth = GroundTruth(members=ids[member], candidates=ids)
    outcomes = []
    for name, values in columns.items():
        scores = MembershipScores(ids=ids, scores=torch.from_numpy(values), exact=False)
        outcomes.append(AttackOutcome(name=name, scores=scores, metrics=score(scores, truth, delta=delta)))
    return ScoreTable(
        outcomes=tuple(outcomes),
        ids=ids,
        names=tuple(names),
        member=member,
        labels=labels,
        sha256=digest_of_bytes(content),
    )


def _contents(table: Any) -> Any:
    """Returns the content of rows without ids, except membership: positions may depend on the split."""
    # pandas 3 keeps empty cells as NaN among strings, which cannot be joined.
    return table.drop(columns="member").astype(str).fillna("nan").agg(" ".join, axis=1)


class MisreadTable(ValueError):
    """Table that pandas would read, with columns other than those meant."""


def read_csv(content: bytes, path: Path) -> Any:
    """Reads a CSV file of scores, keeping ids and member flags as text.

    Args:
        content: of the file.
        path: of the file, for the error.

    Raises:
        MisreadTable: two columns have the same name, and pandas would rename the second; or rows have more fields than
            the header, and pandas would take the first ones for row names and shift all columns.
        ValueError: from pandas, if the file is not a table.
    """
    header = pd.read_csv(io.BytesIO(content), header=None, nrows=1, dtype=str, encoding="utf-8").iloc[0]
    doubled = header[header.duplicated()]
    if len(doubled.dropna()):
        raise MisreadTable(f"{path.name} must have columns of different names, and {doubled.iloc[0]!r} occurs twice")
    table = pd.read_csv(io.BytesIO(content), dtype={"id": str, "member": str}, encoding="utf-8")
    if not isinstance(table.index, pd.RangeIndex):
        raise MisreadTable(
            f"rows of {path.name} must have as many fields as its header, {len(header)}, and the first has "
            f"{len(header) + table.index.nlevels}; remove the comma at the end of rows, or name the first column"
        )
    return table


def _table(path: Path, content: bytes) -> Any:
    try:
        # Parquet files begin and end with these four bytes, whatever the file name.
        if content[:4] == b"PAR1":
            return read_table(content).to_pandas()
        return read_csv(content, path)
    except MisreadTable:
        raise
    except (ValueError, TypeError, MemoryError) as error:  # pandas' errors of a CSV file are ValueErrors
        reason = " ".join(str(error).split())
        raise ValueError(f"{path.name} must be a CSV file with a header, or Parquet, got: {reason}") from None


def _numbers(table: Any, column: str, path: Path) -> np.ndarray:
    series: Any = pd.to_numeric(table[column], errors="coerce")
    values: np.ndarray = series.to_numpy(dtype=float, copy=True)
    if (bad := ~np.isfinite(values)).any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"{column} of {path.name} must hold finite numbers, got {str(table[column].iloc[row])!r} in row {row + 1}"
        )
    return values


def _labels(table: Any, path: Path) -> Tensor:
    values = _numbers(table, "label", path)
    for bad, words in ((values != np.floor(values), ""), (abs(values) >= 2**63, " below 2**63")):
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"label of {path.name} must hold whole numbers{words}, got {values[row]:g} in row {row + 1}"
            )
    return torch.from_numpy(values.astype(np.int64))


def _scores_of(table: Any, labels: Tensor | None, path: Path) -> dict[str, np.ndarray]:
    """Returns columns of scores by name, larger for members."""
    columns = {name: _numbers(table, name, path) for name in ("score",) if name in table.columns}
    if "loss" in table.columns:
        columns["loss"] = -_numbers(table, "loss", path)
    logits = [name for name in table.columns if str(name).startswith("logit_")]
    if logits:
        if len(logits) == 1:
            raise ValueError(
                f"logits of {path.name} must be of two classes at least, got {logits[0]} alone; for a classifier with "
                "one output z give 0 as logit_0 and z as logit_1, or loss"
            )
        expected = [f"logit_{number}" for number in range(len(logits))]
        if sorted(logits) != sorted(expected) or labels is None:
            raise ValueError(f"logits of {path.name} must be {expected[0]} to {expected[-1]}, with a column label")
        values = torch.from_numpy(np.stack([_numbers(table, name, path) for name in expected], axis=1))
        if int(labels.min()) < 0 or int(labels.max()) >= len(expected):
            raise ValueError(f"label of {path.name} must be in [0, {len(expected)}), got {int(labels.max())}")
        columns["loss_of_logits"] = -nn.functional.cross_entropy(values, labels, reduction="none").numpy()
    for name, values in columns.items():
        if len(values) > 1 and bool((values == values[0]).all()):
            column = "logits" if name == "loss_of_logits" else name
            raise ValueError(
                f"{column} of {path.name} must differ between rows, and all tell the same: they hold nothing"
            )
    if not columns:
        raise ValueError(f"{path.name} must have a column {FORMS}; it has {', '.join(map(str, table.columns))}")
    return columns
