"""A prior for prior-aware reconstruction: candidates for a record, in an uninformative order.

An attacker who picks among n candidates succeeds with probability 1/n before the release only if nothing else
distinguishes the truth. The candidates therefore come from the same distribution, are all different, include no record
that the attacker knows otherwise, and hold the truth at a random position; their ids are positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakbench.attacks.core import Examples
from leakbench.defenses.core import keyed


@dataclass(frozen=True)
class Prior:
    """The candidates of a choice, and the position of the truth.

    Attributes:
        given: the candidates; an attack gets a copy.
        place: position of the truth; auditor only.
    """

    given: Examples
    place: int

    @classmethod
    def draw(
        cls,
        batch: tuple[Float[Tensor, "b *shape"], Int[Tensor, " b"]],
        pool: tuple[Float[Tensor, "p *shape"], Int[Tensor, " p"]],
        count: int,
        key: int,
        *,
        allowed: Int[Tensor, " a"] | None = None,
    ) -> Prior:
        """Draws a prior: the first example of a batch among `count - 1` others.

        Args:
            batch: inputs and labels; the attacker knows all of them except the first.
            pool: inputs and labels of others, from the same distribution as the batch.
            count: number of candidates, at least 2.
            key: seeds the choice of the others and the order, and nothing else.
            allowed: positions in the pool that may be drawn: examples in no step visible to the attacker; None for all.

        Raises:
            ValueError: the pool has too few distinct examples outside the batch.
        """
        if count < 2:
            raise ValueError(f"a prior must have at least 2 candidates, got {count}")
        (inputs, labels), (others, classes) = batch, pool
        generator, size = keyed(key), len(inputs)
        # Drawn on the CPU for every device, because a device's own generator would give another order.
        positions = torch.arange(len(others)) if allowed is None else allowed.cpu()
        order = positions[torch.randperm(len(positions), generator=generator)].to(others.device)
        place = int(torch.randint(count, (), generator=generator))
        looked_at, fresh = 2 * count, order[:0]
        # Duplicates are rare, so a part of the pool usually suffices; otherwise more of it is read.
        while len(fresh) < count - 1 and looked_at < 2 * (len(order) + count):
            part = order[:looked_at]
            fresh = part[_first_of_its_kind(torch.cat([inputs, others[part].to(inputs)]))[size:]]
            looked_at *= 2
        if len(fresh) < count - 1:
            raise ValueError(
                f"a prior of {count} needs {count - 1} different examples beside the batch, got {len(fresh)}; take a "
                "smaller one, or more non-members"
            )
        fresh = fresh[: count - 1]

        def among(record: Tensor, others_of_batch: Tensor) -> Tensor:
            others_of_batch = others_of_batch[fresh].to(record)
            return torch.cat([others_of_batch[:place], record[:1], others_of_batch[place:]])

        numbers = torch.arange(count, device=inputs.device)
        return cls(Examples(ids=numbers, inputs=among(inputs, others), labels=among(labels, classes)), place)


def _first_of_its_kind(inputs: Tensor) -> Tensor:
    """Returns a mask of first occurrences, bool [n]: true for an example that equals none before it."""
    _, kinds = torch.unique(inputs.flatten(1), dim=0, return_inverse=True)
    numbers = torch.arange(len(inputs), device=inputs.device)
    first = numbers.new_full((int(kinds.max()) + 1,), len(inputs)).scatter_reduce(0, kinds, numbers, "amin")
    return first[kinds] == numbers
