"""Uses that all entries of a batch share: each example's own gradients, or a refusal."""

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Block, Engine, Everything, Layout, StepPlan, clip, clipped_sums, cross_entropy
from leakbench.defenses.core.gradients.checks.synthetic_examples import SyntheticBatch
from leakbench.defenses.core.gradients.choose import choose
from leakbench.defenses.core.gradients.engines.interface import Unsupported
from leakbench.defenses.core.gradients.engines.one_by_one import OneByOne
from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc
from leakbench.defenses.core.gradients.layerwise import recorder
from leakbench.defenses.core.gradients.layerwise.engine import Expanded
from leakbench.defenses.core.gradients.layerwise.shared_uses import aligned
from leakbench.defenses.core.randomness.record_draws import record_keys

from .....parameters import long_but, subtests
from .architectures import problem
from .duties import assert_same_rows, by_loop, snapshot
from .modules import CLASSES, Problem, synthetic
from .test_layerwise import PLANS, plans
from .transformers import LENGTH, Kernel, Picture, RootMeanSquare, Text

SHARED = {
    "positions_of_a_batch_of_one": ((LENGTH,), Text),
    "positions_without_a_batch": ((LENGTH,), lambda: Text(batch=False)),
    "positions_behind_a_norm": ((LENGTH,), lambda: Text(normed=True, types=True)),
    "norms_by_root_mean_square": ((LENGTH,), lambda: Text(RootMeanSquare, normed=True, batch=False)),
    "picture": ((2, 4, 4), Picture),
}


