"""What is particular to FedPDP: FedPCDP with the projection after the noise."""

import pytest
import torch

from leakbench.defenses.core import Everything, Federated, Project
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.fed_pdp import fed_pdp
from leakbench.defenses.pdp import pdp

from .federated_runs import EVERYBODY, LAYOUT, federated, parameters


def test_it_is_fed_avg_over_pdp_with_a_basis_a_round_and_sends_coefficients():
    run = federated(fed_pdp(rank=3, noise_multiplier=1.3), schedule=EVERYBODY)
    other = federated(Federated(client=pdp(rank=3, interval=4, noise_multiplier=1.3)), schedule=EVERYBODY)
    assert torch.equal(parameters(run), parameters(other))
    assert {*run.rounds[0].kinds.values()} == {"coefficients"}
    assert {*run.rounds[0].bytes_up.values()} == {4 * sum(min(3, size) for size in LAYOUT.sizes)}


def test_the_whole_gradient_is_clipped_and_has_noise_before_it_is_projected():
    plan = federated(fed_pdp(rank=3, noise_multiplier=1.3)).rounds[0].plans[0][0].plan
    assert isinstance(plan.blocks[0].codec, Everything) and isinstance(plan.post, Project)


@pytest.mark.long
def test_at_a_bound_that_binds_nothing_and_without_noise_it_is_fed_pcdp():
    both = [method(clip_norm=1e3, rank=3, noise_multiplier=0.0) for method in (fed_pdp, fed_pcdp)]
    first, second = (parameters(federated(method, schedule=EVERYBODY)) for method in both)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    tight = [method(clip_norm=0.1, rank=3, noise_multiplier=0.0) for method in (fed_pdp, fed_pcdp)]
    first, second = (parameters(federated(method, schedule=EVERYBODY)) for method in tight)
    assert (first - second).norm() > 1e-3
