"""Losses with class weights or ignored classes, example by example; losses that divide by something of the batch."""

import dataclasses
import functools

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn
from torch.nn import functional

from leakbench.defenses.clipped_sgd import clipped_sgd
from leakbench.defenses.core import Engine, Recipe, cross_entropy, full, token_cross_entropy, train
from leakbench.defenses.core.gradients.reference import example_by_example

from ....parameters import subtests


@dataclasses.dataclass(slots=True)
class Slots:
    logits: torch.Tensor


WEIGHTS = torch.tensor([1.0, 20.0, 3.0])
DATA = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


def trained_with(loss):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    train(
        model,
        DATA,
        clipped_sgd(clip_norm=100.0),
        sampling=full(),
        steps=3,
        lr=0.5,
        seed=0,
        recipe=Recipe(loss=loss),
    )
    return model.weight.detach()


@pytest.mark.long
@subtests("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
@subtests("settings", [{"weight": WEIGHTS}, {"ignore_index": 1}, {"weight": WEIGHTS, "ignore_index": 2}])
def test_weights_and_ignored_classes_of_a_loss_that_averages_are_those_of_each_example(kind, settings):
    averaged = trained_with(kind(**settings))
    torch.testing.assert_close(averaged, trained_with(kind(**settings, reduction="none")))
    assert float((averaged - trained_with(kind())).norm()) > 0.1


def test_an_example_of_several_targets_has_the_mean_over_those_that_are_not_ignored():
    outputs, targets = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2, 2], [2, 2, 2, 2]])
    loss = example_by_example(nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2))
    each = functional.cross_entropy(outputs, targets, weight=WEIGHTS, reduction="none")
    torch.testing.assert_close(loss(outputs, targets), torch.stack([each[0, :2].mean(), torch.tensor(0.0)]))


def test_a_sum_of_several_targets_is_that_of_each_example():
    outputs, targets = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2, 2], [1, 1, 1, 1]])
    each = functional.cross_entropy(outputs, targets, ignore_index=2, reduction="none")
    for reduction in ("sum", "none"):
        loss = example_by_example(nn.CrossEntropyLoss(ignore_index=2, reduction=reduction))
        torch.testing.assert_close(loss(outputs, targets), each.sum(1))


TOKENS = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2))
NEXT = torch.tensor([[0, 1, 2, 3, -100], [-100] * 5, [1, -100, -100, -100, 2]])


def by_token(logits, targets, *, mean=True, **settings):
    """PyTorch's loss of each sequence alone; zero where no token counts."""
    settings["reduction"] = "mean" if mean else "sum"
    values = [functional.cross_entropy(rows, own, **settings) for rows, own in zip(logits, targets, strict=True)]
    return torch.stack(values).nan_to_num(nan=0.0)


@subtests(
    ("loss", "settings"),
    [
        (cross_entropy, {}),
        (token_cross_entropy, {}),
        (functools.partial(token_cross_entropy, reduction="sum"), {"mean": False}),
        (functools.partial(token_cross_entropy, ignore_index=2), {"ignore_index": 2}),
        (nn.CrossEntropyLoss(), {}),
        (nn.CrossEntropyLoss(reduction="sum"), {"mean": False}),
        (nn.CrossEntropyLoss(reduction="none"), {"mean": False}),
        (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1), {"label_smoothing": 0.1, "ignore_index": 1}),
    ],
)
def test_a_loss_by_token_is_that_of_each_sequence_alone(loss, settings):
    targets = NEXT.clamp(min=0) if "ignore_index" in settings else NEXT
    if settings.get("ignore_index") == 2:
        targets = torch.where(NEXT < 0, 2, NEXT)
    expected = by_token(TOKENS, targets, **settings)
    for outputs in (TOKENS, {"logits": TOKENS}, Slots(TOKENS)):
        torch.testing.assert_close(example_by_example(loss)(outputs, targets), expected)


def test_the_loss_of_the_next_token_compares_each_position_with_the_target_behind_it():
    expected = by_token(TOKENS[:, :4], NEXT[:, 1:])
    torch.testing.assert_close(token_cross_entropy(TOKENS, NEXT, next_token=True), expected)
    single = token_cross_entropy(TOKENS[:, :1], NEXT[:, :1], next_token=True)
    assert torch.equal(single, torch.zeros(3))


def test_pixels_have_their_classes_second_or_last():
    logits, targets = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    second = example_by_example(nn.CrossEntropyLoss())(logits, targets)
    torch.testing.assert_close(second, functional.cross_entropy(logits, targets, reduction="none").mean((1, 2)))
    torch.testing.assert_close(cross_entropy(logits.movedim(1, 3), targets), second)


