"""The exported JSON Schemas: real records fit them, and what the reader refuses by its types they refuse as well."""

import copy
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from leakbench.leaderboard.kinds import KINDS
from leakbench.leaderboard.metrics import CLAIM, METRICS
from leakbench.leaderboard.records.json_schema import PATH, manifest_schema, record_schema, to_json
from leakbench.leaderboard.records.manifest import Manifest
from leakbench.leaderboard.records.record import SEAL, Record
from leakbench.leaderboard.records.validation import RecordError, build

from ...parameters import subtests
from ..conftest import asked_for, metric, record

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "records").glob("*.json"))
RECORDS = Draft202012Validator(record_schema())
MANIFESTS = Draft202012Validator(manifest_schema())


def of_kind(kind: str) -> Record:
    """A record of a kind with its main metric."""
    main = METRICS[KINDS[kind].main]
    detail = {"calibration_value": 0.5, "method": "exact", "n": 3}
    measured = metric(max(main.least, 0.5), better=main.better, n=7, reason="no interval", detail=detail)
    return record(kind, metrics={main.name: measured})


def test_a_schema_is_one_and_the_committed_file_is_current():
    for schema in (record_schema(), manifest_schema()):
        Draft202012Validator.check_schema(schema)
    assert PATH.read_text(encoding="utf-8") == to_json(record_schema()), (
        "run python -m leakbench.leaderboard.records.json_schema"
    )


@subtests("kind", KINDS)
def test_records_of_every_kind_and_status_fit(kind):
    measured = of_kind(kind)
    without = record(kind, claim=None, metrics=measured.metrics)
    for made in (measured, record(kind, status="skipped", reason="not here"), without):
        RECORDS.validate(json.loads(made.to_json()))


def test_records_and_requests_of_earlier_runs_fit():
    assert len(GOLDEN) >= 5
    for path in GOLDEN:
        RECORDS.validate(json.loads(path.read_text(encoding="utf-8")))
    request = asked_for(*map(of_kind, KINDS))
    MANIFESTS.validate(json.loads(json.dumps(request, default=vars)))


def test_every_known_metric_has_its_range_in_the_schema():
    stated = record_schema()["properties"]["metrics"]["properties"]
    assert stated.keys() == {name for name, stated_metric in METRICS.items() if stated_metric.kind != CLAIM}
    assert stated["auc"]["properties"]["value"] == {"minimum": 0.0, "maximum": 1.0}


def put(path, value):
    def change(data):
        *above, last = path.split(".")
        for key in above:
            data = data[key]
        data[last] = value

    return change


def drop(path):
    def change(data):
        *above, last = path.split(".")
        for key in above:
            data = data[key]
        del data[last]

    return change


MUTANTS = [
    *(
        drop(path)
        for path in ("seed", "metrics", "provenance.source", "claim.delta", "metrics.auc.low", "defense.name")
    ),
    *(put(path, 1) for path in ("bonus", "provenance.bonus", "claim.bonus", "metrics.auc.bonus", "defense.bonus")),
    *(put(path, "1") for path in ("seed", "seconds", "metrics.auc.value", "metrics.auc.n", "claim.epsilon", "schema")),
    *(put(path, True) for path in ("seed", "seconds", "metrics.auc.value", "suite", "flags", "engine")),
    *(put(path, None) for path in ("suite", "flags", "defense", "device", "task", "provenance", "budget")),
    *(put(path, -1) for path in ("seconds", "metrics.auc.n", "metrics.auc.value", "claim.epsilon", "noise_multiplier")),
    *(put(path, "other") for path in ("status", "noise", "control", "kind", "metrics.auc.better", "provenance.source")),
    *(put(path, []) for path in ("attack", "metrics", "claim", "requires", "metrics.auc.detail")),
    *(put(path, {"a": 1}) for path in ("flags", "changes", "reported", "claim.events", "arrays")),
    put("metrics.auc.value", 1.5),
    put("claim.delta", 1),
    put("claim.sample_rate", 0),
    put("id", "F" * 32),
    put("id", "abc"),
    put("arrays", "../x.parquet"),
    put("arrays_digest", "0" * 64),
    put("flags", [1]),
    put("attack", None),
    put("kind", "utility"),
    put("metrics.auc.detail.calibration_value", "high"),
    put("metrics.auc.detail.third", [1]),
    put("task.trained_on", "many"),
    put("task.client_sizes", ["many"]),
    put("requires", {"access": 1}),
    put("reported", [{"metric": "auc", "value": "high", "source": "p"}]),
    lambda data: data.update(status="failed", reason=None, metrics={}),
    lambda data: data.update(metrics={}),
    lambda data: data["metrics"].update(accuracy=data["metrics"]["auc"]),
    lambda data: data["metrics"].update(mine=data["metrics"]["auc"] | {"bonus": 1}),
]
KEPT = [
    put("seconds", 2),
    put("task.anything", {"deep": [1]}),
    put("metrics.auc.detail.third", "word"),
    put("requires", {"access": "UPDATE", "more": 1}),
    put("claim", None),
    put("arrays", None),
    drop("changes"),
    lambda data: data["metrics"].update(mine=data["metrics"]["auc"]),
]


def reader(data) -> str:
    """The reader's error; the seal is that of the changed content."""
    try:
        # `from_values` checks the seal last, so any other error comes first.
        Record.from_values(data)
    except RecordError as error:
        return "" if "edited after" in str(error) else str(error)
    return ""


@subtests("number", range(len(MUTANTS) + len(KEPT)))
def test_schema_and_reader_refuse_the_same(number):
    data = json.loads(record(metrics={"auc": metric(0.7, 0.05, n=9, detail={"calibration_value": 0.6})}).to_json())
    assert RECORDS.is_valid(data) and reader(data) == ""
    changed = copy.deepcopy(data)
    (MUTANTS + KEPT)[number](changed)
    assert RECORDS.is_valid(changed) == (reader(changed) == "") == (number >= len(MUTANTS)), reader(changed)


def test_the_schema_of_a_request_refuses_what_its_reader_does():
    data = json.loads(json.dumps(asked_for(record()), default=vars))
    changes = [put("suite", 1), put("cells", {}), put("schema", 3), drop("command"), put("bonus", 1)]
    changes += [lambda data: data["cells"][0].update(seed="0"), lambda data: data["cells"][0].pop("skip")]
    for change in changes:
        changed = copy.deepcopy(data)
        change(changed)
        assert not MANIFESTS.is_valid(changed)
        with pytest.raises(RecordError):
            build(Manifest, changed)


def test_the_seal_is_required_and_is_not_verified_by_a_schema():
    data = json.loads(record().to_json())
    assert RECORDS.is_valid(data | {SEAL: "0" * 64})
    assert not RECORDS.is_valid({key: value for key, value in data.items() if key != SEAL})
