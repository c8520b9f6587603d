"""Releases at chosen models share noise with no other release, and a failed one ends the attack."""

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from leakbench.attacks.core import (
    Access,
    AccessError,
    ActiveServer,
    Controls,
    Knows,
    MembershipScores,
    Reconstruction,
    SeenMessage,
    attack,
    granted,
)
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.cells import Cell
from leakbench.audit.plan.expand import plan
from leakbench.audit.subjects import shared_update, trained_run
from leakbench.audit.subjects.federation import FederatedModel
from leakbench.audit.suite import suite as suites

SUITE = """
name = "chosen"
seeds = [0]
controls = false
task = { data = "digits", model = "mlp", private = 80, batch = 10, lr = 0.5, candidates = 20 }
budget = { noise_multiplier = 4.0, delta = 1e-5 }
federated = { clients = 4, rounds = 2, local_steps = 1, participation = 1.0, chosen_models = 3 }
share = { data = "digits", model = "mlp", batch = 4, images = 1, noise = ["calibrated"] }
defense = [DEFENSE]
attack = [{ name = "imprint", bins = [8, 16] }, { name = "active_membership", norm = [2.0, 4.0] }]
"""
CPU = torch.device("cpu")


@dataclass
class Server:
    """An active server that remembers, across calls, what it was sent.

    Attributes:
        growth: call -> factors of the honest model that it sends; the last of them in later calls.
        messages: by call.
        errors: of failed releases.
    """

    growth: list[list[float]]
    messages: list[list[Tensor]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def ask(self, target: ActiveServer) -> None:
        factors = self.growth[min(len(self.messages), len(self.growth) - 1)]
        self.messages.append([])
        for factor in factors:
            sent = {name: factor * part for name, part in granted(target.parameters).items()}
            try:
                message = granted(target.release)(sent, None)
            except (ValueError, AccessError) as error:
                self.errors.append(error)
                continue
            released = getattr(message, "released", None)
            if released is None:
                assert isinstance(message, SeenMessage)
                released = granted(message.others_removed)(slice(0, len(granted(target.candidates)))).median(dim=0)[0]
            self.messages[-1].append(released.double().clone())


def install(monkeypatch, server: Server) -> None:
    knows = Knows.OTHERS | Knows.DEFENSE | Knows.POPULATION

    @attack(access=Access.ACTIVE_SERVER, knows=knows, controls=Controls.MODEL)
    def members(target: ActiveServer, generator: torch.Generator, *, norm: float = 2.0) -> MembershipScores:
        """Asks, and knows nothing."""
        server.ask(target)
        ids = granted(target.candidates).ids
        return MembershipScores(ids=ids, scores=torch.zeros(len(ids)).double(), exact=False, dependence="per_model")

    @attack(access=Access.ACTIVE_SERVER, knows=Knows.DEFENSE, controls=Controls.MODEL)
    def images(target: ActiveServer, generator: torch.Generator, *, bins: int = 8, gain: float = 1.0) -> Reconstruction:
        """Asks, and finds nothing."""
        server.ask(target)
        none = torch.zeros(0, *target.input_shape)
        labels = torch.zeros(0, dtype=torch.int64)
        return Reconstruction(inputs=none, labels=labels, objective=1.0, status="degraded")

    known, own = catalog.attack, {"active_membership": members, "imprint": images}
    monkeypatch.setattr(catalog, "attack", lambda name: own.get(name) or known(name))


def cells(folder, name: str, defense: str = '{ name = "fed_avg" }') -> list[Cell]:
    (folder / "chosen.toml").write_text(SUITE.replace("DEFENSE", defense))
    made = plan(suites.load(folder / "chosen.toml")).cells
    return [cell for cell in made if cell.request.attack and cell.request.attack.name == name]


def of_clients(cell: Cell):
    return FederatedModel((cell,), CPU).outcome(cell)


def of_updates(cell: Cell):
    return shared_update.SharedUpdates((cell,), CPU).outcome(cell)


@pytest.mark.parametrize(
    ("name", "computed"),
    [pytest.param("active_membership", of_clients, marks=pytest.mark.long), ("imprint", of_updates)],
)
def test_two_attacks_on_a_client_get_no_noise_in_common(monkeypatch, tmp_path, name, computed):
    server = Server([[1.0]])
    install(monkeypatch, server)
    first, second = cells(tmp_path, name)
    computed(first)
    calls = len(server.messages)
    server.growth = [[0.0]]
    computed(second)
    one, other = server.messages[0][0], server.messages[calls][0]
    # Else the noise cancels, and what is left is what two messages without noise differ by.
    assert float((one - other).std()) > float(one.std())


def test_a_repetition_for_one_candidate_sends_no_other_model_under_the_same_noise(monkeypatch, tmp_path):
    server = Server([[1.0], [1.0, 0.0]])
    install(monkeypatch, server)
    cell, _ = cells(tmp_path, "active_membership")
    of_clients(cell)
    assert all(len(messages) == 1 for messages in server.messages) and len(server.messages) > 1
    assert all("must send the models that it sent for all candidates" in str(error) for error in server.errors)
    assert len(server.errors) == len(server.messages) - 1


@pytest.mark.long
def test_a_round_whose_release_failed_is_not_taken_again(monkeypatch, tmp_path):
    server = Server([[1e5, 1.0]])  # of huge parameters, the rounded displacement leaves the span of the directions
    install(monkeypatch, server)
    defense = '{ name = "fed_pcdp", rank = 8, auxiliary_size = 16 }'
    cell, _ = cells(tmp_path, "active_membership", defense)
    with pytest.raises(ValueError, match="every release of a client must end its round, and one of them failed"):
        of_clients(cell)
    assert "must lie in the span" in str(server.errors[0]) and "must not be taken again" in str(server.errors[1])
    assert not any(server.messages)


@pytest.mark.long
def test_messages_beyond_the_memory_are_a_reason_and_no_missing_key(monkeypatch, tmp_path):
    server = Server([[1.0, 1.0]])
    install(monkeypatch, server)
    cell, _ = cells(tmp_path, "active_membership")
    with suppress(ValueError):
        of_clients(cell)
    size = server.messages[0][0].numel() * 4
    monkeypatch.setattr(trained_run, "TRANSCRIPT_MEMORY", 4 * size)
    server.messages, server.errors = [], []
    of_clients(cell)
    assert server.errors and all("must fit into" in str(error) for error in server.errors)
