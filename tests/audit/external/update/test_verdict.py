"""The first line of an audit of one update: what is proved, what only looks like the truth, and what nobody found."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from leakbench.attacks.core import Examples, LabelEstimate, Reconstruction
from leakbench.audit.external.update.attacks import UpdateFinding, observed, read_update
from leakbench.audit.external.update.public_guesses import compared_with_guesses
from leakbench.audit.external.update.verdict import contradicted_labels, rate_of, verdict_of
from leakbench.audit.targets.observe import PublicKnowledge

DIGITS: Any = load_digits()
INPUTS = torch.tensor(DIGITS.images[:, None] / 16).float()
LABELS = torch.tensor(DIGITS.target)
PUBLIC = Examples(ids=torch.arange(500), inputs=INPUTS[500:1000], labels=LABELS[500:1000])
OTHERS = torch.arange(1200, 1210)


def target_of(*, noise_multiplier=0.0, public=True):
    """The update of the first two digits behind a convolution, clipped at 1 where it has noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
    rows = []
    for place in range(2):
        model.zero_grad()
        nn.functional.cross_entropy(model(INPUTS[place : place + 1]), LABELS[place : place + 1]).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        rows.append(flat / max(1.0, float(flat.norm())) if noise_multiplier else flat)
    total = torch.stack(rows).sum(0)
    total = (total + noise_multiplier * torch.randn(len(total))) / 2
    sizes = [parameter.numel() for parameter in model.parameters()]
    tensors = {
        name: piece.view_as(parameter)
        for (name, parameter), piece in zip(model.named_parameters(), total.split(sizes), strict=True)
    }
    clip_norm = 1.0 if noise_multiplier else None
    shared = read_update(model, tensors, batch_size=2, noise_multiplier=noise_multiplier, clip_norm=clip_norm)
    world = PublicKnowledge(input_shape=(1, 8, 8), classes=10, low=0.0, high=1.0, population=PUBLIC if public else None)
    return observed(shared, world)


def found_by(inputs, labels=LABELS[:2], **rest):
    return Reconstruction(inputs=inputs, labels=labels, objective=0.0, **rest)


