"""Models that would break a per-example guarantee: refused, or given one example at a time, and never believed."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    Execution,
    Layout,
    StepPlan,
    clip,
    cross_entropy,
    full,
    poisson,
    seeded,
    train,
)
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.random_sparsification import random_sparsification

from .....parameters import subtests

CLIP = 0.1
COINS = torch.Generator().manual_seed(0)
DATA = (torch.randn(48, 6, generator=COINS), torch.randint(0, 3, (48,), generator=COINS))


def network(*layers):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


def moved(model, loss=cross_entropy, **settings):
    """How far removing an example moves a step, in clip norms, and by which engine; a model as it is in training."""
    engine = Engine(model.train(), loss=loss, expected_batch=48, **settings)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP)))
    whole = engine.run(plan.at(0.0), *DATA, seed=1).total
    rest = [engine.run(plan.at(0.0), DATA[0][keep], DATA[1][keep], seed=1).total for keep in leaving_out(48)]
    return max(float((whole - one).norm()) / CLIP for one in rest), engine.name


def leaving_out(n):
    for out in (0, 1, 2, 3, n // 2, n - 1):
        yield torch.arange(n) != out


# --- examples that show in each other's gradients: never in one batch ---------------------------------------------


class Capacity(nn.Module):
    """Experts that take so many of a batch, the first come first served."""

    def __init__(self, experts=4, slack=0.6):
        super().__init__()
        self.gate = nn.Linear(8, experts)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        self.slack = slack

    def forward(self, x):
        chosen = self.gate(x).argmax(dim=1)
        one_hot = (chosen.unsqueeze(1) == torch.arange(len(self.experts))).to(x.dtype)
        places = (one_hot.cumsum(dim=0) * one_hot).sum(dim=1)
        admitted = places <= max(1.0, self.slack * x.shape[0] / len(self.experts))
        outs = torch.stack([expert(x) for expert in self.experts], dim=1)
        taken = (outs * one_hot.unsqueeze(2)).sum(dim=1)
        return torch.where(admitted.unsqueeze(1), taken, torch.zeros_like(taken))


class BySize(nn.Module):
    """Takes the batch's mean off, in large batches alone."""

    def forward(self, x):
        return x - x.mean(dim=0) if len(x) > 20 else x


class OfOneSize(nn.Module):
    """Turns the sign in batches of exactly 48, as many as there are data."""

    def forward(self, x):
        return x if len(x) != 48 else -x


class ByValue(nn.Module):
    """Takes the batch's mean off where some value is large."""

    def forward(self, x):
        return x - x.mean(dim=0) if bool(x.abs().max() > 1.0) else x


class ByMemory(nn.Module):
    """Takes the batch's mean off where some value is larger than made-up ones, as NumPy sees it."""

    def forward(self, x):
        return x - x.mean(dim=0) if abs(x.detach().numpy()).max() > 1e3 else x


class ByList(nn.Module):
    """The same, value by value."""

    def forward(self, x):
        return x - x.mean(dim=0) if max(x.detach().flatten().tolist()) > 1e3 else x


class NaNCheck(nn.Module):
    """What many networks have, and harmless: but nobody can tell it from a branch."""

    def forward(self, x):
        assert not torch.isnan(x).any()
        return x


class Packed(nn.Module):
    """Drops the padding of sequences, zeros, and puts the rest behind one another in a batch of their own."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        valid = (x != 0).any(dim=-1)
        packed = torch.tanh(self.inner(x[valid]))
        return self.out(x.new_zeros(*x.shape[:2], 8).masked_scatter(valid.unsqueeze(-1), packed).mean(dim=1))


class SortedByLength(nn.Module):
    """Calls a layer on the batch sorted by the number of zeros, of which synthetic inputs have none."""

    def __init__(self, select):
        super().__init__()
        self.inner, self.out, self.select = nn.Linear(6, 8), nn.Linear(8, 3), select

    def forward(self, x):
        order = (x == 0).sum(dim=1).argsort(stable=True)
        return self.out(self.select(torch.tanh(self.inner(self.select(x, order))), order.argsort()))


def gathered(values, places):
    return values.gather(0, places.unsqueeze(1).expand(values.shape))


class ConstantMask(nn.Module):
    """Selects the same columns of every batch."""

    def forward(self, x):
        return x * x[:, torch.arange(8) < 1]


class ZeroGates(nn.Module):
    """Takes part of the batch's mean off, behind two gates that are shut before training opens them."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x - self.gates.prod() * x.mean(dim=0)


