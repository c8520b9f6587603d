"""What is particular to AUTO-V: every example adds a vector of one length."""

from leakbench.defenses.auto_v import auto_v

from .bound_by_formula import NORMS, C, check_bound_of_any_method, check_formula, check_short_gradients

DEFENSE = auto_v(clip_norm=C, noise_multiplier=0.0)


def test_an_example_adds_what_the_formula_says():
    check_formula(DEFENSE, 1 / NORMS)  # C g / |g|


def test_it_is_a_bound_of_any_method():
    check_bound_of_any_method(auto_v(clip_norm=C), "normalize", 0.0)


def test_a_zero_gradient_stays_zero_and_a_tiny_one_has_the_weight_of_norm_zero():
    check_short_gradients(DEFENSE, 1 / 1e-6)
