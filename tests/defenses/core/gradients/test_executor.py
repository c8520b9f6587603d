"""The one place with raw rows: it sums in full precision, adds noise once, and lets nothing else out."""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from leakbench.defenses.core import (
    Block,
    Context,
    Coordinates,
    Defense,
    Engine,
    Everything,
    NormWithin,
    Release,
    Stateless,
    StepPlan,
    clip,
    clipped_sums,
    contributions,
    cross_entropy,
    from_generator,
    normalize,
    per_example_gradients,
    release,
    seeded,
    unbounded,
)
from leakbench.defenses.dp_sgd import dp_sgd

from ... import duties

PLAIN = StepPlan(Block(codec=Everything(duties.DIM), bound=clip(0.3)))
LIKE = torch.zeros(1)


def rows_of(plan, rows, like=LIKE):
    return clipped_sums(plan, [lambda point: rows], like)[0]


def test_a_run_is_the_sum_of_bounded_gradients_plus_one_draw_of_noise():
    inputs, labels = duties.DATA
    out = Engine(duties.network(), noise=seeded(3)).run(PLAIN.at(2.0), inputs, labels)
    rows = per_example_gradients(duties.network(), cross_entropy, duties.LAYOUT, inputs, labels)
    expected = clip(0.3)(rows).sum(dim=0) + duties.noise_of(3, duties.DIM, 0.6)
    # Of the sum that is rounded to a unit, and of noise that is, one may be the next.
    torch.testing.assert_close(out.total, expected, rtol=1e-5, atol=2 * seeded(0).unit(0.6))
    assert torch.equal(out.noisy[0], out.total)


@pytest.mark.parametrize("moved", ["model", "inputs", "targets"])
def test_a_batch_on_another_device_than_the_model_is_refused_in_one_sentence(accelerator, moved):
    parts: dict[str, Any] = {"model": duties.network(), **dict(zip(("inputs", "targets"), duties.DATA, strict=True))}
    parts[moved] = parts[moved].to(accelerator)
    cpu = torch.device("cpu")
    name, device, other = ("inputs", accelerator, cpu) if moved == "model" else (moved, cpu, accelerator)
    told = (
        f"{name} must be on the device of the model, {device}, got {other}; "
        f"move the tensors with .to('{device}'), or the model with .to('{other}')"
    )
    engine = Engine(parts["model"], noise=seeded(0))
    calls = (partial(engine.run, PLAIN.at(1.0)), engine.gradients, partial(engine.clipped_sums, PLAIN))
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(told)):
            call(parts["inputs"], parts["targets"])


@pytest.mark.parametrize("microbatch", [1, 5, 24, 1000])
def test_microbatches_do_not_change_the_release(microbatch):
    inputs, labels = duties.DATA
    whole = Engine(duties.network(), noise=seeded(3)).run(PLAIN.at(2.0), inputs, labels)
    cut = Engine(duties.network(), noise=seeded(3), microbatch=microbatch).run(PLAIN.at(2.0), inputs, labels)
    torch.testing.assert_close(cut.total, whole.total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["layerwise", "torch.func", "one_by_one"])
