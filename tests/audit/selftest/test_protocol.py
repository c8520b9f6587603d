"""Somebody's own trainer: what it is given, what it may return, and the curve of its claim."""

import math

import pytest
import torch
from scipy.stats import norm
from torch import nn

from leakbench.audit.plan.gradient_canaries import LinearLogit
from leakbench.audit.selftest.protocol import TrainerClaim, TrainerTask, of_function
from leakbench.defenses.core.privacy.accounting import epsilon
from leakbench.defenses.core.privacy.events import Gaussian

from ...parameters import subtests

EXAMPLES = torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)
TASK = TrainerTask(noise_multiplier=2.0, sample_rate=0.5, steps=3, lr=0.5)


def asked(function):
    return of_function(function, "mine")(LinearLogit(4), EXAMPLES, TASK)


def test_a_function_gets_the_keywords_that_it_takes():
    seen = {}

    def train(model, examples, *, noise_multiplier, clip_norm, sample_rate, steps, seed):
        seen.update(noise_multiplier=noise_multiplier, clip_norm=clip_norm, sample_rate=sample_rate, steps=steps)
        with torch.no_grad():
            model.logit.weight -= 0.5
        return model

    answer = asked(train)
    assert seen == {"noise_multiplier": 2.0, "clip_norm": 1.0, "sample_rate": 0.5, "steps": 3}
    # The final model alone: one release, the whole movement over the learning rate.
    assert [one.tolist() for one in answer.releases] == [[1.0] * 4]
    assert answer.claim.events == (Gaussian(0.5, 2.0, 3),) and answer.claim.relation == "add_remove"


def test_a_mapping_states_releases_and_a_claim():
    def train(model, examples, **given):
        claim = {"events": [(1.0, 4.0, 2)], "relation": "zero_out", "arithmetic": "real"}
        return {"model": model, "releases": [torch.zeros(2, 2)], "claim": claim, "published": {"seed": 1}}

    answer = asked(train)
    assert answer.claim == TrainerClaim(events=(Gaussian(1.0, 4.0, 2),), relation="zero_out", arithmetic="real")
    assert answer.published == {"seed": 1}


@pytest.mark.parametrize("says_releases", [True, False])
def test_a_trainer_may_use_an_accelerator(accelerator, says_releases):
    """Reports tensors on the device, as most trainers do; the battery computes on the CPU."""

    def train(model, examples, **given):
        model = model.to(accelerator)
        model.register_buffer("count", torch.tensor(len(examples[0]), device=accelerator))
        releases = [torch.full((4,), 0.25, device=accelerator), torch.full((4,), 0.75, device=accelerator)]
        with torch.no_grad():
            for release in releases:
                model.logit.weight -= given["lr"] * release
        return {"model": model, "releases": releases} if says_releases else model

    answer = asked(train)
    shown = [release.tolist() for release in answer.releases]
    assert shown == ([[0.25] * 4, [0.75] * 4] if says_releases else [[1.0] * 4])
    tensors = [*answer.releases, *answer.buffers.values()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"} and len(answer.buffers) == 1


@subtests("hidden", [0.0, 1e-3])
def test_releases_that_are_not_what_moved_the_model_are_refused(hidden):
    """A trainer that adds noise to what it shows, and none to what it publishes as the model, is not asked at all."""

    def train(model, examples, **given):
        releases = [torch.randn(4) for _ in range(given["steps"])]
        with torch.no_grad():
            for one in releases:
                model.logit.weight -= given["lr"] * (one + hidden)
        return {"model": model, "releases": releases}

    if not hidden:
        assert len(asked(train).releases) == TASK.steps
        return
    with pytest.raises(ValueError, match=r"moved by lr times the sum of its releases, it is off by 0\.001"):
        asked(train)


@subtests(
    ("returned", "sentence"),
    [
        (3, "must return a model, or a mapping"),
        ({"model": LinearLogit(4), "loss": 1.0}, "got the key 'loss'"),
        ({"model": nn.Linear(4, 1)}, "its parameter 'logit.weight' is gone"),
        ({"model": LinearLogit(4), "releases": []}, r"must be vectors of 4 numbers, got sizes \[\]"),
        ({"model": LinearLogit(4), "releases": [torch.zeros(3)]}, r"must be vectors of 4 numbers, got sizes \[3\]"),
        ({"model": LinearLogit(4), "releases": 5}, "must be a list of vectors, got int"),
        ({"model": LinearLogit(4), "releases": [torch.full((4,), math.nan)]}, "must be real and finite"),
        ({"model": LinearLogit(4), "releases": [torch.zeros(4, dtype=torch.complex64)]}, "must be real and finite"),
        ({"model": LinearLogit(4), "published": 5}, "published of trainer mine must be a mapping, got int"),
        ({"model": LinearLogit(4), "claim": {"events": 5}}, "and a list of events"),
        ({"model": LinearLogit(4), "claim": {"epsilon": "3"}}, "must have numbers for epsilon and delta"),
        ({"model": LinearLogit(4), "claim": {"sigma": 1}}, "must be a mapping with keys of"),
        ({"model": LinearLogit(4), "claim": {"events": [(1, 2)]}}, r"must be \(sample rate, noise multiplier, steps\)"),
        ({"model": LinearLogit(4), "claim": {"relation": "swap"}}, "relation of a claim must be one of"),
        ({"model": LinearLogit(4), "claim": {"epsilon": -1.0}}, "epsilon of at least 0"),
    ],
)
def test_what_it_returns_is_checked(returned, sentence):
    with pytest.raises(ValueError, match=sentence):
        asked(lambda model, examples, **given: returned)


def test_what_cannot_be_told_its_task_is_refused():
    with pytest.raises(ValueError, match="must take the keywords clip_norm, which are not in its signature"):
        of_function(lambda model, examples, *, noise_multiplier, sample_rate, steps: model, "mine")
    with pytest.raises(ValueError, match="must be a function, got int"):
        of_function(3, "mine")


@pytest.mark.long
def test_the_curve_of_unsampled_gaussians_is_theirs_and_that_of_a_sample_lies_below():
    two = TrainerClaim(events=(Gaussian(1.0, 2.0, 4),))  # mu 1
    assert math.isclose(two.most(0.05), norm.cdf(norm.ppf(0.05) + 1), rel_tol=1e-8)
    sampled = TrainerClaim(events=(Gaussian(0.5, 2.0, 4),))
    assert 0.05 < sampled.most(0.05) < two.most(0.05) - 0.05
    # Nobody who takes part in no step is found: and at a large shift everybody else is.
    clear = TrainerClaim(events=(Gaussian(0.25, 0.2, 2),))
    assert 0.4 < clear.most(1e-3) < 1 - 0.75**2 + 2e-3
    assert TrainerClaim(events=()).most(0.3) == pytest.approx(0.3) and TrainerClaim().most(0.3) == 1.0


def test_the_curve_touches_its_own_epsilon():
    """At every false positive rate it is below the region of (epsilon, delta), and somewhere near it."""
    events = (Gaussian(0.25, 1.0, 8),)
    claim, delta = TrainerClaim(events=events), 1e-3
    eps = epsilon(list(events), delta).value
    region = TrainerClaim(epsilon=eps, delta=delta)
    gaps = [region.most(fpr) - claim.most(fpr) for fpr in torch.logspace(-6, -0.1, 60).tolist()]
    assert min(gaps) > -1e-3 and min(gaps) < 5e-3
