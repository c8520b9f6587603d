"""Checks of a method's settings; errors are single sentences: argument, rule, value."""

from __future__ import annotations

import math


def refuse_unknown(name: str, value: object, known: tuple[object, ...]) -> None:
    """Raises `ValueError` for a value that the setting does not have; it would silently run as another."""
    if value not in known:
        *others, last = map(repr, known)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def refuse_fraction(name: str, value: float) -> None:
    """Raises `ValueError` for a fraction to drop outside [0, 1), or NaN: 1 would leave nothing."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def refuse_norm(name: str, value: float | None) -> None:
    """Raises `ValueError` for an invalid clip norm, under the setting's name; None (unset) passes."""
    if value is not None and not 0 < value < math.inf:  # false for NaN
        raise ValueError(f"{name} must be a positive finite number, got {value}")


def refuse_count(name: str, value: float | None, least: int = 1) -> None:
    """Raises `ValueError` for anything but a whole number of at least `least`; None (unset) passes."""
    if value is None:
        return
    if not value >= least:  # false for NaN
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value == math.inf or int(value) != value:
        raise ValueError(f"{name} must be a whole number, got {value}")
