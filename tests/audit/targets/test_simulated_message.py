"""Messages of clients: simulated on the true data they are what was sent, for every method, rule and codec."""

import math
import re
from typing import Any

import dp_accounting
import pytest
import torch
from torch import Tensor, nn

from leakbench.attacks.bias_division import bias_division
from leakbench.attacks.core import Examples, NotApplicable, granted
from leakbench.attacks.inverting_gradients import inverting_gradients
from leakbench.attacks.label_recovery import label_recovery
from leakbench.attacks.rero import rero
from leakbench.attacks.sme import sme
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.targets.client_message import ClientMessage
from leakbench.audit.targets.observe import PublicKnowledge
from leakbench.audit.targets.simulated_message import (
    AFTER_THE_MESSAGE,
    SharedMessage,
    attacked_client,
    simulate_message,
    without_noise,
)
from leakbench.audit.targets.simulated_update import simulate_share
from leakbench.defenses.core import CropAndFlip, Federated, Recipe
from leakbench.defenses.core.federated.local_training import LocalTrainer

from ...parameters import long_but
from .test_observe import holds, reachable

SHAPE, CLASSES, LR = (1, 4, 4), 3, 0.3
EVERY = {
    "fed_avg": {"clip_norm": 0.4},
    "fed_prox": {"clip_norm": 0.4, "mu": 0.5},
    "scaffold": {"clip_norm": 0.4},
    "scaffold gradient": {"clip_norm": 0.4, "control": "gradient", "control_noise_multiplier": 0.0},
    "moon": {"clip_norm": 0.4},
    "fed_lrs": {"clip_norm": 0.4, "radius": 0.05, "penalty": 0.5},
    "pfa": {"clip_norm": 0.4, "rank": 5},
    "pfa full": {"clip_norm": 0.4, "variant": "full", "budgets": (2.0, 1.0)},
    "fed_pdp": {"clip_norm": 0.4, "rank": 5},
    "fed_pcdp": {"clip_norm": 0.4, "rank": 5},
    "percentile_filter": {"percentile": 60.0, "limit": 0.01},
    "dp_fed_avg": {"update_norm": 0.2},
    "local_noise_filter": {"update_norm": 0.1, "sensitivity": 0.1},
    "sgd": {},
    "dp_sgd": {"clip_norm": 0.4},
    "random_sparsification": {"clip_norm": 0.4, "final_sparsity": 0.6, "cooling": False},
    "random_freeze": {"clip_norm": 0.4},
    "posterior_freeze": {"clip_norm": 0.4},
    "pdp": {"clip_norm": 0.4, "rank": 5, "interval": 4},
    "pcdp": {"clip_norm": 0.4, "rank": 5, "interval": 4},
    "per_layer": {"clip_norm": 0.4},
    "gep": {"clip_norm": 0.4, "rank": 5},
    "dp_adam": {"clip_norm": 0.4},
}
CASES = [(name, steps) for name in EVERY for steps in (1, 4)]
UNKNOWN = {("dp_adam", 4), ("gep", 4)}


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()


