"""Models that cannot be tried on just any numbers: outputs of other forms, and inputs with a range or a vocabulary."""

import copy
import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbench.defenses.clipped_sgd import clipped_sgd
from leakbench.defenses.core import Domain, Engine, Execution, Recipe, Recording, full, poisson, train
from leakbench.defenses.core.gradients.checks.synthetic_examples import inputs_for
from leakbench.defenses.dp_sgd import dp_sgd

from .....parameters import subtests

N = 24
INPUTS = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % 3


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    extra: object = None


Named = namedtuple("Named", "logits other")

FORMS = {
    "dictionary": (lambda o: {"logits": o, "more": {"sum": o.sum(1)}}, lambda o: o["logits"]),
    "tuple": (lambda o: (o, None), lambda o: o[0]),
    "list": (lambda o: [o], lambda o: o[0]),
    "named tuple": (lambda o: Named(o, o), lambda o: o.logits),
    "dataclass": (Answer, lambda o: o.logits),
}


class Formed(nn.Module):
    def __init__(self, form, remembers=False):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.hidden, self.out = form, nn.Linear(6, 5), nn.Linear(5, 3)
        self.mean, self.remembers = torch.zeros(5), remembers

    def forward(self, inputs):
        hidden = self.hidden(inputs)
        if self.remembers:
            self.mean = 0.9 * self.mean.to(hidden) + 0.1 * hidden.detach().mean(0)
            hidden = hidden - self.mean
        return FORMS[self.form][0](self.out(torch.tanh(hidden)))


def loss_of(form, reduction="none", weight=None):
    def loss(outputs, targets):
        logits = FORMS[form][1](outputs)
        return functional.cross_entropy(
            logits, targets, weight=None if weight is None else weight.to(logits), reduction=reduction
        )

    return loss


def trained(model, data, loss=None, **settings):
    recipe = Recipe(**({} if loss is None else {"loss": loss}), **settings)
    return train(
        copy.deepcopy(model), data, dp_sgd(noise_multiplier=1.0), sampling=poisson(0.5), steps=2, recipe=recipe
    )


