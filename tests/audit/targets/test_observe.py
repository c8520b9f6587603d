"""What an attacker is given is what the engine released, whatever the plan, and nothing of the truth besides."""

import copy
import gc
import types
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakbench.attacks.core import Examples, Knows, Observation, Requirements, granted
from leakbench.attacks.core.threat_model.requires import Access
from leakbench.attacks.likelihood_ratio import likelihood_ratio
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.threat_models import black_box, every_step, white_box
from leakbench.audit.scoring.truth import GroundTruth
from leakbench.audit.subjects.noise_check import noise_found
from leakbench.audit.subjects.outcome import join
from leakbench.audit.targets import residual_noise
from leakbench.audit.targets.candidates import Candidates
from leakbench.audit.targets.observe import PublicKnowledge, RunView, observe
from leakbench.audit.targets.observed_step import Observed
from leakbench.defenses.core import (
    Block,
    CropAndFlip,
    Defense,
    Everything,
    GradientDifference,
    Layout,
    NormWithin,
    Offset,
    Recipe,
    Recording,
    Stateless,
    StepPlan,
    StrategyRow,
    Subspace,
    clip,
    cross_entropy,
    fixed,
    full,
    partition,
    poisson,
    seeded,
    shuffle,
    train,
)
from leakbench.defenses.core.randomness.noise import NoiseSource

from ...attacks import walker
from ...attacks.toys import LargestMade
from ...parameters import subtests
from ...test_every_defense import REPRESENTATIVES

_DRAW = torch.Generator().manual_seed(0)
PEOPLE = Examples(
    ids=torch.arange(100, 130),
    inputs=torch.randn(30, 6, generator=_DRAW),
    labels=torch.randint(0, 3, (30,), generator=_DRAW),
)
MEMBERS, OUTSIDERS = range(20), range(20, 30)
WORLD = PublicKnowledge(input_shape=(6,), classes=3, low=-5.0, high=5.0)
SAMPLING = poisson(0.4)
STEPS = 4
# Values under which four steps show more of a method than its defaults do, by the setting's name.
SMALL = {"clip_norm": 0.5, "switch_step": 3, "final_sparsity": 0.5, "share": 0.3, "rank": 3}


def some(positions) -> Examples:
    at = torch.tensor(list(positions))
    return Examples(ids=PEOPLE.ids[at], inputs=PEOPLE.inputs[at], labels=PEOPLE.labels[at])


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


class Difference:
    """In the manner of DIFF2: releases how much each gradient changed since the last parameters."""

    def start(self, context):
        return None

    def plan(self, state, context):
        if state is None:
            return state, StepPlan(Block(codec=Everything(context.dim), bound=clip(1.0)))
        earlier, estimate = state
        block = Block(codec=Everything(context.dim), bound=clip(0.3), query=GradientDifference(earlier))
        return state, StepPlan(block, post=Offset(estimate))

    def observe(self, state, context, noisy, update):
        return context.parameters.clone(), update.clone()


class Counted(Stateless):
    """In the manner of adaptive clipping: counts the norms within the bound, beside the update."""

    def plan(self, context):
        return StepPlan(
            Block(codec=Everything(context.dim), bound=clip(0.7), share=0.9),
            Block(codec=Everything(1), bound=clip(0.5), share=0.1, query=NormWithin(0.7), updates=False),
        )


class Projected(Stateless):
    """Five random directions that everybody knows, drawn anew in every step."""

    def plan(self, context):
        drawn = torch.randn(context.dim, 5, generator=context.coins(context.step))
        return StepPlan(Block(codec=Subspace.of(torch.linalg.qr(drawn).Q), bound=clip(0.5)))


def defense(name: str, sigma: float) -> Defense:
    if name in OWN:
        return Defense(OWN[name](), noise_multiplier=sigma)
    settings = {key: value for key, value in SMALL.items() if key in catalog.settings("defenses", name)}
    return catalog.defense(name, settings, noise_multiplier=sigma)


