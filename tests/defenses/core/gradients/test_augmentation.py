"""Views of examples: averaged, then bounded once; drawn for each record by itself, wherever it lies."""

import pytest
import torch
from torch import nn

from leakbench.defenses.core import (
    Block,
    CropAndFlip,
    Engine,
    Everything,
    Execution,
    Recipe,
    RecordSchedule,
    StepPlan,
    clip,
    clipped_sums,
    cross_entropy,
    full,
    per_example_gradients,
    seed_from,
    seeded,
    train,
)
from leakbench.defenses.core.gradients.augmentation import draws, views_of
from leakbench.defenses.core.randomness.record_draws import record_keys, words
from leakbench.defenses.dp_sgd import dp_sgd

from ....parameters import subtests

COINS = 5


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)).double()


def images(n=6):
    coins = torch.Generator().manual_seed(1)
    return torch.randn(n, 2, 6, 6, generator=coins, dtype=torch.float64), torch.arange(n) % 3


def entry_words(inputs, labels, views, count):
    """The random words of every view, as the engine has them."""
    keys = words(record_keys(inputs, labels), views, seed_from(COINS, "entries")).flatten()
    return words(keys, count, seed_from(COINS, "views"))


@subtests("engine", ["layerwise", "torch.func"])
@subtests("microbatch", [None, 1, 4])
def test_gradients_of_views_are_averaged_and_then_bounded_once(engine, microbatch):
    (inputs, labels), views, model = images(), CropAndFlip(views=3, padding=2), network()
    runner = Engine(model, engine=engine, augmentation=views, microbatch=microbatch)
    plan = StepPlan(Block(codec=Everything(runner.layout.dim), bound=clip(0.2)))
    total = runner.run(plan.at(0.0), inputs, labels, seed=COINS).total
    seen = views.apply(inputs.repeat_interleave(3, dim=0), views.draw(entry_words(inputs, labels, 3, 3)))
    each = per_example_gradients(model, cross_entropy, runner.layout, seen, labels.repeat_interleave(3))
    rows = each.view(6, 3, -1).mean(dim=1)
    torch.testing.assert_close(total, clipped_sums(plan, [lambda _: rows], rows)[0], rtol=1e-11, atol=1e-13)
    wrong = clipped_sums(plan, [lambda _: each], each)[0] / 3  # bounded view by view, then averaged
    assert float((total - wrong).norm()) > 0.01 * float(total.norm())


@subtests("example", range(6))
def test_one_example_adds_at_most_the_clip_norm_whatever_its_views(example):
    inputs, labels = images()
    runner = Engine(network(), augmentation=CropAndFlip(views=4))
    plan = StepPlan(Block(codec=Everything(runner.layout.dim), bound=clip(0.1)))
    alone = runner.run(plan.at(0.0), inputs[example : example + 1], labels[example : example + 1], seed=COINS).total
    assert 0.099 < float(alone.norm()) <= 0.1 * (1 + 1e-12)


def test_crops_are_windows_of_the_reflected_image_and_flips_are_mirrors():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    cut = CropAndFlip(padding=1)
    assert torch.equal(cut.apply(image, torch.tensor([[1, 1, 0]])), image)
    assert torch.equal(cut.apply(image, torch.tensor([[1, 1, 1]])), image.flip(3))
    padded = nn.functional.pad(image, (1, 1, 1, 1), mode="reflect")
    assert torch.equal(cut.apply(image, torch.tensor([[2, 0, 0]])), padded[:, :, 2:6, 0:4])


def test_views_of_a_record_do_not_depend_on_who_else_is_there():
    inputs, labels = images()
    runner = Engine(network(), augmentation=CropAndFlip(views=4))
    plan = StepPlan(Block(codec=Everything(runner.layout.dim), bound=clip(0.1)))

    def summed(chosen):
        return runner.run(plan.at(0.0), inputs[chosen], labels[chosen], seed=COINS).total

    everybody = list(range(6))
    for removed in everybody:
        rest = [i for i in everybody if i != removed]
        torch.testing.assert_close(summed(everybody) - summed(rest), summed([removed]), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(summed(rest[::-1]), summed(rest), rtol=1e-9, atol=1e-12)
    other = runner.run(plan.at(0.0), inputs, labels, seed=COINS + 1).total  # the coins do count
    assert float((other - summed(everybody)).norm()) > 0.01


def test_every_shift_is_drawn_and_half_are_flipped():
    some = words(torch.arange(5000), 3, COINS)
    drawn = CropAndFlip(padding=2).draw(some)
    assert drawn[:, :2].unique().tolist() == [0, 1, 2, 3, 4]
    # 5000 fair coins: 2500 +- 35; a fresh seed leaves 5 of these in under once in a million.
    assert abs(int(drawn[:, 2].sum()) - 2500) < 180
    assert not CropAndFlip(padding=2, flip=False).draw(some)[:, 2].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"views": 0}, "views must be at least 1, got 0"), ({"padding": -1}, "padding must be at least 0, got -1")],
)
def test_settings_without_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CropAndFlip(**settings)


