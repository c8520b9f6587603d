"""Layers that draw at random draw by record, whatever they are made of: attention, recurrent layers, random depth."""

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    Recording,
    StepPlan,
    clip,
    cross_entropy,
    poisson,
    seeded,
    train,
)
from leakbench.defenses.core.randomness.record_draws import entries, entry_keys, one_pass, uniforms
from leakbench.defenses.dp_sgd import dp_sgd

from ....parameters import subtests

ALARM = 1e-8
CLIP = 0.1
GENERATOR = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(6, 5, 8, generator=GENERATOR), torch.randint(0, 3, (6,), generator=GENERATOR)


class Read(nn.Module):
    """A linear layer on the mean over positions of what a layer puts out."""

    def __init__(self, layer, width, *, times=1, batch_first=True):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)
        self.times, self.batch_first = times, batch_first

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        found = self.layer(*[x] * self.times)
        found = found[0] if isinstance(found, tuple) else found
        return self.head(found.mean(dim=1 if self.batch_first else 0))


class Attention(nn.Module):
    def __init__(self, *, causal=False, masked=False):
        super().__init__()
        self.queries, self.causal, self.masked, self.dropout = nn.Linear(8, 8), causal, masked, 0.4

    def forward(self, x):
        heads = self.queries(x).unflatten(2, (2, 4)).transpose(1, 2)
        mask = torch.ones(5, 5, dtype=torch.bool).tril() if self.masked else None
        found = functional.scaled_dot_product_attention(heads, heads, heads, mask, self.dropout, self.causal)
        return found.transpose(1, 2).flatten(2)


class Packed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 4), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Path(nn.Module):
    """A residual branch that is dropped, or made noisy, by a function of its own."""

    def __init__(self, branch):
        super().__init__()
        self.inner, self.branch = nn.Linear(8, 8), branch

    def forward(self, x):
        return x + self.branch(self.inner(x))


def coins_of(x):
    return x * x.new_empty((len(x), 1, 1)).bernoulli_(0.6) / 0.6


def unreturned_coins(x):
    mask = torch.empty(len(x), 1, 1, dtype=x.dtype)
    mask.bernoulli_(0.6)
    return x * mask


def floored(x):
    return x / 0.6 * (0.6 + torch.rand((len(x), 1, 1), dtype=x.dtype, device=x.device)).floor_()


def depth(mode):
    return pytest.importorskip("torchvision.ops", reason="of leakbench[images]").StochasticDepth(0.4, mode)


LAYERS = {
    "encoder": lambda: Read(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True), 8),
    "encoder of sequences first": lambda: Read(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3), 8, batch_first=False),
    "attention with weights": lambda: Read(nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), 8, times=3),
    "attention": lambda: Read(Attention(), 8),
    "causal attention": lambda: Read(Attention(causal=True), 8),
    "masked attention": lambda: Read(Attention(masked=True), 8),
    "lstm": lambda: Read(nn.LSTM(8, 4, 3, dropout=0.3, batch_first=True), 4),
    "lstm both ways": lambda: Read(nn.LSTM(8, 4, 2, dropout=0.3, bidirectional=True), 8, batch_first=False),
    "lstm of packed sequences": lambda: Read(Packed(nn.LSTM(8, 4, 2, dropout=0.3, batch_first=True)), 4),
    "gru": lambda: Read(nn.GRU(8, 4, 2, dropout=0.3, batch_first=True), 4),
    "rnn": lambda: Read(nn.RNN(8, 4, 2, dropout=0.3, nonlinearity="relu", bias=False), 4, batch_first=False),
    "frozen lstm": lambda: Read(nn.LSTM(8, 4, 2, dropout=0.3).requires_grad_(False), 4, batch_first=False),
    "depth by record": lambda: Read(Path(depth("row")), 8),
    "depth by batch": lambda: Read(Path(depth("batch")), 8),
    "coins in place": lambda: Read(Path(coins_of), 8),
    "coins that are not returned": lambda: Read(Path(unreturned_coins), 8),
    "coins": lambda: Read(Path(lambda x: x * torch.bernoulli(torch.full_like(x, 0.6))), 8),
    "uniform numbers": lambda: Read(Path(floored), 8),
    "noise": lambda: Read(Path(lambda x: x + 0.3 * torch.randn_like(x)), 8),
    "gumbel": lambda: Read(Path(lambda x: functional.gumbel_softmax(x, hard=True)), 8),
    "random slopes": lambda: Read(Path(nn.RReLU()), 8),
}


