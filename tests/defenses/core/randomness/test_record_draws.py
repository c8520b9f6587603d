"""What is drawn for a record follows from the record: not from its place, its company, or how it is worked on."""

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    Layout,
    StepPlan,
    clip,
    cross_entropy,
    per_example_gradients,
)
from leakbench.defenses.core.kernels.kernel import Kernel
from leakbench.defenses.core.kernels.record_uniforms import RecordUniforms
from leakbench.defenses.core.randomness.record_draws import entries, one_pass, record_keys, uniforms, words

from ....parameters import subtests

ALARM = 1e-8
PAIR = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(12, 1, 6, 6, generator=PAIR), torch.randint(0, 3, (12,), generator=PAIR)


class Functional(nn.Module):
    """Dropout that no module shows."""

    def forward(self, inputs):
        return functional.dropout(inputs, 0.4, training=self.training)


class Folded(nn.Module):
    """Dropout on [examples * positions, channels]."""

    def forward(self, inputs):
        n, channels, height, width = inputs.shape
        flat = inputs.permute(0, 2, 3, 1).reshape(n * height * width, channels)
        return functional.dropout(flat, 0.3, self.training).view(n, height, width, channels).permute(0, 3, 1, 2)


LAYERS = {
    "dropout": lambda: nn.Dropout(0.5),
    "in place": lambda: nn.Dropout(0.5, inplace=True),
    "channels": lambda: nn.Dropout2d(0.5),
    "alpha": lambda: nn.AlphaDropout(0.3),
    "alpha channels": lambda: nn.FeatureAlphaDropout(0.3),
    "functional": Functional,
    "folded": Folded,
    "all": lambda: nn.Dropout(1.0),
}
ENGINES = ("layerwise", "torch.func", "one_by_one", "opacus", "backpack")


def network(layer):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.Tanh(),
            LAYERS[layer](),
            nn.Flatten(),
            nn.Linear(64, 8),
            nn.Dropout(0.2),
            nn.Linear(8, 3),
        )
    return made.double()


@pytest.mark.parametrize(
    "engine", [pytest.param(n, marks=[pytest.mark.peers] * (n in ("opacus", "backpack"))) for n in ENGINES]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_of_a_record_is_the_same_alone_and_in_any_company_and_order(layer, engine):
    if engine in ("opacus", "backpack"):
        pytest.importorskip(engine, reason=f"{engine} is of leakbench[engines]")
    runner = Engine(network(layer), engine=engine)
    plan = StepPlan(Block(codec=Everything(runner.layout.dim), bound=clip(0.1)))
    inputs = INPUTS.double()

    def summed(chosen, coins=7):
        return runner.run(plan.at(0.0), inputs[chosen], LABELS[chosen], seed=coins).total

    everybody = list(range(6))
    whole = summed(everybody)
    for removed in (0, 3, 5):
        rest = [i for i in everybody if i != removed]
        torch.testing.assert_close(whole - summed(rest), summed([removed]), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(summed(everybody[::-1]), whole, rtol=1e-8, atol=1e-12)
    assert float((summed(everybody, coins=8) - whole).norm()) > 1e-3  # other coins, other masks


@subtests("layer", LAYERS)
def test_every_engine_draws_the_same(layer):
    model = network(layer)
    keys = words(record_keys(INPUTS, LABELS), 1, 3).flatten()
    plan = StepPlan(Block(codec=Everything(Layout.of(model).dim), bound=clip(0.1)))
    totals = []
    for engine in ENGINES[:3]:
        totals.append(Engine(model, engine=engine).run(plan.at(0.0), INPUTS.double(), LABELS, seed=7).total)
    for total in totals[1:]:
        torch.testing.assert_close(total, totals[0], rtol=1e-9, atol=1e-12)
    with entries(keys):
        together = per_example_gradients(model, cross_entropy, Layout.of(model), INPUTS.double(), LABELS)
    for i in range(12):
        with entries(keys[i : i + 1]):
            alone = per_example_gradients(
                model, cross_entropy, Layout.of(model), INPUTS[i : i + 1].double(), LABELS[i : i + 1]
            )
        torch.testing.assert_close(alone[0], together[i], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "p"), [(nn.Dropout, 0.3), (nn.Dropout2d, 0.3), (nn.AlphaDropout, 0.3), (nn.FeatureAlphaDropout, 0.3)]
)
def test_as_much_is_dropped_as_pytorch_drops_and_mean_and_variance_are_what_they_are_there(layer, p):
    made = layer(p)
    inputs = torch.randn(4000, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    with entries(torch.arange(4000)), one_pass() as mode:
        ours = made(inputs)
    assert mode is not None and mode.calls == 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = made(inputs)
    for moment in (1, 2):
        a, b = (values.double().pow(moment) for values in (ours, theirs))
        # Channels are dropped whole: 12,000 independent ones.
        spread = math.sqrt(2 * float(a.flatten(2).mean(dim=2).var()) / 12_000)
        assert abs(float(a.mean() - b.mean())) < 6 * spread
    kept = (ours != ours.flatten().mode().values).double() if layer in (nn.AlphaDropout,) else None
    if kept is not None:
        assert abs(float(kept.mean()) - 0.7) < 6 * math.sqrt(0.21 / kept.numel())


def test_masks_of_records_calls_and_steps_are_independent():
    keys = torch.arange(300)
    draws = torch.stack([uniforms(keys, 50, seed) for seed in range(20)])
    assert stats.kstest(draws.flatten().numpy(), "uniform").pvalue > ALARM
    centred = (draws - 0.5) * math.sqrt(12)
    for a, b in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:]), (centred[..., :-1], centred[..., 1:])):
        assert abs(float((a * b).mean())) < 6 / math.sqrt(a.numel())
    assert draws.unique().numel() == draws.numel()


