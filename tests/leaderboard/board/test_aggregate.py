"""Means, intervals and the worst case, against hand-worked numbers and a simulation."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from leakbench.leaderboard.board.aggregate import BoardCell, over_seeds, student, worst_case
from leakbench.leaderboard.records.details import Detail
from leakbench.leaderboard.records.record import Metric


@pytest.fixture
def cell(record, metric):
    def build(*values, attack="a", half=0.05):
        metrics = [value if hasattr(value, "value") else metric(value, half) for value in values]
        records = {seed: record(seed=seed, metrics={"auc": m}) for seed, m in enumerate(metrics)}
        return BoardCell(kind="membership", attack=attack, noise=None, records=records)

    return build


def ends(estimate):
    """The interval, which must be there."""
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


def test_an_estimate_is_computed_once_for_each_width(cell):
    made = cell(0.6, 0.7, 0.8)
    assert over_seeds("auc", made) is over_seeds("auc", made, looks=1)
    wide = over_seeds("auc", made, looks=4)
    assert wide is over_seeds("auc", made, looks=4) and ends(wide)[1] > ends(over_seeds("auc", made))[1]
    assert cell(0.6, 0.7, 0.8) == cell(0.6, 0.7, 0.8)


def test_the_interval_over_seeds_is_students(cell):
    found = over_seeds("auc", cell(0.6, 0.7, 0.8))
    # t(0.975, 2) = 4.3027, s = 0.1, n = 3
    assert (found.value, found.low) == pytest.approx((0.7, 0.7 - 4.30265 * 0.1 / 3**0.5))
    assert found.high == pytest.approx(0.9484, abs=1e-4)
    assert (found.n, found.interval) == (3, "seeds")
    reference = stats.ttest_1samp([0.6, 0.7, 0.8], 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high))


def test_the_interval_is_clipped_to_the_range_of_the_metric(cell):
    found = over_seeds("auc", cell(0.5, 1.0))
    assert (found.low, found.high) == (0.0, 1.0)


def test_one_seed_has_the_interval_of_its_record(cell):
    found = over_seeds("auc", cell(0.7))
    assert (found.value, found.low, found.high) == pytest.approx((0.7, 0.65, 0.75))
    assert (found.n, found.interval) == (1, "own")


def test_seeds_that_agree_exactly_do_not_claim_certainty(cell):
    found = over_seeds("auc", cell(*[Metric(value=1.0, low=0.96, high=1.0, better="lower")] * 3))
    assert (found.low, found.high, found.interval) == (pytest.approx(0.96), 1.0, "own")


def test_more_looks_make_wider_intervals(cell):
    for one in (cell(0.6, 0.65, 0.7), cell(0.65)):
        (low, high), (lower, higher) = (ends(over_seeds("auc", one, looks=looks)) for looks in (1, 4))
        assert lower < low < high < higher
    # normal quantiles: z(1 - 0.025 / 4) / z(0.975) = 2.4977 / 1.95996
    assert over_seeds("auc", cell(0.65), looks=4).low == pytest.approx(0.65 - 0.05 * 2.4977 / 1.95996, abs=1e-4)


def test_what_was_not_measured_has_no_value_and_says_why(cell, metric):
    found = over_seeds("auc", cell(metric(None, reason="too few"), metric(None, reason="too few")))
    assert (found.value, found.low, found.n, found.reason) == (None, None, 0, "too few")
    partly = over_seeds("auc", cell(0.6, metric(None, reason="too few"), 0.8))
    assert (partly.value, partly.seeds, partly.reason) == (pytest.approx(0.7), (0, 2), "seed 1: too few")
    absent = over_seeds("tpr_at_1pct_fpr", cell(0.6))
    assert absent.value is None
    assert absent.reason == "tpr_at_1pct_fpr is not among the metrics recorded"


def test_the_worst_case_is_the_attack_with_the_highest_mean_not_the_luckiest_seed(cell):
    lucky, strong = cell(0.5, 0.5, 0.9, attack="lucky"), cell(0.7, 0.71, 0.72, attack="strong")
    found = worst_case("auc", [lucky, strong], missing="none")
    each = [over_seeds("auc", one, looks=2) for one in (lucky, strong)]
    assert (found.attack, found.looks) == ("strong", 2)
    assert ends(found) == (max(ends(e)[0] for e in each), max(ends(e)[1] for e in each))


def test_the_worst_case_follows_the_direction_of_the_metric(cell, record, metric):
    def images(value, attack):
        one = record("reconstruction", metrics={"mse": metric(value, 0.01, better="higher")})
        return BoardCell(kind="reconstruction", attack=attack, noise="none", records={0: one})

    found = worst_case("mse", [images(0.3, "weak"), images(0.1, "strong")], missing="none")
    assert (found.attack, found.value) == ("strong", 0.1)
    low, high = ends(found)
    assert low < 0.1 < high < 0.2


def test_an_attack_without_an_interval_leaves_the_worst_case_without_one(cell):
    found = worst_case("auc", [cell(0.9, attack="a"), cell(0.6, half=None, attack="b")], missing="none")
    assert (found.value, found.low, found.reason) == (
        0.9,
        None,
        "no interval: b was compared too and has none",
    )


def test_attacks_that_measured_nothing_are_not_looks(cell, metric):
    found = worst_case("auc", [cell(0.7), cell(metric(None, reason="too few"), attack="b")], missing="none")
    assert (found.looks, found.low) == (1, pytest.approx(0.65))
    assert worst_case("auc", [], missing="nothing tried").reason == "nothing tried"


def test_an_attack_without_a_tpr_leaves_the_worst_tpr_a_lower_limit_that_names_it(record, metric):
    def attack(label, auc, tpr):
        metrics = {"auc": metric(auc, 0.05, reason=None if auc else "nothing"), "tpr_at_1pct_fpr": tpr}
        return BoardCell(kind="membership", attack=label, noise=None, records={0: record(metrics=metrics)})

    few = metric(None, reason="85 non-members are too few")
    cells = [attack("informed", 1.0, few), attack("traced", 0.9, few), attack("weak", 0.51, metric(0.01, 0.005))]
    worst = worst_case("tpr_at_1pct_fpr", cells, missing="none")
    assert (worst.value, worst.attack, worst.unmeasured) == (0.01, "weak", ("informed", "traced"))
    assert worst.reason == "without informed and traced: 85 non-members are too few"
    assert worst_case("auc", cells, missing="none").unmeasured == ()
    # Without any number there is no limit, and an attack without a number at all is no part of the comparison.
    assert worst_case("tpr_at_1pct_fpr", cells[:2], missing="none").unmeasured == ()
    failed = attack("failed", None, few)
    assert worst_case("tpr_at_1pct_fpr", [cells[2], failed], missing="none").unmeasured == ()


def test_an_attack_that_records_another_metric_leaves_no_gap(record, metric):
    def images(label, metrics):
        attack = record("reconstruction", metrics=metrics)
        return BoardCell(kind="reconstruction", attack=label, noise="none", records={0: attack})

    pixels = images("pixels", {"psnr": metric(20.0, 1.0)})
    choice = images("choice", {"psnr": metric(None, reason="an exact copy"), "prior_success": metric(0.5, 0.1)})
    for name in ("psnr", "prior_success"):
        assert worst_case(name, [pixels, choice], missing="none").unmeasured == ()


def test_simultaneous_intervals_cover_the_strongest_where_plain_ones_do_not():
    """Eight attacks of mean 0 on 1000 boards of 3 seeds: how often is the largest low end above 0?"""
    draws = np.random.default_rng(0).normal(size=(1000, 8, 3))

    def misses(looks):
        t = stats.t.ppf(1 - 0.025 / looks, 2)
        return np.mean((draws.mean(axis=2) - t * draws.std(axis=2, ddof=1) / 3**0.5).max(axis=1) > 0)

    low, _ = student([float(value) for value in draws[0, 0]], looks=8) or (None, None)
    assert low == pytest.approx(draws[0, 0].mean() - stats.t.ppf(1 - 0.025 / 8, 2) * stats.sem(draws[0, 0]))
    # Expected 0.0247 and 1 - 0.975**8 = 0.183; the bounds are 7 and 6 standard errors away.
    assert misses(looks=8) < 0.06
    assert misses(looks=1) > 0.11


def halves(whole, calibration, report, half=0.05):
    """A metric with numbers on the halves of its candidates."""
    detail = {"calibration_value": calibration, "report_value": report, "report_low": report - 0.07}
    detail |= {"report_high": report + 0.07, "report_n": 50}
    return Metric(value=whole, low=whole - half, high=whole + half, n=100, better="lower", detail=Detail(detail))


def test_the_strongest_is_chosen_on_one_half_and_its_number_is_of_the_other(cell):
    strong = cell(halves(0.60, 0.62, 0.58), halves(0.62, 0.64, 0.60), attack="strong")
    lucky = cell(halves(0.64, 0.55, 0.73), halves(0.60, 0.57, 0.63), attack="lucky")
    found = worst_case("auc", [strong, lucky], missing="")
    assert (found.attack, found.value, found.looks) == ("strong", pytest.approx(0.59), 2)
    assert found.chosen_on == "calibration half" and found.seeds == (0, 1)
    own, whole = student([0.58, 0.60]), worst_case("auc", [cell(0.60, 0.62), cell(0.64, 0.60)], missing="")
    assert own is not None and found.low == pytest.approx(own[0])  # its own, of one look
    assert found.high == pytest.approx(whole.high)  # of all attacks and all candidates


def test_without_a_choice_or_without_halves_all_candidates_count(cell):
    alone = worst_case("auc", [cell(halves(0.60, 0.62, 0.58))], missing="")
    assert (alone.value, alone.chosen_on) == (0.60, None)
    # One record of an older version, and nothing is chosen on a half.
    mixed = [cell(halves(0.60, 0.62, 0.58)), cell(halves(0.70, 0.6, 0.8), 0.7, attack="b")]
    found = worst_case("auc", mixed, missing="")
    assert (found.value, found.attack, found.chosen_on) == (0.70, "b", "the same scores")


@pytest.mark.long
def test_a_maximum_over_attacks_that_know_nothing_stays_at_chance_and_what_is_strongest_is_covered(cell):
    draw, attacks, runs = np.random.default_rng(0), 8, 100
    truth = np.where(np.arange(attacks) == 0, 0.52, 0.5)
    values, naive, covered = [], [], 0
    for _ in range(runs):
        parts = draw.normal(truth, 0.04, size=(2, attacks)).clip(0, 1)
        cells = [
            cell(halves(float(parts[:, k].mean()), *map(float, parts[:, k]), half=1.96 * 0.04 / 2**0.5), attack=str(k))
            for k in range(attacks)
        ]
        found = worst_case("auc", cells, missing="")
        values.append(found.value)
        naive.append(max(parts.mean(axis=0)))
        low, high = ends(found)
        covered += low <= 0.52 <= high
    assert np.mean(naive) > 0.53  # what a maximum of the numbers shown would say of these attacks
    assert np.mean(values) < 0.515 and covered >= 0.95 * runs - 3 * (0.95 * 0.05 * runs) ** 0.5


def test_a_choice_on_a_half_without_an_interval_says_why(cell):
    shown = cell(halves(0.7, 0.7, 0.65), attack="a")
    bare = halves(0.6, 0.6, 0.6)
    bare = replace(bare, low=None, high=None, reason="too few")
    estimate = worst_case("auc", [shown, cell(bare, attack="b")], missing="nothing")
    assert (estimate.value, estimate.low, estimate.chosen_on) == (0.65, None, "calibration half")
    assert estimate.reason == "no interval: b was compared too and has none"


def test_one_attack_without_halves_leaves_the_choice_among_the_others_as_it_was(cell):
    strong = cell(halves(0.60, 0.62, 0.58), halves(0.62, 0.64, 0.60), attack="strong")
    lucky = cell(halves(0.64, 0.55, 0.73), halves(0.60, 0.57, 0.63), attack="lucky")
    without = worst_case("auc", [strong, lucky], missing="")
    for weak in (cell(0.55, 0.5, attack="bare"), cell(halves(0.55, 0.5, 0.6), 0.5, attack="bare")):
        found = worst_case("auc", [strong, lucky, weak], missing="")
        assert (found.attack, found.value, found.chosen_on) == ("strong", without.value, "calibration half")
        assert found.looks == 3 and ends(found)[1] >= ends(without)[1]
    # None is hidden: its own number is shown where that is worse than the other half's.
    found = worst_case("auc", [strong, lucky, cell(0.60, 0.595, attack="bare")], missing="")
    assert (found.attack, found.value, found.chosen_on) == ("bare", pytest.approx(0.5975), "the same scores")
    assert ends(found)[0] <= 0.5975 <= ends(found)[1]
    # Of one attack with halves there is no choice among such.
    found = worst_case("auc", [strong, cell(0.55, 0.5, attack="bare")], missing="")
    assert (found.attack, found.value, found.chosen_on) == ("strong", pytest.approx(0.61), "the same scores")


def test_one_lucky_seed_is_no_match_for_a_mean_over_three(cell):
    # The first seed leaks more, to both.
    three = cell(0.80, 0.60, 0.61, attack="three")
    assert worst_case("auc", [cell(0.75, attack="one"), three], missing="").attack == "three"
    assert worst_case("auc", [three, cell(0.75, attack="one")], missing="").attack == "three"
    # Worse than the other on that very seed, and by what is shown.
    assert worst_case("auc", [three, cell(0.85, attack="one")], missing="").attack == "one"
    # Worse on that seed alone: the mean of three is larger, and is what a reader sees.
    high = cell(0.60, 0.80, 0.81, attack="high")
    found = worst_case("auc", [high, cell(0.65, attack="one")], missing="")
    assert (found.attack, found.value) == ("high", pytest.approx(0.7366667))
    # And on halves.
    parts = [halves(0.80, 0.80, 0.79), halves(0.6, 0.6, 0.62), halves(0.61, 0.61, 0.60)]
    found = worst_case("auc", [cell(*parts, attack="three"), cell(halves(0.75, 0.75, 0.74), attack="one")], missing="")
    assert (found.attack, found.value, found.chosen_on) == ("three", pytest.approx(0.67), "calibration half")


@pytest.mark.long
def test_attacks_that_know_nothing_win_no_oftener_for_fewer_seeds(cell):
    """Runs differ by more than attacks do; one attack of the four was measured on a single run."""
    draw, won, by_mean = np.random.default_rng(0), 0, 0
    for _ in range(400):
        runs = draw.normal(0.6, 0.05, size=3)
        values = (runs + draw.normal(0, 0.01, size=(4, 3))).clip(0, 1)
        cells = [cell(*map(float, values[k, : 1 if k == 0 else 3]), attack=str(k)) for k in range(4)]
        won += worst_case("auc", cells, missing="").attack == "0"
        by_mean += values[0, 0] > values[1:].mean(axis=1).max()
    # One of four by chance; by its mean alone it wins when its run leaks more than others do.
    assert by_mean > 0.4 * 400 and won < 0.25 * 400


def test_of_proved_bounds_the_least_is_proved_and_no_mean_is(cell, record, metric):
    def bounds(*values):
        made = [record(seed=seed, metrics={"epsilon_lower": metric(v)}) for seed, v in enumerate(values)]
        return BoardCell(kind="membership", attack="a", noise=None, records={r.seed: r for r in made})

    found = over_seeds("epsilon_lower", bounds(0.4, 1.0, 0.7))
    assert (found.value, found.low, found.high, found.seeds) == (0.4, None, None, (0, 1, 2))
    assert "least of its seeds" in (found.reason or "")
    assert over_seeds("epsilon_lower", bounds(1.0)).value == 1.0
