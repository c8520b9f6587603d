"""Settings that make no sense are refused in one sentence: argument, rule, value."""

import math

import pytest

from leakbench.defenses.core import refuse_count, refuse_fraction, refuse_unknown

from ....parameters import subtests


@subtests("value", [-0.1, 1.0, math.nan, math.inf])
def test_a_fraction_leaves_something(value):
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\), got"):
        refuse_fraction("rate", value)
    refuse_fraction("rate", 0.0)


@subtests(("value", "rule"), [(0, "at least 1"), (math.nan, "at least 1"), (2.5, "a whole number")])
def test_a_count_is_a_whole_number(value, rule):
    with pytest.raises(ValueError, match=f"steps must be {rule}, got {value}"):
        refuse_count("steps", value)
    with pytest.raises(ValueError, match="steps must be a whole number, got inf"):
        refuse_count("steps", math.inf)
    refuse_count("steps", None)
    refuse_count("steps", 0, 0)


def test_an_unknown_name_does_not_run_as_another():
    with pytest.raises(ValueError, match="clipping must be 'global', 'layer' or 'joint', got 'all'"):
        refuse_unknown("clipping", "all", ("global", "layer", "joint"))
