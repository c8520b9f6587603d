"""Models trained as one stack: the same as one after another, and a clear refusal of what a stack does not execute."""

import copy
import importlib
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from leakbench.audit.catalog.listing import central_names
from leakbench.defenses.core import (
    Block,
    Context,
    Coordinates,
    CropAndFlip,
    Defense,
    Everything,
    Recipe,
    Sampling,
    StackError,
    Stateless,
    StepPlan,
    clip,
    cross_entropy,
    poisson,
    seeded,
    shuffle,
    train,
    train_stacked,
)
from leakbench.defenses.core.training.stacked import stacked_training as stacked_models

from .....parameters import subtests

MODELS, COUNT = 3, 40
POOL = (
    torch.randn(60, 1, 3, 4, generator=torch.Generator().manual_seed(0)),
    torch.randint(0, 5, (60,), generator=torch.Generator().manual_seed(1)),
)
CHOSEN = torch.stack([torch.randperm(60, generator=torch.Generator().manual_seed(s))[:COUNT] for s in (2, 3, 4)])


def network(seed: int, *middle: nn.Module, bias: bool = True) -> nn.Module:
    coins = torch.Generator().manual_seed(seed)
    layers = middle or (nn.Tanh(),)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8, bias=bias), *layers, nn.Linear(8, 5))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=coins) / 3)
    return model


def defense(name: str, noise: float = 0.0, **settings) -> Defense:
    made = getattr(importlib.import_module(f"leakbench.defenses.{name}"), name)(**settings)
    return made if made.noise_multiplier == 0 else made.with_noise(noise)


def stacked(one: Defense, *, steps: int = 12, build=network, models: int = MODELS, noise: int = 0, **more) -> list:
    """Models trained together."""
    stack = [build(number) for number in range(models)]
    train_stacked(
        stack,
        more.pop("pool", POOL),
        more.pop("chosen", CHOSEN),
        one,
        sampling=more.pop("sampling", shuffle(0.25)),
        steps=steps,
        lr=0.5,
        noise=torch.Generator().manual_seed(noise),
        seeds=[11 + number for number in range(models)],
        sampler_keys=[21 + number for number in range(models)],
        **more,
    )
    return stack


def vectors(models: list[nn.Module]) -> torch.Tensor:
    return torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() for m in models])


