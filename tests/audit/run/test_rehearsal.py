"""Rehearsal of added methods: their errors are refusals in seconds, before a record is written."""

import os
import re

import pytest
import torch

from leakbench.audit.cli import app as cli
from leakbench.audit.plan.cells import Plan
from leakbench.audit.plan.expand import plan
from leakbench.audit.run import harness, rehearsal
from leakbench.audit.subjects.trained_model import TrainedModel
from leakbench.audit.suite import suite as suites
from leakbench.audit.suite.suite import ChoiceError, Suite

CPU = torch.device("cpu")
SUITE = """
name = "tiny"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, batch = 70, epochs = 9, lr = 0.5, candidates = 100 }
budget = { noise_multiplier = 1.0, delta = 1e-5 }
share = { data = "digits", model = { name = "mlp", hidden = 8 }, batch = 1, images = 3 }
defense = [{ name = "sgd" }, { name = "dp_sgd" }]
attack = [{ name = "loss_threshold" }]
"""

DEFENSE = '''"""A method with errors."""
from dataclasses import dataclass

from leakbench.defenses.core import Block, Defense, StepPlan, clip
from leakbench.defenses.core.plan.codec import Everything


class Broken(Everything):
    def encode(self, rows):
        raise RuntimeError("in encode")


@dataclass(frozen=True)
class Mine:
    mode: str

    def start(self, context):
        return 0

    def plan(self, state, context):
        if self.mode == "plan" and context.step == context.steps - 1:
            raise RuntimeError("in plan")
        codec = (Broken if self.mode == "encode" else Everything)(context.dim)
        return state, StepPlan(Block(codec=codec, bound=clip(1.0)))

    def observe(self, state, context, noisy, update):
        if self.mode == "observe":
            raise RuntimeError("in observe")
        return state


def mine(*, mode: str = "", noise_multiplier: float | None = None) -> Defense:
    """A method with errors."""
    return Defense(Mine(mode), noise_multiplier=noise_multiplier)
'''

ATTACK = '''"""An attack with errors."""
import os
import time

import torch

from leakbench.attacks.core import Access, MembershipScores, ModelAccess, Observation, Reconstruction, attack
from leakbench.attacks.core.threat_model.attack_errors import NotApplicable


@attack(access=Access.BLACK_BOX)
def scores(target: ModelAccess, generator: torch.Generator, *, mode: str = "") -> MembershipScores:
    """Scores nothing."""
    if mode == "slow":
        time.sleep(60)
    if mode == "raise":
        raise RuntimeError(f"process {os.getpid()}")
    if mode == "elsewhere":
        raise NotApplicable("it is for other tasks")
    ids = target.candidates.ids
    return MembershipScores(ids=ids[: 1 if mode == "short" else None], scores=torch.zeros(len(ids)).double())


@attack(access=Access.UPDATE)
def images(target: Observation, generator: torch.Generator) -> Reconstruction:
    """Finds nothing."""
    raise RuntimeError("no images")
'''


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Suite:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(SUITE, encoding="utf-8")
    (tmp_path / "mine.py").write_text(DEFENSE, encoding="utf-8")
    (tmp_path / "own.py").write_text(ATTACK, encoding="utf-8")
    return suites.load("tiny.toml")


def line_of(text: str, words: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)


@pytest.mark.parametrize("mode", ["plan", "observe", "encode"])
def test_an_error_of_a_defense_is_a_sentence_with_its_line_before_anything_is_computed(tiny, tmp_path, mode):
    suite = tiny.with_added(defenses=[f'{{ name = "mine.py:mine", mode = "{mode}" }}'])
    with pytest.raises(ChoiceError) as refused:
        harness.run(suite, tmp_path / "out", device=CPU, jobs=1)
    line = line_of(DEFENSE, f'RuntimeError("in {mode}")')
    assert f"RuntimeError: in {mode} (mine.py, line {line}, in {mode})" in str(refused.value)
    assert not list((tmp_path / "out").rglob("*.json"))


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ('{ name = "own.py:scores", mode = "raise" }', "raise RuntimeError(f"),
        ('{ name = "own.py:images" }', 'RuntimeError("no images")'),
    ],
)
def test_an_error_of_an_attack_is_a_sentence_with_its_line_and_comes_from_its_own_process(tiny, tmp_path, added, words):
    with pytest.raises(ChoiceError) as refused:
        harness.run(tiny.with_added(attacks=[added]), tmp_path / "out", device=CPU, jobs=1)
    assert f"(own.py, line {line_of(ATTACK, words)}, in " in str(refused.value)
    assert not list((tmp_path / "out").rglob("*.json"))
    if process := re.search(r"process (\d+)", str(refused.value)):
        assert int(process[1]) != os.getpid()


def test_a_dry_run_rehearses_and_writes_nothing(tiny, tmp_path, capsys):
    bad = '{ name = "mine.py:mine", mode = "observe" }'
    for added, code in [("mine.py:mine", 0), (bad, 2)]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["run", "tiny.toml", "--add-defense", added, "--dry-run"])
        assert ended.value.code == code
    output = capsys.readouterr()
    assert "defense mine.py:mine ran on a tiny task" in output.out
    assert "(mine.py, line " in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "own.py", "tiny.toml"]


def test_an_answer_that_is_no_answer_is_refused(tiny):
    suite = tiny.with_added(attacks=['{ name = "own.py:scores", mode = "short" }'])
    with pytest.raises(ChoiceError, match=r"attack own\.py:scores must run on a tiny task"):
        rehearsal.rehearse(suite, plan(suite))


def test_methods_that_work_and_slow_attacks_pass(tiny, monkeypatch):
    monkeypatch.setattr(rehearsal, "SECONDS", 0.5)
    attacks = ['{ name = "own.py:scores", mode = "slow" }']
    suite = tiny.with_added(defenses=["mine.py:mine"], attacks=attacks)
    assert rehearsal.rehearse(suite, plan(suite)) == {
        "defense mine.py:mine": rehearsal.RAN,
        "attack own.py:scores": "did not end on a tiny task within 0.5 s",
    }


def test_an_attack_that_had_nothing_to_attack_is_not_said_to_have_run(tiny, monkeypatch):
    def outcome(mode: str) -> str:
        suite = tiny.with_added(attacks=[f'{{ name = "own.py:scores", mode = "{mode}" }}'])
        return rehearsal.rehearse(suite, plan(suite))["attack own.py:scores"]

    assert outcome("elsewhere") == "does not apply to a tiny task: it is for other tasks"

    def untrained(subject, cell):
        raise RuntimeError("no training of one epoch")

    monkeypatch.setattr(TrainedModel, "outcome", untrained)
    assert "was not rehearsed" in outcome("raise") and "no training of one epoch" in outcome("raise")


def test_neither_methods_of_the_catalogue_nor_finished_cells_are_rehearsed(tiny):
    suite = tiny.with_added(attacks=["modified_entropy"])
    assert rehearsal.rehearse(suite, plan(suite)) == {}
    suite = tiny.with_added(defenses=['{ name = "mine.py:mine", mode = "plan" }'])
    assert "was not rehearsed" in rehearsal.rehearse(suite, Plan())["defense mine.py:mine"]
