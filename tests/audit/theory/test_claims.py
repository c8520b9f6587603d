"""Every claim agrees with its closed form, and verdicts say what follows from comparisons."""

import json
import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from leakbench.audit.theory import momentum, reconstruction, report, symmetry
from leakbench.audit.theory.claim import (
    Comparison,
    Measured,
    Panel,
    Setup,
    TheoryClaim,
    claim,
    mean_of,
    ratio_of,
    spread_of,
)
from leakbench.audit.theory.claims import CLAIMS, chosen

from ... import pretend_device
from ...parameters import subtests

SMALL = Setup(draws=40, data="digits", seed=7)
WRONG_IN_PAPERS = {"reconstruction_under_clipping", "momentum_velocity", "bytes_printed_by_pcdp"}


@pytest.mark.long
@subtests("name", [name for name in CLAIMS if name != "gradient_symmetry"])
def test_measurement_and_closed_form_agree(name, monkeypatch):
    monkeypatch.setattr(momentum, "STEPS", 40)  # closed forms are of runs of any length
    found = CLAIMS[name].examine(SMALL)
    assert found.expected, report.words(found)
    assert found.holds == (name not in WRONG_IN_PAPERS)
    assert found.claim.caveat or found.holds  # whoever prints a wrong claim says why it is


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("reconstruction_error", marks=pytest.mark.long),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("sparsification_sensitivity", "momentum_rule", "norm_gep", "gradient_symmetry")
        ),
    ],
)
def test_nothing_is_left_behind_on_the_cpu(name, monkeypatch):
    monkeypatch.setattr(momentum, "STEPS", 5)
    monkeypatch.setattr(symmetry, "FLIPS", 9)
    with pretend_device.device() as device:
        CLAIMS[name].examine(Setup(draws=4, data="digits", device=device))


def test_every_section_has_its_claims():
    assert {found.section for found in CLAIMS.values()} == {f"3.{number}" for number in range(1, 9)}
    assert {name for name, found in CLAIMS.items() if found.should_hold is False} == WRONG_IN_PAPERS
    assert all(name == found.name == found.measure.__name__ for name, found in CLAIMS.items())


def test_a_seed_gives_one_document_and_another_seed_another():
    name = "noise_norm"
    one, again, other = (CLAIMS[name].examine(replace(SMALL, seed=seed)).to_dict() for seed in (7, 7, 8))
    assert one == again != other


def test_the_expected_inverse_is_that_of_all_masks(monkeypatch):
    monkeypatch.setattr(reconstruction, "A", torch.tensor([0.2, 0.5, 1.0, 1.1, 3.0], dtype=torch.float64))
    monkeypatch.setattr(reconstruction, "DIM", 5)
    reconstruction.expected_inverse.cache_clear()
    squares = [0.04, 0.25, 1.0, 1.21, 9.0]
    for sparsity, size in ((0.0, 5), (0.4, 3), (0.6, 2)):
        inverses = [1 / (0.3 + sum(masked)) for masked in combinations(squares, size)]
        exact = sum(inverses) / len(inverses)
        assert reconstruction.expected_inverse(sparsity, offset=0.3) == pytest.approx(exact, rel=1e-8)
    reconstruction.expected_inverse.cache_clear()


def comparison(measured=1.0, closed=1.0, relation: Any = "=", tolerance=0.1):
    return Comparison(what="x", measured=measured, closed=closed, relation=relation, tolerance=tolerance)


def test_a_comparison_holds_within_its_tolerance_alone():
    assert comparison(1.09).holds and comparison(0.91).holds
    assert not comparison(1.11).holds and not comparison(0.89).holds
    assert comparison(0.1, relation="<=").holds and not comparison(1.2, relation="<=").holds
    assert comparison(5.0, relation=">=").holds and not comparison(0.8, relation=">=").holds


@subtests("relation", ["=", "<=", ">="])
def test_what_is_not_a_number_does_not_hold_and_is_null_in_json(relation):
    found = comparison(math.nan, relation=relation)
    assert not found.holds
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["measured"] is None


def test_intervals_are_five_standard_errors():
    draws = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert mean_of("x", draws + 3, 3.0).tolerance == pytest.approx(5 / math.sqrt(4000), rel=0.05)
    assert spread_of("x", 2 * draws, 2.0).tolerance == pytest.approx(5 * 2 / math.sqrt(2 * 4000), rel=0.1)
    ratio = ratio_of("x", 6 + draws, 3 + draws.flip(0), 2.0)
    # Var(a / b) = (Var a + 4 Var b) / (n E[b]^2) for independent draws.
    assert ratio.measured == pytest.approx(2.0, abs=ratio.tolerance)
    assert ratio.tolerance == pytest.approx(5 * math.sqrt(5 / 4000) / 3, rel=0.1)


def stated(*comparisons, should_hold: bool | None = True, caveat="", instead=()) -> TheoryClaim:
    @claim("3.1", "One is one.", should_hold=should_hold, caveat=caveat)
    def made(setup: Setup) -> Measured:
        return Measured(comparisons=comparisons, instead=instead)

    return made


