"""What is particular to the test on releases beside the steps; runs are in tests/audit/subjects/test_one_offs.py."""

from dataclasses import replace

import pytest
import torch

from leakbench.attacks.core import AccessError, SeenTranscript
from leakbench.attacks.likelihood_ratio import likelihood_ratio
from leakbench.attacks.one_off_likelihood_ratio import one_off_likelihood_ratio

from . import toys


def beside(seen: SeenTranscript) -> SeenTranscript:
    """The same observations as releases beside the steps."""
    return replace(seen, steps=(), one_offs=seen.steps)


def test_ratios_of_several_releases_add_up_as_those_of_steps_at_the_rate_1_do():
    seen, _ = toys.transcript(noise=0.5, steps=3, count=40)
    found = one_off_likelihood_ratio(beside(seen))
    torch.testing.assert_close(found.scores, likelihood_ratio(seen).scores)
    assert found.exact and not found.deterministic and found.dependence == "per_model"


def test_the_ratio_of_the_run_is_that_of_its_steps_and_of_what_lies_beside_them():
    seen, _ = toys.transcript(noise=0.5, steps=3, count=40)
    steps = list(seen.steps)
    both = replace(seen, one_offs=steps[:1], steps=steps[1:])
    torch.testing.assert_close(likelihood_ratio(both).scores, likelihood_ratio(seen).scores)
    alone = one_off_likelihood_ratio(both).scores
    assert float((alone - likelihood_ratio(both).scores).abs().max()) > 1e-3


@pytest.mark.long
def test_it_tells_members_where_noise_is_little_and_nobody_where_it_is_much():
    found = {
        noise: [
            toys.auc(one_off_likelihood_ratio(beside(seen)).scores, member)
            for seen, member in (toys.transcript(seed=seed, noise=noise, steps=1) for seed in range(8))
        ]
        for noise in (0.05, 1e4)
    }
    assert min(found[0.05]) > 0.99
    # 400 candidates of 8 releases: the error of an AUC of one is 0.03.
    assert abs(sum(found[1e4]) / 8 - 0.5) < 0.08


def test_a_transcript_without_such_releases_is_refused():
    seen, _ = toys.transcript(noise=0.5, steps=1, count=10)
    with pytest.raises(AccessError, match="no release beside them"):
        one_off_likelihood_ratio(replace(seen, steps=()))
