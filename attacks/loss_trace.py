"""Loss trace: the loss of a member falls over the steps of the training, by more than that of a non-member.

Pollock, Shilov, Dodd & de Montjoye, "Free Record-Level Privacy Risk Evaluation Through Artifact-Based Methods", 2024
(arXiv:2411.05743): the interquartile range of an example's losses over a training (LT-IQR) shows which members are at
risk, without shadow models. It is offered here as a membership test, next to the plain drop of the loss.

Caveat: the range is larger for a loss that goes up and down, too; on overfitted digits those are the non-members.

Deviation: losses are computed at evenly spread steps, and for candidates of unknown membership; the paper computes them
at every epoch, for members alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .core import Access, Examples, MembershipScores, NotApplicable, SeenModels, attack, granted


@attack(access=Access.BROADCAST)
def loss_trace(
    target: SeenModels,
    generator: torch.Generator,
    *,
    statistic: str = "drop",
    points: int = 20,
    batch_size: int = 1024,
) -> MembershipScores:
    """Scores each candidate by the change of its loss over the models of a training.

    Args:
        target: the models before the steps of a training, or before the rounds of a federated one.
        generator: not used; the attack is deterministic.
        statistic: "drop", the first loss less the last; or "iqr", the upper quartile of the losses less the lower.
        points: number of steps or rounds, evenly spread, the first and the last among them, besides the final model.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        The drop or the range of the loss in nats, float64.

    Raises:
        NotApplicable: a single model, or losses that are not finite.
        ValueError: a setting out of range.
    """
    if statistic not in ("drop", "iqr"):
        raise ValueError(f"statistic must be drop or iqr, got {statistic!r}")
    for name, value, least in (("points", points, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    candidates = granted(target.candidates)
    steps = len(target.models)  # pyright: ignore[reportArgumentType] - a narrowed target has a length
    chosen = {i * (steps - 1) // (points - 1) for i in range(points)}
    # In turn: all models of a run together would not fit into memory.
    step_losses = [
        losses(model.logits, candidates, batch_size) for number, model in enumerate(target.models) if number in chosen
    ]
    if target.final is not None:
        step_losses.append(losses(target.final.logits, candidates, batch_size))
    if len(step_losses) < 2:
        raise NotApplicable("a trace must have at least 2 models, got the one of a single step")
    trace = torch.stack(step_losses)
    if not trace.isfinite().all():
        raise NotApplicable("losses must be finite at every step, got NaN or infinity: training diverged")
    if statistic == "drop":
        scores = trace[0] - trace[-1]
    else:
        ends = torch.tensor([0.25, 0.75], dtype=trace.dtype, device=trace.device)
        low, high = trace.quantile(ends, dim=0)
        scores = high - low
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False, dependence="per_model")


def losses(logits: Callable[..., Tensor], examples: Examples, batch_size: int) -> Tensor:
    """Returns the cross-entropy of each example in nats, float64.

    Args:
        logits: inputs -> [n, classes].
        examples: the examples.
        batch_size: inputs per query.
    """
    with torch.no_grad():
        answers = torch.cat([logits(batch).double() for batch in examples.inputs.split(batch_size)])
    return cross_entropy(answers, examples.labels, reduction="none")
