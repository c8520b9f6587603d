"""What may be rounding is bounded as if it were longer: no example moves the others by what rounding makes of them."""

from functools import cache
from itertools import product

import pytest
import torch
from torch import nn

from leakbench.defenses.core import (
    Block,
    Complement,
    ConcatenatedCodec,
    Context,
    Coordinates,
    EncodedNormWithin,
    Engine,
    Everything,
    Gradient,
    GradientAhead,
    GradientDifference,
    GradientLess,
    Layout,
    LossChange,
    Masked,
    NormWithin,
    Scaled,
    SpanCodec,
    StepPlan,
    Stretched,
    Subspace,
    adaptive_weight,
    clip,
    contributions,
    normalize,
    seeded,
)
from leakbench.defenses.core.plan.rounding import LEAST_SHARE
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.gep import gep
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.rpdp import rpdp

from ....parameters import pairwise, subtests

OUT, IN, SIZES, COUNTS = 16, 60, (1e5, 1e7, 1e10), (2, 3, 5, 17)
NORM = 0.05


def coins(seed):
    return torch.Generator().manual_seed(seed)


WEIGHT = (0.1 * torch.randn(OUT, IN, generator=coins(3))).double()

# --- engines: huge rows beside and inside the directions of a method ------------------------------------------------


@cache
def engine_of(kind, name):
    layer = nn.Linear(IN, OUT, bias=False) if kind == "linear" else nn.Conv2d(1, OUT, (IN, 1), bias=False)
    with torch.no_grad():
        layer.weight.copy_(WEIGHT.view(layer.weight.shape))
    layers = (nn.Flatten(), layer) if kind == "linear" else (layer, nn.Flatten())
    return Engine(nn.Sequential(*layers), noise=seeded(0), engine=name)


def saturated(inputs):
    """Whether outputs are so far apart that probabilities of a huge multiple of these inputs are 0 and 1."""
    first, second = (inputs @ WEIGHT.T).topk(2).values.T
    return first - second > 0.2


@cache
def known():
    """Inputs and labels of eight examples, and the gradients of huge multiples of them up to those."""
    inputs = torch.randn(60, IN, generator=coins(1)).double()
    inputs = inputs[saturated(inputs)][:8]
    best = (inputs @ WEIGHT.T).argmax(dim=1)
    labels = (best + 1) % OUT
    signals = torch.zeros(8, OUT).double()
    signals[range(8), best], signals[range(8), labels] = 1.0, -1.0
    return inputs, labels, (signals.unsqueeze(2) * inputs.unsqueeze(1)).flatten(1).float()


class Known:
    """Public gradients: those of the eight examples."""

    size = 8

    def __call__(self, chosen):
        return known()[2][chosen]


def plan_of(method, kind, rank=8):
    layout = Layout.of(engine_of(kind, "layerwise").model)
    context = Context(step=0, steps=9, layout=layout, public=Known(), expected_batch=3.0)
    if method == "dpdr":
        direction = known()[2][0]
        return dpdr(clip_norm=NORM, noise_multiplier=1.0).plan(direction / direction.norm(), context)[1]
    made = {
        "pcdp": pcdp(rank=rank, clip_norm=NORM, noise_multiplier=1.0),
        "rpdp": rpdp(rank=rank, clip_norm=NORM, noise_multiplier=1.0),
        "gep": gep(rank=rank, groups=1, clip_norm=NORM, clip_norm_rest=NORM, noise_multiplier=1.0),
    }[method]
    return made.plan(made.start(context), context)[1]


def basis_of(plan):
    """The directions of a plan, which has one span."""
    ((basis,),) = [block.codec.bases for block in plan.blocks if isinstance(block.codec, Subspace)]
    return basis


def beside(directions, count, seed):
    """Inputs and labels of examples whose gradients, once saturated, are at a right angle to the directions."""
    draw, inputs, labels = coins(seed), [], []
    by_output = directions.double().view(OUT, IN, -1)
    while len(inputs) < count:
        best, label = torch.randperm(OUT, generator=draw)[:2]
        frame = torch.linalg.qr(by_output[best] - by_output[label]).Q
        x = torch.randn(IN, generator=draw).double()
        for _ in range(2):
            x = x - frame @ (frame.T @ x)
        if saturated(x.unsqueeze(0)) and (WEIGHT @ x).argmax() == best:
            inputs.append(x)
            labels.append(label)
    return torch.stack(inputs), torch.stack(labels)


METHODS = [("gep", 8, "linear"), ("gep", 8, "conv"), ("dpdr", 1, "linear")]
METHODS += [("rpdp", 8, "linear"), ("rpdp", 1, "conv"), ("pcdp", 1, "conv")]


