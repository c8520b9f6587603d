"""The training loop: its expected_batch, its optimizers, its public data, its randomness and its refusals."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from leakbench.defenses.core import (
    Block,
    Context,
    Coordinates,
    Defense,
    Everything,
    Recipe,
    Recording,
    Stateless,
    StepPlan,
    calibrate,
    clip,
    cross_entropy,
    fixed,
    from_os,
    full,
    partition,
    per_example_gradients,
    poisson,
    predict,
    secure,
    seeded,
    train,
)
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.sgd import sgd

from ....parameters import subtests
from ... import duties


def updates_of(run):
    """What the optimizer got in each step, with plain SGD at rate 1."""
    points = [step.parameters for step in run.transcript.steps] + [duties.parameters(run)]
    return [a - b for a, b in pairwise(points)]


def test_sums_are_divided_by_the_expected_batch_whatever_was_drawn():
    run = duties.trained(dp_sgd(noise_multiplier=0.5), sampling=poisson(0.3), lr=1.0, momentum=0.0)
    sizes = {poisson(0.3).indices(step, 24, 3).numel() for step in range(duties.STEPS)}
    assert len(sizes) > 1
    for step, update in zip(run.transcript.steps, updates_of(run), strict=True):
        assert step.expected_batch == pytest.approx(7.2)
        assert step.noisy
        torch.testing.assert_close(update, step.noisy[0] / 7.2, rtol=1e-4, atol=1e-5)


NOT_PUBLIC = "the number of examples is public"


class WatchesEverything(Stateless):
    """Clips everything, after a release of its own on all the data, and keeps what it is shown."""

    def __init__(self, seen: list[tuple]):
        """Takes the list that it writes into."""
        self.seen = seen

    def start(self, context):
        """Releases a sum of its own."""
        context.release(StepPlan(Block(codec=Everything(context.dim), bound=clip(1.0))).at(3.0))

    def plan(self, context):
        """One block, whatever it is shown."""
        shown = (context.step, context.steps, context.steps_per_epoch, context.expected_batch, context.input_shape)
        self.seen.append(shown)
        return StepPlan(Block(codec=Everything(context.dim), bound=clip(1.0)))


@pytest.mark.parametrize("sampling", [poisson(0.25), full()])
def test_nothing_follows_from_the_number_of_examples_where_there_is_a_nominal_size(sampling):
    """Neighbours of 24 and 23 examples: their releases differ by what the record contributes, and by nothing else."""
    shorter = replace(duties.PLAIN, data=(duties.DATA[0][1:], duties.DATA[1][1:]))
    shown, constants, claims = [], [], []
    for world in (duties.PLAIN, shorter):
        shown.append([])
        run = duties.trained(Defense(WatchesEverything(shown[-1]), 1.0), world, sampling=sampling, nominal_size=40)
        steps = [*run.transcript.steps, *run.transcript.one_offs]
        constants.append([(one.expected_batch, one.sample_rate, one.noise_multiplier) for one in steps])
        claims.append(run.claim(1e-5))
    assert shown[0] == shown[1] and constants[0] == constants[1]
    assert {one[0] for one in constants[0]} == {40 * sampling.rate, 40.0}
    assert claims[0] == claims[1] and claims[0].relation == "add_remove"
    assert not any(NOT_PUBLIC in sentence for sentence in claims[0].assumes)
    usual = duties.trained(Defense(WatchesEverything([]), 1.0), shorter, sampling=sampling)
    assert usual.transcript.steps[0].expected_batch == 23 * sampling.rate
    assert sum(NOT_PUBLIC in sentence for sentence in usual.claim(1e-5).assumes) == 1
    assert usual.claim(1e-5).epsilon == claims[0].epsilon


def test_an_engine_is_checked_on_batches_of_the_nominal_size():
    sizes = [duties.begun(dp_sgd(noise_multiplier=1.0), nominal_size=n).runner._expected_batch for n in (40, None)]
    assert sizes[0] != sizes[1] == duties.POISSON.expected_batch(24)


def test_where_neighbours_have_as_many_examples_their_number_is_no_assumption():
    run = duties.trained(dp_sgd(noise_multiplier=1.0), sampling=partition(0.25))
    assert not any(NOT_PUBLIC in sentence for sentence in run.claim(1e-5).assumes)


def test_a_nominal_size_is_refused_where_more_follows_from_the_number_of_examples():
    for sampling in (partition(0.25), fixed(0.25)):
        with pytest.raises(
            ValueError, match=f"nominal_size must go with poisson or full sampling.*got {sampling.kind}"
        ):
            duties.trained(dp_sgd(noise_multiplier=1.0), sampling=sampling, nominal_size=40)
    wrongs: tuple[Any, ...] = (0, -3, 2.5, True, "40")
    for wrong in wrongs:
        with pytest.raises(ValueError, match="nominal_size must be a whole number of at least 1, or None, got"):
            Recipe(nominal_size=wrong)
    with pytest.raises(ValueError, match="one of nominal_size and expected_batch must be given, got both"):
        Recipe(nominal_size=40, expected_batch=4.0)


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
        ({"optimizer": "adam", "momentum": 0.0}, lambda p: torch.optim.Adam(p, lr=0.3)),
        (
            {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1), "momentum": 0.0},
            lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1),
        ),
    ],
)
def test_optimizers_are_pytorchs_on_the_released_updates(settings, reference):
    run = duties.trained(dp_sgd(noise_multiplier=0.5), **settings)
    model = duties.network()
    optimizer = reference(list(model.parameters()))
    for step in run.transcript.steps:
        assert step.noisy
        torch.testing.assert_close(duties.LAYOUT.read(model), step.parameters, rtol=1e-5, atol=1e-6)
        update = step.noisy[0] / step.expected_batch
        for parameter, gradient in zip(model.parameters(), duties.LAYOUT.unflatten(update).values(), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(duties.parameters(run), duties.LAYOUT.read(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
        (lambda step, steps: step / steps, [0, 0.25, 0.5, 0.75]),
    ],
)
def test_schedules_scale_the_learning_rate_step_by_step(schedule, factors):
    run = duties.trained(dp_sgd(noise_multiplier=1.0), schedule=schedule, steps=4, lr=2.0, momentum=0.0)
    for step, update, factor in zip(run.transcript.steps, updates_of(run), factors, strict=True):
        assert step.noisy
        torch.testing.assert_close(update, 2.0 * factor * step.noisy[0] / step.expected_batch, rtol=1e-3, atol=1e-5)


def test_epochs_are_counted_in_steps_of_the_sampler():
    run = duties.trained(sgd(), steps=None, epochs=1.5, sampling=poisson(0.25))
    assert run.ledger.steps == 6


def test_it_learns():
    inputs = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    labels = inputs[:, :3].argmax(dim=1)
    for defense in (sgd(), dp_sgd(noise_multiplier=0.5)):
        settings = {"sampling": poisson(0.2), "epochs": 20.0, "lr": 1.0, "seed": 0, "sampler_key": 0}
        run = train(duties.network(), (inputs, labels), defense, noise=seeded(0), **settings)
        accuracy = (run.model(inputs).argmax(dim=1) == labels).float().mean()
        assert accuracy > 0.8
        assert not run.model.training


def test_frozen_parameters_stay_where_they_are():
    model = duties.network()
    first = model[0].requires_grad_(False)
    before = nn.utils.parameters_to_vector(first.parameters()).clone()
    train(model, duties.DATA, dp_sgd(noise_multiplier=1.0), sampling=full(), steps=2, noise=seeded(0))
    assert torch.equal(nn.utils.parameters_to_vector(first.parameters()), before)
    assert not torch.equal(duties.LAYOUT.read(model), duties.LAYOUT.read(duties.network()))


def test_a_module_under_two_names_is_trained():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = self.first

        def forward(self, inputs):
            return self.second(self.first(inputs))

    model = Twice()
    before = model.first.weight.clone()
    train(model, duties.DATA, sgd(), sampling=full(), steps=2)
    assert not torch.equal(model.first.weight, before)
    assert model.second is model.first


class PublicDirection(Stateless):
    """Keeps the coordinates that are largest in public gradients, so that it shows what it was given."""

    def plan(self, context: Context) -> StepPlan:
        rows = context.public_rows(5)
        assert rows.shape == (5, context.dim)
        top = rows.mean(dim=0).abs().topk(10).indices
        return StepPlan(Block(codec=Coordinates(top, dim=context.dim), bound=clip(1.0)))


def test_public_gradients_are_taken_at_the_current_parameters_and_again_after_a_resumption(tmp_path):
    whole = duties.trained(Defense(PublicDirection(), 1.0))
    masks = {tuple(x.nonzero()[:, 0].tolist()) for (x,) in duties.spaces(whole)}
    assert len(masks) > 1
    duties.check_same_run(duties.interrupted(Defense(PublicDirection(), 1.0), tmp_path / "c", after=3), whole)


class LastUpdate(Stateless):
    """Keeps the coordinates that moved most in the step before."""

    def plan(self, context: Context) -> StepPlan:
        order = torch.arange(context.dim) if context.update is None else context.update.abs().argsort()
        return StepPlan(Block(codec=Coordinates(order[-20:], dim=context.dim), bound=clip(1.0)))


def test_the_last_update_is_what_the_optimizer_got_and_is_remembered_by_a_resumed_run(tmp_path):
    whole = duties.trained(Defense(LastUpdate(), 1.0), lr=1.0, momentum=0.0)
    masks = [x.nonzero()[:, 0] for (x,) in duties.spaces(whole)]
    for update, mask in zip(updates_of(whole), masks[1:], strict=False):
        assert set(update.abs().argsort()[-15:].tolist()) <= set(mask.tolist())
    for after in (1, 3):
        resumed = duties.interrupted(
            Defense(LastUpdate(), 1.0), tmp_path / f"c{after}", after=after, lr=1.0, momentum=0.0
        )
        duties.check_same_run(resumed, whole)


@dataclass(frozen=True)
class MaskFromData:
    """Spends a release of its own on which coordinates to train, as DP-SNIP does."""

    own_multiplier: float

    def start(self, context):
        scores = Block(codec=Everything(context.dim), bound=clip(1.0))
        (noisy,) = context.release(StepPlan(scores).at(self.own_multiplier))
        return noisy.abs().argsort()[-min(10, context.dim) :]

    def plan(self, state, context):
        return state, StepPlan(Block(codec=Coordinates(state, dim=context.dim), bound=clip(1.0)))

    def observe(self, state, context, noisy, update):
        return state


@pytest.mark.parametrize("sampling", [poisson(0.5), partition(0.5)])
def test_a_release_of_its_own_is_noised_on_all_data_and_charged_once(sampling, tmp_path):
    defense = Defense(MaskFromData(4.0), 1.5)
    run = duties.trained(defense, sampling=sampling)
    assert run.ledger.steps == duties.STEPS
    assert [(e.one_off, e.noise_multiplier, e.sampling.kind, e.steps) for e in run.ledger.entries] == [
        (True, 4.0, "full", 1),
        (False, 1.5, sampling.kind, duties.STEPS),
    ]
    assert run.ledger.entries == predict(defense, sampling=sampling, steps=duties.STEPS).entries
    steps_alone = duties.trained(dp_sgd(noise_multiplier=1.5), sampling=sampling).claim(1e-5)
    assert run.claim(1e-5).epsilon > steps_alone.epsilon
    assert run.claim(1e-5).relation == steps_alone.relation
    # What was released is the noisy sum over everybody, and a resumed run does not release it again.
    inputs, labels = duties.DATA
    rows = per_example_gradients(duties.network(), cross_entropy, duties.LAYOUT, inputs, labels)
    noisy = clip(1.0)(rows).sum(dim=0) + duties.noise_of(1, duties.DIM, 4.0)
    assert set(run.state.tolist()) == set(noisy.abs().argsort()[-10:].tolist())
    resumed = duties.interrupted(defense, tmp_path / "c", after=2, sampling=sampling)
    duties.check_same_run(resumed, run)


def test_a_release_of_its_own_without_noise_voids_the_claim():
    run = duties.trained(Defense(MaskFromData(0.0), 1.5))
    assert run.claim(1e-5).epsilon == math.inf
    assert run.claim(1e-5).reason == "no noise is added"


@pytest.mark.long
def test_calibration_pays_for_a_release_of_its_own_first():
    def reached(own):
        defense = calibrate(Defense(MaskFromData(own)), epsilon=3.0, delta=1e-5, sampling=poisson(0.1), steps=30)
        return defense, predict(defense, sampling=poisson(0.1), steps=30).claim(1e-5).epsilon

    dear, cheap = reached(2.0), reached(50.0)
    for _, epsilon in (dear, cheap):
        assert 3.0 * (1 - 2e-3) <= epsilon <= 3.0
    assert dear[0].calibrated_multiplier > cheap[0].calibrated_multiplier
    with pytest.raises(
        ValueError, match=r"epsilon must be above .*, which releases of their own spend at their own noise, got 3\.0"
    ):
        reached(0.5)  # more than all of it is gone before the first step


@subtests("expected", [0.0, -1.0, math.nan, math.inf])
def test_an_expected_batch_that_divides_nothing_is_refused(expected):
    with pytest.raises(ValueError, match="expected_batch must be a positive finite number, got"):
        duties.trained(sgd(), expected_batch=expected)


def test_a_stated_expected_batch_is_the_divisor():
    run = duties.trained(dp_sgd(noise_multiplier=0.5), expected_batch=100.0)
    assert {step.expected_batch for step in run.transcript.steps} == {100.0}


def test_public_data_must_be_there_and_enough():
    defense = Defense(PublicDirection(), 1.0)
    with pytest.raises(ValueError, match="needs public data, got none"):
        duties.trained(defense, public=None)
    few = (duties.PUBLIC[0][:4], duties.PUBLIC[1][:4])
    with pytest.raises(ValueError, match="public data must have at least 5 examples, got 4"):
        duties.trained(defense, public=few)


def test_a_part_in_evaluation_mode_stays_there_unless_the_whole_model_is():
    def trained(whole, dropout):
        network = duties.network_with_dropout().train(whole)
        network.get_submodule("3").train(dropout)
        run = duties.trained(dp_sgd(noise_multiplier=0.0), replace(duties.DRAWN, network=lambda: network))
        assert not any(layer.training for layer in network.modules())
        return duties.parameters(run)

    with_dropout = trained(True, True)
    assert torch.equal(trained(False, False), with_dropout) and torch.equal(trained(False, True), with_dropout)
    assert not torch.equal(trained(True, False), with_dropout)


def with_dropout():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_random_layers_draw_the_same_in_a_resumed_run_and_leave_the_global_generator_alone(tmp_path):
    settings = {"sampling": poisson(0.5), "steps": 5, "seed": 1, "sampler_key": 2}

    def run(**more):
        return train(with_dropout(), duties.DATA, dp_sgd(noise_multiplier=0.1), noise=seeded(3), **settings, **more)

    torch.manual_seed(5)
    whole = run()
    following = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), following)
    with pytest.raises(KeyboardInterrupt):
        run(recording=Recording(checkpoint=tmp_path / "c", progress=duties._Stop(2)))
    resumed = run(recording=Recording(checkpoint=tmp_path / "c"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_seeds_two_runs_differ_in_everything_that_is_random():
    def run(noise):
        return train(
            duties.network(), duties.DATA, dp_sgd(noise_multiplier=1.0), sampling=poisson(0.5), steps=2, noise=noise
        )

    for source, kind in ((lambda: None, "os"), (from_os, "os"), (secure, "secure")):
        one, other = run(source()), run(source())
        assert one.noise == kind
        assert not torch.equal(duties.parameters(one), duties.parameters(other))
        assert one.sampler_key != other.sampler_key
        assert one.seed != other.seed


class Updates:
    """A meter that keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, torch.Tensor]] = []

    def add(self, step, update):
        self.kept.append((step, update))

    def state(self):
        return {"kept": self.kept}

    def load(self, state):
        self.kept = state["kept"]


