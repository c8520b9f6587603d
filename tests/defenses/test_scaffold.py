"""What is particular to SCAFFOLD: its invariants, its noise, its two options, and what they send."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from leakbench.defenses.core import Recipe, RoundSchedule, full
from leakbench.defenses.core.federated.rounds import OngoingFederation
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.scaffold import ControlVariates, scaffold

from ..parameters import subtests
from .duties import DATA, network
from .federated_runs import EVERYBODY, FEDERATION, SHARDS, federated, parameters

NOISY: dict[str, Any] = {"noise_multiplier": 1.3}


def ongoing(method, **settings):
    """A finished loop with its states, and the updates of every local step."""
    found = {}
    original = OngoingFederation.run

    def kept(self):
        found["state"] = self.state
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OngoingFederation, "run", kept)
        run = federated(method, **settings)
    return run, found["state"]


def test_the_servers_variate_is_the_mean_of_all_clients_and_each_is_the_mean_of_its_noisy_updates():
    schedule = RoundSchedule(((0, 1, 2), (1, 3), (0, 1)))
    updates = {}

    class Recorded(ControlVariates):
        def correct(self, state, round, point, update):
            updates.setdefault((round.number, float(state[0].sum()), id(state[0])), []).append(update.clone())
            return super().correct(state, round, point, update)

    method = scaffold(**NOISY)
    rule = Recorded()
    run, state = ongoing(replace(method, rule=rule), schedule=schedule)
    controls = [client.state[0] for client in state.clients.values()]
    torch.testing.assert_close(state.server[0], torch.stack(controls).mean(dim=0), rtol=0, atol=1e-6)
    means = [torch.stack(steps).mean(dim=0) for steps in updates.values()]
    for client, last in ((0, 2), (1, 2), (2, 0), (3, 1)):
        own = state.clients[client].state[0]
        assert min((mean - own).abs().max() for mean in means) < 1e-6, (client, last)
    assert run.rounds[0].bytes_up[0] == 8 * 43


def test_one_client_is_fed_avg_and_so_is_the_first_round():
    alone = RoundSchedule(((0,),) * 3)
    plain = federated(fed_avg(**NOISY), shards=[DATA], schedule=alone)
    controlled = federated(scaffold(**NOISY), shards=[DATA], schedule=alone)
    torch.testing.assert_close(parameters(controlled), parameters(plain), rtol=0, atol=1e-6)
    several, first = federated(scaffold(**NOISY), schedule=EVERYBODY), federated(fed_avg(**NOISY), schedule=EVERYBODY)
    assert torch.equal(several.rounds[1].parameters, first.rounds[1].parameters)
    assert not torch.equal(several.rounds[2].parameters, first.rounds[2].parameters)


@pytest.mark.long
@subtests(("members", "factor"), [(8, 1.0), (4, 1.5), (2, 1.75)])
def test_noise_of_the_mean_is_2_less_m_over_k_times_fed_avgs(members, factor):
    """Second participation of K = 8 clients, m at a time: variances of the global model's move, on black images."""
    black = [(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64))] * 8
    groups = [tuple(range(start, start + members)) for start in range(0, 8, members)]
    schedule = RoundSchedule((*groups, groups[0]))
    federation = replace(FEDERATION, rounds=len(schedule.rounds), local_steps=2)
    variances = []
    for method in (fed_avg, scaffold):
        moves = []
        for key in range(30):
            run = federated(
                method(clip_norm=1e-6, noise_multiplier=1e6), shards=black, schedule=schedule, federation=federation,
                sampling=full(), key=key,
            )  # fmt: skip
            last = run.rounds[-1]
            moves.append(parameters(run) - last.parameters)
        variances.append(torch.stack(moves).var())
    assert variances[1] / variances[0] == pytest.approx(factor, rel=0.17)  # 1,290 numbers: four deviations


def test_a_server_that_stores_the_variates_gets_half_the_bytes_and_the_same_model():
    sent, stored = (federated(scaffold(stored=stored, **NOISY), schedule=EVERYBODY) for stored in (False, True))
    torch.testing.assert_close(parameters(sent), parameters(stored), rtol=0, atol=1e-6)
    assert (sent.rounds[1].bytes_up[0], stored.rounds[1].bytes_up[0]) == (8 * 43, 4 * 43)
    assert sent.rounds[1].bytes_down == stored.rounds[1].bytes_down == dict.fromkeys(range(4), 8 * 43)


def test_under_a_schedule_of_rates_the_variate_is_the_mean_weighted_by_them():
    run = federated(scaffold(**NOISY), schedule=EVERYBODY, recipe=Recipe(schedule="linear"))
    rates = [0.3 * (1 - step / 12) for step in range(4)]
    change, delta = (run.rounds[0].messages[0].extras["control"], run.rounds[0].messages[0].tensors["values"])
    torch.testing.assert_close(change, -delta / sum(rates))


def test_option_one_sends_the_change_of_a_noisy_mean_gradient_at_the_global_model():
    method = scaffold(clip_norm=1e3, control="gradient", control_noise_multiplier=1e-6, noise_multiplier=1e-6)
    run = federated(method, sampling=full(), schedule=EVERYBODY)
    model = network()
    for client in range(4):
        loss = torch.nn.functional.cross_entropy(model(SHARDS[client][0]), SHARDS[client][1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(run.rounds[0].messages[client].extras["control"], expected, rtol=0, atol=5e-3)


def test_what_breaks_its_algebra_is_refused():
    for recipe in (Recipe(momentum=0.5), Recipe(optimizer="adam")):
        with pytest.raises(ValueError, match="scaffold must have plain SGD"):
            federated(scaffold(**NOISY), recipe=recipe)
    with pytest.raises(ValueError, match="stored must be False for control='gradient'"):
        scaffold(control="gradient", stored=True)
    with pytest.raises(Exception, match="control"):
        scaffold(control="both")  # pyright: ignore[reportArgumentType]  refused