def class_means(outputs, targets):
    """A loss that pulls the examples of a class together."""
    together = (targets.unsqueeze(0) == targets.unsqueeze(1)).to(outputs.dtype)
    means = together @ outputs / together.sum(dim=1, keepdim=True)
    return functional.cross_entropy(outputs, targets, reduction="none") + (outputs - means).square().sum(dim=1)


def mean_by_output(outputs, targets):
    """A number for each output, whatever the number of examples."""
    return (outputs - targets.unsqueeze(1)).square().mean(dim=0)


@pytest.mark.long
@subtests(
    ("layer", "loss", "note"),
    [
        (nn.Tanh, mean_by_output, "torch.func (no layerwise: its loss has 3 numbers for any number of examples"),
        (Capacity, cross_entropy, "torch.func (no layerwise: "),
        (nn.Tanh, class_means, "torch.func (no layerwise: differs from the reference by"),
        (BySize, cross_entropy, "torch.func (no layerwise: in a batch of "),
        (OfOneSize, cross_entropy, "torch.func (no layerwise: in a batch of 48 "),
        (ZeroGates, cross_entropy, "torch.func (no layerwise: "),
        (ByValue, cross_entropy, "one_by_one (no layerwise: reads values of its inputs, by _local_scalar_dense)"),
        (ByMemory, cross_entropy, "one_by_one (no layerwise: reads values of its inputs, by numpy)"),
        (ByList, cross_entropy, "one_by_one (no layerwise: reads values of its inputs, by tolist)"),
        (NaNCheck, cross_entropy, "one_by_one (no layerwise: reads values of its inputs, by _local_scalar_dense)"),
    ],
)
def test_what_mixes_the_examples_of_a_batch_is_found_and_kept_apart(layer, loss, note):
    change, engine = moved(network(layer()), loss)
    assert change <= 1 + 1e-4
    assert engine.startswith(note)


def test_words_that_a_mask_selects_are_given_to_their_own_examples():
    """Synthetic inputs have no padding; of this batch, four words for each example remain on average."""
    model = Packed()
    inputs, targets = torch.randn(4, 6, 4), torch.tensor([0, 1, 2, 0])
    for example, length in enumerate((2, 4, 5, 5)):
        inputs[example, length:] = 0
    engine = Engine(model, expected_batch=4)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP)))
    whole, rest = (engine.run(plan.at(0.0), inputs[k:], targets[k:]).total for k in (0, 1))
    own = engine.run(plan.at(0.0), inputs[:1], targets[:1]).total
    assert engine.name == "one_by_one (no layerwise: reads values of its inputs, by index)"
    assert float((whole - rest - own).norm()) <= 1e-5 * CLIP
    with pytest.raises(ValueError, match="engine 'layerwise' cannot run this model: reads values of its inputs"):
        Engine(model, engine="layerwise").run(plan.at(0.0), inputs, targets)


@subtests("select", [lambda x, i: x[i], lambda x, i: x.index_select(0, i), gathered])
def test_examples_that_a_model_sorts_keep_their_own_gradients(select):
    model, inputs = SortedByLength(select), DATA[0][:6].clone()
    inputs[0, :2] = inputs[3, 0] = 0
    engine = Engine(model, expected_batch=6)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP))).at(0.0)
    whole, rest = (engine.run(plan, inputs[k:], DATA[1][k:6]).total for k in (0, 1))
    assert engine.name.startswith("torch.func (no layerwise: selects examples of the batch by their values, by ")
    assert float((whole - rest).norm()) <= CLIP * (1 + 1e-4)
    with pytest.raises(ValueError, match="selects examples of the batch by their values"):
        Engine(model, engine="layerwise").run(plan, inputs, DATA[1][:6])