def test_a_meter_is_given_every_update_and_changes_nothing():
    meter = Updates()
    run, plain = (duties.trained(dp_sgd(noise_multiplier=1.0), momentum=0.0, meter=one) for one in (meter, None))
    duties.check_same_run(run, plain)
    assert [step for step, _ in meter.kept] == list(range(duties.STEPS))
    for (_, update), step in zip(meter.kept, run.transcript.steps, strict=True):
        assert step.noisy is not None
        assert torch.equal(update, step.noisy[0] / step.expected_batch)


def test_progress_is_told_after_every_step():
    told = []
    duties.trained(sgd(), progress=lambda done, steps: told.append((done, steps)))
    assert told == [(i, duties.STEPS) for i in range(1, duties.STEPS + 1)]


@subtests(
    ("settings", "message"),
    [
        ({"epochs": 1.0}, "give exactly one of epochs and steps, got both or neither"),
        ({"steps": None}, "give exactly one of epochs and steps, got both or neither"),
        ({"steps": 0}, "a run must have at least one step, got 0"),
        ({"lr": 0.0}, r"lr must be a positive finite number, got 0\.0"),
        ({"lr": math.nan}, "lr must be a positive finite number, got nan"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
        ({"optimizer": "adam"}, "momentum must be 0 for 'adam', which has its own"),
        ({"microbatch": 0}, "microbatch must be at least 1 or None, got 0"),
        ({"public": (torch.zeros(2, 6), torch.zeros(3, dtype=torch.int64))}, r"public must be .* of one length"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        duties.trained(dp_sgd(noise_multiplier=1.0), **settings)


@pytest.mark.parametrize("n", [0, 3])
def test_data_that_do_not_fit_are_refused(n):
    data = (torch.zeros(n, 6), torch.zeros(0 if n == 0 else 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"examples must be .* of one length above 0, got"):
        train(duties.network(), data, sgd(), sampling=full(), steps=1)


def test_a_partition_is_trained_with_and_charged_by_the_epoch():
    run = duties.trained(dp_sgd(noise_multiplier=2.0), sampling=partition(0.5), steps=6)
    assert run.claim(1e-5).relation == "zero_out"
    assert run.claim(1e-5).as_if_poisson is not None


def test_a_data_set_of_torch_is_read_as_its_tensors():
    class Pairs(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(duties.DATA[0])

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return duties.DATA[0][index], int(duties.DATA[1][index])

    runs = []
    for data in (duties.DATA, torch.utils.data.TensorDataset(*duties.DATA), Pairs()):
        model = duties.network()
        train(model, data, sgd(), sampling=full(), steps=3, seed=0)
        runs.append(duties.LAYOUT.read(model))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    torch.testing.assert_close(runs[2], runs[0], rtol=0, atol=0)


def test_the_divisor_may_be_any_public_constant():
    whole, half = duties.network(), duties.network()
    start = duties.LAYOUT.read(whole)
    train(whole, duties.DATA, sgd(), sampling=full(), steps=1, lr=0.1)
    twice = Recipe(expected_batch=2.0 * len(duties.DATA[0]))
    train(half, duties.DATA, sgd(), sampling=full(), steps=1, lr=0.1, recipe=twice)
    moved, less = duties.LAYOUT.read(whole) - start, duties.LAYOUT.read(half) - start
    torch.testing.assert_close(less, moved / 2)
    with pytest.raises(ValueError, match="expected_batch must be a positive finite number, got 0"):
        Recipe(expected_batch=0.0)


def test_no_text_about_a_run_shows_the_key_of_its_sampler():
    run = train(duties.network(), duties.DATA, dp_sgd(noise_multiplier=1.0), sampling=poisson(0.2), steps=2)
    assert "seed=" in repr(run) and str(run.sampler_key) not in repr(run)
