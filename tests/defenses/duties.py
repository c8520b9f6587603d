"""What every defense owes, stated over a factory, so that a method of a test is held to it like the catalogue.

A factory takes a noise multiplier and returns a defense of a small network: 6 inputs, 4 hidden units, 3 classes. It is
trained in two worlds: as it is, and on views of images with dropout in the network.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from leakbench.defenses.core import (
    Context,
    CropAndFlip,
    Defense,
    Engine,
    Execution,
    Layout,
    NoisyPlan,
    OngoingRun,
    Recipe,
    Recording,
    Run,
    Sampling,
    StepPlan,
    ToyRows,
    TrainingSettings,
    clipped_sums,
    contributions,
    partition,
    poisson,
    predict,
    release,
    secure,
    seeded,
    train,
)
from leakbench.defenses.core.gradients.executor import Release, add_noise

Factory = Callable[[float | None], Defense]

STEPS, PER_EPOCH = 6, 2
POISSON = poisson(1 / PER_EPOCH)
_DRAW = torch.Generator().manual_seed(0)
DATA = (torch.randn(24, 6, generator=_DRAW), torch.randint(0, 3, (24,), generator=_DRAW))
PUBLIC = (torch.randn(120, 6, generator=_DRAW), torch.randint(0, 3, (120,), generator=_DRAW))
FLOAT = 1e-5  # relative; a bounded float32 row may be longer than its bound by rounding
ALARM = 1e-7  # chance that a statistical check fails although all is well


def network() -> nn.Sequential:
    """A fresh network with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` writes a stack down for every kind of device
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def network_with_dropout() -> nn.Sequential:
    """The same weights behind a flattening layer, with dropout on the hidden units."""
    plain = network()
    return nn.Sequential(nn.Flatten(), plain[0], plain[1], nn.Dropout(0.4), plain[2])


LAYOUT = Layout.of(network())
DIM = LAYOUT.dim


@dataclass(frozen=True, eq=False)
class World:
    """What is trained on what.

    Attributes:
        network: makes a fresh one.
        data: the private examples.
        public: examples of the same kind.
        settings: of `trained` and `Engine`, besides.
    """

    network: Callable[[], nn.Sequential]
    data: tuple[Tensor, Tensor]
    public: tuple[Tensor, Tensor]
    settings: dict[str, Any]


def _as_images(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return data[0].view(-1, 1, 3, 2), data[1]


PLAIN = World(network, DATA, PUBLIC, {})
DRAWN = World(
    network_with_dropout,
    _as_images(DATA),
    _as_images(PUBLIC),
    {"augmentation": CropAndFlip(views=2, padding=1)},
)
WORLDS = {"plain": PLAIN, "views and dropout": DRAWN}


def trained(defense: Defense, world: World | None = None, **settings: Any) -> Run:
    """A short run that is a function of its settings alone: those of `train` and of the objects that it takes."""
    world = World(network, DATA, PUBLIC, {}) if world is None else world
    usual = {
        "sampling": POISSON,
        "steps": STEPS,
        "lr": 0.3,
        "momentum": 0.5,
        "noise": seeded(1),
        "seed": 2,
        "sampler_key": 3,
        "observer": "updates",
        "public": world.public,
    }
    return train(world.network(), world.data, defense, **grouped(usual | world.settings | settings))


def begun(defense: Defense, world: World | None = None, **settings: Any) -> OngoingRun:
    """The same run before its first step."""
    world = PLAIN if world is None else world
    usual = {"steps": STEPS, "lr": 0.3, "momentum": 0.5, "noise": seeded(1), "seed": 2, "sampler_key": 3}
    found = TrainingSettings(
        defense=defense,
        **grouped({"sampling": POISSON, "observer": "updates"} | usual | world.settings | settings),
    )
    return OngoingRun(world.network(), world.data, world.public, found)


def grouped(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of `train`, those of its objects gathered in them."""
    rest, objects = dict(settings), {}
    for name, kind in (("recipe", Recipe), ("execution", Execution), ("recording", Recording)):
        objects[name] = kind(**{f.name: rest.pop(f.name) for f in fields(kind) if f.name in rest})
    return rest | objects


@cache
def usual(factory: Factory, world: World | None) -> Run:
    """The run at a noise multiplier of 1 that duties compare others with; nobody changes it."""
    return trained(factory(1.0), world)


def parameters(run: Run) -> Tensor:
    """The trained weights as one vector, on the CPU."""
    return Layout.of(run.model).read(run.model).cpu()


@dataclass(frozen=True)
class Moment:
    """One step of a dry run: what a method had seen, and what it planned."""

    context: Context
    plan: StepPlan


def history(defense: Defense, *, steps: int = STEPS, rows: Tensor | None = None, seed: int = 0) -> list[Moment]:
    """Plans of consecutive steps, each made after `observe` saw the release of the one before."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(8, DIM, generator=draw) if rows is None else rows
    noise, moments = seeded(seed), []

    def executed(plan: NoisyPlan) -> Release:
        sums = clipped_sums(plan.plan, [at_points(rows)], torch.zeros(0, dtype=torch.float64))
        return add_noise(plan, sums, noise, rows.dtype)

    context = Context(
        step=0,
        steps=steps,
        steps_per_epoch=PER_EPOCH,
        layout=LAYOUT,
        parameters=LAYOUT.read(network()),
        expected_batch=8.0,
        noise_multiplier=defense.calibrated_multiplier,
        architecture=network,
        input_shape=(6,),
        seed=seed,
        public=ToyRows(DIM),
        one_off=lambda plan, step: executed(plan).noisy,
    )
    state = defense.start(context)
    for step in range(steps):
        context = context.at(step)
        state, plan = defense.plan(state, context)
        moments.append(Moment(context, plan))
        if plan.start_at is not None:
            context = context.at(step, parameters=plan.start_at)
        out = executed(plan.at(defense.calibrated_multiplier))
        update = plan.post(out.total / context.expected_batch)
        state = defense.observe(state, context, out.noisy, update)
        assert context.parameters is not None
        context = context.at(step, parameters=context.parameters - 0.1 * update, update=update)
    return moments


def at_points(rows: Tensor) -> Callable[[Tensor | None], Tensor]:
    """Gradients that differ from one parameter point to another: elsewhere, the rows in reverse columns."""
    return lambda point: rows if point is None else rows.flip(1)


# --- sensitivity -----------------------------------------------------------------------------------------------


def _row(scale: float, seed: int) -> Tensor:
    direction = torch.randn(DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * direction / direction.norm()).float()


def _broken(value: float, everywhere: bool, seed: int) -> Tensor:
    row = torch.full((DIM,), value) if everywhere else _row(1.0, seed)
    row[seed % DIM] = value
    return row


SCALES = (0.0, 1e-45, 1e-38, 1e-30, 1e-3, 0.1, 0.5, 1.0, 7.0, 1e4, 1e19, 1e30, 3e38)
ADVERSARIAL = st.one_of(
    st.builds(_row, st.sampled_from(SCALES), st.integers(0, 99)),
    st.builds(
        _broken,
        st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45]),
        st.booleans(),
        st.integers(0, 99),
    ),
)
BATCHES = st.lists(ADVERSARIAL, min_size=1, max_size=6).map(torch.stack)


@cache
def histories(factory: Factory) -> tuple[Moment, ...]:
    """Moments of several dry runs, among them one whose releases are mostly noise and one without any."""
    settings = product((0.01, 1.3, 50.0), (0, 1))
    return tuple(m for sigma, seed in settings for m in history(factory(sigma), seed=seed))


def check_bound(plan: StepPlan, rows: Tensor) -> None:
    """Removing any one row moves each block by at most its sensitivity, and the whitened whole by at most 1."""
    exact = torch.zeros(0, dtype=torch.float64)
    whole = clipped_sums(plan, [at_points(rows)], exact)
    for removed in range(len(rows)):
        others = torch.cat([rows[:removed], rows[removed + 1 :]])
        without = clipped_sums(plan, [at_points(others)] if len(others) else [], exact)
        moved = [float((a - b).norm()) for a, b in zip(whole, without, strict=True)]
        for distance, block in zip(moved, plan.blocks, strict=True):
            assert distance <= block.bound.sensitivity * (1 + FLOAT)
        whitened = [d / block.noise_std(1.0) for d, block in zip(moved, plan.blocks, strict=True)]
        assert math.hypot(*whitened) <= 1 + FLOAT


def check_bound_is_reached(plan: StepPlan) -> None:
    """The noise is no larger than need be: some row moves the whitened whole by almost 1."""
    rows = 1e6 * torch.randn(300, DIM, generator=torch.Generator().manual_seed(5))
    parts = contributions(plan, at_points(rows))
    blocks = zip(parts, plan.blocks, strict=True)
    whitened = torch.cat([part / block.noise_std(1.0) for part, block in blocks], dim=1)
    assert float(whitened.norm(dim=1).max()) > 0.999


def check_removal(factory: Factory, world: World) -> None:
    """In a real batch too, with whatever is drawn in it, removing an example takes off its contribution and no more."""
    inputs, labels = world.data
    moments = history(factory(1.0))
    for moment in (moments[0], moments[1], moments[-1]):
        engine = Engine(world.network().train(), expected_batch=len(inputs), **world.settings)

        def summed(chosen: list[int], engine: Engine = engine, plan: StepPlan = moment.plan) -> tuple[Tensor, ...]:
            return engine.run(plan.at(0.0), inputs[chosen], labels[chosen], seed=9).noisy

        everybody = list(range(len(inputs)))
        whole = summed(everybody)
        for removed in (0, 7, len(inputs) - 1):
            without, alone = summed([i for i in everybody if i != removed]), summed([removed])
            moved = [a - b for a, b in zip(whole, without, strict=True)]
            for change, own in zip(moved, alone, strict=True):
                torch.testing.assert_close(change, own, rtol=1e-4, atol=1e-5)
            blocks = zip(moved, moment.plan.blocks, strict=True)
            whitened = [float(change.norm()) / block.noise_std(1.0) for change, block in blocks]
            if math.isfinite(moment.plan.sensitivity):
                assert math.hypot(*whitened) <= 1 + FLOAT


def noise_of(seed: int, size: int, std: float) -> Tensor:
    """What the first release with this seed is with sums of zero, in float32."""
    return seeded(seed).add(torch.zeros(size, dtype=torch.float64), std).float()


# --- noise -----------------------------------------------------------------------------------------------------


def has_scale(draws: Tensor, std: float) -> bool:
    """Whether centred Gaussian draws have this standard deviation, by a two-sided chi-square test."""
    statistic = float(draws.double().square().sum()) / std**2
    p = 2 * min(stats.chi2.cdf(statistic, draws.numel()), stats.chi2.sf(statistic, draws.numel()))
    return bool(p > ALARM)


def check_noise(factory: Factory) -> None:
    """Each block's noise has its scale, and 2/3 and 3/2 of that would have been noticed.

    400 draws or more: then the test takes wrong for right less than once in a million as well.
    """
    sigma = 0.7
    moments = history(factory(sigma))
    for moment in (moments[0], moments[1], moments[-1]):
        engine, (none, labels) = Engine(network(), noise=seeded(11)), DATA
        # Without its stream, in which a step is taken once: what is drawn for a stream has tests of its own.
        plan = StepPlan(*moment.plan.blocks).at(sigma)
        runs = [engine.run(plan, none[:0], labels[:0]).noisy for _ in range(400)]
        for block, draws in zip(moment.plan.blocks, zip(*runs, strict=True), strict=True):
            values = torch.stack(draws).reshape(-1)[:4000]
            std = sigma * block.bound.norm / math.sqrt(block.share)
            assert has_scale(values, std)
            assert not has_scale(values, std * 2 / 3)
            assert not has_scale(values, std * 3 / 2)
            assert values.unique().numel() > 0.99 * values.numel()  # fresh in every step


# --- runs ------------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Bit for bit, through tensors and containers."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def spaces(run: Run) -> list[tuple[Tensor, ...]]:
    """The matrix of each released block's codec, step by step: masks and bases, comparable."""
    plans = [step.plan for step in run.transcript.steps]
    assert None not in plans
    return [tuple(block.codec.encode(torch.eye(block.codec.dim)) for block in plan.blocks) for plan in plans if plan]


def check_same_run(one: Run, other: Run) -> None:
    """Parameters, ledger, transcript, masks and the method's memory agree bit for bit."""
    assert torch.equal(parameters(one), parameters(other))
    assert one.ledger.entries == other.ledger.entries
    assert same(one.state, other.state)
    assert (one.seed, one.sampler_key, one.noise) == (other.seed, other.sampler_key, other.noise)
    assert len(one.transcript.steps) == len(other.transcript.steps)
    for a, b in zip(one.transcript.steps, other.transcript.steps, strict=True):
        assert (a.step, a.expected_batch, a.noise_multiplier) == (b.step, b.expected_batch, b.noise_multiplier)
        assert torch.equal(a.parameters, b.parameters)
        assert same(a.noisy, b.noisy)
        assert a.plan and b.plan
        assert [x.bound for x in a.plan.blocks] == [x.bound for x in b.plan.blocks]
        assert [x.share for x in a.plan.blocks] == [x.share for x in b.plan.blocks]
    assert same(spaces(one), spaces(other))


def check_ledger(factory: Factory, world: World | None = None) -> None:
    """The plans that were executed are charged like the plans of a dry run."""
    of_epochs = partition(1 / PER_EPOCH)
    dealt = trained(factory(1.0), world, sampling=of_epochs)
    for sampling, run in (POISSON, usual(factory, world)), (of_epochs, dealt):
        expected = predict(factory(1.0), sampling=sampling, steps=STEPS)
        assert run.ledger.entries == expected.entries
        assert run.ledger.steps == STEPS
        assert run.ledger.claim(1e-5) == expected.claim(1e-5)
        foreign = not type(factory(1.0).method).__module__.startswith("leakbench.defenses.")
        # A codec, a query or a bound of a class of its own: list it in defenses/core/training/assumptions.py.
        assert len(run.unverified) == foreign and ("unverified_method" in run.remarks) == foreign, run.unverified


def check_exact_noise(factory: Factory, world: World | None = None) -> None:
    """Exact noise trains the same defense, example by example, and is charged as what it is."""
    if any(moment.plan.correlated for moment in history(factory(2.0))):
        with pytest.raises(ValueError, match="correlated over steps must be drawn in float64, got exact noise"):
            trained(factory(2.0), world, noise=secure())
        return
    run = trained(factory(2.0), world, noise=secure())
    expected = predict(factory(2.0), sampling=POISSON, steps=STEPS)
    assert run.ledger.claim(1e-5).epsilon == pytest.approx(expected.claim(1e-5).epsilon, rel=1e-9)
    noisy = factory(2.0).calibrated_multiplier > 0
    assert run.noise == ("secure" if noisy else "none")
    assert run.engine.startswith("one_by_one") is noisy
    proved = math.isfinite(expected.claim(1e-5).epsilon)
    assert all(entry.exact for entry in run.ledger.entries) is proved
    for step in run.transcript.steps:
        assert step.plan is not None and step.noisy is not None
        assert all(values.isfinite().all() for values in step.noisy)


def check_seeds(factory: Factory, world: World | None = None) -> None:
    """The seeds decide everything; another noise, where there is noise, is another run."""
    check_same_run(usual(factory, world), trained(factory(1.0), world))
    noisy = factory(1.0).calibrated_multiplier > 0
    other = trained(factory(1.0), world, noise=seeded(99))
    assert torch.equal(parameters(other), parameters(usual(factory, world))) is not noisy


def check_coins(factory: Factory) -> None:
    """What is planned is drawn from the context's public coins: PyTorch's own generator stays as it is."""
    before = torch.random.get_rng_state()
    history(factory(1.0))
    same_state = torch.equal(torch.random.get_rng_state(), before)
    assert same_state, "a plan must draw from context.coins, not from PyTorch's own generator"


def check_retaken(factory: Factory, world: World | None = None) -> None:
    """The steps can be taken once more from the seeds, one at a time."""
    run, again = usual(factory, world), begun(factory(1.0), world)
    for mine, theirs in zip(again.retake(run), run.transcript.steps, strict=True):
        assert again.transcript.steps == []
        assert torch.equal(mine.parameters, theirs.parameters) and same(mine.noisy, theirs.noisy)
        assert mine.plan and theirs.plan and mine.plan.stds == theirs.plan.stds
        assert same(mine.verdict, theirs.verdict)


def check_microbatches(factory: Factory, world: World | None = None) -> None:
    """How many rows are in memory at a time changes nothing, up to the rounding of float32 gradients.

    A size that divides no batch as it is, and one row at a time with views and dropout, where a row stands alone.
    """
    whole = usual(factory, world)
    for size in (5,) if world is PLAIN else (1,) if world is DRAWN else (1, 5):
        cut = trained(factory(1.0), world, microbatch=size)
        torch.testing.assert_close(parameters(cut), parameters(whole), rtol=1e-4, atol=1e-5)
        assert cut.ledger.entries == whole.ledger.entries
        assert same(spaces(cut)[:1], spaces(whole)[:1])


def check_empty_batches(factory: Factory, world: World | None = None) -> None:
    """A step without examples is a step: charged, recorded, and pure noise."""
    rare = Sampling("poisson", 1e-4)
    assert all(rare.indices(step, len(DATA[0]), 3).numel() == 0 for step in range(3))
    run = trained(factory(1.0), world, sampling=rare, steps=3)
    assert run.ledger.steps == len(run.transcript.steps) == 3
    noisy = factory(1.0).calibrated_multiplier > 0
    assert any(bool(values.any()) for step in run.transcript.steps for values in step.noisy or ()) is noisy
    if all(step.verdict is None for step in run.transcript.steps):  # else what is pure noise may be taken back
        assert torch.equal(parameters(run), LAYOUT.read(network())) is not noisy  # both networks start alike


def check_doubles(factory: Factory) -> None:
    """A model in float64 is trained in float64, under the same plans."""
    data, public = ((inputs.double(), labels) for inputs, labels in (DATA, PUBLIC))
    run = trained(factory(1.0), World(lambda: network().double(), data, public, {}))
    assert run.ledger.entries == usual(factory, PLAIN).ledger.entries
    assert all(p.dtype == torch.float64 and bool(torch.isfinite(p).all()) for p in run.model.parameters())
    assert all(values.dtype == torch.float64 for step in run.transcript.steps for values in step.noisy or ())


class _Stop:
    """A progress callback that interrupts after a number of steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, done: int, steps: int) -> None:
        if done == self.after:
            raise KeyboardInterrupt


def interrupted(defense: Defense, path: Path, world: World | None = None, *, after: int, **settings: Any) -> Run:
    """A run that is interrupted once, between two steps, and taken up from its checkpoint by another process."""
    with pytest.raises(KeyboardInterrupt):
        trained(defense, world, checkpoint=path, progress=_Stop(after), noise=seeded(1), **settings)
    # Another noise source on purpose: the stream must come from the checkpoint.
    return trained(defense, world, checkpoint=path, noise=seeded(777), **settings)


def check_interruption(factory: Factory, folder: Path) -> None:
    """A run interrupted in the middle and resumed equals the one that was not."""
    check_same_run(interrupted(factory(1.0), folder / "halfway", PLAIN, after=STEPS // 2), usual(factory, PLAIN))


def check_interruptions(factory: Factory, folder: Path, world: World | None = None) -> None:
    """A run interrupted early or at the end and resumed equals the one that was not, whatever optimizes.

    With another optimizer, and with views and dropout, in the middle alone: what they add to a checkpoint is the same
    after every step.
    """
    for name, momentum in (("sgd", 0.5), ("adam", 0.0)):
        everywhere = name == "sgd" and (world is None or world is PLAIN)
        places = (1, STEPS) if everywhere else (STEPS // 2,)  # the middle of a plain run is `check_interruption`'s
        settings = {"optimizer": name, "momentum": momentum, "schedule": "cosine"}
        whole = trained(factory(1.0), world, **settings)
        for after in places:
            resumed = interrupted(factory(1.0), folder / f"{name}{after}", world, after=after, **settings)
            check_same_run(resumed, whole)


def check_interruption_inside_a_step(factory: Factory, folder: Path, world: World | None = None) -> None:
    """A step that was broken off, be it the first or the last, is done again from a checkpoint, with the same noise."""
    whole, take_step = usual(factory, world), torch.optim.SGD.step
    for broken in (0, STEPS - 1) if world is None or world is PLAIN else [STEPS // 2]:
        path, calls = folder / f"step{broken}", []

        def stopping(self: Any, closure: Any = None, broken: int = broken, calls: list[int] = calls) -> Any:
            calls.append(1)
            if len(calls) > broken:  # the release is there, and nothing has come of it
                raise KeyboardInterrupt
            return take_step(self, closure)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(torch.optim.SGD, "step", stopping)
            trained(factory(1.0), world, checkpoint=path, checkpoint_every=1)
        check_same_run(trained(factory(1.0), world, checkpoint=path), whole)


def check_device(factory: Factory, folder: Path, device: str) -> None:
    """A run on another device draws the same noise, masks and batches, and can be interrupted there."""
    here, there = trained(factory(1.0)), trained(factory(1.0), device=device)
    assert there.ledger.entries == here.ledger.entries
    torch.testing.assert_close(parameters(there), parameters(here), rtol=1e-3, atol=1e-4)
    resumed = interrupted(factory(1.0), folder / "run", after=3, device=device)
    torch.testing.assert_close(parameters(resumed), parameters(there), rtol=1e-5, atol=1e-6)


def check_refusals(factory: Factory) -> None:
    """Without a noise multiplier nothing is released."""
    with pytest.raises(ValueError, match=r"noise_multiplier .* must be set before it runs, got None; give one"):
        trained(factory(None))
    context = Context(step=0, steps=1, layout=LAYOUT, parameters=LAYOUT.read(network()))
    with pytest.raises(ValueError, match=r"noise_multiplier .* must be set before it runs"):
        release(factory(None), torch.zeros(3, DIM), context, noise=seeded(0))