def made_of(name: str, examples: int = 4) -> Problem:
    """A network with inputs and targets, the same each time."""
    shape, build = SHARED[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return synthetic(build(), shape, examples)


def engine_of(made: Problem) -> Expanded:
    engine = choose("layerwise", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets).engine
    assert type(engine) is Expanded
    return engine


@pytest.mark.long
@subtests("name", list(SHARED))
def test_auto_takes_our_engine_and_says_why_it_expands(name):
    made = made_of(name)
    choice = choose("auto", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
    assert choice.note.startswith("layerwise (expanded: ") and type(choice.engine) is Expanded


@pytest.mark.parametrize("name", long_but(["picture"], SHARED))
def test_rows_are_those_of_a_loop_whatever_the_number_of_examples(name, monkeypatch):
    """Also where it is the number of positions, or a part of it, and derivatives are met during the pass."""
    engine, before = engine_of(made_of(name)), None
    for at_once in (recorder._AT_ONCE, -1):
        monkeypatch.setattr(recorder, "_AT_ONCE", at_once)
        for examples in (1, 2, 3, LENGTH, 2 * LENGTH, 5):
            made = made_of(name, examples)
            engine.model.load_state_dict(made.model.state_dict())
            before = before or snapshot(engine.model)
            assert_same_rows(engine.rows(made.inputs, made.targets), by_loop(made))
    assert snapshot(engine.model) == before


@pytest.mark.parametrize("name", long_but(["picture", "positions_of_a_batch_of_one"], SHARED))
def test_sums_are_the_references_under_every_plan(name):
    made = made_of(name, 8)
    rows, engine = by_loop(made), engine_of(made)
    reference = OneByOne(made.model, cross_entropy, engine.layout)
    for plan_name, plan in plans(rows).items():
        if plan_name == "difference":
            expected = reference.sums(plan, made.inputs, made.targets)
        else:
            expected = clipped_sums(plan, [lambda _point: rows], rows)
        for computed, wanted in zip(engine.sums(plan, made.inputs, made.targets), expected, strict=True):
            assert float((computed - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max()), plan_name
    assert set(plans(rows)) == set(PLANS)


@subtests("name", list(SHARED))
def test_views_of_an_example_are_averaged_and_other_points_are_served(name):
    made = made_of(name)
    engine = engine_of(made)
    assert_same_rows(engine.rows(made.inputs, made.targets, views=2), by_loop(made).view(2, 2, -1).mean(dim=1))
    point = engine.layout.read(made.model) + 0.1
    reference = OneByOne(made.model, cross_entropy, engine.layout)
    assert_same_rows(
        engine.rows(made.inputs, made.targets, point=point), reference.rows(made.inputs, made.targets, point=point)
    )


@subtests("name", ["bare_scale", "bare_shift_at_top", "bare_positions", "positions_without_a_batch"])
def test_small_networks_with_such_a_use_have_the_rows_of_a_loop(name):
    made = problem(name)
    assert_same_rows(engine_of(made).rows(made.inputs, made.targets), by_loop(made))


@subtests("examples", [1, 3])
@subtests(
    ("shape", "alignment", "expected"),
    [((5,), 0, (5,)), ((5,), 1, (1, 5)), ((), 2, (1, 1)), ((1, 4, 5), -1, (4, 5)), ((1,), -1, ())],
)
def test_copies_of_a_parameter_are_aligned_with_the_other_dimensions(examples, shape, alignment, expected):
    value = torch.randn(shape)
    copies = aligned(value, alignment, examples)
    assert copies.shape == (examples, *expected)
    assert torch.equal(copies, value.reshape(expected).expand(examples, *expected))


def test_a_parameter_that_copies_cannot_stand_for_goes_by_the_reference_and_the_record_says_why():
    torch.manual_seed(0)
    made = synthetic(Kernel(), (6, 5), 7)
    arguments = (made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
    choice = choose("auto", *arguments)
    assert type(choice.engine) is TorchFunc
    sentence = "no known layer holds the parameter 'kernel', which is one of a Kernel, and copies for each example "
    sentence += "cannot take its place in conv1d"
    assert choice.note == f"torch.func (no layerwise: {sentence})"
    with pytest.raises(ValueError, match=f"engine 'layerwise' cannot run this model: {sentence}"):
        choose("layerwise", *arguments)
    with pytest.raises(Unsupported, match=sentence) as caught:
        Expanded.informed(made.model, cross_entropy, Layout.of(made.model), batch_of(made))
    assert "\n" not in str(caught.value)


def batch_of(made: Problem) -> SyntheticBatch:
    return SyntheticBatch(made.inputs, made.targets, record_keys(made.inputs), made.inputs[:1])


class Centred(nn.Module):
    """Takes a part of the batch's mean off: its size is a parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.tensor([0.1]))

    def forward(self, inputs):
        return inputs - self.part * inputs.mean(dim=0)


def test_a_model_that_mixes_examples_by_such_a_parameter_never_gets_a_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Centred(), nn.Tanh(), nn.Linear(8, CLASSES))
    inputs, targets = torch.randn(6, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    engine = Engine(model)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.1)))
    whole = engine.run(plan.at(0.0), inputs, targets).total
    assert engine.name.startswith("torch.func (no layerwise: ")
    less = engine.run(plan.at(0.0), inputs[1:], targets[1:]).total
    assert float((whole - less).norm()) <= 0.1 * (1 + 1e-5)


class Cancelling(nn.Module):
    """Positions and a scale whose shares of the gradient cancel up to a part in a million; the loss is linear."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.places, self.scale = nn.Embedding(1, width), nn.Parameter(torch.ones(width))

    def forward(self, inputs):
        places = self.places(torch.zeros(1, inputs.shape[1], dtype=torch.long))
        return torch.cat([places + inputs, self.scale * inputs], dim=2)


@subtests("size", [1e2, 1e4, 1e6])
@subtests("norm", [1e-3, 1e-5])
def test_no_example_is_longer_than_its_bound_where_its_positions_cancel(size, norm):
    torch.manual_seed(0)
    model, generator = Cancelling(), torch.Generator().manual_seed(0)
    inputs, signals = (torch.randn(1, 1, width, generator=generator) for width in (64, 128))
    pair = torch.cat([signals, -signals * (1 + 1e-6)], dim=1) * size
    examples = torch.cat([inputs, inputs], dim=1), pair
    others = [1e-3 * torch.randn(3, *values.shape[1:], generator=generator) for values in examples]
    inputs, targets = (torch.cat(pair) for pair in zip(examples, others, strict=True))
    engine = Engine(model, loss=lambda outputs, y: (outputs * y).flatten(1).sum(dim=1), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(norm * size)))
    whole, rest = (engine.clipped_sums(plan, inputs[i:], targets[i:])[0] for i in (0, 1))
    assert engine.name.startswith("layerwise (expanded: ")
    assert float((whole - rest).norm()) <= (1 + 1e-5) * norm * size


def test_dropout_behind_shared_positions_is_drawn_for_each_record():
    torch.manual_seed(0)
    model = nn.Sequential(Text(), nn.Dropout(0.3), nn.Linear(CLASSES, CLASSES))
    inputs, targets = torch.randint(0, 7, (9, LENGTH)), torch.arange(9) % CLASSES
    plan = StepPlan(Block(codec=Everything(Layout.of(model).dim), bound=clip(0.01)))
    engine, alone = Engine(model, engine="layerwise"), Engine(model, engine="one_by_one")
    whole, wanted = (one.run(plan.at(0.0), inputs, targets, seed=3).total for one in (engine, alone))
    assert engine.name.startswith("layerwise (expanded: ")
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-6)
