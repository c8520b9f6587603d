"""Plots of rounds: their numbers are those of the arrays, each budget has its own, and public data alone is a line."""

import re

import numpy as np
import pandas as pd
import pytest

from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.page.plots import picture, styles
from leakbench.leaderboard.page.rounds import budgets_of, round_figures

from .conftest import drawn_of


def figures_of(records, folder):
    rows = rows_from(records)
    style = styles({row.method: row.defense.name for row in rows})
    public_only = [row for row in rows if row.control == "public_only"]
    return {figure.name: figure for figure in round_figures(rows, public_only, folder, style, "s1")}


def test_lines_are_the_means_and_extremes_of_the_seeds_arrays(federated, folder):
    made = [federated("rounds", seed=seed) for seed in (0, 1, 2)]
    figures = figures_of([record for record, _ in made], folder)
    table = pd.concat([pd.DataFrame(columns) for _, columns in made]).groupby("round").agg(["mean", "min", "max"])
    (by_round,), (by_bytes,) = drawn_of(figures["s1-b1-rounds"]), drawn_of(figures["s1-b1-bytes"])
    assert by_round["x"] == [number + 1 for number in table.index]
    np.testing.assert_allclose(by_bytes["x"], table["bytes_up"]["mean"], rtol=1e-5)
    for band in (by_round, by_bytes):
        np.testing.assert_allclose(band["y"], table["accuracy"]["mean"], rtol=1e-3)
        np.testing.assert_allclose(band["low"], table["accuracy"]["min"], rtol=1e-3)
        np.testing.assert_allclose(band["high"], table["accuracy"]["max"], rtol=1e-3)
    last = table["accuracy"].iloc[-1]
    (numbers,) = figures["s1-b1-rounds"].numbers
    assert numbers == ("dp_sgd", "3", "12", f"{last['mean']:.3f}", f"{last['min']:.3f}", f"{last['max']:.3f}")
    sent, received = (f"{table[key, 'mean'].iloc[-1]:,.0f}" for key in ("bytes_up", "bytes_down"))
    assert figures["s1-b1-bytes"].numbers[0][1:3] == (sent, received)
    assert f"{received} bytes a training" in " ".join(figures["s1-b1-bytes"].caption)


def test_captions_say_how_many_seeds_and_examples_and_that_a_band_is_no_interval(federated, folder, record, metric):
    accuracy = {"accuracy": metric(0.8, 0.02, better="higher", n=700)}
    records = [federated("rounds", seed=seed)[0] for seed in (0, 1)]
    records += [record("utility", seed=seed, metrics=accuracy) for seed in (0, 1)]
    words = " ".join(figures_of(records, folder)["s1-b1-rounds"].caption)
    assert "700 held-out examples" in words and "2 seeds" in words and "no confidence interval" in words


def test_every_budget_has_its_own_plots_and_methods_without_a_budget_are_in_all(federated, folder, claim):
    records = []
    for noise in (8.0, 2.0):
        given = {"budget": {"noise_multiplier": noise, "delta": 1e-5}, "noise_multiplier": noise}
        records.append(federated("rounds", defense="fed_avg", **given)[0])
    records.append(
        federated("rounds", defense="sgd", budget={"delta": 1e-5}, claim=claim(None), noise_multiplier=0.0)[0]
    )
    figures = figures_of(records, folder)
    titles = [figure.title for name, figure in figures.items() if name.endswith("-rounds")]
    assert titles == ["Accuracy by round, noise multiplier 2", "Accuracy by round, noise multiplier 8"]
    for number in (1, 2):
        assert {band["series"] for band in drawn_of(figures[f"s1-b{number}-rounds"])} == {"fed_avg", "sgd"}
    # The control alone has no noise, and its drift is the same at every budget.
    assert [figures[name].title for name in figures if name.endswith("-drift")] == [
        "Relative drift of the clients' updates"
    ]


