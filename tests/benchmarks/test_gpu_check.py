"""The check of a GPU, on a CPU with small sizes."""

import pytest
import torch

from leakbench.benchmarks.gpu_check import contributions
from leakbench.benchmarks.gpu_check.contributions import GHOST, HOOKS, LIMIT, OURS


def longest(way, network):
    return contributions.longest(way, network, device="cpu", precision="float32", small=True, seeds=1)


@pytest.mark.parametrize("network", contributions.NETWORKS)
def test_no_example_whose_positions_cancel_adds_more_than_its_bound(network):
    found = longest(OURS, network)
    assert 0.999 < found.length <= LIMIT, found


def test_the_positions_of_an_example_cancel_up_to_its_difference():
    network = "linear layer over positions"
    model = contributions.build(network)
    *_, example = contributions.examples(network, model, (256,), 1)
    derivatives = (model(example.inputs) - example.targets).detach().double()
    terms = example.inputs.double().norm(dim=2) * derivatives.norm(dim=2)
    assert example.case == "256, 0.002, seed 0"
    assert 1e-6 < example.gradient / float(terms.sum()) < 2e-3


@pytest.mark.peers
@pytest.mark.parametrize("network", contributions.NETWORKS)
def test_opacus_exceeds_its_bound_by_ghost_clipping_and_not_by_hooks(network):
    ghost, hooks = longest(GHOST, network), longest(HOOKS, network)
    assert 0.99 < hooks.length <= LIMIT, hooks
    assert ghost.length > 1.01, (
        f"{ghost}: Opacus's ghost clipping bounds examples whose positions cancel, and its row and section in "
        "docs/comparison.md, which hold for Opacus 1.6.0, must say from which version on"
    )


@pytest.mark.peers
def test_the_contribution_of_a_linear_layer_by_ghost_clipping_is_not_clipped_at_all():
    found = longest(GHOST, "linear layer over positions")
    assert found.length == pytest.approx(1 / found.bound, rel=1e-3) and found.bound == min(contributions._SHARES)


def test_networks_have_the_same_weights_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    a, b = (contributions.build("convolution") for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())
