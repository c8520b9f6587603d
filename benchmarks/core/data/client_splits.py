"""Client splits: division of a pool's examples among the clients of federated learning, from i.i.d. to a class each.

- "iid": at random, sizes within one of each other.
- "class": sorted by class and cut into as many parts as clients, with nearly a class each if there are as many.
- "shards": sorted by class and cut into `shards` parts a client, dealt at random: McMahan et al.,
  "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section 3.
- "dirichlet": each class is divided in proportions drawn from a symmetric Dirichlet distribution: Hsu, Qi & Brown,
  "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019, in the
  form of Yurochkin et al., ICML 2019 (per class, so that nothing is dealt twice or left over).

Random decisions come from SHA-256 of the seed and the example's id, as those of pools do: the stream of a random
generator may change between releases of a library, and a split must not.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Int64
from scipy.special import gammaincinv, gammaln
from torch import Tensor

from .splits import content_digest

ClientSplit = Literal["iid", "class", "shards", "dirichlet"]
"""Name of a division."""


def client_splits(
    ids: Int64[Tensor, " examples"],
    labels: Int64[Tensor, " examples"],
    clients: int,
    *,
    split: str,
    seed: int,
    shards: int = 2,
    concentration: float = 0.5,
    least: int = 1,
) -> list[Int64[Tensor, "_"]]:
    """Returns the positions held by each client: disjoint, complete, each sorted.

    Args:
        ids: distinct numbers of the examples, as in `Split.ids`.
        labels: class of each example.
        clients: number of clients.
        split: "iid", "class", "shards" or "dirichlet".
        seed: the same seed gives the same splits.
        shards: for "shards", number of parts of the sorted examples per client; a part may span two classes.
        concentration: of the Dirichlet distribution (dimensionless): below 0.1 most of a class belongs to a single
            client, above 100 clients have nearly equal distributions.
        least: least number of examples of a client. Clients that get fewer by chance are filled with random examples
            of the largest.

    Raises:
        ValueError: a value is out of range, or the clients need more examples than there are.
    """
    _check(len(labels), clients, split, seed, shards, concentration, least)
    salt = f"clients/{split}/{seed}"
    hashes = [_hash(salt, name) for name in ids.tolist()]
    # Positions in the order of their hashes: a random permutation.
    shuffled = np.array(sorted(range(len(labels)), key=hashes.__getitem__), dtype=np.int64)
    classes = labels.cpu().numpy()
    if split == "iid":
        parts = np.array_split(shuffled, clients)
    elif split == "dirichlet":
        parts = _dirichlet(classes, shuffled, clients, concentration, salt)
    else:
        parts = _by_class(classes, shuffled, clients, shards if split == "shards" else 1, salt, deal=split == "shards")
    rank = np.empty(len(shuffled), dtype=np.int64)
    rank[shuffled] = np.arange(len(shuffled))
    _top_up(parts, least, rank)
    return [torch.from_numpy(np.sort(part)).to(torch.int64) for part in parts]


def clients_digest(ids: Int64[Tensor, " examples"], parts: Sequence[Int64[Tensor, "_"]]) -> str:
    """Returns the SHA-256 of the ids that each client holds, in hexadecimal.

    Args:
        ids: as for `client_splits`.
        parts: positions of each client.
    """
    return content_digest(*(ids.cpu()[part] for part in parts))


def _hash(salt: str, name: object) -> bytes:
    return hashlib.sha256(f"{salt}/{name}".encode()).digest()


def _uniform(salt: str, name: object) -> float:
    """Returns a number in (0, 1), with 53 random bits."""
    return ((int.from_bytes(_hash(salt, name)[:8], "big") >> 11) + 0.5) / 2**53


def _check(examples: int, clients: int, split: str, seed: int, shards: int, concentration: float, least: int) -> None:
    if split not in get_args(ClientSplit):
        raise ValueError(f"split must be one of {', '.join(get_args(ClientSplit))}, got {split!r}")
    lower_ends = (("clients", clients, 1), ("shards", shards, 1), ("least", least, 0), ("seed", seed, 0))
    for name, value, smallest in lower_ends:
        if value < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {value}")
    if not (math.isfinite(concentration) and concentration > 0):
        raise ValueError(f"concentration must be a positive number, got {concentration}")
    if clients * least > examples:
        raise ValueError(f"clients x least must be at most the number of examples, {examples}, got {clients} x {least}")
    if split == "shards" and clients * shards > examples:
        raise ValueError(
            f"clients x shards must be at most the number of examples, {examples}, got {clients} x {shards}"
        )


def _by_class(
    labels: np.ndarray, shuffled: np.ndarray, clients: int, shards: int, salt: str, *, deal: bool
) -> list[np.ndarray]:
    """Cuts the examples sorted by class, in random order within a class; `deal` deals the parts at random."""
    # Stable, so that examples of a class stay in random order.
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    parts = np.array_split(by_label, clients * shards)
    order = list(range(len(parts)))
    if deal:
        order.sort(key=lambda shard: _hash(f"{salt}/shard", shard))
    return [np.concatenate([parts[shard] for shard in order[i::clients]]) for i in range(clients)]


def _dirichlet(
    labels: np.ndarray, shuffled: np.ndarray, clients: int, concentration: float, salt: str
) -> list[np.ndarray]:
    """Splits each class, in random order, at the cumulative sums of its proportions."""
    cuts = []
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        proportions = _proportions(clients, concentration, f"{salt}/{concentration!r}/class {label}")
        # Without the last cumulative proportion: it is the whole class, up to the rounding of its sum.
        ends = np.cumsum(proportions)[:-1]
        cuts.append(np.split(members, np.round(ends * len(members)).astype(np.int64)))
    return [np.concatenate(hand) for hand in zip(*cuts, strict=True)]


def _proportions(clients: int, concentration: float, salt: str) -> np.ndarray:
    """Returns a draw of the symmetric Dirichlet distribution: gamma variables by inversion, over their sum."""
    uniforms = np.array([_uniform(salt, client) for client in range(clients)])
    with np.errstate(divide="ignore"):
        logs = np.log(gammaincinv(concentration, uniforms))
    # Underflow: P(a, x) = x^a / Gamma(a + 1) near 0, so log x = (log u + log Gamma(a + 1)) / a.
    small = (np.log(uniforms) + gammaln(concentration + 1)) / concentration
    logs = np.where(np.isfinite(logs), logs, small)
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


def _top_up(parts: list[np.ndarray], least: int, rank: np.ndarray) -> None:
    """Fills clients below `least` with examples of the client that has the most, the first of the random order."""
    for poor in range(len(parts)):
        while (short := least - len(parts[poor])) > 0:
            rich = max(range(len(parts)), key=lambda client: len(parts[client]))
            ordered = parts[rich][np.argsort(rank[parts[rich]])]
            # The giver must keep `least` examples itself.
            moved = min(short, len(ordered) - least)
            parts[rich], parts[poor] = ordered[moved:], np.concatenate([parts[poor], ordered[:moved]])
