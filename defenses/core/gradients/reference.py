"""Reference per-example gradients: `torch.func.vmap(grad)` of the model, as a matrix [rows, dim] in `Layout` order.

The reference serves every layer that torch.func supports and materialises all rows. Faster engines are checked against
it, and attacks differentiate through it. A row depends on its own example only: layers that mix examples (BatchNorm)
are refused in `checks/batch_norm.py`, before any row is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import grad, vmap

from ..inputs import Inputs, called
from ..plan.layout import Layout
from ..randomness.record_draws import current_keys, entries, one_pass
from .power_iteration import hooks_of

Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, usually [n, classes], targets) -> per-example losses [n]; for a batch of one, a mean is equivalent."""


def cross_entropy(outputs: Any, targets: Tensor) -> Float[Tensor, " n ..."]:
    """Cross-entropy of each example, in nats.

    Args:
        outputs: logits [n, classes], or an object that has them as `logits`. Logits [n, ..., classes] by token get
            `token_cross_entropy`.
        targets: class numbers [n], probabilities [n, classes], or class numbers of tokens [n, ...].

    Raises:
        ValueError: for outputs that are no logits, or for which both dimensions may be that of the classes.
    """
    scores = scores_of(outputs)
    if scores.dim() > 2 and _classes_are_last(scores, targets):
        return token_cross_entropy(scores, targets)
    return nn.functional.cross_entropy(scores, targets, reduction="none")


