"""Checks that a model may be trained under per-example bounds, on made-up examples, before data are touched.

A bound limits one example's own gradient. It says nothing where an example also shows in another's gradient (experts
with limited places in a batch, a loss that pulls the examples of a class together), or in something that gets no noise
(a buffer, a moving average). Layer types seldom tell, so the model is tried.

What is looked for:
* hooks on gradients, which per-example gradients do not run: refused;
* what is made in the first pass and kept, if it follows from the examples of that pass: refused;
* whatever a pass forward and backward changes in training mode (buffers, parameters, attributes, what a loss holds):
  refused, because it is a release without noise, and carries one batch into the next;
* draws from a random generator, which depend on an example's place: refused, but for what is drawn by record
  (`drawn_functions.py`);
* values of tensors read by Python code, on which a batch would branch as one: such a model gets one example at a time;
* examples that show in each other's gradients: in `choose.py`, by comparing batches with and without one.

This is a search, and best effort: it finds what shows on made-up examples, in batches of a few sizes, one of them the
run's largest. It cannot see a branch on a batch size that was not tried, or on values that made-up examples do not
reach (where Python reads none); state that lives outside of the model and the loss, in a global variable or a file, or
in an object that neither shows its content nor can be pickled; what begins only after many steps; or code that is
written to pass it. Whoever trains a stranger's model takes the stranger's word.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as _of_all_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...randomness.record_draws import entries, one_pass
from ..numerics.full_precision import refuse_half_precision
from ..power_iteration import buffers_of_power_iterations
from ..reference import Loss
from .fingerprint import digest, own_attributes
from .synthetic_examples import MadeUp, mapped, tensors_of

# ATen operations behind tensor.item(), bool(tensor) and torch.equal.
_READS = {"_local_scalar_dense", "equal", "is_nonzero"}
# Functions that hand over memory, reads of which are no operation and cannot be seen.
_READS_AS_MEMORY = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage"}

# Targets of which a loss is asked one by one.
_CLASSES_TRIED = 65_536
# So many at once, beside class 0: the mean of more dilutes the weight of one of them.
_CLASSES_AT_ONCE = 64
_ENTRIES_AT_ONCE = 2**24


class Refused(ValueError):
    """A model that must not be trained under per-example bounds; the message says why, and the way out."""


@dataclass(frozen=True)
class Findings:
    """What passes over made-up examples showed.

    Attributes:
        reads: the operation by which a value is handed to Python; empty where none is.
        draws: whether something is drawn by record.
    """

    reads: str
    draws: bool


def refuse_model(model: nn.Module) -> None:
    """Refuses what shows without a forward pass: backward hooks, and trained parameters in half precision.

    Raises:
        ValueError: for a hook on the gradient of a parameter or in the backward pass of a module, or for trained
            parameters in half precision.
    """
    refuse_half_precision(model)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Refused(
                f"parameters must have no hooks, got one at '{name}': per-example gradients do not run it, so training "
                "would not be what it says; remove it, or do in the loss what it does"
            )
    if everywhere := [*_of_all_modules._global_backward_hooks, *_of_all_modules._global_backward_pre_hooks]:
        raise Refused(
            f"there must be no backward hooks on all modules, got {len(everywhere)}: per-example gradients do not run "
            "them; remove what torch.nn.modules.module.register_module_full_backward_hook returned"
        )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise Refused(
                f"modules must have no backward hooks, got one at {_place(name, module)}: per-example gradients do not "
                "run it; remove it"
            )


def try_passes(model: nn.Module, loss: Loss, examples: MadeUp) -> Findings:
    """Passes over made-up examples, forward and backward.

    Args:
        model: a copy of the user's, in its own mode.
        loss: per-example loss.
        examples: a few.

    Raises:
        Refused: when the model or the loss changes in a pass, or draws at random by place.
    """
    # After this pass a model has what it computes once and keeps, as a table of positions.
    begun = _pass(model, loss, examples)
    if not begun.losses.isfinite().all():
        raise ArithmeticError("its loss is not finite")
    refuse_division_by_a_batch(loss, begun.outputs, examples.targets)
    before = _state(model, loss)
    first = _pass(model, loss, examples)
    # Others in between: a model that carries one batch into the next answers the first one differently then. As many,
    # because what is computed once for a size, as a mask, may be kept.
    _pass(model, loss, examples.others(len(examples.keys)))
    after = _state(model, loss)
    again = _pass(model, loss, examples)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise Refused(
            f"a pass in training mode must change nothing, got another {_owned(model, changed[0])} after one: it would "
            "be released without noise, and carry one example into another's gradient; take a layer without "
            "statistics, or put that module in evaluation mode"
        )
    if first.random or not _alike(first, again):
        what = first.random or f"{_differing(model, examples)}, which differs in two equal passes"
        raise Refused(
            f"a model must draw nothing at random but what is drawn for each example by itself, got {what}: such draws "
            "depend on an example's place in its batch, and removing one example would move all others'; draw by "
            "dropout, torch.rand, torch.randn or torch.bernoulli, without a generator and with the batch as first "
            "dimension, or put that layer in evaluation mode"
        )
    return Findings(first.reads, first.draws)


def try_first(model: nn.Module, loss: Loss, begun: MadeUp, examples: MadeUp) -> None:
    """Refuses what follows from the first batch and is kept: two copies begin with different ones.

    Args:
        model: a copy of the user's that has seen no batch, in its own mode.
        loss: per-example loss, likewise.
        begun: what one copy begins with; the other begins with others, and fewer.
        examples: what both are then asked.

    Raises:
        Refused: when they answer differently.
    """
    drawn, answers = _generators(begun.inputs.device), []
    for batch in (begun, begun.others(max(1, len(begun.keys) - 2))):
        for generator, state in drawn:  # what is drawn once and kept is the same for both
            generator.set_state(state)
        copied, own_loss = fresh(model), copied_loss(loss)
        _pass(copied, own_loss, batch)
        answers.append(_pass(copied, own_loss, examples))
    if not _alike(*answers):
        raise Refused(
            "a model and its loss must keep nothing of their first batch, got one that answers differently after "
            "another: what it keeps would be released without noise, and carry one example into another's gradient; "
            "compute it in the model's `__init__`, from public data"
        )


def refuse_division_by_a_batch(loss: Loss, outputs: Any, targets: Tensor) -> None:
    """Refuses a loss whose mean divides by something of the batch, as class weights or targets that are not ignored.

    Of one example that cancels its own weight, and ignored examples have no loss at all.

    Args:
        loss: per-example loss.
        outputs: of a model, in whatever form, for examples with these targets.
        targets: of the examples.

    Raises:
        Refused: with the way out.
    """
    with torch.no_grad():
        if loss(outputs, targets).dim():  # one for each example, or several, which are added up
            return
    _refuse_division(loss, outputs, targets)
    # Each class once, because weights may differ in one of them alone. Its number may stand in a target of any form.
    found = [tensor for tensor in tensors_of(outputs) if tensor.dim() > 1]
    if targets.is_cuda:  # where a number that is no class ends the process's use of the device
        found = [tensor for tensor in found if tensor.dim() == 2]
    classes = max((size for tensor in found for size in (tensor.shape[1], tensor.shape[-1])), default=0)
    at_once = _ENTRIES_AT_ONCE // max((tensor[:1].numel() for tensor in found), default=1)
    at_once = max(1, min(at_once, _CLASSES_AT_ONCE))
    for part in torch.arange(1, min(classes, _CLASSES_TRIED), device=targets.device).split(at_once):
        numbers = torch.cat([part.new_zeros(1), part]).to(targets.dtype)
        size, rest = len(numbers), targets.shape[1:]
        of_each = mapped(outputs, lambda tensor: tensor[:1].expand(size, *tensor.shape[1:]))  # noqa: B023 -- called here
        try:
            _refuse_division(loss, of_each, numbers.reshape(-1, *[1] * len(rest)).expand(size, *rest))
        except Refused:
            raise
        except Exception:  # whatever a loss raises on numbers that are no class of it
            return


def _refuse_division(loss: Loss, outputs: Any, targets: Tensor) -> None:
    """Refuses a loss that is neither the mean nor the sum of that of each of these examples."""
    with torch.no_grad():
        together = loss(outputs, targets)
        alone = torch.stack([loss(_row(outputs, i), t[None]).sum() for i, t in enumerate(targets)])
    fits = [torch.isclose(together, value, rtol=1e-4, atol=1e-6) for value in (alone.mean(), alone.sum())]
    if together.isfinite() and not any(fits):
        raise Refused(
            "a loss of a batch must be the mean or the sum of its examples' losses, got "
            f"{float(together):.4g} where their mean is {float(alone.mean()):.4g}: it divides by something of the "
            "batch, as class weights or targets that are not ignored, which of one example cancels; give one loss "
            "per example, as by reduction='none'"
        )


def _row(outputs: Any, row: int) -> Any:
    return mapped(outputs, lambda tensor: tensor[row : row + 1])


@dataclass(frozen=True)
class _Seen:
    """What one pass showed.

    Attributes:
        outputs: of the model, in whatever form.
        losses: as the loss gave them.
        gradients: of each trained parameter's gradient its sum and norm, by which another one is told.
        random: the layer that drew at random, and the operation; empty where none did.
        reads: the operation by which a value was handed to Python; empty where none was.
        draws: whether something was drawn by record.
    """

    outputs: Any
    losses: Tensor
    gradients: Float[Tensor, "parameters 2"]
    random: str
    reads: str
    draws: bool


def _pass(model: nn.Module, loss: Loss, examples: MadeUp) -> _Seen:
    """One pass as a run takes it, of which a part may be for passes with gradients alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # `one_pass` draws from hashes: PyTorch's own operation would look to `_Watch` like any other draw.
    with (
        torch.enable_grad(),
        entries(examples.keys),
        _WatchMemory() as memory,
        one_pass() as drawn,
        _Watch(model) as watch,
    ):
        outputs = model(examples.inputs)
        losses = loss(outputs, examples.targets)
        found: Sequence[Tensor | None] = [None] * len(trained)
        if losses.requires_grad:
            found = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
    none = losses.new_zeros(2)
    told = [none if g is None else torch.stack([g.sum(), g.norm()]).to(none) for g in found]
    draws = drawn is not None and drawn.calls > 0
    return _Seen(outputs, losses.detach(), torch.stack([none, *told]), watch.random, watch.reads or memory.reads, draws)