def test_parameters_that_were_put_in_place_of_others_are_those_that_count(engine):
    """`load_state_dict(assign=True)` keeps no parameter: by those of before, gradients would be of old weights."""
    inputs, labels = duties.DATA
    model, other = duties.network(), duties.network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2).add_(0.1)
    ours = Engine(model, engine=engine)
    ours.run(PLAIN.at(0.0), inputs, labels)
    model.load_state_dict(other.state_dict(), assign=True)
    found = ours.run(PLAIN.at(0.0), inputs, labels).total
    expected = Engine(other, engine=engine).run(PLAIN.at(0.0), inputs, labels).total
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replaced", [nn.Linear(7, 7), nn.Tanh()])
def test_a_layer_that_was_put_in_place_of_another_is_the_one_that_counts(replaced):
    inputs, labels = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7) if isinstance(replaced, nn.Linear) else nn.ReLU())
    ours = Engine(model, engine="layerwise")
    plan = StepPlan(Block(codec=Everything(ours.layout.dim), bound=clip(0.3))).at(0.0)
    ours.run(plan, inputs, labels)
    model[1] = replaced
    expected = Engine(model, engine="one_by_one").run(plan, inputs, labels).total
    torch.testing.assert_close(ours.run(plan, inputs, labels).total, expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_came_after_the_first_batch_is_left_without_a_gradient():
    """It is none of the layout's; what a pass over the batch left there would be its sum, without bound or noise."""
    inputs, labels = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    ours = Engine(model)
    plan = StepPlan(Block(codec=Everything(ours.layout.dim), bound=clip(0.3))).at(0.0)
    ours.run(plan, inputs, labels)
    model[2].bias = nn.Parameter(torch.zeros(3))
    ours.run(plan, inputs, labels)
    assert model[2].bias.grad is None


def test_dropout_that_came_after_the_first_batch_is_drawn_by_record_too():
    inputs, labels = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    ours = Engine(model)
    plan = StepPlan(Block(codec=Everything(ours.layout.dim), bound=clip(0.3))).at(0.0)
    ours.run(plan, inputs, labels)
    model.insert(2, nn.Dropout(0.5))
    with pytest.raises(ValueError, match="seed must be given where there is dropout"):
        ours.run(plan, inputs, labels)


def moved_by_the_first(model, inputs, *, engine, microbatch=None):
    """How far its removal moves a sum of gradients that are brought to norm 1."""
    ours, targets = Engine(model, engine=engine, microbatch=microbatch), torch.arange(len(inputs)) % 3
    plan = StepPlan(Block(codec=Everything(ours.layout.dim), bound=normalize(1.0, regulariser=0.01))).at(0.0)
    both, rest = (ours.run(plan, inputs[i:], targets[i:], seed=1).total.double() for i in (0, 1))
    return float((both - rest).norm())


@pytest.mark.parametrize(("examples", "microbatch"), [(2, None), (3, 2), (2, 1)])
@pytest.mark.parametrize("engine", ["layerwise", "torch.func", pytest.param("opacus", marks=pytest.mark.peers)])
def test_a_black_image_that_is_left_alone_counts_as_it_did_beside_another(engine, examples, microbatch):
    """What GroupNorm passes back of one colour is mostly rounding: who was removed moved the sum by 1.24 bounds."""
    if engine == "opacus":
        pytest.importorskip("opacus")
    images = torch.randn(1, 1, 12, 12, generator=torch.Generator().manual_seed(0)).repeat(examples, 1, 1, 1)
    images[-1] = 0
    moved = []
    for seed in range(16):
        torch.manual_seed(seed)
        layers = [layer for i in (1, 8, 8) for layer in (nn.Conv2d(i, 8, 3), nn.GroupNorm(8, 8), nn.ELU())]
        drop = [nn.Dropout(0.1)] if engine == "layerwise" else []
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), *drop, nn.Linear(72, 3))
        moved.append(moved_by_the_first(model, images, engine=engine, microbatch=microbatch))
    assert max(moved) <= 1 + 1e-3


@pytest.mark.parametrize("channels", [2, 24])
def test_an_image_that_is_nan_in_a_batch_is_nan_alone_beside_an_instance_norm_too(channels):
    """With that in the model one image is contiguous and several are not, by which GroupNorm goes at 1e30."""
    torch.manual_seed(0)
    norms = nn.GroupNorm(2, channels), nn.InstanceNorm2d(channels)
    model = nn.Sequential(nn.Conv2d(1, channels, 3), *norms, nn.Tanh(), nn.Flatten(), nn.Linear(256 * channels, 3))
    inputs = torch.randn(1, 1, 18, 18).repeat(2, 1, 1, 1)
    inputs[1, 0, 2, 3] = 1e30
    assert moved_by_the_first(model, inputs, engine="layerwise") <= 1 + 1e-5


