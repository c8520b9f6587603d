"""The network behind a file of weights: built by name, filled with the tensors, or told apart from them.

Where names or shapes differ, one error says all of it: what is missing, what is too much, what has another shape, and
which of the networks known by name fits better. Nothing is filled in part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from leakbench.benchmarks import models
from leakbench.benchmarks.core import user_factory
from leakbench.benchmarks.core.extras import optional
from leakbench.benchmarks.core.nets import torchvision_models

from ..files.unwrap import without_wrappers
from .answers import scores_in

_SHOWN = 8
"""Names of each kind in a report."""
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
"""Of torchvision's classifiers, those that a file is compared with: to build all of them takes seconds."""


def architecture(
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    trust_code: bool = False,
    answers: Callable[[Any], Tensor] | None = scores_in,
) -> nn.Module:
    """An untrained network that maps [n, *input_shape] to logits [n, classes], or to [n] where there is one.

    Args:
        name: one of `leakbench list models`, a classifier of torchvision with or without "torchvision:", or
            FILE.py:FUNCTION.
        input_shape: shape of one input.
        classes: number of logits; 1 of a binary classifier with one output.
        trust_code: whether a function of the user's may run; the name alone never runs one.
        answers: takes the answers out of what a network of the user's puts out, whose shape is looked at; None to look
            at nothing.

    Raises:
        ValueError: an unknown name, an input that does not fit, or a user's file that was not trusted.
        ModuleNotFoundError: torchvision's where it is not installed; names the extra.
    """
    name = _full(name)
    if user_factory.named(name) and not trust_code:
        raise ValueError(
            f"model {name!r} is code of yours, which runs with your rights; allow it by trust_code=True (--trust-code)"
        )
    return models.build(name, input_shape=input_shape, classes=classes, fewest_classes=1, answers=answers)


def check_name(name: str) -> None:
    """Refuses a name that there is no network of; runs nothing.

    Raises:
        ValueError, ModuleNotFoundError: as `architecture`.
    """
    models.check(_full(name))


def own_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """A model's tensors among those of a file, without what stands before their names, and what was done, in sentences.

    A training framework puts the name of an attribute before each, and tensors of its own beside them, as of a loss.
    Where the model is not in the file as a whole, its tensors are as they were.

    Args:
        model: of the architecture.
        tensors: by name, as `StateFile.tensors`.

    Raises:
        ValueError: the file has the model more than once, as with a moving average of it.
    """
    own, _ = without_wrappers(_state(model))
    given, _ = without_wrappers(tensors)
    # What is tied to another need not be there, and one tensor may be missing or have another name.
    before = sorted(
        {name.removesuffix(one) for one in own for name in given if name == one or name.endswith("." + one)}
    )
    whole = [prefix for prefix in before if _holds(given, prefix, own)]
    if len(whole) > 1:
        named = " and ".join(repr(prefix) if prefix else "no prefix" for prefix in whole)
        raise ValueError(
            f"the file must hold the model once, and has it {len(whole)} times, with {named}: save the tensors of one"
        )
    if not whole:
        # By the prefix of most of them, so that the report names those that differ, and not all.
        shared = {prefix: sum(prefix + name in given for name in own) for prefix in before}
        prefix = max(shared, key=lambda one: shared[one], default="")
        if not prefix or 2 * shared[prefix] <= len(own):
            return given, ()
        return {name.removeprefix(prefix): tensor for name, tensor in given.items()}, ()
    (prefix,) = whole
    found = {name: given[prefix + name] for name in own if prefix + name in given}
    notes = [f"The prefix {prefix!r} was taken off the names of the model's tensors."] if prefix else []
    if others := [name for name in given if name.removeprefix(prefix) not in own or not name.startswith(prefix)]:
        some = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
        notes.append(f"Tensors beside the model's were left out: {some}.")
    return found, tuple(notes)


