"""Answers in other forms than logits, of the audited model and of shadow models: converted, or refused."""

import copy
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from leakbench.attacks.core import Examples
from leakbench.audit.external.model.answers import (
    answering_logits,
    as_logits,
    form_of,
    likeliest_factor,
    refuse_rounded,
    scores_in,
    unusual_factor,
)
from leakbench.audit.external.model.attacks import Audited
from leakbench.audit.external.model.audit import audit_model
from leakbench.audit.external.model.own_shadows import own_shadows
from leakbench.audit.external.model.shadow_answers import BankOfAnswers, refuse_other_answers

from ....parameters import subtests

N, CLASSES = 200, 4
# Without gradients: here the type checker wraps what the hook calls, and its wrappers change from pass to pass.
ATTACKS: list[tuple[str, dict[str, Any]]] = [("loss_threshold", {})]
LOGITS = 3 * torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0))


@subtests(
    ("answers", "form"),
    [
        (LOGITS, "logits"),
        (LOGITS.softmax(1), "probabilities"),
        (LOGITS.softmax(1).half(), "probabilities"),
        (100 * LOGITS.softmax(1), "percentages"),
        (255 * LOGITS.softmax(1), "shares"),
        (LOGITS.softmax(1) / (1 - LOGITS.softmax(1)), "odds"),
        (LOGITS.double().softmax(1).logit(), "logits of each class"),
        (LOGITS[:, :1] * torch.tensor([1.0, -1.0]), "logits"),
        (LOGITS.log_softmax(1) / math.log(2), "binary logarithms"),
        (LOGITS.log_softmax(1) / math.log(10), "decimal logarithms"),
        (-LOGITS.log_softmax(1), "negative logarithms"),
        (LOGITS.log_softmax(1), "logits"),
        (LOGITS.sigmoid(), "logits"),
        (LOGITS.abs(), "logits"),
        (torch.full((N, CLASSES), torch.nan), "logits"),
        (LOGITS[:, :1], "one logit"),
        (LOGITS[:, :1].sigmoid(), "one probability"),
        (torch.full((N, 1), torch.nan), "one logit"),
    ],
)
def test_a_form_is_known_by_all_answers(answers, form):
    assert form_of(answers) == form
    if form not in ("logits", "one logit", "one probability"):
        made = as_logits(answers.double(), form).log_softmax(1)
        torch.testing.assert_close(
            made, LOGITS.double().log_softmax(1), atol=0.5 if answers.dtype == torch.half else 0.02, rtol=0.02
        )


@subtests(
    ("answers", "form"),
    [
        ((100 * LOGITS.softmax(1)).round() / 100, "probabilities"),
        ((1000 * LOGITS.softmax(1)).round() / 1000, "probabilities"),
        ((100 * LOGITS[:, :1].sigmoid()).round() / 100, "one probability"),
        ((255 * LOGITS.softmax(1)).round(), "logits"),
    ],
)
def test_answers_of_few_digits_are_refused(answers, form):
    with pytest.raises(ValueError, match=f"model must answer with more digits, got {form} of"):
        refuse_rounded(answers, form)
    refuse_rounded(LOGITS.softmax(1).half(), "probabilities")
    refuse_rounded(nn.functional.one_hot(LOGITS.argmax(1)).float(), "probabilities")  # labels alone


@subtests("dtype", [torch.float16, torch.float32])
def test_a_probability_that_is_rounded_to_1_is_as_near_as_its_type_can_tell(dtype):
    z = torch.tensor([[5.0], [30.0]])
    one = as_logits(z.sigmoid().to(dtype), "one probability")
    assert float(one[1, 1] - one[1, 0]) == pytest.approx(-math.log(torch.finfo(dtype).eps / 2), rel=1e-3)
    assert float(one[0, 1] - one[0, 0]) == pytest.approx(5.0, abs=0.1)


@subtests("scale", [1.0, 20.0])
def test_logarithms_of_probabilities_are_the_same_logits(scale):
    shares = (scale * LOGITS).softmax(1)
    made = as_logits(shares, form_of(shares))
    torch.testing.assert_close(made.log_softmax(1).clamp(min=-80), (scale * LOGITS).log_softmax(1).clamp(min=-80))
    assert as_logits(torch.tensor([[1.0, 0.0]]), "probabilities").isfinite().all()


@subtests(
    "outputs",
    [
        LOGITS,
        {"loss": torch.tensor(1.0), "logits": LOGITS},
        (LOGITS, None),
        SimpleNamespace(logits=LOGITS, other=1),
        [torch.zeros(N), LOGITS],
        (torch.tensor(1.0), LOGITS),
    ],
)
def test_logits_are_found_in_whatever_holds_them(outputs):
    assert scores_in(outputs) is LOGITS


