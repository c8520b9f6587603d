"""A federated client that answers to models of an active server: checks of what the server sends, and its charges.

The client computes what it computes in any round, by the code of `defenses/core/federated`: its own batch, bound,
noise, codec and ledger, on the network of its record or on that network behind an `ImprintBlock`, whose tensors it
trains and bounds with all others. A model that is not finite, or of other shapes, is refused before a private example
is read, and costs no release.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.attacks.core import AccessError, ActiveServer, ImprintBlock, Network, NotApplicable, Target
from leakbench.defenses.core import Block, Everything, Layout, Ledger, StepPlan, clip, outputs, per_example_gradients
from leakbench.defenses.core.federated.side_arrays import refuse_non_finite

from .observe import PublicKnowledge
from .observed_step import ROWS
from .simulated_message import SharedMessage
from .structure import structure

SentModel = Mapping[str, Tensor]
"""Name -> tensor of a model's trained parameters."""


class ChosenModels:
    """The models that an active server may send, what it can compute of them by itself, and its number of releases."""

    def __init__(self, model: nn.Module, public_knowledge: PublicKnowledge, calls: int) -> None:
        """Copies the model that an honest server would send.

        Args:
            model: with its parameters.
            public_knowledge: shapes and loss.
            calls: largest number of releases.
        """
        self._model, self._known = copy.deepcopy(model), public_knowledge
        self.layout, self._calls, self.made = Layout.of(model), calls, 0

    def begin(self) -> None:
        """Counts a release.

        Raises:
            AccessError: all releases are made.
        """
        if self.made >= self._calls:
            raise AccessError(
                f"a client answers to at most {self._calls} chosen models in this suite; set federated.chosen_models"
            )
        self.made += 1

    def flat(self, parameters: SentModel) -> Float[Tensor, " dim"]:
        """Returns a model of the server as a flat vector, as a client receives it.

        Raises:
            ValueError: names, shapes or types are not the model's, or numbers are not finite.
        """
        layout, like = self.layout, next(self._model.parameters())
        if set(parameters) != set(layout.names):
            wrong = sorted(set(parameters) ^ set(layout.names))[0]
            raise ValueError(
                f"a global model must have the parameters {', '.join(layout.names)} and no others, and '{wrong}' is "
                "missing or unknown"
            )
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if tuple(parameters[name].shape) != tuple(shape):
                raise ValueError(
                    f"'{name}' of a global model must have shape {list(shape)}, got {list(parameters[name].shape)}"
                )
        flat = torch.cat([parameters[name].detach().to(like).reshape(-1) for name in layout.names])
        refuse_non_finite(flat)
        return flat

    def built(self, parameters: SentModel, block: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Returns the network that a client trains: that of its record, behind the server's block if there is one.

        Raises:
            ValueError: as `flat`; a block of another shape, or not finite.
        """
        model = copy.deepcopy(self._model)
        self.layout.write(model, self.flat(parameters))
        if block is None:
            return model
        try:
            parts = ImprintBlock(**dict(block))
        except TypeError as error:
            raise ValueError(f"a block must have the tensors of ImprintBlock: {error}") from None
        return behind_block(parts, model, self._known.input_shape)

    def network(self) -> Network:
        """Returns the operations of the model that an honest server would send."""
        plan = StepPlan(Block(codec=Everything(self.layout.dim), bound=clip(1.0)))
        point = self.layout.read(self._model)
        described = structure(plan, self._model, self.layout, point, self._known.loss, self._known.input_shape)
        return described.known_network()

    def logits(self, parameters: SentModel, inputs: Tensor) -> Float[Tensor, "n classes"]:
        """Returns the model's outputs at parameters of the server's choice, without gradient."""
        with torch.no_grad():
            return outputs(self._model, self.layout, inputs, parameters=self.flat(parameters))

    def gradient_norms(self, parameters: SentModel, inputs: Tensor, labels: Tensor) -> Float[Tensor, " n"]:
        """Returns the norm of each example's unbounded gradient at parameters of the server's choice, in float64."""
        point, norms = self.flat(parameters), []
        for part in torch.arange(len(inputs), device=inputs.device).split(max(1, ROWS // self.layout.dim)):
            with torch.no_grad():
                rows = per_example_gradients(
                    self._model, self._known.loss, self.layout, inputs[part], labels[part], parameters=point
                )
            norms.append(rows.double().norm(dim=1))
        return torch.cat(norms)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters that an honest server would send, by name."""
        return {name: part.clone() for name, part in self.layout.unflatten(self.layout.read(self._model)).items()}

    def target(self, release: Callable[..., Target], **knowledge: Any) -> ActiveServer:
        """Returns the target of an attack.

        Args:
            release: of the client.
            **knowledge: side knowledge and candidates, as fields of the target.
        """
        public = self._known
        return ActiveServer(
            release=release,
            calls=self._calls,
            parameters=self.parameters,
            network=self.network,
            logits=self.logits,
            gradient_norms=self.gradient_norms,
            input_shape=public.input_shape,
            input_low=public.low,
            input_high=public.high,
            classes=public.classes,
            **knowledge,
        )


def behind_block(block: ImprintBlock, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    """Returns a network behind a block, all of whose parameters are trained.

    Args:
        block: of the server.
        model: the client's network.
        input_shape: of an example.

    Raises:
        ValueError: the block is of inputs of another size, or has numbers that are not finite.
    """
    bins, inputs = block.weight.shape
    if inputs != math.prod(input_shape):
        raise ValueError(f"a block must be of inputs of {math.prod(input_shape)} numbers, got {inputs}")
    like = next(model.parameters())
    sent = [part.detach().to(like) for part in block.tensors.values()]
    for part in sent:  # in the model's type, where a finite float64 may be infinite
        refuse_non_finite(part.reshape(-1))
    first, second = (
        nn.Linear(*sizes, device="meta", dtype=like.dtype).to_empty(device=like.device)
        for sizes in ((inputs, bins), (bins, inputs))
    )
    with torch.no_grad():
        for parameter, values in zip((first.weight, first.bias, second.weight, second.bias), sent, strict=True):
            parameter.copy_(values)
    layers = [nn.Flatten(), first, nn.ReLU(), second]
    if len(input_shape) > 1:
        layers.append(nn.Unflatten(1, input_shape))
    return nn.Sequential(*layers, model)


class ActiveRounds:
    """Messages of a client whose examples are sought, each a release at a model of the server's choice."""

    def __init__(self, models: ChosenModels, message: Callable[[nn.Module, int], SharedMessage]) -> None:
        """Takes what is sent and how the client answers.

        Args:
            models: of the server.
            message: (network, number of the release) -> the client's message, by the code of real rounds.
        """
        self._models, self._message, self._messages = models, message, list[SharedMessage]()

    def release(self, parameters: SentModel, block: Mapping[str, Tensor] | None = None) -> Target:
        """Returns the message at a model of the server's choice, and keeps its charge."""
        network = self._models.built(parameters, block)
        self._models.begin()
        sent = self._message(network, self._models.made)
        if self._messages and any(entry.row is not None for entry in sent.ledger.entries):
            raise NotApplicable(
                "noise that is correlated over rounds must be of one stream, and a second model is sent"
            )
        self._messages.append(sent)
        return sent.observation

    def shared(self) -> SharedMessage:
        """Returns the last message with the charges of all, in one ledger.

        Raises:
            ValueError: the attack sent no model, or a release failed, whose failure may tell something for no charge.
        """
        if not self._messages:
            raise ValueError("an attack of an active server must send a model, and this one sent none")
        if len(self._messages) < self._models.made:
            raise ValueError("every release of a client must be charged, and one of them failed")
        last = self._messages[-1]
        entries = [entry for sent in self._messages for entry in sent.ledger.entries]
        ledger = Ledger(last.ledger.sampling, entries=entries)
        return replace(last, ledger=ledger, releases=len(self._messages))