def test_budgets_are_in_the_order_of_their_numbers(record):
    rows = rows_from([record(budget={"noise_multiplier": noise, "delta": 1e-5}) for noise in (10.0, 4.0, 0.0)])
    words = [f"noise multiplier {noise}" for noise in (0, 4, 10)]
    assert budgets_of(rows) == words
    assert budgets_of(rows_from([record(budget={"delta": 1e-5})])) == [""]


def test_drift_is_drawn_of_methods_without_noise_alone(federated, folder, claim):
    noisy = federated("rounds", defense="fed_avg")[0]
    assert "s1-b1-drift" not in figures_of([noisy], folder)
    drift = np.array([np.nan, *np.linspace(1, 3, 11)])
    quiet, _ = federated("rounds", defense="sgd", columns={"drift": drift}, claim=claim(None), noise_multiplier=0.0)
    figure = figures_of([noisy, quiet], folder)["s1-b1-drift"]
    (band,) = drawn_of(figure)
    assert band["series"] == "sgd" and band["x"] == list(range(2, 13))
    np.testing.assert_allclose(band["y"], drift[1:], rtol=1e-3)


@pytest.mark.parametrize("factor, scale", [(8.0, "linear"), (12.0, "log")])
def test_the_loss_is_drawn_over_seeds_and_logarithmic_beyond_a_decade(federated, folder, factor, scale):
    losses = np.linspace(factor, 1, 12)
    records = [federated("rounds", seed=seed, columns={"loss": losses + seed / 100})[0] for seed in (0, 1)]
    figure = figures_of(records, folder)["s1-b1-loss"]
    (band,) = drawn_of(figure)
    np.testing.assert_allclose(band["low"], losses, rtol=1e-3)
    np.testing.assert_allclose(band["high"], losses + 0.01, rtol=1e-3)
    assert figure.specification is not None
    scales = [layer["encoding"]["y"]["scale"] for layer in figure.specification["layer"] if "y" in layer["encoding"]]
    assert {words.get("type", "linear") for words in scales} == {scale}
    assert "(nats)" in str(figure.specification) and "2 seeds" in figure.caption[0]


def test_a_loss_of_zero_keeps_the_linear_scale(federated, folder):
    made, _ = federated("rounds", columns={"loss": np.linspace(20, 0, 12)})
    (band,) = drawn_of(figures_of([made], folder)["s1-b1-loss"])
    assert band["y"][-1] == 0


@pytest.mark.parametrize("diverged", [np.inf, np.nan, 1e200])
def test_a_loss_that_diverges_leaves_its_rounds_out_and_keeps_the_accuracy(federated, folder, diverged):
    losses = np.array([2.0, 3.0, *np.full(10, diverged)])
    figures = figures_of([federated("rounds", columns={"loss": losses})[0]], folder)
    (band,) = drawn_of(figures["s1-b1-loss"])
    assert band["x"] == [1, 2] and "left out" in figures["s1-b1-loss"].caption[1]
    assert len(drawn_of(figures["s1-b1-rounds"])[0]["x"]) == 12
    never = figures_of([federated("rounds", columns={"loss": np.full(12, diverged)})[0]], folder)
    assert "s1-b1-loss" not in never and "s1-b1-rounds" in never


def test_public_data_alone_is_a_level_at_its_accuracy(federated, folder, record, metric, claim):
    public = record(
        "utility", defense="sgd", control="public_only", claim=claim(0.0), noise_multiplier=None,
        metrics={"accuracy": metric(0.952, 0.01, better="higher")},
    )  # fmt: skip
    figure = figures_of([federated("rounds")[0], public], folder)["s1-b1-rounds"]
    assert figure.specification is not None
    words = [
        layer["encoding"]["text"]["value"] for layer in figure.specification["layer"] if "text" in layer["encoding"]
    ]
    heights = [
        layer["data"]["values"][0]["y"] for layer in figure.specification["layer"] if "values" in layer.get("data", {})
    ]
    assert words == ["public_only 0.952, ε 0"] and set(heights) == {0.952}
    assert any("no private example is in it" in sentence for sentence in figure.caption)