OWN = {"difference": Difference, "counted": Counted, "projected": Projected}
ALL = [*catalog.central_names(), *OWN]
NOISY = [name for name in ALL if defense(name, 1.0).noise_multiplier]


def unless_alike(names):
    """The cases of these names, those left out of `make test` whose plans look like another's."""
    ours = set(catalog.central_names()) - REPRESENTATIVES
    return [pytest.param(name, marks=pytest.mark.slow) if name in ours else name for name in names]


each = pytest.mark.parametrize("name", unless_alike(ALL))
each_with_noise = pytest.mark.parametrize("name", unless_alike(NOISY))


class Overheard:
    """A source of noise that keeps what it gave out."""

    def __init__(self, seed: int) -> None:
        self.source, self.draws = seeded(seed), []
        self.kind: NoiseSource = self.source.kind
        self.exact = self.source.exact

    def unit(self, std: float) -> float:
        return self.source.unit(std)

    def add(self, sums: Tensor, std: float) -> Tensor:
        noisy = self.source.add(sums.clone(), std)
        self.draws.append(((noisy - sums) / std).float())
        return noisy

    def state(self) -> Tensor | None:
        return self.source.state()

    def load(self, state: Tensor | None) -> None:
        self.source.load(state)


@cache
def trained(name: str, sigma: float):
    """One run for all tests that only look at it."""
    return fresh(name, sigma)


def fresh(name: str, sigma: float, *, noise=None):
    private = some(MEMBERS)
    return train(
        network(),
        (private.inputs, private.labels),
        defense(name, sigma),
        sampling=SAMPLING,
        steps=STEPS,
        lr=0.5,
        public=(PEOPLE.inputs[20:], PEOPLE.labels[20:]),
        noise=noise or seeded(1),
        seed=2,
        sampler_key=3,
        recording=Recording(observer="updates"),
    )


def view_of(run, asked=PEOPLE, **changes) -> RunView:
    # Under their own names and in their own order, so that a test can say who is who.
    view = RunView(run, WORLD, some(MEMBERS), SAMPLING, Candidates(asked.ids, asked.ids, asked))
    return replace(view, **changes)


def batch_of(step: int) -> list[int]:
    return SAMPLING.indices(step, len(MEMBERS), 3).tolist()


def norms(step, clean: Observation) -> Tensor:
    """Which block each released value belongs to, as the standard deviation that its plan asks for."""
    row = step.plan.plan.correlated
    # A stream's step carries what it draws and what it takes back: by the inverse of the strategy's matrix.
    sigma = step.noise_multiplier * (1.0 if row is None else row.fresh * float(taken_back(row).norm()))
    parts = [torch.full((b.codec.size,), sigma * b.bound.norm / b.share**0.5) for b in step.plan.blocks]
    return torch.cat(parts)


def taken_back(row: StrategyRow) -> Tensor:
    """Of each draw of a stream up to a step, how much is in the step's noise."""
    inverse = np.linalg.inv(row.strategy.matrix())[row.position, : row.position + 1]
    return torch.tensor(inverse, dtype=torch.float32)


@each
def test_without_noise_simulate_is_what_the_engine_released(name):
    run = trained(name, 0.0)
    for at, seen in enumerate(view_of(run)):
        batch = some(batch_of(at))
        assert 0 < len(batch) < len(MEMBERS)
        torch.testing.assert_close(seen.simulate(batch.inputs, batch.labels), seen.released, rtol=1e-4, atol=1e-6)
        own = seen.contributions(batch.inputs, batch.labels)
        torch.testing.assert_close(own.sum(0) / seen.expected_batch, seen.released, rtol=1e-4, atol=1e-6)
        assert own.shape == (len(batch), len(seen.released)) and not own.requires_grad
        assert seen.expected_batch == 8.0 and seen.step == at
        assert seen.noise_std is not None and not seen.noise_std.any()
        torch.testing.assert_close(seen.residual(torch.zeros_like(seen.released)), seen.released, rtol=1e-4, atol=1e-6)