def test_sums_do_not_lose_small_rows_among_many():
    # In float32 the one would vanish beside what comes before and goes after it.
    rows = torch.tensor([[1e9], [1.0], [-1e9]])
    loose = StepPlan(Block(codec=Everything(1), bound=unbounded()))
    assert float(rows_of(loose, rows)) == 1.0


def test_one_broken_example_counts_as_zero_and_the_others_as_they_are():
    inputs, labels = duties.DATA
    broken = inputs.clone()
    broken[4] = torch.nan
    broken[9] = torch.inf
    others = [i for i in range(len(inputs)) if i not in (4, 9)]
    for plan in (PLAIN, StepPlan(Block(codec=Everything(duties.DIM), bound=unbounded()))):
        with_broken = Engine(duties.network()).run(plan.at(0.0), broken, labels)
        without = Engine(duties.network()).run(plan.at(0.0), inputs[others], labels[others])
        torch.testing.assert_close(with_broken.total, without.total, rtol=1e-5, atol=1e-6)


def test_a_row_that_is_broken_where_nothing_is_released_counts_as_zero_too():
    rows = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])
    kept = Block(codec=Coordinates(torch.tensor([0]), dim=2), bound=clip(5.0), share=0.5)
    count = Block(codec=Everything(1), bound=clip(0.5), share=0.5, query=NormWithin(1.0), updates=False)
    values, counted = contributions(StepPlan(kept, count), lambda point: rows)
    assert values.tolist() == [[0.0], [0.0]]
    assert counted.tolist() == [[0.5], [-0.5]]


def test_an_empty_batch_is_pure_noise():
    inputs, labels = duties.DATA
    out = Engine(duties.network(), noise=seeded(3)).run(PLAIN.at(2.0), inputs[:0], labels[:0])
    assert torch.equal(out.total, duties.noise_of(3, duties.DIM, 2.0 * 0.3))
    silent = Engine(duties.network()).run(PLAIN.at(0.0), inputs[:0], labels[:0])
    assert torch.equal(silent.total, torch.zeros(duties.DIM))


def test_noise_is_drawn_in_the_released_space_and_apart_for_every_block():
    kept = Coordinates(torch.tensor([0, 2]), dim=4)
    count = Block(codec=Everything(1), bound=clip(0.5), share=0.2, query=NormWithin(1.0), updates=False)
    plan = StepPlan(Block(codec=kept, bound=clip(1.0), share=0.8), count)
    context = Context(step=0, steps=1, dim=4)

    class Fixed(Stateless):
        def plan(self, context):
            return plan

    out = release(Defense(Fixed(), 1.0), torch.zeros(3, 4), context, noise=seeded(0))
    assert [values.numel() for values in out.noisy] == [2, 1]
    assert out.total[[1, 3]].tolist() == [0.0, 0.0]
    assert torch.equal(out.total[[0, 2]], out.noisy[0])  # the count is no part of the update
    source = seeded(0)
    torch.testing.assert_close(out.noisy[0].double(), source.add(torch.zeros(2, dtype=torch.float64), 1 / 0.8**0.5))
    sums = torch.full((1,), 1.5, dtype=torch.float64)
    torch.testing.assert_close(out.noisy[1].double(), source.add(sums, 0.5 / 0.2**0.5))


