"""Which parts of a run are ours, so that a claim can say which are not.

A guarantee rests on code that treats every row by itself, bounds it, and draws the noise that is charged. Ours is held
to that by tests. Anybody may write a codec, a bound or a source of noise of their own, and no code can check what it
does: a codec may count the rows, or give back in `decode` what it saw in `encode`. So exact types are compared, and
whatever else took part is named in the claim, in the record and on the board. An optimizer is handed releases alone,
but one of somebody's own may know the data from elsewhere: PyTorch's are known by their package.
"""

from __future__ import annotations

from collections.abc import Iterator

from .augment import CropAndFlip
from .bound import Bound
from .codec import Complement, Coordinates, Everything, Subspace
from .defense import Block, Defense, StepPlan
from .noise import PhiloxNoise, SecureNoise
from .post import Identity, Keep, Offset, Project
from .query import Gradient, GradientDifference, NormWithin
from .sampling import Sampling

_OURS: dict[str, tuple[type, ...]] = {
    "defense": (Defense,),
    "plan": (StepPlan,),
    "block": (Block,),
    "codec": (Everything, Coordinates, Subspace, Complement),
    "bound": (Bound,),
    "query": (Gradient, GradientDifference, NormWithin),
    "post": (Identity, Project, Keep, Offset),
    "noise": (PhiloxNoise, SecureNoise, type(None)),
    "augmentation": (CropAndFlip, type(None)),
    "sampling": (Sampling,),
}


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
        of_torch = role == "optimizer" and kind.__module__.startswith("torch.optim")
        if kind not in _OURS.get(role, ()) and not of_torch:
            found[f"unverified_{role}"] = (
                f"{role} {kind.__qualname__} (of {kind.__module__}) is none of leakbench's: "
                "that it does what the claim assumes of it is not checked"
            )
    return found


def _roles(parts: dict[str, object]) -> Iterator[tuple[str, object]]:
    for role, part in parts.items():
        yield role, part
        if role == "plan" and isinstance(part, StepPlan):
            for block in part.blocks:
                yield from (("block", block), ("codec", block.codec), ("bound", block.bound), ("query", block.query))
                if isinstance(block.codec, Complement):
                    yield "codec", block.codec.subspace
            if isinstance(part.post, Project):
                yield "codec", part.post.subspace
            if isinstance(part.post, Keep):
                yield "codec", part.post.coordinates
            yield "post", part.post
