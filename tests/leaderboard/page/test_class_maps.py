"""Heat maps of clients' classes: cells are those of the arrays, and named classes are counted as the scorer does."""

import numpy as np
import pandas as pd
import pytest

from leakbench.audit.scoring.client_property import score_client_property
from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.page.class_maps import MOST_CLIENTS, class_maps, map_lines
from leakbench.leaderboard.page.plots import styles
from leakbench.leaderboard.records.record import RecordError


def maps_of(records, folder):
    rows = rows_from(records)
    return class_maps(rows, folder, styles({row.method: row.defense.name for row in rows}))


def test_cells_are_the_fractions_and_names_of_the_arrays_in_any_order(federated, folder):
    _, columns = federated("client_property")
    shuffled = pd.DataFrame(columns).sample(frac=1, random_state=0)
    record, _ = federated("client_property", columns=shuffled.to_dict("list"))
    ((shown,), left_out) = maps_of([record], folder)
    assert left_out == [] and shown.classes == (0, 1, 2) and [client for client, _ in shown.lines] == [0, 1, 2, 3, 4]
    table = pd.DataFrame(columns).pivot_table(index="client", columns="class", values=["held", "named"])
    held = [[cell.held for cell in cells] for _, cells in shown.lines]
    named = [[cell.named for cell in cells] for _, cells in shown.lines]
    np.testing.assert_allclose(held, table["held"])
    np.testing.assert_array_equal(named, table["named"] == 1)
    assert "classes named 0.50" in shown.words and "a guess by class frequency: 0.20" in shown.words
    assert "claimed ε 3.00" in shown.words


@pytest.mark.parametrize("names", [1, 2])
def test_right_names_are_those_of_the_scorer(federated, folder, names):
    draw = np.random.default_rng(names)
    columns = federated("client_property")[1]
    named = np.argsort(draw.normal(size=(5, 3)), axis=1) < names
    record, columns = federated("client_property", columns={"named": named.ravel()})
    _, _, counts = map_lines(record, folder)
    share = score_client_property(columns)["classes_named"].value
    assert counts["named"] == 5 * names and counts["attacked"] == 5
    assert share is not None and counts["right"] == pytest.approx(share * 5 * names)


@pytest.mark.parametrize(
    "columns, reason",
    [
        ({"class": np.zeros(15, dtype=int)}, "each class of each client once"),
        ({"held": np.full(15, 2.0)}, "fractions"),
        ({"held": np.full(15, np.nan)}, "finite"),
        ({key: np.zeros(0) for key in ("client", "class", "score", "held", "named", "examples")}, "no client sent"),
    ],
)
def test_arrays_that_are_no_map_are_named_with_the_reason(federated, folder, columns, reason):
    record, _ = federated("client_property", columns=columns)
    with pytest.raises(RecordError, match=reason):
        map_lines(record, folder)
    maps, left_out = maps_of([record], folder)
    assert maps == [] and reason in left_out[0]


@pytest.mark.parametrize(
    "columns, reason",
    [
        ({"held": np.full(15, 0.9)}, "which sum to 1 at most"),
        ({"named": np.full(15, 0.5)}, "must hold 0 or 1 as named"),
    ],
)
def test_fractions_and_names_that_cannot_be_are_refused(federated, folder, columns, reason):
    shown, (sentence,) = maps_of([federated("client_property", columns=columns)[0]], folder)
    assert shown == [] and reason in sentence


def test_a_map_of_many_clients_is_cut_and_says_so(federated, folder):
    count = MOST_CLIENTS + 5
    columns = {
        "client": np.repeat(np.arange(count), 2), "class": np.tile([0, 1], count), "score": np.zeros(2 * count),
        "held": np.tile([1.0, 0.0], count), "named": np.tile([True, False], count), "examples": np.ones(2 * count),
    }  # fmt: skip
    record, _ = federated("client_property", columns=columns)
    ((shown,), _) = maps_of([record], folder)
    assert len(shown.lines) == MOST_CLIENTS and shown.attacked == shown.right == count
    assert shown.remarks == (f"The first {MOST_CLIENTS} of {count} clients are shown.",)
