"""CUDA graphs of a pass, on a pretend device whose graph replays the recorded operations into the same memory."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    InputTensors,
    Layout,
    NormWithin,
    StepPlan,
    adaptive_weight,
    clip,
    normalize,
    seeded,
)
from leakbench.defenses.core.gradients.layerwise import captured
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.plan import bound
from tests.pretend_device import device

from .....parameters import long_but
from .several_inputs import PictureWithTable, pictures


class Recording(TorchDispatchMode):
    """A graph: its operations, to be done again on the same tensors; what answers to Python is refused, as by CUDA."""

    def __init__(self):
        super().__init__()
        self.operations, self.replays = [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, result))
        return result

    def replay(self):
        self.replays += 1
        for operation, args, kwargs, result in self.operations:
            again = operation(*args, **kwargs)
            if any(returned.alias_info is not None for returned in operation._schema.returns):
                continue  # a view, or a tensor that the operation has changed
            pairs = (
                [(result, again)] if isinstance(result, torch.Tensor) else zip(result or (), again or (), strict=True)
            )
            for before, after in pairs:
                if isinstance(before, torch.Tensor) and before.numel():
                    before.copy_(after.reshape(before.shape))  # `unsqueeze_` may have changed its shape


class Recordings:
    def __init__(self, _device):
        self.beside = nullcontext

    @contextmanager
    def capture(self) -> Iterator[Recording]:
        recording = Recording()
        with recording:
            yield recording


@pytest.fixture
def pretend(monkeypatch):
    """The device, with graphs."""
    monkeypatch.setattr(captured, "graphs_on", Recordings)
    monkeypatch.setattr(captured.CapturedPasses, "on", staticmethod(lambda values: not values.is_cpu))
    with device() as where:
        yield where


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, stride=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 3 * 3, 6), nn.Tanh(), nn.Linear(6, 4))


def batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        images = torch.randn(size, 3, 8, 8, generator=generator)
        yield images, torch.randint(0, 4, (size,), generator=generator)


@pytest.mark.long
def test_replays_read_every_input_tensor(pretend):
    torch.manual_seed(0)
    model = PictureWithTable()
    eager, replayed = Engine(model), Engine(copy.deepcopy(model).to(pretend), engine="layerwise", expected_batch=16)
    plan = StepPlan(Block(codec=Everything(eager.layout.dim), bound=clip(0.5)))
    for seed, size in enumerate((16, 16, 15, 16)):
        inputs = InputTensors.of(pictures(size, seed=seed, dtype=torch.float32))
        labels = torch.arange(size) % 3
        expected = eager.clipped_sums(plan, inputs, labels)
        sums = replayed.clipped_sums(plan, inputs.to(pretend), labels.to(pretend))
        torch.testing.assert_close(sums[0].cpu(), expected[0], rtol=1e-4, atol=1e-6)
    assert replayed.name == "layerwise, CUDA graph"


def graphs_of(engine, where):
    """Returns the graphs of the engine that computes `next(batches(...))`."""
    chosen = engine.prepare(*(values.to(where) for values in next(batches(16)))).engine
    assert isinstance(chosen, Layerwise)
    return chosen.graphs


BOUNDS = [clip(0.5), normalize(1.0, regulariser=0.01), adaptive_weight(1.0, regulariser=0.1)]


@pytest.mark.parametrize("bound", long_but(BOUNDS[1:2], BOUNDS), ids=lambda bound: bound.kind)
def test_replays_give_the_sums_of_passes(bound, pretend):
    model = network()
    eager, replayed = Engine(model), Engine(network().to(pretend), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(eager.layout.dim), bound=bound))
    for images, labels in batches(16, 16, 15, 16, 17, 18, 20, 9):
        expected = eager.clipped_sums(plan, images, labels)
        sums = replayed.clipped_sums(plan, images.to(pretend), labels.to(pretend))
        torch.testing.assert_close([values.cpu() for values in sums], list(expected), rtol=1e-5, atol=1e-6)
    graphs = graphs_of(replayed, pretend)
    # 16 is captured at its second batch, with a replay that is compared; 17 and 18 are padded to 18; the rest is rare.
    assert [graph._pass.replays for graph in graphs._graphs.values()] == [3, 2]
    assert replayed.name == "layerwise, CUDA graph"


def both(model, where, plan, images, labels, **settings):
    """Sums on the CPU and on the device, whose graph is captured before."""
    eager = Engine(copy.deepcopy(model), **settings).clipped_sums(plan, images, labels)
    engine = Engine(copy.deepcopy(model).to(where), engine="layerwise", **settings)
    graphed = len(images) + 1
    for _ in range(2):
        others = [torch.cat([values, values[:1]]).to(where) for values in next(batches(graphed - 1))]
        engine.clipped_sums(plan, *others)
    return eager, engine.clipped_sums(plan, images.to(where), labels.to(where)), engine


@pytest.mark.parametrize(
    ("value", "place"), long_but([(1e-30, 3)], [(float("nan"), 0), (float("inf"), 3), (1e30, 0), (1e-30, 3)])
)
def test_examples_of_uncertain_norm_are_bounded_by_their_rows(value, place, pretend):
    images, labels = next(batches(17))  # padded to 18, with copies of the first
    images[place] = value
    plan = StepPlan(Block(codec=Everything(Layout.of(network()).dim), bound=normalize(1.0, regulariser=0.01)))
    eager, replayed, engine = both(network(), pretend, plan, images, labels)
    torch.testing.assert_close(replayed[0].cpu().double(), eager[0].double(), rtol=1e-4, atol=1e-5)
    assert engine.prepare(images.to(pretend), labels.to(pretend)).engine.remark == "CUDA graph"


def test_padding_adds_nothing(pretend):
    images, labels = next(batches(17))
    plan = StepPlan(Block(codec=Everything(Layout.of(network()).dim), bound=normalize(1.0, regulariser=0.01)))
    # Copies of the first example would add to the sum, and to the number below the threshold.
    count = Block(query=NormWithin(1.0), codec=Everything(1), bound=clip(1.0), updates=False, share=0.5)
    plan = StepPlan(replace(plan.blocks[0], share=0.5), count)
    eager, replayed, _ = both(network(), pretend, plan, images, labels)
    for on_cpu, on_device in zip(eager, replayed, strict=True):
        torch.testing.assert_close(on_device.cpu().double(), on_cpu.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_parameters_are_read_anew_and_may_move(pretend):
    model, (images, labels) = network().to(pretend), next(batches(16))
    engine, on_device = Engine(model, engine="layerwise"), (images.to(pretend), labels.to(pretend))
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5)))
    for change in (0.0, 0.0, 0.1, 0.2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(change)
        expected = Engine(copy.deepcopy(model).to("cpu")).clipped_sums(plan, images, labels)
        torch.testing.assert_close(engine.clipped_sums(plan, *on_device)[0].cpu(), expected[0], rtol=1e-4, atol=1e-5)
    engine.release_memory()
    assert not graphs_of(engine, pretend)._graphs


def test_a_pass_that_cannot_be_captured_runs_without_a_graph(pretend, monkeypatch):
    class Waiting(Recordings):
        @contextmanager
        def capture(self):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
            yield

    monkeypatch.setattr(captured, "graphs_on", Waiting)
    images, labels = next(batches(16))
    engine = Engine(network().to(pretend), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5)))
    expected = Engine(network()).clipped_sums(plan, images, labels)
    for _ in range(4):
        sums = engine.clipped_sums(plan, images.to(pretend), labels.to(pretend))
        torch.testing.assert_close(sums[0].cpu(), expected[0], rtol=1e-5, atol=1e-6)
    assert engine.name == "layerwise, no CUDA graph: operation not permitted when stream is capturing"


def test_a_replay_that_gives_other_norms_is_not_used(pretend, monkeypatch):
    replay = Recording.replay

    def other(self):
        replay(self)
        self.operations[-1][-1].mul_(1.01)

    monkeypatch.setattr(Recording, "replay", other)
    images, labels = (values.to(pretend) for values in next(batches(16)))
    engine = Engine(network().to(pretend), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5)))
    for _ in range(3):
        engine.clipped_sums(plan, images, labels)
    assert "other norms" in engine.name


@pytest.mark.long
def test_few_graphs_are_kept_the_last_used(pretend):
    engine = Engine(network().to(pretend), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5)))
    sizes = range(2, 3 + captured.MOST_GRAPHS)
    for images, labels in batches(*(size for size in sizes for _ in range(2))):
        engine.clipped_sums(plan, images.to(pretend), labels.to(pretend))
    graphs = graphs_of(engine, pretend)
    assert [len(graph._inputs) for graph in graphs._graphs.values()] == list(sizes)[1:]


def test_drawn_entries_run_without_a_graph(pretend):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(pretend)
    engine = Engine(model, engine="layerwise", noise=seeded(0))
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5))).at(0.0)
    images, labels = (values.to(pretend) for values in next(batches(4)))
    updates = [engine.run(plan, images, labels, seed=seed).total.cpu() for seed in (1, 1, 2, 2)]
    assert torch.equal(updates[0], updates[1])
    assert not torch.equal(updates[1], updates[2])
    assert "graph" not in engine.name


class Scaled(nn.Module):
    """A network with what no parameter or buffer holds: a number, a tensor, a layer's setting, hooks."""

    def __init__(self):
        super().__init__()
        self.body, self.slope = network(), nn.LeakyReLU(0.5)
        self.scale, self.factors = 1.0, [1.0]
        self.unit = torch.ones(())

    def forward(self, inputs):
        return self.slope(self.body(inputs)) * self.scale * self.factors[0] * self.unit.to(inputs.device)