@pytest.mark.long
@subtests("by, count, size", pairwise([*product(METHODS, ["layerwise", "torch.func"])], COUNTS, SIZES))
def test_no_row_moves_those_whose_part_is_rounding(by, count, size):
    (method, rank, kind), engine = by
    plan, runs = plan_of(method, kind, rank), engine_of(kind, engine)
    outside = beside(basis_of(plan), count, seed=count)
    # Inside the directions, where something is left over that is bounded.
    inside = [part[torch.arange(count) % rank] for part in known()[:2]]
    for inputs, labels in (outside, inside)[: len(plan.blocks)]:
        inputs = size * (inputs * torch.linspace(1, 1.3, count).double().unsqueeze(1))
        rows = inputs.float().view(-1, 1, IN, 1) if kind == "conv" else inputs.float()
        whole = runs.run(plan.at(0.0), rows, labels).noisy
        for gone in range(min(count, 5)):
            kept = [i for i in range(count) if i != gone]
            less = runs.run(plan.at(0.0), rows[kept], labels[kept]).noisy
            for block, a, b in zip(plan.blocks, whole, less, strict=True):
                assert float((a - b).double().norm()) <= block.bound.sensitivity * (1 + 2e-3), gone


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_engines_agree_on_rows_of_which_little_lies_along_the_directions(kind):
    """Shares from far below the least one to above it, where rounding is 1e-3 of a contribution at most."""
    basis = basis_of(plan_of("rpdp", kind))
    inputs, labels = beside(basis, 12, seed=7)
    tilted = torch.randn(12, IN, generator=coins(8)).double()
    inputs = inputs + tilted * torch.logspace(-6, -1, 12).double().unsqueeze(1)
    rows = (1e4 * inputs).float().view(-1, 1, IN, 1) if kind == "conv" else (1e4 * inputs).float()
    for bound in (clip(NORM), normalize(NORM, regulariser=0.01), adaptive_weight(NORM, regulariser=0.1)):
        plan = StepPlan(Block(codec=Subspace.of(basis), bound=bound)).at(0.0)
        for i in range(12):
            one = (rows[i : i + 1], labels[i : i + 1])
            ours, reference = (engine_of(kind, name).run(plan, *one).noisy[0] for name in ("layerwise", "torch.func"))
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-4 * NORM)


# --- codecs and queries: rows that differ by rounding ---------------------------------------------------------------