def test_a_batch_with_as_many_examples_as_its_loss_has_numbers_is_like_any_other():
    """Here 11, so that no size of the checks is the same by chance."""
    model, inputs, targets = nn.Linear(4, 11), torch.randn(11, 4), torch.zeros(11)
    engine = Engine(model, loss=mean_by_output, expected_batch=3)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP))).at(0.0)
    whole, rest = engine.run(plan, inputs, targets).total, engine.run(plan, inputs[1:], targets[1:]).total
    assert float((whole - rest).norm()) <= CLIP * (1 + 1e-4)
    with pytest.raises(ValueError, match="its loss has 11 numbers for any number of examples"):
        Engine(model, loss=mean_by_output, engine="layerwise").run(plan, inputs, targets)


def test_a_constant_mask_reads_no_value():
    assert moved(network(ConstantMask()))[1] == "layerwise"


def test_without_the_checks_they_would_have_been_mixed():
    # What the engine of whole batches computes when nobody looks: the tests above have something to find.
    from leakbench.defenses.core.gradients.layerwise.engine import Layerwise

    for layer, loss in (
        (Capacity, cross_entropy),
        (BySize, cross_entropy),
        (OfOneSize, cross_entropy),
        (ByValue, cross_entropy),
        (nn.Tanh, class_means),
    ):
        model = network(layer()).train()
        layout = Layout.of(model)
        plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(CLIP)))
        whole = Layerwise(model, loss, layout).sums(plan, *DATA)[0]
        rest = [Layerwise(model, loss, layout).sums(plan, DATA[0][k], DATA[1][k])[0] for k in leaving_out(48)]
        assert max(float((whole - one).norm()) for one in rest) > 1.02 * CLIP


@subtests("layer", [Capacity, BySize, ByValue])
def test_an_engine_of_whole_batches_that_was_asked_for_is_refused(layer):
    with pytest.raises(ValueError, match="engine 'layerwise' cannot run this model: "):
        moved(network(layer()), engine="layerwise")


def test_a_microbatch_below_the_branch_is_no_danger():
    assert moved(network(BySize()), microbatch=16)[1] == "layerwise"


# --- what a forward pass changes: refused -------------------------------------------------------------------------


class RunningMean(nn.Module):
    """Statistics in a buffer, which would be released with the model."""

    def __init__(self, reassigned=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.reassigned = reassigned

    def forward(self, x):
        if self.training:
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
            if self.reassigned:
                self.mean = mean
            else:
                self.mean.copy_(mean)
        return x


class MovingAverage(nn.Module):
    """Statistics in a float32 attribute, which no conversion of the model converts, taken off the batch."""

    def __init__(self):
        super().__init__()
        self.average = torch.zeros(8, dtype=torch.float32)

    def forward(self, x):
        if self.training:
            self.average = 0.5 * self.average + 0.5 * x.detach().float().mean(dim=0)
        return x - self.average.to(x)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = {"passes": [0]}

    def forward(self, x):
        self.calls["passes"][0] += 1
        return x


class Drifting(nn.Linear):
    def forward(self, input):
        with torch.no_grad():
            self.weight.add_(1e-3)
        return super().forward(input)


@subtests(
    ("layer", "what"),
    [
        (RunningMean, "buffer '1.mean'"),
        (lambda: RunningMean(reassigned=True), "buffer '1.mean'"),
        (MovingAverage, r"attribute 'average' of '1' \(MovingAverage\)"),
        (Counter, r"attribute 'calls' of '1' \(Counter\)"),
        (lambda: Drifting(8, 8), "parameter '1.weight'"),
    ],
)
@subtests("engine", ["auto", "torch.func", "one_by_one"])
def test_what_a_forward_pass_changes_is_refused_by_name(layer, what, engine):
    with pytest.raises(ValueError, match=f"a pass in training mode must change nothing, got another {what}"):
        train(
            network(layer()),
            DATA,
            dp_sgd(noise_multiplier=1.0),
            sampling=full(),
            steps=1,
            execution=Execution(engine=engine),
        )


def test_in_evaluation_mode_it_may_stay_as_it_is():
    model = network(RunningMean())
    engine = Engine(model.eval())
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP)))
    engine.run(plan.at(0.0), *DATA)
    assert engine.name == "layerwise"


