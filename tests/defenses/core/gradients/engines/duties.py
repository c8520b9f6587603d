"""What every engine owes, whatever it is made of: rows, sums, refusals, and the model as it was."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from leakbench.defenses.core import Block, Everything, Layout, Loss, StepPlan, clip, cross_entropy
from leakbench.defenses.core.gradients.engines.interface import PerExample, Unsupported

from .architectures import problem
from .modules import PADDING, Problem

Kind = type[PerExample]


def by_loop(problem: Problem, loss: Loss = cross_entropy) -> Tensor:
    """Rows the slow and sure way: plain autograd on a batch of one, example by example."""
    model, inputs, targets = problem
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(inputs)):
        value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(value, trained, materialize_grads=True)
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    return torch.stack(rows)


def assert_same_rows(rows: Tensor, expected: Tensor) -> None:
    """Equal to 1e-12 of the largest entry, detached, of the same dtype."""
    assert rows.shape == expected.shape
    assert rows.dtype == expected.dtype
    assert not rows.requires_grad
    assert float((rows - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def snapshot(model: nn.Module) -> list[object]:
    """All that an engine must leave as it found it, comparable by `==`: values, gradients, hooks, odd attributes."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    state = [
        (
            name,
            id(t),
            t.tolist(),
            t.stride(),
            t.requires_grad,
            None if t.grad is None else t.grad.tolist(),
            sorted(vars(t)),
        )
        for name, t in tensors
    ]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [
        (name, id(m), type(m), m.training, sorted(vars(m)), [len(getattr(m, kind)) for kind in hooks])
        for name, m in model.named_modules()
    ]
    switches = [(name, m.inplace) for name, m in model.named_modules() if hasattr(m, "inplace")]
    return [state, modules, switches]


def rows_by(kind: Kind, problem: Problem, loss: Loss = cross_entropy) -> Tensor:
    """One engine's rows at the model's own parameters."""
    model, inputs, targets = problem
    return kind(model, loss, Layout.of(model)).rows(inputs, targets)


def check_rows(kind: Kind, problem: Problem) -> None:
    """Rows are those of the loop, of whole batches and of one example, at every call; the model is left as found."""
    model, inputs, targets = problem
    expected, found = by_loop(problem), snapshot(model)
    engine = kind(model, cross_entropy, Layout.of(model))
    assert_same_rows(engine.rows(inputs, targets), expected)
    assert_same_rows(engine.rows(inputs[:1], targets[:1]), expected[:1])
    assert_same_rows(engine.rows(inputs, targets), expected)
    assert snapshot(model) == found


def check_rows_or_refusal(kind: Kind, problem: Problem) -> None:
    """Rows are right where there are any."""
    try:
        check_rows(kind, problem)
    except Unsupported as error:
        assert "must" in str(error)


def check_neighbours(kind: Kind, problem: Problem) -> None:
    """What is in the other rows of the batch does not show in an example's own."""
    others = problem.inputs.clone()
    others[1:] = torch.nan if others.is_floating_point() else PADDING
    assert_same_rows(rows_by(kind, problem._replace(inputs=others))[:1], by_loop(problem)[:1])


def check_point(kind: Kind, problem: Problem) -> None:
    """Rows elsewhere are those of a model that is there; this one stays where it is, and so do its rows."""
    model, inputs, targets = problem
    layout, found = Layout.of(model), snapshot(model)
    there = layout.read(model) + torch.linspace(-0.3, 0.3, layout.dim, dtype=torch.float64)
    engine = kind(model, cross_entropy, layout)
    rows = engine.rows(inputs, targets, point=there)
    assert_same_rows(engine.rows(inputs, targets), by_loop(problem))
    assert snapshot(model) == found
    moved = copy.deepcopy(model)
    values = layout.unflatten(there)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            parameter.copy_(values.get(name, parameter))
    assert_same_rows(rows, by_loop(problem._replace(model=moved)))


def check_views(kind: Kind, problem: Problem) -> None:
    """With several views of each example a row is the mean of their rows."""
    model, inputs, targets = problem
    engine = kind(model, cross_entropy, Layout.of(model))
    views = torch.stack([inputs, 2 * inputs, inputs.flip(0)], dim=1).flatten(0, 1)
    labels = targets.repeat_interleave(3, dim=0)
    rows = engine.rows(views, labels, views=3)
    each = by_loop(Problem(model, views, labels))
    assert_same_rows(rows, torch.stack([each[3 * i : 3 * i + 3].mean(dim=0) for i in range(len(inputs))]))


def check_sums(kind: Kind, problem: Problem) -> None:
    """Clipped sums are the reference's, with gradients switched off around them."""
    model, inputs, targets = problem
    layout, rows = Layout.of(model), by_loop(problem)
    bound = clip(float(rows.norm(dim=1).median()))  # some rows are clipped, and some are not
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=bound))
    with torch.no_grad():
        (found,) = kind(model, cross_entropy, layout).sums(plan, inputs, targets)
    assert_same_rows(found, bound(rows).sum(dim=0))


def check_channels_last(kind: Kind, problem: Problem) -> None:
    """How images and kernels lie in memory changes nothing."""
    expected = by_loop(problem)
    model = problem.model.to(memory_format=torch.channels_last)
    inputs = problem.inputs.contiguous(memory_format=torch.channels_last)
    found = snapshot(model)
    assert_same_rows(rows_by(kind, Problem(model, inputs, problem.targets)), expected)
    assert snapshot(model) == found


def check_following(kind: Kind) -> None:
    """Parameters, buffers and mode of the model are read anew at every call."""
    here = problem("shifted_by_a_buffer")
    engine = kind(here.model, cross_entropy, Layout.of(here.model))
    for moved in (*here.model.parameters(), *here.model.buffers()):
        before = engine.rows(here.inputs, here.targets)
        with torch.no_grad():
            moved += torch.linspace(-0.5, 0.5, moved.numel(), dtype=moved.dtype).view_as(moved)
        rows = engine.rows(here.inputs, here.targets)
        assert_same_rows(rows, by_loop(here))
        assert not torch.equal(rows, before)
    here = problem("dropout_at_rest")
    engine = kind(here.model, cross_entropy, Layout.of(here.model))
    for _ in range(2):
        assert_same_rows(engine.rows(here.inputs, here.targets), by_loop(here))
        here.model.train()
        awake = [engine.rows(here.inputs, here.targets) for _ in range(2)]
        assert not torch.equal(*awake)
        here.model.eval()


def check_losses(kind: Kind) -> None:
    """A loss gives a value per example; one that takes the mean of its batch, or several per example, is as good."""
    here = problem("soft_targets")

    def by_class(outputs, targets):
        return (outputs - targets).square()

    for loss in (
        cross_entropy,
        functional.cross_entropy,
        by_class,
        lambda outputs, targets: by_class(outputs, targets).sum(dim=1),
        lambda outputs, targets: by_class(outputs, targets).mean(dim=0),
    ):
        assert_same_rows(rows_by(kind, here, loss), by_loop(here, loss))


def check_refusal(kind: Kind, problem: Problem, message: str) -> None:
    """A sentence that says which layer, and the model is left as found."""
    found = snapshot(problem.model)
    with pytest.raises(Unsupported, match=message) as caught:
        rows_by(kind, problem)
    assert "\n" not in str(caught.value)
    assert snapshot(problem.model) == found
