"""Checks that a model may be trained under per-example bounds, on synthetic examples, before data are touched.

A bound limits an example's own gradient. It does not cover an example's effect on another's gradient (mixture of
experts with limited capacity, a loss that pulls the examples of a class together), or on values that get no noise (a
buffer, a moving average). Layer types seldom reveal this, so the model is run on synthetic examples.

The checks cover:
* hooks on gradients, which per-example gradients do not run: refused;
* state made in the first pass and kept, if it depends on the examples of that pass: refused;
* any change by a forward and backward pass in training mode (buffers, parameters, attributes, state of the loss):
  refused, because it is a release without noise, and carries one batch into the next;
* draws from a random generator, which depend on an example's place: refused, except draws by record
  (`drawn_functions.py`);
* data-dependent control flow, in which Python code reads tensor values, and tensors whose shape depends on values, as
  words that a mask selects: such a model gets one example at a time, or fixed answers if its branches lead to the same
  gradients (`branches.py`);
* examples that change places by their values, as sorted by length: kept apart, by an engine that calls the model with
  one example;
* examples that affect each other's gradients: in `choose.py`, by comparing batches with and without an example.

This is a best-effort search: it finds effects that show on synthetic examples, in batches of a few sizes, including
the largest that the run is expected to have. It cannot detect a branch on a batch size that was not tried, or on values
that synthetic examples do not reach (if Python reads none); state outside of the model and the loss, in a global
variable or a file, or in an object that neither exposes its content nor can be pickled; effects that begin only after
many steps; or code written to pass the checks. Training an untrusted model means trusting its author.
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
from torch.utils import _pytree as pytree  # private, as in `inputs.py`
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...inputs import called, tensors_in
from ...randomness.record_draws import entries, one_pass
from ..numerics.full_precision import refuse_half_precision
from ..power_iteration import buffers_of_power_iterations
from ..reference import Loss
from .branches import BranchAnswers
from .fingerprint import digest, own_attributes
from .synthetic_examples import SyntheticBatch, mapped, tensors_of

# ATen operations behind tensor.item(), bool(tensor) and torch.equal.
_READS = {"_local_scalar_dense", "equal", "is_nonzero"}
# Operations with an output of a shape that depends on values if it is one of their masks that does.
_SELECTS = {"index", "masked_select"}
# Operations that select entries of a tensor by their numbers.
_BY_PLACE = {"index", "index_select", "gather"}
# Functions that expose a tensor's memory: later reads of it are not PyTorch operations, and cannot be observed.
_READS_AS_MEMORY = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage"}

# Number of classes for which a loss is tried, one by one.
_CLASSES_TRIED = 65_536
# Classes per batch besides class 0: in the mean over more, the weight of a single class would hardly show.
_CLASSES_AT_ONCE = 64
_ENTRIES_AT_ONCE = 2**24


class Refused(ValueError):
    """A model that must not be trained under per-example bounds; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class Findings:
    """Findings of passes over synthetic examples.

    Attributes:
        reads: the operation that hands a tensor value to Python; empty if none does.
        draws: True if a random layer draws, keyed by record.
        numbers: length of a loss that has as many numbers for any number of examples; 0 for other losses.
        orders: the operation that selects examples of the batch by their values; empty if none does.
    """

    reads: str
    draws: bool
    numbers: int = 0
    orders: str = ""