def _holds(given: Mapping[str, Tensor], prefix: str, own: Mapping[str, Tensor]) -> bool:
    """Whether a file has all of a model's tensors behind a prefix, and none there that has another place in it."""
    under = {name.removeprefix(prefix): tensor.shape for name, tensor in given.items() if name.startswith(prefix)}
    there = all(
        under[name] == tensor.shape if name in under else any(o is tensor and n in under for n, o in own.items())
        for name, tensor in own.items()
    )
    # Of one of the model's own modules nothing may be left over, nor a further layer of a sequence, which has a number:
    # it would be another architecture.
    modules = {name.partition(".")[0] for name in own}
    sequence = any(module.isdecimal() for module in modules)
    left = {name.partition(".")[0] for name in under if name not in own}
    return there and not any(module in modules or (sequence and module.isdecimal()) for module in left)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def filled(model: nn.Module, tensors: Mapping[str, Tensor], *, own_code: bool = False) -> nn.Module:
    """The model with these tensors as its parameters and buffers, in evaluation mode.

    Floating-point tensors of another width are converted to the model's. Names may lack or have prefixes on either
    side, and what the model ties together need be there once.

    Args:
        model: of the same architecture; it is changed, and returned.
        tensors: by name, as `StateFile.tensors`.
        own_code: whether the architecture is a function of the user's, so that none known by name is advised.

    Raises:
        ValueError: the report of all that does not fit, or a tensor of whole numbers for a weight.
    """
    own, _ = without_wrappers(_state(model))
    given, _ = own_tensors(model, tensors)
    missing = [name for name in own if name not in given and not _tied(own, name, given)]
    unexpected = [name for name in given if name not in own]
    misshapen = [name for name in given if name in own and given[name].shape != own[name].shape]
    if missing or unexpected or misshapen:
        raise ValueError(_report(own, given, missing, unexpected, misshapen, own_code))
    converted = {name: _converted(tensor, own[name], name) for name, tensor in given.items()}
    with torch.no_grad():
        for name, tensor in converted.items():
            own[name].copy_(tensor)
    return model.eval()


def _converted(tensor: Tensor, own: Tensor, name: str) -> Tensor:
    """A finite tensor of the model's type."""
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
    """A plain name of torchvision's gets its prefix; ours come first."""
    if ":" in name or name in models.names():
        return name
    prefixed = torchvision_models.PREFIX + name
    try:
        models.check(prefixed)
    except (ValueError, ModuleNotFoundError):
        return name  # the error is then about our names
    return prefixed


def _tied(own: Mapping[str, Tensor], name: str, given: Mapping[str, Tensor]) -> bool:
    """Whether the model holds the tensor of that name under another that is given, too."""
    return any(other in given and tensor is own[name] for other, tensor in own.items() if other != name)


def _report(
    own: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
    own_code: bool,
) -> str:
    lines = [
        f"the file does not fit the model: {len(missing)} of its {len(own)} tensors are missing, {len(unexpected)} of "
        f"the file's {len(given)} are unexpected, {len(misshapen)} have another shape"
    ]
    lines += _listed("missing", [f"{name} {_shape(own[name])}" for name in missing])
    lines += _listed("unexpected", [f"{name} {_shape(given[name])}" for name in unexpected])
    lines += _listed(
        "misshapen",
        [f"{name} {_shape(given[name])} in the file, {_shape(own[name])} in the model" for name in misshapen],
    )
    way_out = "the function must build a network whose tensors have the names and shapes of the file's"
    return "\n".join([*lines, way_out if own_code else _closest(given)])


def _listed(what: str, found: list[str]) -> list[str]:
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [f"  {what}: {'; '.join([*found[:_SHOWN], *more])}"] if found else []


def _closest(given: Mapping[str, Tensor]) -> str:
    """The sentence on which of the networks known by name is most like the file."""
    shapes = _shapes(given)
    heads = [shape for shape in shapes.values() if len(shape) == 2]
    scores = {name: _alike(shapes, known) for name, known in _known(heads[-1][0] if heads else None).items()}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] < 0.5:
        return (
            "no network known by name is like it; give its code as FILE.py:FUNCTION with trust_code=True (--trust-code)"
        )
    how = "has the same names and shapes" if scores[best] == 1 else f"shares {scores[best]:.0%} of its names and shapes"
    return f"of the networks known by name {best!r} is closest: it {how}"


@cache
def _known(classes: int | None) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the tensors of networks by name; without memory or weights.

    Args:
        classes: as the last layer of the file has them; None for as each network is quoted.
    """
    found = {}
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        for name in models.names():
            usual = models.natural(name)
            # What an extra brings, or a number of classes that it does not have, leaves a network out.
            with suppress(Exception):
                settings = {"input_shape": usual.input_shape, "classes": classes or usual.classes, **usual.settings}
                found[name] = _shapes(models.factory(name)(**settings).state_dict())
        with suppress(ModuleNotFoundError):
            make = optional("torchvision.models", needed_by="the report").get_model
            for name in _COMMON:
                built = make(name, weights=None, num_classes=classes or 1000)
                found[torchvision_models.PREFIX + name] = _shapes(built.state_dict())
    return found


def _alike(these: Mapping[str, tuple[int, ...]], those: Mapping[str, tuple[int, ...]]) -> float:
    """Share of names that both have in one shape, of the names that either has."""
    both = sum(those.get(name) == shape for name, shape in these.items())
    return both / len(these.keys() | those.keys())


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
