"""Which engine runs: the static rule, the check before data are touched, what a record says, what is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    Execution,
    Layout,
    StepPlan,
    clip,
    clipped_sums,
    cross_entropy,
    full,
    seeded,
    train,
)
from leakbench.defenses.core.gradients.choose import choose, forget, names
from leakbench.defenses.core.gradients.engines.batches import Batches
from leakbench.defenses.core.gradients.engines.interface import PerExample
from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.gradients.reference import microbatches
from leakbench.defenses.dp_sgd import dp_sgd

from .....parameters import subtests
from .architectures import NAMES, problem
from .duties import by_loop

FALLS_BACK = {
    "batch_second": "no layerwise: layer 'inner' must have the batch as its first dimension",
    "conv3d": "no layerwise: no known layer holds the parameter '0.weight', which is one of a Conv3d, and copies for "
    "each example cannot take its place in conv3d",
    "conv_transpose2d": "copies for each example cannot take its place in conv_transpose2d",
}


def choice_for(made, engine="auto"):
    return choose(engine, made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)


# Options of a layer change neither what the check does nor who runs; their sums are tested with the engine.
FIRST_OF_A_KIND = {name.split("_")[0]: name for name in reversed(NAMES)}.values()
UNLIKE = {*FALLS_BACK, *FIRST_OF_A_KIND, "module_in_two_places", "weight_of_two_modules", "residual_without_norm"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in UNLIKE)) for n in NAMES])
def test_auto_gives_the_references_sum_for_every_architecture_and_says_how(name):
    made = problem(name)
    rows = by_loop(made)
    plan = StepPlan(Block(codec=Everything(rows.shape[1]), bound=clip(float(rows.norm(dim=1).min()) * 0.7 or 1.0)))
    engine = Engine(made.model)
    total = engine.run(plan.at(0.0), made.inputs, made.targets).total
    expected = clipped_sums(plan, [lambda _point: rows], rows)[0]
    assert float((total - expected).abs().max()) <= 1e-12 * max(float(expected.abs().max()), 1e-300)
    assert engine.name == "layerwise" or engine.name.startswith(("torch.func (no layerwise: ", "layerwise (expanded: "))


@subtests("name", sorted(FALLS_BACK))
def test_what_our_engine_cannot_do_falls_back_and_the_record_says_why(name):
    choice = choice_for(problem(name))
    assert type(choice.engine) is TorchFunc
    assert choice.note.startswith("torch.func (")
    assert FALLS_BACK[name] in choice.note
    with pytest.raises(ValueError, match="engine 'layerwise' cannot run this model: "):
        choice_for(problem(name), engine="layerwise")


def test_an_engine_that_is_wrong_is_found_out(monkeypatch):
    made = problem("mlp")
    right = Layerwise.sums
    monkeypatch.setattr(Layerwise, "sums", lambda *a, **k: tuple(1.000001 * s for s in right(*a, **k)))
    assert "differs from the reference by 1.0e-06" in choice_for(made).note
    monkeypatch.setattr(Layerwise, "sums", right)
    forget()
    assert choice_for(made).note == "layerwise"


def test_norms_that_are_wrong_are_found_out_though_unclipped_sums_are_right(monkeypatch):
    from leakbench.defenses.core.gradients.layerwise.factors import GradientRows, Squares
    from leakbench.defenses.core.kernels.bound_factors import NormTable

    right = NormTable.factors

    def wrong(self, *bound):
        found = right(self, *bound)
        return None if found is None else found._replace(factors=2**0.5 * found.factors, squares=0.5 * found.squares)

    monkeypatch.setattr(NormTable, "factors", wrong)
    assert "differs from the reference" in choice_for(problem("mlp")).note
    forget()
    monkeypatch.setattr(NormTable, "factors", lambda self, *bound: None)  # as where a norm is not certain
    assert choice_for(problem("mlp")).note == "layerwise"
    forget()
    monkeypatch.setattr(GradientRows, "squares", lambda self: Squares.exact(0.5 * self.values.square().sum(dim=1)))
    assert "differs from the reference" in choice_for(problem("mlp")).note


def test_the_check_looks_at_no_value_and_leaves_the_model_alone():
    made = problem("conv2d_plain")
    before = copy.deepcopy(made.model.state_dict())
    made.inputs.fill_(torch.nan)
    assert choice_for(made).note == "layerwise"
    assert all(torch.equal(value, before[key]) for key, value in made.model.state_dict().items())
    assert made.model.training


class Centred(nn.Module):
    """Mixes the examples of a batch, in training alone: nothing that the layers' types could show."""

    def forward(self, inputs):
        return inputs - inputs.mean(dim=0) if self.training else inputs