def refuse_model(model: nn.Module) -> None:
    """Refuses faults visible without a forward pass: backward hooks, and trained parameters in half precision.

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


def try_passes(model: nn.Module, loss: Loss, examples: SyntheticBatch) -> Findings:
    """Runs forward and backward passes over synthetic examples.

    Args:
        model: a copy of the user's, in its own mode.
        loss: per-example loss.
        examples: a few.

    Raises:
        Refused: if the model or the loss changes in a pass, or draws at random by place.
    """
    # After this pass, the model holds everything that it computes once and keeps, such as a table of positions.
    begun = _pass(model, loss, examples)
    if not begun.losses.isfinite().all():
        raise ArithmeticError("its loss is not finite")
    refuse_division_by_a_batch(loss, begun.outputs, examples.targets)
    before = _state(model, loss)
    first = _pass(model, loss, examples)
    # Other examples in between: a model that carries one batch into the next then gives another result on the first.
    # The same number, because state computed once per size, such as a mask, may be kept.
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
    if first.random or not _agree(first, again):
        random_source = first.random or f"{_differing(model, examples)}, which differs in two equal passes"
        raise Refused(
            f"a model must draw nothing at random but what is drawn for each example by itself, got {random_source}: "
            "such draws depend on an example's place in its batch, and removing one example would move all others'; "
            "draw by dropout, torch.rand, torch.randn or torch.bernoulli, without a generator and with the batch as "
            "first dimension, or put that layer in evaluation mode"
        )
    numbers = _fixed_numbers(model, loss, examples, begun.losses.shape)
    return Findings(first.reads, first.draws, numbers, first.orders)


def _fixed_numbers(model: nn.Module, loss: Loss, examples: SyntheticBatch, shape: torch.Size) -> int:
    """Returns the length of a loss of a batch if it is the same for a single example, such as a mean by position.

    Engines of whole batches take a loss of as many numbers as examples for a loss of each. Such a mean has their number
    by chance, and divides every example's gradient by it.
    """
    if len(shape) != 1 or shape[0] in (1, len(examples.keys)):
        return 0
    first = examples.chosen(torch.arange(1, device=examples.keys.device))
    return shape[0] if _pass(model, loss, first).losses.shape == shape else 0


def try_first(model: nn.Module, loss: Loss, begun: SyntheticBatch, examples: SyntheticBatch) -> None:
    """Refuses state that depends on the first batch and is kept: two copies start with different batches.

    Args:
        model: a copy of the user's that has seen no batch, in its own mode.
        loss: per-example loss, likewise.
        begun: first batch of one copy; the other copy starts with other examples, and fewer.
        examples: batch on which both are then compared.

    Raises:
        Refused: if their results differ.
    """
    drawn, answers = _generators(begun.inputs.device), []
    for batch in (begun, begun.others(max(1, len(begun.keys) - 2))):
        for generator, state in drawn:  # draws that are made once and kept are the same for both
            generator.set_state(state)
        copied, own_loss = fresh(model), copied_loss(loss)
        _pass(copied, own_loss, batch)
        answers.append(_pass(copied, own_loss, examples))
    if not _agree(*answers):
        raise Refused(
            "a model and its loss must keep nothing of their first batch, got one that answers differently after "
            "another: what it keeps would be released without noise, and carry one example into another's gradient; "
            "compute it in the model's `__init__`, from public data"
        )


def value_read(model: nn.Module, loss: Loss, examples: SyntheticBatch, answers: Sequence[bool]) -> str:
    """Returns the operation that hands a value to Python in a pass with fixed answers; empty if none does."""
    with BranchAnswers(answers):
        return _pass(model, loss, examples).reads


def refuse_division_by_a_batch(loss: Loss, outputs: Any, targets: Tensor) -> None:
    """Refuses a loss whose mean divides by a batch total, such as the class weights or the number of counted targets.

    On a batch of one, that total cancels the example's own weight, and is zero for an ignored target.

    Args:
        loss: per-example loss.
        outputs: a model's outputs, in any form, for examples with these targets.
        targets: targets of the examples.

    Raises:
        Refused: with the remedy.
    """
    with torch.no_grad():
        if loss(outputs, targets).dim():  # a loss for each example, or several, which are added up
            return
    _refuse_division(loss, outputs, targets)
    # Each class once, because a single class may have another weight. Its number may occur in a target of any form.
    scores = [tensor for tensor in tensors_of(outputs) if tensor.dim() > 1]
    if targets.is_cuda:  # on CUDA, an invalid class number makes the device unusable for the process
        scores = [tensor for tensor in scores if tensor.dim() == 2]
    classes = max((size for tensor in scores for size in (tensor.shape[1], tensor.shape[-1])), default=0)
    at_once = _ENTRIES_AT_ONCE // max((tensor[:1].numel() for tensor in scores), default=1)
    at_once = max(1, min(at_once, _CLASSES_AT_ONCE))
    for part in torch.arange(1, min(classes, _CLASSES_TRIED), device=targets.device).split(at_once):
        numbers = torch.cat([part.new_zeros(1), part]).to(targets.dtype)
        size, target_shape = len(numbers), targets.shape[1:]
        of_each = mapped(outputs, lambda tensor: tensor[:1].expand(size, *tensor.shape[1:]))  # noqa: B023 -- called here
        try:
            _refuse_division(loss, of_each, numbers.reshape(-1, *[1] * len(target_shape)).expand(size, *target_shape))
        except Refused:
            raise
        except Exception:  # anything that a loss raises on an invalid class number
            return


def _refuse_division(loss: Loss, outputs: Any, targets: Tensor) -> None:
    """Refuses a loss that is neither the mean nor the sum of these examples' single losses."""
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
class _PassFindings:
    """Observations of a pass.

    Attributes:
        outputs: outputs of the model, in any form.
        losses: return value of the loss.
        gradients: sum and norm of each trained parameter's gradient, by which gradients are compared.
        random: the layer that drew at random, and the operation; empty if none did.
        reads: the operation by which a value was handed to Python; empty if none was.
        draws: True if something was drawn by record.
        orders: the operation that selected examples of the batch by their values; empty if none did.
    """

    outputs: Any
    losses: Tensor
    gradients: Float[Tensor, "parameters 2"]
    random: str
    reads: str
    draws: bool
    orders: str