class Cached(nn.Module):
    """A table that is made at the first call, and depends on shapes alone."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None or self.table.dtype != x.dtype:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return x + self.table


def test_what_is_computed_once_from_shapes_is_allowed():
    assert moved(network(Cached()))[1] == "layerwise"


class Sly(nn.Module):
    """Moves a buffer only where the inputs are not made up: no check on made-up examples can see it."""

    def __init__(self):
        super().__init__()
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        if self.training and x.dtype == torch.float32:
            self.seen.copy_(x.detach().reshape(-1, 8)[0])
        return x


def test_a_buffer_that_moves_in_the_run_itself_is_found_before_the_model_is_handed_over():
    with pytest.raises(ValueError, match=r"training must change trained parameters only, got another '1\.seen'"):
        train(network(Sly()), DATA, dp_sgd(noise_multiplier=1e6), sampling=full(), steps=3)


def test_a_frozen_parameter_that_moves_in_the_run_is_found_too():
    class Hidden(nn.Linear):
        def forward(self, input):
            if input.dtype == torch.float32:
                self.weight.data.mul_(0.9)
            return super().forward(input)

    model = network(Hidden(8, 8).requires_grad_(False))
    with pytest.raises(ValueError, match=r"training must change trained parameters only, got another '1\.weight'"):
        train(model, DATA, dp_sgd(noise_multiplier=1.0), sampling=full(), steps=1)


# --- draws by place, hooks, precision: refused --------------------------------------------------------------------


class Wrapped(nn.Module):
    """Layers that no module shows."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = [layer.forward for layer in layers]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def extra_repr(self):
        return f"depth={len(self.layers)}"


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x + self.draw(x) if self.training else x


DRAWS = {
    "randperm": (lambda x: torch.randperm(8).to(x), "by randperm"),
    "generator": (lambda x: torch.rand(x.shape, generator=torch.default_generator), "by rand"),
    "numpy": (lambda x: float(np.random.rand()), "which differs in two equal passes"),  # noqa: NPY002  a user's model
    "python": (lambda x: random.random(), "which differs in two equal passes"),  # noqa: S311
}


@pytest.mark.long
@subtests("name", DRAWS)
def test_a_layer_that_draws_at_random_by_place_is_refused_by_its_name_and_settings(name):
    draw, how = DRAWS[name]
    for kind, there in ((nn.Sequential, r"'1\.1' \(Noisy\(\)\)"), (Wrapped, r"'1' \(Wrapped\(depth=2\)\)")):
        refused = f"at random but what is drawn for each example by itself, got {there},? {how}"
        with pytest.raises(ValueError, match=refused):
            moved(network(kind(nn.Tanh(), Noisy(draw))))
    model = network(Noisy(draw)).eval()
    Engine(model).run(StepPlan(Block(codec=Everything(Layout.of(model).dim), bound=clip(CLIP))).at(0.0), *DATA)


def test_hooks_on_gradients_are_refused_and_not_ignored():
    model = network(nn.Tanh())
    weight, bias = model.get_parameter("0.weight"), model.get_parameter("2.bias")
    handle = weight.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(ValueError, match=r"parameters must have no hooks, got one at '0\.weight'"):
        Engine(model)
    handle.remove()
    handle = bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match=r"parameters must have no hooks, got one at '2\.bias'"):
        Engine(model)
    handle.remove()
    for register in (model[1].register_full_backward_hook, model[1].register_full_backward_pre_hook):
        handle = register(lambda *gradients: None)
        with pytest.raises(ValueError, match=r"modules must have no backward hooks, got one at '1' \(Tanh\)"):
            Engine(model)
        handle.remove()
    Engine(model)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
)
def test_hooks_on_the_gradients_of_all_modules_are_refused(register):
    handle = register(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="there must be no backward hooks on all modules, got 1: "):
            moved(network())
    finally:
        handle.remove()
    assert moved(network())[0] <= 1 + 1e-4


