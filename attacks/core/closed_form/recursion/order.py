"""Order in which a network is walked backwards, and the operations with equations of their own."""

from dataclasses import replace

from ...targets.network import Network, Operation

LAYERS = ("linear", "conv2d")
ACTIVATIONS = ("leaky_relu", "relu", "tanh", "sigmoid")


def without_identities(network: Network) -> Network:
    """Returns the network without its identities, so that no sum has an identity between its terms."""
    instead: dict[str, str] = {}
    kept = []
    for one in network.operations:
        inputs = tuple(instead.get(name, name) for name in one.inputs)
        if one.kind == "identity":
            instead[one.name] = inputs[0]
        else:
            kept.append(replace(one, inputs=inputs))
    return replace(network, operations=tuple(kept))


def backwards(network: Network) -> list[Operation]:
    """Returns the operations between the input and the head, from the last to the first.

    The terms of a sum come directly after it, before the layers that are solved for: their gradient may be needed
    there.
    """
    takers = {one.name: [each for each in network.operations if one.name in each.inputs] for one in network.operations}

    def added(one: Operation) -> bool:
        own = takers[one.name]
        linear = one.kind in (*LAYERS, "batch_norm")
        return linear and bool(own) and all(t.kind == "add" or (t.kind == "batch_norm" and added(t)) for t in own)

    left, order = list(reversed(network.operations)), []
    while left:
        done = {one.name for one in order}
        ready = [one for one in left if all(taker.name in done for taker in takers[one.name])]
        order.append(next((one for one in ready if added(one)), ready[0]))
        left.remove(order[-1])
    return [one for one in order if one is not network.operations[-1]]
