"""Side information of a step's message: the mask or basis of its numbers, read off rehearsed plans.

A receiver of coefficients needs their directions, and a receiver of some of the coordinates their positions. Either
follows from public randomness, whose seed is sent; from public examples, from which a receiver recomputes it or is sent
it; or from earlier releases, which the receiver has. A rehearsal executes a method's plans on synthetic gradients.
Rehearsals with another seed and with other public examples show which of the three is the source; a repeated rehearsal
with the same inputs detects other randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakbench.defenses.core import Coordinates, Keep, Project, StepPlan, Subspace, nested_codecs

SEED = 8  # bytes
_FLOAT = 4  # bytes per float32 number

KnownFrom = Literal["public coins", "public examples", "releases", "other coins"]


@dataclass(frozen=True, kw_only=True)
class SideInformation:
    """A mask or a basis that a receiver must know.

    Attributes:
        kind: "mask" or "basis".
        source: what it is a function of.
        size: bytes of the seed, or of the mask or basis itself if a receiver cannot recompute it; 0 if it can.
        after_noise: whether it is applied only after the noise, to a release of all coordinates.
    """

    kind: Literal["mask", "basis"]
    source: KnownFrom
    size: int
    after_noise: bool

    def to_dict(self) -> dict[str, object]:
        """Returns JSON values."""
        return {"what": self.kind, "source": self.source, "bytes": self.size, "after_noise": self.after_noise}

    def line(self) -> str:
        """Returns a sentence."""
        use = f"the {self.kind}" + " of the noisy update" * self.after_noise
        if self.source == "public coins":
            return f"sends besides: a seed of {self.size} bytes, once: {use} is drawn by public coins"
        if self.source == "other coins":
            return (
                f"sends besides: {self.size:,} bytes whenever it is made anew: {use} is not drawn by the public coins, "
                "`context.coins`, of which a receiver has the seed"
            )
        if self.source == "public examples":
            return (
                f"sends besides: nothing where a receiver computes {use} from the same public examples; else "
                f"{self.size:,} bytes whenever it is made anew"
            )
        return f"sends besides: nothing: {use} is a function of the initial parameters and of past releases"


def side_information(
    plan: StepPlan, *, again: StepPlan, other_seed: StepPlan, other_examples: StepPlan, public: bool
) -> tuple[SideInformation, ...]:
    """Returns the masks and bases of a plan: at most a mask and a basis for the release, and for the map after it.

    Args:
        plan: plan of a step.
        again: plan of the same step in a run with the same public randomness and examples.
        other_seed: plan of the same step in a run whose public randomness has another seed.
        other_examples: plan of the same step in a run with other public examples, used for masks.
        public: whether public examples were read; bases are then attributed to them.
    """
    sent = []
    repeated, drawn, read = _by_kind(again), _by_kind(other_seed), _by_kind(other_examples)
    for (kind, after_noise), tensor in _by_kind(plan).items():
        of_examples = public and (kind == "basis" or _differs(tensor, read.get((kind, after_noise))))
        of_coins = _differs(tensor, drawn.get((kind, after_noise)))
        source: KnownFrom = "public examples" if of_examples else "public coins" if of_coins else "releases"
        if _differs(tensor, repeated.get((kind, after_noise))):
            source = "other coins"
        codecs = _after(plan) if after_noise else _released(plan)
        whole = _bitmap(codecs) if kind == "mask" else _matrices(codecs)
        size = {"public coins": SEED, "releases": 0}.get(source, whole)
        sent.append(SideInformation(kind=kind, source=source, size=size, after_noise=after_noise))
    return tuple(sent)


def masked(plan: StepPlan) -> bool:
    """True if a plan selects some of the coordinates by a mask."""
    return any(kind == "mask" for kind, _ in _by_kind(plan))


def _by_kind(plan: StepPlan) -> dict[tuple[Literal["mask", "basis"], bool], Tensor]:
    """Returns each mask and basis as a tensor, by its kind and whether it is applied only after the noise."""
    tensors: dict[tuple[Literal["mask", "basis"], bool], Tensor] = {}
    for after_noise, codecs in ((False, _released(plan)), (True, _after(plan))):
        if (mask := _mask(codecs)) is not None:
            tensors["mask", after_noise] = mask
        if (directions := _directions(codecs)) is not None:
            tensors["basis", after_noise] = directions
    return tensors


def _differs(tensor: Tensor, otherwise: Tensor | None) -> bool:
    return otherwise is None or not torch.equal(tensor, otherwise)


def _released(plan: StepPlan) -> list[object]:
    return [codec for block in plan.blocks if block.updates for codec in nested_codecs(block.codec)]


def _after(plan: StepPlan) -> list[object]:
    of_map = plan.post.coordinates if isinstance(plan.post, Keep) else None
    of_map = plan.post.subspace if isinstance(plan.post, Project) else of_map
    # A map on the subspace that is released already adds no side information.
    return [] if of_map is None or any(of_map is codec for codec in _released(plan)) else [of_map]


def _mask(codecs: list[object]) -> Tensor | None:
    """Returns the coordinates in masks; None if masks only divide all coordinates among blocks, as layer by layer."""
    masks = [codec for codec in codecs if isinstance(codec, Coordinates)]
    named = torch.cat([mask.kept for mask in masks]).unique() if masks else torch.zeros(0)
    return named if masks and 0 < named.numel() < masks[0].dim else None


def _bitmap(codecs: list[object]) -> int:
    return next((-(-codec.dim // 8) for codec in codecs if isinstance(codec, Coordinates)), 0)


def _directions(codecs: list[object]) -> Tensor | None:
    """Returns the sum of each basis's directions, which differs between bases; None if all spans are kept whole."""
    directions = [codec.decode(torch.ones(codec.size)) for codec in _subspaces(codecs)]
    return torch.cat(directions) if _matrices(codecs) else None


def _matrices(codecs: list[object]) -> int:
    """Returns the bytes of the bases: a span of coordinates that is kept whole, as short ones are, needs none."""
    return _FLOAT * sum(
        (stop - start) * rank
        for codec in _subspaces(codecs)
        for (start, stop), rank in zip(codec.spans, codec.ranks, strict=True)
        if rank < stop - start
    )


def _subspaces(codecs: list[object]) -> list[Subspace]:
    """Returns the distinct subspaces: a block of coefficients and the block of the remainder share one."""
    return list({id(codec): codec for codec in codecs if isinstance(codec, Subspace)}.values())
