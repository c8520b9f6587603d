"""What is particular to FedAvg: the average, worked by hand, and the messages."""

from dataclasses import replace

import torch

from leakbench.defenses.core import Context, Federated, full
from leakbench.defenses.fed_avg import fed_avg

from .federated_runs import EVERYBODY, FEDERATION, SHARDS, federated


def test_a_round_of_one_full_step_is_a_step_on_the_clients_mean_update():
    """Two clients of 12 records without noise: the mean of both means of clipped gradients, times the learning rate."""
    one = replace(FEDERATION, local_steps=1)
    run = federated(fed_avg(clip_norm=0.3, noise_multiplier=0.0), federation=one, sampling=full(), lr=0.5)
    pooled = [(torch.cat([s[0] for s in SHARDS]), torch.cat([s[1] for s in SHARDS]))]
    central = federated(
        fed_avg(clip_norm=0.3, noise_multiplier=0.0), shards=pooled, federation=one, sampling=full(), lr=0.5
    )
    torch.testing.assert_close(run.rounds[1].parameters, central.rounds[1].parameters, rtol=0, atol=1e-6)


def test_messages_are_all_numbers_and_the_next_model_is_their_mean():
    run = federated(fed_avg(noise_multiplier=1.3), schedule=EVERYBODY)
    for before, after in zip(run.rounds, run.rounds[1:], strict=False):
        values = torch.stack([message.tensors["values"] for message in before.messages.values()])
        assert values.shape == (4, 43)
        torch.testing.assert_close(after.parameters - before.parameters, values.mean(dim=0), rtol=0, atol=1e-6)


def test_it_is_a_client_defense_and_nothing_else():
    method = fed_avg(clip_norm=0.4, bound="normalize", noise_multiplier=1.0)
    (block,) = method.client.plan(None, Context(step=0, steps=1, dim=3))[1].blocks
    assert (block.bound.kind, block.bound.norm) == ("normalize", 0.4)
    assert method == Federated(client=method.client, name="fed_avg")
