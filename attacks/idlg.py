"""Improved Deep Leakage from Gradients: the label of one example by a sign, then a search for the input alone.

Zhao, Mopuri & Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020 (arXiv:2001.02610), Section 3: in the gradient
of the last layer only the row of the label has the opposite sign. The search is that of Zhu, Liu & Han, NeurIPS 2019,
with a fixed label.

Deviation: the sign is that of the bias's gradient if it was released; otherwise the label's row is the row opposed to
all others, which holds for features of any sign. Under noise a label is named only if its sign is significant at the
level 0.05, over all classes. The search compares in the released space, with the starts and steps of `dlg`.
"""

import torch

from .core import Access, Knows, NotApplicable, Observation, Reconstruction, attack, granted
from .core.closed_form.label_counts import fixed_label
from .core.search.fitted_update import fitted_update
from .core.search.restarts import check_search


@attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE | Knows.DEFENSE)
def idlg(
    target: Observation, generator: torch.Generator, *, iterations: int = 6000, restarts: int = 1, lr: float = 1.0
) -> Reconstruction:
    """Reads the label of a batch of size 1 off the last layer, and matches the shared update over the input.

    Args:
        target: a shared update and the model it was taken at.
        generator: source of the random starts.
        iterations: largest number of L-BFGS steps; the search ends earlier if no step decreases the distance.
        restarts: independent starts; the result has the smallest distance. A start that diverges is drawn again, ten
            times at most.
        lr: first length along each direction, in steps of Newton's method.

    Returns:
        The input in model-input units, the recovered label, the squared distance (in units of the noise's variance, if
        there is noise), and its ratio to the update's squared norm at every iterate [restarts, iterations]. `degraded`
        for networks with ReLUs, which have no second derivative, if most of the update is left unexplained, and if a
        random start already explains it up to noise.

    Raises:
        ValueError: a setting out of range.
        NotApplicable: the batch is larger, or the released part of the last layer does not determine the label.
        InconsistentObservation: no single example gives this gradient of the last layer.
    """
    check_search(iterations, restarts, lr)
    batch, noise_std = granted(target.batch_size), granted(target.noise_std)
    if batch != 1:
        raise NotApplicable(f"the batch must be one example for its label to be one sign, got {batch}")
    structure = granted(target.structure)()
    label = fixed_label(structure, target.released.double() * target.expected_batch, noise_std.double())
    labels = torch.tensor([label], device=target.released.device)
    return fitted_update(target, generator, labels=labels, iterations=iterations, restarts=restarts, lr=lr)
