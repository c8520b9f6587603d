"""What is particular to weight updates; the duties of every attack are in test_every_attack.py."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

from leakbench import audit
from leakbench.attacks.core import Examples, NotApplicable, Observation
from leakbench.attacks.gradient_similarity import gradient_similarity
from leakbench.attacks.weight_updates import SHARES, weight_updates
from leakbench.audit.targets.local_steps import LocalTraining
from leakbench.defenses.core import seeded
from leakbench.defenses.dp_sgd import dp_sgd

from . import toys


@cache
def local_update(*, lr: float = 1.0, seed: int = 0) -> tuple[Observation, torch.Tensor]:
    """A client's twelve examples of three hundred, eight steps, under a little noise."""
    everybody, public = (
        dataclasses.replace(some, inputs=some.inputs - 0.5)
        for some in (toys.examples(300, (256,), seed=seed), toys.examples(300, (256,), seed=seed + 9))
    )
    member = torch.randperm(300, generator=toys.generator(seed + 1)) < 12
    own = toys.subset(everybody, member)
    model = toys.relu_net((256,), width=16, seed=seed)
    update, _ = audit.share_update(
        model,
        own.inputs,
        own.labels,
        dp_sgd(clip_norm=1.0, noise_multiplier=0.1),
        lr=lr,
        local=LocalTraining(epochs=2, batch=3),
        noise=seeded(seed),
        population=public,
    )
    return dataclasses.replace(update, candidates=everybody), member


def test_scores_are_the_best_of_five_standardised_cosines_against_the_public_s():
    update, _ = local_update()
    between, asked, public = update.contributions_between, update.candidates, update.population
    assert between is not None and asked is not None and public is not None

    def cosines(of: Examples) -> np.ndarray:
        released = update.released.double().numpy()
        rows = [between(of.inputs, of.labels, torch.tensor(share)).double().numpy() for share in SHARES]
        return np.array([r @ released / np.linalg.norm(r, axis=1) / np.linalg.norm(released) for r in rows])

    own, known = cosines(asked), cosines(public)
    mean, std = known.mean(1, keepdims=True), known.std(1, ddof=1, keepdims=True)
    best, of_public = ((own - mean) / std).max(0), ((known - mean) / std).max(0)
    expected = (best - of_public.mean()) / of_public.std(ddof=1)
    np.testing.assert_allclose(weight_updates(update, batch_size=77).scores.numpy(), expected, atol=1e-5)


@pytest.mark.long
def test_who_was_trained_on_in_several_steps_is_found_and_five_looks_raise_no_stranger():
    outside, aucs = [], []
    for seed in range(4):
        update, member = local_update(seed=seed)
        scores = weight_updates(update).scores
        aucs.append(toys.auc(scores, member))
        outside.append(scores[~member])
    strangers = torch.cat(outside)
    # Of 12 against 288 an AUC has a standard deviation of about 0.05 here.
    assert sum(aucs) / 4 > 0.8 and min(aucs) > 0.7
    # 1152 strangers like the public examples: the mean has a standard error of 0.03 for either, and of updates' own.
    assert abs(float(strangers.mean())) < 0.2
    # Above the 95 % point of a normal distribution: 5 %, and up to twice of it for the skew of a maximum.
    assert 0.02 < float((strangers > 1.645).double().mean()) < 0.1


def test_a_single_step_is_looked_at_once():
    update, _ = toys.sparse_step(count=50)
    assert update.contributions_between is None
    found, cosine = weight_updates(update).scores, gradient_similarity(update).scores
    assert torch.equal(found.argsort(), cosine.argsort())


def test_too_few_public_examples_and_such_as_are_all_alike_are_refused():
    update, _ = toys.sparse_step(count=50)
    public = update.population
    assert public is not None
    with pytest.raises(NotApplicable, match="at least 2 public examples, got 1"):
        weight_updates(dataclasses.replace(update, population=toys.subset(public, public.ids == 1000)))
    silent = dataclasses.replace(update, contributions=lambda x, y: torch.zeros(len(x), update.released.numel()))
    with pytest.raises(NotApplicable, match="cosines must differ among public examples"):
        weight_updates(silent)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        weight_updates(update, batch_size=0)
