"""Order in which a network is traversed backwards."""

from dataclasses import replace

from ...targets.network import Network, Operation
from .operations import LAYERS


def without_identities(network: Network) -> Network:
    """Returns the network without its identity operations, which would hide the layers that a sum adds."""
    instead: dict[str, str] = {}
    kept = []
    for operation in network.operations:
        inputs = tuple(instead.get(name, name) for name in operation.inputs)
        if operation.kind == "identity":
            instead[operation.name] = inputs[0]
        else:
            kept.append(replace(operation, inputs=inputs))
    return replace(network, operations=tuple(kept))


def backwards(network: Network) -> list[Operation]:
    """Returns the operations between the input and the head, from the last to the first.

    Layers whose results a sum adds come directly after the sum, before other operations, because solving for a summand
    may need their gradients.
    """
    takers = {
        operation.name: [each for each in network.operations if operation.name in each.inputs]
        for operation in network.operations
    }

    def added(operation: Operation) -> bool:
        own = takers[operation.name]
        linear = operation.kind in (*LAYERS, "batch_norm")
        return linear and bool(own) and all(t.kind == "add" or (t.kind == "batch_norm" and added(t)) for t in own)

    remaining, order = list(reversed(network.operations)), []
    while remaining:
        done = {operation.name for operation in order}
        ready = [operation for operation in remaining if all(taker.name in done for taker in takers[operation.name])]
        order.append(next((operation for operation in ready if added(operation)), ready[0]))
        remaining.remove(order[-1])
    return [operation for operation in order if operation is not network.operations[-1]]
