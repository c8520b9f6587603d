"""Choices among candidates beside attacks that find images: neither flatters the other."""

from leakbench.leaderboard.board.reconstruction_summary import reconstruction_summaries
from leakbench.leaderboard.board.table import Board

from ...parameters import subtests
from ..conftest import metric, record

SHARED = record("reconstruction").task
PICKED = "the image was picked among candidates of which it is one"


def picking(value, half=0.1, *, seed=0, noise="none", bound=None, kappa=0.1, n=20, **fields):
    """A record of a choice: no picture is scored."""
    pictures = {name: metric(None, reason=PICKED) for name in ("psnr", "gain_over_mean", "gain_over_match")}
    success = metric(value, half, n=n, detail={"kappa": kappa}, reason="it failed" if value is None else None)
    limit = metric(bound, n=10, reason="nothing is proved" if bound is None else "computed exactly")
    metrics = pictures | {"prior_success": success, "rero_bound": limit}
    return record(
        "reconstruction", attack="picker", seed=seed, task=SHARED | {"noise": noise}, metrics=metrics, **fields
    )


def finding(psnr, *, seed=0, **fields):
    """A record of an attack that looks for the image."""
    gains = {
        name: metric(psnr - 11.0, 0.5, n=4, detail={"detectable": 2.0})
        for name in ("gain_over_mean", "gain_over_match")
    }
    metrics = {"psnr": metric(psnr, 1.0), "psnr_floor": metric(11.0), **gains}
    return record("reconstruction", attack="finder", seed=seed, task=SHARED, metrics=metrics, **fields)


def test_the_worst_psnr_is_that_of_attacks_that_find_images_and_no_look_is_spent_on_the_others():
    alone, both = (Board.from_records(made).rows[0] for made in ([finding(14.0)], [finding(14.0), picking(1.0, 0.0)]))
    assert both.estimates["psnr_free"] == alone.estimates["psnr_free"]
    assert both.estimates["psnr_free"].looks == 1
    assert both.estimates["prior_free"].value == 1.0 and both.estimates["prior_free"].attack == "picker"
    (row,) = Board.from_records([picking(1.0, 0.0)]).rows
    assert row.estimates["psnr_free"].value is None and row.estimates["psnr_free"].reason == PICKED


def test_the_column_is_written_where_a_row_has_a_value_and_only_there():
    with_it, without = (Board.from_records(made) for made in ([finding(14.0), picking(0.75)], [finding(14.0)]))
    for form in ("to_markdown", "to_latex"):
        assert "picked" in getattr(with_it, form)() and "0.75" in getattr(with_it, form)()
        assert "picked" not in getattr(without, form)()
    assert "picked" in with_it.to_text(width=60) and "picked" not in without.to_text(width=60)
    assert "prior_success_without_noise" in without.to_csv() and "0.75" in with_it.to_csv()


def test_the_sentence_tells_of_choices_by_themselves_with_chance_and_bound():
    made = [finding(20.0), picking(0.9), picking(0.3, noise="calibrated", bound=0.389)]
    (sentence,) = dict(reconstruction_summaries(Board.from_records(made).rows)).values()
    assert sentence.startswith("Without noise it LEAKS, finder finds images 9.0 [8.5, 9.5] dB better")
    assert (
        "; without noise picker picks the image out of 10 candidates in 0.90 [0.80, 1.00] of cases (0.10 by chance, no "
        "claim bounds it; 1 seed of 20 updates)"
    ) in sentence
    assert sentence.endswith(
        "; with noise picker picks the image out of 10 candidates in 0.30 [0.20, 0.40] of cases (0.10 by chance, 0.39 "
        "at most by the claim; 1 seed of 20 updates)."
    )
    assert "picker n/a" not in sentence and "no safety" not in sentence
    failed = picking(None)
    (sentence,) = dict(reconstruction_summaries(Board.from_records([failed]).rows)).values()
    assert sentence == "Without noise what picker picks is n/a (it failed: no safety)."


@subtests(
    "control, values, ok",
    [
        ("positive", (0.9, 1.0), True),
        ("positive", (0.25, 0.3), False),
        ("negative", (0.1, 0.15), True),
        ("negative", (0.0, 0.0), True),
        ("negative", (0.6, 0.61, 0.62), False),
        ("negative", (0.9,), False),
        ("negative", (0.15,), True),
    ],
)
def test_a_control_of_choices_is_measured_against_their_own_chance(control, values, ok):
    made = [picking(value, 0.08, seed=seed, control=control) for seed, value in enumerate(values)]
    (result,) = Board.from_records(made).controls
    assert result.ok == ok and "0.10 by picker" in result.measured and result.name.endswith("choice")


def test_images_and_choices_are_two_controls_and_what_failed_is_none():
    made = [finding(30.0, control="positive"), picking(1.0, control="positive")]
    results = {c.name.rpartition(", ")[2]: c for c in Board.from_records(made).controls}
    assert results.keys() == {"choice", "reconstruction"} and all(c.ok for c in results.values())
    assert "by finder" in results["reconstruction"].measured
    # Half of the expectations is not met by an attack that failed.
    failed = record("reconstruction", attack="finder", status="failed", reason="NaN", task=SHARED, control="positive")
    results = {c.name.rpartition(", ")[2]: c.ok for c in Board.from_records([made[1], failed]).controls}
    assert results == {"choice": True, "reconstruction": False}
    gone = picking(None, control="negative")
    assert [c.ok for c in Board.from_records([gone]).controls] == [False]


def test_a_refuted_claim_says_what_was_picked_and_what_is_allowed():
    (violation,) = Board.from_records(
        [picking(0.9, noise="calibrated", bound=0.389, flags=("claim_violated",))]
    ).violations
    assert "prior_success 0.90 [0.80, 1.00], rero_bound 0.39" in violation.sentence