def test_two_part_and_masked_releases_have_their_own_lengths():
    dim = Layout.of(network()).dim
    assert [len(seen.released) for seen in view_of(trained("dpdr", 1.0))] == [dim, dim + 2, dim + 2, dim]
    kept = [len(seen.released) for seen in view_of(trained("random_sparsification", 1.0))]
    assert kept[0] == dim and kept[-1] < dim
    assert [len(seen.released) for seen in view_of(trained("projected", 1.0))] == [5] * STEPS
    assert [len(seen.released) for seen in view_of(trained("counted", 1.0))] == [dim + 1] * STEPS


@each
def test_simulate_is_differentiable_in_inputs_and_in_label_probabilities(name):
    seen = view_of(trained(name, 0.0)).at(2, participation_known=True)
    for size in (1, 3):
        inputs = some(range(size)).inputs.clone().requires_grad_()
        logits = torch.zeros(size, 3).requires_grad_()
        predicted = seen.simulate(inputs, logits.softmax(dim=1))
        found = torch.autograd.grad(predicted.square().sum(), [inputs, logits])
        assert all(gradient.isfinite().all() and gradient.any() for gradient in found)


@each
def test_class_numbers_are_probabilities_of_one(name):
    seen = view_of(trained(name, 0.0)).at(2, participation_known=True)
    batch = some(range(5))
    sharp = nn.functional.one_hot(batch.labels, 3).float()
    torch.testing.assert_close(seen.simulate(batch.inputs, sharp), seen.simulate(batch.inputs, batch.labels))


@each
def test_residual_is_affine_and_zero_at_what_was_released(name):
    for seen in view_of(trained(name, 1.0)):
        a, b = torch.randn(2, len(seen.released), generator=torch.Generator().manual_seed(5))
        mixed = 0.3 * seen.residual(a) + 0.7 * seen.residual(b)
        torch.testing.assert_close(seen.residual(0.3 * a + 0.7 * b), mixed, rtol=1e-4, atol=1e-4)
        assert not seen.residual(seen.released).any()


@each_with_noise
def test_residual_has_unit_variance_where_data_could_show_and_nothing_elsewhere(name):
    squares, degrees, seeds = 0.0, 0, 0
    while not seeds or seeds * degrees < 180:
        run, seed = fresh(name, 1.7, noise=seeded(seeds)), seeds
        seeds += 1
        for at, seen in enumerate(view_of(run)):
            batch = some(batch_of(at))
            left = seen.residual(seen.simulate(batch.inputs, batch.labels))
            if seed == 0:
                units = torch.eye(len(seen.released))
                linear = torch.stack([seen.residual(torch.zeros_like(seen.released)) - seen.residual(u) for u in units])
                degrees += int(torch.linalg.matrix_rank(linear, rtol=1e-3))
            squares += float(left.square().sum())
    # Chi-squared: five standard deviations. A scale of 2/3 or 3/2 would be at 0.44 or 2.25.
    count = seeds * degrees
    assert abs(squares / count - 1) < 5 * (2 / count) ** 0.5 < 0.55


@each
def test_the_deviation_of_the_noise_is_that_of_the_plan(name):
    run = trained(name, 2.0)
    sigma = defense(name, 2.0).noise_multiplier
    for step, seen in zip(run.transcript.steps, view_of(run), strict=True):
        assert step.noise_multiplier == sigma and seen.noise_std is not None
        torch.testing.assert_close(seen.noise_std, norms(step, seen))


@each
def test_logits_are_those_of_the_model_at_that_step(name):
    run = trained(name, 1.0)
    layout = run.transcript.layout
    for step, seen in zip(run.transcript.steps, view_of(run), strict=True):
        there = network()
        with torch.no_grad():
            for parameter, value in zip(there.parameters(), layout.unflatten(step.parameters).values(), strict=True):
                parameter.copy_(value)
        torch.testing.assert_close(seen.logits(PEOPLE.inputs), there(PEOPLE.inputs))
    first, *_, last = view_of(run)
    assert not torch.allclose(first.logits(PEOPLE.inputs), last.logits(PEOPLE.inputs))


