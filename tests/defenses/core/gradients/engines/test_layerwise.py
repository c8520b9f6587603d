"""Our own engine: the reference's rows and clipped sums, for every layer, way, layout, codec and bound."""

import copy
from collections.abc import Collection
from functools import cache
from itertools import pairwise as successive
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from leakbench.defenses.core import (
    Block,
    Complement,
    Coordinates,
    Everything,
    GradientAhead,
    GradientDifference,
    GradientLess,
    Layout,
    LossChange,
    Masked,
    NormWithin,
    StepPlan,
    Subspace,
    adaptive_weight,
    clip,
    clipped_sums,
    contributions,
    cross_entropy,
    normalize,
    unbounded,
)
from leakbench.defenses.core.gradients.choose import choose
from leakbench.defenses.core.gradients.engines.interface import Unsupported
from leakbench.defenses.core.gradients.engines.one_by_one import OneByOne
from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc
from leakbench.defenses.core.gradients.layerwise import block_sums, factors, recorder
from leakbench.defenses.core.gradients.layerwise.cost import Strategy, Summation, estimates
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.gradients.layerwise.layers import convolution, linear, patch_rows
from leakbench.defenses.core.kernels.weighted_rows import SumTable
from leakbench.defenses.core.plan import codec, query

from .....parameters import long_but, pairwise, subtests
from .architectures import CONV1D, NAMES, problem
from .duties import assert_same_rows, by_loop, snapshot
from .modules import CLASSES, Problem
from .strategies import architectures

UNKNOWN = {
    "conv3d": "is one of a Conv3d",
    "conv_transpose2d": "is one of a ConvTranspose2d",
    "bare_scale": "is one of a Scale",
    "bare_shift_at_top": "no known layer holds the parameter 'shift'",
    "bare_positions": "no known layer holds the parameter 'places'",
}
# What the layers alone do not show; the check in float64 finds it, see test_choose.py.
DECEPTIVE = {"tied_by_function", "weight_used_by_function", "batch_second", "positions_without_a_batch"}
KNOWN = [name for name in NAMES if name not in UNKNOWN and name not in DECEPTIVE]


def engine_of(made: Problem) -> Layerwise:
    return Layerwise(made.model, cross_entropy, Layout.of(made.model))


