"""The sentence of each defense on what still leaks: both floors count, failing is no safety, nothing has its power."""

import numpy as np
import pytest
from scipy import stats

from leakbench.leaderboard.board.aggregate import BoardCell, over_seeds
from leakbench.leaderboard.board.reconstruction_summary import detectable, reconstruction_summaries
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.records.record import write

from ..conftest import metric, record


def sought(*gains, attack="inverting_gradients", noise="none", half=None, **fields):
    """A record a seed, with these gains over (the mean, the match), and the record's own interval where given."""
    task = record("reconstruction").task | {"noise": noise}
    return [
        record(
            "reconstruction",
            attack=attack,
            seed=seed,
            task=task,
            metrics={
                "psnr": metric(12.0 + over_mean),
                "psnr_floor": metric(12.0),
                "psnr_match": metric(12.0 + over_mean - over_match),
                "gain_over_mean": metric(over_mean, half, n=4, detail={"detectable": 2.0}),
                "gain_over_match": metric(over_match, half, n=4, detail={"detectable": 3.0}),
            },
            **fields,
        )
        for seed, (over_mean, over_match) in enumerate(gains)
    ]


def said(*records):
    return dict(reconstruction_summaries(Board.from_records(records).rows))


def test_a_leak_is_above_both_floors_and_names_the_attack_and_its_gains():
    words = said(*sought((8.0, 6.0), (9.0, 7.0), (8.5, 6.5)), *sought((0.0, 0.1), (1, -1), (-1, 0), attack="weak"))
    # t(1 - 0.025 / 2; 2) = 6.205 for two attacks, times 0.5 / sqrt(3).
    assert words["dp_sgd"].startswith(
        "Without noise it LEAKS, inverting_gradients finds images 8.5 [6.7, 10.3] dB better than the mean public image "
        "and 6.5 [4.7, 8.3] dB better than the best public match (3 seeds of 4 images)"
    )
    only_mean = said(*sought((8.0, 0.2), (9.0, -0.3), (8.5, 0.1)))["dp_sgd"]
    assert "LEAKS" not in only_mean and "is not shown to find more than public images have" in only_mean


def test_where_nothing_is_found_the_sentence_says_what_would_have_been():
    gains = [(-0.5, 0.2), (0.5, -0.3), (0.1, 0.0)]
    words = said(*sought(*gains), *sought(*gains, noise="calibrated"))["dp_sgd"]
    assert words.count("would have been found with a chance of 80%") == 2
    first = np.array(gains)[:, 0]
    expected = (stats.t.ppf(0.975, 2) + stats.t.ppf(0.8, 2)) * first.std(ddof=1) / 3**0.5
    assert f"{expected:.1f} dB would have been found" in words
    # Of one seed the records' own intervals count, with the figure of the scorer.
    assert "3.0 dB would have been found" in said(*sought((0.5, 0.2), half=1.0))["dp_sgd"]


@pytest.mark.long
def test_a_gain_that_is_called_detectable_is_found_as_often_as_stated():
    draw = np.random.default_rng(0)
    found = []
    for _ in range(300):
        values = draw.normal(size=5)
        cell = BoardCell(
            kind="reconstruction", attack="a", noise="none",
            records={r.seed: r for r in sought(*((v, v) for v in values))},
        )  # fmt: skip
        least = detectable(over_seeds("gain_over_mean", cell), cell)
        # The same noise, with a true gain of what is detectable at the true spread.
        true = (stats.t.ppf(0.975, 4) + stats.t.ppf(0.8, 4)) / 5**0.5
        assert least == pytest.approx(true * values.std(ddof=1))
        low = over_seeds("gain_over_mean", cell).low
        found.append(low is not None and low + true > 0)
    assert 0.7 < np.mean(found) < 0.9


def test_one_image_has_no_verdict_and_a_failed_attack_is_no_safety():
    one = sought((20.0, 18.0))
    assert (
        "no verdict, for inverting_gradients gains 18.0 dB over public images with no interval" in said(*one)["dp_sgd"]
    )
    failed = record(
        "reconstruction", attack="inverting_gradients", status="failed", reason="NaN", task=one[0].task, seed=1
    )
    calm = sought((0.1, 0.2), half=1.0, attack="weak")
    assert "inverting_gradients failed: no safety" in said(*calm, failed)["dp_sgd"]
    reason = "the attack failed"
    gone = [
        record(
            "reconstruction", attack="inverting_gradients",
            metrics={name: metric(None, reason=reason) for name in ("psnr", "gain_over_mean", "gain_over_match")},
        )
    ]  # fmt: skip
    assert said(*gone)["dp_sgd"] == (
        "Without noise it is not known what leaks (inverting_gradients n/a (the attack failed): no safety)."
    )


def test_a_large_gain_of_too_few_images_is_undecided_and_not_nothing():
    words = said(*sought((30.0, 25.0), (6.0, 4.0)))["dp_sgd"]
    assert words.startswith("Without noise it is UNDECIDED: inverting_gradients gains 14.5 dB over public images")
    assert "is not shown to find" in said(*sought((3.0, 2.0), (1.0, 0.5)))["dp_sgd"]


def test_more_attacks_need_a_larger_gain():
    close = [(2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]  # t interval [0.5, 5.5] by itself
    assert "LEAKS" in said(*sought(*close))["dp_sgd"]
    calm = [(0.0, 0.0), (0.1, 0.1), (-0.1, -0.1)]
    many = [r for k in range(9) for r in sought(*calm, attack=f"weak_{k}")]
    assert "LEAKS" not in said(*sought(*close), *many)["dp_sgd"]


def test_negative_controls_and_rows_without_images_have_no_sentence():
    assert said(*sought((1.0, 1.0), control="negative", defense="sgd"), record()) == {}


def test_page_text_and_json_say_the_same(tmp_path):
    records = sought((8.0, 6.0), (9.0, 7.0), (8.5, 6.5))
    for one in records:
        write(one, tmp_path / "records")
    board = Board.from_records(records)
    (sentence,) = said(*records).values()
    assert board.to_dict()["still_leaks"] == {"dp_sgd": sentence}
    assert f"Images of dp_sgd: {sentence}" in board.to_markdown()
    page = build(tmp_path, tmp_path / "page").read_text(encoding="utf-8")
    assert "What still leaks of images" in page and sentence in page
