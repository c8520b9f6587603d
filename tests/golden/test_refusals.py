"""Mistakes on the command line: the exit code and the first line on stderr of each, as they were when frozen.

The golden file is command line -> [code, line], with the next one where it ends in a colon. The line is null where its
words are typer's, which differ from version to version. `python -m tests.golden.test_refusals` fills in what is an
empty list there, and writes the others anew.
"""

import contextlib
import io
import json
import re
import shlex
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leakbench.audit.cli import app as cli
from leakbench.benchmarks import models

from ..parameters import subtests

FILE = Path(__file__).with_name("refusals.json")
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))

SUITE = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, batch = 70, epochs = 1, lr = 0.5, candidates = 100 }
budget = { epsilon = 3.0, delta = 1e-5 }
defense = [{ name = "sgd" }, { name = "dp_sgd" }]
attack = [{ name = "loss_threshold" }]
controls = false
"""


def written(folder):
    """A working folder with files to make mistakes about."""
    draw = np.random.default_rng(0)
    for name, examples in (("members", 40), ("non_members", 40), ("public", 60)):
        inputs = draw.uniform(size=(examples, 1, 8, 8)).astype(np.float32)
        np.savez(folder / f"{name}.npz", inputs=inputs, labels=np.arange(examples) % 10)
    model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)
    save_file(model.state_dict(), str(folder / "model.safetensors"))
    gradient = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    save_file(gradient, str(folder / "update.safetensors"))
    rows = "".join(f"{i},{i % 7},{i % 2}\n" for i in range(40))
    (folder / "scores.csv").write_text("id,score,member\n" + rows, encoding="utf-8")
    (folder / "no_member.csv").write_text("id,score\na,1\n", encoding="utf-8")
    (folder / "torn.toml").write_text(SUITE.replace("]", ""), encoding="utf-8")
    (folder / "no_epochs.toml").write_text(SUITE.replace("epochs = 1", "epochs = 0"), encoding="utf-8")
    (folder / "large.toml").write_text(SUITE.replace("batch = 70", "batch = 1400"), encoding="utf-8")
    (folder / "empty").mkdir()
    return folder


def refused(line):
    """Exit code and the line on stderr of a command line in the working folder, without names of what there is."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(line))
    assert out.getvalue() == ""
    lines = err.getvalue().splitlines()
    # What a pre-flight found on its way stands before the error.
    place = next((number for number, line in enumerate(lines) if line.startswith("error: ")), 0)
    first = " ".join(lines[place : place + (2 if lines[place].endswith(":") else 1)])
    # Another method is no other refusal, and neither is another home of a function.
    first = re.sub(r"there are (\w+, )+\w+", "there are NAMES", first)
    first = re.sub(r"[\w.]+\.watch\b", "watch", first)
    return [ended.value.code, first.replace(str(Path.cwd()), "FOLDER")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("refusals"))


@pytest.mark.long
@subtests("line", list(GOLDEN))
def test_a_mistake_has_its_code_and_its_sentence(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    code, first = refused(line)
    golden_code, golden_first = GOLDEN[line]
    assert code == golden_code != 0
    assert golden_first in (None, first)


def main() -> None:
    """Writes the golden file for the command lines that it has."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(written(Path(name))):
        found = {line: refused(line) for line in GOLDEN}
    for line, golden in GOLDEN.items():
        if golden[1:] == [None]:
            found[line][1] = None
    lines = ",\n".join(f" {json.dumps(line)}: {json.dumps(one, ensure_ascii=False)}" for line, one in found.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
