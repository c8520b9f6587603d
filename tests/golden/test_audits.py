"""What `leakbench audit --json` says of scores, a model, a transcript and updates: every number and every word.

The golden file is path -> value of each document, without what varies: times, versions, digests, this machine.
`python -m tests.golden.test_audits` writes it anew, after a report was changed on purpose.
"""

import contextlib
import functools
import io
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from leakbench import audit
from leakbench.audit.cli import app as cli
from leakbench.benchmarks import models
from leakbench.leaderboard.records.audit_report import AuditReport, ScoresReport
from leakbench.leaderboard.records.update_report import UpdateReport

FILE = Path(__file__).with_name("audits.json")
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))

VARIES = {"provenance", "command", "device", "seconds", "sha256"}

MODEL = "model.safetensors --model mlp --members members.npz --non-members non_members.npz --population public.npz"
BEFORE = "before.safetensors --model mlp --public public.npz"
AUDITS = {
    "scores": "--scores scores.csv --split random --claim epsilon=0.5",
    "model": f"{MODEL} --split random --claim epsilon=1 --fail-if auc>0.5 --no-gradients "
    "--attacks loss_threshold,modified_entropy,label_only,gradient_norm",
    "model without a random split": f"{MODEL} --attacks loss_threshold --no-gradients",
    "transcript": f"{MODEL} --attacks loss_threshold --no-gradients --transcript steps "
    "--claim epsilon=3,sampling=poisson,sample_rate=0.1,noise_multiplier=4,steps=5",
    "update of one example": f"{BEFORE} --update one.safetensors --batch-size 1 "
    "--attacks label_recovery,bias_division,r_gap",
    "update of two examples": f"{BEFORE} --update two.safetensors --batch-size 2 --candidates candidates.npz "
    "--attacks label_recovery,gradient_similarity",
}


def written(folder):
    """Digits, an overfitted model of 80 of them, gradients of others before any training, and a table of scores."""
    data, target = load_digits(return_X_y=True)
    inputs = torch.tensor(data / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(target, dtype=torch.int64)
    places = {"members": (0, 80), "non_members": (80, 160), "public": (160, 360), "candidates": (400, 408)}
    for name, (first, end) in places.items():
        np.savez(folder / f"{name}.npz", inputs=inputs[first:end].numpy(), labels=labels[first:end].numpy())
    model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)
    save_file(model.state_dict(), str(folder / "before.safetensors"))
    for name, size in (("one", 1), ("two", 2)):
        loss(model, inputs[400 : 400 + size], labels[400 : 400 + size]).backward()
        gradient = {
            key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None
        }
        save_file(gradient, str(folder / f"{name}.safetensors"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(60):
        loss(model, inputs[:80], labels[:80]).backward()
        optimizer.step()
    save_file(model.state_dict(), str(folder / "model.safetensors"))
    noise = np.random.default_rng(0)
    with audit.watch(optimizer, folder / "steps", model=model, noise_multiplier=4.0, clip_norm=1.0, expected_batch=8):
        for _ in range(5):
            # Half of the noise that is stated, of a batch that holds nobody.
            for parameter in model.parameters():
                parameter.grad = torch.from_numpy(noise.normal(0, 0.25, size=tuple(parameter.shape))).float()
            optimizer.step()
    rows = "".join(f"{i},{(37 * i) % 101 + 40 * (i % 2)},{i % 2}\n" for i in range(200))
    (folder / "scores.csv").write_text("id,score,member\n" + rows, encoding="utf-8")
    return folder


def loss(model, inputs, labels):
    model.zero_grad()
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def flat(told, path=""):
    """Path -> value of a document; entries of lists are named by what they say of themselves, else by place."""
    found = {}
    children = told.items() if isinstance(told, dict) else enumerate(told)
    for key, value in children:
        if key in VARIES:
            continue
        named = value.get("name", key) if isinstance(value, dict) else key
        here = f"{path}/{named}"
        if isinstance(value, dict | list):
            # An empty one says something, too.
            found |= flat(value, here) if value else {here: str(value)}
        else:
            found[here] = plain(value) if isinstance(value, str) else value
    return found


def plain(sentence):
    """A sentence without what another attack, another home of a function, or another rounding would change in it."""
    sentence = re.sub(r"\b\d(\.\d+)?e-1\d\b", "ROUNDING", sentence)
    return re.sub(r"[\w.]+\.watch\b", "watch", re.sub(r"^(\w+, )+\w+: ", "NAMES: ", sentence))


@functools.cache
def audited(arguments):
    """Exit code and text of an audit in the working folder."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as ended:
        cli.main(["audit", *arguments.split(), "--json"])
    return ended.value.code, out.getvalue()


def said(arguments):
    """Exit code and flat document of an audit in the working folder."""
    code, text = audited(arguments)
    return {"exit code": code, **flat(json.loads(text))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("audits"))


@pytest.mark.parametrize("name", AUDITS)
def test_an_audit_says_what_it_said(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    expected = {
        path: pytest.approx(value, rel=1e-5, abs=1e-7) if isinstance(value, float) else value
        for path, value in GOLDEN[name].items()
    }
    assert said(AUDITS[name]) == expected


@pytest.mark.parametrize("name", AUDITS)
def test_a_report_that_is_read_and_written_again_is_the_same_text(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    _, text = audited(AUDITS[name])
    report = next(kind for kind in (AuditReport, ScoresReport, UpdateReport) if f'"{kind.SCHEMA}"' in text)
    read = report.from_json(text, source=name)
    assert json.dumps(read.to_dict(), indent=2) + "\n" == text
    assert report.from_json(read.to_json(), source=name) == read


def main() -> None:
    """Writes the golden file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(written(Path(name))):
        found = {name: said(arguments) for name, arguments in AUDITS.items()}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