def fresh(model: nn.Module) -> nn.Module:
    """A copy that shares the model's parameters alone: a large model is in memory once."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def copied_loss(loss: Loss) -> Loss:
    """A copy of a loss that is an object; a function, or what cannot be copied, as it is.

    What that remembers it then has of made-up examples, before any data: `loss_state` shows it.
    """
    try:
        return copy.deepcopy(loss)
    except Exception:  # whatever a user's object raises
        return loss


def loss_state(loss: Loss) -> str:
    """A digest of what a loss holds: an object's content, and of functions the variables of their closures."""
    found: list[object] = []
    waiting, met = [loss], set[int]()
    while waiting:
        one: Any = waiting.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, types.FunctionType):
            # Not its code, and what that refers to by name, which takes a hundred times as long to look into.
            cells = [cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType()]
            waiting += [*cells, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), *vars(one).values()]
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.MethodType):
            waiting += [one.__func__, one.__self__]
        else:
            found.append(one)
    return digest(found, strict=False)


def _generators(device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
    """PyTorch's own generators that a pass on a device may draw from, with their states."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return [(generator, generator.get_state()) for generator in found]


class Untrained:
    """Copies of buffers and frozen parameters, to find a change: they are released with the model, without noise."""

    def __init__(self, model: nn.Module) -> None:
        """Keeps a copy."""
        self._model, self._before = model, _untrained(model)

    def check(self) -> None:
        """Raises `Refused` where any of it has changed since."""
        after = _untrained(self._model)
        for name in self._before.keys() | after.keys():
            if name not in self._before or name not in after or not _identical(self._before[name], after[name]):
                raise Refused(
                    f"training must change trained parameters only, got another '{name}': it was changed in forward "
                    "passes and would be released without noise; take a layer without statistics, or put it in "
                    "evaluation mode"
                )


class _Watch(TorchDispatchMode):
    """Notes operations that draw at random, and those that hand a value to Python."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.random, self.reads = "", ""
        self._names = {module: name for name, module in model.named_modules()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # PyTorch's own tag of operations that read a generator: no list of random layers is kept here.
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and not self.random
            and not _draws_nothing(func, args, kwargs)
        ):
            self.random = f"{self._under_way()} by {name}"
        if name in _READS and not self.reads:
            self.reads = name
        return func(*args, **(kwargs or {}))

    def _under_way(self) -> str:
        """The layer whose code is running, which is the innermost that Python's stack shows."""
        frame = inspect.currentframe()
        while frame is not None:
            layer = frame.f_locals.get("self")
            if isinstance(layer, nn.Module) and layer in self._names:
                return _with_settings(self._names[layer], layer)
            frame = frame.f_back
        return "the loss or the backward pass"


def _differing(model: nn.Module, examples: MadeUp) -> str:
    """The first layer that puts out other numbers in the second of two equal passes; the loss where none does."""
    passes: list[list[tuple[str, list[Tensor]]]] = []
    for _ in range(2):
        put_out: list[tuple[str, list[Tensor]]] = []
        handles = [
            layer.register_forward_hook(functools.partial(_note, put_out, name))
            for name, layer in model.named_modules()
        ]
        with torch.no_grad(), entries(examples.keys), one_pass():
            model(examples.inputs)
        for handle in handles:
            handle.remove()
        passes.append(put_out)
    for (name, ones), (_, others) in zip(*passes, strict=False):
        if len(ones) != len(others) or not all(map(_identical, ones, others)):
            return _with_settings(name, model.get_submodule(name))
    return "the loss"


def _note(put_out: list[tuple[str, list[Tensor]]], name: str, _layer: nn.Module, _given: object, found: Any) -> None:
    put_out.append((name, [tensor.detach().clone() for tensor in tensors_of(found)]))


def _owned(model: nn.Module, changed: str) -> str:
    """What changed, with the settings of the layer that a buffer or a parameter is of."""
    kind, _, name = changed.partition(" '")
    if kind not in ("buffer", "parameter"):
        return changed
    owner = name.rstrip("'").rpartition(".")[0]
    return f"{changed} of {_with_settings(owner, model.get_submodule(owner))}"


def _draws_nothing(func: Any, args: Sequence[object], kwargs: Mapping[str, object] | None) -> bool:
    """Whether an operation, such as attention, is called without dropout, or as in evaluation mode."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "training", "train"):
            given = args[place] if place < len(args) else (kwargs or {}).get(argument.name, argument.default_value)
            return given is False or (argument.name == "dropout_p" and given == 0)
    return False


class _WatchMemory(TorchFunctionMode):
    """Notes functions that hand a tensor's memory to Python, or to a library that is not PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_AS_MEMORY and not self.reads:
            self.reads = name
        return func(*args, **(kwargs or {}))


def _state(model: nn.Module, loss: Loss) -> dict[str, str]:
    """A digest of everything that a module holds, by its place, and of the loss."""
    found = {"state of the loss": loss_state(loss)}
    for name, module in model.named_modules():
        for key, value in own_attributes(module).items():
            found[f"attribute '{key}' of {_place(name, module)}"] = digest(value, strict=False)
    for kind, tensors in (("buffer", model.named_buffers()), ("parameter", model.named_parameters())):
        for name, tensor in tensors:
            found[f"{kind} '{name}'"] = digest(tensor)
    return found


def _untrained(model: nn.Module) -> dict[str, Tensor]:
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    kept = {**dict(model.named_buffers()), **frozen}
    for name in buffers_of_power_iterations(model):  # which a run moves itself
        kept.pop(name, None)
    return {name: t.detach().clone() for name, t in kept.items()}


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN


def _alike(a: _Seen, b: _Seen) -> bool:
    """Equal losses, up to the order in which a GPU adds up; gradients up to that on several threads too."""
    if a.losses.shape != b.losses.shape:
        return False
    size = a.gradients.abs().nan_to_num().max()
    near = torch.allclose(a.gradients, b.gradients, rtol=1e-6, atol=1e-6 * float(size), equal_nan=True)
    if a.losses.is_cuda:
        return near and torch.allclose(a.losses, b.losses, rtol=1e-6, atol=1e-9, equal_nan=True)
    return near and _identical(a.losses, b.losses)


def _with_settings(name: str, module: nn.Module) -> str:
    settings = " ".join(module.extra_repr().split())
    where = f"'{name}'" if name else "the model itself"
    return f"{where} ({type(module).__name__}({settings}))"


def _place(name: str, module: nn.Module) -> str:
    return f"'{name}' ({type(module).__name__})" if name else f"the model itself ({type(module).__name__})"
