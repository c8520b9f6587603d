"""Lines over seeds: bands are those of pandas, long lines are thinned, and lines of a plot can be told apart."""

import numpy as np
import pandas as pd
import pytest

from leakbench.leaderboard.page.axes import axis_over
from leakbench.leaderboard.page.plots import COLOURS, SHAPES
from leakbench.leaderboard.page.seed_bands import (
    MOST,
    POINTS,
    SeedLine,
    band_figures,
    dealt,
    distinct,
    kept_positions,
    read_columns,
    seeds_words,
)
from leakbench.leaderboard.records.record import RecordError

from .conftest import drawn_of


def line(name, y, style=(0, "circle")):
    y = np.asarray(y, dtype=float)
    places = np.arange(1.0, y.shape[1] + 1)
    return SeedLine(series=name, style=style, x=places, y=y, titles=[f"round {place:.0f}" for place in places])


def drawn(*lines):
    x = axis_over("round", [value for one in lines for value in one.x])
    y = axis_over("accuracy", np.concatenate([one.y.ravel() for one in lines]).tolist())
    return band_figures("s1-rounds", "Accuracy", lines, x, y, digits=3, caption=["A caption."])


def test_a_band_is_the_extremes_over_seeds_as_pandas_has_them():
    values = np.random.default_rng(0).uniform(0.2, 0.9, (4, 30))
    (figure,) = drawn(line("fed_avg", values))
    (band,) = drawn_of(figure)
    table = pd.DataFrame(values).agg(["mean", "min", "max"])
    for key, name in (("y", "mean"), ("low", "min"), ("high", "max")):
        np.testing.assert_allclose(band[key], table.loc[name], rtol=1e-3)
    assert band["wide"] and band["x"] == list(range(1, 31))


def test_a_single_seed_has_no_band():
    (figure,) = drawn(line("fed_avg", [[0.3, 0.4, 0.5]]))
    assert not drawn_of(figure)[0]["wide"]
    assert "no band" in seeds_words([1, 1]) and "2 to 3 seeds" in seeds_words([3, 2, 3])
    assert "no confidence interval" in seeds_words([2])


def test_marks_lie_on_their_line_and_say_its_numbers():
    values = np.random.default_rng(1).uniform(0.2, 0.9, (2, 40))
    (figure,) = drawn(line("fed_avg", values), line("moon", values / 2, (1, "square")))
    marks = [row for row in drawn_of(figure, "rows") if row["series"] == "fed_avg"]
    assert 2 <= len(marks) <= 6
    for mark in marks:
        own = values[:, int(mark["x"]) - 1]
        assert mark["y"] == pytest.approx(own.mean(), abs=1e-5)
        ends = f"{own.mean():.3f} ({own.min():.3f} to {own.max():.3f} over 2 seeds)"
        assert mark["title"] == f"fed_avg, round {mark['x']:.0f}: {ends}"


@pytest.mark.parametrize("count", [1, 2, POINTS, POINTS + 1, 5000])
def test_thinned_lines_keep_both_ends_and_the_first_rounds(count):
    kept = kept_positions(count)
    assert kept[0] == 0 and kept[-1] == count - 1 and kept == sorted(set(kept))
    assert len(kept) <= 2 * POINTS and (count > POINTS or len(kept) == count)
    assert set(range(min(count, 5))) <= set(kept)


@pytest.mark.parametrize("count", [1, MOST, MOST + 1, 15, 40])
def test_every_line_is_in_one_plot_and_the_plots_are_even(count):
    lines = [line(f"m{i}", [[0.5]]) for i in range(count)]
    parts = dealt(lines)
    assert [own.series for part in parts for own in part] == [own.series for own in lines]
    sizes = [len(part) for part in parts]
    assert max(sizes) <= MOST and max(sizes) - min(sizes) <= 1


def test_lines_of_a_plot_differ_in_marker_and_as_long_as_there_are_some_in_colour():
    chosen = distinct([(3, "diamond")] * MOST)
    assert chosen[0] == (3, "diamond")
    assert len({shape for _, shape in chosen}) == MOST <= len(SHAPES)
    assert len({colour for colour, _ in chosen}) == COLOURS
    kept = [(2, "up"), (0, "circle"), (5, "bar")]
    assert distinct(kept) == kept


def test_a_colour_that_returns_is_dashed():
    lines = [line(f"m{i}", [[0.2, 0.3], [0.4, 0.6]], (i % COLOURS, shape)) for i, shape in enumerate(SHAPES)]
    (figure,) = drawn(*lines)
    dashed = [band["dashed"] for band in drawn_of(figure)]
    assert dashed == [False] * COLOURS + [True] * (MOST - COLOURS)


def test_further_methods_have_plots_of_their_own_on_the_same_axes():
    figures = drawn(*(line(f"m{i}", [[0.2, 0.3 + i / 100]]) for i in range(11)))
    assert all(figure.specification is not None for figure in figures)
    assert [figure.name for figure in figures] == ["s1-rounds", "s1-rounds-2"]
    assert [figure.title for figure in figures] == ["Accuracy (1 of 2)", "Accuracy (2 of 2)"]
    domains = [
        {
            str(layer["encoding"][side]["scale"]["domain"])
            for layer in (figure.specification or {})["layer"]
            for side in ("x", "y")
            if side in layer["encoding"]
        }
        for figure in figures
    ]
    assert domains[0] == domains[1] and len(domains[0]) == 2


def test_arrays_that_are_not_numbers_are_refused(federated, folder, record):
    made, _ = federated("rounds", columns={"accuracy": ["high"] * 12})
    with pytest.raises(RecordError, match="cannot be read"):
        read_columns(made, folder, ["accuracy"])
    with pytest.raises(RecordError, match="must have the column epsilon"):
        read_columns(made, folder, ["epsilon"])
    with pytest.raises(RecordError, match="no arrays"):
        read_columns(record(), folder, ["accuracy"])
