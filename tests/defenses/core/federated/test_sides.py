"""A client and a server in another framework's loop: models and claims are those of `federate` under the same keys."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leakbench.defenses.adaptive_clipping import adaptive_clipping
from leakbench.defenses.core import (
    ClientSide,
    Federated,
    Federation,
    Follow,
    PrivateAverage,
    Recipe,
    RoundSchedule,
    ServerSide,
    aggregate,
    local_round,
    partition,
    poisson,
)
from leakbench.defenses.dp_fed_avg import dp_fed_avg
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.dpsur import dpsur
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.fed_lrs import fed_lrs
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.fed_pdp import fed_pdp
from leakbench.defenses.fed_prox import fed_prox
from leakbench.defenses.local_noise_filter import local_noise_filter
from leakbench.defenses.moon import moon
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.percentile_filter import percentile_filter
from leakbench.defenses.pfa import pfa
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.scaffold import scaffold
from leakbench.defenses.sgd import sgd

from ....parameters import subtests
from ...duties import PUBLIC, network
from ...federated_runs import FEDERATION, LAYOUT, SHARDS, federated, parameters

DELTA = 1e-5
NOISY: dict[str, Any] = {"noise_multiplier": 1.3}
SCHEDULE = RoundSchedule(((0, 1, 3), (0, 2), (1, 2, 3)))
"""Clients that miss a round, and one that begins late."""
METHODS: dict[str, tuple[Federated, dict[str, Any]]] = {
    "fed_avg": (fed_avg(**NOISY), {"recipe": Recipe(momentum=0.9, schedule="cosine")}),
    "fed_avg by size": (fed_avg(**NOISY), {"federation": replace(FEDERATION, weights="size", server_lr=0.7)}),
    "fed_prox": (fed_prox(**NOISY), {}),
    "scaffold": (scaffold(**NOISY), {}),
    "scaffold stored": (scaffold(stored=True, **NOISY), {}),
    "scaffold with gradients": (scaffold(control="gradient", **NOISY), {}),
    "moon": (moon(**NOISY), {}),
    "fed_lrs": (fed_lrs(**NOISY), {}),
    "fed_pdp": (fed_pdp(rank=3, **NOISY), {}),
    "fed_pcdp": (fed_pcdp(rank=3, **NOISY), {}),
    "pcdp every 8 steps": (Federated(client=pcdp(rank=3, interval=8, **NOISY)), {}),
    "pfa": (pfa(rank=3, **NOISY), {}),
    "pfa full": (pfa(variant="full", budgets=(1.0, 2.0, 2.0, 1.0), rank=2), {}),
    "pfa plus": (pfa(variant="plus", budgets=(1.0, 2.0, 2.0, 1.0), rank=2), {}),
    "fed_lrs by effect": (fed_lrs(score="effect", **NOISY), {}),
    "random_sparsification": (Federated(client=random_sparsification(final_sparsity=0.8, **NOISY)), {}),
    "dp_snip": (Federated(client=dp_snip(**NOISY)), {}),
    "dpsur": (Federated(client=dpsur(**NOISY)), {}),
    "dp_ftrl": (Federated(client=dp_ftrl(**NOISY)), {"sampling": partition(0.5)}),
    "local_noise_filter": (local_noise_filter(), {}),
    "percentile_filter": (percentile_filter(), {}),
    "equal batches": (fed_avg(**NOISY), {"federation": replace(FEDERATION, equal="batch")}),
}
UNEQUAL = [(SHARDS[0][0][:5], SHARDS[0][1][:5]), *SHARDS[1:]]
USUAL = METHODS["fed_avg"][0]


def common(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of both sides."""
    usual = {"federation": FEDERATION, "sampling": poisson(0.4), "lr": 0.3, "seed": 2, "public": PUBLIC, "sizes": SIZES}
    return usual | settings


SIZES = tuple(len(labels) for _, labels in UNEQUAL)


def client_of(number, method, *, key: int | None = 7, checkpoint=None, **settings: Any) -> ClientSide:
    """A client in a process of its own, which begins with other weights."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    own = {"number": number, "key": key, "checkpoint": checkpoint}
    return ClientSide(model, UNEQUAL[number], method, **own, **common(settings))


class Record:
    """A stand-in for another framework's record: what it gives back was bytes, in an order of its own."""

    def __init__(self, arrays):
        self.parts = {}
        for name, array in arrays.items():
            memory = io.BytesIO()
            np.save(memory, array, allow_pickle=False)
            self.parts[name] = memory.getvalue()

    def arrays(self):
        parts = reversed(self.parts.items())
        return {name: np.load(io.BytesIO(part), allow_pickle=False) for name, part in parts}


