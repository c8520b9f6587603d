"""Architecture that fits a checkpoint: its number of classes, and the order of a table's columns that it expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch

from .network import architecture, own_tensors


def fitting(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    input_shape: tuple[int, ...],
    least: int,
    lowest: int = 0,
    single: bool = False,
    trust_code: bool,
) -> torch.nn.Module:
    """Returns the architecture with the checkpoint's number of classes, as labels may lack rare classes.

    Args:
        name: of the architecture.
        tensors: of the checkpoint.
        input_shape: of an example.
        least: smallest number of classes, by the labels; also the result's if no number fits.
        lowest: smallest label.
        single: whether a network with a single output, for two classes, is tried.
        trust_code: whether the owner's file may run.

    Raises:
        ValueError: an architecture that cannot be built, or labels that count from 1.
    """
    counts = {int(tensor.shape[0]) for tensor in tensors.values() if tensor.ndim in (1, 2)}

    def made(classes: int) -> torch.nn.Module:
        return architecture(name, input_shape=input_shape, classes=classes, trust_code=trust_code)

    def fits(classes: int) -> torch.nn.Module | None:
        """Returns the architecture with so many classes if the file fits; a function may build another number."""
        try:
            model = made(classes)
        except ValueError:
            return None
        own, (stored, _) = model.state_dict(), own_tensors(model, tensors)
        return model if {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in stored.items()} else None

    more = sorted(count for count in counts if count > least)[:_MOST_COUNTS]
    for classes in [least, *([1] if single else []), *more]:
        if (model := fits(classes)) is not None:
            return model
    # Labels exceed a network that the file fits: they count from 1, or the groups count from different numbers.
    fewer = next((count for count in sorted(counts, reverse=True) if 1 < count < least and fits(count)), None)
    if fewer is not None and not (lowest == 1 and fewer == least - 1):
        raise ValueError(
            f"labels must be below {fewer}, the classes that the model answers with, and go from {lowest} to "
            f"{least - 1}: is one group counted from another number than the other? Classes count from 0 in all of them"
        )
    if lowest == 1 and least > 2 and fits(least - 1) is not None:
        raise ValueError(
            f"labels must count from 0, and go from 1 to {least - 1} where the model answers with {least - 1} classes; "
            "subtract 1"
        )
    try:
        return made(least)
    except ValueError:
        # Differing tensor names are more informative than a wrong output shape: return the network as it is, for their
        # report.
        with suppress(ValueError):
            model = architecture(name, input_shape=input_shape, classes=least, trust_code=trust_code, answers=None)
            if tensors and model.state_dict().keys() != own_tensors(model, tensors)[0].keys():
                return model
        if not single:
            raise
        with suppress(ValueError):
            return made(1)  # the error then reports its names
        raise


_MOST_COUNTS = 8
"""Largest number of class counts that are tried if the labels' own does not fit."""


def refuse_other_columns(model: torch.nn.Module, columns: Sequence[str] | None, *, of: str = "members") -> None:
    """Refuses a table whose columns are not the model's feature names, in their order.

    Args:
        model: may name them as `feature_names`, or as scikit-learn does, `feature_names_in_`.
        columns: of the table; None if they have no names.
        of: group of the table, for the error.

    Raises:
        ValueError: another name, or another order.
    """
    feature_lists = [getattr(model, name, None) for name in ("feature_names", "feature_names_in_")]
    expected = next(
        (
            [*map(str, feature_names)]
            for feature_names in feature_lists
            if isinstance(feature_names, list | tuple | np.ndarray)
        ),
        None,
    )
    if expected is None or columns is None or expected == list(columns):
        return
    place = next((i for i, pair in enumerate(zip(expected, columns, strict=False)) if pair[0] != pair[1]), len(columns))
    named = [str(names[place]) if place < len(names) else "none" for names in (expected, columns)]
    raise ValueError(
        f"columns of {of} must be the feature_names of the model, in their order, and column {place + 1} is "
        f"{named[1]} instead of {named[0]}; write the table in the order of the training"
    )
