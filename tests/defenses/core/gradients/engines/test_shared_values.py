"""Parameters that functions change before they meet the batch: each example's own gradients, or a refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from leakbench.defenses.core import Block, Engine, Everything, Layout, StepPlan, clip, clipped_sums, cross_entropy
from leakbench.defenses.core.gradients.choose import choose
from leakbench.defenses.core.gradients.engines.interface import Unsupported
from leakbench.defenses.core.gradients.layerwise import recorder
from leakbench.defenses.core.gradients.layerwise.engine import Expanded
from leakbench.defenses.core.gradients.layerwise.shared_values import BatchDimension, Meeting, SharedPass, SharedValue

from .....parameters import long_but, subtests
from .duties import assert_same_rows, by_loop, check_views, snapshot
from .modules import CLASSES, Problem, synthetic
from .test_layerwise import plans

LENGTH, WIDTH = 5, 8
PLACES = torch.tensor([0, 1, 1, 3, 0])
DISTANCES = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None] + LENGTH - 1).flatten()
Use = Callable[..., Tensor]


class Using(nn.Module):
    """A network with parameters p, of these shapes, that a function uses between two linear layers."""

    def __init__(self, use: Use, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.out, self.use = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES), use
        self.p = nn.ParameterList([torch.rand(shape) + 0.5 for shape in shapes])

    def forward(self, inputs):
        hidden = torch.tanh(self.use(self, self.inner(inputs)))
        return self.out(hidden if hidden.dim() == 2 else hidden.mean(dim=1))


def windows(model: Any, hidden: Tensor) -> Tensor:
    """Two windows of every example, which are entries of a batch of their own, with positions as in Swin."""
    folded = hidden.reshape(-1, LENGTH, 2, 4).transpose(1, 2).reshape(-1, LENGTH, 4)
    return (folded * model.p[0].flatten().view(1, LENGTH, 4)).view(len(hidden), 2, LENGTH, 4).transpose(1, 2).flatten(2)


def relative_positions(model: Any, hidden: Tensor) -> Tensor:
    """Attention of two heads with a table of relative positions, as in Swin."""
    heads = hidden.view(-1, LENGTH, 2, 4).transpose(1, 2)
    bias = model.p[0][DISTANCES].view(LENGTH, LENGTH, 2).permute(2, 0, 1)[None]
    return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)


def class_token(model: Any, hidden: Tensor) -> Tensor:
    return torch.cat([model.p[0].reshape(1, 1, WIDTH).expand(len(hidden), -1, -1), hidden], dim=1)


def interpolated(model: Any, hidden: Tensor) -> Tensor:
    resized = functional.interpolate(model.p[0].view(1, 7, WIDTH).transpose(1, 2), size=LENGTH, mode="linear")
    return hidden + resized.transpose(1, 2)


def words(model: Any, hidden: Tensor) -> Tensor:
    return functional.embedding((hidden[..., 0] > 0).long(), model.p[0])


USES: dict[str, tuple[Use, tuple[tuple[int, ...], ...]]] = {
    "reshaped": (lambda m, h: h * m.p[0].reshape(WIDTH), ((2, 4),)),
    "of_a_shape_of_its_own": (lambda m, h: h * m.p[0].reshape(1, 1, WIDTH), ((WIDTH,),)),
    "permuted": (lambda m, h: h * m.p[0].permute(1, 0).flatten(), ((4, 2),)),
    "transposed": (lambda m, h: h + m.p[0].mT, ((WIDTH, LENGTH),)),
    "sliced": (lambda m, h: h + m.p[0][:, : h.shape[1]].reshape(LENGTH, WIDTH), ((1, 9, WIDTH),)),
    "sliced_twice": (lambda m, h: (h + m.p[0].mT[:5]) * m.p[0].mT[4:], ((WIDTH, 9),)),
    "indexed": (lambda m, h: h + m.p[0][PLACES], ((4, WIDTH),)),
    "interpolated": (interpolated, ((7, WIDTH),)),
    "exponentiated": (lambda m, h: h * m.p[0].clamp(max=1.0).exp().squeeze(1), ((WIDTH, 1),)),
    "behind_constants": (lambda m, h: h + torch.cat([torch.zeros_like(m.p[0][:1]), m.p[0]]), ((4, WIDTH),)),
    "stacked": (lambda m, h: h + torch.stack([m.p[0], m.p[1]]).sum(dim=0).flatten(), ((2, 4), (2, 4))),
    "added_to_one_that_copies_suit": (lambda m, h: h * (m.p[0] + m.p[1].flatten()), ((WIDTH,), (2, 4))),
    "unbound": (lambda m, h: h * m.p[0].unbind(0)[0] + m.p[0].unbind(0)[1], ((2, WIDTH),)),
    "repeated": (lambda m, h: torch.cat([m.p[0].repeat(len(h), 2, 1), h], dim=1), ((1, WIDTH),)),
    "class_token": (class_token, ((WIDTH,),)),
    "batch_second": (lambda m, h: (h.transpose(0, 1) + m.p[0].view(5, 1, 8)).transpose(0, 1), ((40,),)),
    "windows": (windows, ((LENGTH, 4),)),
    "relative_positions": (relative_positions, ((9, 2),)),
    "changed_in_place": (lambda m, h: h.add_(m.p[0].reshape(WIDTH)), ((2, 4),)),
    "matrix": (lambda m, h: h @ m.p[0].mT, ((WIDTH, WIDTH),)),
    "matrix_of_vectors": (lambda m, h: h[:, 0] @ m.p[0], ((WIDTH, WIDTH),)),
    "einsum": (lambda m, h: torch.einsum("nld,de->nle", h, m.p[0]), ((WIDTH, WIDTH),)),
    "linear": (lambda m, h: functional.linear(h, m.p[0], m.p[1]), ((WIDTH, WIDTH), (WIDTH,))),
    "layer_norm": (lambda m, h: functional.layer_norm(h, (WIDTH,), m.p[0], m.p[1]), ((WIDTH,), (WIDTH,))),
    "prelu": (lambda m, h: functional.prelu(h, m.p[0]), ((LENGTH,),)),
    "index_of_data": (words, ((2, WIDTH),)),
    "bias_of_a_layer": (lambda m, h: h * m.inner.bias + m.inner.weight[:, 0], ()),
    "weight_of_a_layer": (lambda m, h: functional.linear(torch.tanh(h @ m.inner.weight), m.inner.weight), ()),
}


class Computed(nn.Module):
    """A table that two layers compute from constants, with a ReLU in place, and a temperature, as in Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(2, 7), nn.Linear(7, WIDTH, bias=False), nn.ReLU(inplace=True)
        self.inner, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1))
        self.register_buffer("places", torch.randn(1, 3, 3, 2))

    def forward(self, inputs):
        table = self.second(self.relu(self.first(self.places))).view(-1, WIDTH)[torch.tensor([0, 1, 2, 4, 8])]
        hidden = self.inner(inputs) * self.scale.clamp(max=4).exp().flatten()
        return self.out(torch.tanh(hidden + 16 * torch.sigmoid(table)).mean(dim=1))