CHANGES = {
    "setting": lambda model: setattr(model.slope, "negative_slope", 0.0),
    "number": lambda model: setattr(model, "scale", 3.0),
    "entry of a list": lambda model: model.factors.__setitem__(0, 3.0),
    "tensor": lambda model: setattr(model, "unit", torch.tensor(3.0)),
    "hook": lambda model: model.body.register_forward_hook(lambda _layer, _inputs, outputs: outputs * 3),
}


@pytest.mark.parametrize("change", long_but([CHANGES["number"]], CHANGES.values()), ids=CHANGES)
def test_a_graph_is_not_replayed_once_the_model_has_changed(change, pretend):
    model, (images, labels) = Scaled().to(pretend), next(batches(16))
    engine, on_device = Engine(model, engine="layerwise"), (images.to(pretend), labels.to(pretend))
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(100.0)))
    for _ in range(5):
        engine.clipped_sums(plan, *on_device)
    (graph,) = graphs_of(engine, pretend)._graphs.values()
    assert graph._pass.replays == 1 + 4  # captured once
    change(model)
    expected = Engine(copy.deepcopy(model), engine="layerwise").clipped_sums(plan, *on_device)
    sums = engine.clipped_sums(plan, *on_device)
    torch.testing.assert_close(sums[0].cpu(), expected[0].cpu(), rtol=1e-5, atol=1e-6)