def test_a_layer_that_mixes_examples_in_training_alone_never_gets_a_batch():
    model = nn.Sequential(nn.Linear(4, 5), Centred(), nn.Tanh(), nn.Linear(5, 3))
    data = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    engine = Engine(model)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.1)))
    whole = engine.run(plan.at(0.0), *data).total
    assert "no layerwise: differs from the reference" in engine.name
    less = engine.run(plan.at(0.0), data[0][1:], data[1][1:]).total
    assert float((whole - less).norm()) <= 0.1 * (1 + 1e-5)
    model.eval()  # where nothing is mixed, another check allows it
    engine.run(plan.at(0.0), *data)
    assert engine.name == "layerwise"


def test_what_is_drawn_in_the_check_does_not_move_the_run():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    inputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    before = torch.random.get_rng_state()
    assert choose("auto", model, cross_entropy, Layout.of(model), inputs, targets).note == "layerwise"
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_runs_once_for_data_of_one_shape(monkeypatch):
    made, checks = problem("mlp"), []
    engine = Engine(made.model)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(1.0)))
    whole = PerExample.__init__
    monkeypatch.setattr(PerExample, "__init__", lambda self, *a: (checks.append(1), whole(self, *a))[1])
    for _ in range(3):
        engine.run(plan.at(0.0), made.inputs, made.targets)
    assert len(checks) == 3  # the engine itself, and on the float64 copy its twin and the reference


@pytest.mark.long
def test_what_was_found_out_about_a_model_holds_for_its_equals_and_for_no_other(monkeypatch):
    trials = []
    whole = PerExample.__init__
    monkeypatch.setattr(PerExample, "__init__", lambda self, *a: (trials.append(1), whole(self, *a))[1])

    def tried(model, loss=cross_entropy, inputs=None, batches=None, name="auto"):
        trials.clear()
        inputs = torch.zeros(2, 4) if inputs is None else inputs
        choice = choose(name, model, loss, Layout.of(model), inputs, torch.tensor([0, 1]), batches=batches)
        assert choice.engine.model is model
        return len(trials) > 1

    def network(slope=0.1):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.LeakyReLU(slope), nn.Linear(5, 3))

    def weighted(factor):
        return lambda outputs, targets: factor * cross_entropy(outputs, targets)

    other, moved = network(), network()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1.0
        moved.register_buffer("table", torch.zeros(2))
    one_frozen = network()
    one_frozen[1].bias.requires_grad_(False)
    assert tried(network()) and not tried(network())
    assert not tried(other)  # trained weights become others anyway
    assert tried(network(0.2)) and tried(network().eval()) and tried(one_frozen) and tried(moved)
    next(moved.buffers()).add_(1.0)
    assert tried(moved)
    assert tried(network(), weighted(2.0)) and not tried(network(), weighted(2.0)) and tried(network(), weighted(3.0))
    assert tried(network(), inputs=torch.zeros(2, 4, dtype=torch.float64)) and tried(
        network(), inputs=torch.zeros(2, 1, 4)
    )
    assert tried(network(), batches=Batches(expected=9)) and tried(network(), name="torch.func")
    stream = iter([1.0, 2.0])  # nothing can look into it: never taken for a known one
    opaque = [lambda outputs, targets: (stream, cross_entropy(outputs, targets))[1]] * 2
    assert all(tried(network(), loss) for loss in opaque)


