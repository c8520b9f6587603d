"""Gradient norm: the loss of members has a smaller gradient in the parameters, because training minimised it.

Nasr, Shokri & Houmansadr, "Comprehensive Privacy Analysis of Deep Learning", S&P 2019 (arXiv:1812.00910), who find the
gradient's norm to separate members from others in a white box; here alone, without the network that they train on it.
At a minimum of the training loss the mean gradient over members is 0; each member's gradient is small only if the model
fits each of them.
"""

import torch
from torch import Tensor

from .core import Access, MembershipScores, ModelAccess, attack, granted


@attack(access=Access.WHITE_BOX)
def gradient_norm(
    target: ModelAccess, generator: torch.Generator, *, layer: str = "", batch_size: int = 1024
) -> MembershipScores:
    """Scores each candidate by minus the norm of the gradient of its loss in the parameters of the final model.

    Args:
        target: the final model, with squared norms of gradients by parameter.
        generator: not used; the attack is deterministic.
        layer: prefix of the names of the parameters that count, such as "0." or "fc1.weight"; empty for all of them.
        batch_size: examples per query; bounds memory, changes nothing else.

    Returns:
        Minus the L2 norm, float64.

    Raises:
        ValueError: a layer that the model does not have, or a setting out of range.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    candidates, squares = granted(target.candidates), granted(target.gradients_squared)
    names = [name for name in granted(target.parameters) if name.startswith(layer)]
    if not names:
        known = ", ".join(granted(target.parameters))
        raise ValueError(f"layer must begin the name of a parameter, {known}, got {layer!r}")
    parts = zip(candidates.inputs.split(batch_size), candidates.labels.split(batch_size), strict=True)
    squared_norms = [_total(squares(inputs, labels), names) for inputs, labels in parts]
    return MembershipScores(
        ids=candidates.ids, scores=-torch.cat(squared_norms).sqrt(), exact=False, dependence="per_model"
    )


def _total(by_parameter: dict[str, Tensor], names: list[str]) -> Tensor:
    # Frozen parameters have no gradient, and no entry.
    trained = [by_parameter[name].double() for name in names if name in by_parameter]
    if not trained:
        raise ValueError(f"layer must begin the name of a parameter that is trained, got only {', '.join(names)}")
    return torch.stack(trained).sum(0)
