"""Narrowing: the view of a target that an attack gets, without the fields that its threat model does not grant.

A check does not merely hide a withheld field: the view does not hold its value, nor anything that leads to further
values:

- Functions are handed over as plain functions, without the object that a method is bound to. They take plain tensors
  alone, because PyTorch shows the weights to any other operand (`__torch_function__`). They refuse to compute under a
  mode or hook of the attack, to which PyTorch hands every operand, private data included.
- Tensors own their memory, because a slice reaches the whole tensor that it was cut from as `_base`.

Python cannot withhold the variables that a function closes over, frames, the garbage collector, and anything that can
be imported or patched. An attack that digs there is fraud, not a mistake, so attacks that are not ours run in a process
of their own (`leakbench.audit.isolation`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn, overrides
from torch.nn.modules import module as modules
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from ..membership.shadow_models import Shadows
from ..threat_model.requires import MEANING, Access, AccessError, Controls, Knows, Requirements
from .observation import Examples, Steps, Target

T = TypeVar("T", bound=Target)


def narrow(target: T, requires: Requirements, known: Sequence[object] | None = None) -> T:
    """Returns a view of `target` in which reading a field that `requires` does not grant raises `AccessError`.

    Args:
        target: the attack's target; not changed.
        requires: the needs that the attack declared.
        known: modes and hooks that may be active while the target's functions compute; None for those active now.

    Returns:
        An instance of a subclass of the target's class, without the withheld values.
    """
    known = watching() if known is None else known
    # A view of a view stays as narrow as it was.
    withheld: dict[str, Access | Knows | Controls] = dict(vars(target).get("_withheld", {}))
    for slot in fields(cast(Any, target)):
        need = slot.metadata.get("needs")
        if need is not None and not requires.grants(need):
            withheld[slot.name] = need
    shown = {name: _alone(value) for name, value in vars(target).items() if name not in withheld}
    kinds = _kinds(shown.values())
    shown = {name: _plain_function(value, kinds, known) if callable(value) else value for name, value in shown.items()}
    shown = {name: _narrowed(value, requires, known) for name, value in shown.items()}
    return cast(T, view_of(_plain_class(type(target)), shown, withheld))


def view_of(kind: type[Target], shown: Mapping[str, Any], withheld: Mapping[str, Access | Knows | Controls]) -> Target:
    """Rebuilds a view from its parts, in this process or another.

    Args:
        kind: class of the target.
        shown: values by field.
        withheld: the need of each withheld field.
    """
    # Neither the constructor, whose checks read fields withheld here, nor setattr, which a frozen class refuses.
    view = object.__new__(_view_class(kind))
    vars(view).update(shown, _withheld=dict(withheld))
    return cast(Target, view)


def parts_of(view: Target) -> tuple[type[Target], dict[str, Any], dict[str, Access | Knows | Controls]]:
    """Returns the parts of a view for `view_of`: the class of its target, values by field, needs of withheld fields."""
    shown = dict(vars(view))
    withheld = shown.pop("_withheld", {})
    return _plain_class(type(view)), shown, withheld


def enabled_by(need: Access | Knows | Controls) -> str:
    """Returns the words of an error message: the meaning of `need`, and the field of the target that would grant it."""
    for kind in filter(is_dataclass, Target.__subclasses__()):
        for slot in fields(cast(Any, kind)):
            if slot.metadata.get("needs") == need:
                return f"{MEANING[need]} ({type(need).__name__}.{need.name}, field {kind.__name__}.{slot.name})"
    return f"{MEANING[need]} ({type(need).__name__}.{need.name})"


def _narrowed(value: Any, requires: Requirements, known: Sequence[object]) -> Any:
    """Narrows the targets inside of a field, so that they show no more than the first target does."""
    if isinstance(value, Target):
        return narrow(value, requires, known)
    if isinstance(value, Mapping):
        return {name: _narrowed(one, requires, known) for name, one in value.items()}
    if isinstance(value, Tensor | str | tuple) and not _holds_targets(value):
        return value
    if isinstance(value, Iterable) and not isinstance(value, Examples):
        # A generator, so that a lazy transcript stays lazy.
        return Steps(lambda: (_narrowed(one, requires, known) for one in value), lambda: len(cast(Any, value)))
    return value


def _holds_targets(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(one, Target) or _holds_targets(one) for one in value)


def _alone(value: Any) -> Any:
    """Returns a field's value with tensors that own their memory and have no graph: they lead to nothing else."""
    if isinstance(value, Tensor):
        return value if _owns_its_memory(value) else value.detach().clone()
    if isinstance(value, Examples | Shadows):
        parts = {slot.name: getattr(value, slot.name) for slot in fields(value)}
        apart = {name: _alone(part) for name, part in parts.items()}
        return value if all(apart[name] is part for name, part in parts.items()) else type(value)(**apart)
    if isinstance(value, Mapping):
        return {name: _alone(part) for name, part in value.items()}
    return value


