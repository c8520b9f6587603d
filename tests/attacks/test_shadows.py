"""Shadow models' answers, the halves that they are trained on, and the views that they are asked about."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.attacks.core import NotApplicable, Shadows, balanced_halves, viewed
from leakbench.attacks.core.membership.shadow_statistics import normal

from . import toys


@given(count=st.integers(2, 41), pairs=st.integers(1, 6), seed=st.integers(0, 99))
def test_everybody_is_in_exactly_half_of_the_models_and_sizes_even_out(count, pairs, seed):
    member = balanced_halves(count, 2 * pairs, toys.generator(seed))
    assert (member.sum(0) == pairs).all()
    assert torch.equal(member[::2], ~member[1::2])
    sizes = member.sum(1)
    assert int(sizes.max() - sizes.min()) <= count % 2
    if pairs % 2 == 0:  # first models of pairs, together
        assert int(sizes[::2].sum()) == pairs * count // 2


def test_the_first_models_of_many_are_those_of_few():
    few, many = (balanced_halves(31, models, toys.generator(1)) for models in (4, 16))
    assert torch.equal(few, many[:4]) and not torch.equal(many[:2], many[2:4])


def test_nobody_can_be_halved_and_no_odd_number_of_models_does_it():
    with pytest.raises(ValueError, match="even number"):
        balanced_halves(10, 5, toys.generator(0))
    with pytest.raises(ValueError, match="at least 2, got 1"):
        balanced_halves(1, 4, toys.generator(0))


def test_deviations_have_the_degrees_of_freedom_of_the_chosen_models():
    values = torch.randn(7, 2, 1, generator=toys.generator(0), dtype=torch.float64)
    chosen = torch.ones(7, 2, dtype=torch.bool)
    chosen[4:, 1] = False
    parts = values[:, 0, 0], values[:4, 1, 0]
    own = normal(values, chosen, "per_example")
    torch.testing.assert_close(own.mean[:, 0], torch.stack([part.mean() for part in parts]))
    torch.testing.assert_close(own.deviation[:, 0], torch.stack([part.std(correction=1) for part in parts]))
    squares = sum(float((part - part.mean()).square().sum()) for part in parts)
    pooled = normal(values, chosen, "pooled").deviation
    torch.testing.assert_close(pooled, torch.full_like(pooled, (squares / (6 + 3)) ** 0.5))


def test_views_are_the_image_its_mirror_image_and_both_moved_by_a_pixel():
    image = torch.arange(12.0).reshape(1, 1, 3, 4)
    seen = viewed(image, 18)
    assert seen.shape == (1, 18, 1, 3, 4)
    assert torch.equal(seen[:, 0], image) and torch.equal(seen[:, 1], image.flip(-1))
    assert torch.equal(seen[:, 3], seen[:, 2].flip(-1))
    inner = {tuple(view[0, 1:2, 1:3].flatten().tolist()) for view in seen[0, ::2]}
    # The middle of the image moved each way: nine different contents.
    assert len(inner) == 9 and torch.equal(viewed(image, 5), seen[:, :5])
    assert torch.equal(viewed(torch.zeros(3, 7), 1), torch.zeros(3, 1, 7))


def test_views_of_what_is_no_image_and_more_than_there_are_are_refused():
    with pytest.raises(NotApplicable, match="views are of images"):
        viewed(torch.zeros(2, 5), 2)
    for views in (0, 19):
        with pytest.raises(ValueError, match=r"views must be in \[1, 18\]"):
            viewed(torch.zeros(2, 1, 4, 4), views)


def test_answers_that_do_not_fit_or_of_diverged_models_are_refused():
    logits, member = torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="trained_on must say of each model"):
        Shadows(logits=logits, trained_on=member[:, :2])
    with pytest.raises(ValueError, match="same 2 models, got 3"):
        Shadows(logits=logits, trained_on=member, population=torch.zeros(3, 5, 4))
    with pytest.raises(ValueError, match="leave diverged ones out"):
        Shadows(logits=logits + torch.nan, trained_on=member)
