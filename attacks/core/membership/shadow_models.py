"""Shadow models: the adversary's own models, trained as the target was, and their outputs on the same candidates.

Shokri, Stronati, Song & Shmatikov, S&P 2017; Carlini et al., "Membership Inference Attacks From First Principles", S&P
2022. Each model is trained on a random half of the candidates, so that half of the models were trained on a given
candidate. Only outputs are kept, because attacks read nothing else of a shadow model.
"""

from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ..threat_model.attack_errors import NotApplicable

# The image, its mirror image, then both moved by a pixel each way: the usual augmentations of CNNs (Carlini et al.,
# 5.B).
_MOVES = [(0, 0), *((dy, dx) for dy, dx in product((-1, 0, 1), repeat=2) if (dy, dx) != (0, 0))]

MOST_VIEWS = 2 * len(_MOVES)
"""Largest number of views of an image."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shadows:
    """Outputs of shadow models on candidates and public examples.

    Attributes:
        logits: [models, candidates, views, classes], in the order of the target's candidates.
        trained_on: bool [models, candidates], whether a model was trained on a candidate.
        population: [models, public, classes], in the order of the target's population; None without a population.
    """

    logits: Tensor
    trained_on: Tensor
    population: Tensor | None = None

    def __post_init__(self) -> None:
        if self.logits.ndim != 4 or not self.logits.numel() or self.trained_on.shape != self.logits.shape[:2]:
            raise ValueError(
                "trained_on must say of each model whom of the candidates it was trained on, "
                f"got {list(self.trained_on.shape)} for answers of shape {list(self.logits.shape)}"
            )
        if self.population is not None and len(self.population) != len(self.logits):
            raise ValueError(
                f"population must be answered by the same {len(self.logits)} models, got {len(self.population)}"
            )
        for name, answers in (("logits", self.logits), ("population", self.population)):
            if answers is not None and not answers.isfinite().all():
                raise ValueError(
                    f"{name} of shadow models must be finite, got NaN or infinity: leave diverged ones out"
                )

    def __len__(self) -> int:
        return len(self.logits)

    def first(self, models: int) -> "Shadows":
        """Returns the outputs of the first `models` models; each pair of models splits the candidates into halves.

        Raises:
            ValueError: an odd number, or fewer than two.
            NotApplicable: there are fewer.
        """
        if models < 2 or models % 2:
            raise ValueError(f"shadows must be an even number, at least 2: they halve the candidates, got {models}")
        if models > len(self):
            raise NotApplicable(f"{models} shadow models are asked for, and there are answers of {len(self)}")
        population = None if self.population is None else self.population[:models]
        return Shadows(logits=self.logits[:models], trained_on=self.trained_on[:models], population=population)


def balanced_halves(count: int, models: int, generator: torch.Generator) -> Bool[Tensor, "models count"]:
    """Assigns candidates to the training of each shadow model: each to exactly half of an even number of models.

    Models come in pairs: a random half, and the other half. With an odd number of candidates the first of a pair gets
    the smaller half in every second pair, so that sizes differ by 1 at most and even out. Pairs are drawn in order, so
    the first pairs do not depend on the number of models.

    Args:
        count: number of candidates.
        models: number of models; even, at least 2.
        generator: source of randomness, on the CPU.

    Raises:
        ValueError: an odd number of models, or fewer than two candidates.
    """
    if models < 2 or models % 2:
        raise ValueError(f"shadows must be an even number, at least 2: they halve the candidates, got {models}")
    if count < 2:
        raise ValueError(f"candidates to be halved must be at least 2, got {count}")
    ranks = torch.stack([torch.randperm(count, generator=generator) for _ in range(models // 2)])
    sizes = (count + torch.arange(models // 2) % 2) // 2
    first = ranks < sizes[:, None]
    return torch.stack([first, ~first], dim=1).flatten(0, 1)


def viewed(inputs: Float[Tensor, "n ..."], views: int) -> Float[Tensor, "n views ..."]:
    """Returns fixed views of each input: mirrored, and moved by a pixel.

    Args:
        inputs: images [n, channels, height, width]; of any shape for a single view, the input itself.
        views: number of views; a moved image repeats its edge pixels.

    Raises:
        ValueError: fewer than 1 view, or more than `MOST_VIEWS`.
        NotApplicable: more than one view of inputs that are no images.
    """
    if not 1 <= views <= MOST_VIEWS:
        raise ValueError(f"views must be in [1, {MOST_VIEWS}], got {views}")
    if views == 1:
        return inputs[:, None]
    if inputs.ndim != 4:
        raise NotApplicable(f"views are of images [channels, height, width], got inputs of {list(inputs.shape[1:])}")
    height, width = inputs.shape[-2:]
    around = pad(inputs, (1, 1, 1, 1), mode="replicate")
    images = []
    for dy, dx in _MOVES[: (views + 1) // 2]:
        moved = around[..., 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]
        images += [moved, moved.flip(-1)]
    return torch.stack(images[:views], dim=1)
