"""Claims of a client hold at any model that a server sends; a client that trusts the server for more is found out."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakbench.attacks.core import ImprintBlock
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.targets.chosen_models import ChosenModels, behind_block
from leakbench.audit.targets.observe import PublicKnowledge
from leakbench.defenses.core import Bound, Defense, Federated, Whole, poisson
from leakbench.defenses.core.federated.sides import local_round
from leakbench.defenses.core.plan.layout import Layout

from ...parameters import long_but, subtests
from .chosen_rounds import CLASSES, PUBLIC, RECORDS, SHAPE, Asked, bernoulli, excess, net

C, SIGMA = 0.5, 1.0
METHODS = {
    "fed_avg": ("fed_avg", {"clip_norm": C}),
    "masked": ("random_sparsification", {"clip_norm": C, "final_sparsity": 0.5, "cooling": False}),
    "projected": ("fed_pcdp", {"clip_norm": C, "rank": 8, "auxiliary_size": 16}),
}
LIMIT = 4.5  # standard deviations: once in 300,000 for one threshold


def built(name: str, noise: float = SIGMA, **changes: float) -> Federated:
    base, settings = METHODS[name]
    method = catalog.method(base, settings | changes)
    method = method if isinstance(method, Federated) else Federated(client=method, name=base)
    return method.with_noise(noise)


def flat_logits(model: nn.Module, growth: float = 8.0) -> Tensor:
    """A model with equal logits, at which every record has a large gradient: that of `active_membership`."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(growth)
        for parameter in [*model.children()][-1].parameters():
            parameter.zero_()
    return Layout.of(model).read(model)


def block() -> ImprintBlock:
    mean = PUBLIC[0].flatten(1).mean(dim=1)
    column = 100 * torch.randn(16, generator=torch.Generator().manual_seed(2))
    # The same function as of rows and columns of usual size, with gradients that are nearly all the block's.
    biases = -mean.quantile(torch.linspace(0, 1, 6)) / 100
    weight, back = torch.full((6, 16), 1 / 1600), column[:, None].repeat(1, 6)
    return ImprintBlock(weight=weight, bias=biases, back=back, shift=torch.zeros(16))


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_the_most_powerful_test_at_a_chosen_model_stays_under_the_claim_and_has_power(name):
    # A mask is drawn anew in every epoch, which full batches of the twins end elsewhere than samples.
    rate, rounds = 1.0 if name == "masked" else 0.5, 500
    client_run = Asked(built(name), bernoulli(rate), chosen=flat_logits(net()), rounds=rounds)
    claim = client_run.claim()
    assert 0 < claim.epsilon < 5
    inside, outside = client_run.scores(key=3, std=SIGMA * C)
    assert excess((inside, outside), claim) < LIMIT
    # It is the ratio itself: records have the norm C, so its advantage is near what is allowed, and not near 0.
    advantage = float((inside > 0).double().mean() - (outside > 0).double().mean())
    assert advantage > claim.advantage - 5 * math.sqrt(0.5 / rounds)
    assert claim.advantage > 5 * math.sqrt(0.5 / rounds)


@dataclass(frozen=True, kw_only=True)
class BlindToTheBlock(Bound):
    """A planted fault: rows are bounded by the norm of what is behind the server's block."""

    def __call__(self, rows: Tensor, least: Tensor | None = None) -> Tensor:
        norms = rows[:, -_BEHIND:].norm(dim=1, keepdim=True)
        return rows * (self.norm / norms.clamp(min=self.norm))


_BEHIND = sum(p.numel() for p in net().parameters())


@pytest.mark.long
@pytest.mark.parametrize("fault", ["none", "noise", "clip norm", "rate", "block"])
def test_a_client_that_takes_more_than_the_model_from_the_server_is_found_out(fault):
    """The claim is that of the client's own noise, clip norm and rate; the numbers are of what it does."""
    rate, rounds = (0.3, 700) if fault == "rate" else (1.0, 300)
    model, chosen = net(), flat_logits(net())
    if fault in ("block", "none"):
        model = behind_block(block(), model, SHAPE)
        chosen = Layout.of(model).read(model)
    claim = Asked(built("fed_avg"), bernoulli(rate), model=model, chosen=chosen).claim()
    method, done, std, engine = built("fed_avg"), rate, SIGMA * C, "auto"
    if fault == "noise":
        method, std = built("fed_avg", SIGMA / 2), SIGMA * C / 2
    if fault == "clip norm":
        method = built("fed_avg", SIGMA / 2, clip_norm=2 * C)
    if fault == "rate":
        done = 1.0
    if fault == "block":
        bound = BlindToTheBlock(kind="clip", norm=C)
        method, engine = Federated(client=Defense(Whole(bound=bound), noise_multiplier=SIGMA)), "torch.func"
    client_run = Asked(method, bernoulli(done), model=model, chosen=chosen, rounds=rounds, engine=engine)
    violation = excess(client_run.scores(key=5, std=std), claim)
    assert violation < LIMIT if fault == "none" else violation > LIMIT


