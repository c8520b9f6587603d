"""Last linear layer of a network, whose rows are those of the classes."""

from ..targets.network import Network
from ..threat_model.attack_errors import NotApplicable


def last_layer(network: Network, trained: tuple[str, ...]) -> tuple[str, str]:
    """Returns the names of weight and bias of the layer that computes the logits.

    Args:
        network: any.
        trained: names of the parameters that a server sends.

    Raises:
        NotApplicable: the network ends in no linear layer with a bias, or in one that is not trained.
    """
    last = network.operations[-1]
    if last.kind != "linear" or last.weight is None or last.bias is None:
        raise NotApplicable(
            f"the network must end in a linear layer with a bias, got {last.words or last.kind}"
            f"{' without a bias' if last.kind == 'linear' else ''}"
        )
    if frozen := [name for name in (last.weight, last.bias) if name not in trained]:
        raise NotApplicable(f"the last layer must be trained, and {' and '.join(frozen)} is not")
    return last.weight, last.bias