def made_of(name: str, examples: int = 4) -> Problem:
    """A network with inputs and targets, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Computed() if name == "computed_by_layers" else Using(USES[name][0], *USES[name][1])
        return synthetic(model, (LENGTH, 6), examples)


def chosen(made: Problem, name: str = "auto"):
    return choose(name, made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)


NAMES = [*USES, "computed_by_layers"]


@pytest.mark.parametrize("name", long_but(NAMES[::2], NAMES))
def test_rows_are_those_of_a_loop_whatever_the_number_of_examples(name, monkeypatch):
    """Also where it is the number of positions, and derivatives are met during the pass."""
    made = made_of(name)
    choice, before = chosen(made), snapshot(made.model)
    assert type(choice.engine) is Expanded and choice.note.startswith("layerwise (expanded: ")
    for at_once in (recorder._AT_ONCE, -1):
        monkeypatch.setattr(recorder, "_AT_ONCE", at_once)
        for examples in (1, 2, LENGTH, WIDTH, 11):
            other = made_of(name, examples)._replace(model=made.model)
            assert_same_rows(choice.engine.rows(other.inputs, other.targets), by_loop(other))
    assert snapshot(made.model) == before


@pytest.mark.parametrize("name", long_but(NAMES[1::3], NAMES))
def test_sums_are_the_references_under_every_plan_and_views_are_averaged(name):
    made = made_of(name, 8)
    rows, engine = by_loop(made), chosen(made).engine
    for plan_name, plan in plans(rows).items():
        if plan_name != "difference":
            expected = clipped_sums(plan, [lambda _point: rows], rows)
            for computed, wanted in zip(engine.sums(plan, made.inputs, made.targets), expected, strict=True):
                assert float((computed - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max()), plan_name
    kind: Any = lambda *_: engine  # noqa: E731
    check_views(kind, made)


@subtests("name", ["bias_of_a_layer", "weight_of_a_layer"])
def test_the_record_says_that_functions_use_a_layers_parameter(name):
    assert chosen(made_of(name)).note == "layerwise (expanded: functions use 'inner.weight' beside its layer)"


@subtests("name", ["relative_positions", "weight_of_a_layer", "windows", "computed_by_layers"])
def test_removing_an_example_takes_its_own_contribution_and_nothing_else(name):
    made = made_of(name, 7)
    engine = Engine(made.model)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.01)))
    whole = engine.run(plan.at(0.0), made.inputs, made.targets).total
    for left_out in range(7):
        kept = torch.arange(7) != left_out
        rest = engine.run(plan.at(0.0), made.inputs[kept], made.targets[kept]).total
        assert float((whole - rest).norm()) <= 0.01 * (1 + 1e-9)


def scaled_mean(model: Any, hidden: Tensor) -> Tensor:
    return hidden + model.p[0].reshape(WIDTH) * hidden.mean(dim=0, keepdim=True)


def mixed_by_shape(model: Any, hidden: Tensor) -> Tensor:
    """Reshaped so that a parameter's entries go to numbers of different examples."""
    return (hidden.reshape(WIDTH, -1) * model.p[0].reshape(WIDTH, 1)).reshape(hidden.shape)


