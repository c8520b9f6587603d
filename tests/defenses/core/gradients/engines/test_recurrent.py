"""`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells by linear layers: options, layouts, first states, dropout, graphs."""

import copy

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Block, Engine, Everything, Layout, StepPlan, clip, cross_entropy, normalize
from leakbench.defenses.core.gradients.choose import choose
from leakbench.defenses.core.gradients.engines.interface import Unsupported
from leakbench.defenses.core.gradients.engines.one_by_one import OneByOne
from leakbench.defenses.core.gradients.layerwise import captured
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.gradients.layerwise.layers.opened import recurrence
from leakbench.defenses.core.gradients.layerwise.layers.opened.model import OpenedModel, projections_of
from leakbench.defenses.core.plan.query import LossChange
from tests.pretend_device import device

from .....parameters import in_turn, pairwise, subtests
from .duties import assert_same_rows, by_loop, snapshot
from .modules import CLASSES, Looped, Problem, Recurrent, frozen, synthetic
from .test_captured import Recordings

LENGTH, WIDTH, HIDDEN = 5, 6, 4
KINDS = {
    "lstm": nn.LSTM,
    "projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=3, **options),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS = pairwise(list(KINDS), (1, 2, 3), (False, True), (False, True), (False, True), (False, True))


class Begun(nn.Module):
    """A recurrent layer whose first states are computed from an example's first inputs."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.first = layer, nn.Linear(WIDTH, 2 * HIDDEN)
        state = layer.proj_size or HIDDEN
        self.out = nn.Linear((1 + layer.bidirectional) * state, CLASSES)
        self.of_cells = nn.Linear(HIDDEN if isinstance(layer, nn.LSTM) else state, CLASSES)

    def forward(self, inputs):
        layer = self.layer
        ways = layer.num_layers * (1 + layer.bidirectional)
        hidden, cell = torch.tanh(self.first(inputs[:, 0])).expand(ways, -1, -1).chunk(2, dim=2)
        if isinstance(layer, nn.LSTM):
            state = hidden[..., : layer.proj_size or HIDDEN].contiguous(), cell.contiguous()
        else:
            state = hidden.contiguous()
        outputs, last = layer(inputs if layer.batch_first else inputs.transpose(0, 1), state)
        last = last[1] if isinstance(last, tuple) else last
        return self.out(outputs.mean(dim=1 if layer.batch_first else 0)) + self.of_cells(last.square().sum(dim=0))


def made_of(model: nn.Module, examples: int = 4, length: int = LENGTH) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return synthetic(model, (length, WIDTH), examples)


def network(kind: str, *, begun: bool = False, **options) -> nn.Module:
    layer = KINDS[kind](WIDTH, HIDDEN, **options)
    return Begun(layer) if begun else Recurrent(layer)


def plan_for(model: nn.Module, bound=None) -> StepPlan:
    return StepPlan(Block(codec=Everything(Layout.of(model).dim), bound=bound or normalize(1.0, regulariser=0.01)))


def engine_of(model: nn.Module) -> Layerwise:
    return Layerwise(model, cross_entropy, Layout.of(model))


@subtests("kind, layers, both_ways, bias, batch_first, begun", OPTIONS)
def test_rows_and_sums_are_those_of_a_loop_and_outputs_those_of_pytorch(
    kind, layers, both_ways, bias, batch_first, begun
):
    options = {"num_layers": layers, "bidirectional": both_ways, "bias": bias, "batch_first": batch_first}
    for examples, length in ((4, LENGTH), (1, LENGTH), (LENGTH, LENGTH), (2, 1), (3, 9)):
        made = made_of(network(kind, begun=begun, **options), examples, length)
        rows, before, engine = by_loop(made), snapshot(made.model), engine_of(made.model)
        assert_same_rows(engine.rows(made.inputs, made.targets), rows)
        opened = OpenedModel(made.model, projections_of(made.model))({}, made.inputs)
        torch.testing.assert_close(opened, made.model(made.inputs), rtol=1e-13, atol=1e-13)
        if examples > 1:
            (total,) = engine.sums(plan_for(made.model), made.inputs, made.targets)
            expected = (rows / (rows.norm(dim=1, keepdim=True) + 0.01)).sum(dim=0)
            torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-12)
        assert snapshot(made.model) == before


@pytest.mark.long
@subtests("kind", list(KINDS))
@subtests("batch_first", [False, True])
def test_removing_an_example_removes_its_contribution_alone(kind, batch_first):
    """Also where the batch is as long as the sequences, and the examples are copies of each other."""
    for examples in (2, LENGTH, 2 * LENGTH):
        made = made_of(network(kind, num_layers=2, bidirectional=True, batch_first=batch_first), examples)
        inputs, targets = made.inputs.clone(), made.targets
        inputs[1::3] = inputs[0]
        engine, plan = engine_of(made.model), plan_for(made.model)
        (whole,) = engine.sums(plan, inputs, targets)
        for removed in range(examples):
            kept = torch.arange(examples) != removed
            (rest,) = engine.sums(plan, inputs[kept], targets[kept])
            row = by_loop(Problem(made.model, inputs[~kept], targets[~kept]))[0]
            torch.testing.assert_close(whole - rest, row / (row.norm() + 0.01), rtol=0, atol=1e-10)


@pytest.mark.long
@subtests("kind", ["lstm", "gru"])
def test_at_most_a_bound_changes_without_an_example_whatever_it_holds(kind):
    made = made_of(network(kind, batch_first=True), 6)
    model, inputs = made.model.float(), made.inputs.float()
    inputs[1], inputs[2], inputs[3], inputs[4, 2] = 1e20, 1e-30, torch.inf, torch.nan
    engine = Engine(model, engine="layerwise")
    plan = plan_for(model, clip(0.1))
    (whole,) = engine.clipped_sums(plan, inputs, made.targets)
    assert whole.isfinite().all()
    for removed in range(6):
        kept = torch.arange(6) != removed
        (rest,) = engine.clipped_sums(plan, inputs[kept], made.targets[kept])
        assert float((whole - rest).norm()) <= 0.1 * (1 + 1e-5)


@pytest.mark.long
@subtests("kind", list(KINDS))
def test_auto_runs_them_layer_by_layer(kind):
    made = made_of(network(kind, begun=True, num_layers=2, bidirectional=True))
    choice = choose("auto", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
    assert choice.note == "layerwise"


@subtests("kind", list(KINDS))
def test_steps_in_small_blocks_are_those_in_one(kind, monkeypatch):
    made = made_of(network(kind, bidirectional=True), length=7)
    rows = engine_of(made.model).rows(made.inputs, made.targets)
    for size in (1, 3 * 8 * 4 * 4 * HIDDEN):
        monkeypatch.setattr(recurrence, "_AT_ONCE", size)
        assert_same_rows(engine_of(made.model).rows(made.inputs, made.targets), rows)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("kind", "batch_first"), in_turn(["lstm", "projected", "gru", "tanh"], [False, True]))
def test_dropout_between_layers_is_drawn_for_each_record(kind, batch_first):
    torch.manual_seed(0)
    model = network(kind, num_layers=3, dropout=0.4, bidirectional=True, batch_first=batch_first)
    inputs, targets = torch.randn(9, LENGTH, WIDTH), torch.arange(9) % CLASSES
    plan = plan_for(model, clip(0.05))
    engines = [Engine(model, engine=name) for name in ("layerwise", "one_by_one")]
    whole, expected = (engine.run(plan.at(0.0), inputs, targets, seed=3).total for engine in engines)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-6)
    other = engines[0].run(plan.at(0.0), inputs, targets, seed=4).total
    assert float((whole - other).norm()) > 1e-3
    rest = engines[0].run(plan.at(0.0), inputs[1:], targets[1:], seed=3).total
    assert float((whole - rest).norm()) <= 0.05 * (1 + 1e-5)


def test_dropout_in_evaluation_mode_is_none():
    made = made_of(network("gru", num_layers=2, dropout=0.4).eval())
    assert_same_rows(engine_of(made.model).rows(made.inputs, made.targets), by_loop(made))


class Layouts(nn.Module):
    """A layer that takes the examples for steps, or the whole batch for a sequence."""

    def __init__(self, *, batched: bool) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.batched = batched

    def forward(self, inputs):
        if self.batched:  # batch_first was forgotten
            return self.out(self.layer(inputs)[0].mean(dim=1))
        return self.out(self.layer(inputs[:, 0])[0])


@pytest.mark.long
@subtests("batched", [False, True])
@subtests("length", [LENGTH, 7, 14])
def test_a_layer_that_takes_examples_for_steps_is_refused(batched, length):
    made = made_of(Layouts(batched=batched), 7, length)
    layout = Layout.of(made.model)
    choice = choose("auto", made.model, cross_entropy, layout, made.inputs, made.targets)
    assert type(choice.engine) is OneByOne
    assert (
        "one example shows in another's gradient" in choice.note
        or "differs" in choice.note
        or "batch as" in choice.note
    )
    with pytest.raises(ValueError, match="engine 'layerwise' cannot run this model"):
        choose("layerwise", made.model, cross_entropy, layout, made.inputs, made.targets)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.GRU(WIDTH, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs):
        lengths = torch.full((len(inputs),), LENGTH)
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.layer(packed)[1][0])


def test_packed_sequences_are_refused_by_name():
    made = made_of(Packed())
    with pytest.raises(Unsupported, match="layer 'layer' must get a tensor of sequences, got packed sequences"):
        engine_of(made.model).rows(made.inputs, made.targets)
    choice = choose("auto", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
    assert type(choice.engine) is OneByOne  # PyTorch's own packing reads lengths


def test_sequences_without_steps_are_refused():
    made = made_of(network("lstm"))
    with pytest.raises(Unsupported, match="layer 'layer' must get sequences of at least one step"):
        engine_of(made.model).rows(made.inputs[:, :0], made.targets)


class Own(nn.LSTM):
    """A subclass, which may compute anything."""


@subtests(
    "layer",
    [
        lambda: Own(WIDTH, HIDDEN),
        lambda: nn.utils.parametrizations.weight_norm(nn.GRU(WIDTH, HIDDEN), "weight_hh_l0"),
    ],
)
def test_layers_of_other_kinds_are_not_opened(layer):
    made = made_of(Recurrent(layer()))
    assert not projections_of(made.model)
    choice = choose("auto", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
    assert type(choice.engine) is OneByOne


@subtests("names", [("weight_ih_l0",), ("bias_hh_l0", "bias_ih_l0"), ("weight_hh_l0", "bias_hh_l0"), ()])
@subtests("kind", ["lstm", "gru"])
def test_frozen_parameters_of_a_layer_have_no_gradient(kind, names):
    layer = KINDS[kind](WIDTH, HIDDEN)
    frozen(layer, *names)
    made = made_of(Recurrent(layer))
    assert bool(projections_of(made.model)) == bool(names)
    assert_same_rows(engine_of(made.model).rows(made.inputs, made.targets), by_loop(made))


class Changed(nn.Module):
    """A layer behind a linear one, with outputs that are changed in place."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.into, self.layer, self.relu = nn.Linear(WIDTH, WIDTH), layer, nn.ReLU(inplace=True)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs):
        outputs, _ = self.layer(self.into(inputs))
        return self.out(self.relu(outputs).mean(dim=1))


@subtests("kind", ["lstm", "gru", "tanh", "relu"])
def test_outputs_may_be_changed_in_place(kind):
    made = made_of(Changed(KINDS[kind](WIDTH, HIDDEN, batch_first=True)))
    assert_same_rows(engine_of(made.model).rows(made.inputs, made.targets), by_loop(made))


class Stepwise(nn.Module):
    """A layer that is called step by step, and a cell of the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.GRU(WIDTH, HIDDEN, batch_first=True), nn.GRUCell(WIDTH, HIDDEN)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(self.cell, name, getattr(self.layer, f"{name}_l0"))
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs):
        state = None
        for step in range(inputs.shape[1] - 1):
            _, state = self.layer(inputs[:, step : step + 1], state)
        return self.out(self.cell(inputs[:, -1], None if state is None else state[0]))


def test_weights_that_several_calls_and_a_cell_share_have_the_sum_of_their_gradients():
    made = made_of(Stepwise())
    engine, rows = engine_of(made.model), by_loop(made)
    assert_same_rows(engine.rows(made.inputs, made.targets), rows)
    (total,) = engine.sums(plan_for(made.model), made.inputs, made.targets)
    torch.testing.assert_close(
        total, (rows / (rows.norm(dim=1, keepdim=True) + 0.01)).sum(dim=0), rtol=1e-11, atol=1e-12
    )


@subtests("kind", ["lstm", "gru", "tanh", "relu"])
def test_a_loop_of_cells_has_the_gradients_of_the_layer(kind):
    layer = KINDS[kind](WIDTH, HIDDEN, batch_first=True)
    options = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
    cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}.get(kind, nn.RNNCell)(WIDTH, HIDDEN, **options)
    looped = Looped(cell)
    made = made_of(looped)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = layer.double(), copy.deepcopy(looped.out)
            for name, parameter in cell.named_parameters():
                setattr(self.layer, f"{name}_l0", parameter)

        def forward(self, inputs):
            return self.out(self.layer(inputs)[0][:, -1])

    rows = [engine_of(model).rows(made.inputs, made.targets) for model in (made.model, Last())]
    assert_same_rows(*rows)


class Learned(nn.Module):
    """A layer whose first states are parameters, behind one that reads positions once for the whole batch."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, 1, HIDDEN))
        self.layer, self.out = nn.GRU(WIDTH, HIDDEN, 2, batch_first=True), nn.Linear(HIDDEN, CLASSES)
        self.places = nn.LSTM(3, WIDTH, batch_first=True) if positions else None
        self.register_buffer("codes", torch.randn(1, LENGTH, 3))

    def forward(self, inputs):
        if self.places is not None:
            inputs = inputs + self.places(self.codes)[0]
        return self.out(self.layer(inputs, self.first.expand(-1, len(inputs), -1).contiguous())[0].mean(dim=1))


@pytest.mark.long
@subtests("positions", [False, True])
def test_learned_states_and_a_sequence_that_the_batch_shares_have_a_gradient_of_each_example(positions):
    for examples in (3, LENGTH):
        made = made_of(Learned(positions=positions), examples)
        choice = choose("auto", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
        assert choice.note.startswith("layerwise (expanded: ")
        assert_same_rows(choice.engine.rows(made.inputs, made.targets), by_loop(made))


@subtests("kind", list(KINDS))
def test_rows_at_another_point_and_of_several_views_are_the_references(kind):
    made = made_of(network(kind, num_layers=2, bidirectional=True), 6)
    layout, engine = Layout.of(made.model), engine_of(made.model)
    elsewhere, reference = layout.read(made.model) + 0.1, OneByOne(made.model, cross_entropy, layout)
    rows = reference.rows(made.inputs, made.targets, point=elsewhere)
    assert_same_rows(engine.rows(made.inputs, made.targets, point=elsewhere), rows)
    averaged = by_loop(made).view(2, 3, -1).mean(dim=1)
    assert_same_rows(engine.rows(made.inputs, made.targets, views=3), averaged)
    (total,) = engine.sums(plan_for(made.model), made.inputs, made.targets, views=3)
    expected = (averaged / (averaged.norm(dim=1, keepdim=True) + 0.01)).sum(dim=0)
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-12)


@subtests("kind", ["lstm", "gru"])
def test_losses_are_those_of_single_examples(kind):
    made = made_of(network(kind))
    engine = engine_of(made.model)
    elsewhere = Layout.of(made.model).read(made.model) + 0.1
    losses = engine.losses(made.inputs, made.targets)
    torch.testing.assert_close(losses[:, 0], cross_entropy(made.model(made.inputs), made.targets))
    everything = Block(codec=Everything(len(elsewhere)), bound=clip(0.1), share=0.5)
    change = Block(codec=Everything(1), bound=clip(0.1), share=0.5, query=LossChange(elsewhere), updates=False)
    plan, reference = StepPlan(everything, change), OneByOne(made.model, cross_entropy, Layout.of(made.model))
    sums = [each.sums(plan, made.inputs, made.targets) for each in (engine, reference)]
    torch.testing.assert_close(*sums, rtol=1e-11, atol=1e-12)


@pytest.mark.long
@subtests("kind", list(KINDS))
def test_a_graph_replays_the_passes_of_a_layer(kind, monkeypatch):
    monkeypatch.setattr(captured, "graphs_on", Recordings)
    monkeypatch.setattr(captured.CapturedPasses, "on", staticmethod(lambda values: not values.is_cpu))
    torch.manual_seed(0)
    model, generator = network(kind, num_layers=2, bidirectional=True), torch.Generator().manual_seed(1)
    plan, eager = plan_for(model, clip(0.5)), engine_of(copy.deepcopy(model))
    with device() as where:
        replayed = engine_of(model.to(where))
        replayed.captures = True
        for _ in range(4):
            inputs = torch.randn(8, LENGTH, WIDTH, generator=generator)
            targets = torch.randint(0, CLASSES, (8,), generator=generator)
            (expected,) = eager.sums(plan, inputs, targets)
            (total,) = replayed.sums(plan, inputs.to(where), targets.to(where))
            torch.testing.assert_close(total.cpu(), expected, rtol=1e-4, atol=1e-6)
        assert replayed.remark == "CUDA graph"


@pytest.mark.long
@subtests("kind", ["lstm", "gru"])
def test_the_memory_of_a_pass_covers_the_gates_of_all_steps(kind):
    layer = KINDS[kind](WIDTH, HIDDEN, 2, bidirectional=True)
    made = made_of(Recurrent(layer))
    choice = choose("auto", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
    assert choice.activations >= 4 * LENGTH * layer.weight_hh_l0.shape[0]
