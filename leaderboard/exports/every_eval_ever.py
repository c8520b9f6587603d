"""Every Eval Ever, schema 0.3.0: a JSON file for each row, at the path of its datastore.

The model of a file is the training of a row. A metric without a value has no result, since the schema demands a number:
it is among the details of the source, with its reason. The schema has no place for the claim: epsilon, infinite or not,
is a detail of the model.
"""

import json
import math
import uuid
from typing import Any

import leakbench

from ..board.identity import board_version
from ..board.proved_bound import NAME
from ..board.table import Board
from ..kinds import KINDS
from ..metrics import METRICS, KnownMetric, columns
from ..records.files import digest_of_bytes
from .facts import facts, unmeasured
from .publication import Publication
from .safe_text import slug
from .tidy import by_row, tables

SCHEMA = "0.3.0"


def every_eval_ever(board: Board, publication: Publication) -> dict[str, bytes]:
    """Returns a file for each row with a number, at `data/COLLECTION/ORG/MODEL/UUID.json`.

    Args:
        board: of any records.
        publication: names the publisher.

    Raises:
        ValueError: the data set was not named.
    """
    publication.needed_dataset("every_eval_ever")
    organization = publication.organization or ""
    metrics = {column.field or column.key: metric for metric, column in columns()} | {NAME: METRICS[NAME]}
    files = {}
    for unit, lines in tables(board).items():
        for row in by_row(lines):
            results = [_result(line, metrics[line["metric"]]) for line in row if line["value"] is not None]
            if results:
                model = f"{organization}/{slug(row[0]['defense'])}-{row[0]['row_id']}"
                collection = slug(f"leakbench_{row[0]['suite']}" + ("_client" if unit == "client" else ""))
                path = f"data/{collection}/{model}/{_uuid(row[0]['row_id'])}.json"
                document = _document(row, results, collection, model, publication)
                files[path] = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
    return files


def _document(row: Any, results: list[Any], collection: str, model: str, publication: Publication) -> dict[str, Any]:
    first, time = row[0], str(int(publication.at.timestamp()))
    claim = {name: first[name] for name in _OF_MODEL if first[name] not in (None, "")}
    return {
        "schema_version": SCHEMA,
        "evaluation_id": f"{collection}/{model}/{time}",
        "retrieved_timestamp": time,
        "source_metadata": {
            "source_name": f"leakbench board of {first['suite']}",
            "source_type": "documentation",
            "source_organization_name": publication.organization,
            "evaluator_relationship": "first_party",
            "additional_details": _strings(
                {"board_version": board_version(), "dataset": publication.dataset, "controls": first["controls"]}
                | {"not_measured": json.dumps(unmeasured(row))}
            ),
        },
        "eval_library": {"name": "leakbench", "version": leakbench.__version__},
        "model_info": {
            "name": first["defense"],
            "id": model,
            "additional_details": {"deployment_type": "self_deployed", "model_availability": "unknown"}
            | _strings(claim),
        },
        "evaluation_results": results,
    }


_OF_MODEL = (
    *("row_id", "settings", "budget", "task", "control", "unit", "epsilon", "epsilon_reason", "delta", "relation"),
    *("sampling", "accountant", "epsilon_assumes", "epsilon_unverified", "noise_multiplier", "rank", "flags"),
)


def _result(line: Any, metric: KnownMetric) -> dict[str, Any]:
    ends = {"lower": line["low"], "upper": line["high"], "confidence_level": 0.95, "method": line["interval"]}
    interval = {"confidence_interval": ends} if line["low"] is not None and line["high"] is not None else {}
    return {
        "evaluation_result_id": f"{line['row_id']}.{line['metric']}",
        "evaluation_name": line["suite"],
        "source_data": {"dataset_name": line["data"], "source_type": "other"},
        "metric_config": {
            "metric_id": f"leakbench.{line['metric']}",
            "metric_name": metric.title,
            "evaluation_description": f"{KINDS[metric.kind].name}: {metric.label}",
            "lower_is_better": metric.better == "lower",
            "score_type": "continuous",
            "min_score": _end(metric.least),
            "max_score": _end(metric.most),
        },
        "score_details": {
            "score": line["value"],
            "details": _strings(facts(line)),
            "uncertainty": {**interval, "num_samples": line["n"]},
        },
    }


def _end(value: float) -> float | str:
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _strings(details: dict[str, Any]) -> dict[str, str]:
    # The schema admits only strings; a number's own form reads back to the same number.
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in details.items() if value}


def _uuid(row: str) -> str:
    """Name of a row's file: a UUID of version 4, as the datastore demands, made of the row's id."""
    return str(uuid.UUID(digest_of_bytes(row.encode())[:32], version=4))