def made(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LAYERS[name]().double()


def summed(engine, chosen, coins=7):
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP)))
    return engine.run(plan.at(0.0), INPUTS.double()[chosen], LABELS[chosen], seed=coins).total


def one_record(model, i, coins=7):
    """A record's gradient by autograd, with the draws of its key."""
    x, y = INPUTS.double()[i : i + 1], LABELS[i : i + 1]
    with entries(entry_keys(x, y, 1, coins)), one_pass():
        loss = cross_entropy(model(x), y).sum()
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])


@pytest.mark.parametrize("name", LAYERS)
def test_a_sum_is_that_of_records_by_themselves_in_any_company_and_order(name):
    model, everybody = made(name), list(range(6))
    engine = Engine(model)
    rows = torch.stack([one_record(model, i) for i in everybody])
    clipped = rows * (CLIP / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    whole = summed(engine, everybody)
    torch.testing.assert_close(whole, clipped.sum(dim=0), rtol=1e-6, atol=1e-9)
    for chosen in ([5, 2, 0], [3]):
        torch.testing.assert_close(summed(engine, chosen), clipped[chosen].sum(dim=0), rtol=1e-6, atol=1e-9)
    other_step = summed(engine, everybody, coins=8)
    assert float((other_step - whole).norm()) > 1e-3


@subtests("name", ["encoder", "lstm", "coins in place", "uniform numbers", "noise"])
def test_records_of_other_keys_have_other_draws(name):
    model = made(name)
    with torch.no_grad(), entries(torch.tensor([5, 5, *range(40)])), one_pass():
        outputs = model(INPUTS.double()[:1].expand(42, -1, -1))
    assert torch.equal(outputs[0], outputs[1]) and outputs.unique(dim=0).shape[0] > 1


WITHIN = [name for name in LAYERS if "attention" in name or "lstm" in name or name in ("encoder", "gru", "rnn")]


@subtests("name", WITHIN)
def test_with_next_to_no_dropout_outputs_are_those_of_pytorch_without(name):
    model = made(name)
    x = INPUTS.double()[: 1 if "packed" in name else 6]

    def outputs(p):
        for layer in model.modules():
            for setting in ("dropout", "p"):
                if isinstance(getattr(layer, setting, None), float):
                    setattr(layer, setting, p)
        return model(x)

    with torch.no_grad():
        with entries(torch.arange(len(x))), one_pass() as drawn:
            ours = outputs(1e-14)
        assert drawn is not None and drawn.calls > 0
        torch.testing.assert_close(ours, outputs(0.0), rtol=1e-10, atol=1e-12)


def test_weights_of_attention_are_dropped_by_the_record_s_own_mask():
    keys, (q, k, v) = torch.arange(4), torch.randn(3, 4, 2, 5, 3, generator=GENERATOR, dtype=torch.float64)
    with entries(keys), one_pass():
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    weights = (q @ k.transpose(-2, -1) / 3**0.5).softmax(dim=-1)
    kept = uniforms(keys, 50, 1).reshape(4, 2, 5, 5) >= 0.4
    torch.testing.assert_close(found, (weights * kept / 0.6) @ v)
    with entries(keys), one_pass():
        few = functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], dropout_p=0.4, enable_gqa=True)
    weights = (q @ k[:, :1].transpose(-2, -1) / 3**0.5).softmax(dim=-1)
    torch.testing.assert_close(few, (weights * kept / 0.6) @ v[:, :1])