def _owns_its_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor leads to no values but its own."""
    # A storage larger than the tensor belongs to the tensor that it was cut from.
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    bare = tensor.grad_fn is None and tensor.grad is None and not vars(tensor)
    return whole and bare and tensor._base is None


def _kinds(values: Iterable[Any]) -> set[type]:
    """Returns the classes of a target's tensors: the plain classes, and that of a device with its own class."""
    kinds: set[type] = {Tensor, nn.Parameter}
    for value in values:
        kinds |= {type(part) for part in (value, getattr(value, "inputs", None)) if isinstance(part, Tensor)}
    return kinds


def _is_plain_slice(value: object) -> bool:
    return type(value) is slice and all(type(end) in (int, type(None)) for end in (value.start, value.stop, value.step))


def _plain_function(function: Callable[..., Any], kinds: set[type], known: Sequence[object]) -> Callable[..., Any]:
    def call(*arguments: Any, **settings: Any) -> Any:
        for one in (*arguments, *settings.values()):
            # An object that is no tensor may define `__torch_function__` too; a slice of numbers does not.
            if type(one) not in kinds and not _is_plain_slice(one):
                raise TypeError(f"a target's functions take plain tensors, got {type(one).__name__}")
        for one in watching():
            if _is_new(one, known):
                raise AccessError(
                    f"a target's functions must not be watched, got {type(one).__name__}: call them outside of modes "
                    "and hooks, which are shown what the auditor computes with"
                )
        return function(*arguments, **settings)

    return call


def watching() -> list[object]:
    """Lists all that PyTorch now shows operands to: modes, hooks of all modules, and hooks of saved tensors."""
    # Private names: PyTorch has no public names for the active modes and hooks.
    modes = [*overrides._get_current_function_mode_stack(), *_python_dispatch._get_current_dispatch_mode_stack()]
    hooks = [hook for hooks in _hooks_of_modules() for hook in hooks.values()]
    # `torch.device` as a context is a mode as well, but it sees no operand: it only adds a device to factories.
    return [*(mode for mode in modes if type(mode) is not DeviceContext), *hooks, *_hooks_of_saved()]


def end_others(known: Sequence[object]) -> str:
    """Ends modes and hooks that are active and not known: they would be shown, and could change, later computations.

    Args:
        known: modes and hooks that may stay active.

    Returns:
        The class of the first that was ended; empty if there was none.
    """
    found = [type(one).__name__ for one in watching() if _is_new(one, known)]
    for stack, pop in (
        (overrides._get_current_function_mode_stack, overrides._pop_mode),
        (_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._pop_mode),
        (_hooks_of_saved, cast(Any, torch._C)._autograd._pop_saved_tensors_default_hooks),
    ):
        # Stacks are popped from the top; known entries below a new entry go with it.
        while any(_is_new(one, known) and type(one) is not DeviceContext for one in stack()):
            pop()
    for hooks in _hooks_of_modules():
        for key in [key for key, hook in hooks.items() if _is_new(hook, known)]:
            del hooks[key]
    return next(iter(found), "")


def _hooks_of_modules() -> tuple[dict[int, Any], ...]:
    return (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_backward_pre_hooks,
    )


def _hooks_of_saved() -> tuple[object, ...]:
    return tuple(cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) or ())


def _is_new(one: object, known: Sequence[object]) -> bool:
    return all(one is not other for other in known)


def _plain_class(kind: type) -> type:
    """Returns the class of a target, or of the target behind a view."""
    return next(c for c in kind.__mro__ if "_is_view" not in vars(c))


@cache
def _view_class(kind: type) -> type:
    # `__getattribute__`, because a field with a default is an attribute of the class, too.
    def guarded(self: Any, name: str) -> Any:
        withheld = object.__getattribute__(self, "__dict__").get("_withheld", {})
        if name in withheld:
            raise AccessError(
                f"this attack did not declare {type(withheld[name]).__name__}.{withheld[name].name}, "
                f"so it may not read {kind.__name__}.{name}: add it to the decorator"
            )
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            if hasattr(kind, name):  # a property whose computation failed
                raise
            # A third party's target may be a plain class.
            others = [one for one in Target.__subclasses__() if name in vars(one).get("__dataclass_fields__", {})]
            way = f": {' and '.join(one.__name__ for one in others)} has, by another access" if others else ""
            raise AttributeError(f"{kind.__name__} has no {name!r}{way}") from None

    def shown(self: Any) -> str:
        return f"<narrowed {kind.__name__}, without {', '.join(sorted(self._withheld)) or 'nothing'}>"

    return type(f"Narrowed{kind.__name__}", (kind,), {"__getattribute__": guarded, "__repr__": shown, "_is_view": True})