def data(count: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, torch.arange(count) % CLASSES


def public() -> Examples:
    inputs, labels = data(40, seed=9)
    return Examples(ids=torch.arange(40), inputs=inputs, labels=labels)


KNOWN = PublicKnowledge(input_shape=SHAPE, classes=CLASSES, low=0.0, high=1.0, population=public())


def method(name: str, noise: float = 0.0) -> Federated:
    built = catalog.method(name.split()[0], EVERY[name])
    lifted = built if isinstance(built, Federated) else Federated(client=built, name=built.name)
    if noise:
        return lifted if lifted.noise_multiplier is not None or lifted.budgets else lifted.with_noise(noise)
    return without_noise(lifted)


def sent(name: str, steps: int = 1, noise: float = 0.0, count: int = 4, **settings) -> SharedMessage:
    usual = {"local_steps": steps, "batch": 2 if steps > 1 else None, "clients": 2, "rounds": 3, "lr": LR, "key": 5}
    usual |= {"public_knowledge": KNOWN, "population": public()}
    return simulate_message(net(), *data(count), method(name, noise), **usual | settings)


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_without_noise_the_same_data_simulate_the_message(name, steps):
    if (name, steps) in UNKNOWN:
        with pytest.raises(ValueError, match="cannot be shared as the sum of 4 local steps"):
            sent(name, steps)
        return
    shared = sent(name, steps)
    seen, (inputs, labels) = shared.observation, data()
    simulated = seen.simulate(inputs, labels)
    assert (simulated - seen.released).norm() < 1e-9 * seen.released.norm()
    as_shares = torch.eye(CLASSES, dtype=torch.float64)[labels]
    assert (seen.simulate(inputs, as_shares) - seen.released).norm() < 1e-9 * seen.released.norm()
    # Other data give another message.
    assert (
        seen.simulate(inputs.flip(0), labels.flip(0)[[1, 0, 3, 2]]) - seen.released
    ).norm() > 1e-3 * seen.released.norm()


def test_momentum_and_a_schedule_are_taken_into_account():
    recipe = Recipe(momentum=0.7, schedule="linear")
    shared = sent("fed_lrs", 4, recipe=recipe)
    seen = shared.observation
    assert (seen.simulate(*data()) - seen.released).norm() < 1e-9 * seen.released.norm()
    plain = sent("fed_lrs", 4).observation
    assert (plain.simulate(*data()) - seen.released).norm() > 0.1 * seen.released.norm()


@pytest.mark.parametrize("name", ["pfa", "percentile_filter", "fed_lrs", "local_noise_filter", "fed_pcdp"])
def test_a_codec_on_one_side_alone_is_noticed(name, monkeypatch):
    shared = sent(name, 4)  # what was sent is coded here
    monkeypatch.setattr(ClientMessage, "_coded", lambda self, delta: delta)
    if name == "local_noise_filter":  # its message is dense, and its bound is what one side would lack
        monkeypatch.setattr(ClientMessage, "_finished", lambda self, delta, state, beside: delta / -self._rate)
    simulated = shared.observation.simulate(*data())
    released = shared.observation.released
    assert simulated.shape != released.shape or (simulated - released).norm() > 1e-3 * released.norm()


@pytest.mark.parametrize(
    ("name", "rule"), [("fed_prox", "correct"), ("fed_lrs", "correct"), ("scaffold gradient", "finish")]
)
def test_a_client_rule_on_one_side_alone_is_noticed(name, rule, monkeypatch):
    shared = sent(name, 4)
    kind = type(method(name).rule)
    spoiled = {
        "correct": lambda self, state, round, point, update: update,
        "finish": lambda self, state, round, delta: (state, {"control": torch.zeros_like(delta)}),
    }
    monkeypatch.setattr(kind, rule, spoiled[rule])
    simulated = shared.observation.simulate(*data())
    assert (simulated - shared.observation.released).norm() > 1e-4 * shared.observation.released.norm()


CENTRAL = ["sgd", "dp_sgd", "random_sparsification", "pcdp", "per_layer"]


@pytest.mark.parametrize("name", CENTRAL)
def test_a_message_of_one_step_is_the_shared_update_of_the_same_defense(name):
    settings = {"lr": LR, "population": public(), "public_knowledge": KNOWN, "steps": 3, "seed": 0}
    central = simulate_share(net(), *data(), method(name).client, **settings).observation
    message = sent(name).observation
    # A direction's sign is arbitrary.
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(message.released.abs(), central.released.abs(), **close)
    others = data(seed=3)
    torch.testing.assert_close(message.simulate(*others).abs(), central.simulate(*others).abs(), **close)
    ours, theirs = (granted(seen.structure)().parts for seen in (message, central))
    assert [part.kind for part in ours] == [part.kind for part in theirs]


@pytest.mark.parametrize("name", [*EVERY])
def test_contributions_of_a_step_add_up_to_its_message_or_say_why_not(name):
    seen = sent(name).observation
    try:
        rows = seen.contributions(*data())
    except NotApplicable as reason:
        assert name in ("scaffold gradient", "percentile_filter", "local_noise_filter", "dp_adam"), reason
        return
    torch.testing.assert_close(rows.sum(dim=0) / seen.expected_batch, seen.released, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("name", "steps"), long_but(CASES[::3], [case for case in CASES if case not in UNKNOWN]))
def test_a_simulated_message_is_differentiable(name, steps):
    seen, (inputs, labels) = sent(name, steps).observation, data(seed=2)
    weights = torch.randn(len(seen.released), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = inputs.clone().requires_grad_()
    torch.autograd.gradcheck(lambda x: seen.simulate(x, labels) @ weights, (x,), fast_mode=True, atol=1e-4)
    if steps > 1:
        surrogate = seen.surrogate
        assert surrogate is not None
        share = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(lambda x, a: surrogate(x, labels, a) @ weights, (x, share), fast_mode=True, atol=1e-4)


NOISY = ["fed_avg", "fed_prox", "scaffold", "moon", "pfa", "pfa full", "fed_pcdp", "local_noise_filter"]
NOISY += ["random_sparsification", "random_freeze", "posterior_freeze", "pcdp", "per_layer"]


@pytest.mark.parametrize("steps", long_but([1], [1, 4]))
@pytest.mark.parametrize("name", NOISY)
def test_residuals_of_the_true_data_are_in_units_of_the_noise(name, steps):
    squares, count = 0.0, 0
    for key in range(12):
        # Small steps: noise then moves no gradient, and adds up as the deviation says.
        seen = sent(name, steps, noise=1.5, lr=1e-4, key=key).observation
        residual = seen.residual(seen.simulate(*data()))[granted(seen.noise_std) > 0]
        squares, count = squares + float(residual.square().sum()), count + len(residual)
    mean = squares / count
    assert abs(mean - 1) < 5 * (2 / count) ** 0.5 + 0.02, (mean, count)


@pytest.mark.parametrize(("name", "steps"), [("fed_avg", 1), ("fed_lrs", 1), ("fed_lrs", 4), ("moon", 4), ("pfa", 1)])
def test_a_message_leads_to_no_private_input_and_to_no_local_model(name, steps, monkeypatch):
    between = []
    real = LocalTrainer.run

    def watched(self, client, round, count):
        result = real(self, client, round, count)
        between.extend([result.delta, result.delta + round.parameters])
        return result

    monkeypatch.setattr(LocalTrainer, "run", watched)
    shared, (inputs, _) = sent(name, steps, noise=1.0), data()
    shared.observation.simulate(*data(seed=3))
    rows = inputs[:, 0, 0]
    assert holds(shared.truth, rows)  # the search finds what is there
    assert not holds(shared.observation, rows)
    tensors = [tensor.flatten().double() for tensor in reachable(shared.observation)]
    dense = shared.kind == "dense"
    for unsent in between[dense:]:
        assert not any(len(t) == len(unsent) and torch.allclose(t, unsent, rtol=0, atol=1e-9) for t in tensors)


def test_attacks_on_one_gradient_read_messages_of_one_step_and_say_that_others_are_none():
    generator = torch.Generator().manual_seed(0)
    _, labels = data()
    for name in ("fed_avg", "fed_lrs", "random_sparsification", "pfa"):
        found = label_recovery(sent(name).observation, generator)
        assert found.counts.sum() <= len(labels)
    assert torch.equal(label_recovery(sent("fed_avg").observation, generator).counts, labels.bincount(minlength=3))
    single = sent("fed_avg", count=1).observation
    torch.testing.assert_close(bias_division(single, generator).inputs, data(1)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(NotApplicable, match="a message of 4 local steps is no sum over examples"):
        label_recovery(sent("fed_avg", 4).observation, generator)
    with pytest.raises(NotApplicable, match="the codec PercentileMessages maps a sum of examples to no sum"):
        label_recovery(sent("percentile_filter").observation, generator)
    assert sme(sent("fed_lrs", 4).observation, generator, iterations=3).inputs.isfinite().all()
    with pytest.raises(NotApplicable, match=r"unrolling 4 local steps .* at most 3 are unrolled; sme needs one"):
        inverting_gradients(sent("fed_avg", 4, max_unroll=3).observation, generator, iterations=2)


@pytest.mark.long
def test_the_claim_is_of_the_message_and_of_its_unit():
    two_passes, one_step = sent("fed_avg", 4, noise=1.5), sent("fed_avg", 1, noise=1.5)
    mechanism = dp_accounting.pld.PLDAccountant()
    for shared, passes in ((two_passes, 2), (one_step, 1)):
        mechanism = dp_accounting.pld.PLDAccountant()
        mechanism.compose(dp_accounting.GaussianDpEvent(1.5), passes)
        claim = shared.claim(1e-5)
        assert claim.epsilon == pytest.approx(mechanism.get_epsilon(1e-5), rel=1e-3)
        assert claim.unit == "record"
    at_the_client, at_the_server = (
        sent(name, 4, noise=2.0).claim(1e-5) for name in ("local_noise_filter", "dp_fed_avg")
    )
    assert at_the_client.unit == at_the_server.unit == "client"
    assert at_the_client.relation == "replace_one"
    assert math.isinf(at_the_server.epsilon) and at_the_server.reason == AFTER_THE_MESSAGE


def test_noise_at_the_server_leaves_the_message_as_it_was():
    quiet, noisy = (sent("dp_fed_avg", 4, noise=noise).observation for noise in (0.0, 5.0))
    assert torch.equal(quiet.released, noisy.released)
    assert not granted(noisy.noise_std).any()
    # Its clipping is the server's, too.
    plain = sent("sgd", 4).observation
    assert torch.equal(noisy.released, plain.released)


def test_the_client_with_the_least_noise_is_attacked():
    assert attacked_client(method("pfa full", noise=1.0)) == 1
    assert sent("pfa full", noise=1.0).ledger.entries[0].noise_multiplier == 1.0


def test_examples_go_through_local_steps_in_their_order_as_the_server_knows():
    seen = sent("sgd", 2, batch=2).observation
    inputs, labels = data()
    theta = torch.cat([p.detach().flatten() for p in net().parameters()])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x, y in zip(inputs.split(2), labels.split(2), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - theta
    torch.testing.assert_close(seen.released, -moved / LR, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"recipe": Recipe(optimizer="adam")}, "local steps by SGD, with or without momentum, got adam"),
        ({"recipe": Recipe(augmentation=CropAndFlip(views=2))}, "local steps without augmentation"),
        ({"batch": 3}, "batch of local steps must divide the client's 4 examples, got 3"),
        ({"batch": 2, "local_steps": 3}, "local_steps must be whole epochs of 2 steps under partition sampling, got 3"),
    ],
)
def test_what_no_server_can_simulate_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        sent("fed_avg", **settings)


def test_a_model_with_dropout_is_refused():
    dropping = nn.Sequential(net(), nn.Dropout(0.2))
    with pytest.raises(ValueError, match="model must have no dropout for attacks on a message, got '1'"):
        simulate_message(dropping, *data(), method("fed_avg"), public_knowledge=KNOWN, key=0)


def test_a_step_that_may_be_taken_back_is_refused():
    tried = Federated(client=catalog.defense("dpsur", {"clip_norm": 0.4}).with_noise(1.0))
    with pytest.raises(ValueError, match="a plan tries its step first"):
        simulate_message(net(), *data(), tried, public_knowledge=KNOWN, key=0)


def test_a_prior_is_for_the_sums_of_one_step():
    generator = torch.Generator().manual_seed(0)
    first = Examples(
        ids=torch.arange(3), inputs=torch.cat([data()[0][:1], public().inputs[:2]]), labels=torch.zeros(3).long()
    )
    others = Examples(ids=first.ids, inputs=first.inputs, labels=torch.cat([data()[1][:1], public().labels[:2]]))
    found = rero(sent("random_sparsification", noise=0.01, prior=others, population=None).observation, generator)
    torch.testing.assert_close(found.inputs[0], data()[0][0])
    for name, steps in (("fed_avg", 4), ("pfa", 1)):
        with pytest.raises(NotApplicable, match="a prior is for a message of one step's sums"):
            sent(name, steps, prior=others)
