"""The command in this process, for tests of its subcommands."""

import json

import pytest

from leakbench.audit.cli import app as cli
from leakbench.leaderboard.records.record import MethodUsed, Metric, Provenance, Record, RecordedClaim
from leakbench.leaderboard.records.task import TrainingTask


def toy_record(seed: int = 0) -> Record:
    """A valid record of a suite that does not exist; each seed has an id of its own."""
    return Record(
        id=f"{seed}" * 16, suite="toy", suite_digest="d", kind="utility", defense=MethodUsed(name="dp_sgd"), seed=seed,
        task=TrainingTask({"data": "digits", "model": "mlp"}), device="cpu", seconds=1.0,
        provenance=Provenance(version="0.1.0", source="0" * 64),
        metrics={"accuracy": Metric(value=0.9, low=0.8, high=1.0, better="higher")},
        claim=RecordedClaim(epsilon=3.0, delta=1e-5, relation="add_remove", sampling="poisson", accountant="PLD"),
    )  # fmt: skip


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs the command in this process and in an empty folder: code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def document(command):
    """Runs a command with --json, which must succeed and print one document."""

    def run(*arguments: object):
        code, out, err = command(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return run