def _pass(model: nn.Module, loss: Loss, examples: SyntheticBatch) -> _PassFindings:
    """Runs a pass as training does, with gradients, because parts of a model may depend on them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # `one_pass` draws from hashes: `_Watch` could not distinguish PyTorch's own operation from any other draw.
    with (
        torch.enable_grad(),
        entries(examples.keys),
        _WatchMemory() as memory,
        one_pass() as drawn,
        _Watch(model, (*tensors_in(examples.inputs), examples.targets)) as watch,
    ):
        outputs = called(model, examples.inputs)
        losses = loss(outputs, examples.targets)
        gradients: Sequence[Tensor | None] = [None] * len(trained)
        if losses.requires_grad:
            gradients = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
    none = losses.new_zeros(2)
    summaries = [none if g is None else torch.stack([g.sum(), g.norm()]).to(none) for g in gradients]
    draws = drawn is not None and drawn.calls > 0
    sizes, reads = torch.stack([none, *summaries]), watch.reads or memory.reads
    return _PassFindings(outputs, losses.detach(), sizes, watch.random, reads, draws, watch.orders)


def fresh(model: nn.Module) -> nn.Module:
    """Returns a copy that shares the model's parameters: a large model is in memory once."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def copied_loss(loss: Loss) -> Loss:
    """Returns a copy of a loss object; a function, or an object that cannot be copied, is returned itself.

    State that it then keeps of synthetic examples, before any data, shows in `loss_state`.
    """
    try:
        return copy.deepcopy(loss)
    except Exception:  # anything that a user's object raises
        return loss


def loss_state(loss: Loss) -> str:
    """Returns a digest of a loss's state: an object's content, and the closure variables of functions."""
    leaves: list[object] = []
    waiting, met = [loss], set[int]()
    while waiting:
        component: Any = waiting.pop()
        if id(component) in met:
            continue
        met.add(id(component))
        if isinstance(component, types.FunctionType):
            # Without its code and the globals it names, whose inspection takes a hundred times as long.
            cells = [cell.cell_contents for cell in component.__closure__ or () if cell != types.CellType()]
            waiting += [
                *cells,
                *(component.__defaults__ or ()),
                *(component.__kwdefaults__ or {}).values(),
                *vars(component).values(),
            ]
        elif isinstance(component, functools.partial):
            waiting += [component.func, *component.args, *component.keywords.values()]
        elif isinstance(component, types.MethodType):
            waiting += [component.__func__, component.__self__]
        else:
            leaves.append(component)
    return digest(leaves, hidden="pickle")