GOOD, BAD = comparison(), comparison(9.0)


@subtests(
    ("made", "verdict", "expected"),
    [
        (stated(GOOD), "holds", True),
        (stated(GOOD, caveat="only here"), "holds with a caveat", True),
        (stated(GOOD, BAD, caveat="only here"), "does not hold", False),
        (stated(BAD, should_hold=False, instead=(GOOD,)), "does not hold", True),
        (stated(BAD, should_hold=False, instead=(BAD,)), "does not hold", False),
        (stated(GOOD, should_hold=False, instead=(GOOD,)), "holds", False),
        (stated(GOOD, should_hold=None), "holds", True),
        (stated(BAD, should_hold=None), "does not hold", True),
    ],
)
def test_the_verdict_follows_from_the_comparisons(made, verdict, expected):
    found = made.examine(SMALL)
    assert (found.verdict, found.expected) == (verdict, expected)
    assert (found.claim.name in report.summary([found]).partition("not as known: ")[2]) == (not expected)
    assert verdict in report.words(found) and "| " in report.markdown([found], SMALL)


def test_claims_are_chosen_by_name_in_the_order_of_the_table():
    assert [found.name for found in chosen(["norm_gep", "noise_norm", "norm_gep"])] == ["noise_norm", "norm_gep"]
    assert chosen([]) == list(CLAIMS.values())
    with pytest.raises(ValueError, match=r"no claim named 'noise_nrm'; there are sparsification_sensitivity, .*gep"):
        chosen(["noise_nrm"])


@subtests(("wrong", "sentence"), [({"seed": -1}, "seed must be at least 0"), ({"draws": 1}, "draws")])
def test_a_setup_that_measures_nothing_is_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Setup(**wrong)


def p_values(draw, repeats=40):
    """Of samples of 60 in two planes, by 39 flips each."""
    coins = torch.Generator().manual_seed(1)
    planes = torch.randn(2, 12, 2, generator=coins)
    return [symmetry.symmetry_p_value(draw(60, 12, coins) @ planes + 5, 39, coins) for _ in range(repeats)]


def test_symmetric_points_are_rejected_as_often_as_the_level_says():
    found = p_values(lambda n, d, coins: torch.randn(n, d, generator=coins))
    # 8 of 40 are expected below 0.2; more than 20 come up once in 100,000.
    assert sum(p <= 0.2 for p in found) <= 20
    assert sum(p > 0.5 for p in found) >= 7


def test_skewed_points_are_rejected_although_they_are_centred():
    found = p_values(lambda n, d, coins: torch.randn(n, d, generator=coins).exp() ** 2, repeats=10)
    assert sum(p <= 0.05 for p in found) >= 5


def test_energy_distance_of_a_point_and_its_mirror_image_by_hand():
    # Points -1 and 2 on a line: sum of |x_i + x_j| = 2 + 1 + 1 + 4, of |x_i - x_j| = 0 + 3 + 3 + 0.
    points = torch.tensor([[[-1.0], [2.0]]], dtype=torch.float64)
    assert symmetry.energy_distance(points @ points.mT) == pytest.approx(2 * (8 - 6) / (8 + 6))
    mirrored = torch.tensor([[[-1.0], [1.0]]], dtype=torch.float64)
    assert symmetry.energy_distance(mirrored @ mirrored.mT) == 0


def test_gradient_symmetry_has_a_p_value_and_a_panel_of_each(monkeypatch):
    monkeypatch.setattr(symmetry, "FLIPS", 9)
    found = CLAIMS["gradient_symmetry"].examine(replace(SMALL, seed=0))
    assert [panel.title.partition(",")[0] for panel in found.measured.panels] == [
        "whole",
        "projected by PCDP",
        "masked to 10 %",
    ]
    assert all(0 < one.measured <= 1 and one.n == symmetry.EXAMPLES for one in found.measured.comparisons)
    assert all(panel.points.shape == (symmetry.EXAMPLES, 2) for panel in found.measured.panels)
    assert found.expected and "of digits" in found.caveat


def test_the_default_data_are_mnist_only_where_they_are(monkeypatch, tmp_path):
    monkeypatch.delenv("LEAKBENCH_DATA", raising=False)
    assert symmetry.default_data() == "digits"
    monkeypatch.setenv("LEAKBENCH_DATA", str(tmp_path))
    assert symmetry.default_data() == "digits"
    (tmp_path / "MNIST").mkdir()
    assert symmetry.default_data() == "mnist"


def test_a_picture_is_a_png_and_the_same_one_again():
    panels = [Panel("whole", torch.randn(9, 2, generator=torch.Generator().manual_seed(0)))]
    content = report.picture(panels)
    assert content.startswith(b"\x89PNG") and content == report.picture(panels)
    assert report.picture([Panel("nothing", torch.zeros(2, 2))]).startswith(b"\x89PNG")
