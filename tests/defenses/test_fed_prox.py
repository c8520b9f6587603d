"""What is particular to FedProx: the proximal term against autograd, behind the noise; its limits and refusals."""

from dataclasses import replace

import pytest
import torch

from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.fed_prox import Proximal, fed_prox

from .federated_runs import EVERYBODY, FEDERATION, federated, parameters, round_at


def test_the_term_is_the_gradient_of_half_mu_times_the_squared_distance():
    draw = torch.Generator().manual_seed(0)
    point, theta, update = (torch.randn(43, generator=draw) for _ in range(3))
    leaf = point.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(0.5 * 0.3 * (leaf - theta).square().sum(), leaf)
    here = round_at(theta)
    torch.testing.assert_close(Proximal(mu=0.3).correct(None, here, point, update), update + gradient)


def test_with_one_local_step_or_mu_0_it_is_fed_avg_bit_for_bit():
    one = replace(FEDERATION, local_steps=1)
    plain = federated(fed_avg(noise_multiplier=1.3), federation=one)
    assert torch.equal(
        parameters(federated(fed_prox(mu=10.0, noise_multiplier=1.3), federation=one)), parameters(plain)
    )
    several = federated(fed_avg(noise_multiplier=1.3))
    assert torch.equal(parameters(federated(fed_prox(mu=0.0, noise_multiplier=1.3))), parameters(several))


def test_a_stronger_pull_keeps_clients_nearer_to_the_global_model():
    lengths = []
    for mu in (0.0, 0.5, 2.0):
        run = federated(fed_prox(mu=mu, noise_multiplier=1.3), schedule=EVERYBODY)
        lengths.append(torch.stack([m.tensors["values"] for m in run.rounds[0].messages.values()]).norm())
    assert lengths[0] > lengths[1] > lengths[2]


def test_the_pull_is_not_clipped():
    """Inside the bound, a clip norm of 0.001 would leave nothing of it."""
    free, pulled = (
        federated(fed_prox(clip_norm=1e-3, mu=mu, noise_multiplier=1.0), schedule=EVERYBODY) for mu in (0.0, 1.0)
    )
    first, second = (run.rounds[0].messages[0].tensors["values"] for run in (free, pulled))
    assert second.norm() < 0.8 * first.norm()


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_strength_that_is_no_number_of_at_least_0_is_refused(mu):
    with pytest.raises(ValueError, match="mu must be at least 0 and finite"):
        fed_prox(mu=mu)
