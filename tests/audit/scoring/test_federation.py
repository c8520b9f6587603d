"""Numbers of a federation and of its rounds: of hand-written tables, a row a client, a row a round."""

import math

import pytest

from leakbench.audit.scoring.federation import score_federation
from leakbench.audit.scoring.rounds import score_rounds

CLIENTS = {
    "client": [0, 1, 2],
    "rounds": [4, 2, 0],
    "messages": [3, 2, 0],
    "bytes_up": [300, 150, 0],
    "bytes_down": [800, 400, 0],
    "epsilon": [2.0, 1.5, 0.0],
}


def test_sizes_are_those_of_a_message_and_epsilons_of_all_clients():
    scores = score_federation(CLIENTS)
    assert {name: metric.value for name, metric in scores.items()} == {
        "bytes_up": 90.0,
        "bytes_down": 200.0,
        "epsilon_worst": 2.0,
        "epsilon_median": 1.5,
        "client_rounds": 2.0,
    }
    assert (scores["bytes_up"].n, scores["bytes_down"].n, scores["bytes_up"].detail["total"]) == (5, 6, 450)


def test_an_infinite_epsilon_and_a_run_without_messages_have_reasons_and_no_value():
    scores = score_federation(CLIENTS | {"epsilon": [math.inf, 1.5, 0.0], "messages": [0, 0, 0]})
    assert scores["epsilon_worst"].value is None and "infinite" in (scores["epsilon_worst"].reason or "")
    assert scores["epsilon_median"].value == 1.5
    assert scores["bytes_up"].value is None and scores["bytes_up"].reason == "no message was sent"


def test_rounds_have_the_mean_accuracy_and_the_mean_of_the_drifts_that_there_are():
    scores = score_rounds({"accuracy": [0.2, 0.4], "drift": [math.nan, 3.0]})
    assert scores["round_accuracy"].value == pytest.approx(0.3) and scores["round_accuracy"].n == 2
    assert (scores["relative_drift"].value, scores["relative_drift"].n) == (3.0, 1)
    assert score_rounds({"accuracy": [0.2], "drift": [math.nan]})["relative_drift"].value is None
