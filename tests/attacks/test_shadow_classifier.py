"""What is particular to the shadow classifier; the duties of every attack are in test_every_attack.py."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from leakbench.attacks.core import NotApplicable
from leakbench.attacks.shadow_classifier import shadow_classifier

from . import toys


def test_scores_are_those_of_a_penalised_logistic_regression_of_each_class():
    target, _ = toys.model_target(count=60)
    bank, candidates = target.shadows, target.candidates
    assert bank is not None and candidates is not None
    found = shadow_classifier(target, shadows=8, strength=0.5).scores

    def features(logits: torch.Tensor, label: int) -> list[float]:
        p = np.exp(logits.double().numpy())
        p /= p.sum()
        return [*sorted(p, reverse=True)[:3], -np.log(p[label]), float(p.argmax() == label)]

    answers = target.logits(candidates.inputs)
    for label in range(toys.CLASSES):
        of = (candidates.labels == label).nonzero()[:, 0].tolist()
        x = np.array([features(bank.logits[m, i, 0], label) for m in range(8) for i in of])
        y = np.array([2.0 * bool(bank.trained_on[m, i]) - 1 for m in range(8) for i in of])
        mean, std = x.mean(0), x.std(0)
        z = (x - mean) / std

        def loss(w: np.ndarray, z: np.ndarray = z, y: np.ndarray = y) -> float:
            return 0.5 * float(np.logaddexp(0, -y * (z @ w[1:] + w[0])).sum()) + float(w[1:] @ w[1:]) / 2

        w = minimize(loss, np.zeros(6), method="BFGS", options={"gtol": 1e-6}).x
        for i in of:
            expected = (np.array(features(answers[i], label)) - mean) / std @ w[1:] + w[0]
            assert float(found[i]) == pytest.approx(float(expected), abs=0.02)


def test_nothing_is_fitted_to_the_target_s_own_answers():
    target, member = toys.model_target(count=100)
    whole = shadow_classifier(target, shadows=8)
    table = target.logits(target.candidates.inputs)  # pyright: ignore[reportOptionalMemberAccess]
    # The same answers about half of the candidates, others about the rest: what was asked alone decides a score.
    changed = torch.where(torch.arange(100)[:, None] < 50, table, -table)
    other = shadow_classifier(dataclasses.replace(target, logits=lambda inputs: changed), shadows=8)
    assert torch.equal(whole.scores[:50], other.scores[:50])
    assert not torch.equal(whole.scores[50:], other.scores[50:])
    assert toys.auc(whole.scores, member) > 0.9


def test_a_class_without_strangers_and_a_strength_of_nothing_are_refused():
    target, _ = toys.model_target(count=40)
    bank = target.shadows
    assert bank is not None and target.candidates is not None
    everybody = dataclasses.replace(bank, trained_on=bank.trained_on | (target.candidates.labels == 2))
    with pytest.raises(NotApplicable, match="class 2 must have candidates"):
        shadow_classifier(dataclasses.replace(target, shadows=everybody), shadows=8)
    with pytest.raises(ValueError, match="strength must be positive"):
        shadow_classifier(target, shadows=8, strength=0.0)
