"""What is particular to DP-PSAC: its weight is C at norm zero, and largest in between."""

import pytest

from leakbench.defenses.psac import psac

from .bound_by_formula import NORMS, C, check_bound_of_any_method, check_formula, check_short_gradients

DEFENSE = psac(clip_norm=C, regulariser=0.2, noise_multiplier=0.0)


def test_an_example_adds_what_the_formula_says():
    check_formula(DEFENSE, 1 / (NORMS + 0.2 / (NORMS + 0.2)))  # C g / (|g| + r / (|g| + r))


def test_it_is_a_bound_of_any_method():
    check_bound_of_any_method(psac(clip_norm=C), "adaptive_weight", None)


def test_a_zero_gradient_stays_zero_and_a_tiny_one_has_the_weight_of_norm_zero():
    check_short_gradients(DEFENSE, 1.0)


def test_without_its_regulariser_it_is_another_form():
    with pytest.raises(ValueError, match="must be positive, got"):
        psac(regulariser=0.0)