EXTREME = {
    "huge": lambda p: p * 1e5,
    "overflowing": lambda p: p * 1e18,
    "of 1e30": lambda p: torch.full_like(p, 1e30) * p.sign(),
    "of the largest float": lambda p: torch.full_like(p, 3e38) * p.sign(),
    "tiny": lambda p: p * 1e-30,
    "zero": torch.zeros_like,
    "dead": lambda p: -p.abs() * 1e3,
    "alternating": lambda p: torch.where(torch.arange(p.numel()).view(p.shape) % 2 == 0, 1e12, -1e-12),
    "one-hot": lambda p: (
        torch.eye(max(p.shape), dtype=p.dtype)[: p.shape[0], : p.shape[-1]] * 1e6 if p.ndim == 2 else -p
    ),
}


@subtests("extreme", list(EXTREME))
@pytest.mark.parametrize("engine", ["auto", "torch.func"])
@pytest.mark.parametrize("name", long_but(["masked"], METHODS))
def test_a_record_moves_the_sum_by_at_most_the_clip_norm_at_extreme_models(name, engine, extreme):
    for activation in (nn.ReLU, nn.Tanh):
        model = net(activation)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(EXTREME[extreme](parameter))
        flat, sums = Layout.of(model).read(model), []
        assert bool(flat.isfinite().all())
        for records in (slice(0, 2), slice(0, 1)):
            client_run = Asked(built(name), bernoulli(1.0), model=net(activation), chosen=flat, engine=engine)
            client, steps = client_run.client(records, key=1, noise=False), []
            # Before the message, whose displacement of huge parameters rounds the sum away.
            client._federation.trainer.recorder = lambda _, step, steps=steps: steps.append(step)
            try:
                local_round(client, 0, {"parameters": flat.numpy().copy()})
            except ValueError as error:  # after the release: its rounded displacement leaves the span
                assert "must lie in the span of its round's plans" in str(error)
            sums.append(torch.cat(steps[0].noisy).double())
            assert client.ledger.steps == 1
        assert bool(sums[0].isfinite().all())
        assert float((sums[0] - sums[1]).norm()) <= C * (1 + 1e-5)


@subtests("broken", [math.nan, math.inf, -math.inf, 1e300])
def test_a_model_that_is_not_finite_is_refused_before_a_step_and_costs_nothing(broken):
    client_run = Asked(built("fed_avg"), poisson(0.5), rounds=2)
    client = client_run.client(slice(0, 2), key=1)
    flat = Layout.of(net()).read(net()).double().numpy().copy()
    good = flat.copy()
    flat[3] = broken
    with pytest.raises(ValueError, match=r"a global model must be finite, got NaN or infinity in 1 of its 243 numbers"):
        local_round(client, 0, {"parameters": flat})
    assert client.ledger.steps == 0
    assert local_round(client, 0, {"parameters": good})  # the round is not taken
    with pytest.raises(ValueError, match="must have the 243 numbers of the model"):
        local_round(client, 1, {"parameters": np.zeros(242)})


def models() -> ChosenModels:
    return ChosenModels(net(), PublicKnowledge(input_shape=SHAPE, classes=CLASSES, low=0.0, high=1.0), 2)


def test_models_of_other_names_shapes_or_numbers_are_refused_in_a_sentence():
    sent = models().parameters
    wrong = {
        "missing or unknown": {name: part for name, part in sent.items() if name != "1.bias"},
        "'9.weight' is": sent | {"9.weight": torch.zeros(1)},
        r"'1.bias' of a global model must have shape \[12\], got \[13\]": sent | {"1.bias": torch.zeros(13)},
        "must be finite": sent | {"1.bias": torch.full((12,), math.nan)},
    }
    for words, parameters in wrong.items():
        with pytest.raises(ValueError, match=words):
            models().built(parameters)
    with pytest.raises(ValueError, match="a block must have the tensors of ImprintBlock"):
        models().built(sent, {"weight": torch.zeros(2, 16)})
    small = {name: part[..., :15] for name, part in block().tensors.items()}
    small |= {"back": block().back[:15], "bias": block().bias}
    with pytest.raises(ValueError, match="a block must be of inputs of 16 numbers, got 15"):
        models().built(sent, small)
    for bias in (torch.full((6,), math.inf), torch.full((6,), -1e300, dtype=torch.float64)):
        with pytest.raises(ValueError, match="must be finite"):
            models().built(sent, block().tensors | {"bias": bias})


def test_a_block_computes_what_it_says_and_is_trained_with_the_network():
    parts, model = block(), net()
    network = behind_block(parts, model, SHAPE)
    flat = RECORDS[0].flatten(1)
    expected = (flat @ parts.weight.T + parts.bias).relu() @ parts.back.T + parts.shift
    torch.testing.assert_close(network(RECORDS[0]), model(expected.view(-1, *SHAPE)))
    assert Layout.of(network).dim == Layout.of(model).dim + 6 * 16 + 6 + 16 * 6 + 16


def test_gradient_norms_and_logits_are_those_at_the_model_that_is_sent():
    sent = {name: 2 * part for name, part in models().parameters.items()}
    model = models().built(sent)
    inputs, labels = RECORDS
    torch.testing.assert_close(models().logits(sent, inputs), model(inputs).detach())
    for place, norm in enumerate(models().gradient_norms(sent, inputs, labels)):
        loss = nn.functional.cross_entropy(model(inputs[place : place + 1]), labels[place : place + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-5)
