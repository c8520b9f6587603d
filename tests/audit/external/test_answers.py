"""Answers in other forms than logits, of the audited model and of shadow models: converted, or refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attacks.core import Examples
from audit.external.answers import answering_logits, as_logits, form_of, likeliest_factor, scores_in, unusual_factor
from audit.external.audit import audit_model
from audit.external.shadow_answers import BankOfAnswers, refuse_other_answers

N, CLASSES = 200, 4
ATTACKS = [("loss_threshold", {}), ("gradient_norm", {})]
LOGITS = 3 * torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("answers", "form"),
    [
        (LOGITS, "logits"),
        (LOGITS.softmax(1), "probabilities"),
        (LOGITS.softmax(1).half(), "probabilities"),
        (100 * LOGITS.softmax(1), "percentages"),
        (LOGITS.log_softmax(1), "logits"),
        (LOGITS.sigmoid(), "logits"),
        (LOGITS.abs(), "logits"),
        (torch.full((N, CLASSES), torch.nan), "logits"),
    ],
)
def test_a_form_is_known_by_all_answers(answers, form):
    assert form_of(answers) == form


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_logarithms_of_probabilities_are_the_same_logits(scale):
    shares = (scale * LOGITS).softmax(1)
    made = as_logits(shares, form_of(shares))
    torch.testing.assert_close(made.log_softmax(1).clamp(min=-80), (scale * LOGITS).log_softmax(1).clamp(min=-80))
    assert as_logits(torch.tensor([[1.0, 0.0]]), "probabilities").isfinite().all()


@pytest.mark.parametrize(
    "outputs",
    [
        LOGITS,
        {"loss": torch.tensor(1.0), "logits": LOGITS},
        (LOGITS, None),
        SimpleNamespace(logits=LOGITS, other=1),
        [torch.zeros(N), LOGITS],
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


@pytest.mark.parametrize(
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
    plain = audit_model(model, attacks=ATTACKS, gradients=False, **given)
    other = audit_model(Wrapped(model, form), attacks=ATTACKS, gradients=False, report=told.append, **given)
    assert any(said in line for line in told)
    for one, two in zip(plain.outcomes, other.outcomes, strict=True):
        assert not one.why_not and not two.why_not
        assert one.metrics["auc"].value == pytest.approx(two.metrics["auc"].value, abs=1e-3)


def test_a_model_of_logits_is_left_alone():
    model, given = groups()
    taken, told = answering_logits(model, given["members"][0])
    assert taken is model and told == ""


def bank_of(logits, trained_on):
    ids = torch.arange(N)
    return BankOfAnswers(ids=ids, logits=logits[:, :, None], trained_on=trained_on, source="here").bank()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o, None),
        (lambda o: o.log_softmax(-1), None),
        (lambda o: 0.3 * o, None),
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


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 0.3, 3.0, 1e3, 1e30])
def test_no_positive_factor_of_logits_changes_what_an_audit_finds(factor):
    model, given = groups()
    found = audit_model(Wrapped(model, lambda o: factor * o), attacks=ATTACKS, gradients=False, **given)
    plain = audit_model(model, attacks=ATTACKS, gradients=False, **given)
    assert found.verdict.word == plain.verdict.word == "leaks"
    for one, two in zip(plain.outcomes, found.outcomes, strict=True):
        assert one.metrics["auc"].value == pytest.approx(two.metrics["auc"].value, abs=0.05)


def test_the_likeliest_factor_is_that_of_the_likelihood():
    labels = torch.multinomial(LOGITS.softmax(1), 1, generator=torch.Generator().manual_seed(5))[:, 0]
    for size in (1e-20, 1.0, 1e20):
        assert likeliest_factor(size * LOGITS.double(), labels) * size == pytest.approx(1, abs=0.3)
    assert likeliest_factor(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)) == 1
    assert unusual_factor(1e-9 * LOGITS, torch.randint(CLASSES, (N,))) == 1  # of a model that knows nothing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_precision_is_audited_as_in_single(dtype):
    model, given = groups()
    rounded: dict[str, Any] = {name: (x.to(dtype), y) for name, (x, y) in given.items()}
    found = audit_model(model.to(dtype), attacks=ATTACKS, gradients=False, **rounded)
    assert [one.why_not for one in found.outcomes] == ["", ""] and found.verdict.word == "leaks"


def test_what_reads_other_answers_has_the_tensors_of_the_model():
    model, given = groups()
    taken, _ = answering_logits(Wrapped(model, lambda o: o.softmax(1)), given["members"][0])
    assert taken.state_dict().keys() == Wrapped(model, None).state_dict().keys()
    torch.testing.assert_close(taken(given["members"][0]).softmax(1), model(given["members"][0]).softmax(1))