def test_a_block_that_does_not_update_is_released_and_not_added():
    rows = torch.tensor([[3.0, 4.0]])
    seen = Block(codec=Everything(2), bound=clip(1.0), share=0.5, updates=False)
    used = Block(codec=Everything(2), bound=clip(2.0), share=0.5)

    class Fixed(Stateless):
        def plan(self, context):
            return StepPlan(seen, used)

    out = release(Defense(Fixed(), 0.0), rows, Context(step=0, steps=1, dim=2))
    torch.testing.assert_close(out.noisy[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(out.total, torch.tensor([1.2, 1.6]))


def test_contributions_are_made_row_by_row():
    rows = torch.randn(6, duties.DIM, generator=torch.Generator().manual_seed(0))
    whole = contributions(PLAIN, lambda point: rows)[0]
    alone = torch.cat([contributions(PLAIN, lambda point, row=row: row)[0] for row in rows.split(1)])
    torch.testing.assert_close(whole, alone)


def test_rows_at_one_point_are_computed_once():
    asked = []

    def gradients(point):
        asked.append(point)
        return torch.ones(2, 4)

    count = Block(codec=Everything(1), bound=clip(0.5), share=0.5, query=NormWithin(1.0), updates=False)
    contributions(StepPlan(Block(codec=Everything(4), bound=clip(1.0), share=0.5), count), gradients)
    assert asked == [None]


def test_only_noisy_values_leave():
    assert {field.name for field in dataclasses.fields(Release)} == {"noisy", "total"}


def test_noise_without_a_source_is_refused():
    inputs, labels = duties.DATA
    with pytest.raises(ValueError, match=r"noise must be given when noise_multiplier is positive, got None at 2\.0"):
        Engine(duties.network()).run(PLAIN.at(2.0), inputs, labels)
    with pytest.raises(ValueError, match="noise must be given when noise_multiplier is positive"):
        release(dp_sgd(noise_multiplier=1.0), torch.zeros(2, 4), Context(step=0, steps=1, dim=4))


def test_a_release_works_on_rows_or_on_gradients_as_a_function():
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    context = Context(step=0, steps=1, dim=4)
    quiet = dp_sgd(noise_multiplier=0.0)
    assert torch.equal(release(quiet, rows, context).total, release(quiet, lambda point: rows, context).total)
    noisy = dp_sgd(noise_multiplier=1.0)
    by_generator = release(noisy, rows, context, noise=torch.Generator().manual_seed(4)).total
    source = from_generator(torch.Generator().manual_seed(4))
    assert torch.equal(by_generator, release(noisy, rows, context, noise=source).total)


@pytest.mark.parametrize("size", [0, -3])
def test_a_microbatch_without_room_for_an_example_is_refused(size):
    with pytest.raises(ValueError, match=f"microbatch must be at least 1 or None, got {size}"):
        Engine(duties.network(), microbatch=size)


def test_double_precision_models_get_double_precision_releases():
    inputs, labels = duties.DATA
    out = Engine(duties.network().double(), noise=seeded(3)).run(PLAIN.at(1.0), inputs.double(), labels)
    assert out.total.dtype == torch.float64


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (nn.Dropout(0.1), "random layers"),
        (nn.utils.weight_norm, "one that could not be checked: the model fails on made-up"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_an_auditors_entries_are_of_models_that_are_known_to_draw_nothing(layer, found):
    model = nn.Sequential(nn.Linear(4, 3), layer) if isinstance(layer, nn.Module) else layer(nn.Linear(4, 3))
    engine = Engine(model, unchecked=True)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(1.0)))
    with pytest.raises(ValueError, match=f"the model must draw nothing where its entries are given .*, got {found}"):
        engine.clipped_sums(plan, torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))


def test_where_memory_does_not_suffice_micro_batches_are_halved_once_and_for_all(monkeypatch):
    torch.manual_seed(0)
    model, inputs, labels = nn.Linear(6, 3), torch.randn(20, 6), torch.arange(20) % 3
    engine, sizes = Engine(model), []
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.1))).at(0.0)
    expected = Engine(model).run(plan, inputs, labels).total
    sums = type(engine.prepare(inputs, labels).engine).sums

    def short_of_memory(self, plan, inputs, targets, **options):
        sizes.append(len(inputs))
        if len(inputs) > 6:
            raise torch.OutOfMemoryError("of a device")
        return sums(self, plan, inputs, targets, **options)

    monkeypatch.setattr(type(engine.prepare(inputs, labels).engine), "sums", short_of_memory)
    with pytest.warns(UserWarning, match="did not suffice for 20 examples at a time"):
        assert torch.allclose(engine.run(plan, inputs, labels).total, expected, atol=1e-6)
    assert sizes == [20, 10, 5, 5, 5, 5]
    engine.run(plan, inputs, labels)
    assert sizes[6:] == [5, 5, 5, 5]
