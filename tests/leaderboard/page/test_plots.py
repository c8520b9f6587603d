"""What the plots show, where their marks stand, and what they must say instead of showing it."""

import json
import math
import re
from pathlib import Path

import altair
import pytest
import vl_convert

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.page import plots
from leakbench.leaderboard.page.axes import Axis, axis_over
from leakbench.leaderboard.page.figures import figures
from leakbench.leaderboard.page.plots import COLOURS, SHAPES, Point, picture, styles
from leakbench.leaderboard.page.specifications import scatter
from leakbench.leaderboard.records.record import Reported

from ...parameters import subtests


def specified(*points, **given):
    x, y = Axis(title="x", low=0, high=1, infinity=True), Axis(title="y", low=0, high=1)
    chosen = {"x": x, "y": y, "style": styles({p.series: p.series for p in points})}
    return scatter(points, **{**chosen, **given})


def rows(specification):
    return specification["datasets"]["rows"]


def marks(svg):
    found = re.findall(r'<path aria-label="[^"]*" role="graphics-symbol"[^>]*translate\(([-\d.]+),([-\d.]+)\)', svg)
    return [(float(x), float(y)) for x, y in found]


@pytest.fixture
def grid(record, metric, claim):
    """Two methods at three noise multipliers, over two seeds, and a baseline without noise."""
    made = []
    for seed in (0, 1):
        for name, gain in (("dp_sgd", 0.0), ("dpdr", 0.02)):
            for noise, epsilon, accuracy, auc in ((1.0, 8.0, 0.9, 0.7), (2.0, 3.0, 0.85, 0.6), (4.0, 1.0, 0.8, 0.55)):
                given = {
                    "defense": name, "seed": seed, "claim": claim(epsilon), "noise_multiplier": noise,
                    "budget": {"noise_multiplier": noise, "delta": 1e-5},
                }  # fmt: skip
                value = metric(accuracy + gain + seed / 100, 0.01, better="higher")
                figure = Reported(metric="accuracy", value=0.88, source="Table 1")
                shown = (figure,) if (name, noise) == ("dp_sgd", 2.0) else ()
                made.append(record("utility", metrics={"accuracy": value}, reported=shown, **given))
                implied = metric(epsilon / 4 + seed / 10, reason="a low end")
                made.append(record(metrics={"auc": metric(auc, 0.05), "implied_epsilon": implied}, **given))
        baseline = {
            "defense": "sgd",
            "seed": seed,
            "control": "positive",
            "claim": claim(None),
            "noise_multiplier": 0.0,
        }
        made.append(record("utility", **baseline))
        made.append(record(metrics={"auc": metric(1.0, 0.0), "implied_epsilon": metric(4.0)}, **baseline))
    return made


def figures_of(*records):
    board = Board.from_records(records).rows
    return {figure.title: figure for figure in figures(board, styles({r.method: r.defense.name for r in board}), "s1")}


@pytest.mark.long
def test_marks_stand_where_their_values_are():
    points = [Point(x=at, y=at, series="a", title="") for at in (0.0, 1.0, 0.5)]
    ((left, bottom), (right, top), (middle_x, middle_y)) = marks(picture(specified(*points)))
    assert left < right and top < bottom
    assert (middle_x, middle_y) == pytest.approx(((left + right) / 2, (top + bottom) / 2), abs=0.1)


def test_infinity_stands_behind_the_end_of_its_axis():
    svg = picture(specified(*(Point(x=x, y=0.5, series="a", title="") for x in (1.0, math.inf))))
    ((end, _), (beyond, _)) = marks(svg)
    assert end < beyond < 620 and ">∞<" in svg


def test_an_interval_reaches_from_its_low_to_its_high_end_and_none_is_drawn_without():
    point = Point(x=0.5, y=0.5, x_ends=(0.25, 1.0), y_ends=(0.0, 1.0), series="a", title="")
    bare = Point(x=0.5, y=0.5, series="a", title="")
    (row,), (other,) = rows(specified(point)), rows(specified(bare))
    assert [row[end] for end in ("left", "right", "low", "high")] == [0.25, 1.0, 0.0, 1.0]
    assert not {"left", "right", "low", "high"} & set(other)
    lines = [picture(specified(p)).count("<line") for p in (point, bare)]
    assert lines[0] == lines[1] + 2


def test_words_in_a_plot_are_escaped_and_are_tooltips_without_a_script():
    svg = picture(specified(Point(x=0.5, y=0.5, series="<i>'\"", label="<b>&", title='</title>"<script>')))
    assert "<script" not in svg and "<b>" not in svg and "<i>" not in svg and "&lt;b&gt;&amp;" in svg
    assert "<title>&lt;/title&gt;&quot;&lt;script&gt;</title></path>" in svg
    assert " id=" not in svg and "http" not in svg


def test_characters_that_xml_forbids_are_replaced_and_do_not_end_the_process():
    svg = picture(specified(Point(x=0.5, y=0.5, series="a\x00b", label="c\x1bd", title="e\ufffff\ud800")))
    assert "c\ufffdd" in svg and "e\ufffdf\ufffd" in svg