def run_by_sides(
    method, *, schedule: RoundSchedule | None = SCHEDULE, lost=(), clients=None, key: int | None = 7, **settings: Any
):
    """All rounds of a run with a process a client: the clients, and the server."""
    model = network()
    server = ServerSide(model, method, schedule=schedule, key=key, **common(settings))
    clients = clients or {number: client_of(number, method, key=key, **settings) for number in range(4)}
    for number in range(FEDERATION.rounds):
        down, replies = Record(server.arrays), {}
        for client in server.clients:
            up = Record(local_round(clients[client], number, down.arrays()))
            if (number, client) not in lost:
                replies[client] = up.arrays()
        aggregate(server, replies)
    return model, clients, server


@pytest.mark.long
@subtests("name", list(METHODS))
def test_clients_and_server_in_their_own_processes_are_the_loop(name):
    method, settings = METHODS[name]
    model, clients, _ = run_by_sides(method, **settings)
    run = federated(method, shards=UNEQUAL, schedule=SCHEDULE, **settings)
    torch.testing.assert_close(LAYOUT.read(model), parameters(run), rtol=0, atol=1e-6)
    for number, claim in enumerate(run.claims(DELTA)):
        own = clients[number].claim(DELTA)
        assert clients[number].ledger.entries == run.ledgers[number].entries
        assert (own.epsilon, own.relation, own.unit, own.assumes) == (
            claim.epsilon, claim.relation, claim.unit, claim.assumes
        )  # fmt: skip


@subtests("participants", ["fixed", "poisson", "partition"])
def test_a_server_with_noise_has_the_ledgers_of_all_clients(participants):
    federation = Federation(rounds=3, local_steps=2, participation=0.5, participants=participants)
    for defense in (dp_sgd(**NOISY), adaptive_clipping(**NOISY)):
        method = Federated(client=sgd(), server=PrivateAverage(defense=defense))
        model, clients, server = run_by_sides(method, schedule=None, federation=federation)
        run = federated(method, shards=UNEQUAL, federation=federation)
        torch.testing.assert_close(LAYOUT.read(model), parameters(run), rtol=0, atol=1e-6)
        assert server.claims(DELTA) == run.claims(DELTA)
        with pytest.raises(ValueError, match="claim must be of a client with noise of its own"):
            clients[0].claim(DELTA)


def test_a_reply_that_does_not_come_is_a_lost_client():
    lost = {(1, 2): FEDERATION.local_steps}
    for method in (USUAL, dp_fed_avg(**NOISY)):
        model, _, server = run_by_sides(method, lost=lost)
        run = federated(method, shards=UNEQUAL, schedule=replace(SCHEDULE, lost=lost))
        torch.testing.assert_close(LAYOUT.read(model), parameters(run), rtol=0, atol=1e-6)
        assert server.losses == ("round 1: client 2 sends no reply",)


def test_a_reply_of_infinity_is_named_and_counts_as_lost():
    server = ServerSide(network(), USUAL, schedule=SCHEDULE, **common({}))
    replies = {c: local_round(client_of(c, USUAL), 0, server.arrays) for c in server.clients}
    without = {c: arrays for c, arrays in replies.items() if c != 1}
    broken = replies | {1: {name: np.full_like(part, np.inf) for name, part in replies[1].items()}}
    other = ServerSide(network(), USUAL, schedule=SCHEDULE, **common({}))
    assert np.array_equal(aggregate(server, broken)["parameters"], aggregate(other, without)["parameters"])
    assert server.losses == ("round 0: client 1 sends non-finite numbers",)


def test_a_process_for_every_round_goes_on_from_the_clients_file(tmp_path):
    method = scaffold(**NOISY)

    class Processes:
        """Begins a client anew for every round."""

        def __init__(self, key):
            self.key = key

        def __getitem__(self, number):
            return client_of(number, method, key=self.key, checkpoint=tmp_path / f"{number} {self.key}")

    run = federated(method, shards=UNEQUAL, schedule=SCHEDULE)
    clients: Any = Processes(7)
    model, clients, _ = run_by_sides(method, clients=clients)
    torch.testing.assert_close(LAYOUT.read(model), parameters(run), rtol=0, atol=1e-6)
    fresh: Any = Processes(None)
    other, fresh, _ = run_by_sides(method, clients=fresh, key=None)
    assert (LAYOUT.read(other) - parameters(run)).norm() > 0.1
    for number in range(4):
        assert clients[number].ledger.entries == fresh[number].ledger.entries == run.ledgers[number].entries


