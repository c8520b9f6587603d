"""Exact sums: rounded contributions are inside the bound to the last digit, and one leaves the sum without a trace."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.defenses.core import (
    Block,
    Context,
    Engine,
    Everything,
    Layout,
    NormWithin,
    StepPlan,
    Subspace,
    clip,
    cross_entropy,
    normalize,
    release,
    secure,
    unbounded,
)
from leakbench.defenses.core.gradients import executor as engine_module
from leakbench.defenses.core.gradients.engines.one_by_one import OneByOne
from leakbench.defenses.core.gradients.exact_sums import exact_sums, whole_units
from leakbench.defenses.core.gradients.executor import units_of
from leakbench.defenses.dp_sgd import dp_sgd

from ... import duties


def squared_norm(values):
    """Exactly, as a fraction."""
    return sum(Fraction(int(v)) ** 2 for v in values)


@given(rows=duties.BATCHES, norm=st.sampled_from([1.0, 0.3, 1e-20, 7.7e15]), sigma=st.floats(0.01, 1e3))
def test_a_rounded_contribution_is_no_longer_than_the_bound_exactly(rows, norm, sigma):
    unit = secure().unit(sigma * norm)
    for bound in (clip(norm), normalize(norm, regulariser=0.0)):
        for row in whole_units(bound(rows), bound, unit):
            assert squared_norm(row) <= (Fraction(norm) / Fraction(unit)) ** 2


def test_a_row_that_float32_leaves_too_long_is_made_shorter():
    rows = torch.full((1, 10_000), 0.01 * (1 + 1e-4))  # of norm 1.0001
    unit = 2.0**-30
    assert squared_norm(whole_units(rows, clip(1.0), unit)[0]) <= Fraction(2) ** 60
    assert float(whole_units(rows, clip(1.0), unit)[0].double().norm()) == pytest.approx(2.0**30, rel=1e-6)


def test_rounding_is_towards_zero_and_by_less_than_a_unit():
    rows = torch.randn(50, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = whole_units(rows, clip(100.0), 2.0**-8)
    exact = rows * 2.0**8
    assert bool((whole.abs() <= exact.abs()).all())
    assert float((whole - exact).abs().max()) < 1


def plan():
    count = Block(codec=Everything(1), bound=clip(0.5), share=0.2, query=NormWithin(1.0), updates=False)
    basis = torch.linalg.qr(torch.randn(duties.DIM, 3, generator=torch.Generator().manual_seed(1)))[0]
    return StepPlan(Block(codec=Subspace.of(basis), bound=clip(0.3), share=0.8), count)


def test_removing_an_example_takes_off_exactly_its_own_contribution(monkeypatch):
    seen, add_noise = [], engine_module.add_noise

    def looked_at(plan, sums, *rest):
        seen.append(tuple(values.clone() for values in sums))
        return add_noise(plan, sums, *rest)

    monkeypatch.setattr(engine_module, "add_noise", looked_at)
    inputs, labels = duties.DATA
    engine = Engine(duties.network(), noise=secure())
    whole = range(len(inputs))
    for chosen in (whole, *([i for i in whole if i != out] for out in (0, 5, 23)), *([out] for out in (0, 5, 23))):
        engine.run(plan().at(1.5), inputs[list(chosen)], labels[list(chosen)])
    everybody, without, alone = seen[0], seen[1:4], seen[4:]
    for rest, one in zip(without, alone, strict=True):
        for total, less, own in zip(everybody, rest, one, strict=True):
            assert total.dtype == torch.int64
            assert torch.equal(total, less + own)
    assert all(bool((own != 0).any()) for one in alone for own in one)


@pytest.mark.parametrize("width", [33, 123])
def test_an_example_has_one_row_to_the_last_digit_wherever_in_a_batch_it_lies(width):
    # Of lines of so many numbers every one begins elsewhere in a cache line, where MKL adds in another order.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    inputs, labels = torch.randn(20, width), torch.randint(3, (20,))
    alike = inputs[:1].expand(20, -1).contiguous()
    engine = OneByOne(model, cross_entropy, Layout.of(model))
    for x in (inputs, alike):
        rows, losses = engine.rows(x, labels), engine.losses(x, labels)
        for i in range(len(x)):
            assert torch.equal(rows[i : i + 1], engine.rows(x[i : i + 1].clone(), labels[i : i + 1]))
            assert torch.equal(losses[i : i + 1], engine.losses(x[i : i + 1].clone(), labels[i : i + 1]))


def test_an_exact_run_is_the_usual_one_up_to_noise_and_units():
    inputs, labels = (values[:6] for values in duties.DATA)  # how many changes nothing of the noise
    usual = Engine(duties.network()).run(plan().at(0.0), inputs, labels)
    exact = Engine(duties.network(), noise=secure())
    runs = [exact.run(plan().at(0.01), inputs, labels) for _ in range(60)]
    for number, values in enumerate(usual.noisy):
        std = plan().blocks[number].noise_std(0.01)
        found = torch.stack([run.noisy[number] for run in runs]).double()
        assert float((found.mean(dim=0) - values).abs().max()) < 7 * std / 60**0.5
        assert duties.has_scale(found - values, std)
        # A block of one number gives 60 draws in all, enough to reject three times the scale.
        assert not duties.has_scale(found - values, std * (3 / 2 if found.numel() > 1000 else 3))
    assert exact.name == "one_by_one"


def test_a_release_of_given_rows_can_be_exact_too():
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    out = release(dp_sgd(noise_multiplier=1.0), rows, Context(step=0, steps=1, dim=6), noise=secure())
    unit = secure().unit(1.0)
    multiples = out.total.double() / unit
    assert out.total.dtype == torch.float32
    assert torch.equal(multiples, multiples.round())


def test_an_empty_batch_is_whole_numbers_of_noise():
    out = Engine(duties.network(), noise=secure()).run(plan().at(1.0), duties.DATA[0][:0], duties.DATA[1][:0])
    assert all(bool((values != 0).all()) for values in out.noisy)


def test_what_is_not_bounded_gets_noise_and_no_claim():
    loose = StepPlan(Block(codec=Everything(duties.DIM), bound=unbounded()))
    out = Engine(duties.network(), noise=secure()).run(loose.at(1e-6), *duties.DATA)
    usual = Engine(duties.network()).run(loose.at(0.0), *duties.DATA)
    torch.testing.assert_close(out.total, usual.total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["layerwise", "torch.func"])
def test_an_engine_that_works_on_batches_is_refused(engine):
    with pytest.raises(ValueError, match=f"engine must be 'auto' or 'one_by_one' with exact noise, got '{engine}'"):
        Engine(duties.network(), noise=secure(), engine=engine).run(plan().at(1.0), *duties.DATA)


def test_noise_so_small_that_units_do_not_fit_is_refused():
    units = units_of(plan().at(1e-5), secure())
    with pytest.raises(ValueError, match=r"an exact contribution must be below 2\^40 units, got"):
        exact_sums(plan(), [], units, torch.device("cpu"))
