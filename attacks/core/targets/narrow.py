"""Narrowing: the view of a target that an attack is handed, without what its threat model does not grant.

A withheld field is not hidden behind a check alone: the view does not hold its value. Nor does it hold what leads
further: functions are handed over as plain functions, without the object that a method is bound to, and take plain
tensors alone, because whatever else PyTorch asks is shown the weights that it is multiplied with; they refuse to
compute under a mode or a hook of the attack's, to which PyTorch hands every operand, the private data among them; and
tensors own their memory, because a slice has the whole of what it was cut from as its `_base`.

What is left is what Python cannot withhold: the variables that a function closes over, frames, the garbage
collector, and what anybody can import or patch. An attack that digs there is fraud, not a mistake: attacks that are not
ours are therefore run in a process of their own (`leakbench.audit.isolation`).
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
    """View of `target` in which reading what `requires` does not grant raises `AccessError`.

    Args:
        target: what the attack is called with; not changed.
        requires: what the attack declared.
        known: modes and hooks that may be active while the target's functions compute; those active now where None.

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
    """A view from its parts, as another process makes it again.

    Args:
        kind: class of the target.
        shown: values by field.
        withheld: what each field that is withheld needs.
    """
    # Neither the constructor, whose checks read fields withheld here, nor setattr, which a frozen class refuses.
    view = object.__new__(_view_class(kind))
    vars(view).update(shown, _withheld=dict(withheld))
    return cast(Target, view)


def parts_of(view: Target) -> tuple[type[Target], dict[str, Any], dict[str, Access | Knows | Controls]]:
    """Parts of a view, for `view_of`: the class of its target, values by field, and what withheld fields need."""
    shown = dict(vars(view))
    withheld = shown.pop("_withheld", {})
    return _plain_class(type(view)), shown, withheld


def enabled_by(need: Access | Knows | Controls) -> str:
    """Words for an error: what `need` is, and which field of the target would grant it."""
    for kind in filter(is_dataclass, Target.__subclasses__()):
        for slot in fields(cast(Any, kind)):
            if slot.metadata.get("needs") == need:
                return f"{MEANING[need]} ({type(need).__name__}.{need.name}, field {kind.__name__}.{slot.name})"
    return f"{MEANING[need]} ({type(need).__name__}.{need.name})"


def _narrowed(value: Any, requires: Requirements, known: Sequence[object]) -> Any:
    """What leads to further targets, in any field, so that it shows no more of them than of the first."""
    if isinstance(value, Target):
        return narrow(value, requires, known)
    if isinstance(value, Mapping):
        return {name: _narrowed(one, requires, known) for name, one in value.items()}
    if isinstance(value, Tensor | str | tuple) and not _holds_targets(value):
        return value
    if isinstance(value, Iterable) and not isinstance(value, Examples):
        # One after the other, so that a lazy transcript stays lazy.
        return Steps(lambda: (_narrowed(one, requires, known) for one in value), lambda: len(cast(Any, value)))
    return value


def _holds_targets(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(one, Target) or _holds_targets(one) for one in value)


def _alone(value: Any) -> Any:
    """A field's value whose tensors own their memory and have no graph, so that nothing else is reached from them."""
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
    """Whether nothing but its own values can be reached from a tensor."""
    # Storage larger than the tensor is that of something that it was cut from.
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    bare = tensor.grad_fn is None and tensor.grad is None and not vars(tensor)
    return whole and bare and tensor._base is None


def _kinds(values: Iterable[Any]) -> set[type]:
    """The classes of the tensors of a target: of plain ones, or of a device that has a class of its own."""
    kinds: set[type] = {Tensor, nn.Parameter}
    for value in values:
        kinds |= {type(part) for part in (value, getattr(value, "inputs", None)) if isinstance(part, Tensor)}
    return kinds


def _is_plain_slice(value: object) -> bool:
    return type(value) is slice and all(type(end) in (int, type(None)) for end in (value.start, value.stop, value.step))


def _plain_function(function: Callable[..., Any], kinds: set[type], known: Sequence[object]) -> Callable[..., Any]:
    def call(*arguments: Any, **settings: Any) -> Any:
        for one in (*arguments, *settings.values()):
            # An object that is no tensor at all may have `__torch_function__` too; a slice of numbers has none.
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
    """Whatever PyTorch shows operands to, at the moment: modes, hooks of all modules, hooks of saved tensors."""
    # Private names, because PyTorch has no public ones to ask for what is active.
    modes = [*overrides._get_current_function_mode_stack(), *_python_dispatch._get_current_dispatch_mode_stack()]
    hooks = [hook for hooks in _hooks_of_modules() for hook in hooks.values()]
    # `torch.device` as a context is a mode as well, which sees no operand but adds a device to factories.
    return [*(mode for mode in modes if type(mode) is not DeviceContext), *hooks, *_hooks_of_saved()]


def end_others(known: Sequence[object]) -> str:
    """Ends modes and hooks that are active and not known: who left them would be shown, and could change, what follows.

    Args:
        known: what may stay active.

    Returns:
        The class of the first that was ended; empty where there was none.
    """
    found = [type(one).__name__ for one in watching() if _is_new(one, known)]
    for stack, pop in (
        (overrides._get_current_function_mode_stack, overrides._pop_mode),
        (_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._pop_mode),
        (_hooks_of_saved, cast(Any, torch._C)._autograd._pop_saved_tensors_default_hooks),
    ):
        # From the top down, as stacks are left; what lies below something new goes with it.
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
    """The class of a target, or of what a view is a view of."""
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
            if hasattr(kind, name):  # one that computes, and failed
                raise
            # Somebody's own target may be a plain class.
            others = [one for one in Target.__subclasses__() if name in vars(one).get("__dataclass_fields__", {})]
            way = f": {' and '.join(one.__name__ for one in others)} has, by another access" if others else ""
            raise AttributeError(f"{kind.__name__} has no {name!r}{way}") from None

    def shown(self: Any) -> str:
        return f"<narrowed {kind.__name__}, without {', '.join(sorted(self._withheld)) or 'nothing'}>"

    return type(f"Narrowed{kind.__name__}", (kind,), {"__getattribute__": guarded, "__repr__": shown, "_is_view": True})