def test_a_process_that_is_killed_before_its_message_leaves_has_sent_nothing(tmp_path, monkeypatch):
    server = ServerSide(network(), USUAL, schedule=SCHEDULE, **common({}))
    path, arrays = tmp_path / "c", server.arrays
    client = client_of(0, USUAL, checkpoint=path)
    local_round(client, 0, arrays)
    content = path.read_bytes()

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(client._federation.setup.file, "save", killed)
        local_round(client, 1, arrays)
    assert path.read_bytes() == content
    again = client_of(0, USUAL, checkpoint=path)
    local_round(again, 2, arrays)  # the round may have been closed by then
    assert [(e.first, e.steps, e.times) for e in again.ledger.entries] == [(0, 4, 1), (8, 4, 1)]


def test_what_does_not_fit_is_refused_and_leaves_the_round_open(tmp_path):
    server = ServerSide(network(), USUAL, schedule=SCHEDULE, **common({}))
    client = client_of(0, USUAL)
    arrays = server.arrays
    with pytest.raises(ValueError, match="numbers of the model under 'parameters', got \\[3\\]"):
        local_round(client, 0, {"parameters": arrays["parameters"][:3]})
    reply = local_round(client, 1, arrays)
    for number in (0, 1, 3):
        with pytest.raises(ValueError, match="a round is taken once"):
            local_round(client, number, arrays)
    with pytest.raises(ValueError, match=r"replies must be of clients of the round, \(0, 1, 3\), got \[2\]"):
        aggregate(server, {2: reply})
    with pytest.raises(ValueError, match="must have the 43 numbers of the model"):
        aggregate(server, {0: {name: part[:5] for name, part in reply.items()}})
    with pytest.raises(ValueError, match="named as by to_arrays"):
        aggregate(server, {0: {"weights": arrays["parameters"]}})
    assert server.round == 0
    with pytest.raises(ValueError, match="claims must be of a server with noise"):
        server.claims(DELTA)
    with pytest.raises(ValueError, match="number must be of one of 4 clients, got 4"):
        ClientSide(network(), SHARDS[0], USUAL, number=4, **common({}))
    with pytest.raises(ValueError, match="checkpoint must be None"):
        client_of(0, dp_fed_avg(**NOISY), checkpoint=tmp_path / "c")
    over_rounds = Federated(client=dp_ftrl(tree_per_epoch=False, **NOISY))
    with pytest.raises(ValueError, match="must restart within a round"):
        local_round(client_of(0, over_rounds, sampling=partition(0.5)), 0, arrays)
    for _ in range(3):
        aggregate(server, {})
    assert server.clients == ()
    with pytest.raises(ValueError, match="the run must have another round"):
        aggregate(server, {})


@subtests("place", ["local steps", "update"])
def test_a_round_that_fails_is_charged_and_not_taken_again(place, tmp_path, monkeypatch):
    """Taken again, its steps would draw the batches of the first time, and a partition would charge them once."""
    method = Federated(client=adaptive_clipping(**NOISY)) if place == "local steps" else local_noise_filter()
    settings: dict[str, Any] = {"sampling": partition(0.25)} if place == "local steps" else {}
    client = client_of(0, method, checkpoint=tmp_path / "client", **settings)
    arrays = ServerSide(network(), method, **common(settings)).arrays
    local_round(client, 0, arrays)

    class Failing(Exception):
        pass

    def fails(self, *arguments):
        raise Failing

    charges = {"correct": {"local steps": 1, "update": 0}, "finish": {"local steps": 4, "update": 1}}
    for number, (where, expected) in enumerate(charges.items(), start=1):
        charged = client.ledger.steps
        with monkeypatch.context() as patch:
            patch.setattr(Follow, where, fails)
            with pytest.raises(Failing):
                local_round(client, number, arrays)
        assert client.ledger.steps - charged == expected[place]
        with pytest.raises(ValueError, match="a round is taken once"):
            local_round(client, number, arrays)


