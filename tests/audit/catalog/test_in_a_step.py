"""What `explain` says of a step is read off its plans: sizes of the papers, events, and who reads public data."""

import json

import pytest

from audit.catalog.explain import explain
from audit.catalog.in_a_step import in_a_step
from audit.catalog.methods import defense
from audit.cli import main

D = 26_010


@pytest.mark.parametrize(
    ("name", "first", "last", "public"),
    [
        ("dp_sgd", (D,), (D,), False),
        ("pcdp", (490,), (490,), True),  # the paper's 0.48: 490 of 26,010 entries
        ("random_sparsification", (D,), (2_601,), False),
        ("dpdr", (D,), (D, 4), False),
        ("dp_zo", (1,), (1,), False),
        ("per_layer", (1_040, 8_224, 16_416, 330), (1_040, 8_224, 16_416, 330), False),
    ],
)
def test_numbers_a_step_are_those_of_the_plans(name, first, last, public):
    found = in_a_step(defense(name))
    assert (found.first, found.last, found.public, found.reason) == (first, last, public, "")
    assert found.events == ("a step is charged: a Gaussian on its batch, at the noise multiplier",)
    assert found.to_dict()["bytes_last_step"] == 4 * sum(last)


def test_a_release_before_the_steps_and_a_missing_guarantee_are_said():
    before, step = in_a_step(defense("dp_snip")).events
    assert before == "before the steps, charged: a Gaussian on all records, noise multiplier 8.0"
    assert step.startswith("a step is charged")
    assert "correlated over steps (Banded): a record that is used once" in in_a_step(defense("band_mf")).events[0]
    assert in_a_step(defense("snip")).reason == "one example's contribution is not bounded"
    assert in_a_step(defense("clipped_sgd")).reason == "no noise is added"


def test_explain_prints_it_and_has_it_in_json(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "pcdp"])
    text = capsys.readouterr().out
    assert "sends, of 26,010 parameters: 490 numbers (1,960 bytes)" in text and "reads public examples: yes" in text
    with pytest.raises(SystemExit):
        main(["explain", "pcdp", "--json"])
    assert json.loads(capsys.readouterr().out)["in_a_step"]["numbers_last_step"] == [490]
    assert explain("loss_threshold").in_a_step is None


def test_a_method_of_others_that_cannot_be_rehearsed_is_explained_and_says_why(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        '"""Breaks."""\n\n\ndef mine(*, rate: float):\n    """Breaks.\n\n    Args:\n        rate: one.\n    """\n'
    )
    found = explain(f"{file}:mine")
    assert [setting.name for setting in found.settings] == ["rate"]
    assert str(found.in_a_step).startswith("CatalogError: defense") and str(found.in_a_step).endswith("rate is missing")
    assert found.to_dict()["not_rehearsed"] == found.in_a_step and found.to_dict()["in_a_step"] is None
    with pytest.raises(SystemExit):
        main(["explain", f"{file}:mine"])
    assert "a step cannot be rehearsed at the default settings: CatalogError: defense" in capsys.readouterr().out


def test_a_method_of_others_that_breaks_in_a_step_is_named_and_the_command_fails(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        '"""Shortens the update."""\n'
        "from defenses.core import Block, Context, Defense, Everything, Stateless, StepPlan, clip\n\n"
        "class Shortens(Stateless):\n"
        "    def plan(self, context: Context) -> StepPlan:\n"
        "        block = Block(codec=Everything(context.dim), bound=clip(1.0))\n"
        "        return StepPlan(block, post=lambda update: update[1:])\n\n"
        "def mine(*, noise_multiplier=None, rate=1.0):\n"
        "    return Defense(Shortens(), noise_multiplier=noise_multiplier)\n"
    )
    with pytest.raises(SystemExit) as exit_:
        main(["explain", f"{tmp_path / 'mine.py'}:mine"])
    assert exit_.value.code == 1
    text = capsys.readouterr().out
    assert "post must return an update as long as it was given, [26010], got [26009]" in text
    assert "default 1.0)\n" in text  # no colon where there is nothing to say
    (tmp_path / "wrong.py").write_text("import torch\n\nfrom defenses.core import no_such_thing\n")
    with pytest.raises(SystemExit) as exit_:
        main(["explain", f"{tmp_path / 'wrong.py'}:wrong"])
    assert exit_.value.code == 2 and "line 3" in capsys.readouterr().err


def test_events_are_relative_to_the_noise_multiplier_that_a_method_has_of_its_own():
    own = defense("dp_sgd", noise_multiplier=2.0)
    assert in_a_step(own).events == ("a step is charged: a Gaussian on its batch, at the noise multiplier",)
