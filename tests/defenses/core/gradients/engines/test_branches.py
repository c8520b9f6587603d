"""Branches on values that all lead to the same gradients, as on a padding mask, need no pass for each example."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbench.defenses.core import (
    Block,
    Domain,
    Domains,
    Engine,
    Everything,
    Layout,
    LossChange,
    StepPlan,
    clip,
    clipped_sums,
    cross_entropy,
)
from leakbench.defenses.core.gradients.checks.branches import BranchAnswers
from leakbench.defenses.core.gradients.choose import choose
from leakbench.defenses.core.gradients.engines.interface import Unsupported
from leakbench.defenses.core.gradients.engines.one_by_one import OneByOne

from .....parameters import subtests
from .duties import assert_same_rows, by_loop
from .modules import CLASSES, Problem

WORDS, LENGTH, WIDTH = 9, 6, 5


class Reader(nn.Module):
    """A classifier of words whose attention leaves out padding, if there is any."""

    def __init__(self, *, padding: int = 0) -> None:
        super().__init__()
        self.words, self.into, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.padding = padding

    def mask(self, inputs):
        mask = inputs != self.padding
        return None if mask.all() else mask[:, None, :]

    def forward(self, inputs):
        hidden = torch.tanh(self.into(self.words(inputs)))
        hidden = functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=self.mask(inputs))
        return self.out(hidden[:, 0])


class Nested(Reader):
    """Asks again where there is padding, as transformers do for queries and keys of other lengths; and warns."""

    def mask(self, inputs):
        mask = inputs != self.padding
        if mask.all() or (mask[:, :LENGTH].all() and not mask[:, LENGTH:].any()):
            return None
        return mask[:, None, :]


class Warns(Reader):
    """Writes to a log, whatever the answer, and computes the same."""

    def mask(self, inputs):
        if self.padding in inputs[:, -1]:
            logging.getLogger(__name__).debug("padding without a mask")


class ShortOnes(Reader):
    """Takes another way for texts with padding, which is no mask."""

    def mask(self, inputs):
        if (inputs == self.padding).any():
            return torch.eye(LENGTH, dtype=torch.bool).expand(len(inputs), -1, -1)
        return None


class Together(Reader):
    """Leaves out the words that are padding in any text of the batch."""

    def mask(self, inputs):
        mask = inputs != self.padding
        return None if mask.all() else mask.all(dim=0).expand(len(inputs), 1, -1)


class Watchful(Reader):
    """Asks, beside the mask, what no example answers otherwise."""

    def mask(self, inputs):
        assert not (inputs > 1000).any()
        return super().mask(inputs)


def made_of(kind=Reader, *, padded=(0, 3), examples=8, **settings) -> Problem:
    """A network with texts, some of which end with padding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(**settings).double()
        inputs = torch.randint(2, WORDS, (examples, LENGTH))
    for place in padded:
        inputs[place, 3 + place :] = model.padding
    return Problem(model, inputs, torch.arange(examples) % CLASSES)


def choice_of(made: Problem, name: str = "auto", **arguments):
    return choose(name, made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets, **arguments)


NOTE = "layerwise (branches fixed: reads values of its inputs, by _local_scalar_dense)"


@pytest.mark.long
@subtests("padded", [(), (0,), (0, 1, 2)])
@subtests(("kind", "padding"), [(Reader, 0), (Reader, 1), (Reader, WORDS - 1), (Nested, 0), (Nested, 1), (Warns, 0)])
def test_a_model_that_asks_about_its_mask_is_executed_as_any_other_with_the_rows_of_a_loop(kind, padding, padded):
    made = made_of(kind, padding=padding, padded=padded)
    for name in ("auto", "layerwise"):
        choice = choice_of(made, name)
        assert choice.note == NOTE
        rows = by_loop(made)
        assert_same_rows(choice.engine.rows(made.inputs, made.targets), rows)
        plan = StepPlan(Block(codec=Everything(rows.shape[1]), bound=clip(float(rows.norm(dim=1).median()))))
        (expected,) = clipped_sums(plan, [lambda _point, rows=rows: rows], rows)
        assert_same_rows(choice.engine.sums(plan, made.inputs, made.targets)[0], expected)


def test_the_padding_of_a_declared_domain_is_its_lowest_or_highest_value():
    made = made_of(padding=WORDS - 1)
    domain = Domain(low=3, high=WORDS - 1, whole=True)
    assert choice_of(made, domains=Domains(inputs=domain)).note == NOTE
    assert choice_of(made, domains=Domains(inputs=Domain(low=3, high=WORDS - 2, whole=True))).note.startswith("one_by_")


@pytest.mark.long
@subtests("kind", [ShortOnes, Together, Watchful])
def test_branches_that_matter_or_were_not_tried_get_one_example_at_a_time(kind):
    made = made_of(kind)
    assert choice_of(made).note == "one_by_one (no layerwise: reads values of its inputs, by _local_scalar_dense)"
    with pytest.raises(ValueError, match="engine 'layerwise' cannot run this model: reads values of its inputs"):
        choice_of(made, "layerwise")


def test_leaving_an_example_out_takes_at_most_its_bound_from_the_sum():
    made = made_of()
    engine = Engine(made.model)
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.01)))
    whole = engine.run(plan.at(0.0), made.inputs, made.targets).total
    assert engine.name == NOTE
    for left_out in range(len(made.inputs)):
        kept = torch.arange(len(made.inputs)) != left_out
        rest = engine.run(plan.at(0.0), made.inputs[kept], made.targets[kept]).total
        assert float((whole - rest).norm()) <= 0.01 * (1 + 1e-9)


def test_queries_about_losses_are_answered_example_by_example():
    made = made_of()
    engine, layout = choice_of(made).engine, Layout.of(made.model)
    change = LossChange(1.01 * layout.read(made.model))
    plan = StepPlan(
        Block(codec=Everything(layout.dim), bound=clip(0.1), share=0.5),
        Block(codec=Everything(1), bound=clip(0.1), share=0.5, query=change, updates=False),
    )
    expected = OneByOne(made.model, cross_entropy, layout).sums(plan, made.inputs, made.targets)
    for computed, wanted in zip(engine.sums(plan, made.inputs, made.targets), expected, strict=True):
        torch.testing.assert_close(computed, wanted, rtol=1e-11, atol=1e-13)


def test_more_questions_than_in_the_check_are_refused():
    with BranchAnswers((True,)) as answers:
        assert bool(torch.tensor([0.0, 1.0]).all()) and answers.given == [True]
        with pytest.raises(Unsupported, match="a model must ask 1 questions about values, as in its check, got more"):
            bool(torch.tensor(1.0))
    with BranchAnswers() as answers:
        assert 1 in torch.tensor([1, 2]) and not torch.equal(torch.ones(1), torch.ones(2))
        assert torch.ones(2).sum().item() == 2 and torch.ones(1).bool().item()
    assert answers.given == [True, False, True]