def test_keys_tell_records_apart_by_every_bit_and_equal_records_not():
    records = torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(500, dtype=torch.int64)
    keys = record_keys(records, labels)
    assert keys.unique().numel() == 500
    assert torch.equal(record_keys(records.flip(0), labels).flip(0), keys)
    changed = records.clone()
    changed[3, 2] = torch.nextafter(changed[3, 2], torch.tensor(10.0))
    assert (record_keys(changed, labels) != keys).nonzero().flatten().tolist() == [3]
    assert not (record_keys(records, labels + 1) == keys).any()
    swapped = records[:, [1, 0, 2, 3, 4, 5, 6]]
    assert not (record_keys(swapped, labels) == keys).any()
    assert record_keys(records[:0], labels[:0]).shape == (0,)


@subtests("dtype", [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.complex64])
def test_records_of_any_type_have_keys(dtype):
    records = torch.arange(24).reshape(6, 2, 2).to(dtype)
    distinct = 2 if dtype is torch.bool else 6
    assert record_keys(records).unique().numel() == distinct


def test_bits_of_a_key_are_fair_coins():
    keys = record_keys(torch.arange(20_000.0).unsqueeze(1))
    for bit in range(64):
        ones = int(((keys >> bit) & 1).sum())
        assert abs(ones - 10_000) < 6 * math.sqrt(5_000)


def test_dropout_away_from_the_batch_is_drawn_one_example_at_a_time():
    class Transposed(nn.Module):
        def forward(self, inputs):
            return functional.dropout(inputs.flatten(1).T, 0.5, self.training).T

    model = nn.Sequential(Transposed(), nn.Linear(36, 3))
    plan = StepPlan(Block(codec=Everything(111), bound=clip(1.0)))
    refused = pytest.raises(ValueError, match="dropout must have the batch as its first dimension")
    with refused, entries(torch.arange(5)), one_pass():
        model(INPUTS[:5])
    runner = Engine(model)  # a batch of one has no other place
    whole, rest, alone = (
        runner.run(plan.at(0.0), INPUTS[chosen], LABELS[chosen], seed=1).total for chosen in ([0, 1, 2], [1, 2], [0])
    )
    torch.testing.assert_close(whole - rest, alone)
    assert runner.name.startswith("one_by_one (no layerwise: it fails on batches: dropout must have the batch")


def test_dropout_without_coins_is_refused():
    model = network("dropout").float()
    plan = StepPlan(Block(codec=Everything(Layout.of(model).dim), bound=clip(1.0)))
    with pytest.raises(ValueError, match="seed must be given where there is dropout or another random layer, got None"):
        Engine(model).run(plan.at(0.0), INPUTS, LABELS)
    Engine(model.eval()).run(plan.at(0.0), INPUTS, LABELS)  # nothing is drawn in evaluation mode


def test_a_model_outside_of_training_draws_as_ever():
    with one_pass() as mode:
        assert mode is None
        torch.manual_seed(0)
        first = nn.Dropout(0.5)(torch.ones(100))
        torch.manual_seed(0)
        assert torch.equal(nn.Dropout(0.5)(torch.ones(100)), first)


@subtests(("records", "count"), [(1, 2000), (7, 151), (64, 333)])
def test_compiled_numbers_are_the_hash_bit_for_bit_and_vmap_gets_them_too(records, count, monkeypatch):
    keys = record_keys(torch.randn(records, 4))
    assert RecordUniforms.usable(keys, count)
    numbers = uniforms(keys, count, 5)
    mapped = torch.vmap(lambda key: uniforms(key[None], count, 5)[0])(keys)
    with monkeypatch.context() as patch:
        patch.setattr(RecordUniforms, "usable", Kernel.usable)
        expected = uniforms(keys, count, 5)
    assert torch.equal(numbers, expected) and torch.equal(mapped, expected)
    assert numbers.min() >= 0 and numbers.max() < 1


@subtests("threads", [1, 2, 3])
def test_compiled_numbers_do_not_depend_on_the_number_of_threads(threads):
    keys, before = torch.arange(7), torch.get_num_threads()
    expected = uniforms(keys, 2**16 + 3, 1)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(uniforms(keys, 2**16 + 3, 1), expected)
    finally:
        torch.set_num_threads(before)