def test_contributions_of_the_same_inputs_under_other_labels_are_others():
    seen = view_of(trained("dp_sgd", 1.0)).at(0, participation_known=True)
    batch = some(range(4))
    first = seen.contributions(batch.inputs, batch.labels).clone()
    other = seen.contributions(batch.inputs, (batch.labels + 1) % 3)
    assert not torch.allclose(first, other)
    torch.testing.assert_close(seen.contributions(batch.inputs, batch.labels), first)


@each
def test_with_everybody_else_removed_there_is_noise_and_for_who_took_part_its_contribution(name):
    """Against the noise as it was drawn, and against leaving each candidate out by brute force."""
    noise = Overheard(1)
    run = fresh(name, 1.0, noise=noise)
    plans = [step.plan.plan for step in run.transcript.steps if step.plan]
    draws, trials, blocks = list(noise.draws), [plan.trial for plan in plans], [len(plan.blocks) for plan in plans]
    # Without those of a release before the steps, and with one more where a step has a trial.
    draws = draws[len(draws) - sum(blocks) - sum(t is not None for t in trials) :]
    past: list[Tensor] = []
    for at, seen in enumerate(view_of(run)):
        assert seen.others_removed is not None and seen.noise_std is not None
        took_part = batch_of(at)
        assert took_part and set(took_part) != set(MEMBERS)
        remainder = seen.others_removed()
        drawn = torch.zeros_like(seen.noise_std)
        if draws:
            past.append(torch.cat([draws.pop(0) for _ in range(blocks[at])]))
            drawn = past[-1] * seen.noise_std
            if trials[at] is not None:
                draws.pop(0)
            row = plans[at].correlated
            if row is not None:
                weights = taken_back(row)
                # Of its own tree: where a strategy begins anew, what was drawn before is in none of its noise.
                own_draws = torch.stack(past[-len(weights) :])
                drawn = (weights @ own_draws) / weights.norm() * seen.noise_std
        own = seen.contributions(PEOPLE.inputs, PEOPLE.labels)
        for z in range(0, len(PEOPLE), 7):
            expected = drawn + own[z] if z in took_part else drawn
            torch.testing.assert_close(remainder[z].float(), expected, rtol=1e-4, atol=1e-5)
            others = some(i for i in took_part if i != z)
            left_out = (
                seen.released * seen.expected_batch - seen.simulate(others.inputs, others.labels) * seen.expected_batch
            )
            torch.testing.assert_close(remainder[z].float(), left_out, rtol=1e-4, atol=1e-5)


@subtests("name", ["dp_sgd", "diff2", "dpdr"])
def test_contributions_are_of_the_views_that_a_step_drew_and_the_final_model_is_the_average(name):
    """Views are drawn by public coins for each record, so that who knows a record knows its views."""

    def as_images(people: Examples) -> Examples:
        return replace(people, inputs=people.inputs.view(-1, 1, 2, 3))

    private, model, noise = as_images(some(MEMBERS)), nn.Sequential(nn.Flatten(), network()), Overheard(1)
    run = train(
        model,
        (private.inputs, private.labels),
        defense(name, 1.0),
        sampling=SAMPLING,
        steps=STEPS,
        lr=0.5,
        noise=noise,
        seed=2,
        sampler_key=3,
        recipe=Recipe(augmentation=CropAndFlip(views=3, padding=1), average=0.5),
        recording=Recording(observer="updates"),
    )
    people = as_images(PEOPLE)
    world = replace(WORLD, input_shape=(1, 2, 3))
    view = RunView(run, world, private, SAMPLING, Candidates(people.ids, people.ids, people))
    draws, took_part = torch.cat(noise.draws), batch_of(0)
    for seen in view:
        assert seen.others_removed is not None and seen.noise_std is not None
        drawn, draws = draws.split([len(seen.released), len(draws) - len(seen.released)])
        for z in (3, 25):
            own = seen.contributions(people.inputs[[z]], people.labels[[z]])[0]
            expected = drawn * seen.noise_std + (own if z in batch_of(seen.step) else 0)
            torch.testing.assert_close(seen.others_removed()[z].float(), expected, rtol=1e-4, atol=1e-5)
    assert took_part and not len(draws)
    ratio, deviations, _ = noise_found(view, run.transcript.steps)
    assert abs(deviations) < 5 and 0.5 < ratio < 1.5
    # Whoever takes the examples as they are finds something else, and would call it wrong noise.
    step = run.transcript.steps[0]
    without = Observed(step, run.model, run.transcript.layout, cross_entropy)
    plain = without.contributions(private.inputs, private.labels)
    assert not torch.allclose(plain, view.at(0).contributions(private.inputs, private.labels), atol=1e-2)
    final = black_box(view).logits(people.inputs)
    torch.testing.assert_close(final, model(people.inputs).detach())
    assert run.last is not None
    run.transcript.layout.write(model, run.last)
    assert not torch.allclose(final, model(people.inputs), atol=1e-3)