@pytest.mark.parametrize("fault", ["gone", "other rounds", "no rounds"])
def test_rounds_that_cannot_be_drawn_are_named_with_the_reason(federated, folder, fault):
    good, _ = federated("rounds", defense="fed_avg")
    if fault == "gone":
        bad, _ = federated("rounds", defense="moon")
        (folder / bad.arrays).unlink()
        records, reason = [bad], "moon"
    elif fault == "other rounds":
        records = [federated("rounds", defense="moon")[0]]
        records.append(federated("rounds", seed=1, defense="moon", columns={"round": np.arange(1, 13)})[0])
        reason = "moon, its seeds have different rounds"
    else:
        empty = {key: np.zeros(0) for key in ("round", "accuracy", "loss", "bytes_up", "bytes_down", "drift")}
        records, reason = [federated("rounds", defense="moon", columns=empty)[0]], "moon, its arrays have no round"
    figures = figures_of([good, *records], folder)
    assert [band["series"] for band in drawn_of(figures["s1-b1-rounds"])] == ["fed_avg"]
    assert any(f"Not shown: {reason}" in sentence for sentence in figures["s1-b1-rounds"].caption)
    (alone,) = figures_of(records, folder).values()
    assert alone.specification is None and reason in alone.caption[0]


@pytest.mark.parametrize(
    "column, values",
    [
        ("accuracy", np.full(12, 5.0)),
        ("accuracy", np.array([1e308, -1e308, *np.zeros(10)])),
        ("accuracy", np.full(12, np.nan)),
        ("bytes_up", np.geomspace(1, 1e300, 12)),
        ("bytes_up", -np.arange(1, 13)),
        ("bytes_up", np.arange(12, 0, -1)),
        ("bytes_down", np.full(12, np.nan)),
        ("round", np.zeros(12)),
        ("round", np.arange(12) + 0.5),
        ("round", np.full(12, np.inf)),
        ("drift", -np.ones(12)),
        ("loss", -np.ones(12)),
    ],
)
def test_numbers_that_a_quantity_cannot_have_cost_their_own_row_alone(federated, folder, column, values):
    good, _ = federated("rounds", defense="fed_avg")
    bad, _ = federated("rounds", defense="moon", columns={column: values})
    figures = figures_of([good, bad], folder)
    assert [row[0] for row in figures["s1-b1-rounds"].numbers] == ["fed_avg"]
    assert any("Not shown: moon, its arrays must hold" in sentence for sentence in figures["s1-b1-rounds"].caption)


def test_a_drop_of_a_single_round_stays_in_a_thinned_curve(federated, folder):
    rounds = 4000
    accuracy = np.linspace(0.5, 0.9, rounds)
    accuracy[2345] = 0.1
    sent = np.arange(1, rounds + 1)
    columns = {"round": np.arange(rounds), "accuracy": accuracy, "loss": accuracy, "bytes_up": sent}
    columns |= {"bytes_down": sent, "drift": accuracy}
    figures = figures_of([federated("rounds", columns=columns)[0]], folder)
    (band,) = drawn_of(figures["s1-b1-rounds"])
    assert min(band["low"]) == pytest.approx(0.1) and len(band["x"]) < 300


def test_nothing_is_drawn_without_records_of_rounds(record, folder):
    assert figures_of([record(), record("utility")], folder) == {}


def test_rounds_of_an_axis_are_written_as_whole_numbers(federated, folder):
    specification = figures_of([federated("rounds")[0]], folder)["s1-b1-rounds"].specification
    assert specification is not None
    texts = re.findall(r'<text text-anchor="middle"[^>]*>([^<]*)</text>', picture(specification))
    numbers = [text for text in texts if text[0].isdigit()]
    assert len(numbers) > 2 and numbers == sorted({str(int(float(text))) for text in numbers}, key=int)
