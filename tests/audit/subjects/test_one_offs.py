"""Releases on all the data beside the steps, as DP-SNIP's scores: what an attacker sees, and what that proves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from leakbench.attacks.core import Examples, NotApplicable, granted
from leakbench.attacks.gradient_similarity import gradient_similarity
from leakbench.attacks.likelihood_ratio import likelihood_ratio
from leakbench.attacks.one_off_likelihood_ratio import one_off_likelihood_ratio
from leakbench.audit.evidence.counts import gaussian
from leakbench.audit.evidence.thresholds import errors_at
from leakbench.audit.plan.threat_models import beside_the_steps, every_step
from leakbench.audit.targets.candidates import Candidates
from leakbench.audit.targets.observe import RunView
from leakbench.defenses.core import CropAndFlip, Recipe, Recording, Run, full, seeded, train
from leakbench.defenses.dp_snip import dp_snip

from ...defenses import duties
from ..targets.test_observe import MEMBERS, PEOPLE, WORLD, Overheard, network, some, trained, view_of

CLIP = 0.02  # shorter than every example's weight times gradient, so that each fills the bound


class HalfNoise(Overheard):
    """The planted bug: noise of half the scale that was asked for, and is charged."""

    def add(self, sums: Tensor, std: float) -> Tensor:
        return super().add(sums, std / 2)


def snipped(members: Examples, *, sigma: float = 1.0, noise=None) -> Run:
    """One step behind a mask whose scores have noise of a multiplier."""
    return train(
        network(),
        (members.inputs, members.labels),
        dp_snip(score_clip_norm=CLIP, mask_noise_multiplier=sigma, noise_multiplier=1.0),
        sampling=full(),
        steps=1,
        lr=0.5,
        noise=noise or seeded(1),
        seed=2,
        sampler_key=3,
        recording=Recording(observer="updates"),
    )


def seen_by(run: Run, members: Examples, asked: Examples = PEOPLE) -> RunView:
    return RunView(run, WORLD, members, full(), Candidates(asked.ids, asked.ids, asked))


def by_hand(run: Run, members: Examples, *, sigma: float) -> Tensor:
    """The ratio of each person, one gradient of autograd after another."""

    def contribution(one: int, people: Examples) -> Tensor:
        model = network()
        loss = torch.nn.functional.cross_entropy(model(people.inputs[one : one + 1]), people.labels[one : one + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        row = torch.cat(
            [(p * g).detach().flatten() for p, g in zip(model.parameters(), gradients, strict=True)]
        ).double()
        return row * min(1.0, CLIP / float(row.norm()))

    (release,) = run.transcript.one_offs
    assert release.noisy is not None
    everybody = [contribution(i, members) for i in range(len(members))]
    scores = []
    for i in range(len(PEOPLE)):
        own = contribution(i, PEOPLE)
        others = sum(row for row, name in zip(everybody, members.ids, strict=True) if name != PEOPLE.ids[i])
        left = release.noisy[0].double() - others
        scores.append((own @ left - own @ own / 2) / (sigma * CLIP) ** 2)
    return torch.stack(scores)


def test_the_ratio_is_that_of_gradients_taken_one_by_one():
    members = some(MEMBERS)
    for sigma in (0.1, 1.0, 8.0):
        run = snipped(members, sigma=sigma)
        found = one_off_likelihood_ratio(beside_the_steps(seen_by(run, members))).scores
        torch.testing.assert_close(found, by_hand(run, members, sigma=sigma), rtol=1e-4, atol=1e-4)


def test_it_is_one_release_of_everybody_at_the_untrained_model_and_tells_who_is_in_it():
    members = some(MEMBERS)
    run = snipped(members, sigma=0.05)
    (release,) = run.transcript.one_offs
    assert release.sample_rate == 1 and release.expected_batch == len(members) and release.key == -1
    torch.testing.assert_close(release.parameters, torch.cat([p.detach().flatten() for p in network().parameters()]))
    observed = seen_by(run, members).one_off(0)
    own = observed.contributions(PEOPLE.inputs, PEOPLE.labels)
    torch.testing.assert_close(own.norm(dim=1), torch.full((len(PEOPLE),), CLIP), rtol=1e-5, atol=0)
    # Rows by row, and by what the replay needs of them, are one and the same.
    left, filtered = granted(observed.others_removed)(), granted(observed.matched_filter)()
    torch.testing.assert_close(filtered.inner, (own.double() * left).sum(1) / (0.05 * CLIP) ** 2, rtol=1e-4, atol=1e-3)
    scores = one_off_likelihood_ratio(beside_the_steps(seen_by(run, members))).scores
    assert bool((scores[list(MEMBERS)] > 0).all()) and bool((scores[20:] < 0).all())
    # An attack on one update reads it as it is.
    assert gradient_similarity(observed).scores.shape == (len(PEOPLE),)


def test_steps_and_releases_of_a_run_keep_their_own_noise_and_add_up():
    """Release and step 0 have one number in the ledger: what is kept of one must not serve for the other."""
    run = trained("dp_snip", 1.0)
    view = view_of(run)
    together = likelihood_ratio(every_step(view)).scores
    alone = one_off_likelihood_ratio(beside_the_steps(view_of(run))).scores
    steps = likelihood_ratio(replace(every_step(view_of(run)), one_offs=())).scores
    torch.testing.assert_close(together, alone + steps)
    assert float(alone.abs().max()) > 0
    rows = view_of(run, kept={})
    for seen in (rows.one_off(0), rows.at(0), rows.one_off(0)):
        torch.testing.assert_close(
            granted(seen.matched_filter)().squared_norms,
            (seen.contributions(PEOPLE.inputs, PEOPLE.labels).double() / granted(seen.noise_std)).square().sum(1),
            rtol=1e-5, atol=1e-9,
        )  # fmt: skip
        assert granted(seen.others_removed)().shape == (len(PEOPLE), seen.released.numel())


def test_views_are_those_that_the_release_drew_and_not_those_of_the_first_step():
    images = replace(PEOPLE, inputs=PEOPLE.inputs.view(-1, 1, 2, 3))
    members = replace(some(MEMBERS), inputs=some(MEMBERS).inputs.view(-1, 1, 2, 3))
    noise = Overheard(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), network())
    run = train(
        model,
        (members.inputs, members.labels),
        dp_snip(score_clip_norm=CLIP, mask_noise_multiplier=1.0, noise_multiplier=1.0),
        sampling=full(),
        steps=1,
        noise=noise,
        seed=2,
        sampler_key=3,
        recipe=Recipe(augmentation=CropAndFlip(views=3, padding=1)),
        recording=Recording(observer="updates"),
    )
    world = replace(WORLD, input_shape=(1, 2, 3))
    view = RunView(run, world, members, full(), Candidates(images.ids, images.ids, images))
    # With other views there would be more than noise left.
    left = granted(view.one_off(0).others_removed)()[20]
    torch.testing.assert_close(left.float() / CLIP, noise.draws[0], rtol=1e-3, atol=1e-3)


def test_a_run_that_goes_on_from_a_checkpoint_still_has_what_was_released_before_its_steps(tmp_path):
    path = tmp_path / "run.pt"
    defense = dp_snip(noise_multiplier=1.0)
    with pytest.raises(KeyboardInterrupt):
        duties.trained(defense, checkpoint=path, progress=duties._Stop(3), observer="updates")
    (resumed,) = duties.trained(defense, checkpoint=path, observer="updates").transcript.one_offs
    (whole,) = duties.trained(defense, observer="updates").transcript.one_offs
    assert resumed.key == whole.key == -1 and resumed.noisy is not None and whole.noisy is not None
    assert torch.equal(resumed.noisy[0], whole.noisy[0])


def test_a_method_that_releases_nothing_beside_its_steps_is_not_attacked():
    view = view_of(trained("dp_sgd", 1.0))
    assert len(every_step(view).one_offs) == 0  # type: ignore[arg-type]  a lazy view has a length
    with pytest.raises(NotApplicable, match="nothing is released"):
        beside_the_steps(view)


def lower_bound(trials: int, half: bool, *, seed: int) -> float:
    """Epsilon at delta 0.1 that trainings with and without one person prove, of a threshold that is fixed before."""
    everybody, person = some(MEMBERS), some([0])
    coins = np.random.default_rng(seed)
    scores: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(trials):
        inside, key = bool(coins.integers(2)), int(coins.integers(2**31))
        members = everybody if inside else some(list(MEMBERS)[1:])
        run = snipped(members, noise=HalfNoise(key) if half else seeded(key))
        found = one_off_likelihood_ratio(beside_the_steps(seen_by(run, members, person))).scores
        scores[inside].append(float(found))
    errors = errors_at(np.array(scores[True]), np.array(scores[False]), 0.0)
    return gaussian(errors, delta=0.1)


@pytest.mark.slow
def test_noise_of_half_the_scale_is_refuted_and_the_right_noise_is_not():
    """A Gaussian of multiplier 1 has epsilon 1.17 at delta 0.1, of 0.5 3.79; five of five, and at most one false."""
    from leakbench.defenses.core import Ledger

    ledger = Ledger(full())
    (release,) = snipped(some(MEMBERS)).transcript.one_offs
    assert release.plan is not None
    ledger.record(release.plan, step=0, one_off=True)
    allowed = ledger.claim(0.1).epsilon
    assert all(lower_bound(300, True, seed=seed) > allowed for seed in range(5))
    # Each at 95 %: two of five would come once in forty-four times.
    assert sum(lower_bound(300, False, seed=seed) > allowed for seed in range(5, 10)) <= 1
