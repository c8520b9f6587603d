"""What is particular to the likelihood ratio over all steps; the formulas are in test_likelihood.py."""

from dataclasses import replace

import pytest
import torch

from leakbench.attacks.core import AccessError, SeenTranscript
from leakbench.attacks.likelihood_ratio import likelihood_ratio
from leakbench.attacks.one_step_likelihood_ratio import one_step_likelihood_ratio

from ..parameters import subtests
from . import toys


def test_scores_of_a_transcript_are_the_sums_of_the_scores_of_its_steps():
    target, _ = toys.transcript(noise=1.0, steps=3)
    steps = [replace(step, sample_rate=0.3, participation="independent") for step in target.steps]
    target = replace(target, steps=steps)
    summed = sum((one_step_likelihood_ratio(step).scores for step in steps), torch.zeros(()))
    result = likelihood_ratio(target)
    torch.testing.assert_close(result.scores, summed)
    assert result.exact and not result.deterministic and result.dependence == "per_model"


@subtests("last", ["known", "independent", "dependent"])
def test_it_is_the_most_powerful_test_unless_who_joins_a_step_depends_on_others(last):
    """One step of batches that are dealt is enough: the product is then not the likelihood ratio of the run."""
    target, _ = toys.transcript(noise=1.0, steps=3)
    rates = {"known": 1.0, "independent": 0.3, "dependent": 0.3}
    first, second, third = target.steps
    steps = [
        replace(first, sample_rate=0.3, participation="independent"),
        second,
        replace(third, sample_rate=rates[last], participation=last),
    ]
    assert likelihood_ratio(replace(target, steps=steps)).exact is (last != "dependent")
    assert one_step_likelihood_ratio(steps[-1]).exact is (last != "dependent")


def test_a_lazy_transcript_is_read_one_step_at_a_time():
    made, _ = toys.transcript(noise=1.0, steps=3)
    alive = []

    class Lazy:
        def __iter__(self):
            for step in made.steps:
                alive.append(step.step)
                yield step

    lazy = SeenTranscript(steps=Lazy(), candidates=made.candidates)
    torch.testing.assert_close(likelihood_ratio(lazy).scores, likelihood_ratio(made).scores)
    assert alive == [0, 0, 1, 2]  # the check looks at the first step


@pytest.mark.long
def test_more_steps_tell_more():
    aucs = []
    for steps in (1, 4, 16):
        target, member = toys.transcript(noise=2.0, steps=steps)
        aucs.append(toys.auc(likelihood_ratio(target).scores, member))
    assert aucs[0] < aucs[1] < aucs[2]


def test_without_noise_it_decides():
    target, member = toys.transcript(noise=0.0, steps=2)
    result = likelihood_ratio(target)
    assert result.deterministic
    torch.testing.assert_close(result.scores, torch.where(member, 0.0, -1.0).double(), atol=1e-3, rtol=0)


def test_a_transcript_without_steps_or_candidates_is_refused():
    target, _ = toys.transcript(noise=1.0, steps=1)
    with pytest.raises(AccessError, match="no steps"):
        likelihood_ratio(replace(target, steps=[]))
    with pytest.raises(AccessError, match=r"fill SeenTranscript\.candidates"):
        likelihood_ratio(replace(target, candidates=None))


def test_a_later_step_that_grants_less_is_refused():
    target, _ = toys.transcript(noise=1.0, steps=2)
    first, second = target.steps
    with pytest.raises(AccessError, match="grants less"):
        likelihood_ratio(replace(target, steps=[first, replace(second, noise_std=None)]))