def both(one: Defense, *, steps: int = 12, build=network, **more) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters of models trained alone and together [models, dim]."""
    # First, because a refusal is what some tests are about.
    together = vectors(stacked(one, steps=steps, build=build, **more))
    alone, pool = [build(number) for number in range(MODELS)], more.get("pool", POOL)
    for number, (model, chosen) in enumerate(zip(alone, CHOSEN, strict=True)):
        train(
            model,
            (pool[0][chosen], pool[1][chosen]),
            one,
            sampling=more.get("sampling", shuffle(0.25)),
            steps=steps,
            lr=0.5,
            noise=seeded(0),
            seed=11 + number,
            sampler_key=21 + number,
            recipe=more.get("recipe"),
        )
    return vectors(alone), together


TOGETHER = {
    "sgd": {},
    "clipped_sgd": {"clip_norm": 0.5},
    "dp_sgd": {"clip_norm": 0.5},
    "auto_s": {"clip_norm": 0.5},
    "auto_v": {"clip_norm": 0.5},
    "nsgd": {"clip_norm": 0.5},
    "psac": {"clip_norm": 0.5},
    "random_sparsification": {"final_sparsity": 0.8},
    "random_freeze": {"final_sparsity": 0.6, "cooling_epochs": 2},
    "random_dropping": {},
    "magnitude_dropping": {},
    "random_pruning": {},
    "synflow": {"rounds": 3},
    "posterior_freeze": {"final_sparsity": 0.6},
}
"""Methods whose plans a stack executes, with settings under which they do something in a few steps."""


@pytest.mark.long
@subtests("name", TOGETHER)
def test_without_noise_each_model_is_the_one_that_it_is_alone(name):
    alone, together = both(defense(name, **TOGETHER[name]))
    assert float((alone - vectors([network(number) for number in range(MODELS)])).norm()) > 0.1
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


@subtests("name", sorted({*central_names()} - TOGETHER.keys()))
def test_a_method_that_a_stack_does_not_execute_is_refused_or_gives_the_same(name):
    try:
        alone, together = both(defense(name), steps=4)
    except ValueError as error:
        assert isinstance(error, StackError) or "this method needs public data, got none" in str(error)
        return
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(momentum=0.9, schedule="cosine"),
        Recipe(optimizer="adam", average=0.9),
        Recipe(schedule="linear", expected_batch=7.0),
    ],
)
def test_optimizers_schedules_and_averages_are_those_of_a_training_alone(recipe):
    one = defense("random_freeze", final_sparsity=0.6, cooling_epochs=2)
    alone, together = both(one, recipe=recipe)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "sampling", [Sampling("partition", 0.3), Sampling("random_allocation", 0.05), Sampling("full", 1.0)]
)
def test_batches_are_the_samplers_empty_ones_included(sampling):
    alone, together = both(defense("dp_sgd", clip_norm=0.5), sampling=sampling)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "middle", [(nn.ReLU(),), (nn.Sequential(nn.GELU(), nn.Linear(8, 8)), nn.Sigmoid()), (nn.LeakyReLU(0.3), nn.ELU())]
)
def test_chains_of_linear_layers_and_elementwise_functions_are_taken(middle):
    def build(seed: int) -> nn.Module:
        return network(seed, *copy.deepcopy(middle), bias=False)

    alone, together = both(defense("random_sparsification", final_sparsity=0.8), build=build)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "released"), [("dp_sgd", 1.0), ("random_pruning", 81 / 149)])
def test_noise_has_the_scale_of_the_plan_in_the_coordinates_that_are_released(name, released):
    """Of one step, as what noise changes; two thirds and three halves of the scale are rejected."""
    settings = {"prune_rate": 0.5, "pruned": "initial"} if name == "random_pruning" else {}
    chosen, moved = CHOSEN[0].repeat(40, 1), []
    for sigma in (2.0, 0.0):
        one = defense(name, sigma, clip_norm=0.7, **settings)
        moved.append(vectors(stacked(one, steps=1, models=40, chosen=chosen, noise=5)))
    # lr / expected batch = 0.5 / 10, by which a release is multiplied.
    noise = (moved[0] - moved[1]).double() / 0.05
    there = noise[noise != 0]
    assert len(there) == pytest.approx(released * noise.numel(), rel=1e-3)
    energy = float(there.square().sum())
    for scale, fits in ((1.4, True), (1.4 * 2 / 3, False), (1.4 * 1.5, False)):
        p = stats.chi2(len(there)).cdf(energy / scale**2)
        assert (1e-6 < p < 1 - 1e-6) == fits
    # Models have noise of their own.
    correlation = torch.corrcoef(noise)[~torch.eye(40, dtype=torch.bool)]
    assert float(correlation.abs().max()) < 0.6


def test_a_row_that_is_not_finite_counts_as_zero_by_itself():
    inputs = POOL[0].clone()
    inputs[CHOSEN[0][0]] = torch.inf
    one, full = defense("dp_sgd", clip_norm=0.5), Sampling("full", 1.0)
    models, ends = [network(0), network(0)], []
    for pool, chosen in (((inputs, POOL[1]), CHOSEN[0]), (POOL, CHOSEN[0][1:])):
        model = models[len(ends)]
        batch = Recipe(expected_batch=40.0)
        train_stacked(
            [model], pool, chosen[None], one, sampling=full, steps=2, lr=0.5, noise=torch.Generator(), seeds=[1],
            sampler_keys=[2], recipe=batch,
        )  # fmt: skip
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert ends[0].isfinite().all()
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.parametrize("name", ["auto_v", "dp_sgd"])
def test_rows_so_short_that_their_squares_vanish_are_bounded_by_their_norm(name):
    """A model that is very sure of its labels: gradients of 1e-26, which AUTO-V scales to the clip norm."""

    def sure(_: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5, bias=False))
        with torch.no_grad():
            model.get_parameter("0.weight").copy_(60 * torch.eye(5))
        return model

    pool = (torch.eye(5).repeat(12, 1), torch.arange(5).repeat(12))
    one, moved = defense(name, clip_norm=0.5 if name == "auto_v" else 1e-26), []
    for alone in (True, False):
        model, full = sure(0), Sampling("full", 1.0)
        if alone:
            train(model, pool, one, sampling=full, steps=1, lr=1.0, noise=seeded(0), seed=1, sampler_key=2)
        else:
            train_stacked(
                [model], pool, torch.arange(60)[None], one, sampling=full, steps=1, lr=1.0, noise=torch.Generator(),
                seeds=[1], sampler_keys=[2],
            )  # fmt: skip
        moved.append(model.get_parameter("0.weight").detach() - 60 * torch.eye(5))
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=0.0)
    assert name != "auto_v" or float(moved[1].norm()) > 0.1


def test_a_row_that_is_not_finite_where_a_mask_drops_it_counts_as_zero():
    class SecondLayer(Stateless):
        def plan(self, context: Context) -> StepPlan:
            return StepPlan(Block(codec=Coordinates(torch.arange(96, context.dim), dim=context.dim), bound=clip(0.5)))

    def build(seed: int) -> nn.Module:
        model = network(seed, nn.Identity(), bias=False)
        with torch.no_grad():
            model.get_parameter("1.weight")[:, 0] = 0.0
            model.get_parameter("3.weight").mul_(1e20)
        return model

    inputs = POOL[0].clone()
    inputs[CHOSEN[0][:3], 0, 0, 0] = 1e20
    (alone, *_), (together, *_) = both(
        Defense(SecondLayer(), 0.0), build=build, steps=1, sampling=Sampling("full", 1.0), pool=(inputs, POOL[1])
    )
    assert alone.isfinite().all()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


class FromWhereItBegan:
    """Puts the model to zero before the first step, and moves it by the parameters that it had in its first plan."""

    def start(self, context: Context) -> None:
        return None

    def plan(self, state: Tensor | None, context: Context) -> tuple[Tensor | None, StepPlan]:
        at = context.parameters
        assert at is not None
        began = at if state is None else state
        block = Block(codec=Everything(context.dim), bound=clip(0.5))
        start_at = torch.zeros_like(at) if state is None else None
        return began, StepPlan(block, start_at=start_at, post=lambda update: update - began)

    def observe(self, state: Tensor, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Tensor:
        return state


def test_a_method_may_keep_the_parameters_that_it_is_shown_though_it_starts_elsewhere():
    alone, together = both(Defense(FromWhereItBegan(), 0.0), steps=3)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


class GlobalCoins:
    """Draws from PyTorch's global generator for its plan, its map after the noise, and what it remembers."""

    def start(self, context: Context) -> float:
        return 1.0

    def plan(self, state: float, context: Context) -> tuple[float, StepPlan]:
        kept = Coordinates(torch.randperm(context.dim)[:40], dim=context.dim)
        return state, StepPlan(
            Block(codec=kept, bound=clip(0.5 * state)), post=lambda update: update * torch.rand(len(update))
        )

    def observe(self, state: float, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> float:
        # The same bound for all models of a stack, by a draw that all of them make, and leave the others' as they are.
        torch.rand(3)
        return state


def test_a_method_that_draws_from_the_global_generator_gets_the_coins_of_its_model():
    alone, together = both(Defense(GlobalCoins(), 0.0), steps=3)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_what_training_refuses_a_stack_refuses():
    class OneNumber(Stateless):
        def plan(self, context: Context) -> StepPlan:
            return StepPlan(Block(codec=Everything(context.dim), bound=clip(0.5)), post=lambda update: update.mean())

    with pytest.raises(ValueError, match=r"as long as it was given, \[149\], got \[\]"):
        stacked(Defense(OneNumber(), 0.0))
    with torch.autocast("cpu"), pytest.raises(ValueError, match="in full precision, got"):
        stacked(defense("dp_sgd"))


def beside_the_others(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = cross_entropy(outputs, labels)
    return losses * losses.detach().mean()


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, beside_the_others])
def test_a_loss_by_which_examples_show_in_each_others_gradients_is_refused(loss):
    with pytest.raises(StackError, match="a loss of each example by itself, got one that mixes them"):
        stacked(defense("dp_sgd"), recipe=Recipe(loss=loss))


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), lambda outputs, labels: (outputs[:, 0] - labels.float()).square()]
)
def test_a_loss_that_takes_each_example_by_itself_is_taken(loss):
    recipe = Recipe(loss=loss)
    alone, together = both(defense("dp_sgd", clip_norm=0.5), recipe=recipe)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def images(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(4, 5))


