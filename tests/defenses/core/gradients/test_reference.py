"""Per-example gradients against a loop of autograd, and the order in which they are laid out."""

import copy
import warnings

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Layout, cross_entropy, per_example_gradients
from leakbench.defenses.core.gradients.reference import ModelFunction, microbatches

from ....parameters import subtests


def mlp():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def conv():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


class Tied(nn.Module):
    """A module used under two names, a weight used in two, and a scalar that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.inner = nn.Linear(6, 6).double()
        self.again = self.inner
        self.same_weight = nn.Linear(6, 6).double()
        self.same_weight.weight = self.inner.weight
        self.out = nn.Linear(6, 3).double()

    def forward(self, inputs):
        for layer in (self.inner, self.again, self.same_weight):
            inputs = torch.tanh(layer(inputs))
        return self.out(self.scale * inputs)


MODELS = {"mlp": (mlp, (6,)), "conv": (conv, (2, 4, 4)), "tied": (Tied, (6,))}


def problem(name, n=5, seed=0):
    torch.manual_seed(seed)
    build, shape = MODELS[name]
    model = build()
    inputs = torch.randn(n, *shape, dtype=torch.float64)
    return model, inputs, torch.arange(n) % 3


def by_loop(model, inputs, labels):
    rows = []
    for i in range(len(inputs)):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs[i : i + 1]), labels[i : i + 1]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_gradients_of_a_loop(name):
    model, inputs, labels = problem(name)
    rows = per_example_gradients(model, cross_entropy, Layout.of(model), inputs, labels)
    torch.testing.assert_close(rows, by_loop(model, inputs, labels), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_does_not_depend_on_its_neighbours(name):
    model, inputs, labels = problem(name)
    layout = Layout.of(model)
    rows = per_example_gradients(model, cross_entropy, layout, inputs, labels)
    others = inputs.clone()
    others[1:] = torch.nan
    poisoned = per_example_gradients(model, cross_entropy, layout, others, labels)
    torch.testing.assert_close(poisoned[0], rows[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_single_example_takes_another_road_to_the_same_row(name):
    model, inputs, labels = problem(name)
    layout = Layout.of(model)
    rows = per_example_gradients(model, cross_entropy, layout, inputs, labels)
    alone = [
        per_example_gradients(model, cross_entropy, layout, inputs[i : i + 1], labels[i : i + 1]) for i in range(5)
    ]
    torch.testing.assert_close(torch.cat(alone), rows, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_keeps_its_very_parameters(name):
    # functional_call's own weight tying leaves copies behind in a module that is used under two names.
    model, inputs, labels = problem(name)
    before = [id(p) for p in model.parameters()]
    for n in (1, 5):
        per_example_gradients(model, cross_entropy, Layout.of(model), inputs[:n], labels[:n])
    assert [id(p) for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())


class Shifted(nn.Module):
    """A layer with a parameter, and a buffer where there is to be one."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        if buffer:
            self.register_buffer("shift", torch.ones(4, dtype=torch.float64))
        else:
            self.shift = 1.0

    def forward(self, x):
        return self.weight * x + self.shift


@pytest.mark.parametrize("buffer", [False, True])
def test_a_scripted_layer_is_differentiated_as_the_layer_is(buffer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch would have scripts go
        scripted = torch.jit.script(Shifted(buffer))
    inputs, labels = torch.randn(1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.ones(1)
    rows = []
    for layer in (scripted, Shifted(buffer)):
        model, before = nn.Sequential(layer), [*layer.parameters()]
        rows.append(per_example_gradients(model, cross_entropy, Layout.of(model), inputs, labels.long()))
        assert [type(p) for p in layer.parameters()] == [type(p) for p in before]
    torch.testing.assert_close(*rows)


def test_frozen_parameters_have_no_columns_and_are_used_as_they_are():
    model, inputs, labels = problem("mlp")
    model[0].weight.requires_grad_(False)
    layout = Layout.of(model)
    assert layout.names == ("0.bias", "2.weight", "2.bias")
    rows = per_example_gradients(model, cross_entropy, layout, inputs, labels)
    torch.testing.assert_close(rows, by_loop(model, inputs, labels), rtol=1e-10, atol=1e-12)


def test_gradients_can_be_taken_at_another_point_and_the_model_stays_where_it_is():
    model, inputs, labels = problem("mlp")
    layout = Layout.of(model)
    here = layout.read(model)
    there = here + torch.randn(layout.dim, dtype=torch.float64)
    rows = per_example_gradients(model, cross_entropy, layout, inputs, labels, parameters=there)
    assert torch.equal(layout.read(model), here)
    nn.utils.vector_to_parameters(there, model.parameters())
    torch.testing.assert_close(rows, by_loop(model, inputs, labels), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [1, 3])
def test_targets_may_be_probabilities_and_rows_are_differentiable_in_both(n):
    model, inputs, labels = problem("mlp", n)
    layout = Layout.of(model)
    soft = nn.functional.one_hot(labels, 3).double()
    hard_rows = per_example_gradients(model, cross_entropy, layout, inputs, labels)
    inputs.requires_grad_()
    soft.requires_grad_()
    rows = per_example_gradients(model, cross_entropy, layout, inputs, soft)
    torch.testing.assert_close(rows.detach(), hard_rows)

    def matched(inputs, soft):
        return per_example_gradients(model, cross_entropy, layout, inputs, soft).square().sum()

    assert torch.autograd.gradcheck(matched, (inputs, soft))


def test_a_layout_reads_flattens_and_unflattens_in_one_order():
    model, _, _ = problem("conv")
    layout = Layout.of(model)
    vector = layout.read(model)
    assert layout.dim == vector.numel() == sum(p.numel() for p in model.parameters())
    assert torch.equal(layout.flatten(layout.unflatten(vector)), vector)
    named = layout.unflatten(vector)
    assert list(named) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(named[name], p) for name, p in model.named_parameters())
    for name, (start, stop) in zip(layout.names, layout.slices, strict=True):
        assert torch.equal(vector[start:stop].view(named[name].shape), named[name])


def test_reading_copies():
    model, _, _ = problem("mlp")
    before = Layout.of(model).read(model)
    kept = before.clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(before, kept)


def test_a_layer_is_a_modules_weight_with_its_bias():
    assert Layout.of(mlp()).layers == ((0, 28), (28, 43))
    assert Layout.of(conv()).layers == ((0, 76), (76, 84), (84, 135))
    assert Layout.of(Tied()).layers == ((0, 1), (1, 43), (43, 49), (49, 70))
    assert Layout.flat(7).layers == ((0, 7),)


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ValueError, match="model must have at least one parameter that requires a gradient"):
        Layout.of(nn.Sequential(nn.Tanh()))


