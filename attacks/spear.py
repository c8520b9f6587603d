"""SPEAR: exact inputs of a whole batch, from the gradient of a linear layer followed by a ReLU.

Dimitrov, Baader, Müller & Vechev, "SPEAR: Exact Gradient Inversion of Batches in Federated Learning", NeurIPS 2024
(arXiv:2403.03945), Algorithm 1. The gradient is D X^T, of rank b; D is zero wherever a neuron is off, so its columns
are the sparsest directions of the gradient's column space. Candidate directions are kernels of b - 1 random rows; each
column results from about one in 2^(b - 1) draws. A clip factor of an example multiplies its column and its part of the
bias gradient alike, and cancels.

Deviation: drawn rows are refitted to everything that they make zero, and three of four draws favour neurons that are on
for few examples; a gradient that a known mask shows in part is completed first, under noise too; a convolution is
attacked by its patches; noise sets the thresholds, measured on the singular values; and an input is certified by its
own recomputed contribution, a stronger criterion than the paper's lambda = 1.
"""

import torch

from .core import Access, Observation, Reconstruction, attack
from .core.closed_form.exact_batch import recovered_batch
from .core.closed_form.sparse_columns import kernels


@attack(access=Access.UPDATE)
def spear(target: Observation, generator: torch.Generator, *, draws: int = 2**20) -> Reconstruction:
    """Recovers every input of a batch from a layer with ReLU, and certifies those that it proves right.

    Args:
        target: a shared update and the model it was taken at.
        generator: source of the drawn rows, and of the entries that a completion is tested on.
        draws: largest number of sets of rows; a batch of b needs about 2^(b - 1) times the harmonic number of b.

    Returns:
        As many inputs as the gradient has directions, labels, `certified`, and 1 - lambda as the objective. The status
        is `degraded` if the draws were not enough, there is noise, some input is no single example's, or the patches of
        a convolution leave out pixels.

    Raises:
        ValueError: draws is not positive.
        NotApplicable: no linear layer with bias and ReLU comes first, too small a part of its gradient is shown, or the
            batch is not smaller than the layer, or nothing in the gradient stands out of noise.
        RankDeficient: without noise, fewer directions with zeros were found than the gradient has: nearly all neurons
            are on for the whole batch, or the draws were not enough.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    return recovered_batch(target, generator, lambda left, outputs: kernels(left, generator, outputs), budget=draws)