def test_a_graph_is_not_replayed_once_the_loss_has_changed(pretend):
    class Weighted:
        weight = 1.0

        def __call__(self, outputs, targets):
            return self.weight * nn.functional.cross_entropy(outputs, targets, reduction="none")

    loss, on_device = Weighted(), [values.to(pretend) for values in next(batches(16))]
    state = captured.FixedState(network(), loss)
    loss.weight = 1.0
    assert not state.unchanged()
    loss = Weighted()
    loss.weight = 1.0
    engine = Engine(network().to(pretend), loss=loss, engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(100.0)))
    before = [engine.clipped_sums(plan, *on_device)[0].cpu() for _ in range(3)][-1]
    loss.weight = 3.0
    torch.testing.assert_close(engine.clipped_sums(plan, *on_device)[0].cpu(), 3 * before, rtol=1e-4, atol=1e-5)


def failing(monkeypatch, *errors):
    """Lets the next captures fail."""
    remaining = list(errors)

    class Failing(Recordings):
        @contextmanager
        def capture(self):
            if remaining:
                raise remaining.pop(0)
            with super().capture() as recording:
                yield recording

    monkeypatch.setattr(captured, "graphs_on", Failing)


@pytest.mark.parametrize(("shortages", "note"), [(1, "CUDA graph"), (2, "no CUDA graph: out of memory")])
def test_a_capture_without_memory_is_tried_once_more(shortages, note, pretend, monkeypatch):
    failing(monkeypatch, *[torch.OutOfMemoryError("out of memory")] * shortages)
    images, labels = (values.to(pretend) for values in next(batches(16)))
    engine = Engine(network().to(pretend), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5)))
    for _ in range(6):
        engine.clipped_sums(plan, images, labels)
    assert graphs_of(engine, pretend).note == note
    engine.release_memory()
    assert graphs_of(engine, pretend).note == ("" if shortages == 1 else note)


