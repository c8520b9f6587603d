"""Location of the weights in a saved object: at its top, or under a name that trainers use."""

from typing import Any

from .limits import FileRefused, shown
from .stored import StoredTensor, refuse_names

_NAMES = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights")
_SHOWN = 6


def find_state(saved: Any) -> tuple[tuple[str, ...], dict[str, StoredTensor], tuple[str, ...]]:
    """Returns the keys that lead to the weights, their tensors, and a sentence on each thing unwrapped or left out.

    Args:
        saved: object of a pickle, with `StoredTensor` for tensors.

    Raises:
        FileRefused: there is no dictionary of tensors, or none under a known name.
    """
    path, notes = (), []
    # At most three levels: a dictionary may contain itself.
    while len(path) < 3 and (under := next((name for name in _NAMES if _has_tensors(saved, name)), None)):
        others = [name for name in saved if name != under]
        left_out = f"; beside them, left out: {_listed(others)}" if others else ""
        notes.append(f"The weights were found under {under!r}{left_out}.")
        saved, path = saved[under], (*path, under)
    tensors = _tensors(saved)
    if not tensors:
        entries = _listed(list(saved)) if isinstance(saved, dict) else f"a {type(saved).__name__}"
        raise FileRefused(
            f"it must hold a dictionary of tensors, alone or under one of {', '.join(_NAMES)}, got {entries}"
        )
    refuse_names(tensors)
    others = [name for name in saved if name not in tensors]
    if others:
        notes.append(f"Entries that are no tensors were left out: {_listed(others)}.")
    return path, tensors, tuple(notes)


def _has_tensors(saved: Any, name: str) -> bool:
    return isinstance(saved, dict) and (bool(_tensors(saved.get(name))) or _deeper(saved.get(name)))


def _deeper(saved: Any) -> bool:
    """Returns whether another known name leads to tensors a level down."""
    return isinstance(saved, dict) and any(_tensors(saved.get(name)) for name in _NAMES)


def _tensors(saved: Any) -> dict[str, StoredTensor]:
    if not isinstance(saved, dict):
        return {}
    return {name: value for name, value in saved.items() if isinstance(name, str) and type(value) is StoredTensor}


def _listed(names: list[Any]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown(name) for name in names[:_SHOWN]) + more
