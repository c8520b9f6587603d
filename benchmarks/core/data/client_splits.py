"""Client splits: division of a pool's examples among clients of federated learning, from i.i.d. to a class each.

- "iid": at random, sizes within one of each other.
- "by_class": sorted by class and cut into shards, `classes_per_client` of them to a client: McMahan et al.,
  "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section 3.
- "dirichlet": each class is divided in proportions drawn from a symmetric Dirichlet distribution: Hsu, Qi & Brown,
  "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019, in the
  form of Yurochkin et al., ICML 2019 (per class, so that nothing is dealt twice or left over).

Random numbers come from NumPy's Philox generator keyed by the seed. Its stream is fixed, but NumPy may change how it
derives a permutation or a gamma variable, so the splits are tied to a release of NumPy.
"""

import math
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

How = Literal["iid", "by_class", "dirichlet"]


def client_splits(
    labels: Int64[Tensor, " examples"],
    clients: int,
    *,
    how: str,
    seed: int,
    alpha: float = 0.5,
    classes_per_client: int = 2,
    smallest: int = 1,
) -> list[Int64[Tensor, "_"]]:
    """Positions in `labels` held by each client: disjoint, complete, each sorted.

    Args:
        labels: class of each example.
        clients: number of clients.
        how: "iid", "by_class" or "dirichlet".
        seed: the same seed gives the same splits.
        alpha: concentration of the Dirichlet distribution (dimensionless): below 0.1 most of a class belongs to a
            single client, above 100 clients have nearly equal distributions.
        classes_per_client: number of shards of the sorted examples per client; a shard may span two classes.
        smallest: least number of examples of a client. Clients that get fewer by chance are filled with random examples
            of the largest.

    Raises:
        ValueError: a value is out of range, or the clients need more examples than there are.
    """
    # Dealt on the CPU by NumPy, so that a seed gives the same clients on every device.
    labels = labels.cpu()
    _check(len(labels), clients, how, seed, alpha, classes_per_client, smallest)
    generator = np.random.Generator(np.random.Philox(seed))
    shuffled = generator.permutation(len(labels))
    if how == "iid":
        parts = np.array_split(shuffled, clients)
    elif how == "by_class":
        parts = _by_class(labels.numpy(), shuffled, clients, classes_per_client, generator)
    else:
        parts = _dirichlet(labels.numpy(), shuffled, clients, alpha, generator)
    _top_up(parts, smallest, generator)
    return [torch.from_numpy(np.sort(part)).to(torch.int64) for part in parts]


def _check(
    examples: int, clients: int, how: str, seed: int, alpha: float, classes_per_client: int, smallest: int
) -> None:
    if how not in get_args(How):
        raise ValueError(f"how must be one of {', '.join(get_args(How))}, got {how!r}")
    for name, value, least in (
        ("clients", clients, 1),
        ("classes_per_client", classes_per_client, 1),
        ("smallest", smallest, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be a positive number, got {alpha}")
    if clients * smallest > examples:
        raise ValueError(
            f"clients x smallest must be at most the number of examples, {examples}, got {clients} x {smallest}"
        )
    if how == "by_class" and clients * classes_per_client > examples:
        raise ValueError(
            f"clients x classes_per_client must be at most the number of examples, {examples}, "
            f"got {clients} x {classes_per_client}"
        )


def _by_class(
    labels: np.ndarray, shuffled: np.ndarray, clients: int, classes_per_client: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Shards of the examples sorted by class (in random order within a class), dealt at random."""
    # Stable, so that examples of a class stay in random order.
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shards = np.array_split(by_label, clients * classes_per_client)
    dealt = generator.permutation(len(shards)).reshape(clients, classes_per_client)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in dealt]


def _dirichlet(
    labels: np.ndarray, shuffled: np.ndarray, clients: int, alpha: float, generator: np.random.Generator
) -> list[np.ndarray]:
    """Splits each class, in random order, at the cumulative sums of its proportions."""
    cuts = []
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        # Without the last cumulative proportion: it is the whole class, up to the rounding of its sum.
        ends = np.cumsum(generator.dirichlet(np.full(clients, alpha)))[:-1]
        cuts.append(np.split(members, np.round(ends * len(members)).astype(np.int64)))
    return [np.concatenate(hand) for hand in zip(*cuts, strict=True)]


def _top_up(parts: list[np.ndarray], smallest: int, generator: np.random.Generator) -> None:
    """Fills clients below `smallest` with random examples of the client that has the most."""
    for poor in range(len(parts)):
        while (short := smallest - len(parts[poor])) > 0:
            rich = max(range(len(parts)), key=lambda client: len(parts[client]))
            shuffled = generator.permutation(parts[rich])
            # The giver must keep `smallest` examples itself.
            moved = min(short, len(shuffled) - smallest)
            parts[rich], parts[poor] = shuffled[moved:], np.concatenate([parts[poor], shuffled[:moved]])