def test_outputs_without_any_are_refused():
    with pytest.raises(TypeError, match="must answer with logits, or with an object that holds some, got dict"):
        scores_in({"loss": torch.tensor(1.0)})


class Wrapped(nn.Module):
    def __init__(self, model, form):
        super().__init__()
        self.model, self.form = model, form

    def forward(self, inputs):
        return self.form(self.model(inputs))


@cache
def groups() -> tuple[nn.Module, dict[str, Any]]:
    coins = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 8, generator=coins)
    labels = (inputs[:, 0] + 0.5 * torch.randn(400, generator=coins) > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[:200]), labels[:200]).backward()
        optimizer.step()
    return model, {"members": (inputs[:200], labels[:200]), "non_members": (inputs[200:], labels[200:])}


@cache
def audited():
    """The audit of the model of `groups()`, as it is."""
    model, given = groups()
    return audit_model(model, attacks=ATTACKS, gradients=False, **given)


@pytest.mark.long
@subtests(
    ("form", "said"),
    [
        (lambda o: {"logits": o}, "it answers with dict"),
        (lambda o: (o, o), "it answers with tuple"),
        (lambda o: o.softmax(1), "it answers with probabilities"),
        (lambda o: {"scores": 100 * o.softmax(1)}, "it answers with percentages"),
    ],
)
def test_an_audit_is_the_same_in_whatever_form_a_model_answers(form, said):
    model, given = groups()
    told: list[str] = []
    other = audit_model(Wrapped(model, form), attacks=ATTACKS, gradients=False, report=told.append, **given)
    assert any(said in line for line in told)
    for one, two in zip(audited().outcomes, other.outcomes, strict=True):
        assert not one.why_not and not two.why_not
        assert one.metrics["auc"].value == pytest.approx(two.metrics["auc"].value, abs=1e-3)


@cache
def audited_by_two_logits():
    """The audit of `binary()`, whose one number is beside a logit of zero."""
    _, given = groups()
    two = Wrapped(binary(), lambda o: torch.cat([torch.zeros_like(o), o], 1))
    return audit_model(two, attacks=ATTACKS[:1], gradients=False, **given)


def binary() -> nn.Module:
    """The two logits of `groups()` as one: their difference."""
    model: Any = groups()[0]
    last = model[2]
    single = nn.Linear(64, 1)
    with torch.no_grad():
        single.weight.copy_(last.weight[1:] - last.weight[:1])
        single.bias.copy_(last.bias[1:] - last.bias[:1])
    return nn.Sequential(model[0], model[1], single)


@subtests(
    ("form", "said"),
    [
        (lambda o: o, "taken for the logit of class 1"),
        (lambda o: o[:, 0], "taken for the logit of class 1"),
        (torch.squeeze, "taken for the logit of class 1"),
        (lambda o: (o[:, 0], None), "taken for the logit of class 1"),
        (lambda o: {"logits": o}, "taken for the logit of class 1"),
        (torch.sigmoid, "taken for the probability of class 1"),
        (lambda o: o.sigmoid().squeeze(), "taken for the probability of class 1"),
    ],
)
def test_one_number_of_two_classes_is_audited_as_the_two_logits_that_it_stands_for(form, said):
    _, given = groups()
    model, told, plain = binary(), [], audited_by_two_logits()
    found = audit_model(Wrapped(model, form), attacks=ATTACKS[:1], gradients=False, report=told.append, **given)
    assert any(said in line for line in told)
    assert found.verdict.word == plain.verdict.word == "leaks"
    for one, other in zip(plain.outcomes, found.outcomes, strict=True):
        assert not one.why_not and not other.why_not
        assert one.metrics["auc"].value == pytest.approx(other.metrics["auc"].value, abs=1e-2)  # probabilities round


@subtests(
    ("model", "change", "words"),
    [
        (
            lambda x: x[:, 0],
            lambda y: y * 9,
            "must be 0 or 1 where .* one number an example, got 0 to 9; a regression is",
        ),
        (lambda x: x[:, 0], lambda y: y + 1, "got 1 to 2; subtract 1"),
        (
            lambda x: x[:, 0],
            lambda y: y + 0.25,
            "got 0.25; a regression is audited by .* audit scores FILE.csv, with the",
        ),
        (lambda x: x[:, 0].long(), lambda y: y, r"or of two classes with one .*, got \[2\] of int64 for 2 examples"),
        (lambda x: x[:, :, None, None], lambda y: y, r"got \[2, 8, 1, 1\] of float32"),
    ],
)
def test_one_number_of_anything_else_is_refused_with_the_way_out(model, change, words):
    _, given = groups()
    changed: dict[str, Any] = {name: (x, change(y)) for name, (x, y) in given.items()}
    with pytest.raises(ValueError, match=words):
        audit_model(Wrapped(nn.Identity(), model), attacks=ATTACKS, gradients=False, **changed)