class Keeping(nn.Module):
    """Scales by something that it computes in its first pass."""

    def __init__(self, kind, *, public):
        super().__init__()
        self.kind, self.public = kind, public
        self.register_parameter("empty", None)
        self.register_buffer("nothing", None)

    def forward(self, x):
        made = torch.arange(1.0, x.shape[1] + 1).to(x) if self.public else 1 / x.detach().abs().mean()
        match self.kind:
            case "attribute":
                return x * vars(self).setdefault("found", [made])[0]
            case "parameter":
                if self.empty is None:
                    self.empty = nn.Parameter(made)
                return x * self.empty.detach()
            case "buffer":
                if self.nothing is None:
                    self.nothing = made
                return x * self.nothing
            case _:
                if "further" not in self._buffers:
                    self.register_buffer("further", made)
                return x * self.further


@pytest.mark.long
@subtests("engine", ["auto", "torch.func", "one_by_one"])
@subtests("kind", ["attribute", "parameter", "buffer", "further buffer"])
def test_what_follows_from_the_first_batch_is_not_kept(kind, engine):
    """As by an initialisation from data: it is released without noise, and scales all examples alike."""
    with pytest.raises(ValueError, match="a model and its loss must keep nothing of their first batch"):
        moved(network(Keeping(kind, public=False)), engine=engine)
    model = network(Keeping(kind, public=True))
    assert moved(model, engine=engine)[0] <= 1 + 1e-4
    assert len([*model.parameters(), *model.buffers()]) == 4


@pytest.mark.long
def test_a_projection_that_is_drawn_once_follows_from_no_batch():
    class Projecting(nn.Module):
        def forward(self, x):
            if "drawn" not in vars(self):
                self.drawn = torch.randn(8, 8)
            return x @ self.drawn.to(x)

    assert moved(network(Projecting()))[0] <= 1 + 1e-4


def test_inputs_of_truth_values_stay_what_they_are_in_the_check():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            assert x.dtype == torch.bool
            return self.layer(torch.where(x, 1.0, -1.0).to(self.layer.weight))

    data = DATA[0] > 0, DATA[1]
    assert Engine(Choosing()).prepare(*data).unverified == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trained_parameters_in_half_precision_are_refused(dtype):
    with pytest.raises(ValueError, match=f"trained parameters must be float32 or float64, got {dtype} for '0.weight'"):
        Engine(network().to(dtype))
    frozen = network(nn.Linear(8, 8).to(dtype).requires_grad_(False))
    Engine(frozen)  # what is not trained has no gradient to bound


def test_autocast_is_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"got torch\.autocast\('cpu'\)"):
        moved(network())


def test_matrix_units_compute_in_full_precision_meanwhile_and_as_they_were_told_afterwards():
    backends: Any = torch.backends  # whose switches the type checker does not know
    switches = (backends.mkldnn.matmul, backends.cudnn.conv, backends.cuda.matmul)
    seen = []

    class Looking(nn.Module):
        def forward(self, x):
            seen.append(tuple(switch.fp32_precision for switch in switches))
            return x

    model = network(Looking())
    before = [switch.fp32_precision for switch in switches]
    engine = Engine(model)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(CLIP)))
    engine.prepare(*DATA)
    seen.clear()
    try:
        for switch, less in zip(switches, ("bf16", "tf32", "tf32"), strict=True):
            switch.fp32_precision = less
        told = [switch.fp32_precision for switch in switches]
        engine.run(plan.at(0.0), *DATA)
        assert [switch.fp32_precision for switch in switches] == told
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
    assert seen and set(sum(seen, ())) <= {"ieee", "none"}


@pytest.mark.parametrize("defense", [dp_sgd, random_sparsification])
def test_what_is_sound_trains_as_ever(defense):
    run = train(
        network(nn.Tanh(), nn.Dropout(0.1)), DATA, defense(noise_multiplier=1.0), sampling=poisson(0.25), steps=8,
        noise=seeded(0),
    )  # fmt: skip
    assert run.engine == "layerwise"
    assert run.remarks == run.unverified == ()