def _generators(device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
    """Returns PyTorch's own generators that a pass on a device may draw from, with their states."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return [(generator, generator.get_state()) for generator in generators]


class Untrained:
    """Copies of buffers and frozen parameters, to detect changes: they are released with the model, without noise."""

    def __init__(self, model: nn.Module) -> None:
        """Stores the copies."""
        self._model, self._before = model, _untrained(model)

    def check(self) -> None:
        """Raises `Refused` if a buffer or frozen parameter has changed since."""
        after = _untrained(self._model)
        for name in self._before.keys() | after.keys():
            if name not in self._before or name not in after or not _identical(self._before[name], after[name]):
                raise Refused(
                    f"training must change trained parameters only, got another '{name}': it was changed in forward "
                    "passes and would be released without noise; take a layer without statistics, or put it in "
                    "evaluation mode"
                )


class _Watch(TorchDispatchMode):
    """Records operations that draw at random, and those that hand a value of an example to Python.

    A shape that depends on values is such a value too: the number of words that a mask selects may be a multiple of the
    number of examples in one batch and not in another, and on synthetic examples the mask may select all.
    """

    def __init__(self, model: nn.Module, of_examples: Sequence[Tensor]) -> None:
        super().__init__()
        self.random, self.reads, self.orders = "", "", ""
        self._size = len(of_examples[0])
        # Tensors that depend on the examples: a constant mask selects the same of every batch.
        self._dependent: Any = WeakIdKeyDictionary()
        self._dependent.update(dict.fromkeys(of_examples))
        self._names = {module: name for name, module in model.named_modules()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # PyTorch's own tag of operations that read a generator, which replaces a list of random layers.
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and not self.random
            and not _draws_nothing(func, args, kwargs)
        ):
            self.random = f"{self._under_way()} by {name}"
        if name in _READS and not self.reads:
            self.reads = name
        arguments = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        output = func(*args, **(kwargs or {}))
        if any(value in self._dependent for value in arguments):
            self._dependent.update(dict.fromkeys(tensors_of(output)))
            if torch.Tag.dynamic_output_shape in func.tags and not self.reads and self._selects(name, arguments):
                self.reads = name
            if not self.orders and self._reorders(name, args, kwargs or {}):
                self.orders = name
        return output

    def _reorders(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether an operation selects entries of the batch at places that depend on the examples.

        Sorted by their lengths, say, examples of equal lengths stay where they are, and others do not.
        """
        if name not in _BY_PLACE or self._size == 1 or len(args) < 2:
            return False
        source, dim = args[0], kwargs.get("dim", args[1])
        places: Any = args[1][0] if name == "index" else kwargs.get("index", args[-1])
        if name != "index" and dim not in (0, -source.dim()):
            return False
        of_batch = source.dim() and source.shape[0] % self._size == 0 and source in self._dependent
        return bool(of_batch and isinstance(places, Tensor) and places in self._dependent)

    def _selects(self, name: str, arguments: Sequence[Tensor]) -> bool:
        """Returns whether the shape of an operation's output depends on values of the examples."""
        if name not in _SELECTS:
            return True
        masks = [value for value in arguments[1:] if value.dtype in (torch.bool, torch.uint8)]
        return any(value in self._dependent for value in masks)

    def _under_way(self) -> str:
        """Returns the layer whose code is running: the innermost in Python's call stack."""
        frame = inspect.currentframe()
        while frame is not None:
            layer = frame.f_locals.get("self")
            if isinstance(layer, nn.Module) and layer in self._names:
                return _with_settings(self._names[layer], layer)
            frame = frame.f_back
        return "the loss or the backward pass"


def _differing(model: nn.Module, examples: SyntheticBatch) -> str:
    """Returns the first layer whose outputs differ between two equal passes; the loss if none do."""
    passes: list[list[tuple[str, list[Tensor]]]] = []
    for _ in range(2):
        put_out: list[tuple[str, list[Tensor]]] = []
        handles = [
            layer.register_forward_hook(functools.partial(_note, put_out, name))
            for name, layer in model.named_modules()
        ]
        with torch.no_grad(), entries(examples.keys), one_pass():
            called(model, examples.inputs)
        for handle in handles:
            handle.remove()
        passes.append(put_out)
    for (name, ones), (_, others) in zip(*passes, strict=False):
        if len(ones) != len(others) or not all(map(_identical, ones, others)):
            return _with_settings(name, model.get_submodule(name))
    return "the loss"


def _note(put_out: list[tuple[str, list[Tensor]]], name: str, _layer: nn.Module, _given: object, output: Any) -> None:
    put_out.append((name, [tensor.detach().clone() for tensor in tensors_of(output)]))


def _owned(model: nn.Module, changed: str) -> str:
    """Returns the changed item, with the settings of the layer that owns a buffer or a parameter."""
    kind, _, name = changed.partition(" '")
    if kind not in ("buffer", "parameter"):
        return changed
    owner = name.rstrip("'").rpartition(".")[0]
    return f"{changed} of {_with_settings(owner, model.get_submodule(owner))}"


def _draws_nothing(func: Any, args: Sequence[object], kwargs: Mapping[str, object] | None) -> bool:
    """Returns whether an operation, such as attention, is called without dropout, or as in evaluation mode."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "training", "train"):
            switch = args[place] if place < len(args) else (kwargs or {}).get(argument.name, argument.default_value)
            return switch is False or (argument.name == "dropout_p" and switch == 0)
    return False


class _WatchMemory(TorchFunctionMode):
    """Records functions that hand a tensor's memory to Python, or to a library that is not PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_AS_MEMORY and not self.reads:
            self.reads = name
        return func(*args, **(kwargs or {}))


def _state(model: nn.Module, loss: Loss) -> dict[str, str]:
    """Returns digests of all content of the model's modules, by place, and of the loss."""
    digests = {"state of the loss": loss_state(loss)}
    for name, module in model.named_modules():
        for key, value in own_attributes(module).items():
            digests[f"attribute '{key}' of {_place(name, module)}"] = digest(value, hidden="pickle")
    for kind, tensors in (("buffer", model.named_buffers()), ("parameter", model.named_parameters())):
        for name, tensor in tensors:
            digests[f"{kind} '{name}'"] = digest(tensor)
    return digests


def _untrained(model: nn.Module) -> dict[str, Tensor]:
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    kept = {**dict(model.named_buffers()), **frozen}
    for name in buffers_of_power_iterations(model):  # a run advances them itself
        kept.pop(name, None)
    return {name: t.detach().clone() for name, t in kept.items()}


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN


def _agree(a: _PassFindings, b: _PassFindings) -> bool:
    """Returns whether two passes agree: losses exactly on a CPU, gradients and a GPU's losses up to summation order."""
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
