"""`leakbench selftest`: a trainer of one's own, bugs by name, one document, files, exit codes, mistakes."""

import json

import pytest

from leakbench.audit.cli import app as cli
from leakbench.audit.selftest import battery, certificate, scenarios
from leakbench.audit.selftest.bugs import PlantedBug
from leakbench.audit.selftest.certificate import Candidate

from ...parameters import subtests
from ..selftest.mechanisms import gaussian_mechanism

HONEST = """
'''The Gaussian mechanism on one logit.'''
import torch

def train(model, examples, *, noise_multiplier, clip_norm, sample_rate, steps, expected_batch):
    if type(model).__name__ != "LinearLogit":
        raise ValueError("one logit only")
    rows = -examples[0].flatten(1) / 2
    rows = rows * (clip_norm / rows.norm(dim=1, keepdim=True).clamp(min=clip_norm))
    noise = [torch.randn(rows.shape[1]).double() * noise_multiplier * SCALE for _ in range(steps)]
    drawn = [(torch.rand(len(rows), 1) < sample_rate) * rows for _ in range(steps)]
    releases = [(d.sum(dim=0).double() + n) / expected_batch for d, n in zip(drawn, noise)]
    return {"model": model, "releases": releases}
"""


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs the command in an empty folder: code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    for name, scale in (("honest", "1.0"), ("half", "0.5")):
        (tmp_path / f"{name}.py").write_text(HONEST.replace("SCALE", scale), encoding="utf-8")

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["selftest", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def short(monkeypatch):
    """Two scenarios of all, and bugs that take no training."""
    bugs = [PlantedBug(name=f"noise_{s}", words="noise", trainer=gaussian_mechanism(0, scale=s)) for s in (0.4, 0.99)]
    monkeypatch.setattr(certificate, "BUGS", bugs)
    every = scenarios.scenarios
    monkeypatch.setattr(battery, "scenarios", lambda seed: [s for s in every(seed) if s.name in ("count", "canary")])
    monkeypatch.setattr(battery, "TESTS", tuple(t for t in battery.TESTS if t.scenario in ("count", "canary")))


@pytest.mark.long
def test_a_trainer_of_ones_own_is_never_verified(command, short):
    code, out, err = command("--trainer", "honest.py:train")
    assert err.startswith("count: ") and "canary: " in err and " so far\n" in err
    assert code == 0 and "no violation found (2 of" in out and "verified" not in out
    code, out, _ = command("--trainer", "half.py:train")
    assert code == 1 and "\nviolation: canary (" in out
    assert "canary         violation: " in out and "allowed 0." in out


@pytest.mark.long
def test_of_several_repetitions_the_one_that_accuses_is_told(short, monkeypatch):
    """Or the command would end with 1 beneath the words "no violation found"."""
    half, whole = gaussian_mechanism(0, scale=0.3), gaussian_mechanism(0)
    fair = Candidate(
        name="sometimes", words="", trainer=lambda m, e, t: (half if t.seed else whole)(m, e, t), planted=False
    )
    found = certificate.examine(fair, repeat=2, seed=0, level=1e-3)
    told = certificate.verdict_on(found)
    assert not found.outcomes[0].accused_by and not found.as_it_should
    assert "canary         violation: " in told and "\nviolation: canary in 1 of 2 repetitions (" in told


def test_bugs_and_defenses_by_name_as_a_document_and_files(command, short, tmp_path):
    code, out, err = command("--bug", "noise_0.4", "--repeat", "2", "--json", "--out", "here")
    assert code == 0 and err.count("written: ") == 2
    document = json.loads(out)
    assert document == json.loads((tmp_path / "here/selftest.json").read_text(encoding="utf-8"))
    (one,) = document["trainers"]
    assert (one["name"], one["accused"], one["repetitions"], one["by"]) == ("noise_0.4", 2, 2, {"canary": 2})
    assert one["low"] == pytest.approx(0.025**0.5, abs=1e-6) and one["high"] == 1.0
    assert "| `noise_0.4` | noise | 2 of 2 |" in (tmp_path / "here/selftest.md").read_text(encoding="utf-8")


def test_a_missed_bug_is_a_failure(command, short):
    code, out, _ = command("--bug", "noise_0.99")
    assert code == 1 and "noise_0.99               NOT CAUGHT   0/1" in out
    assert out.endswith("0 of 1 planted bugs caught\n")


@subtests(
    ("arguments", "sentence"),
    [
        (("--trainer", "honest.py:train", "--bug", "half_noise"), "--trainer is examined by itself"),
        (("--trainer", "honest.py"), "must be written FILE.py:FUNCTION"),
        (("--trainer", "nobody.py:train"), "no file 'nobody.py'"),
        (("--trainer", "honest.py:torch"), "must be a function"),
        (("--bug", "none"), "no planted bug named 'none'"),
        (("--defense", "pcpd"), "did you mean 'pcdp'"),
        (("--level", "1"), "--level must be in (0, 1), got 1.0"),
        (("--out", "honest.py"), "--out must be a folder"),
    ],
)
def test_mistakes_are_one_sentence(command, arguments, sentence):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and sentence in err
