"""Evaluation results of the Hugging Face Hub: `.eval_results/*.yaml` of models, and `eval.yaml` of the benchmark.

A row of the board is a model. Its folder, named by the row's id, holds the file for the model's repository;
`benchmark/eval.yaml` is for the root of the data set's. A task is a metric within a suite, data set, model and unit. A
metric without a value has no entry, since the format demands a number: it is in a comment, with its reason.
"""

import json
from typing import Any

from ..board.identity import board_version
from ..board.table import Board
from .facts import facts, unmeasured
from .publication import Publication
from .safe_text import slug
from .tidy import by_row, tables
from .yaml_text import yaml_text


def eval_results(board: Board, publication: Publication) -> dict[str, bytes]:
    """Returns a file for each row with a number, and the benchmark's.

    Args:
        board: of any records.
        publication: names the benchmark's data set.

    Raises:
        ValueError: the data set was not named.
    """
    dataset = publication.needed_dataset("eval_results")
    files, tasks = {}, {}
    for lines in tables(board).values():
        for row in by_row(lines):
            measured = [line for line in row if line["value"] is not None]
            entries = [_entry(line, dataset) for line in measured]
            tasks |= {entry["dataset"]["task_id"]: None for entry in entries}
            comments = [board_version(), *(f"{name} is n/a: {reason}" for name, reason in unmeasured(row).items())]
            if entries:
                name = f"{row[0]['row_id']}/.eval_results/leakbench.yaml"
                files[name] = yaml_text(entries, comments=comments)
    benchmark = {
        "name": dataset,
        "description": "Accuracy, claimed epsilon and measured leakage of private trainings under attacks.",
        "evaluation_framework": "leakbench",
        "tasks": [{"id": task, "config": "default", "split": "test"} for task in tasks],
    }
    return files | {"benchmark/eval.yaml": yaml_text(benchmark, comments=[board_version()])}


def _entry(line: Any, dataset: str) -> dict[str, Any]:
    place = "/".join(line[name] for name in ("suite", "data", "model", "unit", "metric"))
    return {
        "dataset": {"id": dataset, "task_id": slug(place.replace("/", "."))},
        "value": line["value"],
        "notes": json.dumps(facts(line), ensure_ascii=False),
    }