def hooked(_: int) -> nn.Module:
    model = network(0)
    model.get_submodule("1").register_forward_hook(lambda *_: None)
    return model


def frozen(_: int) -> nn.Module:
    model = network(0)
    model.get_parameter("1.weight").requires_grad_(False)
    return model


def hooked_as_a_whole(_: int) -> nn.Module:
    model = network(0)
    model.register_forward_hook(lambda module, inputs, output: torch.mul(output, 2))  # type: ignore[arg-type]  # a tensor
    return model


def tied(_: int) -> nn.Module:
    layer = nn.Linear(12, 12)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(12, 5))


def one_weight(_: int) -> nn.Module:
    first, second = nn.Linear(12, 12), nn.Linear(12, 12)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Linear(12, 5))


def computes_otherwise(place: str) -> Callable[[int], nn.Module]:
    """Networks one of whose modules has a forward function of its own."""

    def build(_: int) -> nn.Module:
        model = network(0)
        layer = model.get_submodule(place)
        own = layer.forward
        layer.forward = lambda x: 2 * own(x)
        return model

    return build


def with_parameter(place: str) -> Callable[[int], nn.Module]:
    """Networks with a parameter beside those of linear layers, which no gradient reaches."""

    def build(_: int) -> nn.Module:
        model = network(0)
        model.get_submodule(place).register_parameter("extra", nn.Parameter(torch.ones(7)))
        return model

    return build