def test_no_more_is_remembered_than_a_few_dozen(monkeypatch):
    from importlib import import_module

    module = import_module("leakbench.defenses.core.gradients.choose")
    monkeypatch.setattr(module, "_REMEMBERED", 3)
    for width in range(2, 8):
        model = nn.Linear(4, width)
        choose("auto", model, cross_entropy, Layout.of(model), torch.zeros(2, 4), torch.tensor([0, 1]))
    assert len(module._verdicts) == 3


def test_a_model_that_fails_on_synthetic_rows_runs_by_the_reference():
    class Picky(nn.Linear):
        def forward(self, input):
            if input.dtype == torch.float64:
                raise RuntimeError("no float64 here\nand a second line")
            return super().forward(input)

    model = nn.Sequential(Picky(4, 3))
    inputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    choice = choose("auto", model, cross_entropy, Layout.of(model), inputs, targets)
    assert choice.note == "torch.func (no layerwise: not checked in float64: no float64 here)"
    assert choice.unverified == ""  # it was tried in float32
    with pytest.raises(
        ValueError, match="engine 'layerwise' cannot run this model: not checked in float64: no float64"
    ):
        choose("layerwise", model, cross_entropy, Layout.of(model), inputs, targets)


@pytest.mark.long
def test_a_model_that_fails_on_made_up_rows_altogether_gets_one_example_at_a_time_and_is_told_of():
    class Pickier(nn.Linear):
        def forward(self, input):
            if input.abs().max() < 2:
                raise RuntimeError("too small")
            return super().forward(input)

    model = nn.Sequential(Pickier(4, 3))
    data = 2 + torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    choice = choose("auto", model, cross_entropy, Layout.of(model), *data)
    assert choice.note == "one_by_one (not checked: too small)"
    assert choice.unverified == "the model fails on made-up examples: too small"
    unchecked = Execution(unchecked=True)
    run = train(model, data, dp_sgd(noise_multiplier=1.0), sampling=full(), steps=1, execution=unchecked)
    assert run.remarks == ("unverified_model",)
    assert run.claim(1e-5).unverified == (choice.unverified,)
    with pytest.raises(ValueError, match=r"engine 'torch\.func' could not be checked on made-up examples: too small"):
        choose("torch.func", model, cross_entropy, Layout.of(model), *data)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.peers] * (n in ("opacus", "backpack"))) for n in names() if n != "auto"]
)
def test_a_run_records_the_engine_and_all_train_the_same_model(name):
    if name == "backpack":
        pytest.importorskip("backpack", reason="backpack-for-pytorch is of leakbench[engines]")
    if name == "opacus":
        pytest.importorskip("opacus", reason="opacus is of leakbench[engines]")
    coins = torch.Generator().manual_seed(0)
    data = (torch.randn(12, 6, generator=coins), torch.randint(0, 3, (12,), generator=coins))

    def trained(engine):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        defense = dp_sgd(clip_norm=0.5, noise_multiplier=1.0)
        execution = Execution(engine=engine)
        return train(model, data, defense, sampling=full(), steps=3, noise=seeded(1), seed=2, execution=execution)

    run, reference = trained(name), trained("torch.func")
    assert run.engine == name
    layout = Layout.of(run.model)
    torch.testing.assert_close(layout.read(run.model), layout.read(reference.model), rtol=1e-5, atol=1e-6)


def test_an_unknown_engine_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match=r"engine must be one of auto, layerwise, torch\.func, .*, got 'fastest'"):
        Engine(nn.Linear(2, 2), engine="fastest")


