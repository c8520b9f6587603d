"""What `explain` says of a step is read off its plans: sizes of the papers, events, and who reads public data."""

import json

import pytest

from leakbench.audit.catalog.explain import explain
from leakbench.audit.catalog.listing import column
from leakbench.audit.catalog.methods import defense, names
from leakbench.audit.catalog.step_summary import step_summary
from leakbench.audit.cli import main

from ...parameters import subtests

D = 26_010


@subtests(
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
    found = step_summary(defense(name))
    assert (found.first, found.last, found.public, found.reason) == (first, last, public, "")
    assert found.events == ("a step is charged: a Gaussian on its batch, at the noise multiplier",)
    assert found.to_dict()["bytes_last_step"] == 4 * sum(last)


COINS = "a seed of 8 bytes, once: the {} is drawn by public coins"
RELEASES = "nothing: the {} is a function of the initial parameters and of past releases"
PUBLIC = (
    "nothing where a receiver computes the {} from the same public examples; else {:,} bytes whenever it is made anew"
)


@pytest.mark.long
@subtests(
    ("name", "said"),
    [
        ("dp_sgd", None),
        ("per_layer", None),  # blocks of coordinates that are all of them together
        ("random_sparsification", COINS.format("mask")),
        ("dp_ssgd", COINS.format("mask")),
        ("posterior_freeze", COINS.format("mask of the noisy update")),
        ("dp_zo", COINS.format("basis")),  # its map after the noise only rescales what is in the same basis
        ("magnitude_dropping", RELEASES.format("mask")),
        ("ranked", RELEASES.format("mask")),
        ("synflow", RELEASES.format("mask")),
        ("dp_snip", RELEASES.format("mask")),
        ("dpdr", RELEASES.format("basis")),
        ("geoclip", RELEASES.format("basis")),
        ("pcdp", PUBLIC.format("basis", 4 * 100 * (1024 + 8192 + 16_384 + 320))),  # of tensors of more than 100 numbers
        ("pdp", PUBLIC.format("basis of the noisy update", 4 * 100 * (1024 + 8192 + 16_384 + 320))),
        ("gep", PUBLIC.format("basis", 4 * 100 * D // 3)),
    ],
)
def test_what_is_sent_beside_the_numbers_follows_from_the_plans(name, said):
    lines = [one.line() for one in step_summary(defense(name)).side_information]
    assert lines == ([] if said is None else [f"sends besides: {said}"])


def test_a_mask_that_is_drawn_is_told_from_the_basis_of_public_examples_within_it():
    found = step_summary(defense("gep", {"final_sparsity": 0.9, "cooling_epochs": 0, "groups": 1, "rank": 20}))
    kept = D - 9 * D // 10
    assert found.last == (20, kept)
    lines = [COINS.format("mask"), PUBLIC.format("basis", 4 * 20 * kept)]
    assert [one.line() for one in found.side_information] == [f"sends besides: {line}" for line in lines]


def test_a_mask_of_public_examples_is_told_from_one_that_is_drawn(tmp_path):
    file = tmp_path / "half.py"
    file.write_text(
        '"""The larger half of a public gradient."""\n'
        "from leakbench.defenses.core import Block, Coordinates, Defense, Stateless, StepPlan, clip\n\n"
        "class Half(Stateless):\n"
        "    def plan(self, context):\n"
        "        order = context.public_rows(1)[0].argsort()\n"
        "        codec = Coordinates(order[context.dim // 2 :], dim=context.dim)\n"
        "        return StepPlan(Block(codec=codec, bound=clip(1.0)))\n\n"
        "def half(*, noise_multiplier=None):\n"
        "    return Defense(Half(), noise_multiplier)\n"
    )
    assert [one.line() for one in step_summary(defense(f"{file}:half")).side_information] == [
        f"sends besides: {PUBLIC.format('mask', -(-D // 8))}"
    ]


def test_a_mask_that_a_method_of_others_draws_is_told_from_one_of_what_was_released(tmp_path):
    text = (
        '"""Half of them."""\n'
        "import torch\n"
        "from leakbench.defenses.core import Block, Coordinates, Defense, Stateless, StepPlan, clip\n\n"
        "class Half(Stateless):\n"
        "    def plan(self, context):\n"
        "        order = ORDER\n"
        "        codec = Coordinates(order[: context.dim // 2], dim=context.dim)\n"
        "        return StepPlan(Block(codec=codec, bound=clip(1.0)))\n\n"
        "def half(*, noise_multiplier=None):\n"
        "    return Defense(Half(), noise_multiplier)\n"
    )
    drawn, found = "torch.randperm(context.dim, generator=context.coins(context.step))", []
    orders = {"drawn": drawn, "ranked": "context.parameters.argsort()", "elsewhere": "torch.randperm(context.dim)"}
    for name, order in orders.items():
        (tmp_path / f"{name}.py").write_text(text.replace("ORDER", order))
        found.append(step_summary(defense(f"{tmp_path / name}.py:half")).to_dict()["sent_besides"])
    assert found == [
        [{"what": "mask", "source": "public coins", "bytes": 8, "after_noise": False}],
        [{"what": "mask", "source": "releases", "bytes": 0, "after_noise": False}],
        [{"what": "mask", "source": "other coins", "bytes": -(-D // 8), "after_noise": False}],
    ]
    line = step_summary(defense(f"{tmp_path / 'elsewhere'}.py:half")).side_information[0].line()
    assert line.startswith(f"sends besides: {-(-D // 8):,} bytes whenever") and "not drawn by the public coins" in line


def test_what_an_observer_sees_stands_in_the_readme_in_words_that_need_no_other_row():
    sees = column("leakbench.defenses", "sees")
    assert sees["dpdr"] == explain("dpdr").sees
    unclear = [name for name in names("defenses") if (sees.get(name) or "it ").startswith(("the same", "those", "it "))]
    assert not unclear


def test_of_a_method_of_others_nobody_has_said_what_an_observer_sees_and_its_noise_is_the_budgets(tmp_path):
    (tmp_path / "dp_sgd.py").write_text(
        '"""Mine."""\n\nfrom leakbench.defenses.core import Defense, Whole, clip\n\n\n'
        "def dp_sgd(*, noise_multiplier: float):\n    return Defense(Whole(bound=clip(1.0)), noise_multiplier)\n"
    )
    found = explain(f"{tmp_path / 'dp_sgd.py'}:dp_sgd")
    assert found.sees is None
    (noise,) = found.settings
    assert (noise.name, noise.required, noise.default) == ("noise_multiplier", False, "calibrated to the budget")


def test_a_release_before_the_steps_and_a_missing_guarantee_are_said():
    before, step = step_summary(defense("dp_snip")).events
    assert before == "before the steps, charged: a Gaussian on all records, noise multiplier 8.0"
    assert step.startswith("a step is charged")
    assert "correlated over steps (Banded): a record that is used once" in step_summary(defense("band_mf")).events[0]
    assert step_summary(defense("snip")).reason == "one example's contribution is not bounded"
    assert step_summary(defense("clipped_sgd")).reason == "no noise is added"


def test_explain_prints_it_and_has_it_in_json(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "pcdp"])
    text = capsys.readouterr().out
    assert "sends, of 26,010 parameters: 490 numbers (1,960 bytes)" in text and "reads public examples: yes" in text
    with pytest.raises(SystemExit):
        main(["explain", "pcdp", "--json"])
    assert json.loads(capsys.readouterr().out)["in_a_step"]["numbers_last_step"] == [490]
    assert explain("loss_threshold").step_summary is None


def test_a_method_of_others_that_cannot_be_rehearsed_is_explained_and_says_why(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        '"""Breaks."""\n\n\ndef mine(*, rate: float):\n    """Breaks.\n\n    Args:\n        rate: one.\n    """\n'
    )
    found = explain(f"{file}:mine")
    assert [setting.name for setting in found.settings] == ["rate"]
    assert str(found.step_summary).startswith("CatalogError: defense") and str(found.step_summary).endswith(
        "rate is missing"
    )
    assert found.to_dict()["not_rehearsed"] == found.step_summary and found.to_dict()["in_a_step"] is None
    with pytest.raises(SystemExit):
        main(["explain", f"{file}:mine"])
    assert "a step cannot be rehearsed at the default settings: CatalogError: defense" in capsys.readouterr().out


def test_a_method_of_others_that_breaks_in_a_step_is_named_and_the_command_fails(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        '"""Shortens the update."""\n'
        "from leakbench.defenses.core import Block, Context, Defense, Everything, Stateless, StepPlan, clip\n\n"
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
    (tmp_path / "wrong.py").write_text("import torch\n\nfrom leakbench.defenses.core import no_such_thing\n")
    with pytest.raises(SystemExit) as exit_:
        main(["explain", f"{tmp_path / 'wrong.py'}:wrong"])
    assert exit_.value.code == 2 and "line 3" in capsys.readouterr().err


def test_events_are_relative_to_the_noise_multiplier_that_a_method_has_of_its_own():
    own = defense("dp_sgd", noise_multiplier=2.0)
    assert step_summary(own).events == ("a step is charged: a Gaussian on its batch, at the noise multiplier",)
