"""Network of a weights file: built by name and filled with the tensors, or an error that lists all differences.

If names or shapes differ, a single error lists all missing, unexpected and misshapen tensors, and the known network
that fits best. Nothing is filled in part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from leakbench.benchmarks import models
from leakbench.benchmarks.core.extras import optional
from leakbench.benchmarks.core.open_names import TORCHVISION, is_factory

from ..files.unwrap import without_wrappers
from .answers import scores_in

_SHOWN = 8
"""Most names of each kind in a report."""
_COMMON = (
    *(
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "wide_resnet50_2",
        "resnext50_32x4d",
        "vgg11",
        "vgg16",
        "vgg11_bn",
    ),
    *("vgg16_bn", "alexnet", "squeezenet1_1", "densenet121", "mobilenet_v2", "mobilenet_v3_small"),
    *("mobilenet_v3_large", "shufflenet_v2_x1_0", "efficientnet_b0", "convnext_tiny", "vit_b_16"),
)
"""Torchvision classifiers that a file is compared with: building all of torchvision's takes seconds."""


def architecture(
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    trust_code: bool = False,
    answers: Callable[[Any], Tensor] | None = scores_in,
) -> nn.Module:
    """Returns an untrained network: [n, *input_shape] -> logits [n, classes], or [n] for a single output.

    Args:
        name: one of `leakbench list models`, a classifier of torchvision with or without "torchvision:", or
            FILE.py:FUNCTION.
        input_shape: shape of an input.
        classes: number of logits; 1 for a binary classifier with a single output.
        trust_code: whether a user's function may run; the name alone never runs it.
        answers: extracts the answers from the output of a user's network, to check their shape; None to skip the check.

    Raises:
        ValueError: an unknown name, an input that does not fit, or a user's file that is not trusted.
        ModuleNotFoundError: torchvision is not installed; names the extra.
    """
    name = _full(name)
    if is_factory(name) and not trust_code:
        raise ValueError(
            f"model {name!r} is code of yours, which runs with your rights; allow it by trust_code=True (--trust-code)"
        )
    return models.build(name, input_shape=input_shape, classes=classes, fewest_classes=1, answers=answers)


def check_name(name: str) -> None:
    """Refuses a name of no network; runs nothing.

    Raises:
        ValueError, ModuleNotFoundError: see `architecture`.
    """
    models.check(_full(name))


def own_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Returns the model's tensors in a file, without prefixes of their names, and a sentence on each change.

    Training frameworks put the name of an attribute before each name, and add tensors of their own, such as a loss's.
    If the file lacks part of the model, all its tensors are returned, without the prefix that most of the model's
    tensors share.

    Args:
        model: of the architecture.
        tensors: by name, as in `StateFile.tensors`.

    Raises:
        ValueError: the file holds the model more than once, as with a moving average.
    """
    own, _ = without_wrappers(_state(model))
    stored_tensors, _ = without_wrappers(tensors)
    # All possible prefixes: tied tensors may be absent, and a tensor may be missing or renamed.
    before = sorted(
        {
            name.removesuffix(own_name)
            for own_name in own
            for name in stored_tensors
            if name == own_name or name.endswith("." + own_name)
        }
    )
    whole = [prefix for prefix in before if _holds(stored_tensors, prefix, own)]
    if len(whole) > 1:
        named = " and ".join(repr(prefix) if prefix else "no prefix" for prefix in whole)
        raise ValueError(
            f"the file must hold the model once, and has it {len(whole)} times, with {named}: save the tensors of one"
        )
    if not whole:
        # Remove the prefix of most tensors, so that the report lists only those that differ.
        shared = {prefix: sum(prefix + name in stored_tensors for name in own) for prefix in before}
        prefix = max(shared, key=lambda candidate: shared[candidate], default="")
        if not prefix or 2 * shared[prefix] <= len(own):
            return stored_tensors, ()
        return {name.removeprefix(prefix): tensor for name, tensor in stored_tensors.items()}, ()
    (prefix,) = whole
    stored = {name: stored_tensors[prefix + name] for name in own if prefix + name in stored_tensors}
    notes = [f"The prefix {prefix!r} was taken off the names of the model's tensors."] if prefix else []
    if others := [
        name for name in stored_tensors if name.removeprefix(prefix) not in own or not name.startswith(prefix)
    ]:
        left_out = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
        notes.append(f"Tensors beside the model's were left out: {left_out}.")
    return stored, tuple(notes)


def _holds(stored: Mapping[str, Tensor], prefix: str, own: Mapping[str, Tensor]) -> bool:
    """Returns whether a file has all of a model's tensors behind a prefix, and no others of its modules."""
    under = {name.removeprefix(prefix): tensor.shape for name, tensor in stored.items() if name.startswith(prefix)}
    complete = all(
        under[name] == tensor.shape if name in under else any(o is tensor and n in under for n, o in own.items())
        for name, tensor in own.items()
    )
    # Further tensors of the model's modules, or further numbered layers of a sequence, mean another architecture.
    modules = {name.partition(".")[0] for name in own}
    sequence = any(module.isdecimal() for module in modules)
    extra_modules = {name.partition(".")[0] for name in under if name not in own}
    return complete and not any(module in modules or (sequence and module.isdecimal()) for module in extra_modules)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def filled(model: nn.Module, tensors: Mapping[str, Tensor], *, own_code: bool = False) -> nn.Module:
    """Fills the model's parameters and buffers with these tensors, and sets evaluation mode.

    Floating-point tensors of another precision are converted to the model's. Names may have prefixes on either side,
    and tied tensors are needed only once.

    Args:
        model: of the same architecture; changed in place and returned.
        tensors: by name, as in `StateFile.tensors`.
        own_code: whether the architecture is a user's function, so that the error suggests no known network.

    Raises:
        ValueError: the report of all mismatches, a tensor of whole numbers for a weight, or entries that are not
            finite.
    """
    own, _ = without_wrappers(_state(model))
    stored, _ = own_tensors(model, tensors)
    missing = [name for name in own if name not in stored and not _tied(own, name, stored)]
    unexpected = [name for name in stored if name not in own]
    misshapen = [name for name in stored if name in own and stored[name].shape != own[name].shape]
    if missing or unexpected or misshapen:
        raise ValueError(_report(own, stored, missing, unexpected, misshapen, own_code))
    converted = {name: _converted(tensor, own[name], name) for name, tensor in stored.items()}
    with torch.no_grad():
        for name, tensor in converted.items():
            own[name].copy_(tensor)
    return model.eval()