def fitted(target, steps=150):
    """Inputs that fit the update as closely as descent gets, noise and all."""
    guess = torch.full((2, 1, 8, 8), 0.5, requires_grad=True)
    optimizer = torch.optim.Adam([guess], 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        target.residual(target.simulate(guess, LABELS[:2])).square().sum().backward(inputs=[guess])
        optimizer.step()
    return guess.detach().clamp(0, 1)


@pytest.mark.parametrize("public", [True, False])
def test_the_private_inputs_explain_an_update_better_than_any_guess(public):
    target = target_of(public=public)
    one = compared_with_guesses(target, found_by(INPUTS[:2]), seed=0)
    assert one is not None and one.better and one.unexplained < 1e-10 < 0.05 < one.guessed
    assert one.public == public


@pytest.mark.long
def test_other_examples_are_no_better_than_public_guesses():
    target = target_of()
    for place in range(3):
        labels = LABELS[OTHERS[2 * place : 2 * place + 2]]
        one = compared_with_guesses(target, found_by(INPUTS[OTHERS[2 * place : 2 * place + 2]], labels), seed=0)
        assert one is not None and not one.better


@pytest.mark.long
def test_a_fit_of_the_noise_is_no_better_than_a_public_guess_and_the_truth_under_little_noise_is():
    loud = target_of(noise_multiplier=2.0)
    fit = compared_with_guesses(loud, found_by(fitted(loud)), seed=0)
    assert fit is not None and fit.unexplained < fit.guessed and not fit.better
    quiet = target_of(noise_multiplier=1e-3)
    one = compared_with_guesses(quiet, found_by(INPUTS[:2]), seed=0)
    assert one is not None and one.better


def test_an_attack_that_failed_is_compared_with_nothing():
    assert compared_with_guesses(target_of(), found_by(INPUTS[:2], status="failed"), seed=0) is None
    assert compared_with_guesses(target_of(), found_by(INPUTS[:0], LABELS[:0]), seed=0) is None


def labels_of(*counts, status: Any = "ok"):
    counts = torch.tensor(counts)
    return LabelEstimate(
        counts=counts, lower=counts, upper=counts, observed=counts > -1, posterior=(counts > 0).double(), status=status
    )


def finding(result=None, kind="reconstruction", name="r_gap", **rest):
    return UpdateFinding(name=name, kind=kind, result=result, **rest)


def said(*found, better=None, names=(), doubt=""):
    compared = {}
    for one in found:
        if isinstance(one.result, Reconstruction):
            comparison = compared_with_guesses(target_of(), one.result, seed=0)
            assert comparison is not None
            compared[one.name] = comparison if better is None else replace(comparison, better=better)
    return verdict_of(found, compared, names, rate_of(found), doubt=doubt)


def test_green_is_for_attacks_that_ran_and_found_no_more_than_a_guess():
    others = finding(found_by(INPUTS[OTHERS[:2]], LABELS[OTHERS[:2]]))
    idle = finding(name="cocktail", why_not="cocktail does not apply: there is no linear layer")
    none = finding(labels_of(0, 0, status="degraded"), kind="labels", name="label_recovery")
    verdict = said(others, idle, none)
    assert (verdict.word, verdict.tone) == ("no leak shown", "good")
    assert verdict.sentence.startswith("2 of 3 attacks ran, and none returned more than a public guess")


def test_an_exact_image_without_a_certificate_is_not_green():
    verdict = said(finding(found_by(INPUTS[:2])))
    assert (verdict.word, verdict.tone) == ("something recovered", "warn")
    assert "ook at the 2 inputs of r_gap, which leave " in verdict.sentence
    assert "the best of 99 public guesses leaves 0." in verdict.sentence


def test_recovered_labels_are_not_green():
    labels = finding(labels_of(2, 0, 1), kind="labels", name="label_recovery")
    verdict = said(labels)
    assert verdict.tone == "warn"
    assert verdict.sentence.startswith("3 labels recovered by label_recovery: 0, 0, 2.")


@pytest.mark.long
def test_what_is_proved_comes_first_and_the_rest_is_said_behind_it():
    proved = finding(found_by(INPUTS[:2], certified=torch.tensor([True, True])), name="bias_division")
    labels = finding(labels_of(1, 1), kind="labels", name="label_recovery")
    verdict = said(proved, labels, finding(found_by(INPUTS[:2])))
    assert (verdict.word, verdict.tone) == ("leaks", "bad")
    first, rest = verdict.sentence.split(" Not proved: ")
    assert first == "This update leaks: 2 inputs of the batch reconstructed and proved to be in it (bias_division)."
    assert "2 labels recovered by label_recovery: 0, 1; look at the 2 inputs of r_gap" in rest


def test_nothing_is_told_where_no_attack_on_inputs_or_labels_ran():
    nobody = finding(kind="membership", name="gaussian_others", q_values=(0.5, 0.9))
    verdict = said(finding(why_not="r_gap does not apply"), nobody, names=("a", "b"))
    assert (verdict.word, verdict.tone) == ("cannot be told", "warn")
    assert "none of 2 candidates is shown to have been in it" in verdict.sentence


@pytest.mark.long
def test_an_update_whose_convention_is_not_known_is_never_green():
    others = finding(found_by(INPUTS[OTHERS[:2]], LABELS[OTHERS[:2]]))
    verdict = said(others, doubt="What the update is cannot be told.")
    assert (verdict.word, verdict.tone) == ("cannot be told", "warn")
    assert verdict.sentence == "What this update leaks is not known: What the update is cannot be told."
    proved = finding(found_by(INPUTS[:2], certified=torch.tensor([True, True])), name="bias_division")
    assert said(proved, doubt="What the update is cannot be told.").word == "leaks"


def test_labels_that_all_possible_counts_have_are_recovered():
    estimate = labels_of(2, 0, 1, status="degraded")
    open_one = replace(estimate, lower=torch.tensor([1, 0, 0]), upper=torch.tensor([3, 1, 1]))
    verdict = said(finding(open_one, kind="labels", name="label_recovery"))
    assert verdict.sentence.startswith("1 label recovered by label_recovery: 0.")


@pytest.mark.long
def test_labels_of_an_owner_are_held_against_those_that_the_update_shows():
    estimate = finding(labels_of(2, 0, 1), kind="labels", name="label_recovery")
    assert contradicted_labels([estimate], [0, 2, 0]) == contradicted_labels([estimate], None) == ""
    why = contradicted_labels([estimate], [1, 1, 1])
    assert why.startswith("--labels 1, 1, 1 cannot be those of the batch, by label_recovery, which names 0, 0, 2")
    others = finding(found_by(INPUTS[OTHERS[:2]], LABELS[OTHERS[:2]]))
    assert said(others, doubt=why).word == "cannot be told"