def hooked_before_all(_: int) -> nn.Module:
    model = network(0)
    model.get_submodule("0").register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    return model


def hooked_backwards(_: int) -> nn.Module:
    model = network(0)
    model.get_submodule("1").register_full_backward_hook(lambda *_: None)
    return model


def hooked_at_a_gradient(_: int) -> nn.Module:
    model = network(0)
    model.get_parameter("1.weight").register_hook(lambda gradient: gradient * 0)
    return model


@subtests(
    ("build", "sentence"),
    [
        (computes_otherwise(""), "another forward"),
        (computes_otherwise("0"), "another forward"),  # the flattening, which a stack leaves out
        (computes_otherwise("1"), "another forward"),
        (with_parameter(""), "of known layers, got 'extra'"),
        (with_parameter("1"), r"of known layers, got '1\.extra'"),
        (with_parameter("2"), r"of known layers, got '2\.extra'"),
        (hooked_before_all, "without hooks"),
        (hooked_backwards, "no backward hooks"),
        (hooked_at_a_gradient, "parameters must have no hooks"),
        (
            lambda _: images(nn.Conv2d(1, 2, 3)),
            "convolutions are not stacked where that is slower, as on the device cpu",
        ),
        (lambda _: images(nn.Conv1d(1, 2, 3)), "got Conv1d"),
        (lambda _: images(nn.BatchNorm2d(1)), "got BatchNorm2d"),
        (lambda _: images(nn.MaxPool2d(2, return_indices=True)), "one output, got indices"),
        (
            lambda _: nn.Sequential(nn.Flatten(0), nn.Linear(12, 5)),
            "within an example, start_dim at least 1, got Flatten",
        ),
        (lambda _: nn.Linear(12, 5), "must be of nn.Sequential models, got Linear"),
        (lambda _: nn.Sequential(nn.Flatten(), nn.Tanh()), "must have a layer with parameters"),
        (lambda seed: network(seed, nn.Dropout(0.5)), "got Dropout"),
        (lambda seed: network(seed, *[nn.Tanh()] * (1 + seed), bias=seed == 0), "one architecture"),
        (lambda seed: network(seed, nn.LeakyReLU(0.1 * (1 + seed))), "one architecture"),
        # Which do not say so themselves.
        (lambda seed: images(nn.AvgPool2d(2, padding=1, count_include_pad=seed == 0)), "one architecture"),
        (lambda seed: images(nn.AvgPool2d(2, divisor_override=1 + seed)), "one architecture"),
        (hooked, "without hooks"),
        (hooked_as_a_whole, "without hooks"),
        (tied, "parameters of their own, got shared ones"),
        (one_weight, "parameters of their own, got shared ones"),
        (lambda seed: network(seed, nn.ReLU(inplace=True)), "change nothing in place, got ReLU"),
        (frozen, "a frozen layer"),
    ],
)
def test_other_models_are_refused(build, sentence):
    with pytest.raises(StackError, match=sentence):
        stacked(defense("dp_sgd"), build=build)