def test_a_step_that_nobody_joined_leaves_its_noise():
    rare = poisson(1e-6)
    private = some(MEMBERS)
    noise = Overheard(4)
    run = train(
        network(),
        (private.inputs, private.labels),
        defense("dp_sgd", 1.0),
        sampling=rare,
        steps=1,
        noise=noise,
        seed=0,
        sampler_key=0,
        recording=Recording(observer="updates"),
    )
    (seen,) = view_of(run, sampling=rare)
    assert seen.others_removed is not None
    torch.testing.assert_close(seen.others_removed().float(), (0.5 * noise.draws[0]).expand(len(PEOPLE), -1))


def test_who_is_asked_about_changes_nothing_for_the_others():
    run = trained("dpdr", 1.0)
    few = some([3, 25, 7])
    everyone = view_of(run).at(2, participation_known=True).others_removed
    asked = view_of(run, few).at(2, participation_known=True).others_removed
    assert everyone is not None and asked is not None
    torch.testing.assert_close(asked(), everyone()[[3, 25, 7]])


def others_removed(view: RunView, step: int) -> Tensor:
    found = view.at(step).others_removed
    assert found is not None
    return found()


@subtests("fit", [True, False])
@subtests("room", [residual_noise._KEPT, 0])
def test_what_is_left_is_asked_for_by_parts_and_is_that_of_all(monkeypatch, fit, room):
    run = trained("dpdr", 1.0)
    whole = others_removed(view_of(run), 2)
    monkeypatch.setattr(residual_noise.Remainders, "_few", lambda *_: fit)
    monkeypatch.setattr(residual_noise, "_KEPT", room)
    passes, real = [], residual_noise.Remainders._split_anew
    monkeypatch.setattr(residual_noise.Remainders, "_split_anew", lambda *given: passes.append(1) or real(*given))
    view = view_of(run)
    part = view.at(2).others_removed
    assert part is not None
    found = [part(slice(start, start + 8)) for start in range(0, len(PEOPLE), 8)]
    # To the last digit, which tells members where noise was drawn in float32.
    assert torch.equal(torch.cat(found), whole)
    # One pass over the batch for all parts, unless the rows of those who took part do not fit.
    assert len(passes) == (1 if fit else 4)


def test_nothing_is_made_of_all_candidates_where_a_few_are_asked_for():
    run, count = trained("dp_sgd", 1.0), 600
    # The members, and many who took no part.
    others = Examples(
        ids=torch.arange(1000, 1000 + count),
        inputs=torch.randn(count, 6, generator=torch.Generator().manual_seed(0)),
        labels=torch.zeros(count, dtype=torch.int64),
    )
    part = view_of(run, join(some(MEMBERS), others)).at(1).others_removed
    assert part is not None
    with LargestMade() as watched:
        assert part(slice(0, 10)).shape == (10, run.transcript.layout.dim)
    assert watched.entries < count * run.transcript.layout.dim / 10


