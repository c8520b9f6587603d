"""What is particular to FedPCDP: one basis a round at the global model, and coefficients that are the whole message."""

from dataclasses import replace

import pytest
import torch

from leakbench.defenses.core import Federated, Reachable, Recipe, Subspace, dense_message, share_outside
from leakbench.defenses.core.federated.local_training import LocalTrainer
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.pcdp import pcdp

from .federated_runs import EVERYBODY, LAYOUT, federated, parameters

RANK = 3
SIZE = sum(min(RANK, size) for size in LAYOUT.sizes)


def codec_of(run, number, client, step=0):
    codec = run.rounds[number].plans[client][step].plan.blocks[0].codec
    assert isinstance(codec, Subspace)
    return codec


def test_it_is_fed_avg_over_pcdp_with_a_basis_a_round():
    run = federated(fed_pcdp(rank=RANK, noise_multiplier=1.3), schedule=EVERYBODY)
    client = pcdp(rank=RANK, interval=4, noise_multiplier=1.3)
    other = federated(Federated(client=client, messages=Reachable()), schedule=EVERYBODY)
    assert torch.equal(parameters(run), parameters(other))


def test_all_steps_and_clients_of_a_round_share_a_basis_that_the_next_round_replaces():
    run = federated(fed_pcdp(rank=RANK, noise_multiplier=1.3), schedule=EVERYBODY)
    for number in range(3):
        assert {id(codec_of(run, number, client, step)) for client in range(4) for step in range(4)} == {
            id(codec_of(run, number, 0))
        }
    assert not torch.equal(codec_of(run, 0, 0).bases[0], codec_of(run, 1, 0).bases[0])


def test_a_message_is_all_of_the_displacement_and_of_the_summed_coefficients():
    """Plain SGD: minus the learning rate times the sum of the noisy coefficients over the expected batch."""
    run = federated(fed_pcdp(rank=RANK, noise_multiplier=1.3), schedule=EVERYBODY)
    dense = federated(
        Federated(client=fed_pcdp(rank=RANK, noise_multiplier=1.3).client, messages=Sent()), schedule=EVERYBODY
    )
    assert {*run.rounds[0].bytes_up.values()} == {4 * SIZE}
    for client in range(4):
        message, delta = (one.rounds[0].messages[client].tensors["values"] for one in (run, dense))
        assert message.numel() == SIZE
        codec = codec_of(run, 0, client)
        assert share_outside(delta, codec) < 2e-6
        torch.testing.assert_close(codec.decode(message), delta, rtol=0, atol=1e-5)


class Sent:
    """Sends everything."""

    def prepare(self, context):
        return None

    def check(self, round):
        pass

    def encode(self, delta, round):
        return dense_message(delta)

    def decode(self, message, round):
        return message.tensors["values"]


def test_a_full_rank_sends_as_many_numbers_as_fed_avg():
    run = federated(fed_pcdp(rank=50, noise_multiplier=1.3), schedule=EVERYBODY)
    assert {*run.rounds[0].bytes_up.values()} == {4 * LAYOUT.dim}


def test_parties_with_the_same_pool_seed_and_model_find_the_same_basis():
    first, again = (federated(fed_pcdp(rank=RANK, noise_multiplier=1.3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(codec_of(first, 0, 0).bases, codec_of(again, 0, 0).bases, strict=True))


def test_what_leaves_the_span_is_refused():
    method = fed_pcdp(rank=RANK, noise_multiplier=1.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTrainer, "run", None)  # before a client trains
        for recipe in (Recipe(optimizer="adam"), Recipe(optimizer=decaying)):
            with pytest.raises(ValueError, match="optimizer or client rule add other directions"):
                federated(method, recipe=recipe)
        with pytest.raises(ValueError, match="the server cannot compute the plans of the local steps"):
            federated(replace(method, client=pcdp(rank=RANK, noise_multiplier=1.3)))
        with pytest.raises(ValueError, match="no common subspace or mask"):
            federated(replace(method, client=dp_sgd(noise_multiplier=1.3)))
    with pytest.raises(ValueError, match="needs public data, got none"):
        federated(method, public=None)
    with pytest.raises(ValueError, match="public data must have at least 500 examples, got 120"):
        federated(fed_pcdp(rank=500, noise_multiplier=1.3))
    assert {*federated(method, recipe=Recipe(momentum=0.9)).rounds[0].kinds.values()} == {"coefficients"}


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=0.3, weight_decay=0.1)
