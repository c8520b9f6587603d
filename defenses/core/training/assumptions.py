"""Assumptions of a privacy claim, and the parts of a run that are not this package's, for the claim to name.

A guarantee rests on code that treats every row by itself, bounds it, and draws the noise that is charged. Ours is held
to that by tests. Anybody may write a codec, a bound or a source of noise of their own, and no code can check what it
does: a codec may count the rows, or give back in `decode` what it saw in `encode`. So exact types are compared, and
whatever else took part is named in the claim, in the record and on the board. A method and an optimizer are handed
public things and releases alone, but a user's own may know the data from elsewhere: ours, and PyTorch's, are
known by their package.
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
from ..plan.composed_codecs import Masked, Stacked, Stretched, Within, made_of
from ..plan.defense import Block, Defense, StepPlan, Trial
from ..plan.families.adaptive_clip_norm import EncodedNormWithin
from ..plan.implicit_subspace import ImplicitSubspace
from ..plan.noise_correlation import Banded, BandedInverse, Buffered, StrategyRow, Tree
from ..plan.post import Keep, Post, Project
from ..plan.query import Gradient, GradientAhead, GradientDifference, GradientLess, LossChange, NormWithin
from ..privacy.sampling import Sampling
from ..randomness.noise import CipherNoise, SecureNoise

_PACKAGE = __name__.partition(".core.")[0]
# With the dot: a package whose name begins like one of these is not it.
# A map after the noise is as free as a method, and may stand in its file.
_BY_PACKAGE = {"method": f"{_PACKAGE}.", "post": f"{_PACKAGE}.", "optimizer": "torch.optim."}
_COMPOSED = (Within, Masked, Stacked, Stretched)
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
    size_public: bool = False,
) -> tuple[str, ...]:
    """What the guarantee of a run assumes, a sentence each.

    Args:
        noise: kind of the noise that was drawn; "none" where none was.
        sampling: the sampler.
        key_given: whether its key was given, and not drawn from the operating system.
        public_used: whether public examples were read.
        resumed: whether the run went on from a checkpoint.
        size_public: whether the number of records is taken for public, which decides nothing where neighbours have as
            many of them.
    """
    found = [_OF_NOISE[noise]] if noise != "none" else []
    if resumed and noise == "secure":
        found.append(
            "the run went on once from its checkpoint, and nobody saw steps that it had taken after that was written: "
            "they were taken again with other noise"
        )
    if sampling.amplifies:
        found.append(
            "the sampler's key was given: amplification protects from nobody who knows it"
            if key_given
            else "the sampler's key, drawn from the operating system, stays secret"
        )
    if size_public and sampling.relation == "add_remove":
        found.append(
            "the number of examples is public: the expected batch that sums are divided by, and the sample rate, may "
            "follow from it"
        )
    if public_used:
        found.append("the public examples are public, and tell nothing of the private ones")
    return tuple(found)


def unverified(**parts: object) -> dict[str, str]:
    """What took part and is not ours.

    Args:
        parts: of a run, by role: `noise`, `augmentation`, `sampling`, `optimizer`, `defense`, or a `plan` with
            all that is in it.

    Returns:
        Mark of a record, as `unverified_codec` -> a sentence for the claim.
    """
    found = {}
    for role, part in _roles(parts):
        kind = type(part)
        package = _BY_PACKAGE.get(role)
        known = kind in _OURS.get(role, ()) or (package is not None and f"{kind.__module__}.".startswith(package))
        if not known or any(_foreign_function(value) for value in _attributes(part).values()):
            # A user's own file is run under a made-up name; its own says more.
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
            place = Path(file).name if kind.__module__.startswith("leakbench_method_") else kind.__module__
            found[f"unverified_{role}"] = (
                f"{role} {kind.__qualname__} (of {place}) is none of leakbench's: "
                "that it does what the claim assumes of it is not checked"
            )
    return found


def posts_beside(defense: Defense) -> list[type]:
    """Classes of maps after the noise in the files of a defense's methods, as far as these are ours."""
    found = []
    for role, part in _roles({"defense": defense}):
        module = sys.modules[type(part).__module__]
        if role == "method" and f"{module.__name__}.".startswith(_BY_PACKAGE["post"]):
            own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
            found += [kind for kind in own if isinstance(kind, type) and is_dataclass(kind) and issubclass(kind, Post)]
    return found


def _roles(parts: dict[str, object]) -> Iterator[tuple[str, object]]:
    for role, part in parts.items():
        yield role, part
        if role == "defense" and isinstance(part, Defense):
            yield "method", part.method
            # One of ours asks them for its plans, so they are as much of the method as itself. What is in a plan is
            # looked at there.
            yield from (("method", inner) for inner in _inside(part.method))
        if role == "plan" and isinstance(part, StepPlan):
            yield "trial", part.trial
            for block in part.blocks:
                yield from (("block", block), ("bound", block.bound), ("query", block.query))
                yield from (("codec", codec) for codec in made_of(block.codec))
                if isinstance(block.query, EncodedNormWithin):
                    yield from (("query", block.query.within), ("query", block.query.query))
                    yield from (("codec", codec) for codec in made_of(block.query.codec))
            if isinstance(part.post, Project):
                yield "codec", part.post.subspace
            if isinstance(part.post, Keep):
                yield "codec", part.post.coordinates
            yield "post", part.post
            if part.correlated is not None:
                yield from (("row", part.correlated), ("strategy", part.correlated.strategy))


def _inside(part: object) -> Iterator[object]:
    """Objects that one of ours was given, and those that these were given, but for what plans are made of."""
    for value in _attributes(part).values():
        for one in value if isinstance(value, tuple | list) else (value,):
            module = type(one).__module__
            if module not in ("builtins", "torch") and not isinstance(one, Bound):
                yield one
                if f"{module}.".startswith(_BY_PACKAGE["method"]):
                    yield from _inside(one)


def _attributes(part: object) -> dict[str, object]:
    return getattr(part, "__dict__", {})


def _foreign_function(value: object) -> bool:
    """Whether a function was put into an instance, in place of one of its class perhaps."""
    return isinstance(value, FunctionType) and not value.__module__.startswith(_BY_PACKAGE["method"])
