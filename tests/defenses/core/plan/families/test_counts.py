"""Counts that a fraction stands for are those of exact arithmetic on the decimals that somebody wrote."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakbench.defenses.core import dealt, floor_of

from .....parameters import subtests

SETTINGS = [f"0.{digits:03d}" for digits in range(0, 1000, 7)] + ["0.9", "0.3", "0.1", "0.7", "0.999"]
"""As in a suite file."""


def test_a_product_that_rounds_to_below_a_whole_number_is_that_number():
    assert int(0.3 * (1 / 3) * 1000) == 99  # what this is for
    assert floor_of(0.3 * (1 / 3), 1000) == 100
    assert floor_of(0.29, 100) == 29 and int(0.29 * 100) == 28


@subtests("count", [1, 10, 250, 1000, 26_010, 550_570, 11_173_962])
def test_a_decimal_fraction_of_a_count_is_floored_as_in_exact_arithmetic(count):
    for setting in SETTINGS:
        assert floor_of(float(setting), count) == math.floor(Fraction(setting) * count), (setting, count)


@pytest.mark.long
@subtests("count", [1000, 26_010, 550_570])
@subtests("epochs", [2, 4, 7, 20, 48, 100])
def test_so_is_one_that_grows_epoch_by_epoch(count, epochs):
    for setting in SETTINGS:
        for epoch in range(epochs):
            exact = Fraction(setting) * Fraction(epoch, epochs - 1) * count
            found = floor_of(float(setting) * (epoch / (epochs - 1)), count)
            assert found == math.floor(exact), (setting, epoch, epochs, count)


@given(fraction=st.floats(0, 1), count=st.integers(0, 10**8))
def test_any_fraction_is_floored_to_within_what_floats_cannot_tell(fraction, count):
    exact = Fraction(fraction) * count
    found = floor_of(fraction, count)
    assert 0 <= found <= count
    assert math.floor(exact) <= found <= exact * (1 + Fraction(1, 2**49))


@given(total=st.integers(0, 1000), weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=8))
def test_what_is_dealt_out_adds_up_and_is_off_by_less_than_one(total, weights):
    found = dealt(total, [math.sqrt(weight) for weight in weights])
    whole = math.fsum(map(math.sqrt, weights))
    assert sum(found) == total
    assert all(abs(one - total * math.sqrt(w) / whole) < 1 + 1e-6 for one, w in zip(found, weights, strict=True))


def test_of_equal_remainders_the_first_get_one_more():
    assert dealt(100, [1.0, 1.0, 1.0]) == [34, 33, 33]
    assert dealt(101, [0.1, 0.1, 0.1]) == [34, 34, 33]
    assert dealt(10, [3.0, 1.0]) == [8, 2]  # 7.5 and 2.5
