"""How often audits err: of models and updates that never saw those asked about, and of ones that leak by construction.

The audits are many, so the tests are slow; each prints its share with its interval (`pytest -m slow -rP`).
"""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.datasets import load_digits
from torch import nn

from leakbench.attacks.core import Examples, LabelEstimate, Reconstruction
from leakbench.audit.external.model.audit import audit_model
from leakbench.audit.external.update.attacks import attack_update, observed, read_update, with_labels
from leakbench.audit.external.update.public_guesses import compared_with_guesses
from leakbench.audit.external.update.verdict import rate_of, verdict_of
from leakbench.audit.targets.observe import PublicKnowledge

pytestmark = pytest.mark.slow

DIGITS: Any = load_digits()
INPUTS = torch.tensor(DIGITS.images[:, None] / 16).float()
LABELS = torch.tensor(DIGITS.target)


def dealt(seed, *sizes):
    """Disjoint parts of the digits."""
    order = torch.randperm(len(INPUTS), generator=torch.Generator().manual_seed(seed))
    return [(INPUTS[some], LABELS[some]) for some in order[: sum(sizes)].split(list(sizes))]


def network(seed, hidden=64, activation: type[nn.Module] = nn.Tanh):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), activation(), nn.Linear(hidden, 10))


def trained(seed, part, steps):
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(part[0]), part[1]).backward()
        optimizer.step()
    return model


def interval(hits, n, words):
    """Clopper-Pearson at 95 %, printed."""
    found = binomtest(hits, n).proportion_ci(0.95)
    print(f"{words}: {hits} of {n}, {hits / n:.3f} [{found.low:.3f}, {found.high:.3f}]")
    return found


def words_of_models(audits, *, leaking):
    words = []
    for seed in range(audits):
        members, others, third, public = dealt(seed, 150, 150, 300, 200)
        model = trained(seed, members if leaking else third, 300 if leaking else 60)
        found = audit_model(
            model, members=members, non_members=others, population=public, split="random", seed=seed, gradients=False
        )
        words.append((found.verdict.word, 0.0 if isinstance(found.bound, str) else found.bound.value))
    return words


def test_models_that_never_saw_the_members_are_called_leaking_no_oftener_than_the_docs_say():
    words = words_of_models(200, leaking=False)
    share = interval(sum(word == "leaks" for word, _ in words), len(words), "null models called leaking")
    assert share.low <= 0.1, "at most one audit of ten"
    proved = interval(sum(value > 0 for _, value in words), len(words), "null models with a bound above 0")
    assert proved.low <= 0.05


def test_models_that_know_their_members_are_called_leaking():
    words = words_of_models(60, leaking=True)
    share = interval(sum(word == "leaks" for word, _ in words), len(words), "overfitted models called leaking")
    assert share.low > 0.8


def update_of(seed, batch, *, noise_multiplier=0.0, activation: type[nn.Module] = nn.Tanh):
    """The mean gradient of a batch, clipped at 1 where it has noise."""
    model, coins = network(seed, activation=activation), torch.Generator().manual_seed(seed)
    total = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    for x, y in zip(*batch, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        row = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        total += row / max(1.0, float(row.norm())) if noise_multiplier else row
    total = (total + noise_multiplier * torch.randn(len(total), generator=coins)) / len(batch[0])
    sizes = [parameter.numel() for parameter in model.parameters()]
    tensors = {
        name: piece.view_as(parameter)
        for (name, parameter), piece in zip(model.named_parameters(), total.split(sizes), strict=True)
    }
    clip_norm = 1.0 if noise_multiplier else None
    return read_update(model, tensors, batch_size=len(batch[0]), noise_multiplier=noise_multiplier, clip_norm=clip_norm)


def audited(seed, shared, public, attacks, candidates=None):
    """Verdict and findings of an update, as the command makes them."""
    own = Examples(ids=torch.arange(len(public[0])), inputs=public[0], labels=public[1])
    world = PublicKnowledge(input_shape=(1, 8, 8), classes=10, low=0.0, high=1.0, population=own)
    asked = None
    if candidates is not None:
        ids = torch.arange(1000, 1000 + len(candidates[0]))
        asked = Examples(ids=ids, inputs=candidates[0], labels=candidates[1])
    if candidates is None:  # attacks on inputs are given the labels that are recovered
        shared = with_labels(shared, world, seed=seed)
    found = attack_update(shared, world, attacks, candidates=asked, seed=seed)
    target = observed(shared, world)
    compared = {
        one.name: comparison
        for one in found
        if isinstance(one.result, Reconstruction)
        and (comparison := compared_with_guesses(target, one.result, seed=seed)) is not None
    }
    names = [] if asked is None else [str(i) for i in range(len(asked))]
    return verdict_of(found, compared, names, rate_of(found)), found, compared


MEMBERSHIP = [("gaussian_others", {}), ("gradient_similarity", {})]
INPUT_ATTACKS = [("bias_division", {}), ("label_recovery", {}), ("inverting_gradients", {"iterations": 100})]


def test_candidates_who_were_in_no_batch_are_shown_no_oftener_than_their_rate():
    hits = 0
    for seed in range(200):
        batch, candidates, public = dealt(seed, 8, 20, 400)
        verdict, _, _ = audited(seed, update_of(seed, batch), public, MEMBERSHIP, candidates)
        hits += verdict.word == "leaks"
    share = interval(hits, 200, "null updates called leaking by candidates")
    assert share.low <= 0.05


def test_updates_under_much_noise_give_away_no_more_than_guesses():
    words = []
    for seed in range(200):
        batch, public = dealt(seed, 1, 400)
        verdict, _, _ = audited(seed, update_of(seed, batch, noise_multiplier=10.0), public, INPUT_ATTACKS)
        words.append(verdict.word)
    assert "leaks" not in words
    share = interval(words.count("something recovered"), 200, "updates under much noise with something recovered")
    assert share.low <= 0.05


def test_each_kind_of_attack_finds_what_updates_without_noise_give_away():
    candidates_found, proved, looked, labels = 0, 0, 0, 0
    for seed in range(60):
        batch, others, public = dealt(seed, 4, 16, 400)
        candidates = tuple(torch.cat(pair) for pair in zip(batch, others, strict=True))
        shared = update_of(seed, batch, activation=nn.ReLU)  # of several examples by closed forms
        verdict, _, _ = audited(seed, shared, public, MEMBERSHIP, candidates)
        candidates_found += verdict.word == "leaks"
        _, (division, named, inverted), compared = audited(seed, shared, public, INPUT_ATTACKS)
        assert isinstance(division.result, Reconstruction) and isinstance(inverted.result, Reconstruction)
        proved += division.result.certified is not None and bool(division.result.certified.any())
        looked += inverted.name in compared and compared[inverted.name].better
        assert isinstance(named.result, LabelEstimate)
        labels += bool(np.array_equal(named.result.labels.numpy(), batch[1].sort().values.numpy()))
    shares = {
        "batches whose candidates are shown": (candidates_found, 0.5),
        "batches with an input proved": (proved, 0.5),
        "batches whose inverted inputs are better than guesses": (looked, 0.8),
        "batches with all labels right": (labels, 0.8),
    }
    low = {words: interval(hits, 60, words).low for words, (hits, _) in shares.items()}
    assert {words for words, (_, least) in shares.items() if low[words] <= least} == set()