def test_digits_of_words_are_not_rounded():
    label = 'a class="b" d="0.12345678"'
    svg = picture(specified(Point(x=0.5, y=0.5, series="a", label=label, title="lr 0.12345678")))
    assert svg.count("0.12345678") == 3 and f">{label}<" in svg  # label, spoken words, tooltip


@pytest.mark.long
def test_the_same_specification_is_valid_and_gives_png_and_pdf(grid):
    css = (Path(plots.__file__).parent / "templates/page.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"(--[\w-]+): (#\w+)", css.partition("@media")[0]))
    for figure in figures_of(*grid).values():
        assert (
            figure.specification is not None and altair.LayerChart.from_dict(figure.specification).to_dict()
        )  # raises where the schema does
        text = re.sub(r"var\((--[\w-]+)\)", lambda name: light[name[1]], json.dumps(figure.specification))
        assert vl_convert.vegalite_to_png(text).startswith(b"\x89PNG")
        assert vl_convert.vegalite_to_pdf(text).startswith(b"%PDF")


def test_labels_cover_neither_marks_nor_one_another():
    crowd = [Point(x=0.5, y=0.5, series="a", label=f"label {i}", title="") for i in range(40)]
    for size in (0, 1):
        places = [tuple(row["places"][size]) for row in rows(specified(*crowd)) if row["places"][size]]
        assert 1 < len(places) == len(set(places)) < 40


def test_methods_at_one_place_are_set_side_by_side_only_where_asked():
    same = [Point(x=0.5, y=0.5, series="a", title=""), Point(x=0.5, y=0.5, series="b", title="")]
    ((a, _), (b, _)) = marks(picture(specified(*same)))
    assert a == b
    ((left, _), (right, _)) = marks(picture(specified(*same, dodge=True)))
    assert left < a < right


def test_forty_methods_at_one_place_stay_near_it():
    crowd = [Point(x=0.5, y=0.5, series=f"method {i}", title="") for i in range(40)]
    across = [row["shift"] for row in rows(specified(*crowd, dodge=True))]
    assert across == sorted(across) and len(set(across)) == 40 and max(across) - min(across) < 40


def test_a_logarithmic_axis_has_equal_ratios_equally_far_apart_and_round_ticks():
    axis = Axis(title="", low=0.1, high=10, log=True)
    assert axis.share(1) == pytest.approx(0.5) and axis.share(0) == 0 and axis.share(100) == 1
    assert axis.ticks() == [0.1, 0.2, 0.5, 1, 2, 5, 10]
    assert (single := axis_over("", [3.0], log=True)).high / single.low == pytest.approx(6)


@subtests("values", [[], [0.5], [0.5, 0.5], [math.inf], [0.0]])
@subtests("log", [True, False])
def test_an_axis_has_a_length_whatever_the_values(values, log):
    axis = axis_over("", values, log=log)
    assert axis.low < axis.high and (axis.low > 0 or not log)
    assert not log or len(axis.ticks()) > 1


def test_every_method_has_a_marker_and_methods_of_one_defense_its_colour():
    style = styles({"a (lr=1)": "a", "a (lr=2)": "a", "b": "b"})
    assert style["a (lr=1)"][0] == style["a (lr=2)"][0] != style["b"][0]
    assert len({marker for _, marker in style.values()}) == 3
    many = styles({f"m{i:02}": f"m{i:02}" for i in range(COLOURS * len(SHAPES))})
    assert len(set(many.values())) == COLOURS * len(SHAPES)


@pytest.mark.long
def test_a_grid_of_budgets_has_four_plots_with_lines(grid):
    found = figures_of(*grid)
    assert list(found) == [
        *(f"Utility against leakage, ε {epsilon}, δ 1e-5, unit example" for epsilon in (1, 3, 8)),
        "Accuracy against claimed ε", "Accuracy against the noise multiplier", "Empirical against claimed ε",
    ]  # fmt: skip
    budgets = found["Accuracy against claimed ε"]
    assert budgets.specification is not None
    svg = picture(budgets.specification)
    assert len({row["path"] for row in rows(budgets.specification)}) == 3
    assert len(re.findall(r'd="M[\d.,]+L[\d.,L]+" stroke="var\(--c\d\)"', svg)) == 2  # sgd's line has one end
    trades = [figure.specification for title, figure in found.items() if title.startswith("Utility")]
    # Each budget by itself, with the control that has none as a reference, on axes that all of them share.
    assert [[row["series"] for row in rows(trade)] for trade in trades] == [["dp_sgd", "dpdr", "sgd"]] * 3
    domains = {tuple(re.findall(r'"domain": (\[[-\d., ]+])', json.dumps(trade))) for trade in trades}
    assert len(domains) == 1 and len(set(*domains)) == 2  # of either axis
    assert all(">chance<" in picture(trade) for trade in trades if trade is not None)
    svg = picture(trades[-1] or {})
    assert all(f">{method}</text>" in svg for method in ("dp_sgd", "dpdr", "sgd"))
    titles = re.findall(r"<title>([^<]+)</title>", svg)
    assert any(
        t.startswith("dpdr (noise_multiplier=1): accuracy 0.925 [") and t.endswith("claimed ε 8.00") for t in titles
    )


def test_a_papers_figure_is_an_outline_at_the_noise_it_belongs_to(grid):
    figure = figures_of(*grid)["Accuracy against the noise multiplier"]
    (hollow,) = [row for row in rows(figure.specification) if row["hollow"]]
    assert hollow["title"].endswith("accuracy 0.88 reported in Table 1") and (hollow["x"], hollow["y"]) == (2, 0.88)
    assert any(
        line.startswith("Not shown: sgd (positive control), no noise multiplier above 0") for line in figure.caption
    )


def test_the_plot_of_implied_epsilon_calls_nothing_refuted_and_gives_its_numbers(grid):
    figure = figures_of(*grid)["Empirical against claimed ε"]
    caption = " ".join(figure.caption)
    assert figure.specification is not None and "implied above claimed" in picture(figure.specification)
    assert "no proved lower bound" in caption and "Above the diagonal: none." in caption
    lines = {line[0]: line[1:3] for line in figure.numbers}
    assert lines["dp_sgd (noise_multiplier=1)"] == ("8.00", "2.05 [1.41, 2.69]")
    assert lines["sgd (positive control)"][0] == "∞"


def test_an_attack_that_implies_nothing_takes_no_interval_from_one_that_does(record, metric):
    made = [
        record(attack=name, seed=seed, metrics={"auc": metric(0.6, 0.1), "implied_epsilon": metric(value)})
        for name, values in (("strong", (0.4, 0.6)), ("weak", (0.0, 0.0)))
        for seed, value in enumerate(values)
    ]
    ((_, _, implied, by, remark),) = figures_of(*made)["Empirical against claimed ε"].numbers
    assert implied == "0.50 [0.00, 3.05]" and by == "strong"  # t with 1 degree of freedom at 0.975 over two looks
    assert remark == "the interval is of strong alone: no interval: weak was compared too and has none"


def test_an_implied_epsilon_above_the_claim_is_named(record, metric):
    metrics = {"auc": metric(0.9, 0.1), "implied_epsilon": metric(3.5)}
    figure = figures_of(record(metrics=metrics))["Empirical against claimed ε"]
    assert "Above the diagonal: dp_sgd." in figure.caption


def test_attacks_told_who_took_part_are_not_held_against_the_amplified_claim(record, metric):
    told = {"auc": metric(0.9, 0.05), "implied_epsilon": metric(9.0)}
    alone = record(attack="insider", flags=("participation_known",), metrics=told)
    figure = figures_of(alone)["Empirical against claimed ε"]
    assert figure.specification is None
    assert any("Told who took part, so not comparable" in line and "insider" in line for line in figure.caption)
    fair = record(attack="outsider", metrics={"auc": metric(0.6, 0.05), "implied_epsilon": metric(1.0)})
    figure = figures_of(alone, fair)["Empirical against claimed ε"]
    assert [line[2:4] for line in figure.numbers] == [("1.00", "outsider")]


def test_without_the_metric_there_is_a_sentence_in_its_place(record):
    figure = figures_of(record("utility"), record())["Empirical against claimed ε"]
    assert figure.specification is None and "has the metric implied_epsilon" in figure.caption[0]


def test_without_membership_attacks_the_claim_takes_the_place_of_their_success(record, claim):
    figure = figures_of(record("utility"), record("utility", defense="sgd", claim=claim(None)))[
        "Utility against claimed ε"
    ]
    assert figure.specification is not None and "∞" in picture(figure.specification)
    assert "No membership attack was run" in figure.caption[0]


def test_negative_controls_are_in_no_plot(record, metric):
    control = {"defense": "sgd", "control": "negative", "metrics": {"auc": metric(0.5, 0.05)}}
    found = figures_of(record("utility"), record(), record(**control))
    assert all("sgd (negative" not in str(figure.specification) for figure in found.values())


def test_a_row_without_accuracy_is_left_out_with_its_reason(record):
    figure = figures_of(record("utility"), record(), record(defense="dpdr"))["Utility against leakage"]
    assert "Not shown: dpdr, no utility record." in figure.caption


def test_public_data_alone_is_a_line_where_epsilon_has_no_zero(record, metric, claim):
    records = [
        record("utility", defense="fed_avg", metrics={"accuracy": metric(0.6, 0.02, better="higher")}),
        record(
            "utility", defense="sgd", control="public_only", claim=claim(0.0),
            metrics={"accuracy": metric(0.952, 0.01, better="higher")},
        ),
    ]  # fmt: skip
    board = Board.from_records(records)
    style = styles({row.method: row.defense.name for row in board.rows})
    figure = figures(board.rows, style, "s1")[0]
    assert figure.specification is not None and [point["series"] for point in rows(figure.specification)] == ["fed_avg"]
    lines = [layer["data"]["values"][0] for layer in figure.specification["layer"] if "values" in layer.get("data", {})]
    assert {line["y"] for line in lines} == {0.952}
    assert not any("Not shown" in sentence for sentence in figure.caption)
