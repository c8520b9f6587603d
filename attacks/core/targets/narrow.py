"""Narrowing: the attack's view of a target, without the fields that its threat model does not grant.

The view does not merely refuse access to a withheld field: it does not hold the value, nor any reference that leads to
it:

- Functions are passed as plain functions, without the object that a method is bound to.
- Tensors own their memory, because a slice exposes the tensor that it was cut from as `_base`.

Narrowing keeps an honest attack within its threat model. It does not stop hostile code: in Python, closures, frames,
the garbage collector, and PyTorch's modes, hooks and tensor subclasses reach other values. Third-party attacks
therefore run in a process that holds the target alone (`leakbench.audit.isolation`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Flag
from functools import cache
from typing import Any, TypeVar, cast

from torch import Tensor

from ..membership.shadow_models import Shadows
from ..threat_model.requires import MEANING, Access, AccessError, Controls, Knows, Requirements
from .observation import Steps
from .target import Examples, Target

T = TypeVar("T", bound=Target)


def narrow(target: T, requires: Requirements) -> T:
    """Returns a view of `target` in which reading a field that `requires` does not grant raises `AccessError`.

    Args:
        target: the attack's target; not changed.
        requires: the needs that the attack declared.

    Returns:
        An instance of a subclass of the target's class, without the withheld values.
    """
    # A view of a view withholds at least the same fields.
    withheld: dict[str, Access | Knows | Controls] = dict(vars(target).get("_withheld", {}))
    for slot in fields(cast(Any, target)):
        need = slot.metadata.get("needs")
        if need is not None and not requires.grants(need):
            withheld[slot.name] = need
    shown = {name: _alone(value) for name, value in vars(target).items() if name not in withheld}
    shown = {name: _narrowed(value, requires) for name, value in shown.items()}
    for slot in fields(cast(Any, target)):
        if "answers" in slot.metadata and shown.get(slot.name) is not None:
            shown[slot.name] = _narrowing(shown[slot.name], requires)
    return cast(T, view_of(_plain_class(type(target)), shown, withheld))


def view_of(kind: type[Target], shown: Mapping[str, Any], withheld: Mapping[str, Access | Knows | Controls]) -> Target:
    """Rebuilds a view from its parts, in this process or another.

    Args:
        kind: class of the target.
        shown: values by field.
        withheld: the need of each withheld field.
    """
    # The constructor is not used, because its checks read withheld fields, nor setattr, which a frozen class refuses.
    view = object.__new__(_view_class(kind))
    vars(view).update(shown, _withheld=dict(withheld))
    return cast(Target, view)


def parts_of(view: Target) -> tuple[type[Target], dict[str, Any], dict[str, Access | Knows | Controls]]:
    """Returns the parts of a view for `view_of`: the class of its target, values by field, needs of withheld fields."""
    shown = dict(vars(view))
    withheld = shown.pop("_withheld", {})
    return _plain_class(type(view)), shown, withheld


def enabled_by(need: Access | Knows | Controls) -> str:
    """Describes a need for an error message: its meaning, and the field of a target that grants it."""
    if isinstance(need, Flag) and need not in MEANING:
        return " and ".join(map(enabled_by, need)) or "nothing"
    for kind in filter(is_dataclass, Target.__subclasses__()):
        for slot in fields(cast(Any, kind)):
            if slot.metadata.get("needs") == need:
                return f"{MEANING[need]} ({type(need).__name__}.{need.name}, field {kind.__name__}.{slot.name})"
    return f"{MEANING[need]} ({type(need).__name__}.{need.name})"


def _narrowed(value: Any, requires: Requirements) -> Any:
    """Narrows targets nested in a field to the same requirements."""
    if isinstance(value, Target):
        return narrow(value, requires)
    if isinstance(value, Mapping):
        return {name: _narrowed(element, requires) for name, element in value.items()}
    if isinstance(value, Tensor | str | tuple) and not _holds_targets(value):
        return value
    if isinstance(value, Iterable) and not isinstance(value, Examples):
        # A generator, so that a lazy transcript stays lazy.
        return Steps(lambda: (_narrowed(element, requires) for element in value), lambda: len(cast(Any, value)))
    return value


def _narrowing(function: Callable[..., Target], requires: Requirements) -> Callable[..., Target]:
    """Returns a function whose answer, a target, is narrowed to the same requirements."""
    return lambda *arguments, **settings: narrow(function(*arguments, **settings), requires)


def _holds_targets(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(element, Target) or _holds_targets(element) for element in value)


def _alone(value: Any) -> Any:
    """Detaches a field's value from all others: plain functions, and tensors with memory of their own and no graph."""
    if isinstance(value, Tensor):
        return value if _owns_its_memory(value) else value.detach().clone()
    if isinstance(value, Examples | Shadows):
        parts = {slot.name: getattr(value, slot.name) for slot in fields(value)}
        apart = {name: _alone(part) for name, part in parts.items()}
        return value if all(apart[name] is part for name, part in parts.items()) else type(value)(**apart)
    if isinstance(value, Mapping):
        return {name: _alone(part) for name, part in value.items()}
    return _plain_function(value) if callable(value) else value


def _owns_its_memory(tensor: Tensor) -> bool:
    """Returns whether no other values are reachable from a tensor."""
    # A storage larger than the tensor holds values of the tensor that it was cut from.
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    bare = tensor.grad_fn is None and tensor.grad is None and not vars(tensor)
    return whole and bare and tensor._base is None


def _plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **settings: function(*arguments, **settings)


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
            others = [
                target_class
                for target_class in Target.__subclasses__()
                if target_class.accesses and name in vars(target_class).get("__dataclass_fields__", {})
            ]
            hint = (
                f": {' and '.join(target_class.__name__ for target_class in others)} has, by another access"
                if others
                else ""
            )
            raise AttributeError(f"{kind.__name__} has no {name!r}{hint}") from None

    def shown(self: Any) -> str:
        return f"<narrowed {kind.__name__}, without {', '.join(sorted(self._withheld)) or 'nothing'}>"

    return type(f"Narrowed{kind.__name__}", (kind,), {"__getattribute__": guarded, "__repr__": shown, "_is_view": True})
