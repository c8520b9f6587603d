"""Convention by which a file holds an update, and the mean gradient in the file.

A file has the mean gradient of the batch, its sum, the weights after the step, or their difference (after minus
before), with or without weight decay. The owner's declaration is checked against properties of every cross-entropy
gradient (`scale`); without a declaration the only fitting convention is used, and named. If none fits, or several do,
a convention is assumed all the same, and `ambiguous` names the alternatives: no result can then be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from leakbench.attacks.core import Examples, InconsistentObservation
from leakbench.defenses.core import Layout
from leakbench.leaderboard.records.update_report import ConventionReport

from .scale import LogitLayer, ScaleFit, ScaleRange, by_examples, by_labels, by_noise, by_size, decay, logit_layer

UpdateIs = Literal["gradient", "difference", "weights", "sum"]

_WORDS: dict[str, str] = {
    "gradient": "a mean gradient",
    "sum": "a sum of gradients over the batch",
    "difference": "a difference of weights (after minus before)",
    "weights": "new weights",
}
_OPTION = f"pass --update-is {'|'.join(get_args(UpdateIs))}"

_LIKE_WEIGHTS = 0.9
"""Cosine with the model's own weights above which a file is taken for weights, not for a gradient."""

_UNLIKE_WEIGHTS = 0.2
"""Least cosine with the model's weights at which a file declared as weights is accepted."""

_SUMS = 100
"""Largest deviation from 0 of the column sums of a last layer's gradient, in units of the rounding error."""

_SIGNS = 0.9
"""Smallest fraction of an update's large entries that have one magnitude, for the update to be taken for signs."""


