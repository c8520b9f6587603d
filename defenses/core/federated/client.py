"""A client of a federated run: its data, its keys of noise and sampler, its account, its states.

Guarantee:
    Keys are hashed from the run's key and the client's number, or drawn from the operating system for each client:
    under a shared key, a client could subtract its own noise from another's release. A client's account is charged for
    the plans executed on its data and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..plan.defense import State
from ..plan.noise_correlation import NoiseMemory
from ..privacy.sampling import Sampling
from ..randomness.keys import key_from
from ..randomness.noise import CipherNoise, Noise, NoiseSource, from_os, secure
from ..training.step import Account, Stepper


def own_noise(key: int, party: int | str, kind: NoiseSource) -> Noise:
    """Returns the noise source of a client, or of the server.

    Args:
        key: the run's secret key, of seeded noise alone: no checkpoint may hold that of other noise.
        party: number of the client, or "server".
        kind: "seeded" for noise under that key, "os" for a key of its own from the operating system, "secure" for
            exact noise, which has no key.
    """
    if kind != "seeded":
        return secure() if kind == "secure" else from_os()
    return CipherNoise(key_from("noise of a party", key, party).to_bytes(32, "big"), kind)


def own_sampler_key(key: int, party: int | str) -> int:
    """Returns the sampler's key of a client, or the server's key for the participants of rounds.

    Args:
        key: the run's secret key.
        party: number of the client, or "server".
    """
    return key_from("sampler of a party", key, party)


@dataclass(frozen=True)
class Elsewhere:
    """Data of a client that another process has.

    Attributes:
        size: public number of its examples.
    """

    size: int


Shard = tuple[Tensor, Tensor] | Elsewhere | None
"""Inputs and labels of a client; data of another process; None for a client without data."""


@dataclass
class Client:
    """A client with data.

    Attributes:
        number: its number, the position of its shard.
        inputs: inputs [n_i, ...].
        labels: labels [n_i].
        size: public number of its examples: n_i, or the nominal size.
        sampling: its sampler of records.
        expected_batch: public constant by which its sums are divided.
        sampler_key: secret key of the sampler.
        noise: its secret source of noise.
        account: charged for the releases of the method's unit.
        steps: charged for the local steps: the same account where their releases are the guarantee's.
        stepper: state and context of its defense.
        state: state of its rule.
        memory: state of correlated noise of its local steps.
        update: state and context of the defense of its displacement; None for none.
        begun: whether its defense has started.
        elsewhere: whether another process has its data, and charges its local steps.
    """

    number: int
    inputs: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    size: int
    sampling: Sampling
    expected_batch: float
    sampler_key: int = field(repr=False)
    noise: Noise
    account: Account
    steps: Account
    stepper: Stepper
    state: State = None
    memory: NoiseMemory = field(default_factory=NoiseMemory, repr=False)
    update: Stepper | None = None
    begun: bool = False
    elsewhere: bool = False

    def snapshot(self) -> tuple[Any, ...]:
        """Returns the states that a lost round leaves unchanged; noise and charges are never taken back."""
        own = self.update
        return self.stepper.state, self.stepper.context, self.state, own and (own.state, own.context)

    def rest(self) -> None:
        """Lets go of the round's model, which a context would hold until the client's next round."""
        self.stepper.context = replace(self.stepper.context, parameters=None, one_off=None)

    def restore(self, states: tuple[Any, ...]) -> None:
        """Returns to the states of `snapshot`."""
        self.stepper.state, self.stepper.context, self.state, own = states
        if self.update is not None and own is not None:
            self.update.state, self.update.context = own
