"""PSNR against what is swept: lines of rows that differ in that setting alone, and nothing where there is no number."""

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.page.figures import sweeps

from ...parameters import subtests
from ..conftest import metric, record


def swept(setting, values, noise="none", defense="random_sparsification", psnr=20.0, **settings):
    """A record for each value of the setting, with a PSNR that falls."""
    return [
        record(
            "reconstruction",
            defense=defense,
            defense_settings={setting: value, **settings},
            attack="inverting_gradients",
            task=record("reconstruction").task | {"noise": noise},
            metrics={"psnr": metric(psnr - place, 0.5), "psnr_floor": metric(11.0)},
        )
        for place, value in enumerate(values)
    ]


def figures(*records):
    return {figure.title: figure for figure in sweeps(Board.from_records(records).rows, "s1")}


def test_sparsity_and_rank_have_a_plot_for_each_variant():
    found = figures(
        *swept("final_sparsity", [0.0, 0.5, 0.9]),
        *swept("final_sparsity", [0.0, 0.5, 0.9], noise="calibrated"),
        *swept("rank", [10, 100, 1000], defense="rpdp"),
    )
    assert set(found) == {
        "PSNR against sparsity, no noise", "PSNR against sparsity, with noise", "PSNR against rank, no noise"
    }  # fmt: skip
    ranks = found["PSNR against rank, no noise"]
    assert "rpdp (rank=1000): PSNR 18.0 [17.5, 18.5] dB by inverting_gradients" in str(ranks.specification)
    assert "The mean public image has 11.0 dB" in " ".join(ranks.caption)


def test_what_differs_beside_the_sweep_makes_lines_of_their_own():
    found = figures(
        *swept("final_sparsity", [0.0, 0.5], clip_norm=0.1), *swept("final_sparsity", [0.0, 0.5], clip_norm=10.0)
    )
    (figure,) = found.values()
    assert figure.specification is not None
    rows = figure.specification["datasets"]["rows"]
    assert list(dict.fromkeys(row["series"] for row in rows)) == [
        "random_sparsification, clip_norm=0.1", "random_sparsification, clip_norm=10"
    ]  # fmt: skip
    assert len({row["path"] for row in rows}) == 2


def test_a_single_setting_is_no_sweep_and_a_missing_number_no_point():
    assert not figures(*swept("final_sparsity", [0.9]), *swept("drop_rate", [0.5], defense="random_dropping"))
    three = swept("final_sparsity", [0.0, 0.5, 0.9])
    gone = record(
        "reconstruction", defense="random_sparsification", defense_settings={"final_sparsity": 0.7},
        attack="inverting_gradients", metrics={"psnr": metric(None, reason="the attack failed")},
    )  # fmt: skip
    (figure,) = figures(*three, gone).values()
    assert "Not shown: random_sparsification (final_sparsity=0.7), the attack failed." in figure.caption
    assert "0.7): PSNR" not in str(figure.specification)


@subtests("value", [True, "many", None])
def test_a_setting_that_is_no_number_is_in_no_sweep(value):
    assert not figures(*swept("rank", [value, 10], defense="rpdp"))