DIM = 240
FRAME = torch.linalg.qr(torch.randn(DIM, 6, generator=coins(11)).double()).Q.float()
HALF = torch.linalg.qr(torch.randn(DIM // 2, 3, generator=coins(12)).double()).Q.float()
ALONG = Subspace.of(FRAME)
FIRST = Coordinates(torch.arange(DIM // 2), dim=DIM)
RANDOM = torch.randn(20, DIM, generator=coins(13)).double()
INSIDE = RANDOM[:, :6] @ FRAME.double().T
OUTSIDE = RANDOM - (RANDOM @ FRAME.double()) @ FRAME.double().T
IN_HALF = torch.cat([RANDOM[:, :3] @ HALF.double().T, 1e-9 * RANDOM[:, DIM // 2 :]], dim=1)
UNCHANGED = torch.zeros(DIM)


def nudged(rows, seed):
    """Every number off by up to an ulp: what another batch may make of it."""
    return rows * (1 + 2**-23 * (2 * torch.rand(rows.shape, generator=coins(seed)) - 1))


def twice(query, rows):
    """The answers of a query for rows that differ by rounding."""
    return [query(lambda _point, seed=seed: nudged(rows, seed)) for seed in (1, 3)]


CASES = {
    "coefficients": (ALONG, Gradient(), OUTSIDE),
    "left over": (Complement(ALONG), Gradient(), INSIDE),
    "left over of a span": (SpanCodec(0, Complement(Subspace.of(HALF)), DIM), Gradient(), IN_HALF),
    "left over of a mask": (Masked(FIRST, Complement(Subspace.of(HALF))), Gradient(), IN_HALF),
    "side by side": (ConcatenatedCodec((Complement(ALONG), ALONG), (1e-5, 3.0)), Gradient(), OUTSIDE),
    "stretched": (Stretched(ALONG, torch.full((6,), 1e-6), 1.0), Gradient(), INSIDE),
    "difference": (Everything(DIM), GradientDifference(UNCHANGED), RANDOM),
    "scaled difference": (Scaled(torch.full((DIM,), 30.0)), GradientDifference(UNCHANGED), RANDOM),
    "ahead": (Everything(DIM), GradientAhead(UNCHANGED, 1e4), RANDOM),
    "less": (Everything(DIM), GradientLess(1e7 * RANDOM[0].float()), RANDOM[:1].expand(20, DIM)),
}


@subtests("size", SIZES)
@subtests("name", CASES)
def test_rounding_of_what_a_row_is_made_of_moves_a_contribution_by_little(name, size):
    codec, query, exact = CASES[name]
    # 2 e / share, of two rows that are an ulp, 2^-23, off to either side.
    most = 1e-3 if type(query) is Gradient else 8e-3
    rows = (1e7 if name == "less" else size) * exact
    for bound in (clip(NORM), normalize(NORM, regulariser=0.0), adaptive_weight(NORM, regulariser=0.1)):
        plan = StepPlan(Block(codec=codec, bound=bound, query=query))

        def made(seed, plan=plan):
            now = nudged(rows.float(), seed)
            then = nudged(rows.float(), seed + 1)
            return contributions(plan, lambda point: now if point is None else then)[0].double()

        one, other = made(1), made(3)
        assert float(one.norm(dim=1).max()) <= NORM * (1 + 1e-5)
        assert float((one - other).norm(dim=1).max()) <= most * NORM


@pytest.mark.parametrize("at", [1.0, 1e3, 1e6])
def test_the_change_of_a_huge_loss_is_bounded_as_rounding(at):
    plan = StepPlan(Block(codec=Everything(1), bound=clip(1e-6), query=LossChange(UNCHANGED)))
    losses = torch.full((8, 1), 0.9 * at)

    def made(seed):
        found = {None: nudged(losses, seed), UNCHANGED: nudged(losses, seed + 1)}
        return contributions(plan, lambda _point: torch.zeros(8, 1), lambda point: found[point])[0]

    assert float((made(1) - made(3)).abs().max()) <= 4e-3 * 1e-6


def test_who_stands_at_a_threshold_is_not_turned_by_rounding():
    rows = RANDOM.float() / RANDOM.float().norm(dim=1, keepdim=True)
    for beyond in (0.0, LEAST_SHARE / 2, LEAST_SHARE):
        one, other = twice(NormWithin(1.0), (1 + beyond) * rows)
        assert float((one - other).abs().max()) <= 1e-3
    for codec, rows in ((ALONG, 1e6 * OUTSIDE.float()), (Complement(ALONG), 1e6 * INSIDE.float())):
        middle = float(LEAST_SHARE * rows.norm(dim=1).median())
        for threshold in (0.3, middle):
            within = EncodedNormWithin(NormWithin(threshold), codec, Gradient())
            one, other = twice(within, rows)
            assert float((one - other).abs().max()) <= 1e-3
    at_and_beyond = torch.tensor([[1.0], [1.0 + 1.01 * LEAST_SHARE]])
    assert NormWithin(1.0)(lambda _point: at_and_beyond).tolist() == [[0.5], [-0.5]]


# --- what it is, and whom it leaves alone ---------------------------------------------------------------------------


def test_a_row_is_bounded_as_if_a_share_of_it_were_along_the_directions():
    row = torch.tensor([[3e-5, 0.6, 0.8]], dtype=torch.float64)
    along = Subspace.of(torch.eye(3, 1, dtype=torch.float64))
    for bound, factor in (
        (clip(1e-6), 1e-6 * 2048),
        (clip(1e-3), 1.0),  # whatever its length is taken to be, it is within
        (normalize(1e-6, regulariser=0.01), 1e-6 / (1 / 2048 + 0.01)),
        (adaptive_weight(1e-6, regulariser=0.1), 1e-6 / (1 / 2048 + 0.1 / (1 / 2048 + 0.1))),
    ):
        (found,) = contributions(StepPlan(Block(codec=along, bound=bound)), lambda _point: row)
        assert float(found) == pytest.approx(3e-5 * factor, rel=1e-8)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_ordinary_rows_are_what_they_were_to_the_last_digit(scale):
    rows = (scale * RANDOM).float()
    earlier = 0.9998 * rows
    codecs = {
        "coefficients": ALONG,
        "left over": Complement(ALONG),
        "of a span": SpanCodec(0, Subspace.of(HALF), DIM),
        "of a mask": Masked(FIRST, Subspace.of(HALF)),
        "side by side": ConcatenatedCodec((Complement(ALONG), ALONG), (1.0, 3.0)),
        "stretched": Stretched(ALONG, torch.full((6,), 0.2), 5.0),
        "coordinates": Complement(Coordinates(torch.arange(DIM - 1), dim=DIM)),
    }
    for codec in codecs.values():
        for bound in (clip(NORM), normalize(NORM, regulariser=0.01), adaptive_weight(NORM, regulariser=0.1)):
            (found,) = contributions(StepPlan(Block(codec=codec, bound=bound)), lambda _point: rows)
            assert torch.equal(found, bound(codec.encode(rows)))
    for query in (GradientDifference(UNCHANGED), GradientAhead(UNCHANGED, 0.9)):
        plan = StepPlan(Block(codec=Everything(DIM), bound=clip(NORM), query=query))
        (found,) = contributions(plan, lambda point: rows if point is None else earlier)
        assert torch.equal(found, clip(NORM)(query(lambda point: rows if point is None else earlier)))


@subtests("bad", [float("nan"), float("inf"), 3e38, 1e-30, 0.0])
def test_rows_that_are_broken_huge_or_tiny_add_what_fits_and_no_more(bad):
    rows = torch.full((2, DIM), bad)
    rows[1] = RANDOM[1].float()
    for codec in (ALONG, Complement(ALONG)):
        (found,) = contributions(StepPlan(Block(codec=codec, bound=clip(NORM))), lambda _point, given=rows: given)
        assert found.isfinite().all() and float(found.norm(dim=1).max()) <= NORM * (1 + 1e-6)
        assert float(found[1].norm()) == pytest.approx(NORM, rel=1e-5)