def plans(rows: torch.Tensor) -> dict[str, StepPlan]:
    """One plan for every codec, bound and query; half of the rows are clipped, by factors that differ."""
    dim, coins = rows.shape[1], torch.Generator().manual_seed(1)
    norm = float(rows.norm(dim=1).median()) or 1.0
    kept = Coordinates(torch.randperm(dim, generator=coins)[: dim // 2 + 1], dim=dim)
    directions = torch.linalg.qr(torch.randn(dim, min(3, dim), generator=coins, dtype=torch.float64))[0]
    cut = dim // 3 + 1
    halves = [torch.linalg.qr(torch.randn(n, 1, generator=coins, dtype=torch.float64))[0] for n in (cut, dim - cut)]
    globally = Subspace.of(directions)
    # Spans that do not end where parameters do.
    by_span = Subspace(tuple(halves[: 1 + (dim > cut)]), ((0, cut), (cut, dim))[: 1 + (dim > cut)], dim)
    edges = [*range(0, dim, dim // 9 + 1), dim]  # several to a parameter, of a few of its outputs
    shares = [torch.randn(b - a, 1, generator=coins, dtype=torch.float64) for a, b in successive(edges)]
    finely = Subspace(tuple(one / one.norm() for one in shares), tuple(successive(edges)), dim)
    # Of kept coordinates: spans that end within parameters, and one of a coordinate or none.
    middle = (dim // 2 + 1) // 2
    ends = [(0, middle), (middle, dim // 2 + 1)]
    drawn = [torch.randn(b - a, min(2, b - a), generator=coins, dtype=torch.float64) for a, b in ends]
    of_kept = Subspace(tuple(torch.linalg.qr(one)[0] for one in drawn), tuple(ends), dim // 2 + 1)
    everything = Everything(dim)
    tight = normalize(norm, regulariser=0.01)
    single = {
        "clip": Block(codec=everything, bound=clip(norm)),
        "normalize": Block(codec=everything, bound=tight),
        "adaptive": Block(codec=everything, bound=adaptive_weight(norm, regulariser=0.1)),
        "unbounded": Block(codec=everything, bound=unbounded()),
        "masked": Block(codec=kept, bound=tight),
        "masked, unbounded": Block(codec=kept, bound=unbounded()),
        "subspace": Block(codec=globally, bound=clip(norm / 4)),
        "subspaces": Block(codec=by_span, bound=tight),
        "short subspaces": Block(codec=finely, bound=tight),
        "complement of short ones": Block(codec=Complement(finely), bound=tight),
        "complement": Block(codec=Complement(globally), bound=tight),
        "subspaces of a mask": Block(codec=Masked(kept, of_kept), bound=clip(norm / 4)),
        "complement within a mask": Block(codec=Masked(kept, Complement(of_kept)), bound=tight),
        "complement of coordinates": Block(codec=Complement(kept), bound=tight),
        "difference": Block(
            codec=everything, bound=tight, query=GradientDifference(torch.zeros(dim, dtype=torch.float64))
        ),
    }
    count = Block(codec=Everything(1), bound=clip(0.5), share=0.1, query=NormWithin(norm * 1.01), updates=False)
    rest = Block(codec=Complement(globally), bound=clip(norm / 2), share=0.5)
    inside = Block(codec=globally, bound=clip(norm / 2), share=0.4)
    # Rows that are kept for one mask serve the next one, and what no mask leaves out.
    others = Coordinates(torch.randperm(dim, generator=coins)[: dim // 3 + 1], dim=dim)
    masks = [Block(codec=codec, bound=tight, share=1 / 3) for codec in (kept, others, everything)]
    # Two blocks that share a mask and a subspace, beside one without a mask.
    behind = [Block(codec=Masked(kept, of_kept), bound=clip(norm / 2), share=0.3)]
    behind += [Block(codec=Masked(kept, Complement(of_kept, False)), bound=clip(norm / 2), share=0.4)]
    return {name: StepPlan(block) for name, block in single.items()} | {
        "two parts behind a mask, and without": StepPlan(*behind, Block(codec=globally, bound=tight, share=0.3)),
        "three blocks": StepPlan(rest, inside, count),
        "two masks, and none": StepPlan(*masks),
    }


def assert_same_sums(made: Problem, rows: Tensor, names: Collection[str], what: object = "") -> None:
    """Compares the sums of the named plans with those of `rows`, which are a loop's of autograd.

    And of each contribution the inner product with a direction, and the squared norm.
    """
    # PyTorch's vmap fails on its GRU and RNN.
    engine, reference = engine_of(made), OneByOne(made.model, cross_entropy, Layout.of(made.model))
    every_plan = plans(rows)
    for name in names:
        plan = every_plan[name]
        if name == "difference":
            expected = reference.sums(plan, made.inputs, made.targets)
        else:
            expected = clipped_sums(plan, [lambda _point: rows], rows)
        for found, wanted in zip(engine.sums(plan, made.inputs, made.targets), expected, strict=True):
            scale = max(float(wanted.abs().max()), 1e-300)
            assert float((found - wanted).abs().max()) <= 1e-12 * scale, (name, what)
        each = contributions(plan, (lambda _point: rows) if name != "difference" else reference_rows(reference, made))
        assert_matched(engine, plan, each, (made.inputs, made.targets), 1e-9, (name, what))


@cache
def rows_of(name: str) -> Tensor:
    """Rows of a problem by a loop of autograd, computed once for all tests."""
    return by_loop(problem(name))


def reference_rows(reference: OneByOne, made: Problem):
    return lambda point: reference.rows(made.inputs, made.targets, point=point)


def assert_matched(
    engine: Layerwise | TorchFunc, plan: StepPlan, each, data, error: float, what: object = "", *, views: int = 1
) -> None:
    """Inner products and squared norms of contributions, to this part of the longest of them."""
    coins = torch.Generator().manual_seed(2)
    directions = [torch.randn(rows.shape[1], generator=coins, dtype=torch.float64).to(rows) for rows in each]
    found = engine.matched(plan, directions, *data, views=views)
    for (inner, squares), rows, direction in zip(found, each, directions, strict=True):
        wide = rows.double()
        longest = max(float(wide.norm(dim=1).max()), 1e-300)
        wrong = (inner - wide @ direction.double()).abs().max() / longest / direction.double().norm()
        assert inner.dtype == squares.dtype == torch.float64 and float(wrong) <= error, what
        assert float((squares - wide.square().sum(1)).abs().max()) <= error * longest**2, what


@pytest.mark.parametrize("name", long_but(list(KNOWN)[1::2], KNOWN))
def test_rows_are_those_of_a_loop_at_every_call_and_to_the_last_bit_however_large_the_batch(name, monkeypatch):
    """Passes begin at a bias, graphs at a node of Python's, and, of the largest batches, calls are met by hooks."""
    made = problem(name)
    trained = {key: parameter.requires_grad for key, parameter in made.model.named_parameters()}
    first = engine_of(made).rows(made.inputs, made.targets)
    assert_same_rows(first, rows_of(name))
    for at_once, copied in ((recorder._AT_ONCE, recorder._COPIED), (-1, recorder._COPIED), (recorder._AT_ONCE, -1)):
        monkeypatch.setattr(recorder, "_AT_ONCE", at_once)
        monkeypatch.setattr(recorder, "_COPIED", copied)
        engine = engine_of(made)
        for _ in range(2):
            assert torch.equal(engine.rows(made.inputs, made.targets), first), (at_once, copied)
    for key, parameter in made.model.named_parameters():
        assert parameter.grad is None and parameter.is_leaf and parameter.requires_grad == trained[key]


# An option of convolutions meets half of the plans in one dimension and the others in two; `make test` takes a third of
# these, and each plan meets a third of the architectures.
PLANS = tuple(plans(torch.eye(9, dtype=torch.float64)))
HALVES = {f"conv{1 + dims}d_{option}": PLANS[(i + dims) % 2 :: 2] for i, option in enumerate(CONV1D) for dims in (0, 1)}
THIRDS = [(name, HALVES.get(name, PLANS)[i % 3 :: 3]) for i, name in enumerate(KNOWN)]
ROUNDED = ("subspace", "subspaces", "complement", "three blocks", "two parts behind a mask, and without")
FORMULAS = [*product(Strategy, [Summation.TILES]), (Strategy.FREE, Summation.VENDOR)]
WITH_FORMULAS = pairwise(
    [
        name
        for name in KNOWN
        if any(part in name for part in ("conv", "sequence", "small_resnet", "lstm", "gru", "rnn"))
    ],
    FORMULAS,
    ("normalize", "masked", "three blocks", "two masks, and none", "two parts behind a mask, and without"),
)


@pytest.mark.parametrize(
    ("name", "some"),
    [pytest.param(name, some, id=name, marks=[pytest.mark.long] * (i % 2)) for i, (name, some) in enumerate(THIRDS)]
    + [pytest.param(name, HALVES.get(name, PLANS), id=f"{name}-all", marks=pytest.mark.slow) for name in KNOWN],
)
def test_sums_are_the_references_under_every_plan(name, some):
    assert_same_sums(problem(name), rows_of(name), some)


@pytest.mark.long
@pytest.mark.parametrize("shift", [0, pytest.param(2, marks=pytest.mark.slow)])
@subtests("i, name", list(enumerate(KNOWN)))
def test_rows_that_may_be_rounding_are_bounded_as_by_the_reference(i, name, shift, monkeypatch):
    plan = ROUNDED[(i + shift) % 5]
    for module in (block_sums, codec, query):  # so that ordinary rows are of that kind
        monkeypatch.setattr(module, "LEAST_SHARE", 0.9)
    assert_same_sums(problem(name), rows_of(name), [plan])


@pytest.mark.parametrize(("way", "summed"), long_but(FORMULAS[:1], FORMULAS))
def test_every_way_to_a_layer_gives_the_same_sums(way, summed, monkeypatch):
    def forced(shape, device):
        return way if way in (*estimates(shape, device), Strategy.KEEP) else Strategy.FREE

    def made_by(shape, _device):
        return Summation.VENDOR if shape.tiles is None else summed

    monkeypatch.setattr(convolution, "cheapest", forced)
    monkeypatch.setattr(convolution, "summation", made_by)
    monkeypatch.setattr(convolution, "made_by_kernel", lambda shape, _: shape.lanes and summed is not Summation.VENDOR)
    monkeypatch.setattr(linear, "cheapest", forced)
    for name, formula, plan in WITH_FORMULAS:
        if formula == (way, summed):
            assert_same_sums(problem(name), rows_of(name), [plan], name)


def test_what_begins_the_graph_is_the_bias_of_the_first_layer_alone():
    made = problem("conv2d_plain")
    engine = engine_of(made)
    engine.rows(made.inputs, made.targets)
    first = next(name for name, _ in made.model.named_parameters() if name.endswith("bias"))
    assert list(engine._first_biases) == [first]


@pytest.mark.long
@subtests("views", [1, 2])
@subtests("name", ["mlp", "linear_one_sequence", "conv2d_everything", "conv2d_plain", "embedding", "small_resnet"])
def test_sums_of_many_examples_in_parts_are_those_in_one(name, views):
    made = problem(name)
    model, inputs = copy.deepcopy(made.model).float(), made.inputs
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    plan = plans(rows_of(name))["normalize"]

    def summed():
        engine = Layerwise(model, cross_entropy, Layout.of(model))
        return engine.sums(plan, inputs, made.targets, views=views)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "cheapest", lambda *_: Strategy.FREE)  # rows are not kept
        patch.setattr(linear, "cheapest", lambda *_: Strategy.FREE)
        patch.setattr(SumTable, "outer", lambda *_: False)
        whole = summed()
        for module in (factors, linear):
            patch.setattr(module, "TOGETHER", 1)
        patch.setattr(factors, "_LEAST_TOGETHER", 1)
        patch.setattr(factors, "_CHUNK_BYTES", {"cpu": 200, "cuda": 200})
        torch.testing.assert_close(summed(), whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.long
@subtests("chunk, views", product([1, 2000, 10**9], [1, 2]))
def test_queries_that_want_rows_get_them_in_parts_and_have_the_same_sums(monkeypatch, chunk, views):
    monkeypatch.setattr(factors, "_CHUNK_BYTES", {"cpu": chunk, "cuda": chunk})
    made = problem("conv2d_plain")
    layout = Layout.of(made.model)
    engine, reference = engine_of(made), TorchFunc(made.model, cross_entropy, layout)
    everything, other = Everything(layout.dim), 1.01 * layout.read(made.model)
    plan = StepPlan(
        Block(codec=everything, bound=clip(0.1), share=0.25, query=GradientDifference(other)),
        Block(codec=everything, bound=clip(0.1), share=0.25, query=GradientLess(other)),
        Block(codec=everything, bound=clip(0.1), share=0.25, query=GradientAhead(other, 0.3)),
        Block(codec=Everything(1), bound=clip(0.1), share=0.25, query=LossChange(other), updates=False),
    )
    sums = [one.sums(plan, made.inputs, made.targets, views=views) for one in (engine, reference)]
    for found, expected in zip(*sums, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_many_positions_are_unfolded_by_columns_and_give_the_same(monkeypatch):
    monkeypatch.setattr(patch_rows, "_MANY_POSITIONS", 1)
    for name in (n for n in KNOWN if "conv" in n):
        made = problem(name)
        assert_same_rows(engine_of(made).rows(made.inputs, made.targets), rows_of(name))


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(made=architectures())
def test_random_architectures_give_the_references_rows_and_sums(made):
    rows = by_loop(made)
    engine = engine_of(made)
    scale = max(float(rows.abs().max()), 1e-300)
    assert float((engine.rows(made.inputs, made.targets) - rows).abs().max()) <= 1e-12 * scale
    for name in ("normalize", "masked", "subspaces", "complement", "complement within a mask"):
        plan = plans(rows)[name]
        (found,), (expected,) = engine.sums(plan, made.inputs, made.targets), clipped_sums(plan, [lambda _: rows], rows)
        assert float((found - expected).abs().max()) <= 1e-11 * max(float(expected.abs().max()), 1e-300), name


@pytest.mark.long
@subtests("name", ["mlp", "conv2d_plain", "embedding", "small_resnet", "standardised_conv"])
def test_at_another_point_and_with_views(name):
    made = problem(name)
    layout, engine = Layout.of(made.model), engine_of(made)
    elsewhere = layout.read(made.model) + 0.1
    reference = TorchFunc(made.model, cross_entropy, layout)
    expected = reference.rows(made.inputs, made.targets, point=elsewhere)
    assert_same_rows(engine.rows(made.inputs, made.targets, point=elsewhere), expected)
    averaged = rows_of(name).view(2, 2, -1).mean(dim=1)
    assert_same_rows(engine.rows(made.inputs, made.targets, views=2), averaged)
    for name_of_plan in ("clip", "masked", "three blocks"):
        plan = plans(averaged)[name_of_plan]
        expected_sums = clipped_sums(plan, [lambda _: averaged], averaged)
        for found, wanted in zip(engine.sums(plan, made.inputs, made.targets, views=2), expected_sums, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
        each = contributions(plan, lambda _: averaged)
        for one in (engine, reference):
            assert_matched(one, plan, each, (made.inputs, made.targets), 1e-9, name_of_plan, views=2)


@subtests("name", ["mlp", "small_resnet", "tied_embedding", "module_used_twice", "gru", "lstm_cell"])
def test_the_model_is_left_as_it_was_found(name):
    made = problem(name)
    before = snapshot(made.model)
    engine_of(made).sums(plans(rows_of(name))["clip"], made.inputs, made.targets)
    assert snapshot(made.model) == before


@subtests("name", sorted(UNKNOWN))
def test_an_unknown_layer_is_refused_by_name(name):
    with pytest.raises(Unsupported, match=UNKNOWN[name]):
        engine_of(problem(name))


@subtests(
    ("layer", "message"),
    [
        (nn.Embedding(5, 3, max_norm=1.0), "must have max_norm=None"),
        (nn.Embedding(5, 3, scale_grad_by_freq=True), "must not have scale_grad_by_freq"),
    ],
)
def test_settings_that_change_weights_or_mix_examples_are_refused(layer, message):
    with pytest.raises(Unsupported, match=message):
        Layerwise(layer, cross_entropy, Layout.of(layer))


def test_a_layer_input_that_is_changed_after_the_call_is_refused():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, inputs):
            between = self.first(inputs) * 2.0
            outputs = self.second(between)
            between.mul_(2.0)
            return outputs

    model = Changing()
    with pytest.raises(Unsupported, match="the input of layer 'second' must not be changed in place"):
        Layerwise(model, cross_entropy, Layout.of(model)).rows(torch.randn(3, 4), torch.tensor([0, 1, 2]))


def test_a_loss_that_averages_its_batch_is_asked_example_by_example():
    made = problem("mlp")

    def mean(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    engine = Layerwise(made.model, mean, Layout.of(made.model))
    assert_same_rows(engine.rows(made.inputs, made.targets), by_loop(made))


# --- where float arithmetic ends --------------------------------------------------------------------------------


def single(kind: str) -> tuple[nn.Module, torch.Tensor]:
    coins = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "linear":
            return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, CLASSES)), torch.randn(6, 6, generator=coins)
        conv = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, CLASSES))
        return conv, torch.randn(6, 3, 6, 6, generator=coins)


@pytest.mark.long
@subtests("scale", [torch.nan, torch.inf, 1e30, 1e20, 1e12, 1e-12, 1e-20, 1e-30, 0.0])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_broken_huge_and_tiny_examples_add_what_the_reference_lets_through(kind, scale):
    model, inputs = single(kind)
    layout, targets = Layout.of(model), torch.tensor([0, 1, 2, 0, 1, 2])
    inputs[1] *= scale
    inputs[4] = inputs[4] * scale
    reference, engine = TorchFunc(model, cross_entropy, layout), Layerwise(model, cross_entropy, layout)
    dim = layout.dim
    kept = Coordinates(torch.arange(0, dim, 3), dim=dim)
    direction = torch.zeros(dim, 1)
    direction[:4] = 0.5
    of_kept = Subspace.of(torch.full((kept.size, 1), kept.size**-0.5))
    for block in (
        Block(codec=Everything(dim), bound=clip(0.5)),
        Block(codec=Everything(dim), bound=clip(1e-3)),
        Block(codec=Everything(dim), bound=normalize(0.5, regulariser=0.0)),
        Block(codec=kept, bound=normalize(0.5, regulariser=0.0)),
        Block(codec=Complement(Subspace.of(direction)), bound=clip(0.5)),
        Block(codec=Subspace.of(direction), bound=clip(0.5)),
        Block(codec=Masked(kept, of_kept), bound=clip(0.5)),
        Block(codec=Masked(kept, of_kept), bound=normalize(0.5, regulariser=0.0)),
        Block(codec=Masked(kept, Complement(of_kept)), bound=clip(0.5)),
    ):
        (expected,) = reference.sums(StepPlan(block), inputs, targets)
        (found,) = engine.sums(StepPlan(block), inputs, targets)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found.double(), expected.double(), rtol=2e-4, atol=2e-5)
        each = contributions(StepPlan(block), lambda _: reference.rows(inputs, targets))
        assert_matched(engine, StepPlan(block), each, (inputs, targets), 1e-4)


@subtests("way", list(Strategy))
def test_signals_that_cancel_do_not_let_an_example_past_its_bound(way, monkeypatch):
    # Two positions see the same patch with opposite signals, up to a part in 10^5: inner products lose the norm.
    monkeypatch.setattr(linear, "cheapest", lambda shape, device: way if way is not Strategy.PIXELS else Strategy.GRAM)
    coins = torch.Generator().manual_seed(0)
    patch, signal = torch.randn(1, 4, generator=coins), torch.randn(1, 3, generator=coins)
    inputs = 1e3 * torch.stack([patch, patch], dim=1).view(1, 2, 4)
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    weights = torch.stack([signal, -signal * (1 + 1e-5)], dim=1).view(1, 2, 3)

    def loss(outputs, targets):
        return (outputs * weights).sum(dim=(1, 2))

    layout = Layout.of(model)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=normalize(1.0, regulariser=0.0)))
    (found,) = Layerwise(model, loss, layout).sums(plan, inputs, torch.zeros(1))
    assert float(found.norm()) <= 1 + 1e-5


@pytest.mark.long
@subtests("first", [(), (nn.Conv2d(1, 1, 1), nn.Tanh())])
def test_a_strided_convolution_of_one_channel_to_one_column_is_right_in_float32(first):
    """PyTorch's convolution reads other memory there if channels are last, and not in float64, in which checks are."""
    coins = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(*first, nn.Conv2d(1, 3, 2, stride=(1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3))
    x, y = torch.randn(12, 1, 4, 3, generator=coins), torch.arange(12) % 3
    layout = Layout.of(model)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(0.1)))
    for name in ("auto", "layerwise"):
        engine = choose(name, model, cross_entropy, layout, x, y).engine
        (found,) = engine.sums(plan, x, y)
        (wanted,) = choose("one_by_one", model, cross_entropy, layout, x, y).engine.sums(plan, x, y)
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-4, atol=1e-6)
        assert engine.name == "layerwise"


def test_what_a_long_direction_leaves_of_an_example_stays_within_the_bound():
    """A direction of two million numbers, as DPDR's of a layer: by plain products it leaves 1.5 % more than that."""
    coins, width = torch.Generator().manual_seed(0), 1_000_000
    inputs, targets = torch.randn(2, width, generator=coins) / 10, torch.tensor([0, 1])
    model = nn.Linear(width, 2, bias=False)
    nn.init.zeros_(model.weight)
    engine = Layerwise(model, cross_entropy, Layout.of(model))
    row = engine.rows(inputs[:1], targets[:1])[0].double()
    beside = torch.randn(row.shape, generator=coins, dtype=torch.float64)
    beside -= beside @ row / row.square().sum() * row
    direction = (0.98 * row / row.norm() + 0.2 * beside / beside.norm()).unsqueeze(1)
    rest = Complement(Subspace.of((direction / direction.norm()).float()))
    plan = StepPlan(Block(codec=rest, bound=clip(1.0)))
    (both,), (other,) = engine.sums(plan, inputs, targets), engine.sums(plan, inputs[1:], targets[1:])
    assert float((both.double() - other.double()).norm()) <= 1 + 2e-4


@subtests("rest", [1e-3, 2e-3, 4e-3])
def test_beside_a_direction_in_float32_an_example_in_float64_stays_within_the_bound(rest):
    """The direction's length is known to seven digits, the gradient's to sixteen: one example moved the sum by 2.05."""
    width = 3000
    direction = torch.full((width, 1), width**-0.5)
    along = direction[:, 0].double()
    beside = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(2):
        beside -= along * (along @ beside) / (along @ along)
    inputs = 1e6 * (along + rest * beside / beside.norm()) * torch.tensor([[1.0], [1.01]], dtype=torch.float64)
    model = nn.Linear(width, 1, bias=False).double()
    engine = Layerwise(model, lambda answers, _: answers.squeeze(1), Layout.of(model))
    plan = StepPlan(Block(codec=Complement(Subspace.of(direction)), bound=clip(1.0)))
    targets = torch.zeros(2, dtype=torch.int64)
    (both,), (other,) = engine.sums(plan, inputs, targets), engine.sums(plan, inputs[1:], targets[1:])
    assert float((both - other).norm()) == pytest.approx(1, abs=1e-4)


@subtests("channels", [2, 24])
def test_an_example_that_is_nan_in_a_batch_is_nan_alone(channels):
    """By PyTorch's GroupNorm that goes by the order in memory: who was removed moved the sum by 1.4 times the bound."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3), nn.GroupNorm(2, channels), nn.Tanh(), nn.Flatten(), nn.Linear(256 * channels, 2)
    )
    engine, targets = Layerwise(model, cross_entropy, Layout.of(model)), torch.tensor([0, 1])
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=normalize(1.0, regulariser=0.01)))
    inputs = torch.randn(1, 1, 18, 18).repeat(2, 1, 1, 1)
    inputs[1, 0, 2, 3] = 1e30
    (both,), (rest,) = engine.sums(plan, inputs, targets), engine.sums(plan, inputs[1:], targets[1:])
    assert float((both.double() - rest.double()).norm()) <= 1 + 1e-5


def test_a_subspace_without_directions_in_a_convolution_has_coefficients_of_the_others():
    """As of public gradients that are zero there."""
    coins = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))
    layout, inputs, targets = Layout.of(model), torch.rand(6, 2, 5, 5, generator=coins), torch.arange(6) % 3
    spans = ((0, 36), (36, 72), (76, 184))
    subspace = Subspace((torch.zeros(36, 0), torch.zeros(36, 0), torch.eye(108)[:, :2]), spans, layout.dim)
    plan = StepPlan(Block(codec=subspace, bound=clip(0.1)))
    found, wanted = (
        kind(model, cross_entropy, layout).sums(plan, inputs, targets)[0] for kind in (Layerwise, TorchFunc)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_layer_is_recorded_with_its_own_forward_and_keeps_it():
    made = problem("mlp")
    layers = [module for module in made.model.modules() if isinstance(module, nn.Linear)]
    own = layers[0].forward
    kept = vars(layers[0])["forward"] = lambda x: own(x)
    layers[1].register_forward_hook(lambda _module, _args, output: 2 * output.tanh())
    layout = Layout.of(made.model)
    engine = Layerwise(made.model, cross_entropy, layout)
    rows = engine.rows(made.inputs, made.targets)
    assert_same_rows(rows, by_loop(made))
    assert layers[0].forward is kept and "forward" not in vars(layers[1])
    # Also where a pass ends early.
    failing = vars(layers[1])["forward"] = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.rows(made.inputs, made.targets)
    assert layers[0].forward is kept and layers[1].forward is failing


def test_a_copy_of_a_layer_that_a_pass_has_made_goes_on_as_the_layer():
    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            vars(self).setdefault("copied", copy.copy(self.layer))
            return self.layer(x)

    model, data = Copying(), (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    engine = Layerwise(model, cross_entropy, Layout.of(model))
    first = engine.rows(*data)
    assert torch.equal(vars(model)["copied"](data[0]), model.layer(data[0]))
    assert torch.equal(engine.rows(*data), first)


@subtests("out", [2, 10, 1000])
def test_a_parameter_of_fewer_numbers_than_its_gradient_has_is_refused_before_anything_is_written(out):
    """PyTorch adds a bias of one number to all outputs."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out))
    model[2].bias = nn.Parameter(torch.zeros(1))
    layout = Layout.of(model)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(1.0)))
    with pytest.raises(Unsupported, match=f"'2.bias' must have a gradient of its own 1 numbers .* got {out} for 8"):
        Layerwise(model, cross_entropy, layout).sums(plan, torch.ones(8, 3), torch.zeros(8, dtype=torch.long))


@subtests("masked", [False, True])
@subtests("bound", [normalize(1.0, regulariser=1e-12), clip(1e-9)])
def test_a_product_whose_one_square_no_float64_has_is_bounded(bound, masked):
    """Inputs of 1e-162 and derivatives of 1e153, beside a part whose length hides what is lost."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(10_000, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return torch.cat([self.wide(x[:, :-1]), self.narrow(x[:, -1:])], dim=1)

    model = Heads().double()
    layout = Layout.of(model)
    inputs, targets = torch.full((1, 10_001), 1.5e-162, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    targets[0, 0] = 1e153
    inputs[0, -1] = 1.2e-10
    kept = Coordinates.of(torch.arange(layout.dim) != 5) if masked else Everything(layout.dim)
    engine = Layerwise(model, lambda outputs, y: (outputs * y).sum(dim=1), layout)
    (found,) = engine.sums(StepPlan(Block(codec=kept, bound=bound)), inputs, targets)
    assert float(found.norm()) <= (1 + 1e-6) * bound.norm
    assert float(found.norm()) >= 0.9 * bound.norm


@subtests("masked", [False, True])
@subtests("bound", [clip(0.5), normalize(0.5, regulariser=0.01)])
def test_an_example_of_doubtful_norm_changes_no_other(bound, masked):
    """Without it the others would else be measured in another way, which rounds all of them alike."""
    coins = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 1))
    layout = Layout.of(model)
    inputs, targets = torch.rand(64, 200, generator=coins), torch.rand(64, 1, generator=coins)
    kept = Coordinates.of(torch.rand(layout.dim, generator=coins) < 0.5) if masked else Everything(layout.dim)
    engine = Layerwise(model, lambda outputs, y: (outputs * y).sum(dim=1), layout)
    plan = StepPlan(Block(codec=kept, bound=bound))
    (without,) = engine.sums(plan, inputs, targets)
    targets[7] = 1e-14  # a gradient too short for float32's squares, but for what a kernel knows of it
    (beside,) = engine.sums(plan, inputs, targets)
    others = torch.arange(64) != 7
    (rest,) = engine.sums(plan, inputs[others], targets[others])
    change = float((beside - rest).double().norm()) / bound.norm
    assert change <= 1e-4 if bound.kind == "clip" else change <= 1 + 1e-5
    assert float((without - rest).double().norm()) <= (1 + 1e-5) * bound.norm
