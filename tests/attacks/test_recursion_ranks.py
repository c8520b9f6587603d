"""Ranks of layers' equations, with and without a mask."""

import pytest
import torch
from torch import nn

from leakbench.attacks.core import RankDeficient
from leakbench.attacks.core.closed_form.recursion.convolution import Convolved, KernelGeometry, WeightGradient
from leakbench.attacks.core.closed_form.recursion.forward import derivatives
from leakbench.attacks.core.closed_form.recursion.invert import inverted_inputs, layers_of
from leakbench.attacks.core.closed_form.recursion.ranks import random_mask, rank_analysis
from leakbench.benchmarks import models

from .recursion_cases import case, described
from .recursion_networks import LEAKY, built, conv


def test_ranks_are_those_of_the_stacked_matrices_with_and_without_a_mask():
    model = built("biases and strides")
    network = case(model, (1, 6, 6)).network
    for seen in (None, random_mask(network, 0.6, seed=1)):
        reports = rank_analysis(network, seen, seed=3)
        assert [one.layer for one in reports] == [1, 2, 3]
        coins = torch.Generator().manual_seed(3)
        inputs = torch.randn(1, 1, 6, 6, generator=coins, dtype=torch.float64)
        slopes = derivatives(network, inputs, label=0)
        for report, one in zip(reports[:2], layers_of(network), strict=False):
            below = {each.name: each.shape for each in network.operations}[one.inputs[0]]
            geometry = KernelGeometry(one.settings, below, one.shape, torch.device("cpu"))
            shown = None if seen is None else seen[str(one.weight)]
            weight = network.parameters[str(one.weight)].double()
            gradient = WeightGradient(slopes[one.name], geometry, tuple(weight.shape), shown).columns().T
            output = Convolved(weight, geometry).columns().T
            stacked = torch.cat([gradient / gradient.norm(), output / output.norm()])
            expected = [int(torch.linalg.matrix_rank(each, rtol=1e-6)) for each in (output, gradient, stacked)]
            assert [report.rank_outputs, report.rank_gradients, report.rank] == expected
            assert report.deficit == report.unknowns - report.rank
            assert report.gradients == (gradient.abs().sum(dim=1) > 0).sum() if shown is None else int(shown.sum())
        assert reports[1].index == reports[1].deficit - reports[0].virtual
        assert reports[2].deficit == (0 if seen is None else int((~seen["5.weight"]).all(dim=0).sum()))


def test_counted_rows_decide_nothing():
    """A narrow layer has more equations than unknowns, and a deficit; the recursion raises just that."""
    torch.manual_seed(0)
    model = conv(nn.Conv2d(1, 12, 3, padding=1), LEAKY(0.2), nn.Conv2d(12, 5, 3, stride=2, padding=1), features=45)
    made = case(model, (1, 6, 6))
    report = rank_analysis(made.network)[1]
    assert report.outputs + report.gradients > report.unknowns > report.rank
    # Their dependence is that of every pair of filters, and more.
    assert report.rank <= report.rank_outputs + report.rank_gradients - 25
    with pytest.raises(RankDeficient) as refused:
        inverted_inputs(made.network, made.gradients)
    assert (refused.value.layer, refused.value.deficit) == (2, report.deficit)


def test_ranks_of_a_layer_before_a_sum_or_a_relu_count_what_is_known_of_its_output():
    reports = rank_analysis(case(built("identity skip"), (1, 6, 6)).network)
    assert [one.outputs for one in reports] == [144, 216, 0, 4]
    found = rank_analysis(case(built("relu, convolutions"), (1, 6, 6)).network)
    assert 0 < found[0].outputs < 576
    pooled_one = rank_analysis(case(built("average pooling before the activation"), (1, 6, 6)).network)[0]
    assert (pooled_one.outputs, pooled_one.rank) == (144, 36)
    with pytest.raises(ValueError, match="sparsity must be in"):
        random_mask(case(built("tanh"), (1, 6, 6)).network, 1.0)


GOLDEN = {
    "cnn6": [(3072, 3468, 576), (3468, 2916, 3888), (2916, 2916, 11664), (2916, 2916, 11664), (2916, 1600, 20736)],
    "cnn6_d": [(3072, 3468, 576), (3468, 1620, 2160), (1620, 2916, 6480), (2916, 2916, 11664), (2916, 1600, 20736)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_ranks_of_the_papers_networks(name):
    model = models.build(name, input_shape=(3, 32, 32), classes=1, seed=0)
    reports = rank_analysis(described(model, (3, 32, 32), 1).known_network())
    assert [(one.unknowns, one.outputs, one.gradients) for one in reports[:5]] == GOLDEN[name]
    assert [one.deficit for one in reports] == [0, 280 if name == "cnn6_d" else 0, 0, 0, 0, 0, 0]
    assert (reports[0].virtual, reports[1].index) == (396, -396 if name == "cnn6" else -116)
    assert reports[0].rank_outputs == 3072
    if name == "cnn6_d":
        assert (reports[1].rank, reports[1].rank_outputs, reports[1].rank_gradients) == (3188, 1620, 1968)