def token_cross_entropy(
    outputs: Any,
    targets: Int[Tensor, "n *positions"],
    *,
    next_token: bool = False,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Float[Tensor, " n"]:
    """Cross-entropy of each example over its own tokens, in nats; zero for an example without counted tokens.

    PyTorch's mean over a batch divides by the number of counted tokens of all examples, which are private.

    Args:
        outputs: logits [n, *positions, classes], or an object that has them as `logits`.
        targets: class numbers of the tokens.
        next_token: True to compare the logits at a position with the target at the next, as for a language model whose
            targets are its inputs.
        ignore_index: target of tokens that do not count, as padding.
        reduction: mean or sum over an example's counted tokens.

    Raises:
        ValueError: for targets of another shape, or another reduction.
    """
    scores = scores_of(outputs)
    if scores.dim() < 3 or scores.shape[:-1] != targets.shape:
        raise ValueError(
            "targets by token must be [n, positions] for logits [n, positions, classes], got targets of shape "
            f"{list(targets.shape)} for logits of shape {list(scores.shape)}"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got '{reduction}'")
    if next_token:
        scores, targets = scores[:, :-1], targets[:, 1:]
    losses = nn.functional.cross_entropy(
        scores.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return _within_examples(losses.reshape(targets.shape), targets, ignore_index, reduction)


def scores_of(outputs: Any) -> Tensor:
    """Returns a model's logits: its output, or the entry `logits` of an object or a mapping.

    Raises:
        ValueError: for other outputs.
    """
    if isinstance(outputs, Tensor):
        return outputs
    scores = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(scores, Tensor):
        raise ValueError(
            f"outputs must be a tensor, or have one as .logits, got {type(outputs).__name__}; wrap the model in a "
            "module that returns its scores"
        )
    return scores


def fits_tokens(scores: torch.Size, targets: torch.Size) -> bool:
    """Returns whether logits of this shape may be [n, *positions, classes] for targets [n, *positions]."""
    return len(scores) > 2 and scores[:-1] == targets


def _classes_are_last(scores: Tensor, targets: Tensor) -> bool:
    """Returns whether logits have their classes last, and not second as in PyTorch's losses.

    Raises:
        ValueError: if both are possible.
    """
    if targets.is_floating_point() or not fits_tokens(scores.shape, targets.shape):
        return False
    if (scores.shape[0], *scores.shape[2:]) == targets.shape:
        raise ValueError(
            "logits must show by their shape which dimension is that of the classes, got "
            f"{list(scores.shape)} for targets of shape {list(targets.shape)}; name the loss: token_cross_entropy has "
            "the classes last"
        )
    return True


def _within_examples(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Float[Tensor, " n"]:
    """Returns the mean or sum over an example's counted targets; losses of others are zero."""
    total = losses.flatten(1).sum(1)
    if reduction != "mean":
        return total
    if targets.is_floating_point():  # probabilities, which have no ignored class
        return losses.flatten(1).mean(1)
    return total / (targets != ignore_index).flatten(1).sum(1).clamp(min=1)


def logistic(outputs: Float[Tensor, "n 1"], targets: Tensor) -> Float[Tensor, " n"]:
    """Binary cross-entropy of a logit f, in nats: log(1 + exp(-y f)), y = 1 for class 1 and y = -1 for class 0.

    Args:
        outputs: the logit of class 1.
        targets: class numbers 0 and 1 [n], or probabilities of the two classes [n, 2].
    """
    share = targets[:, 1] if targets.ndim == 2 else targets.to(outputs.dtype)
    return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], share, reduction="none")


class PerExampleLoss(nn.Module):
    """Per-example form of PyTorch's losses of class numbers.

    PyTorch's batch mean divides by the weights of all targets, so the weight of a single example cancels. Here an
    example's loss is multiplied by the weight of its target, and an ignored target has loss zero. An example with
    several targets, as a sequence, has the mean over the targets that are not ignored, or the sum. Logits by token have
    their classes last or second.

    Attributes:
        inner: the loss module, whose reduction is "none".
        reduction: "mean" or "sum" within an example.
    """

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        """Copies a loss module; without a reduction, an example's losses are added."""
        super().__init__()
        self.inner = copy.deepcopy(loss)
        self.reduction = "mean" if loss.reduction == "mean" else "sum"
        self.inner.reduction = "none"

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        """Returns the loss of each example [n]."""
        inner, outputs = self.inner, scores_of(outputs)
        if inner.weight is not None and inner.weight.dtype != outputs.dtype:  # for a model that is checked in float64
            inner = copy.deepcopy(inner).to(outputs.dtype)
        if outputs.dim() > 2 and _classes_are_last(outputs, targets):
            losses = inner(outputs.flatten(0, -2), targets.flatten()).reshape(targets.shape)
        else:
            losses = inner(outputs, targets)
        if losses.dim() == 0:  # a subclass may have its mean hard-coded
            raise ValueError(
                f"{type(inner).__name__} must give one loss per example under reduction='none', got their mean: it "
                "divides by the weights of a batch, which of one example cancel"
            )
        if losses.dim() == 1:  # one target of each, whose loss is zero if it is ignored
            return losses
        return _within_examples(losses, targets, inner.ignore_index, self.reduction)


def example_by_example(loss: Loss) -> Loss:
    """Returns the per-example form of a `CrossEntropyLoss` or `NLLLoss`; others unchanged.

    Args:
        loss: any. Of a subclass, whose mean may be its own, only a mean that divides by weights or ignored targets is
            replaced.
    """
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss
    divides = loss.reduction == "mean" and (loss.weight is not None or loss.ignore_index >= 0)
    return PerExampleLoss(loss) if divides or type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) else loss


def per_example_gradients(
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    inputs: Inputs,
    targets: Tensor,
    *,
    parameters: Float[Tensor, " dim"] | None = None,
) -> Float[Tensor, "rows dim"]:
    """Gradient of each example's loss in the trained parameters, flattened in layout order.

    Differentiable in `inputs`, in floating `targets` and in `parameters`, so that attacks can search over them.

    Args:
        model: the network; its frozen parameters and buffers are used unchanged.
        loss: per-example loss.
        layout: the trained parameters and their order.
        inputs: examples [rows, ...], first dimension the batch.
        targets: class numbers [rows], [rows, positions], or class probabilities.
        parameters: the point at which to differentiate; the model's own parameters if None.

    Returns:
        A row per example, in the parameters' dtype.
    """
    outputs_at = ModelFunction(model)
    # PyTorch's InstanceNorm has wrong derivatives for a channels-last batch of one (2.15, CPU), and here every batch
    # has one example.
    inputs = inputs.contiguous()
    point = layout.unflatten(layout.read(model) if parameters is None else parameters)
    keys = current_keys()

    if len(inputs) == 1:
        # Plain autograd is 1.5 times as fast as vmap over one example; attacks call this thousands of times.
        with torch.enable_grad(), one_pass():
            # A point that is optimised, or that results from earlier steps, stays in the graph.
            leaves = {name: p if p.requires_grad else p.detach().requires_grad_() for name, p in point.items()}
            value = loss(outputs_at(leaves, inputs), targets).sum()
            moves = parameters is not None and parameters.requires_grad
            search = inputs.requires_grad or targets.requires_grad or moves
            # materialize_grads: zeros, as vmap returns, for a parameter that the loss does not depend on.
            only = torch.autograd.grad(value, list(leaves.values()), create_graph=search, materialize_grads=True)
        return torch.cat([gradient.reshape(1, -1) for gradient in only], dim=1)

    over = (None, 0, 0, None if keys is None else 0)
    example_loss = grad(_loss_of_one(outputs_at, loss))
    # Draws are keyed by record or refused elsewhere (`record_draws.py`, `model_checks.py`); vmap's default would raise.
    gradients = vmap(example_loss, in_dims=over, randomness="different")(point, inputs, targets, keys)
    sizes = zip(layout.names, layout.sizes, strict=True)
    return torch.cat([gradients[name].reshape(len(inputs), size) for name, size in sizes], dim=1)


@torch.no_grad()
def per_example_losses(
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    inputs: Inputs,
    targets: Tensor,
    *,
    parameters: Float[Tensor, " dim"] | None = None,
) -> Float[Tensor, " rows"]:
    """Loss of each example; arguments as for `per_example_gradients`."""
    inputs, keys = inputs.contiguous(), current_keys()
    point = layout.unflatten(layout.read(model) if parameters is None else parameters)
    example_loss = _loss_of_one(ModelFunction(model), loss)
    if len(inputs) == 1:  # also for models that vmap refuses
        return example_loss(point, inputs[0], targets[0], None if keys is None else keys[0]).reshape(1)
    over = (None, 0, 0, None if keys is None else 0)
    return vmap(example_loss, in_dims=over, randomness="different")(point, inputs, targets, keys)


def _loss_of_one(
    outputs_at: Callable[[Mapping[str, Tensor], Inputs], Any], loss: Loss
) -> Callable[[dict[str, Tensor], Inputs, Tensor, Tensor | None], Tensor]:
    """Returns (parameters, input, target, key of its draws) -> the example's loss, as a batch of one."""

    def example_loss(at: dict[str, Tensor], one_input: Inputs, one_target: Tensor, key: Tensor | None) -> Tensor:
        with entries(None if key is None else key.unsqueeze(0)), one_pass():
            return loss(outputs_at(at, one_input.unsqueeze(0)), one_target.unsqueeze(0)).sum()

    return example_loss


def outputs(
    model: nn.Module,
    layout: Layout,
    inputs: Inputs,
    *,
    parameters: Float[Tensor, " dim"],
) -> Any:
    """Outputs of the model at another parameter point; differentiable in inputs and parameters.

    Args:
        model: its frozen parameters and buffers are used unchanged.
        layout: the trained parameters and their order.
        inputs: examples, first dimension the batch.
        parameters: the point.
    """
    return ModelFunction(model)(layout.unflatten(parameters), inputs)


class ModelFunction:
    """The model as a function of (named parameters, inputs); parameters that are not named keep their values.

    It replaces `torch.func.functional_call`, which looks up every parameter at every call (slower than a pass through a
    small network) and ties weights in a way that leaves copies in a module used under two names. Parameters are passed
    in contiguous memory order, whatever the model's: see `per_example_gradients`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Collects the places of all parameters and buffers; a tied parameter has several."""
        self._model = model
        names = {id(p): name for name, p in model.named_parameters()}
        # Private tables of PyTorch, to which its own functional_call writes. Every entry is replaced in a call: a
        # parameter that was added later has no name here and must not require a gradient, or the batch's gradient would
        # be left at it.
        self._tables: list[tuple[dict[str, Any], dict[str, str]]] = [
            (module._parameters, {key: names[id(p)] for key, p in module._parameters.items() if p is not None})
            for module in model.modules()
        ]
        self._buffers: list[dict[str, Any]] = [module._buffers for module in model.modules()]
        # Weights that hooks compute: a graph left on them would outlive the pass, and prevent copies of the model.
        self._computed = [(vars(module), hook.name) for module in model.modules() for hook in hooks_of(module)]
        # A tied parameter is named after its first place.
        self._place_of: dict[str, tuple[dict[str, Any], str]] = {}
        for table, keys in self._tables:
            for key, name in keys.items():
                self._place_of.setdefault(name, (table, key))

    def value(self, name: str) -> Tensor:
        """Returns a parameter as it is now: `load_state_dict(assign=True)` replaces the tensors."""
        table, key = self._place_of[name]
        return table[key]

    def __call__(self, at: Mapping[str, Tensor], batch: Inputs) -> Any:
        """Returns the outputs; restores the model and removes everything that the pass stored in it."""
        before = [(table, list(table.items())) for table in self._buffers]
        weights = [(table, name, table[name]) for table, name in self._computed]
        try:
            for table, names in self._tables:
                entries = list(table.items())
                before.append((table, entries))
                for key, p in entries:
                    if p is not None:
                        value = at.get(names[key]) if key in names else None
                        table[key] = p.detach().contiguous() if value is None else value
            return called(self._model, batch)
        finally:
            for table, name, weight in weights:
                table[name] = weight
            # Backwards, because two modules may share a table, which the second sees modified. Entry by entry: the
            # tables of a scripted module have no `update`.
            for table, entries in reversed(before):
                for key, value in entries:
                    table[key] = value
                for key in [*table.keys()][len(entries) :]:
                    del table[key]


def microbatches(size: int, limit: int | None) -> Iterator[slice]:
    """Splits `size` examples into slices of at most `limit` (None: a single slice); none for an empty batch."""
    step = max(size, 1) if limit is None else limit
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
