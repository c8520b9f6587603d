"""Records of real runs, a file each, that are read and written back byte by byte; typed fields keep their JSON."""

from pathlib import Path

import pytest

from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.details import AucDetail, ProvedDetail
from leakbench.leaderboard.records.record import RecordedRequirements, RequestedBudget, read
from leakbench.leaderboard.records.task import TrainingTask, UpdateTask

FILES = sorted(Path(__file__).with_name("records").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem[:8])
def test_a_record_of_a_run_is_written_as_it_was_read(file):
    record = read(file)
    assert record.to_json() == file.read_text(encoding="utf-8")
    of_update = record.kind in ("reconstruction", "labels")
    assert type(record.task) is (UpdateTask if of_update else TrainingTask)
    assert type(record.budget) is RequestedBudget and type(record.requires) in (RecordedRequirements, type(None))
    assert all(type(metric.detail) is METRICS[name].detail for name, metric in record.metrics.items())


def test_fields_of_records_are_attributes_by_their_kind():
    records = {record.kind: record for record in map(read, FILES) if record.status == "ok"}
    auc = records["membership"].metrics["auc"].detail
    assert isinstance(auc, AucDetail) and auc.report_value == auc["report_value"] and len(auc.largest_roc) == 25
    proved = records["canaries"].metrics["canary_epsilon"].detail
    assert isinstance(proved, ProvedDetail) and proved.relation == "add_remove"
    update, training = records["labels"].task, records["canaries"].task
    assert isinstance(update, UpdateTask) and update.noise == "calibrated" and update.step == update["step"]
    assert isinstance(training, TrainingTask) and training.canaries is not None and training.sampling == "poisson"
    assert training.canaries.kind == training["canaries"]["kind"]