def test_shadow_models_of_one_number_answer_as_those_of_two_logits():
    _, given = groups()
    (x, y), (x2, y2) = given["members"], given["non_members"]
    members = Examples(ids=torch.arange(N), inputs=x, labels=y)
    others = Examples(ids=N + torch.arange(N), inputs=x2, labels=y2)
    audited = Audited(model=binary(), members=members, non_members=others, classes=2)

    def answers(form):
        def train(inputs, labels, *, seed):
            torch.manual_seed(seed)
            model = nn.Linear(8, 1)
            with torch.no_grad():
                model.weight.copy_(5 * (inputs * (2.0 * labels - 1)[:, None]).mean(0, keepdim=True))
            return Wrapped(model, form)

        return own_shadows(audited, train, 2, code="").of(members.ids).logits

    two = answers(lambda o: torch.cat([torch.zeros_like(o), o], 1))
    assert two.shape == (2, N, 1, 2)
    torch.testing.assert_close(answers(torch.squeeze), two)
    torch.testing.assert_close(answers(torch.sigmoid).log_softmax(-1), two.log_softmax(-1), rtol=1e-3, atol=1e-5)


def test_a_model_of_logits_is_left_alone():
    model, given = groups()
    taken, told = answering_logits(model, given["members"][0])
    assert taken is model and told == ""


def bank_of(logits, trained_on):
    ids = torch.arange(N)
    return BankOfAnswers(ids=ids, logits=logits[:, :, None], trained_on=trained_on, source="here").bank()


@subtests(
    ("change", "words"),
    [
        (lambda o: o, None),
        (lambda o: o.log_softmax(-1), None),
        (lambda o: 0.5 * o, None),
        (lambda o: 0.25 * o, "of the size of the audited model's"),
        (lambda o: o / 1000, "of the size of the audited model's"),
        (lambda o: nn.functional.one_hot(o.argmax(-1), CLASSES).float(), "got labels alone"),
        (lambda o: o.roll(1, dims=-1), "their classes are in another order"),
        (lambda o: o[:, torch.randperm(N, generator=torch.Generator().manual_seed(3))], "the examples are in another"),
    ],
)
def test_shadow_models_that_answer_in_another_form_are_refused(change, words):
    labels = LOGITS.argmax(1)
    asked = Examples(ids=torch.arange(N), inputs=torch.zeros(N, 1), labels=labels)
    coins = torch.Generator().manual_seed(2)
    theirs = LOGITS + 0.3 * torch.randn(6, N, CLASSES, generator=coins)
    bank = bank_of(change(theirs), torch.rand(6, N, generator=coins) < 0.5)
    if words is None:
        refuse_other_answers(LOGITS, asked, bank, CLASSES)
        return
    with pytest.raises(ValueError, match=words):
        refuse_other_answers(LOGITS, asked, bank, CLASSES)


@pytest.mark.long
@subtests("factor", [1e-30, 1e-3, 0.3, 3.0, 1e3, 1e30])
def test_no_positive_factor_of_logits_changes_what_an_audit_finds(factor):
    model, given = groups()
    found = audit_model(Wrapped(model, lambda o: factor * o), attacks=ATTACKS, gradients=False, **given)
    plain = audited()
    assert found.verdict.word == plain.verdict.word == "leaks"
    for one, two in zip(plain.outcomes, found.outcomes, strict=True):
        assert one.metrics["auc"].value == pytest.approx(two.metrics["auc"].value, abs=0.05)


def test_the_likeliest_factor_is_that_of_the_likelihood():
    labels = torch.multinomial(LOGITS.softmax(1), 1, generator=torch.Generator().manual_seed(5))[:, 0]
    for size in (1e-20, 1.0, 1e20):
        assert likeliest_factor(size * LOGITS.double(), labels) * size == pytest.approx(1, abs=0.3)
    assert likeliest_factor(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)) == 1
    assert unusual_factor(1e-9 * LOGITS, torch.randint(CLASSES, (N,))) == 1  # of a model that knows nothing


@pytest.mark.long
@subtests("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_precision_is_audited_as_in_single(dtype):
    model, given = groups()
    rounded: dict[str, Any] = {name: (x.to(dtype), y) for name, (x, y) in given.items()}
    found = audit_model(
        copy.deepcopy(model).to(dtype), attacks=[*ATTACKS, ("gradient_norm", {})], gradients=False, **rounded
    )
    assert [one.why_not for one in found.outcomes] == ["", ""] and found.verdict.word == "leaks"


def test_what_reads_other_answers_has_the_tensors_of_the_model():
    model, given = groups()
    taken, _ = answering_logits(Wrapped(model, lambda o: o.softmax(1)), given["members"][0])
    assert taken.state_dict().keys() == Wrapped(model, None).state_dict().keys()
    torch.testing.assert_close(taken(given["members"][0]).softmax(1), model(given["members"][0]).softmax(1))