def test_what_is_kept_of_a_step_is_for_other_views_and_changes_no_answer(monkeypatch):
    run = trained("dp_sgd", 1.0)
    few, kept = some([1, 25, 3]), {}
    fresh = [others_removed(view_of(run, few), step) for step in range(3)]
    for _ in range(2):  # the second is told
        view = view_of(run, few, kept=kept)
        for step in range(3):
            answer = others_removed(view, step)
            # To the last digit: a score must not depend on which cells of a run were finished before.
            assert torch.equal(answer, fresh[step])
            answer.zero_()  # whatever an attack does to what it was given
    assert sorted(kept) == [0, 1, 2]
    one = view_of(run, some([25]), kept=kept)  # of few candidates one, whose rows are there
    assert all(torch.equal(others_removed(one, step), fresh[step][[1]]) for step in range(3))
    for step in run.transcript.steps[:3]:
        torch.testing.assert_close(view_of(run, kept=kept).noise(step), view_of(run).noise(step), rtol=0, atol=0)
    monkeypatch.setattr("leakbench.audit.targets.residual_noise._KEPT", kept[0].size + kept[1].size)
    bounded = {}
    for step in range(4):
        others_removed(view_of(run, few, kept=bounded), step)
    assert len(bounded) == 2


def test_an_attacker_that_is_not_informed_gets_no_remainder():
    view = view_of(trained("dp_sgd", 1.0), informed=False)
    assert all(seen.others_removed is None for seen in view)
    assert "OTHERS" in (likelihood_ratio.check(every_step(view)) or "")


def test_the_steps_of_a_run_can_be_read_again_and_know_their_rate():
    view = view_of(trained("dp_sgd", 1.0))
    assert len(view) == len(list(view)) == len(list(view)) == STEPS
    assert {seen.sample_rate for seen in view} == {0.4}
    assert view.at(1, participation_known=True).sample_rate == 1.0
    seen = every_step(view)
    torch.testing.assert_close(likelihood_ratio(seen).scores, likelihood_ratio(seen).scores)


@subtests(
    ("sampling", "expected"),
    [
        (poisson(0.4), "independent"),
        (shuffle(0.4), "dependent"),
        (partition(0.4), "dependent"),
        (fixed(0.4), "dependent"),
        (poisson(1.0), "known"),
        (shuffle(1.0), "known"),
        (fixed(1.0), "known"),
        (full(), "known"),
    ],
)
def test_a_step_says_what_is_known_of_who_takes_part(sampling, expected):
    view = view_of(fresh("dp_sgd", 1.0), sampling=sampling)
    assert view.at(1).participation == expected
    assert view.at(1).sample_rate == sampling.rate
    assert view.at(1, participation_known=True).participation == "known"
    assert likelihood_ratio(every_step(view)).exact is (expected != "dependent")


def test_what_an_attack_writes_into_reaches_neither_the_run_nor_what_is_left_of_it():
    run = fresh("pcdp", 1.0)
    view = view_of(run)
    before = view.at(2).others_removed
    assert before is not None
    expected, steps = before().clone(), copy.deepcopy(run.transcript.steps)
    seen = view.at(2)
    assert seen.others_removed is not None
    seen.contributions(PEOPLE.inputs, PEOPLE.labels).fill_(1e6)
    inputs = PEOPLE.inputs[:2].clone().requires_grad_()
    walker.vandalised(walker.reached([seen.simulate(inputs, PEOPLE.labels[:2]), seen.logits(inputs), seen.released]))
    torch.testing.assert_close(seen.others_removed(), expected, rtol=0, atol=0)
    for step, earlier in zip(run.transcript.steps, steps, strict=True):
        assert torch.equal(step.parameters, earlier.parameters)
        assert step.noisy is not None and earlier.noisy is not None
        assert all(torch.equal(a, b) for a, b in zip(step.noisy, earlier.noisy, strict=True))


def test_a_run_that_kept_no_releases_is_refused():
    run = fresh("dp_sgd", 1.0)
    bare = replace(run.transcript.steps[0], plan=None, noisy=None)
    with pytest.raises(ValueError, match="step 0 must have its releases, got none; train with observer='updates'"):
        Observed(bare, run.model, run.transcript.layout, cross_entropy)


