"""What an informed adversary's score needs of a step is what remainders and contributions give, without either."""

import pytest
import torch
from torch import Tensor

from leakbench.attacks.core import (
    Evidence,
    MatchedFilter,
    Observation,
    granted,
    log_likelihood_ratio,
    relative_residual,
)
from leakbench.attacks.likelihood_ratio import likelihood_ratio
from leakbench.audit.plan.threat_models import every_step
from leakbench.audit.targets import replay
from leakbench.audit.targets.candidates import Candidates
from leakbench.audit.targets.observe import RunView
from leakbench.audit.targets.replay import StepReplay
from leakbench.defenses.core import CropAndFlip, Recipe, Recording, cross_entropy, fixed, poisson, seeded, train

from . import test_observe as toys
from .test_observe import PEOPLE, SAMPLING, STEPS, Overheard, batch_of, each, fresh, some, trained, view_of


def filtered(seen: Observation) -> MatchedFilter:
    return granted(seen.matched_filter)()


def assert_as_by_rows(seen: Observation, asked=PEOPLE, error: float = 1e-6) -> None:
    """Against the remainders and contributions themselves, in units of nats."""
    found, std = filtered(seen), granted(seen.noise_std).double()
    own = seen.contributions(asked.inputs, asked.labels).double()
    left, noisy = granted(seen.others_removed)().double(), std > 0
    weighted = own[:, noisy] / std[noisy] ** 2
    for got, wanted in (
        (found.inner, (weighted * left[:, noisy]).sum(1)),
        (found.squared_norms, (weighted * own[:, noisy]).sum(1)),
        (found.log_likelihood_ratio, log_likelihood_ratio(left, own, std)),
    ):
        torch.testing.assert_close(got, wanted, rtol=error, atol=error)
    missing = relative_residual(left[:, ~noisy], own[:, ~noisy])
    # Without noise a difference of two gradients is rounding where they hardly differ.
    torch.testing.assert_close(found.residuals, missing, rtol=1e-4, atol=1e-4, equal_nan=True)


@each
@pytest.mark.parametrize("sigma", [1.0, 0.0])
def test_numbers_are_those_of_remainders_and_contributions_for_every_defense(name, sigma):
    for at, seen in enumerate(view_of(trained(name, sigma))):
        assert batch_of(at)  # some took part, and some did not
        assert_as_by_rows(seen)


def test_the_noise_is_that_which_was_drawn():
    noise = Overheard(1)
    run = fresh("dp_sgd", 1.0, noise=noise)
    view = view_of(run)
    for step, drawn in zip(run.transcript.steps, noise.draws, strict=True):
        (found,) = view.replayed.noise(step)
        std = granted(view.at(step.step).noise_std).double()
        # The release was rounded to float32, and so was the draw here.
        assert float((found.double() / std - drawn.double()).abs().max()) < 2e-6


def test_numbers_are_of_the_views_that_a_step_drew():
    images = toys.replace(PEOPLE, inputs=PEOPLE.inputs.view(-1, 1, 2, 3))
    private = toys.replace(some(toys.MEMBERS), inputs=some(toys.MEMBERS).inputs.view(-1, 1, 2, 3))
    model = torch.nn.Sequential(torch.nn.Flatten(), toys.network())
    # A difference of two gradients that hardly differ is rounding in part, in rows as well.
    for name, error in (("dp_sgd", 1e-6), ("dpdr", 1e-6), ("diff2", 1e-4)):
        run = train(
            model,
            (private.inputs, private.labels),
            toys.defense(name, 1.0),
            sampling=SAMPLING,
            steps=2,
            noise=seeded(1),
            seed=2,
            sampler_key=3,
            recipe=Recipe(augmentation=CropAndFlip(views=3, padding=1)),
            recording=Recording(observer="updates"),
        )
        world = toys.replace(toys.WORLD, input_shape=(1, 2, 3))
        for seen in RunView(run, world, private, SAMPLING, Candidates(images.ids, images.ids, images)):
            assert_as_by_rows(seen, images, error)


