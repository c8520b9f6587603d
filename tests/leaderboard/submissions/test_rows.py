"""Boards of published records and submissions: a stranger's controls judge nobody else."""

import pytest

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.submissions.rows import NamedRecords, beside

from ..conftest import asked_for, claim, complete, metric, record


def control(auc, defense="sgd", **fields):
    return record(defense=defense, control="positive", claim=claim(None), metrics={"auc": metric(auc, 0.02)}, **fields)


def board_of(*published, submitted):
    named = {"eve/1": NamedRecords(submitted, (asked_for(*submitted),))}
    return beside(Board.from_records(published, complete(*published)) if published else None, named)


@pytest.mark.parametrize("auc", [0.97, 0.5])
def test_controls_of_a_submission_neither_vouch_for_a_published_board_nor_raise_its_alarm(auc):
    submitted = record(defense="eve/x", seed=7), control(auc, "eve/sgd", seed=7)
    assert not board_of(record(), submitted=submitted).controls
    (own,) = board_of(record(), control(0.9), submitted=submitted).controls
    assert own.ok and "eve" not in own.name
    assert [result.ok for result in board_of(submitted=submitted).controls] == [auc > 0.9]
