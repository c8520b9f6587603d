"""Deep Leakage from Gradients: searches for inputs and labels whose gradient equals the shared gradient.

Zhu, Liu & Han, "Deep Leakage from Gradients", NeurIPS 2019, Algorithm 1: L-BFGS on the squared distance of gradients,
over inputs and soft labels jointly.

Deviation: gradients are compared in the released space, whitened by the noise, so that the attack also runs on masked,
projected and noisy updates, for which minimising the squared distance is maximum likelihood; the search ends at the
distance that the noise leaves on average. Steps follow the strong Wolfe conditions instead of having length 1, and
starts are normal around the middle of valid inputs with standard deviation 0.1, in units in which these are [-2, 2],
instead of standard normal: components of a start that the update hardly determines stay in the result. (On the paper's
LeNet a normal start in pixels stopped at an MSE of 0.1.) The result is clamped to valid inputs.
"""

import torch

from .core import Access, Knows, Observation, Reconstruction, attack
from .core.search.fitted_update import fitted_update
from .core.search.restarts import check_search


@attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE | Knows.DEFENSE)
def dlg(
    target: Observation, generator: torch.Generator, *, iterations: int = 6000, restarts: int = 1, lr: float = 1.0
) -> Reconstruction:
    """Matches the shared update in squared distance, over inputs and soft labels jointly.

    Args:
        target: a shared update and the model it was taken at.
        generator: source of the random starts.
        iterations: L-BFGS steps; the authors' code takes 300 times 20. The search ends earlier if no step decreases the
            distance.
        restarts: independent starts; the result has the smallest distance. A start that diverges is drawn again, ten
            times at most.
        lr: first length along each direction, in steps of Newton's method.

    Returns:
        Inputs in model-input units, the most probable labels, the squared distance (in units of the noise's variance,
        if there is noise), and its ratio to the update's squared norm at every iterate [restarts, iterations].
        `degraded` for networks with ReLUs, which have no second derivative, if most of the update is left unexplained,
        and if a random start already explains it up to noise.

    Raises:
        ValueError: a setting out of range.
    """
    check_search(iterations, restarts, lr)
    return fitted_update(target, generator, labels=None, iterations=iterations, restarts=restarts, lr=lr)
