"""The table of clients in a suite file: what it accepts, and sentences about what it does not fit."""

import re

import pytest

from leakbench.audit.suite.federated import FederatedTable
from leakbench.audit.suite.suite import SuiteError, load
from leakbench.defenses.core import Federation

from ...parameters import subtests

SUITE = """
name = "toy"
seeds = [0]
task = { data = "digits", model = "mlp", private = 60, batch = 5, lr = 0.5 }
budget = { noise_multiplier = 4.0, delta = 1e-5 }
federated = { clients = 3, rounds = 2, local_steps = 2 }
defense = [{ name = "fed_avg" }]
"""
CLIENTS = "clients = 3, rounds = 2, local_steps = 2"


def refused(folder, text: str) -> str:
    path = folder / "toy.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SuiteError) as error:
        load(path)
    return "\n".join(line.removeprefix(f"{path}: ") for line in str(error.value).splitlines())


def test_a_table_of_clients_is_the_federation_that_it_says():
    table = FederatedTable(
        clients=4, rounds=7, local_epochs=3, participation=0.5, participants="poisson", equal="batch", server_lr=0.5
    )
    expected = Federation(
        rounds=7, local_steps=15, participation=0.5, participants="poisson", equal="batch", server_lr=0.5
    )
    assert table.federation(steps_per_epoch=5) == expected
    summed = FederatedTable(clients=4, rounds=7, local_steps=1, aggregation="sum", least_honest=2, colluders=1)
    assert summed.federation(1) == Federation(rounds=7, aggregation="sum", least_honest=2, colluders=1)


@subtests(
    "old, new, sentence",
    [
        (CLIENTS, CLIENTS + ", local_epochs = 1", "federated: must have one of local_steps, local_epochs, got both"),
        (
            CLIENTS,
            "clients = 3, rounds = 2",
            "federated: must have one of local_steps, local_epochs, got neither",
        ),
        (
            CLIENTS,
            CLIENTS + ', split = "dirichlet", shards = 2',
            "federated: shards must go with split = 'shards', got 'dirichlet'",
        ),
        (CLIENTS, CLIENTS + ", least = 3", "federated: least must go with split = 'dirichlet', got 'iid'"),
        (
            CLIENTS,
            CLIENTS + ", least_honest = 2",
            "federated: least_honest must go with aggregation = 'sum', got 'messages'",
        ),
        (
            CLIENTS,
            CLIENTS + ', aggregation = "messages", colluders = 2',
            "federated: colluders must go with aggregation = 'sum', got 'messages'",
        ),
        (
            CLIENTS,
            CLIENTS + ', split = "classes"',
            "federated.split: must be 'iid', 'class', 'shards' or 'dirichlet', got 'classes'; did you mean 'class'?",
        ),
        (CLIENTS, CLIENTS + ", client = 3", "federated.client: unknown key; did you mean 'clients'?"),
        (
            "lr = 0.5 }",
            "lr = 0.5, epochs = 3 }",
            "task.epochs: must be absent with [federated], whose rounds and local steps decide the length",
        ),
        (
            "lr = 0.5 }",
            "lr = 0.5, average = 0.9 }",
            "task.average: is for central training: must be absent with [federated]",
        ),
        (
            '"fed_avg" }',
            '"fed_avg", epochs = 3 }',
            "defense[0].epochs: is for central training: must be absent with [federated]",
        ),
        (
            "defense = [{ name",
            "tune = { validation = 5, epochs = 2, average = [0.9] }\ndefense = [{ name",
            "tune.epochs: must be absent with [federated], whose trials have trial_rounds\n"
            "tune.average: is for central training: must be absent with [federated]",
        ),
        (
            "federated = { clients = 3, rounds = 2, local_steps = 2 }",
            "tune = { validation = 5, trial_rounds = 2, lr = [0.1, 0.2] }",
            "task.epochs: is missing\ntune.trial_rounds: must go with a [federated] table, and this suite has none",
        ),
        (
            "federated = { clients = 3, rounds = 2, local_steps = 2 }",
            "public_only = { epochs = 3 }",
            "task.epochs: is missing\npublic_only: must go with a [federated] table, and this suite has none",
        ),
    ],
)
def test_a_conflict_is_one_sentence(old, new, sentence, tmp_path):
    text = SUITE.replace(old, new)
    assert text != SUITE
    assert refused(tmp_path, text) == sentence


def test_a_share_is_refused_under_a_sum_that_shows_no_message(tmp_path):
    share = 'share = { data = "digits", model = "mlp", batch = 2, images = 2 }\ndefense'
    text = SUITE.replace("defense", share)
    path = tmp_path / "shown.toml"
    path.write_text(text, encoding="utf-8")
    assert load(path).share is not None
    assert refused(tmp_path, text.replace(CLIENTS, CLIENTS + ', aggregation = "sum"')) == (
        "share: must be absent with aggregation = 'sum', under which no message of a client is seen"
    )


def test_a_sampler_that_counts_the_examples_of_a_client_is_refused(tmp_path):
    text = SUITE.replace("lr = 0.5 }", 'lr = 0.5, sampling = "cyclic", groups = 2 }')
    assert re.search(r"task\.sampling: .* got 'cyclic'; take poisson", refused(tmp_path, text))


def test_every_other_method_is_also_the_federated_ones(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(SUITE.replace('[{ name = "fed_avg" }]', '[{ name = "*" }]'), encoding="utf-8")
    names = {choice.name for choice in load(path).defense_grid()}
    assert {"fed_pcdp", "scaffold", "dp_sgd"} <= names
