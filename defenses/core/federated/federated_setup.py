"""Everything that a federated run needs before its first round: data, keys, schedule, network, engine, clients, server.

Invalid models, data and settings are refused here, before anything is released.

Guarantee:
    Every client's ledger is under the sampler by which its records are drawn, or, where a client is the unit, under the
    participation of clients; the account that is charged for a client's local steps is its own.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.augmentation import draws
from ..gradients.checks.batch_norm import into_training_mode
from ..gradients.checks.model_checks import Untrained
from ..gradients.checks.synthetic_examples import Domains
from ..gradients.executor import Engine
from ..gradients.power_iteration import buffers_of_power_iterations
from ..plan.defense import Context
from ..plan.public_data import GradientBatch, PublicGradients, refuse_shared
from ..privacy.ledger import Ledger
from ..privacy.sampling import Sampling, fixed
from ..randomness.noise import NoiseSource
from ..training.assumptions import unverified
from ..training.labelled import LabelledData, as_tensors, fitting
from ..training.step import Account, Stepper
from .client import Client, Elsewhere, Shard, own_noise, own_sampler_key
from .federated_settings import FederatedSettings, FederationState
from .federation_file import FederationFile
from .local_training import LocalTrainer
from .private_average import PrivateAverage, PrivateServer, context_of_server
from .public_pool import SharedPublic
from .schedule import RoundSchedule, draw_schedule
from .secure_sum import refuse_small_rounds, shares_of
from .server_view import ForeseenPlans


class FederatedSetup:
    """A federated run before its first round.

    Attributes:
        settings: arguments of the run.
        model: the model.
        network: the network in training, which may compute more than the model.
        engine: of the network.
        trainer: local training on it.
        untrained: copies of what must not change.
        public: the public pool; None for none.
        seed: public seed.
        key: secret key; of samplers, and of noise that is seeded.
        file: checkpoint of the run.
        kind: source of the noise.
        remarks: marks of components that are not leakbench's, with their sentences.
        schedule: participants and losses.
        ledgers: ledger of every client, by number.
        empty: numbers of the clients without data.
        context: public context of step 0.
        state: state of the loop.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Sequence[LabelledData | Elsewhere | None],
        public: LabelledData | None,
        settings: FederatedSettings,
    ) -> None:
        """Refuses invalid models, data and settings."""
        s = self.settings = settings
        s.method.check(len(shards))
        self.model, self._rule = model, s.method.rule
        if buffers_of_power_iterations(model):
            raise ValueError("a federated model must have no spectral norm: its vectors would depend on client order")
        data = self._read(model, shards)
        sizes = [_size(shard, s.recipe.nominal_size) for shard in data]
        populated = [number for number, size in enumerate(sizes) if size]
        self.empty = tuple(number for number, size in enumerate(sizes) if not size)
        if not populated:
            raise ValueError(f"at least one client must have data, got none of {len(shards)}")
        if not model.training:
            into_training_mode(model)
        pool = self._pool(public, data)
        self.file = FederationFile(s, model, data, pool)
        saved = self.file.saved or {}
        self.seed: int = saved.get("seed", secrets.randbits(63) if s.seed is None else s.seed)
        self.key: int = saved.get("sampler_key", secrets.randbits(256) if s.key is None else s.key)
        self.kind: NoiseSource = s.noise
        unit_key = own_sampler_key(self.key, "server") if s.method.unit == "client" else self.seed
        drawn = s.schedule or draw_schedule(s.federation, populated, seed=self.seed, key=unit_key)
        self.schedule: RoundSchedule = saved.get("schedule", drawn)
        self.schedule.check(s.federation, populated)
        if s.method.noise_place == "server":
            self.schedule.check_of_clients(s.federation, given=s.schedule is not None)
        samplings = s.federation.samplings(s.sampling, sizes)
        divisors = [s.recipe.divisor(own, size) if size else 0.0 for own, size in zip(samplings, sizes, strict=True)]
        self.network, loss = self._rule.network(model, s.recipe.loss)
        self.engine = Engine(
            self.network,
            loss=loss,
            microbatch=s.execution.microbatch,
            memory_budget=s.execution.memory_budget,
            precision=s.execution.precision,
            engine=s.execution.engine,
            augmentation=s.recipe.augmentation,
            expected_batch=max(divisors),
            domains=Domains(s.recipe.input_domain, s.recipe.target_domain),
            unchecked=s.execution.unchecked,
        )
        steps = {"steps": s.federation.steps, "seed": self.seed}
        self.trainer = LocalTrainer(self.network, self.engine, self._rule, recipe=s.recipe, lr=s.lr, **steps)
        self.untrained = Untrained(self.network)
        self.public = None if pool is None else self._shared(*pool)
        examples = next((shard[0] for shard in (*data, pool) if isinstance(shard, tuple)), None)
        self.context = self._context(examples)
        self.state = self._started(data, populated, sizes, samplings, divisors)
        self.file.restore(self)

    def _read(self, model: nn.Module, shards: Sequence[LabelledData | Elsewhere | None]) -> list[Shard]:
        """Returns every client's tensors; None for a client without data."""
        device, loss = self.settings.execution.device, self.settings.recipe.loss
        if device is not None:
            model.to(device)
        data: list[Shard] = []
        for number, shard in enumerate(shards):
            if isinstance(shard, Elsewhere):
                data.append(shard)
                continue
            if shard is None or _is_empty(shard):
                data.append(None)
                continue
            argument = f"shard {number}"
            inputs, labels = as_tensors(shard, argument, device)
            model.to(inputs.device)
            data.append(fitting(inputs, labels, model, loss, argument))
        return data

    def _pool(self, public: LabelledData | None, data: Sequence[Shard]) -> tuple[Tensor, Tensor] | None:
        """Returns the public examples, after they were compared with every client's inputs."""
        if public is None:
            return None
        device = next(self.model.parameters()).device
        pool = fitting(*as_tensors(public, "public", device), self.model, self.settings.recipe.loss, "public")
        private = [shard[0] for shard in data if isinstance(shard, tuple)]
        if private:
            refuse_shared(torch.cat(private), pool[0])
        return pool

    def _shared(self, inputs: Tensor, labels: Tensor) -> SharedPublic:
        """Returns the gradients of public examples, for all clients of a round."""
        gradients = PublicGradients(self._gradients, inputs, labels, self._factored)
        return SharedPublic(gradients, lambda: self.trainer.round_at_global_model)

    def _public_targets(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the rule's targets of public examples, for a client in its first round."""
        if self.trainer.round is None:
            return labels
        return self._rule.targets(self._rule.start(self.engine.layout), self.trainer.round, inputs, labels)

    def _gradients(self, inputs: Tensor, labels: Tensor) -> Tensor:
        seed = draws(self.seed, self.trainer.step)
        return self.engine.gradients(inputs, self._public_targets(inputs, labels), seed=seed)(None)

    def _factored(self, inputs: Tensor, labels: Tensor) -> GradientBatch:
        seed = draws(self.seed, self.trainer.step)
        return self.engine.batch(inputs, self._public_targets(inputs, labels), seed=seed)

    def _context(self, examples: Tensor | None) -> Context:
        """Returns the public context of step 0, for examples like these; without any, their shape is not known."""
        s, layout = self.settings, self.engine.layout
        parameters = layout.read(self.network)
        return Context(
            step=0,
            steps=s.federation.steps,
            steps_per_epoch=s.sampling.steps_per_epoch,
            layout=layout,
            parameters=parameters,
            noise_multiplier=s.method.client.noise_multiplier or 0.0,
            architecture=partial(copy.deepcopy, self.network),
            input_shape=() if examples is None else tuple(examples.shape[1:]),
            seed=self.seed,
            public=self.public,
            device=parameters.device,
            round_steps=s.federation.local_steps,
        )

    def _started(
        self,
        data: Sequence[Shard],
        populated: Sequence[int],
        sizes: Sequence[int],
        samplings: Sequence[Sampling],
        divisors: Sequence[float],
    ) -> FederationState:
        """Returns the state before round 0."""
        s, theta = self.settings, self._parameters_of(self.context)
        place = s.method.noise_place
        of_clients = s.federation.sampling_of_clients(len(populated))
        own_rounds = s.federation.participants == "fixed"
        shares = None
        if not s.federation.shows_messages and place == "server":
            shares = shares_of(s.federation, len(populated))
        elif not s.federation.shows_messages:
            refuse_small_rounds(s.federation, len(populated), hidden=False)
        self.remarks = unverified(
            rule=s.method.rule,
            messages=s.method.messages,
            server=s.method.server,
            augmentation=s.recipe.augmentation,
            sampling=s.sampling,
            optimizer=s.recipe.optimizer_of(self.trainer.parameters, s.lr),
            defense=s.method.private_part,
        )
        common = Account(Ledger(of_clients), s.exact)
        clients: dict[int, Client] = {}
        self.ledgers = [Ledger(samplings[number]) for number in range(len(data))]
        for number in populated:
            shard = data[number]
            inputs, labels = shard if isinstance(shard, tuple) else (theta.new_zeros(0), theta.new_zeros(0))
            steps = Account(Ledger(samplings[number]), s.exact)
            account = steps
            if place == "update":
                account = Account(Ledger(fixed(1.0)), s.exact)
            elif place == "server":
                account = Account(Ledger(of_clients), s.exact) if own_rounds else common
            self.ledgers[number] = account.ledger
            context = replace(
                self.context, steps_per_epoch=samplings[number].steps_per_epoch, expected_batch=divisors[number]
            )
            clients[number] = Client(
                number=number,
                inputs=inputs,
                labels=labels,
                size=sizes[number],
                sampling=samplings[number],
                expected_batch=divisors[number],
                sampler_key=own_sampler_key(self.key, number),
                noise=own_noise(self.key, number, self.kind),
                account=account,
                steps=steps,
                stepper=Stepper(s.method.client_defense(number), context, partial(self.trainer.place, number=None)),
                state=self._rule.start(self.engine.layout),
                update=self._update_stepper(),
                elsewhere=not isinstance(shard, tuple),
            )
        private = None
        if isinstance(s.method.server, PrivateAverage):
            private = PrivateServer(
                s.method.server.defense,
                context_of_server(
                    self.context,
                    rounds=s.federation.rounds,
                    sampling=of_clients,
                    clients=s.federation.participation * len(populated),
                ),
                own_noise(self.key, "server", self.kind),
                own_rounds=own_rounds,
                shares=shares,
            )
        server = None if isinstance(s.method.server, PrivateAverage) else s.method.server.start(self.engine.layout)
        return FederationState(0, theta, server, clients, private, ForeseenPlans(s.method.client))

    def _update_stepper(self) -> Stepper | None:
        """Returns the stepper of the defense of a client's displacement."""
        defense = self.settings.method.update
        if defense is None:
            return None
        rounds = self.settings.federation.rounds
        context = replace(self.context, steps=rounds, steps_per_epoch=1, expected_batch=1.0, round_steps=1)
        stepper = Stepper(defense, context, lambda parameters: None)
        stepper.start()
        return stepper

    @staticmethod
    def _parameters_of(context: Context) -> Float[Tensor, " dim"]:
        if context.parameters is None:
            raise ValueError("context must have parameters, got None")
        return context.parameters


def _size(shard: Shard, nominal: int | None) -> int:
    """Returns the public number of a client's examples; 0 without data."""
    size = shard.size if isinstance(shard, Elsewhere) else 0 if shard is None else len(shard[0])
    return (nominal or size) if size else 0


def _is_empty(shard: LabelledData) -> bool:
    """Returns whether a shard has no examples."""
    if isinstance(shard, tuple | list):
        return len(shard) == 2 and hasattr(shard[0], "__len__") and len(shard[0]) == 0
    return hasattr(shard, "__len__") and len(shard) == 0  # pyright: ignore[reportArgumentType]  checked