def by_the_batch(model: Any, hidden: Tensor) -> Tensor:
    """Looks up one vector for all examples, at an index that depends on all of them."""
    return hidden + model.p[0].reshape(4, WIDTH)[(hidden.sum() * 1e4).long().abs().view(1) % 4]


def alternating(model: Any, hidden: Tensor) -> Tensor:
    """Two halves of every example, behind one another in the batch: the entries of an example are not adjacent."""
    halves = torch.cat([hidden[..., :4], hidden[..., 4:]]) * model.p[0].flatten().view(LENGTH, 4)
    return torch.cat(halves.chunk(2), dim=-1)


def written(model: Any, hidden: Tensor) -> Tensor:
    hidden = hidden.clone()
    hidden[:, 0] = model.p[0].reshape(WIDTH)
    return hidden


REFUSED: dict[str, tuple[Use, tuple[int, ...]]] = {
    "mean_of_the_batch": (scaled_mean, (2, 4)),
    "mixed_by_its_shape": (mixed_by_shape, (WIDTH,)),
    "index_of_the_batch": (by_the_batch, (2, 16)),
    "entries_that_alternate": (alternating, (LENGTH, 4)),
    "written_into_another": (written, (2, 4)),
    "detached": (lambda m, h: h * m.p[0].reshape(WIDTH).detach() + m.p[0].reshape(WIDTH).sum() * h.mean(0), (2, 4)),
}


@pytest.mark.long
@subtests("name", list(REFUSED))
def test_uses_that_mix_examples_or_cannot_be_followed_never_get_a_batch(name):
    use, shape = REFUSED[name]
    made = synthetic(Using(use, shape), (LENGTH, 6), 6)
    with pytest.raises(ValueError, match="engine 'layerwise' cannot run this model: no known layer holds the param"):
        chosen(made, "layerwise")
    engine = Engine(made.model)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.1)))
    whole = engine.run(plan.at(0.0), made.inputs, made.targets).total
    assert engine.name.startswith(("torch.func (no layerwise: ", "one_by_one (no layerwise: "))
    rest = engine.run(plan.at(0.0), made.inputs[1:], made.targets[1:]).total
    assert float((whole - rest).norm()) <= 0.1 * (1 + 1e-9)


def test_detached_values_are_constants():
    use: Use = lambda m, h: h * m.p[0].reshape(WIDTH).detach() + m.p[0].exp().flatten()  # noqa: E731
    made = synthetic(Using(use, (2, 4)), (LENGTH, 6), 6)
    assert_same_rows(chosen(made, "layerwise").engine.rows(made.inputs, made.targets), by_loop(made))


class Padded(nn.Module):
    """Word vectors of a function whose derivative at the padding is zero; that by PyTorch's vmap would not be."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(WIDTH, 7)), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        return self.out(torch.tanh(functional.embedding((inputs > 0).long(), self.table.mT, padding_idx=0)).mean(dim=1))


def test_a_transposed_table_has_no_derivative_at_the_padding():
    made = synthetic(Padded(), (LENGTH,), 6)
    choice = chosen(made)
    assert type(choice.engine) is Expanded
    assert_same_rows(choice.engine.rows(made.inputs, made.targets), by_loop(made))


@subtests("name", ["reshaped", "relative_positions", "matrix"])
def test_float32_gives_the_rows_of_a_loop_up_to_rounding(name):
    made = made_of(name)
    made = Problem(made.model.float(), made.inputs.float(), made.targets)
    torch.testing.assert_close(chosen(made).engine.rows(made.inputs, made.targets), by_loop(made), rtol=1e-4, atol=1e-6)


def test_a_pass_follows_the_functions_of_its_check_and_no_others():
    meetings = [Meeting("mul", "broadcast", 2, BatchDimension(0))]
    owner = SharedPass(3, meetings, {})
    value = owner.parameter(torch.ones(4), lambda _derivatives: None)
    assert type(value) is SharedValue and value.shape == (4,)  # questions about its form are not counted
    product = torch.ones(3, 4) * value
    assert type(product) is Tensor and product.requires_grad and len(owner.leaves) == 1
    with pytest.raises(Unsupported, match="a model must call 1 functions of its parameters, as in its check"):
        value.exp()
    other = SharedPass(3, [Meeting("mul", "broadcast", 2, BatchDimension(0))], {}).parameter(
        torch.ones(4), lambda _: None
    )
    with pytest.raises(Unsupported, match="the same functions of its parameters as in its check, got add for mul"):
        torch.add(torch.ones(3, 4), other)


class Cancelling(nn.Module):
    """Two uses of a parameter whose shares of the gradient cancel up to a part in a million; the loss is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(8, 8)), nn.Linear(64, 64, bias=False)

    def forward(self, inputs):
        return torch.cat([self.scale.reshape(64) * inputs, self.scale.flatten() * self.inner(inputs)], dim=1)