@pytest.mark.parametrize("asked", [[3], [25], list(range(30))])
def test_few_at_a_time_and_alone_everybody_has_the_same_numbers(asked, monkeypatch):
    together = [filtered(seen) for seen in view_of(trained("dpdr", 1.0))]
    monkeypatch.setattr(replay, "_AT_ONCE", 4)
    for seen, all_of_them in zip(view_of(trained("dpdr", 1.0), some(asked)), together, strict=True):
        found = filtered(seen)
        torch.testing.assert_close(found.inner, all_of_them.inner[asked], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.squared_norms, all_of_them.squared_norms[asked], rtol=1e-6, atol=1e-6)


def test_a_step_that_nobody_joined_shows_its_noise_alone():
    rare, private = poisson(1e-6), some(toys.MEMBERS)
    run = train(
        toys.network(),
        (private.inputs, private.labels),
        toys.defense("dp_sgd", 1.0),
        sampling=rare,
        steps=1,
        noise=seeded(4),
        seed=0,
        sampler_key=0,
        recording=Recording(observer="updates"),
    )
    (seen,) = view_of(run, sampling=rare)
    assert_as_by_rows(seen)
    (noise,) = view_of(run, sampling=rare).replayed.noise(run.transcript.steps[0])
    assert torch.equal(noise.float(), granted(run.transcript.steps[0].noisy)[0])


def test_whoever_has_no_finite_gradient_has_no_evidence_and_hides_nobody_elses():
    broken = some(range(30))
    broken.inputs[[3, 25]] = torch.nan  # of a candidate that took part, and of one that did not
    run = trained("dp_sgd", 1.0)
    expected = filtered(view_of(run).at(0))
    found = view_of(run).replayed.matched_filter(run.transcript.steps[0], broken)
    assert (found.squared_norms[[3, 25]] == 0).all() and (found.inner[[3, 25]] == 0).all()
    others = [i for i in range(30) if i not in (3, 25)]
    torch.testing.assert_close(found.inner[others], expected.inner[others], rtol=1e-6, atol=1e-6)


def test_what_a_trainer_added_too_much_of_somebody_stays_in_what_is_left_of_it():
    """An auditor that took off what the trainer really added would find nothing wrong."""
    run = fresh("dp_sgd", 1.0)
    step, at = run.transcript.steps[0], batch_of(0)[0]
    seen = view_of(run).at(0)
    own = seen.contributions(PEOPLE.inputs[[at]], PEOPLE.labels[[at]])[0]
    honest = filtered(seen)
    bugged = toys.replace(step, noisy=(granted(step.noisy)[0] + 3 * own,))
    found = view_of(run).replayed.matched_filter(bugged, PEOPLE)
    torch.testing.assert_close(found.inner[at], honest.inner[at] + 3 * honest.squared_norms[at], rtol=1e-5, atol=1e-6)


def test_what_an_attack_writes_into_its_candidates_moves_no_number():
    view = view_of(fresh("dp_sgd", 1.0), toys.replace(PEOPLE, inputs=PEOPLE.inputs.clone()))
    seen = view.at(1)
    before = filtered(seen)
    assert view.given is not None
    view.given.inputs.zero_()
    filtered(seen).inner.zero_()
    torch.testing.assert_close(filtered(seen).inner, before.inner, rtol=0, atol=0)


def test_an_inner_product_has_its_last_place_by_the_squared_norm_whoever_took_part():
    """Else one of few digits is of somebody who took no part, whatever the noise."""
    for seen in view_of(trained("dp_sgd", 1.0)):
        found = filtered(seen)
        places = found.inner / 2.0 ** (
            torch.frexp(torch.maximum(found.squared_norms, 8 * found.squared_norms.sqrt()))[1] - 24
        )
        assert torch.equal(places, places.round()) and int(places.abs().max()) > 1000