@pytest.mark.long
@subtests("form", FORMS)
def test_outputs_of_any_form_are_checked_and_summed_as_autograd_does(form):
    model, loss = Formed(form), loss_of(form)
    run = trained(model, (INPUTS, LABELS), loss)
    assert run.unverified == () and run.engine.startswith("layerwise")
    recipe = Recipe(loss=loss, expected_batch=1.0)
    moved = copy.deepcopy(model)
    train(moved, (INPUTS, LABELS), clipped_sgd(clip_norm=1.0), sampling=full(), steps=1, lr=1.0, recipe=recipe)
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(INPUTS, LABELS, strict=True):
        gradients = torch.autograd.grad(loss(model(x[None]), y[None]).sum(), list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        total = [t + g / norm.clamp(min=1.0) for t, g in zip(total, gradients, strict=True)]
    for before, after, expected in zip(model.parameters(), moved.parameters(), total, strict=True):
        torch.testing.assert_close(before - after, expected)


@subtests("form", FORMS)
def test_a_model_that_remembers_is_refused_whatever_the_form_of_its_outputs(form):
    with pytest.raises(ValueError, match="a pass in training mode must change nothing, got another attribute 'mean'"):
        trained(Formed(form, remembers=True), (INPUTS, LABELS), loss_of(form))


@subtests("form", FORMS)
def test_a_loss_that_divides_by_weights_is_refused_whatever_the_form_of_outputs(form):
    assert trained(Formed(form), (INPUTS, LABELS), loss_of(form, "mean")).unverified == ()
    with pytest.raises(ValueError, match="a loss of a batch must be the mean or the sum"):
        trained(Formed(form), (INPUTS, LABELS), loss_of(form, "mean", torch.tensor([1.0, 2.0, 5.0])))


class Within(nn.Linear):
    """Takes a range of values only."""

    def __init__(self, low, high, remembers=False):
        super().__init__(6, 3)
        self.low, self.high, self.mean, self.remembers = low, high, torch.zeros(6), remembers

    def forward(self, input):
        if input.min() < self.low or input.max() > self.high:
            raise ValueError(f"must be in [{self.low}, {self.high}]")
        if self.remembers:
            self.mean = 0.9 * self.mean.to(input) + 0.1 * input.detach().mean(0)
        return super().forward(input / self.high)


@subtests(
    ("low", "high", "settings"),
    [(0.0, 1.0, {}), (0.0, 255.0, {}), (100.0, 255.0, {"input_domain": Domain(low=100.0, high=255.0)})],
)
def test_a_model_of_a_range_is_checked_within_it(low, high, settings):
    data = (low + (high - low) * torch.rand(N, 6), LABELS)
    assert trained(Within(low, high), data, **settings).unverified == ()
    with pytest.raises(ValueError, match="must change nothing, got another attribute 'mean'"):
        trained(Within(low, high, remembers=True), data, **settings)


def test_what_cannot_be_checked_is_refused_and_what_is_unchecked_says_so_first():
    model, data = Within(100.0, 255.0), (100 + 155 * torch.rand(N, 6), LABELS)
    with pytest.raises(ValueError, match=r"must be checked before .* must be in \[100.0, 255.0\]; a deep copy of it"):
        trained(model, data)
    unchecked = Execution(unchecked=True)
    run = train(model, data, dp_sgd(noise_multiplier=1.0), sampling=poisson(0.5), steps=2, execution=unchecked)
    claim = run.claim(1e-5)
    assert run.remarks == ("unverified_model",) and len(claim.unverified) == 1
    assert str(claim).splitlines()[0].endswith(", unverified")


class Tokens(nn.Module):
    """Token and category numbers in columns of floats."""

    def __init__(self, remembers=False):
        super().__init__()
        self.words, self.kinds, self.out = nn.Embedding(50, 4), nn.Embedding(3, 4), nn.Linear(10, 3)
        self.mean, self.remembers = torch.zeros(2), remembers

    def forward(self, inputs):
        if self.remembers:
            self.mean = 0.9 * self.mean.to(inputs) + 0.1 * inputs[:, :2].detach().mean(0)
        parts = self.words(inputs[:, 4].long()), self.kinds(inputs[:, 5].long()), inputs[:, :2]
        return self.out(torch.cat(parts, dim=1))


@pytest.mark.parametrize("declared", [False, True])
def test_numbers_of_tokens_in_columns_of_floats_are_made_up_below_the_smallest_table(declared):
    inputs = INPUTS.clone()
    inputs[:, 4], inputs[:, 5] = torch.arange(N) % 50, torch.arange(N) % 3
    high = torch.tensor([9.5, 9.5, 1.0, 1.0, 49.0, 2.0])
    columns = Domain(low=-high * (torch.arange(6) < 4), high=high, whole=torch.arange(6) > 3)
    settings = {"input_domain": columns} if declared else {}
    assert trained(Tokens(), (inputs, LABELS), **settings).unverified == ()
    with pytest.raises(ValueError, match="must change nothing, got another attribute 'mean'"):
        trained(Tokens(remembers=True), (inputs, LABELS), **settings)


def test_no_loss_is_looked_at_that_is_not_finite():
    class Root(nn.Linear):
        def forward(self, input):
            return super().forward(input.sqrt())

    assert trained(Root(6, 3), (INPUTS.abs(), LABELS)).unverified == ()
    with pytest.raises(
        ValueError, match="this one cannot be: the model fails on made-up examples: its loss is not fin"
    ):
        trained(Root(6, 3), (INPUTS.abs(), LABELS), lambda outputs, targets: outputs.sum(1) * float("nan"))


def test_a_model_of_one_example_at_a_time_is_checked_on_one():
    class Alone(nn.Linear):
        def __init__(self, remembers=False):
            super().__init__(6, 3)
            self.mean, self.remembers = torch.zeros(6), remembers

        def forward(self, input):
            if len(input) > 1:
                raise ValueError("one at a time")
            if self.remembers:
                self.mean = input.detach()[0]
            return super().forward(input)

    run = trained(Alone(), (INPUTS, LABELS))
    assert run.unverified == () and run.engine == "one_by_one (no layerwise: it fails on batches: one at a time)"
    with pytest.raises(ValueError, match="must change nothing"):
        trained(Alone(remembers=True), (INPUTS, LABELS))


def test_made_up_values_are_of_the_declared_domain_and_never_of_the_data():
    coins = torch.Generator().manual_seed(0)
    values = Domain(low=-3, high=4, whole=True).values((4000, 2), coins)
    assert set(values.flatten().tolist()) == set(range(-3, 5))
    assert (values == -3).double().mean() == pytest.approx(1 / 8, abs=0.02)  # all alike: 8,000 draws, 5 deviations
    real = Domain(low=2.0, high=3.0).values((4000, 2), coins)
    assert 2 <= real.min() < 2.01 and 2.99 < real.max() <= 3
    poisoned = torch.full((N, 6), float("nan"))  # a value that was read would show
    for made in inputs_for(nn.Linear(6, 3), poisoned, None):
        assert made((5, 6), coins).isfinite().all()
    Engine(nn.Linear(6, 3)).prepare(poisoned, LABELS)


@subtests(
    ("low", "high", "whole"),
    [(1.0, 0.0, False), (0.0, float("inf"), False), (0.5, 2.0, True), (float("nan"), 1, False)],
)
def test_a_domain_that_cannot_be_is_refused(low, high, whole):
    with pytest.raises(ValueError, match="low and high of a domain"):
        Domain(low=low, high=high, whole=whole)


def test_a_domain_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"must have the shape of one example, \[6\], got \[2\]"):
        trained(nn.Linear(6, 3), (INPUTS, LABELS), input_domain=Domain(low=torch.zeros(2), high=torch.ones(2)))