@subtests("size", [1e2, 1e6])
def test_no_example_is_longer_than_its_bound_where_its_uses_cancel(size):
    torch.manual_seed(0)
    model, generator = Cancelling(), torch.Generator().manual_seed(0)
    torch.nn.init.eye_(model.inner.weight)
    inputs, signal = (torch.randn(1, 64, generator=generator) for _ in range(2))
    targets = torch.cat([signal, -signal * (1 + 1e-6)], dim=1) * size
    inputs = torch.cat([inputs, 1e-3 * torch.randn(3, 64, generator=generator)])
    targets = torch.cat([targets, 1e-3 * torch.randn(3, 128, generator=generator)])
    engine = Engine(model, loss=lambda outputs, y: (outputs * y).sum(dim=1), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(1e-3 * size)))
    whole, rest = (engine.clipped_sums(plan, inputs[i:], targets[i:])[0] for i in (0, 1))
    assert engine.name.startswith("layerwise (expanded: ")
    assert float((whole - rest).norm()) <= (1 + 1e-5) * 1e-3 * size


class Doubled(nn.Embedding):
    """Vectors times two, as in BART: no known layer."""

    def forward(self, input):
        return 2 * super().forward(input)


def by_function(weight: Tensor, numbers: Tensor) -> Tensor:
    return functional.embedding(numbers, weight, padding_idx=-1)


def by_aten(weight: Tensor, numbers: Tensor) -> Tensor:
    return torch.embedding(weight, numbers, 1999)


class Worded(nn.Module):
    """Word vectors of which the last is padding, which no synthetic example is likely to have."""

    def __init__(self, look_up: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.words, self.out = Doubled(2000, WIDTH, padding_idx=1999), nn.Linear(WIDTH, CLASSES)
        self.look_up = look_up

    def forward(self, numbers):
        vectors = self.words(numbers) if self.look_up is None else self.look_up(self.words.weight, numbers)
        return self.out(vectors.mean(dim=1))


@subtests("look_up", [None, by_function, by_aten])
def test_the_vector_of_padding_is_no_examples_wherever_it_stands_in_the_batch(look_up):
    """PyTorch's vmap leaves it out for the first example alone: the others' rows would depend on their place."""
    model = Worded(look_up).double()
    numbers = torch.randint(0, 1999, (6, LENGTH)).index_fill_(1, torch.tensor([3, 4]), 1999)
    targets, layout = torch.randint(0, CLASSES, (6,)), Layout.of(model)
    choice = choose("layerwise", model, cross_entropy, layout, numbers, targets)
    assert choice.note.startswith("layerwise (expanded: ")
    rows = choice.engine.rows(numbers, targets)
    assert_same_rows(rows, by_loop(Problem(model, numbers, targets)))
    padding = layout.unflatten(rows[1])["words.weight"][1999]
    assert not padding.any()


def test_an_embedding_that_changes_its_weight_gets_no_batch():
    model = Worded(lambda weight, numbers: functional.embedding(numbers, weight, max_norm=1.0))
    numbers, targets = torch.randint(0, 1999, (6, LENGTH)), torch.randint(0, CLASSES, (6,))
    with pytest.raises(ValueError, match="must"):
        choose("layerwise", model, cross_entropy, Layout.of(model), numbers, targets)


class Tied(nn.Module):
    """Three layers, the third with the weight of another, which a function uses too."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
        self.layers[2].weight = self.layers[other].weight
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        tied = self.layers[2].weight
        assert isinstance(tied, torch.Tensor)
        return self.out(hidden + functional.linear(inputs, tied))


def test_models_that_tie_other_weights_are_checked_by_themselves():
    """Names and shapes of their parameters are the same, and so are their other attributes."""
    for other in (0, 1):
        made = synthetic(Tied(other), (WIDTH,), 5)
        choice = chosen(made)
        assert choice.note == f"layerwise (expanded: functions use 'layers.{other}.weight' beside its layer)"
        assert_same_rows(choice.engine.rows(made.inputs, made.targets), by_loop(made))