def test_digits_of_a_product_do_not_show_once_the_squared_norm_is_taken_off_again():
    """Where both nearly cancel, a product of float32 has its last place far above that of the difference."""
    coins = torch.Generator().manual_seed(0)
    squares = torch.rand(200_000, generator=coins, dtype=torch.float64) + 0.2
    products = (torch.randn(200_000, generator=coins) * squares.sqrt().float()).double()
    took_part = torch.arange(200_000) % 2 == 0
    exact = products + torch.where(took_part, squares, 0.0)

    def shares(inner: Tensor) -> list[float]:
        """Of who took part and of others, how many look like a product of float32 once the squared norm is off."""
        left = inner - squares
        fine = torch.frexp(left)[1] - 24
        places = torch.ldexp(left, -fine)
        like, near = (places - places.round()).abs() < 0.05, inner.abs() < left.abs() / 16
        return [float(like[near & kind].double().mean()) for kind in (took_part, ~took_part)]

    # As they were rounded: to 24 digits of their own.
    mantissa, exponent = torch.frexp(exact)
    told = shares(torch.ldexp((mantissa * 2**24).round() / 2**24, exponent))
    assert told[0] > 0.95 and told[1] < 0.2
    one, other = shares(replay._rounded(exact, squares))
    assert abs(one - other) < 0.05
    assert float((replay._rounded(exact, squares) - exact).abs().max()) < 1e-6
    none = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(replay._rounded(none, none), none)


def test_no_table_of_candidates_and_parameters_is_formed(monkeypatch):
    def refused(*_: object) -> Tensor:
        raise AssertionError("rows were asked for")

    target = every_step(view_of(fresh("dp_sgd", 1.0)))
    monkeypatch.setattr("leakbench.audit.targets.residual_noise.Remainders.without_others", refused)
    monkeypatch.setattr("leakbench.defenses.core.gradients.layerwise.block_sums.BatchGradients.rows", refused)
    # A check of the engine looks at rows of synthetic examples; it passes by the reference alone.
    monkeypatch.setattr("leakbench.audit.targets.observed_step.Observed.contributions", refused)
    try:
        scores = likelihood_ratio(target).scores
    except AssertionError:
        pytest.fail("an informed attack formed rows")
    assert scores.isfinite().all()


def test_noise_is_computed_once_for_all_cells_and_kept_within_bounds(monkeypatch):
    run, asked = trained("dp_sgd", 1.0), []
    first, private = run.transcript.steps[0], some(toys.MEMBERS)
    one = StepReplay(run, private, SAMPLING, cross_entropy)
    indices = SAMPLING.indices
    monkeypatch.setattr(type(SAMPLING), "indices", lambda self, *of: asked.append(of) or indices(*of))
    assert all(one.noise(first)[0].equal(one.noise(first)[0]) for _ in range(2))
    assert len(asked) == 1
    monkeypatch.setattr(replay, "_KEPT", 0)
    other = StepReplay(run, private, SAMPLING, cross_entropy)
    assert other.noise(first)[0].equal(other.noise(first)[0]) and len(asked) == 3


def test_ratios_of_steps_are_those_by_rows_and_say_when_they_do_not_multiply():
    run = trained("random_sparsification", 1.0)
    for sampling in (SAMPLING, fixed(0.4)):
        view = view_of(run, sampling=sampling)
        quick, slow = Evidence(len(PEOPLE)), Evidence(len(PEOPLE))
        for seen in view:
            quick.add_step(seen, PEOPLE)
            slow.add_step(toys.replace(seen, matched_filter=None), PEOPLE)
        torch.testing.assert_close(quick.scores()[0], slow.scores()[0], rtol=1e-6, atol=1e-6)
        assert quick.exact is slow.exact is (sampling is SAMPLING) and len(view) == STEPS


def test_numbers_for_others_than_the_candidates_are_refused():
    numbers = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="one number a candidate, 2, got"):
        Evidence(2).add_filtered(MatchedFilter(numbers, numbers, numbers), torch.ones(5))