@pytest.mark.parametrize("budget", [1, 40_000, None])
def test_batches_are_cut_to_a_memory_budget_and_nothing_else_changes(budget):
    made = problem("conv2d_plain")
    rows = by_loop(made)
    plan = StepPlan(Block(codec=Everything(rows.shape[1]), bound=clip(0.1)))
    engine, sizes = Engine(made.model, memory_budget=budget), []
    choice = engine.prepare(made.inputs, made.targets)
    whole = choice.engine.sums

    def counted(plan, inputs, targets, *, views=1):
        sizes.append(len(inputs))
        return whole(plan, inputs, targets, views=views)

    choice.engine.sums = counted  # pyright: ignore[reportAttributeAccessIssue]  padding is for devices
    total = engine.run(plan.at(0.0), made.inputs, made.targets).total
    torch.testing.assert_close(total, clipped_sums(plan, [lambda _: rows], rows)[0], rtol=1e-12, atol=1e-14)
    assert sizes == ([1] * 4 if budget == 1 else [4] if budget is None else sizes)
    assert max(sizes) * choice.engine.bytes_per_entry(choice.activations, 8) <= max(
        budget or 2**31, choice.engine.bytes_per_entry(choice.activations, 8)
    )


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_without_room_is_refused(budget):
    with pytest.raises(ValueError, match=f"memory_budget must be at least 1 or None, got {budget}"):
        Engine(nn.Linear(2, 2), memory_budget=budget)


class ByView(nn.Module):
    """Takes a view of what a convolution puts out, as many networks do ahead of their first linear layer."""

    def __init__(self, *, first: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.first, self.conv, self.out = first, nn.Conv2d(2, 3, 3), nn.Linear(48, 3)

    def forward(self, inputs):
        if self.first is not None:
            inputs = inputs.reshape(len(inputs), -1).view(len(inputs), *self.first)
        return self.out(self.conv(inputs).view(len(inputs), -1))


class MeanFree(nn.Module):
    def forward(self, weight):
        flat = weight.view(len(weight), -1)
        return (flat - flat.mean(dim=1, keepdim=True)).view(weight.shape)


def centred():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 3))
    parametrize.register_parametrization(model[0], "weight", MeanFree())
    return model


@subtests(
    ("build", "shape", "note"),
    [
        (ByView, (2, 6, 6), "layerwise (contiguous: fails on synthetic rows: "),
        (lambda: ByView(first=(2, 6, 6)), (2, 9, 4), "layerwise (contiguous: "),
        (centred, (2, 6, 6), "layerwise"),
    ],
)
@subtests("asked", ["auto", "layerwise"])
def test_models_that_look_at_memory_keep_our_engine(build, shape, note, asked):
    torch.manual_seed(0)
    model, inputs, targets = build().double(), torch.randn(4, *shape, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    layout = Layout.of(model)
    choice = choose(asked, model, cross_entropy, layout, inputs, targets)
    assert choice.note.startswith(note)
    rows = TorchFunc(model, cross_entropy, layout).rows(inputs, targets)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(0.1)))
    (expected,) = clipped_sums(plan, [lambda _point: rows], rows)
    torch.testing.assert_close(choice.engine.sums(plan, inputs, targets)[0], expected, rtol=1e-12, atol=1e-14)


def test_a_layer_that_is_called_without_gradients_too_is_named():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, inputs):
            with torch.no_grad():
                scale = self.layer(inputs).abs().mean(1, keepdim=True)
            return self.layer(inputs) / (1 + scale)

    model, data = Looks(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    with pytest.raises(ValueError, match="layer 'layer' must not be called without gradients"):
        choose("layerwise", model, cross_entropy, Layout.of(model), *data)
    assert choose("auto", model, cross_entropy, Layout.of(model), *data).note.startswith("torch.func (no layerwise: ")


@subtests("expected, most", [(100, 64), (100, 100), (100, 33), (100, 1), (1, 8), (9, None), (256, 250)])
def test_an_engine_is_checked_on_the_micro_batches_that_run(expected, most):
    batches = Batches(expected=expected, views=2, most=most)
    executed = {2 * (part.stop - part.start) for part in microbatches(expected, batches.micro_batch(expected, 1000))}
    assert executed <= batches.sizes(1000) and max(executed) <= 2 * (most or expected)