@subtests("size", [0, 1, 7, 10])
@subtests("limit", [None, 1, 3, 7, 100])
def test_microbatches_cover_each_example_once(size, limit):
    parts = list(microbatches(size, limit))
    assert [i for part in parts for i in range(size)[part]] == list(range(size))
    assert all(part.stop - part.start <= (limit or size) for part in parts)
    assert bool(parts) is (size > 0)


class Assigns(nn.Module):
    """Assigns a buffer anew in every pass, and fails when told to."""

    def __init__(self):
        super().__init__()
        self.inner, self.fails = nn.Linear(3, 2), False
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        if self.fails:
            raise RuntimeError("no")
        return self.inner(x) + self.seen


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_as_it_was_after_a_pass_at_other_parameters(fails):
    model = Assigns()
    model.fails = fails
    before = {name: (id(t), t.clone()) for name, t in (*model.named_parameters(), *model.named_buffers())}
    run = ModelFunction(model)
    at = {"inner.weight": torch.ones(2, 3)}
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            run(at, torch.ones(4, 3))
    else:
        torch.testing.assert_close(run(at, torch.ones(4, 3)), 4.0 + model.inner.bias.detach().expand(4, 2))
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        assert id(t) == before[name][0] and torch.equal(t, before[name][1])
    assert isinstance(model.inner.weight, nn.Parameter)


def test_a_parameter_that_is_not_named_is_read_when_it_is_used():
    model = nn.Linear(2, 1)
    run = ModelFunction(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.bias.zero_()
    assert run({}, torch.ones(1, 2)).item() == 6.0
    assert run({"weight": torch.ones(1, 2)}, torch.ones(1, 2)).item() == 2.0


def test_a_weight_under_two_names_is_put_in_both_places():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    found = ModelFunction(model)({"0.weight": torch.eye(2)}, torch.ones(1, 2))
    torch.testing.assert_close(found, torch.ones(1, 2).tanh())
    assert model[2].weight is model[0].weight


class Making(nn.Module):
    """Makes something in its first pass, unless it is there."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3), kind
        self.register_parameter("empty", None)
        self.register_buffer("nothing", None)

    def forward(self, x):
        match self.kind:
            case "parameter" if self.empty is None:
                self.empty = nn.Parameter(torch.ones(()))
            case "buffer" if self.nothing is None:
                self.nothing = torch.ones(())
            case "further parameter" if "further" not in self._parameters:
                self.further = nn.Parameter(torch.ones(()))
            case "further buffer" if "further" not in self._buffers:
                self.register_buffer("further", torch.ones(()))
        return self.layer(x)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "further parameter", "further buffer"])
def test_what_a_pass_makes_does_not_stay(kind):
    model = Making(kind)
    before = [(list(table), id(table)) for table in (model._parameters, model._buffers)]
    ModelFunction(model)({}, torch.ones(2, 6))
    assert [(list(table), id(table)) for table in (model._parameters, model._buffers)] == before
    assert model.empty is None and model.nothing is None
    model(torch.ones(2, 6))
    assert len([*model.parameters(), *model.buffers()]) == 3


def test_modules_that_share_a_table_keep_their_very_parameters():
    model = nn.ModuleDict({"one": nn.Linear(6, 3)})
    model["other"] = copy.copy(model["one"])  # has the same table of parameters
    both = nn.Sequential(model["one"], nn.Linear(3, 6), model["other"])
    before = [*both.parameters()]
    function = ModelFunction(both)
    function({"0.weight": torch.ones(3, 6), "2.weight": torch.ones(3, 6)}, torch.ones(2, 6))
    assert all(a is b for a, b in zip(both.parameters(), before, strict=True))