def _converted(tensor: Tensor, own: Tensor, name: str) -> Tensor:
    """Returns a finite tensor in the model's type."""
    if own.is_floating_point() != tensor.is_floating_point():
        raise ValueError(
            f"{name} must have floating-point entries like the model's {_short(own)}, got {_short(tensor)}; quantised "
            "weights must be converted to float32 where they were saved"
            if own.is_floating_point()
            else f"{name} must have whole numbers like the model's {_short(own)}, got {_short(tensor)}"
        )
    converted = tensor.to(own.dtype)
    for entries, when in ((tensor, ""), (converted, f" as {_short(own)}")):
        if not bool(entries.isfinite().all()):
            raise ValueError(f"entries of {name} must be finite, got NaN or infinite ones{when}")
    return converted


def _full(name: str) -> str:
    """Returns the name of a network, with torchvision's prefix if needed; names of ours take precedence."""
    if ":" in name or name in models.names():
        return name
    prefixed = TORCHVISION + name
    try:
        models.check(prefixed)
    except (ValueError, ModuleNotFoundError):
        return name  # the error is then about our names
    return prefixed


def _tied(own: Mapping[str, Tensor], name: str, stored: Mapping[str, Tensor]) -> bool:
    """Returns whether the model ties the tensor of that name to another that is given."""
    return any(alias in stored and tensor is own[name] for alias, tensor in own.items() if alias != name)


def _report(
    own: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
    own_code: bool,
) -> str:
    lines = [
        f"the file does not fit the model: {len(missing)} of its {len(own)} tensors are missing, {len(unexpected)} of "
        f"the file's {len(stored)} are unexpected, {len(misshapen)} have another shape"
    ]
    lines += _listed("missing", [f"{name} {_shape(own[name])}" for name in missing])
    lines += _listed("unexpected", [f"{name} {_shape(stored[name])}" for name in unexpected])
    lines += _listed(
        "misshapen",
        [f"{name} {_shape(stored[name])} in the file, {_shape(own[name])} in the model" for name in misshapen],
    )
    way_out = "the function must build a network whose tensors have the names and shapes of the file's"
    return "\n".join([*lines, way_out if own_code else _closest(stored)])


def _listed(title: str, tensors: list[str]) -> list[str]:
    more = [f"and {len(tensors) - _SHOWN} more"] if len(tensors) > _SHOWN else []
    return [f"  {title}: {'; '.join([*tensors[:_SHOWN], *more])}"] if tensors else []


def _closest(stored: Mapping[str, Tensor]) -> str:
    """Returns a sentence on the known network that is most like the file."""
    shapes = _shapes(stored)
    heads = [shape for shape in shapes.values() if len(shape) == 2]
    scores = {name: _shared_fraction(shapes, known) for name, known in _known(heads[-1][0] if heads else None).items()}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] < 0.5:
        return (
            "no network known by name is like it; give its code as FILE.py:FUNCTION with trust_code=True (--trust-code)"
        )
    how = "has the same names and shapes" if scores[best] == 1 else f"shares {scores[best]:.0%} of its names and shapes"
    return f"of the networks known by name {best!r} is closest: it {how}"


@cache
def _known(classes: int | None) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the tensor shapes of known networks, by name; allocates no memory and loads no weights.

    Args:
        classes: of the file's last layer; None for the usual number of each network.
    """
    shapes = {}
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        for name in models.names():
            usual = models.natural(name)
            # Skip networks whose extra is not installed or that do not support this number of classes.
            with suppress(Exception):
                settings = {"input_shape": usual.input_shape, "classes": classes or usual.classes, **usual.settings}
                shapes[name] = _shapes(models.factory(name)(**settings).state_dict())
        with suppress(ModuleNotFoundError):
            make = optional("torchvision.models", needed_by="the report").get_model
            for name in _COMMON:
                built = make(name, weights=None, num_classes=classes or 1000)
                shapes[TORCHVISION + name] = _shapes(built.state_dict())
    return shapes


def _shared_fraction(shapes: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the share of names that both have with equal shape, among the names of either."""
    both = sum(others.get(name) == shape for name, shape in shapes.items())
    return both / len(shapes.keys() | others.keys())


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
