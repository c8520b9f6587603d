"""The command in this process, for tests of its subcommands."""

import json

import pytest

from leakbench.audit.cli import app as cli


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