def test_a_client_goes_on_from_its_file_after_a_round_that_failed(tmp_path, monkeypatch):
    settings: dict[str, Any] = {"federation": replace(FEDERATION, rounds=4)}
    client = client_of(0, USUAL, checkpoint=tmp_path / "client", **settings)
    arrays = ServerSide(network(), USUAL, **common(settings)).arrays
    with monkeypatch.context() as patch:
        patch.setattr(Follow, "correct", lambda self, *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            local_round(client, 0, arrays)
    local_round(client, 1, arrays)
    again = client_of(0, USUAL, checkpoint=tmp_path / "client", **settings)
    assert again.ledger.entries == client.ledger.entries and again.ledger.steps == 5
    local_round(again, 2, arrays)


def test_a_broadcast_without_the_servers_control_variate_is_refused_before_a_step(tmp_path):
    method = scaffold(**NOISY)
    client, arrays = client_of(0, method), ServerSide(network(), method, **common({})).arrays
    with pytest.raises(ValueError, match="arrays must have 'broadcast/control' of the server's rule"):
        local_round(client, 0, {"parameters": arrays["parameters"]})
    assert client.ledger.steps == 0
    local_round(client, 0, arrays)


def test_every_client_has_its_own_key_in_a_real_run():
    """Under keys from the operating system, messages of the same round have different noise."""
    server = ServerSide(network(), USUAL, schedule=SCHEDULE, **common({}))
    first, second = (local_round(client_of(0, USUAL, key=None), 0, server.arrays)["dense/values"] for _ in range(2))
    assert np.linalg.norm(first - second) > 0.1


FLOWER = "1.42.0"
ROOT = Path(__file__).parents[4]
DRIVER = """
import json, logging, sys
import task
task.settings |= {"key": 7}  # as if the operating system had drawn the same for all
initial = task.network()
task.network = lambda: __import__("copy").deepcopy(initial)
import client_app, server_app
import flwr, torch
from flwr.app import Context, Message, Metadata, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from leakbench.defenses.core import ClientSide, federate
from pathlib import Path

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # set by Flower's own processes
NODES = {900 + 7 * number % 20: number for number in range(4)}


class InOneProcess(Grid):
    def _unused(self, *args, **options):
        raise NotImplementedError
    set_run = create_message = push_messages = pull_messages = get_nodes = _unused
    run = property(_unused)
    def get_node_ids(self):
        return sorted(NODES)
    def send_and_receive(self, messages, *, timeout=None):
        return [self.answer(message) for message in messages]
    def answer(self, message):
        node = message.metadata.dst_node_id
        context = Context(1, node, {"partition-id": NODES[node], "num-partitions": 4}, RecordDict(), {})
        sent = message_from_proto(message_to_proto(message))
        reply = client_app.app(sent, context)
        back = message_from_proto(message_to_proto(reply))
        back.metadata._src_node_id = node
        return back


logging.disable(logging.CRITICAL)
models = []
average = server_app.aggregate
server_app.aggregate = lambda server, replies: models.append(average(server, replies)) or models[-1]
server_app.main(InOneProcess(), None)
shards = [task.shard(number) for number in range(4)]
alike = {name: value for name, value in task.settings.items() if name != "sizes"}
run = federate(task.network(), shards, task.method, **alike)
flat = torch.cat([part.detach().reshape(-1) for part in run.model.parameters()])
moved = float((flat - torch.cat([part.detach().reshape(-1) for part in initial.parameters()])).abs().max())
claims = []
for number, shard in enumerate(shards):
    file = Path(f"client-{number}.checkpoint")
    client = ClientSide(task.network(), shard, task.method, number=number, checkpoint=file, **task.settings)
    claims.append(client.claim(1e-5).epsilon)
print(json.dumps({
    "flower": flwr.__version__, "moved": moved,
    "difference": float((torch.from_numpy(models[-1]["parameters"]) - flat).abs().max()),
    "claims": claims, "of the loop": [claim.epsilon for claim in run.claims(1e-5)],
}))
"""


def python_with_flower(folder):
    """An interpreter with Flower and this environment's packages; Flower needs an older typer than leakbench."""
    if find_spec("flwr"):
        return sys.executable
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", f"flwr=={FLOWER}"]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"flwr {FLOWER} could not be installed: {installed.stderr.strip()[-200:]}")
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own, ours = (
        subprocess.run([executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for executable in (python, sys.executable)
    )
    (Path(own) / "shared.pth").write_text(f"{ours}\n")  # behind its own packages
    return python


@pytest.mark.peers
def test_the_apps_of_the_documentation_run_under_flower(tmp_path):
    """Models to 1e-6 and claims as by `federate`, from the files of docs/federated.md."""
    python = python_with_flower(tmp_path / "environment")
    for block in (ROOT / "docs" / "federated.md").read_text().split("```python\n# ")[1:]:
        name, _, rest = block.partition("\n")
        (tmp_path / name).write_text(rest.partition("```")[0])
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(python), "driver.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["moved"] > 0.1 and answer["difference"] <= 1e-6
    assert answer["claims"] == answer["of the loop"] and max(answer["claims"]) > 0
