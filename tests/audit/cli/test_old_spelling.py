"""`leakbench audit FILE` as before there were four commands: the same reports, and one sentence on the new spelling."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leakbench import watch
from leakbench.audit.cli.app import main
from leakbench.benchmarks import models

from ...parameters import subtests

MODEL = "--model mlp --members members.npz --non-members non_members.npz --attacks loss_threshold --no-gradients"
STEP = "--model mlp --batch-size 1 --attacks label_recovery,bias_division --seed 3"
CLAIM = "--claim epsilon=3,noise_multiplier=4,steps=3"
SPELLINGS = {
    "model": (f"model.safetensors {MODEL} --fail-if auc>0.1", f"model model.safetensors {MODEL} --fail-if auc>0.1"),
    "update": (
        f"before.safetensors --update one.safetensors {STEP}",
        f"update one.safetensors --checkpoint before.safetensors {STEP}",
    ),
    "scores": ("--scores scores.csv --split random --level 0.9", "scores scores.csv --split random --level 0.9"),
    "transcript": (
        f"model.safetensors {MODEL} --transcript steps {CLAIM}",
        f"transcript steps --checkpoint model.safetensors {MODEL} {CLAIM}",
    ),
}
VARIES = ("command", "seconds", "files")


@pytest.fixture(scope="module")
def folder(overfitted, tmp_path_factory):
    place = overfitted.write(tmp_path_factory.mktemp("old"))
    model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)
    save_file(model.state_dict(), str(place / "before.safetensors"))
    inputs, labels = (part[:1] for part in overfitted.public)
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    gradient = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    save_file(gradient, str(place / "one.safetensors"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(optimizer, place / "steps", model=model, noise_multiplier=4.0, clip_norm=1.0, expected_batch=60):
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = 4.0 / 60 * torch.randn(parameter.shape)
            optimizer.step()
    scores = np.random.default_rng(0).normal(size=200)
    rows = "".join(f"{score},{row % 2}\n" for row, score in enumerate(scores))
    (place / "scores.csv").write_text("score,member\n" + rows, encoding="utf-8")
    return place


@pytest.fixture
def audit(capsys, folder, monkeypatch):
    """Exit code, stdout and stderr of an audit in the folder."""
    monkeypatch.chdir(folder)

    def run(line):
        with pytest.raises(SystemExit) as ended:
            main(["audit", *shlex.split(line)])
        return ended.value.code, *capsys.readouterr()

    return run


def steady(told):
    """A document without what differs from run to run."""
    if isinstance(told, dict):
        return {key: steady(value) for key, value in told.items() if key not in VARIES}
    return [steady(one) for one in told] if isinstance(told, list) else told


@pytest.mark.long
@subtests("name", SPELLINGS)
def test_both_spellings_end_in_the_same_report(audit, name):
    (old_code, old, old_err), (code, new, err) = (audit(f"{line} --json") for line in SPELLINGS[name])
    assert code == old_code == (1 if name == "model" else 0)
    assert steady(json.loads(new)) == steady(json.loads(old))
    note, *others = old_err.splitlines()
    assert f"`leakbench audit {name} " in note
    assert others == err.splitlines()


def test_a_file_may_be_named_as_a_command(audit, folder):
    Path("model").write_bytes((folder / "model.safetensors").read_bytes())
    code, _, err = audit(f"./model {MODEL} --describe")
    assert code == 0 and "`leakbench audit model FILE" in err
    code, out, err = audit(f"model model {MODEL} --describe")
    assert (code, err) == (0, "") and "runs  loss_threshold" in out


@subtests(
    ("line", "told"),
    [
        ("", "a checkpoint and --model must be given, or --scores"),
        ("model.safetensors --members members.npz", "a checkpoint and --model must be given, or --scores"),
        (f"model.safetensors {MODEL} --scores members.npz", "--scores is instead of a checkpoint"),
        ("--scores s.csv --out report", "--scores makes no use of --out"),
        ("--scores s.csv --describe", "--scores makes no use of --describe"),
        (f"model.safetensors {MODEL} --lr 0", "--clip-norm and --noise-multiplier are of --update"),
        (f"model.safetensors {MODEL} --update-is sum", "are of --update"),
        (f"before.safetensors --update one.safetensors {STEP} --describe", "--update makes no use of --describe"),
        (f"before.safetensors --update one.safetensors {STEP} --transcript steps", "makes no use of --transcript"),
        (f"before.safetensors --update one.safetensors {STEP} --claim epsilon=1", "one step alone"),
        (f"model.safetensors {MODEL} --transcript steps", "--transcript is held against a claim"),
        (f"model.safetensors {MODEL} --canaries c.safetensors", "give --transcript"),
    ],
)
def test_mistakes_are_refused_in_the_old_words(audit, line, told):
    code, out, err = audit(line)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert told in err


def test_help_lists_a_command_for_each_kind(audit):
    code, out, _ = audit("--help")
    assert code == 0
    assert all(f" {name} " in out for name in SPELLINGS)
    assert "old" not in out
