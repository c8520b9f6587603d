"""What is particular to SPEAR by search; what it shares with `spear` is tested there."""

import pytest

from leakbench.attacks.core import RankDeficient
from leakbench.attacks.core.closed_form.keep_rate import random_update
from leakbench.attacks.spear_search import spear_search

from ..parameters import subtests
from . import toys


@pytest.mark.parametrize(("batch", "width"), [(1, 100), (8, 300), pytest.param(20, 1000, marks=pytest.mark.slow)])
def test_a_batch_is_found_by_few_descents(batch, width):
    """20 examples would take drawing rows about two million draws."""
    update, shared = random_update(batch, width=width, inputs=200, seed=1)
    result = spear_search(update, toys.generator(1))
    distance = (result.inputs[:, None] - shared.inputs[None]).square().mean(dim=2).amin(dim=0)
    assert distance.max() < 1e-20
    assert result.certified is not None and bool(result.certified.all()) and result.status == "ok"


def test_descents_that_do_not_find_every_direction_are_refused():
    update, _ = random_update(8, width=100, inputs=60, seed=1)
    with pytest.raises(RankDeficient, match="single out the 8 directions of the gradient, and those of 512 draws"):
        spear_search(update, toys.generator(1), starts=512)


@subtests("setting", ["starts", "iterations", "together"])
def test_settings_must_be_positive(setting):
    with pytest.raises(ValueError, match=f"{setting} must be at least 1, got 0"):
        spear_search(random_update(1, width=10, inputs=5)[0], None, **{setting: 0})