def test_a_run_with_a_declared_domain_is_taken_up_again(tmp_path):
    def claim(low):
        recording = Recording(checkpoint=tmp_path / "run.checkpoint")
        recipe = Recipe(input_domain=Domain(low=low, high=torch.full((6,), 3.0)))
        torch.manual_seed(0)
        settings = {"sampling": poisson(0.5), "steps": 2, "seed": 1, "sampler_key": 2}
        return train(
            nn.Linear(6, 3),
            (INPUTS, LABELS),
            dp_sgd(noise_multiplier=1.0),
            recording=recording,
            recipe=recipe,
            **settings,
        ).claim(1e-5)

    assert claim(-3.0) == claim(-3.0)


class Table(nn.Module):
    """Categories from 1 in columns of floats, and the mean of the last batch kept: 0 is no category."""

    def __init__(self, columns):
        super().__init__()
        self.table, self.out, self.kept = nn.Parameter(torch.randn(12, 4)), nn.Linear(4 * columns, 3), None

    def forward(self, inputs):
        hidden = torch.cat([self.table.index_select(0, column.long() - 1) for column in inputs.T], 1)
        kept, self.kept = self.kept, hidden.detach().mean(0)
        return self.out(hidden if kept is None else hidden - kept.to(hidden))


@subtests("columns", [1, 2, 4])
def test_one_lucky_example_is_no_check_of_a_model_that_fails_on_others(columns):
    coins = torch.Generator().manual_seed(3)
    data = torch.randint(1, 13, (N, columns), generator=coins).float(), LABELS
    with pytest.raises(ValueError, match="a model must be checked before it is trained, and this one cannot be"):
        trained(Table(columns), data)
    with pytest.raises(ValueError, match="must change nothing, got another attribute 'kept'"):
        trained(Table(columns), data, input_domain=Domain(low=1, high=12, whole=True))
