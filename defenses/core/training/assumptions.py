"""Assumptions of a privacy claim, and the components of a run from outside leakbench, which the claim names.

A guarantee rests on code that processes every row independently, bounds it, and draws the noise that is charged. Tests
check this of leakbench's code. Users may write their own codec, bound or source of noise, whose behaviour no code can
check: a codec may count the rows, or return in `decode` the rows it saw in `encode`. Exact types are therefore
compared, and any other component is named in the claim, in the record and on the leaderboard. Methods and optimizers
receive public values and releases only, but one written by a user may have obtained the data elsewhere: those of
leakbench and PyTorch are identified by their package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import FunctionType

from ..gradients.augmentation import CropAndFlip, RecordSchedule
from ..plan.bound import Bound
from ..plan.codec import Complement, Coordinates, Everything, Scaled, Subspace
from ..plan.composed_codecs import ConcatenatedCodec, Masked, SpanCodec, Stretched, nested_codecs
from ..plan.defense import Block, Defense, StepPlan, Trial
from ..plan.families.adaptive_clip_norm import EncodedNormWithin
from ..plan.implicit_subspace import ImplicitSubspace
from ..plan.noise_correlation import Banded, BandedInverse, Buffered, StrategyRow, Tree
from ..plan.post import Keep, Post, Project
from ..plan.query import Gradient, GradientAhead, GradientDifference, GradientLess, LossChange, NormWithin
from ..privacy.sampling import Sampling
from ..randomness.noise import CipherNoise, SecureNoise

_PACKAGE = __name__.partition(".core.")[0]
# With the dot, which excludes packages whose names only begin alike. Post-processing costs no privacy, like a method,
# and may be defined in the method's file.
_BY_PACKAGE = {role: f"{_PACKAGE}." for role in ("method", "post", "rule", "messages", "server")}
_BY_PACKAGE["optimizer"] = "torch.optim."
_COMPOSED = (SpanCodec, Masked, ConcatenatedCodec, Stretched)
_OURS: dict[str, tuple[type, ...]] = {
    "defense": (Defense,),
    "plan": (StepPlan,),
    "row": (StrategyRow,),
    "block": (Block,),
    "trial": (Trial, type(None)),
    "codec": (Everything, Coordinates, Scaled, Subspace, ImplicitSubspace, Complement, *_COMPOSED),
    "bound": (Bound,),
    "query": (Gradient, GradientAhead, GradientDifference, GradientLess, LossChange, NormWithin, EncodedNormWithin),
    "noise": (CipherNoise, SecureNoise, type(None)),
    "augmentation": (CropAndFlip, RecordSchedule, type(None)),
    "sampling": (Sampling,),
    "strategy": (Banded, BandedInverse, Buffered, Tree),
}


_OF_NOISE = {
    "seeded": "the noise follows from a seed: the claim holds for nobody who knows or guesses it",
    "os": "nobody tells the stream of the cipher ChaCha20, under a key from the operating system, from fair bits; "
    "sums are those of exact arithmetic up to float32 rounding",
    "secure": "the operating system's random bits are fair and independent",
}


def assumptions(
    noise: str,
    sampling: Sampling,
    *,
    key_given: bool,
    public_used: bool,
    resumed: bool = False,
    repeated: bool = False,
    size_public: bool = False,
) -> tuple[str, ...]:
    """Returns the assumptions of a run's guarantee, a sentence each.

    Args:
        noise: kind of the noise that was drawn; "none" if none was.
        sampling: the sampler.
        key_given: whether the sampler's key was given, and not drawn from the operating system.
        public_used: whether public examples were read.
        resumed: whether the run continued from a checkpoint.
        repeated: whether it took steps again with the same seeded noise, after an interruption.
        size_public: whether the number of records is treated as public, which is irrelevant if neighbours have the same
            number.
    """
    sentences = [_OF_NOISE[noise]] if noise != "none" else []
    if resumed and noise != "none":
        sentences.append("nobody else goes on from a copy of the run's checkpoint")
    if repeated and noise != "none":
        sentences.append(
            "steps that were taken again after an interruption gave the same releases: data, code and machine are "
            "those of the interrupted run"
        )
    if sampling.amplifies:
        sentences.append(
            "the sampler's key was given: amplification protects from nobody who knows it"
            if key_given
            else "the sampler's key, drawn from the operating system, stays secret"
        )
    if size_public and sampling.relation == "add_remove":
        sentences.append(
            "the number of examples is public: the expected batch that sums are divided by, and the sample rate, may "
            "follow from it"
        )
    if public_used:
        sentences.append("the public examples are public, and tell nothing of the private ones")
    return tuple(sentences)


def unverified(**parts: object) -> dict[str, str]:
    """Returns the components of a run from outside leakbench.

    Args:
        parts: components by role: `noise`, `augmentation`, `sampling`, `optimizer`, `defense`, or a `plan` with all
            that is in it.

    Returns:
        Mark of a record, such as `unverified_codec` -> a sentence for the claim.
    """
    sentences = {}
    for role, part in _roles(parts):
        kind = type(part)
        package = _BY_PACKAGE.get(role)
        known = kind in _OURS.get(role, ()) or (package is not None and f"{kind.__module__}.".startswith(package))
        if not known or any(_foreign_function(value) for value in _attributes(part).values()):
            # A user's file is imported under a generated name; the file name says more.
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
            place = Path(file).name if kind.__module__.startswith("leakbench_method_") else kind.__module__
            sentences[f"unverified_{role}"] = (
                f"{role} {kind.__qualname__} (of {place}) is none of leakbench's: "
                "that it does what the claim assumes of it is not checked"
            )
    return sentences


def own_posts(defense: Defense) -> list[type]:
    """Returns post-processing classes defined in the files of a defense's methods, where a method is leakbench's."""
    classes = []
    for role, part in _roles({"defense": defense}):
        module = sys.modules[type(part).__module__]
        if role == "method" and f"{module.__name__}.".startswith(_BY_PACKAGE["post"]):
            own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
            classes += [
                kind for kind in own if isinstance(kind, type) and is_dataclass(kind) and issubclass(kind, Post)
            ]
    return classes


def _roles(parts: dict[str, object]) -> Iterator[tuple[str, object]]:
    for role, part in parts.items():
        yield role, part
        if role == "defense" and isinstance(part, Defense):
            yield "method", part.method
            # The method calls these for its plans, so they are part of the method. The components of a plan are checked
            # under "plan".
            yield from (("method", inner) for inner in _inside(part.method))
        if role == "plan" and isinstance(part, StepPlan):
            yield "trial", part.trial
            for block in part.blocks:
                yield from (("block", block), ("bound", block.bound), ("query", block.query))
                yield from (("codec", codec) for codec in nested_codecs(block.codec))
                if isinstance(block.query, EncodedNormWithin):
                    yield from (("query", block.query.within), ("query", block.query.query))
                    yield from (("codec", codec) for codec in nested_codecs(block.query.codec))
            if isinstance(part.post, Project):
                yield "codec", part.post.subspace
            if isinstance(part.post, Keep):
                yield "codec", part.post.coordinates
            yield "post", part.post
            if part.correlated is not None:
                yield from (("row", part.correlated), ("strategy", part.correlated.strategy))


def _inside(part: object) -> Iterator[object]:
    """Yields objects that a leakbench object holds, and those that these hold, except the components of plans."""
    for value in _attributes(part).values():
        for component in value if isinstance(value, tuple | list) else (value,):
            module = type(component).__module__
            # A cache of an earlier run may hold a weak reference, which computes nothing.
            if module not in ("builtins", "torch", "weakref") and not isinstance(component, Bound):
                yield component
                if f"{module}.".startswith(_BY_PACKAGE["method"]):
                    yield from _inside(component)


def _attributes(part: object) -> dict[str, object]:
    return getattr(part, "__dict__", {})


def _foreign_function(value: object) -> bool:
    """Returns whether a function was set on an instance, possibly replacing a method of its class."""
    return isinstance(value, FunctionType) and not value.__module__.startswith(_BY_PACKAGE["method"])