def named_convention(name: str | None) -> UpdateIs | None:
    """Checks the name of a convention, as given by `--update-is`; None stays None.

    Raises:
        ValueError: there is none of that name.
    """
    known = next((convention for convention in get_args(UpdateIs) if convention == name), None)
    if name is not None and known is None:
        raise ValueError(f"--update-is must be one of {', '.join(get_args(UpdateIs))}, got {name!r}")
    return known


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Declaration of an update by its owner.

    Attributes:
        update_is: content of the file, as in `UpdateIs`; None if undeclared.
        batch_size: examples in the batch.
        lr: learning rate of the step; None if undeclared.
        weight_decay: coefficient, as PyTorch adds it to the gradient; None if undeclared.
        clip_norm: of each example; None without clipping.
        noise_multiplier: standard deviation of the noise on the undivided sum / clip norm.
    """

    update_is: UpdateIs | None = None
    batch_size: int
    lr: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    noise_multiplier: float = 0.0

    def __post_init__(self) -> None:
        named_convention(self.update_is)
        for option, value in (("--lr", self.lr), ("--clip-norm", self.clip_norm)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{option} must be positive and finite, got {value}")
        if self.weight_decay is not None and not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"--weight-decay must be at least 0 and finite, got {self.weight_decay}")


@dataclass(frozen=True, kw_only=True)
class Convention:
    """Reading of an update: its convention, and the weight decay removed from it.

    Attributes:
        words: the convention, in words.
        factor: ratio of the update to the mean gradient.
        weight_decay: coefficient that was removed.
        notes: findings of the reading, a sentence each.
        ambiguous: why no result can be trusted, with a remedy; empty if the convention is known.
        unreadable: why no gradient can be read from the update; empty if it can be.
    """

    words: str = _WORDS["gradient"]
    factor: float = 1.0
    weight_decay: float = 0.0
    notes: tuple[str, ...] = ()
    ambiguous: str = ""
    unreadable: str = ""

    @property
    def report(self) -> ConventionReport:
        """Returns the part of a report, without the notes, which the report lists among its own."""
        return ConventionReport(
            words=self.words,
            factor=self.factor,
            weight_decay=self.weight_decay,
            ambiguous=self.ambiguous,
            unreadable=self.unreadable,
        )


def mean_gradient(
    model: nn.Module,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    declared: Declared,
    *,
    probe: Tensor | None,
    public: Examples | None,
) -> tuple[Float[Tensor, " dim"], Convention]:
    """Reads the mean gradient and its convention from a file.

    Args:
        model: before the step, in the mode, training or evaluation, of the batch.
        layout: of the parameters in the file.
        tensors: the file's, of these parameters by name.
        declared: the owner's declaration.
        probe: some inputs of the model's shape; None if the shape is unknown.
        public: public examples; None for none.

    Raises:
        ValueError: weights with an undeclared learning rate that cannot be inferred, or declared as another content.
        InconsistentObservation: an update that is zero, or not finite.
    """
    before = layout.read(model).double().cpu()
    file = layout.flatten({name: tensors[name].double().cpu() for name in layout.names})
    if not bool(file.isfinite().all()):
        raise InconsistentObservation("the update must be finite, got NaN or infinity")
    weights = _are_weights(file, before)
    if weights and declared.update_is not in (None, "weights"):
        raise ValueError(f"--update-is {declared.update_is} must hold, and the update looks like the model's weights")
    if declared.update_is == "weights" and not weights:
        if float(nn.functional.cosine_similarity(file, before, dim=0)) < _UNLIKE_WEIGHTS:
            raise ValueError("--update-is weights must hold, and the update has nothing in common with the model's")
        weights = True
    if weights and declared.update_is is None and declared.lr is None and torch.equal(file, before):
        raise ValueError("the update must be a gradient, and looks like the model's weights; give --lr, of that step")
    values = before - file if weights else file
    if not bool((values != 0).any()):
        raise InconsistentObservation(
            "the update must tell something, and is zero everywhere"
            + (": its weights are those of the checkpoint before the step" if weights else "")
        )
    if signs := _signs(values):
        return values.to(torch.float32), Convention(words=signs[0], unreadable=signs[1])
    layer = None if probe is None else logit_layer(model, probe, public)
    digits = max(torch.finfo(tensors[name].dtype).eps for name in layout.names if tensors[name].is_floating_point())
    evidence = _evidence(layer, layout, values, declared, digits)
    convention = _decided(evidence, declared, weights=weights, length=float(values.norm()))
    coefficient = evidence.decay / convention.factor
    notes = list(convention.notes)
    if declared.weight_decay is not None:
        if evidence.decay and abs(coefficient - declared.weight_decay) > 0.1 * abs(coefficient):
            notes.append(
                f"The last layer shows a weight decay of {coefficient:.3g}, and --weight-decay "
                f"{declared.weight_decay:g} was taken out."
            )
        coefficient = declared.weight_decay
    elif evidence.decay:
        notes.append(
            f"The update holds {coefficient:.3g} times the weights{' without biases' if evidence.sparing else ''}, as "
            "weight decay adds them; they were taken out."
        )
    decayed = torch.cat(
        [
            torch.full((size,), 0.0 if evidence.sparing and len(shape) < 2 else 1.0, dtype=torch.float64)
            for size, shape in zip(layout.sizes, layout.shapes, strict=True)
        ]
    )
    gradient = values / convention.factor - coefficient * decayed * before
    return gradient.to(torch.float32), replace(convention, weight_decay=coefficient, notes=tuple(notes))


_ANY = ScaleRange(low=0.0, high=math.inf, sign=0)


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """Evidence of the last layer on an update's factor.

    Attributes:
        fits: factors that explain the layer's part of the update.
        sizes: possible range of the factor.
        decay: multiple of the weights in the update.
        sparing: whether biases are exempt from the weight decay.
        why_none: why the factor is undetermined; empty if it is determined.
        excluded: whether no factor makes the update a gradient.
    """

    fits: tuple[ScaleFit, ...] = ()
    sizes: ScaleRange = _ANY
    decay: float = 0.0
    sparing: bool = False
    why_none: str = ""
    excluded: bool = False


def _evidence(layer: LogitLayer | None, layout: Layout, values: Tensor, declared: Declared, digits: float) -> _Evidence:
    if layer is None:
        return _Evidence(why_none="the model is not known to end in a linear layer")
    if lacking := [name for name in (layer.weight, layer.bias) if name is not None and name not in layout.names]:
        return _Evidence(why_none=f"the update lacks {lacking[0]!r}, of the last layer")
    by_name = layout.unflatten(values)
    weight = by_name[layer.weight]
    shown: ndarray = (weight if layer.bias is None else torch.cat([weight, by_name[layer.bias][:, None]], 1)).numpy()
    if declared.noise_multiplier > 0 and declared.clip_norm is not None:
        noise = declared.noise_multiplier * declared.clip_norm / declared.batch_size
        return _Evidence(fits=tuple(by_noise(layer, shown, noise)), sizes=by_size(layer, shown, declared.batch_size))
    # A difference has the rounding errors of the subtracted weights.
    of_weights = torch.finfo(torch.float32).eps * abs(layer.values).max()
    rounding = max(digits * abs(shown).max(), of_weights) / 2
    multiple, residual = decay(layer, shown, rounding)
    if residual > _SUMS:
        return _Evidence(
            why_none="the last layer's gradient must add up to 0 over the classes, as that of every cross-entropy "
            "does, and the update's does not: another loss, noise, or an optimizer that scales entries, as Adam does",
            excluded=True,
        )
    sparing = False
    if multiple and layer.bias is not None:
        added = multiple * float(layer.values[:, -1].sum())
        sparing = abs(added) > 10 * rounding and abs(float(shown[:, -1].sum())) < 0.3 * abs(added)
    if multiple:
        decay_term = multiple * layer.values
        if sparing:
            decay_term[:, -1] = 0.0
        shown = shown - decay_term
    rounding = max(digits * abs(shown).max() / 2, residual * rounding)
    clipped = declared.clip_norm is not None
    fits = by_examples(layer, shown, declared.batch_size, rounding, clipped=clipped)
    # Clipped examples have weights of at most 1, so label counts need not be whole.
    fits = fits if fits or clipped else by_labels(layer, shown, declared.batch_size, rounding / abs(shown).max())
    sizes = by_size(layer, shown, declared.batch_size)
    why = "" if fits else "its last layer leaves the factor open"
    return _Evidence(fits=tuple(fits), sizes=sizes, decay=multiple, sparing=sparing, why_none=why)


def _decided(evidence: _Evidence, declared: Declared, *, weights: bool, length: float) -> Convention:
    """Selects the convention by the declaration and the factors that fit."""
    named = _named(declared, weights)
    if declared.clip_norm is not None and not declared.noise_multiplier:
        return _of_clipped(evidence, declared, named, length)
    fits, lr = evidence.fits, declared.lr
    if declared.update_is is not None and named:
        ((name, factor),) = named.items()
        if any(fit.fits(factor) for fit in fits) or _unopposed(evidence, factor):
            return Convention(words=_WORDS[name], factor=factor)
        shows = f"its last layer shows {_described(fits[0].factor, declared.batch_size, weights)}" if fits else ""
        shows = shows or (evidence.why_none if evidence.excluded else "its last layer is of another size or sign")
        return Convention(
            words=_WORDS[name],
            factor=factor,
            ambiguous=f"--update-is {name} does not fit the update, for {shows}: convention, --lr or --batch-size is "
            "another, and no result is to be trusted",
        )
    if declared.update_is is not None:  # a difference or weights at an undeclared rate
        sign = 1 if weights else -1
        own = [fit for fit in fits if fit.factor * sign > 0 and fit.by != "noise"]
        if len(own) == 1:
            return _by_fit(own[0], declared, weights)
        return Convention(
            words=_WORDS[declared.update_is],
            factor=sign * _middle(evidence.sizes),
            ambiguous=f"--update-is {declared.update_is} leaves the scale open, and so does the last layer; pass --lr, "
            "until then no result is to be trusted",
        )
    hits = [name for name, factor in named.items() if any(fit.fits(factor) for fit in fits)]
    if len(hits) == 1:
        (name,) = hits
        unused = f" --lr {lr:g} was not used." if lr is not None and name in ("gradient", "sum") else ""
        plain = not unused and name in ("gradient", "weights")
        return Convention(
            words=_WORDS[name],
            factor=named[name],
            notes=() if plain else (f"The update is {_WORDS[name]}, by what its last layer shows.{unused}",),
        )
    signed = [fit for fit in fits if fit.factor * evidence.sizes.sign >= 0 and fit.by != "noise"]
    if not hits and len(signed) == 1:
        return _by_fit(signed[0], declared, weights)
    if weights and lr is not None and _unopposed(evidence, lr):
        return Convention(words=_WORDS["weights"], factor=lr)
    if weights and lr is None:
        raise ValueError("the update must be a gradient, and looks like the model's weights; give --lr, of that step")
    return _open(evidence, declared, named, weights)


def _unopposed(evidence: _Evidence, factor: float) -> bool:
    """Returns whether the evidence permits a declared factor, if the last layer leaves it open."""
    return not evidence.fits and not evidence.excluded and evidence.sizes.allow(factor)


def _named(declared: Declared, weights: bool) -> dict[str, float]:
    """Returns the factors of the possible conventions under the declaration."""
    lr, size = declared.lr, float(declared.batch_size)
    if weights:
        return {} if lr is None else {"weights": lr}
    named = {"gradient": 1.0} | ({"sum": size} if size > 1 else {}) | ({} if lr is None else {"difference": -lr})
    if declared.update_is is None:
        return named
    if declared.update_is == "sum":
        return {"sum": size}
    return {name: factor for name, factor in named.items() if name == declared.update_is}


def _of_clipped(evidence: _Evidence, declared: Declared, named: Mapping[str, float], length: float) -> Convention:
    """Selects the convention of clipped gradients by length, at most the clip norm: each example has its own factor."""
    assert declared.clip_norm is not None  # noqa: S101 -- by the caller
    signs = {math.copysign(1, fit.factor) for fit in evidence.fits}
    sign = signs.pop() if len(signs) == 1 else evidence.sizes.sign
    most = declared.clip_norm * (1 + 1e-4)
    within = [name for name, factor in named.items() if length <= abs(factor) * most and factor * sign >= 0]
    name = "gradient" if "gradient" in within else next(iter(within or named), "")
    known = bool(within) and not evidence.excluded and (sign != 0 or declared.update_is is not None)
    statement = f"--update-is {declared.update_is} or --lr" if declared.update_is else "a convention"
    return Convention(
        words=_WORDS.get(name, _WORDS["difference"]),
        factor=named.get(name, sign or 1.0),
        ambiguous=""
        if known
        else f"{statement} must give the mean of gradients no longer than --clip-norm {declared.clip_norm:g}, and "
        f"{'the sign cannot be told' if within and not evidence.excluded else 'by length and sign none does'}; "
        f"{_OPTION}, until then no result is to be trusted",
    )


def _by_fit(fit: ScaleFit, declared: Declared, weights: bool) -> Convention:
    """Returns the convention of a factor known only from the last layer."""
    words = _described(fit.factor, declared.batch_size, weights)
    unlike = f", and --lr {declared.lr:g} is another" if declared.lr is not None else ""
    return Convention(
        words=words,
        factor=fit.factor,
        notes=(f"The update is {words}, by what its last layer shows{unlike}; attacks take it for that.",),
    )


def _open(evidence: _Evidence, declared: Declared, named: Mapping[str, float], weights: bool) -> Convention:
    """Returns the first possible convention, with all alternatives."""
    allowed = [name for name, factor in named.items() if evidence.sizes.allow(factor)]
    difference = not weights and declared.lr is None and evidence.sizes.sign <= 0
    factor = named[allowed[0]] if allowed else (-1 if difference else 1) * _middle(evidence.sizes)
    words = _WORDS[allowed[0]] if allowed else _described(factor, declared.batch_size, weights)
    if difference:
        allowed = [*allowed, "difference"]
    several = len(evidence.fits) > 1
    why = "several factors explain its last layer" if several else evidence.why_none or "no convention fits"
    may = " or ".join(_WORDS[name] for name in allowed) or "none of the conventions by its size"
    return Convention(
        words=words,
        factor=factor,
        ambiguous=f"What the update is cannot be told, for {why}; it may be {may}, or one with another factor; "
        f"{_OPTION}, until then no result is to be trusted",
    )


def _described(factor: float, batch: int, weights: bool) -> str:
    if weights:
        return f"new weights after a step at a rate of {factor:.4g}" if factor > 0 else "no step down the gradient"
    if factor < 0:
        return f"{_WORDS['difference']} at a rate of {-factor:.4g}, which is a gradient times {factor:.4g}"
    known = next(
        (name for name, multiple in (("gradient", 1.0), ("sum", batch)) if abs(factor / multiple - 1) < 0.02), ""
    )
    return _WORDS[known] if known else f"a mean gradient times {factor:.4g}"


def _signs(values: Tensor) -> tuple[str, str] | None:
    """Describes an update that consists of signs, and why it has no gradient; None if its entries vary in size."""
    sizes = values.abs()
    # Entries with zero gradient contain only weight decay.
    sizes = sizes[sizes > 0.1 * sizes.max()]
    middle = float(sizes.median())
    share = float(((sizes - middle).abs() < 0.02 * middle).double().mean())
    if len(sizes) < 20 or share < _SIGNS:
        return None
    words = f"signs times {middle:.3g}"
    return words, (
        f"{share:.0%} of the update's large entries have one size, {middle:.3g}, as after a first step of Adam or of "
        "signs: it holds the gradient's signs and not the gradient; share a gradient, or a step of SGD"
    )


def _middle(sizes: ScaleRange) -> float:
    """Geometric mean of the possible sizes of a factor; 1 if the range is unbounded."""
    return math.sqrt(sizes.low * sizes.high) if sizes.low > 0 and sizes.high < math.inf else 1.0


def _are_weights(file: Tensor, before: Tensor) -> bool:
    """Returns whether a file contains the weights about once: a gradient is nearly orthogonal to them."""
    cosine = float(nn.functional.cosine_similarity(file, before, dim=0))
    share = float(file @ before / (before @ before).clamp(min=1e-300))
    # A long step lowers the cosine by its length alone.
    return cosine > _LIKE_WEIGHTS or (cosine > 0.4 and abs(share - 1) < 0.3)
