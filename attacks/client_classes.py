"""Classes that a federated client holds, inferred from the messages that it sends.

Melis, Song, De Cristofaro & Shmatikov, "Exploiting Unintended Feature Leakage in Collaborative Learning", IEEE S&P 2019
(arXiv:1805.04049): updates give away properties of a client's data. Under the cross-entropy, an example of a class
moves the output layer's bias of that class up, and the others down. A client's displacement is therefore explained by
those that public examples of each class would give: least squares over all messages of the displacement, in units of a
bounded gradient, on the mean contributions of the classes. The coefficients are the shares of the classes, up to a
factor.
Deviation: no classifier is trained on shadow updates; the model's own gradients on public examples take its place.
Caveat: no claim for records bounds it. The classes of a client are a property of all its records together, and a
guarantee for each record, however strong, allows them to show.
"""

import torch
from torch import Tensor

from .core import Access, ClassScores, Knows, NotApplicable, SeenMessage, SeenMessages, attack, granted

_MESSAGES, _LAYERS = ("all", "first"), ("all", "output", "bias")
_RIDGE = 1e-3  # relative to the mean square of the classes' contributions: without it, equal classes would be singular


@attack(access=Access.FEDERATED, knows=Knows.POPULATION)
def client_classes(
    target: SeenMessages,
    generator: torch.Generator,
    *,
    messages: str = "all",
    layer: str = "all",
    examples: int = 32,
    named: int = 1,
) -> ClassScores:
    """Scores each class by its share in the client's displacements, and names the largest.

    Args:
        target: the client's messages.
        generator: draws the public examples of each class.
        messages: "all" of the client, or the "first" alone.
        layer: entries of the displacement that are read: those of "all" parameters, of the weights and bias of the
            output layer ("output"), or of its "bias". One message of FedAvg of each of ten clients of MNIST by class,
            three seeds: 30 of 30 named by each at noise multiplier 10; 26, 20 and 18 at 30.
        examples: public examples of each class whose contributions are averaged.
        named: number of classes to name.

    Returns:
        Least-squares coefficient of each class, and the classes with the largest.

    Raises:
        NotApplicable: a class without public examples, or a model without an output layer of one entry a class.
        ValueError: a setting out of range.
    """
    for name, value, choices in (("messages", messages, _MESSAGES), ("layer", layer, _LAYERS)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    for name, value in (("examples", examples), ("named", named)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    gram = inner = None
    for message in target.messages:
        directions = _directions(message, layer, examples, generator)
        shown = (-message.displacement if message.sums is None else message.sums).double()[_read(message, layer)]
        gram = directions @ directions.T + (0 if gram is None else gram)
        inner = directions @ shown + (0 if inner is None else inner)
        if messages == "first":
            break
    if gram is None or inner is None:
        raise NotApplicable("the client sent no message")
    ridge = _RIDGE * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    scores = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), inner)
    if not scores.isfinite().all():
        raise NotApplicable("scores must be finite, got NaN or infinity: training diverged")
    largest = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    largest[scores.topk(min(named, len(scores))).indices] = True
    return ClassScores(scores=scores, named=largest)


def _directions(message: SeenMessage, layer: str, examples: int, generator: torch.Generator) -> Tensor:
    """Returns the mean contribution of public examples of each class [classes, entries], in float64."""
    public, classes = granted(message.population), message.global_model.classes
    order = torch.randperm(len(public), generator=generator).to(public.labels.device)
    entries, rows = _read(message, layer), []
    for number in range(classes):
        chosen = order[public.labels[order] == number][:examples]
        if not len(chosen):
            raise NotApplicable(f"class {number} must have a public example, got none; set task.public")
        added = message.contributions if message.sums is not None else message.gradients
        rows.append(added(public.inputs[chosen], public.labels[chosen]).double().mean(dim=0)[entries])
    return torch.stack(rows)


def _read(message: SeenMessage, layer: str) -> slice:
    """Returns the entries of a flat vector that the attack reads.

    Raises:
        NotApplicable: the last parameter is no bias of one entry a class.
    """
    if layer == "all":
        return slice(None)
    (*_, (before, weights), (last, (start, stop))) = ((None, (0, 0)), *message.slices.items())
    if stop - start != message.global_model.classes:
        raise NotApplicable(f"the last parameter, {last}, must be a bias of one entry a class; set layer = 'all'")
    if layer == "bias" or before is None:
        return slice(start, stop)
    return slice(weights[0], stop)