def test_an_lstm_drops_between_its_layers_by_the_record_s_own_mask():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        both = nn.LSTM(8, 4, 2, dropout=0.3, batch_first=True).double()
    first, second = nn.LSTM(8, 4, batch_first=True).double(), nn.LSTM(4, 4, batch_first=True).double()
    for number, one in enumerate((first, second)):
        one.load_state_dict(
            {k.replace(f"l{number}", "l0"): v for k, v in both.state_dict().items() if f"l{number}" in k}
        )
    keys, x = torch.arange(6), INPUTS.double()
    start = [torch.randn(2, 6, 4, generator=GENERATOR, dtype=torch.float64) for _ in range(2)]
    with entries(keys), one_pass():
        found, states = both(x, tuple(start))
    middle, after = first(x, tuple(s[:1] for s in start))
    kept = uniforms(keys, 20, 1).reshape(6, 5, 4) >= 0.3
    expected, last = second(middle * kept / 0.7, tuple(s[1:] for s in start))
    torch.testing.assert_close(found, expected)
    for ours, one, other in zip(states, after, last, strict=True):
        torch.testing.assert_close(ours, torch.cat([one, other]))


LAWS = {
    "rand": (lambda: torch.rand(3000, 4), stats.uniform),
    "rand of a size": (lambda: torch.rand(size=(3000, 4), dtype=torch.float64), stats.uniform),
    "rand_like": (lambda: torch.rand_like(torch.zeros(3000, 4)), stats.uniform),
    "randn": (lambda: torch.randn((3000, 4)), stats.norm),
    "randn_like": (lambda: torch.randn_like(torch.zeros(3000, 4), dtype=torch.float64), stats.norm),
    "uniform_": (lambda: torch.zeros(3000, 4).uniform_(-1, to=2), stats.uniform(-1, 3)),
    "normal_": (lambda: torch.zeros(3000, 4).normal_(1, std=2), stats.norm(1, 2)),
    "exponential_": (lambda: torch.zeros(3000, 4).exponential_(lambd=2), stats.expon(scale=0.5)),
    "rrelu": (lambda: -functional.rrelu(-torch.ones(3000, 4), 0.1, 0.4, training=True), stats.uniform(0.1, 0.3)),
}


@subtests("name", LAWS)
def test_numbers_have_the_law_of_pytorch_s_and_leave_its_generator_alone(name):
    draw, law = LAWS[name]
    before = torch.get_rng_state()
    with entries(torch.arange(3000)), one_pass():
        one, other = draw(), draw()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one, other)  # another call, other numbers
    for found in (one, other):
        assert found.shape == (3000, 4) and found.dtype in (torch.float32, torch.float64)
        assert stats.kstest(found.double().flatten().numpy(), law.cdf).pvalue > ALARM
    assert draw().dtype == one.dtype


@subtests(
    ("dropped", "p"),
    [
        (lambda: torch.zeros(20_000, 1).bernoulli_(0.3) == 0, 0.7),
        (lambda: torch.bernoulli(torch.full((20_000, 1), 0.3)) == 0, 0.7),
        (lambda: torch.full((20_000, 1), 0.3).bernoulli() == 0, 0.7),
        (lambda: depth("row")(torch.ones(20_000, 3))[:, 0] == 0, 0.4),
        (lambda: attended(torch.ones(20_000, 1, 1, 1)) == 0, 0.2),
    ],
)
def test_as_many_are_dropped_as_are_asked_for(dropped, p):
    with entries(torch.arange(20_000)), one_pass():
        share = float(dropped().double().mean())
    assert abs(share - p) < 6 * (p * (1 - p) / 20_000) ** 0.5


def attended(ones):
    return functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.2)


def test_a_random_tensor_without_the_batch_is_no_record_s_own():
    with entries(torch.arange(3)), one_pass():
        for shape in ((), (1, 2), (6, 2)):
            with pytest.raises(ValueError, match="a random tensor must have the batch as its first dimension to draw"):
                torch.rand(shape)
    with entries(torch.arange(1)), one_pass():
        assert torch.rand(()).shape == () and torch.rand(6, 2).shape == (6, 2)


@pytest.mark.parametrize("name", ["encoder", "lstm", "coins in place"])
def test_a_resumed_run_draws_the_same(name, tmp_path):
    def stop(done, _):
        if done == 2:
            raise KeyboardInterrupt

    def run(**recording):
        return train(
            made(name).float(), (INPUTS, LABELS), dp_sgd(noise_multiplier=0.1), sampling=poisson(0.5), steps=4, seed=1,
            sampler_key=2, noise=seeded(3), recording=Recording(**recording),
        )  # fmt: skip

    whole = run().model.state_dict()
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=tmp_path / "c", progress=stop)
    resumed = run(checkpoint=tmp_path / "c").model.state_dict()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
