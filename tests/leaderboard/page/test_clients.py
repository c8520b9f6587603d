"""Plots of clients: epsilon and accuracy of each, sorted, with the worst of any seed marked."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.page.clients import client_figures
from leakbench.leaderboard.page.plots import styles

from .conftest import drawn_of


def figures_of(records, folder):
    rows = rows_from(records)
    style = styles({row.method: row.defense.name for row in rows})
    return {figure.name: figure for figure in client_figures(rows, folder, style, "s1")}


def filled(figure):
    return [row for row in drawn_of(figure, "rows") if not row["hollow"]]


@pytest.mark.parametrize("column, sign, name", [("epsilon", 1, "epsilon"), ("accuracy", -1, "accuracy-b1")])
def test_clients_are_sorted_and_the_worst_of_any_seed_is_marked(federated, folder, column, sign, name):
    made = [federated("federation", seed=seed) for seed in (0, 1, 2)]
    figure = figures_of([record for record, _ in made], folder)[f"s1-client-{name}"]
    table = pd.concat([pd.DataFrame(columns).assign(seed=seed) for seed, (_, columns) in enumerate(made)])
    table["rank"] = table.groupby("seed")[column].rank(ascending=sign > 0)
    by_rank = table.groupby("rank")[column].agg(["mean", "min", "max"])
    (band,) = drawn_of(figure)
    assert band["x"] == by_rank.index.tolist()
    for key, statistic in (("y", "mean"), ("low", "min"), ("high", "max")):
        np.testing.assert_allclose(band[key], by_rank[statistic], rtol=1e-3)
    worst = table.loc[(sign * table[column]).reset_index(drop=True).idxmax() == np.arange(len(table))].iloc[0]
    (mark,) = filled(figure)
    assert mark["x"] == 5 and mark["y"] == pytest.approx(worst[column], rel=1e-5)
    assert mark["label"] == f"worst: client {worst['client']:.0f}, seed {worst['seed']:.0f}"
    examples = f"({worst['examples']:.0f} examples, {worst['rounds']:.0f} rounds)"
    assert examples in mark["title"] and examples in figure.numbers[0][-1]


def test_only_the_worst_client_of_all_methods_has_a_label(federated, folder):
    records = [federated("federation", defense=name)[0] for name in ("fed_avg", "moon", "scaffold")]
    columns = [federated("federation", defense=name)[1] for name in ("fed_avg", "moon", "scaffold")]
    for name, worst in (("epsilon", max), ("accuracy-b1", min)):
        figure = figures_of(records, folder)[f"s1-client-{name}"]
        labels = [mark["y"] for mark in filled(figure) if mark["label"]]
        values = [value for own in columns for value in own[name.removesuffix("-b1")]]
        assert labels == [pytest.approx(worst(values), rel=1e-5)] and len(filled(figure)) == 3


def test_methods_whose_clients_have_the_same_epsilons_share_a_line(federated, folder):
    same = {"epsilon": np.array([1.0, 2.0, 3.0, 4.0, 5.0])}
    records = [federated("federation", defense=name, columns=same)[0] for name in ("fed_avg", "moon")]
    # Another order of the clients, and the same epsilons.
    records.append(federated("federation", defense="scaffold", columns={"epsilon": same["epsilon"][::-1]})[0])
    records.append(federated("federation", defense="fed_lrs")[0])
    figure = figures_of(records, folder)["s1-client-epsilon"]
    assert [band["series"] for band in drawn_of(figure)] == ["fed_avg and 2 more", "fed_lrs"]
    assert "One line for fed_avg, moon, scaffold: their clients have the same ε." in figure.caption
    assert [row[0] for row in figure.numbers] == ["fed_avg", "fed_lrs", "moon", "scaffold"]


def test_an_infinite_epsilon_is_named_and_not_drawn(federated, folder):
    some = np.array([1.0, math.inf, 2.0, math.inf, 3.0])
    records = [
        federated("federation", defense="pfa", columns={"epsilon": some})[0],
        federated("federation", defense="sgd", columns={"epsilon": np.full(5, math.inf)})[0],
    ]
    figure = figures_of(records, folder)["s1-client-epsilon"]
    (band,) = drawn_of(figure)
    assert (band["x"], band["y"]) == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) and filled(figure) == []
    assert any("ε is infinite: pfa (2 of 5 clients); sgd (every client)" in sentence for sentence in figure.caption)
    assert {row[4] for row in figure.numbers} == {"∞"}
    alone = figures_of(records[1:], folder)["s1-client-epsilon"]
    assert alone.specification is None and "sgd (every client)" in " ".join(alone.caption)


def test_captions_name_the_privacy_unit(federated, folder, claim):
    record = federated("federation")[0]
    assert "one example of a client" in figures_of([record], folder)["s1-client-epsilon"].caption[0]
    by_client, _ = federated("federation", claim=claim(3.0, unit="client"))
    assert "a client with all of its examples" in figures_of([by_client], folder)["s1-client-epsilon"].caption[0]


def test_a_client_without_a_tested_class_has_no_place(federated, folder):
    accuracy = np.array([0.9, math.nan, 0.5, 0.7, 0.8])
    record, _ = federated("federation", columns={"accuracy": accuracy})
    figure = figures_of([record], folder)["s1-client-accuracy-b1"]
    (band,) = drawn_of(figure)
    assert band["y"] == [0.9, 0.8, 0.7, 0.5]
    assert [mark["label"] for mark in filled(figure)] == ["worst: client 2"]
    assert any("have no accuracy" in sentence for sentence in figure.caption)


def test_many_clients_have_few_marks_and_a_thin_line(federated, folder):
    draw, count = np.random.default_rng(0), 1000
    columns = {key: np.arange(count) for key in ("client", "examples", "rounds", "messages", "bytes_up", "bytes_down")}
    columns |= {"epsilon": draw.uniform(1, 3, count), "accuracy": draw.uniform(size=count)}
    record, _ = federated("federation", columns=columns)
    for figure in figures_of([record], folder).values():
        (band,) = drawn_of(figure)
        assert (band["x"][0], band["x"][-1]) == (1, 1000) and len(band["x"]) < 250
        assert len(drawn_of(figure, "rows")) < 10


def test_seeds_with_other_numbers_of_clients_are_named(federated, folder):
    columns = {
        key: np.ones(3)
        for key in ("client", "examples", "rounds", "messages", "bytes_up", "bytes_down", "epsilon", "accuracy")
    }
    records = [federated("federation")[0], federated("federation", seed=1, columns=columns)[0]]
    (figure,) = figures_of(records, folder).values()
    assert figure.specification is None and "different numbers of clients" in figure.caption[0]


@pytest.mark.parametrize(
    "column, values",
    [
        ("epsilon", np.array([1.0, 2.0, math.nan, 3.0, 4.0])),
        ("epsilon", -np.arange(5.0)),
        ("epsilon", np.full(5, 1.7e308)),
        ("epsilon", np.geomspace(1e-300, 1e300, 5)),
        ("accuracy", np.array([7.0, 0.2, 0.3, 0.4, 0.5])),
        ("client", np.zeros(5)),
        ("client", np.full(5, math.nan)),
        ("examples", np.full(5, math.inf)),
    ],
)
def test_numbers_that_a_client_cannot_have_cost_their_own_row_alone(federated, folder, column, values):
    good, _ = federated("federation", defense="fed_avg")
    bad, _ = federated("federation", defense="moon", columns={column: values})
    figure = figures_of([good, bad], folder)["s1-client-epsilon"]
    assert [row[0] for row in figure.numbers] == ["fed_avg"]
    assert any("Not shown: moon, its arrays must hold" in sentence for sentence in figure.caption)


def test_epsilons_of_many_magnitudes_are_drawn(federated, folder):
    record, _ = federated("federation", columns={"epsilon": np.array([1e-300, 1e-3, 1.0, 2.0, 3.0])})
    (band,) = drawn_of(figures_of([record], folder)["s1-client-epsilon"])
    assert band["y"][-1] == 3.0


def test_arrays_with_another_epsilon_than_the_records_are_not_shown_as_its_claim(federated, folder, claim, metric):
    own = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    claimed, _ = federated("federation", defense="moon", columns={"epsilon": own}, claim=claim(5.0))
    other, _ = federated("federation", defense="moon", columns={"epsilon": own}, claim=claim(2.0))
    for record, says in ((claimed, True), (other, False)):
        caption = " ".join(figures_of([record], folder)["s1-client-epsilon"].caption)
        assert ("whose ε is the row's claim" in caption) is says
    forged = replace(claimed, metrics=dict(claimed.metrics) | {"epsilon_worst": metric(2.0, better="lower")})
    figure = figures_of([forged], folder)["s1-client-epsilon"]
    assert figure.specification is None and "must be the record's, got 5" in figure.caption[0]


def test_nothing_is_drawn_without_records_of_clients(record, folder):
    assert figures_of([record(), record("utility")], folder) == {}