def test_a_model_with_dropout_is_refused_because_its_contributions_cannot_be_computed_again():
    run = fresh("dp_sgd", 1.0)
    dropping = torch.nn.Sequential(run.model, torch.nn.Dropout(0.5))
    with pytest.raises(ValueError, match="model must have no dropout for attacks on its updates, got '1'"):
        view_of(replace(run, model=dropping))


def reachable(start: object) -> list[Tensor]:
    """Every tensor that one gets to from an object, by attributes, closures and containers."""
    seen, todo, found = set(), [start], []
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, types.ModuleType | type):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, types.FunctionType):
            todo += [cell.cell_contents for cell in one.__closure__ or ()] + [one.__defaults__, one.__kwdefaults__]
        else:
            todo += gc.get_referents(one)
    return found


def holds(start: object, rows: Tensor) -> bool:
    """Whether a row of inputs can be reached."""
    return any(
        tensor.shape[-1:] == rows.shape[-1:] and (tensor.reshape(-1, 1, rows.shape[-1]) == rows).all(2).any()
        for tensor in reachable(start)
    )


def test_an_observation_holds_no_private_input_and_nothing_of_membership():
    run = fresh("dpdr", 1.0)
    step = run.transcript.steps[1]
    public = some(OUTSIDERS)
    seen = observe(step, run.model, run.transcript.layout, replace(WORLD, population=public), candidates=public)
    private = some(MEMBERS)
    assert holds(seen, public.inputs)  # the search finds what is there
    assert not holds(seen, private.inputs)
    whole = [tensor for tensor in reachable(seen) if tensor.dtype in (torch.bool, torch.int64)]
    assert not any(torch.equal(tensor, torch.tensor(batch_of(1))) for tensor in whole)
    assert not any(tensor.dtype is torch.bool for tensor in whole)


def test_what_an_attack_without_the_informed_adversarys_knowledge_gets_leads_to_no_private_input():
    from leakbench.attacks.core.targets.narrow import narrow

    run = fresh("dp_sgd", 1.0)
    view = view_of(run, some(OUTSIDERS))
    seen = view.at(1, participation_known=True)
    narrowed = narrow(seen, Requirements(access=Access.UPDATE, knows=Knows.DEFENSE))
    assert holds(seen, some(MEMBERS).inputs)  # by others_removed, which is withheld
    assert not holds(narrowed, some(MEMBERS).inputs)


def test_a_white_box_is_a_copy_and_a_black_box_has_no_parameters():
    run = fresh("sgd", 0.0)
    view = view_of(run)
    before = copy.deepcopy(run.model.state_dict())
    assert black_box(view).parameters is None
    box = white_box(view)
    assert box.parameters is not None
    for parameter in box.parameters.values():
        parameter.zero_()
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(value, before[name])
    torch.testing.assert_close(box.logits(PEOPLE.inputs), run.model(PEOPLE.inputs).detach())


def test_the_truth_is_about_membership_or_about_reconstruction():
    truth = GroundTruth(members=torch.tensor([3, 5]), candidates=torch.tensor([3, 4, 5]))
    assert truth.membership(torch.tensor([5, 4, 3])).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="about reconstruction, it has no members"):
        GroundTruth(inputs=torch.zeros(1, 2), labels=torch.zeros(1, dtype=torch.int64)).membership(torch.tensor([1]))


def test_gradients_that_would_not_fit_into_memory_are_refused_with_the_number_that_would(monkeypatch):
    run = fresh("dp_sgd", 1.0)
    seen = view_of(run).at(0)
    dim = run.transcript.layout.dim
    monkeypatch.setattr("leakbench.audit.targets.observed_step._MOST", 8 * dim)
    assert seen.contributions(PEOPLE.inputs[:8], PEOPLE.labels[:8]).shape[0] == 8
    with pytest.raises(
        ValueError, match=f"gradients of 9 examples in {dim} parameters .* task.candidates to 4 or fewer"
    ):
        seen.contributions(PEOPLE.inputs[:9], PEOPLE.labels[:9])
    with pytest.raises(ValueError, match=f"gradients of 30 examples in {dim} parameters"):
        granted(seen.others_removed)()