@pytest.mark.parametrize("affine", [True, False])
def test_a_group_norm_of_single_numbers_is_refused_as_pytorch_refuses_it_of_one_example(affine):
    with pytest.raises(StackError, match="an example by itself: "):
        stacked(defense("sgd"), build=lambda seed: network(seed, nn.GroupNorm(8, 8, affine=affine)))


def test_a_hook_on_all_modules_is_refused():
    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        with pytest.raises(StackError, match="without hooks"):
            stacked(defense("dp_sgd"))
    finally:
        hook.remove()


def test_other_recipes_and_numbers_that_do_not_fit_are_refused():
    one = defense("dp_sgd")
    with pytest.raises(StackError, match="views"):
        stacked(one, recipe=Recipe(augmentation=CropAndFlip(views=2)))
    with pytest.raises(StackError, match="an optimizer of one's own"):
        stacked(one, recipe=Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))
    with pytest.raises(ValueError, match="a seed, a key and examples for each model, got"):
        stacked(one, chosen=CHOSEN[:2])
    with pytest.raises(ValueError, match=r"chosen must have an example for each model, got \[3, 0\]"):
        stacked(one, chosen=CHOSEN[:, :0])


def test_poisson_sampling_is_a_coin_of_each_record_in_each_step_and_each_model():
    members = torch.arange(200).repeat(8, 1) + 1000
    joined = torch.zeros(8, 60, 200)
    for step in range(60):
        rows, there = stacked_models.drawn(poisson(0.1), step, members, list(range(8)))
        for model in range(8):
            joined[model, step, rows[model][there[model]] - 1000] += 1
    assert set(joined.unique().tolist()) == {0.0, 1.0}
    # 96,000 coins, and pairs of them by model, by step and by record.
    assert abs(float(joined.mean()) - 0.1) < 5 * (0.09 / joined.numel()) ** 0.5
    for a, b in ((joined[1:], joined[:-1]), (joined[:, 1:], joined[:, :-1]), (joined[..., 1:], joined[..., :-1])):
        assert abs(float((a * b).mean()) - 0.01) < 5 * (0.01 * 0.99 / a.numel()) ** 0.5
    again = stacked_models.drawn(poisson(0.1), 3, members, list(range(8)))
    assert torch.equal(again[0], stacked_models.drawn(poisson(0.1), 3, members, list(range(8)))[0])
    none = stacked_models.drawn(poisson(1e-9), 0, members, list(range(8)))
    assert not none[1].any()


@pytest.mark.parametrize("sampling", [poisson(0.25), poisson(1e-6)])
def test_a_run_on_poisson_batches_learns_and_empty_batches_are_steps(sampling):
    moved = vectors(stacked(defense("dp_sgd", clip_norm=0.5), sampling=sampling)) - vectors(
        [network(n) for n in range(3)]
    )
    assert (float(moved.norm()) > 0.1) == (sampling.rate > 0.1)
