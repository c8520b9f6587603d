"""Memory of messages and local steps: counted by storages, limited as central transcripts are, and all or nothing."""

import pytest
import torch

from leakbench.attacks.core import NotApplicable
from leakbench.audit.plan.expand import plan
from leakbench.audit.subjects import trained_run
from leakbench.audit.subjects.federation import FederatedModel
from leakbench.audit.suite import suite as suites
from leakbench.defenses.core.training.transcript import storages

CPU = torch.device("cpu")
SUITE = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, private = 120, batch = 10, lr = 0.2 }
budget = { noise_multiplier = 1.0, delta = 1e-5 }
federated = { clients = 3, split = "iid", rounds = 4, local_steps = 2, participation = 0.7 }
controls = false
defense = [{ name = "fed_pcdp", rank = 3 }]
attack = [
    { name = "message_likelihood" },
    { name = "likelihood_ratio" },
    { name = "client_classes" },
    { name = "loss_trace" },
]
"""
OF_A_CLIENT = ("message_likelihood", "likelihood_ratio", "client_classes")


@pytest.fixture
def subject(tmp_path):
    """Makes the subject of the suite's cells, and the cells by attack or kind."""

    def make(text=SUITE):
        path = tmp_path / "toy.toml"
        path.write_text(text, encoding="utf-8")
        (job,) = plan(suites.load(path)).jobs
        names = [cell.request.attack.name if cell.request.attack else cell.kind for cell in job.cells]
        return FederatedModel(job.cells, CPU), dict(zip(names, job.cells, strict=True))

    return make


def kept_bytes(model):
    """Bytes of all storages that a run keeps of messages and local steps, each once."""
    replies = [reply for of_client in model.watched.replies.values() for reply in of_client]
    return sum(storages([*replies, *model.watched.steps]).values())


@pytest.mark.long
def test_the_limit_is_the_bytes_of_all_that_is_kept_and_a_byte_less_keeps_nothing(subject, monkeypatch):
    unlimited, cells = subject()
    taken = kept_bytes(unlimited.model)
    basis = 3 * 4 * sum(p.numel() for p in unlimited.model.network.parameters())
    assert taken > basis  # the bases are counted
    for limit, kept in ((taken, True), (taken - 1, False)):
        monkeypatch.setattr(trained_run, "TRANSCRIPT_MEMORY", limit)
        again, _ = subject()
        assert not again.model.too_long and kept_bytes(again.model) == (taken if kept else 0)
        for expected, own in zip(
            unlimited.model.run.model.parameters(), again.model.run.model.parameters(), strict=True
        ):
            assert torch.equal(expected, own)
        if kept:
            assert again.outcome(cells["message_likelihood"]).metrics
            continue
        for name in OF_A_CLIENT:
            with pytest.raises(NotApplicable, match=r"GiB or more by round 4 of 4, bases included; take fewer rounds"):
                again.outcome(cells[name])
        assert again.outcome(cells["loss_trace"]).metrics == unlimited.outcome(cells["loss_trace"]).metrics


def test_sizes_that_exceed_the_limit_refuse_attacks_before_the_training(subject, monkeypatch):
    unlimited, cells = subject()
    model = unlimited.model
    dim = sum(p.numel() for p in model.network.parameters())
    least = 4 * dim * (4 * 2 + 2 * len(model.schedule.rounds_of(model.attacked)))  # four rounds of two clients, tau 2
    monkeypatch.setattr(trained_run, "TRANSCRIPT_MEMORY", least)
    assert not subject()[0].model.too_long
    monkeypatch.setattr(trained_run, "TRANSCRIPT_MEMORY", least - 1)
    refused, _ = subject()
    for name in OF_A_CLIENT:
        with pytest.raises(NotApplicable, match=r"must fit into .* GiB, and take .* GiB or more; take fewer rounds"):
            refused.outcome(cells[name])
    assert "_watched" not in vars(refused.model)
    assert refused.outcome(cells["loss_trace"]).metrics and kept_bytes(refused.model) == 0


def test_suites_without_attacks_on_clients_keep_nothing_and_have_no_limit(subject, monkeypatch):
    monkeypatch.setattr(trained_run, "TRANSCRIPT_MEMORY", 1)
    alone, cells = subject(SUITE[: SUITE.index("attack =")] + 'attack = [{ name = "loss_threshold" }]')
    assert alone.outcome(cells["loss_threshold"]).metrics and not alone.model.too_long and kept_bytes(alone.model) == 0
