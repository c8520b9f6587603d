"""What is particular to NSGD: its formula, and that it is a bound of any method."""

import pytest

from leakbench.defenses.nsgd import nsgd

from .bound_by_formula import NORMS, C, check_bound_of_any_method, check_formula, check_short_gradients

DEFENSE = nsgd(clip_norm=C, regulariser=3.0, noise_multiplier=0.0)


def test_an_example_adds_what_the_formula_says():
    check_formula(DEFENSE, 1 / (NORMS + 3.0))  # C g / (|g| + r)


def test_it_is_a_bound_of_any_method():
    check_bound_of_any_method(nsgd(clip_norm=C), "normalize", 0.1)


def test_a_zero_gradient_stays_zero_and_a_tiny_one_has_the_weight_of_norm_zero():
    check_short_gradients(DEFENSE, 1 / 3.0)


def test_without_its_regulariser_it_is_another_form():
    with pytest.raises(ValueError, match="must be positive, got"):
        nsgd(regulariser=0.0)