def test_an_error_without_words_is_noted_by_its_name(pretend, monkeypatch):
    failing(monkeypatch, NotImplementedError())
    images, labels = (values.to(pretend) for values in next(batches(16)))
    engine = Engine(network().to(pretend), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5)))
    for _ in range(2):
        engine.clipped_sums(plan, images, labels)
    assert graphs_of(engine, pretend).note == "no CUDA graph: NotImplementedError"


@pytest.mark.long
def test_a_graph_is_freed_before_another_is_captured(pretend, monkeypatch):
    alive, create = [], captured.CapturedPass.__init__
    engine = Engine(network().to(pretend), engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5)))
    graphs = graphs_of(engine, pretend)

    def counted(self, *args):
        alive.append(1 + len(graphs._graphs))
        create(self, *args)

    monkeypatch.setattr(captured.CapturedPass, "__init__", counted)
    for images, labels in batches(*(size for size in range(2, 4 + captured.MOST_GRAPHS) for _ in range(2))):
        engine.clipped_sums(plan, images.to(pretend), labels.to(pretend))
    assert max(alive) == captured.MOST_GRAPHS


@pytest.mark.parametrize("first", [float("nan"), 1e12])
def test_a_single_example_does_not_hide_other_norms(first):
    expected = torch.tensor([first, 1.0, 1e-3])
    allowed = captured._AGREES * expected.abs() + captured._NEGLIGIBLE
    captured._refuse_differences("norms", expected.clone(), expected, allowed)
    for wrong in (1.01e-3, float("nan")):
        with pytest.raises(RuntimeError, match="other norms"):
            captured._refuse_differences("norms", torch.tensor([first, 1.0, wrong]), expected, allowed)


class Generator:
    """A stand-in of a device's default generator."""

    state, offset = "own", 0

    def get_offset(self):
        return self.offset

    def graphsafe_get_state(self):
        return self

    def clone_state(self):
        return "clone"

    def graphsafe_set_state(self, state):
        self.state = "own" if state is self else state


@pytest.fixture
def cuda(monkeypatch):
    """Stand-ins of the functions of CUDA that a capture calls; returns what they were called with."""

    class Capture:
        def __init__(self, _graph, **settings):
            calls["settings"] = settings

        def __enter__(self):
            pass

        def __exit__(self, kind, *_):
            if kind is not None:
                raise RuntimeError("capture_end: the capture is invalid")

    class Stream:
        def wait_stream(self, _other):
            pass

    generator, calls = Generator(), {"modes": [0], "ended": []}
    calls["generator"] = generator
    stand_ins = {
        "Stream": lambda _device: Stream(),
        "current_stream": lambda _device: Stream(),
        "stream": lambda _stream: nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": object,
        "graph": Capture,
        "default_generators": (generator,),
        "get_sync_debug_mode": lambda: calls["modes"][-1],
        "set_sync_debug_mode": calls["modes"].append,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: calls["ended"].append(of), raising=False)
    return calls


def test_a_failed_capture_leaves_generator_and_allocator_as_they_were(cuda):
    graphs = captured._Graphs(torch.device("cuda", 0))
    with graphs.capture():
        assert cuda["generator"].state == "clone"
    assert (cuda["generator"].state, cuda["ended"]) == ("own", [])
    assert cuda["settings"]["capture_error_mode"] == "thread_local"
    with pytest.raises(ValueError, match="the model's own"), graphs.capture():
        raise ValueError("the model's own")
    assert (cuda["generator"].state, cuda["ended"]) == ("own", [(0, (0, 1))])


def test_a_pass_that_waits_or_draws_is_refused_before_a_capture(cuda):
    graphs = captured._Graphs(torch.device("cuda", 0))
    with graphs.beside():
        assert cuda["modes"][-1] == "warn"
    with pytest.raises(RuntimeError, match=r"waits for the device at .*test_captured"), graphs.beside():
        warnings.warn(captured._WAIT, stacklevel=1)
    assert cuda["modes"] == [0, "warn", 0, "warn", 0]
    with pytest.raises(RuntimeError, match="draws random numbers"), graphs.beside():
        cuda["generator"].offset = 4


def test_norms_on_a_device_are_computed_without_a_wait(pretend, monkeypatch):
    monkeypatch.setattr(bound, "_WIDENED", 64)
    rows = torch.randn(9, 30)
    with Recording():  # refuses a wait
        norms = bound.row_norms(rows.to(pretend))
    torch.testing.assert_close(norms.cpu(), rows.double().norm(dim=1), rtol=1e-6, atol=0)