@subtests("loss", [cross_entropy, nn.CrossEntropyLoss()])
def test_logits_of_a_shape_that_may_be_read_in_two_ways_are_refused(loss):
    with pytest.raises(
        ValueError, match=r"must show by their shape .*, got \[2, 4, 4\] .* token_cross_entropy has the classes last"
    ):
        example_by_example(loss)(torch.randn(2, 4, 4), torch.zeros(2, 4, dtype=torch.long))


@subtests(
    ("outputs", "targets", "settings", "words"),
    [
        (
            torch.randn(2, 4),
            torch.zeros(2, dtype=torch.long),
            {},
            r"targets of shape \[2\] for logits of shape \[2, 4\]",
        ),
        (TOKENS, NEXT[:, 1:], {}, r"must be \[n, positions\] for logits \[n, positions, classes\]"),
        (TOKENS, NEXT, {"reduction": "none"}, "reduction must be 'mean' or 'sum', got 'none'"),
        ((TOKENS,), NEXT, {}, "must be a tensor, or have one as .logits, got tuple; wrap the model"),
        ({"scores": TOKENS}, NEXT, {}, "must be a tensor, or have one as .logits, got dict; wrap the model"),
    ],
)
def test_what_is_no_loss_by_token_is_refused(outputs, targets, settings, words):
    with pytest.raises((ValueError, TypeCheckError), match=f"{words}|'reduction'"):
        token_cross_entropy(outputs, targets, **settings)


RARE = torch.ones(50).index_fill(0, torch.tensor([49]), 2.0)


@subtests(
    "loss",
    [
        lambda o, t: functional.cross_entropy(o, t, weight=RARE),
        functools.partial(functional.cross_entropy, weight=RARE),
        lambda o, t: functional.cross_entropy(o, t, ignore_index=49),
        lambda o, t: functional.nll_loss(o.log_softmax(1), t, weight=RARE),
        lambda o, t: functional.cross_entropy(o, t, reduction="sum") / t.float().mean(),
    ],
)
def test_a_loss_that_divides_by_something_of_the_batch_is_refused(loss):
    data = torch.randn(6, 5), torch.arange(6)
    with pytest.raises(
        ValueError, match=r"must be the mean or the sum of its examples' losses, got .* reduction='none'"
    ):
        Engine(nn.Linear(5, 50), loss=loss).prepare(*data)


class Formed(nn.Linear):
    def __init__(self, classes, form):
        super().__init__(5, classes)
        self.form = form

    def forward(self, input):
        return self.form(super().forward(input))


def weighted(take_outputs=lambda o: o, take_targets=lambda t: t, classes=50):
    weight = torch.ones(classes).index_fill(0, torch.tensor([classes - 1]), 20.0)
    return lambda o, t: functional.cross_entropy(
        take_outputs(o), take_targets(t), weight=weight.to(take_outputs(o).dtype)
    )


NUMBERS = torch.arange(6)


@subtests(
    ("model", "loss", "targets"),
    [
        (Formed(50, Slots), weighted(lambda o: o.logits), NUMBERS),
        (Formed(50, lambda o: o[:, :, None]), weighted(lambda o: o[:, :, 0]), NUMBERS),
        (nn.Linear(5, 50), weighted(take_targets=lambda t: t[:, 0]), NUMBERS[:, None]),
        (nn.Linear(5, 50), weighted(take_targets=lambda t: t.long()), NUMBERS.float()),
        (nn.Linear(5, 1500), weighted(classes=1500), NUMBERS),
    ],
)
def test_weights_of_a_class_are_found_in_outputs_and_targets_of_any_form(model, loss, targets):
    with pytest.raises(ValueError, match="must be the mean or the sum of its examples' losses"):
        Engine(model, loss=loss).prepare(torch.randn(6, 5), targets)


def test_a_subclass_that_has_its_mean_written_in_is_refused():
    class Own(nn.CrossEntropyLoss):
        def forward(self, input, target):
            return functional.cross_entropy(input, target, weight=self.weight)

    with pytest.raises(ValueError, match="Own must give one loss per example under reduction='none', got their mean"):
        train(
            nn.Linear(5, 3),
            DATA,
            clipped_sgd(clip_norm=1.0),
            sampling=full(),
            steps=1,
            recipe=Recipe(loss=Own(weight=WEIGHTS)),
        )


@subtests(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), torch.arange(6)),
        (nn.CrossEntropyLoss(reduction="sum", weight=RARE), torch.arange(6)),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.arange(6)),
        (nn.BCEWithLogitsLoss(pos_weight=RARE), torch.rand(6, 50)),
        (nn.MSELoss(), torch.rand(6, 50)),
        (lambda o, t: (o - t).square(), torch.rand(6, 50)),
    ],
)
def test_a_mean_or_a_sum_of_examples_is_taken(loss, targets):
    assert not Engine(nn.Linear(5, 50), loss=loss).prepare(torch.randn(6, 5), targets).unverified
