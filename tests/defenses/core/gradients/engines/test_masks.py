"""Masks by parameter are those of the flat vector, and sums under them are those of rows, whatever is dropped."""

from itertools import pairwise as successive

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.defenses.core import (
    Block,
    Coordinates,
    Layout,
    StepPlan,
    clip,
    cross_entropy,
    normalize,
)
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.gradients.layerwise.layers.convolution import Convolution
from leakbench.defenses.core.gradients.layerwise.layers.convolution_settings import Geometry
from leakbench.defenses.core.gradients.layerwise.layers.kept_rows import KeptRows
from leakbench.defenses.core.gradients.layerwise.masks import SpanMasks
from leakbench.defenses.core.gradients.reference_sums import added_up

from .....parameters import pairwise, subtests
from .architectures import problem
from .duties import by_loop

# Which of so many coordinates are kept, whatever there is of them.
MASKS = {
    "nothing": lambda dim: torch.zeros(dim, dtype=torch.bool),
    "everything": lambda dim: torch.ones(dim, dtype=torch.bool),
    "one": lambda dim: torch.arange(dim) == dim // 2,
    "all but one": lambda dim: torch.arange(dim) != dim // 2,
    "a part": lambda dim: torch.arange(dim) < dim // 3,
    "every third": lambda dim: torch.arange(dim) % 3 == 0,
}


@given(sizes=st.lists(st.integers(0, 7), max_size=6), seed=st.integers(0, 99), inside=st.booleans())
def test_a_mask_by_parameter_is_that_of_the_flat_vector(sizes, seed, inside):
    dim, coins = sum(sizes), torch.Generator().manual_seed(seed)
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    # Out of order, as a pass back meets layers.
    spans = tuple(successive(edges))[::-1]
    mask = torch.rand(dim, generator=coins) < torch.rand(1, generator=coins)
    named = mask if inside else ~mask
    found = SpanMasks(named.nonzero().flatten(), dim, spans, inside=inside)
    for span in spans:
        own = mask[span[0] : span[1]]
        assert found.kept((span,)) == int(own.sum()) and torch.equal(found.of((span,)), own)
    if spans:
        assert found.kept(spans) == int(mask.sum())
        assert torch.equal(found.of(spans), torch.cat([mask[a:b] for a, b in spans]))


@pytest.mark.long
@subtests(
    "name, kind, entries",
    pairwise(["small_resnet", "conv2d_no_bias", "conv2d_groups", "weight_of_two_modules", "mlp"], [*MASKS], [1, 2, 4]),
)
def test_sums_under_a_mask_are_those_of_rows(name, kind, entries):
    made = problem(name)
    made = type(made)(made.model, made.inputs[:entries], made.targets[:entries])
    views = 1 if entries < 4 else 2
    layout, rows = Layout.of(made.model), by_loop(made).unflatten(0, (-1, views)).mean(dim=1)
    kept, norm = Coordinates.of(MASKS[kind](layout.dim)), float(rows.norm(dim=1).median())
    other = Coordinates.of(~MASKS[kind](layout.dim))
    blocks = [(kept, clip(norm / 2), 0.5), (other, normalize(norm, regulariser=0.01), 0.5)]
    for plan in (
        StepPlan(Block(codec=kept, bound=clip(norm / 2))),
        StepPlan(*(Block(codec=codec, bound=bound, share=share) for codec, bound, share in blocks)),
    ):
        engine = Layerwise(made.model, cross_entropy, layout)
        found = engine.sums(plan, made.inputs, made.targets, views=views)
        for one, wanted in zip(found, added_up(plan, lambda _: rows), strict=True):
            assert one.shape == wanted.shape
            assert float((one - wanted).norm()) <= 1e-9 * (1e-9 + float(wanted.norm()))


def images(count):
    coins = torch.Generator().manual_seed(0)
    geometry = Geometry(channels=(3, 5), kernel=(3, 2), stride=(1, 2), dilation=(1, 1), padding=(1, 0, 2, 1), groups=1)
    return torch.randn(count, 3, 7, 6, generator=coins), torch.randn(count, 5, 6, 4, generator=coins), geometry


@subtests("kind", MASKS)
@subtests("count", [1, 6])
def test_masked_norms_of_kept_rows_are_those_of_rows(kind, count):
    term = Convolution(*images(count))
    mask = MASKS[kind](term.size)
    rows = term.rows(slice(None)).double()
    term._of_rows(keep=True)
    made = term._kept
    assert isinstance(made, KeptRows)
    expected = (rows * mask).square().sum(dim=1)
    torch.testing.assert_close(made.masked_squares(mask).value, expected, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(made.squares().value, rows.square().sum(dim=1), rtol=1e-5, atol=0)
    bad = torch.arange(count) == 0
    left = torch.where(bad.unsqueeze(1), 0.0, rows)
    expected = (left * mask).square().sum(dim=1)
    torch.testing.assert_close(made.without(bad).masked_squares(mask).value, expected, rtol=1e-5, atol=1e-12)
