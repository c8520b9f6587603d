"""Model cards of the Hugging Face Hub: the metadata `model-index` of a `README.md` for each row.

Interval, epsilon and seeds of a number are its `args`. A metric without a value is in the text of the card, with its
reason, because the format demands a number.
"""

from typing import Any

from ..board.identity import board_version
from ..board.table import Board
from ..board.text_formats import md
from .facts import facts, unmeasured
from .publication import Publication
from .tidy import by_row, tables
from .yaml_text import yaml_text


def model_index(board: Board, publication: Publication) -> dict[str, bytes]:
    """Returns a card for each row with a number, in a folder named by the row's id.

    Args:
        board: of any records.
        publication: its license is in the cards.
    """
    shapes = {row.task.data: row.task.input_shape for row in board.rows}
    files = {}
    for lines in tables(board).values():
        for row in by_row(lines):
            if metrics := [_metric(line) for line in row if line["value"] is not None]:
                task = "image-classification" if len(shapes.get(row[0]["data"]) or ()) == 3 else "other"
                files[f"{row[0]['row_id']}/README.md"] = _card(row, task, metrics, publication)
    return files


def _metric(line: Any) -> dict[str, Any]:
    return {"type": line["metric"], "value": line["value"], "name": line["metric"], "args": facts(line)}


def _card(row: Any, task: str, metrics: list[dict[str, Any]], publication: Publication) -> bytes:
    first = row[0]
    result = {
        "task": {"type": task, "name": f"{first['suite']}, unit: {first['unit']}"},
        "dataset": {"name": first["data"], "type": first["data"]},
        "metrics": metrics,
    }
    name = f"{first['defense']} {first['row_id']}"
    metadata = {"tags": ["leakbench", "differential-privacy"], "model-index": [{"name": name, "results": [result]}]}
    if publication.license:
        metadata = {"license": publication.license.lower(), **metadata}
    text = [f"Row {first['row_id']} of a board of {board_version()}.", ""]
    text += [f"- {md(metric)} is n/a: {md(reason)}" for metric, reason in unmeasured(row).items()]
    return b"---\n" + yaml_text(metadata) + b"---\n\n" + ("\n".join(text) + "\n").encode()
