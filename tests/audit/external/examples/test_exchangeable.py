"""Candidates of an update are ranked among public examples of their kind, or not at all."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from leakbench.attacks.core import Examples
from leakbench.audit.external.examples.exchangeable import unlike
from leakbench.audit.external.examples.identity import content_ids
from leakbench.audit.external.update.attacks import attack_update, read_update
from leakbench.audit.targets.observe import PublicKnowledge
from leakbench.benchmarks import models


def _examples(inputs, labels):
    return Examples(ids=content_ids(inputs, labels), inputs=inputs, labels=labels)


def _drawn(seed, count, classes=10):
    coins = torch.Generator().manual_seed(seed)
    return _examples(torch.randn(count, 6, generator=coins), torch.randint(0, classes, (count,), generator=coins))


@pytest.mark.long
def test_one_population_is_told_apart_in_few_draws():
    runs = 60
    refused = sum(bool(unlike(_drawn(2 * seed, 30), _drawn(2 * seed + 1, 200))) for seed in range(runs))
    assert refused <= stats.binom.ppf(0.9999, runs, 0.01)


def test_candidates_of_another_kind_are_refused_with_what_shows_it():
    public = _drawn(0, 200)
    ones = _drawn(1, 12)
    same = _examples(ones.inputs, torch.full((12,), 3))
    assert "have other labels (p 0.000" in unlike(same, public)
    far = _drawn(2, 60)
    assert "told apart without the update" in unlike(_examples(far.inputs + 2, far.labels), public)
    assert "at least 38 public examples" in unlike(ones, _drawn(3, 37))


def test_a_candidate_with_another_label_is_a_copy_none_the_less():
    public = _drawn(0, 200)
    copied = _examples(public.inputs[:5], (public.labels[:5] + 1) % 10)
    assert unlike(copied, public) == "candidates must not be among the public examples, and one is"


def test_nobody_of_a_class_that_the_public_lacks_is_called_a_member_of_the_batch(overfitted):
    """All thirty of them were, none of whom was in it."""
    inputs, labels = (torch.cat(parts) for parts in zip(overfitted.members, overfitted.non_members, strict=True))
    threes, others = (labels == 3).nonzero()[:, 0], (labels != 3).nonzero()[:, 0]
    model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)
    batch = torch.cat([threes[:4], others[:4]])
    nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def asked(candidates, public):
        shared = read_update(model, gradient, batch_size=8)
        world = PublicKnowledge(
            input_shape=(1, 8, 8), classes=10, low=0.0, high=1.0, population=_examples(inputs[public], labels[public])
        )
        (found,) = attack_update(
            shared, world, [("gradient_similarity", {})], candidates=_examples(inputs[candidates], labels[candidates])
        )
        return found

    found = asked(threes[4:34], others[4:404])
    assert found.result is None
    assert "have other labels" in found.why_not
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    order = order[~torch.isin(order, batch)]
    found = asked(order[:30], order[30:430])
    assert sum(q <= 0.05 for q in found.q_values) == 0 and len(found.q_values) == 30
