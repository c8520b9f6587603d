"""What is particular to AUTO-S: its formula, and that it is a bound of any method."""

import pytest

from leakbench.defenses.auto_s import auto_s

from .bound_by_formula import NORMS, C, check_bound_of_any_method, check_formula, check_short_gradients

DEFENSE = auto_s(clip_norm=C, gamma=0.02, noise_multiplier=0.0)


def test_an_example_adds_what_the_formula_says():
    check_formula(DEFENSE, 1 / (NORMS + 0.02))  # C g / (|g| + gamma)


def test_it_is_a_bound_of_any_method():
    check_bound_of_any_method(auto_s(clip_norm=C), "normalize", None)


def test_a_zero_gradient_stays_zero_and_a_tiny_one_has_the_weight_of_norm_zero():
    check_short_gradients(DEFENSE, 1 / 0.02)


def test_without_its_regulariser_it_is_another_form():
    with pytest.raises(ValueError, match="must be positive, got"):
        auto_s(gamma=0.0)