def test_padding_beyond_the_image_is_refused():
    with pytest.raises(ValueError, match="padding must be below the image's 4x4 pixels, got 4"):
        CropAndFlip(padding=4).apply(torch.zeros(1, 1, 4, 4), torch.zeros(1, 3, dtype=torch.int64))


def test_views_without_coins_are_refused():
    inputs, labels = images()
    runner = Engine(network(), augmentation=CropAndFlip())
    plan = StepPlan(Block(codec=Everything(runner.layout.dim), bound=clip(1.0)))
    with pytest.raises(ValueError, match="seed must be given where there is an augmentation, got None"):
        runner.run(plan.at(0.0), inputs, labels)


def test_training_with_views_is_a_function_of_its_seeds_and_costs_no_more():
    def trained(seed):
        recipe = Recipe(augmentation=CropAndFlip(views=2, padding=1))
        defense = dp_sgd(clip_norm=0.5, noise_multiplier=1.0)
        return train(network(), images(), defense, sampling=full(), steps=2, noise=seeded(1), seed=seed, recipe=recipe)

    one, again, other = trained(0), trained(0), trained(1)
    values = [next(run.model.parameters()).detach() for run in (one, again, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    defense = dp_sgd(clip_norm=0.5, noise_multiplier=1.0)
    plain = train(network(), images(), defense, sampling=full(), steps=2, noise=seeded(1), seed=0)
    assert one.claim(1e-5).epsilon == plain.claim(1e-5).epsilon


def test_a_schedule_changes_known_records_in_its_steps_and_nobody_else():
    (inputs, labels), seed = images(), 7
    added = torch.tensor([[0.0, 3.0], [5.0, 0.0]])  # of two records, by step
    schedule = RecordSchedule.of(inputs[:2], labels[:2], added, seed=seed)
    for step in range(3):
        seen = views_of(schedule, inputs, labels, seed=draws(seed, step))
        expected = inputs.clone()
        if step < 2:
            expected[:2] += added[step].double().view(2, 1, 1, 1)
        assert torch.equal(seen, expected[None])
        # In another order, and without the rest: by what a record is, and not by its place.
        assert torch.equal(views_of(schedule, inputs[1:2], labels[1:2], seed=draws(seed, step))[0], expected[1:2])
    # A record of another label is another record, and other coins are another run.
    assert torch.equal(views_of(schedule, inputs[1:2], labels[:1], seed=draws(seed, 0))[0], inputs[1:2])
    assert torch.equal(views_of(schedule, inputs, labels, seed=draws(seed + 1, 0))[0], inputs)


@pytest.mark.parametrize("engine", ["layerwise", "torch.func"])
def test_a_run_by_a_schedule_is_that_of_the_changed_records(engine):
    (inputs, labels), seed = images(), 7
    schedule = RecordSchedule.of(inputs[:1], labels[:1], torch.full((2, 1), 2.0), seed=seed)
    other = inputs.clone()
    other[0] += 2.0

    def parameters(data, augmentation):
        run = train(
            network(),
            (data, labels),
            dp_sgd(noise_multiplier=0.0),
            sampling=full(),
            steps=2,
            seed=seed,
            noise=seeded(0),
            recipe=Recipe(augmentation=augmentation),
            execution=Execution(engine=engine),
        )
        assert not [remark for remark in run.remarks if remark.startswith("unverified")]
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    scheduled = parameters(inputs, schedule)
    torch.testing.assert_close(scheduled, parameters(other, None), rtol=1e-10, atol=1e-12)
    assert float((scheduled - parameters(inputs, None)).abs().max()) > 1e-4
