"""Methods by the path of a file: wherever a name is taken, and with the file named whatever goes wrong in it."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from leakbench.audit.catalog import explain, plugins
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.catalog.messages import CatalogError
from leakbench.audit.cli import main
from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.request import RequestedMethod
from leakbench.audit.run import harness
from leakbench.audit.run.provenance import third_party
from leakbench.audit.suite.suite import SuiteError
from leakbench.defenses.core import Adapted

from ...parameters import subtests
from ..conftest import SUITE

ROOT = Path(__file__).parents[3]

HALF = '''
"""DP-SGD on one half of the coordinates."""

from dataclasses import dataclass

from leakbench.defenses.core import Block, Context, Coordinates, Defense, Stateless, StepPlan, clip
import torch
from beside import share


@dataclass(frozen=True)
class Half(Stateless):
    """Keeps one half."""

    clip_norm: float

    def plan(self, context: Context) -> StepPlan:
        order = torch.randperm(context.dim, generator=context.coins(0))
        kept = Coordinates(order[: share(context.dim)], dim=context.dim)
        return StepPlan(Block(codec=kept, bound=clip(self.clip_norm)))


def half_dp(*, clip_norm: float = 1.0, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD on one half of the coordinates.

    Args:
        clip_norm: C, L2, in gradient units.
    """
    return Defense(Half(clip_norm), noise_multiplier=noise_multiplier)
'''

BESIDE = "def share(dim):\n    return dim // 2\n"

COIN = '''
"""Guesses."""

import torch

from leakbench.attacks.core import Access, MembershipScores, ModelAccess, attack, granted


@attack(access=Access.BLACK_BOX)
def coin(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
    """Scores without looking."""
    asked = granted(target.candidates)
    return MembershipScores(ids=asked.ids, scores=torch.rand(len(asked), generator=coins).double(), exact=False)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder of one's own, outside of any checkout, from which the command is run."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "half_dp.py").write_text(HALF)
    (folder / "beside.py").write_text(BESIDE)
    (folder / "coin.py").write_text(COIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    yield folder
    sys.modules.pop("beside", None)


MINE = SUITE.replace('{ name = "dp_sgd" }', '{ name = "mine/half_dp.py:half_dp" }').replace(
    '{ name = "likelihood_ratio" }', '{ name = "mine/coin.py:coin" }'
)


@pytest.mark.long
def test_a_path_is_taken_wherever_a_name_is(suite_of, mine, tmp_path):
    assert MINE.count("mine/") == 2
    out = tmp_path / "out"
    records = harness.run(suite_of(MINE), out, device=torch.device("cpu"), jobs=1)
    assert all(record.status == "ok" for record in records), [record.reason for record in records]
    own = [record for record in records if record.defense.name == "mine/half_dp.py:half_dp"]
    assert {record.attack.name if record.attack else None for record in own} == {
        None, "mine/coin.py:coin", "loss_threshold",
    }  # fmt: skip
    assert all(record.claim is not None and 2 < (record.claim.epsilon or 0) <= 3 for record in own)
    (utility,) = [record for record in own if record.kind == "utility"]
    assert set(utility.provenance.third_party) == {"defense mine/half_dp.py:half_dp"}
    again = harness.run(suite_of(MINE), out, device=torch.device("cpu"), jobs=1)
    assert [record.seconds for record in again] == [record.seconds for record in records]  # nothing was computed again
    (mine / "beside.py").write_text(BESIDE + "# edited\n")
    with pytest.raises(ValueError, match=r"the code of defense mine/half_dp\.py:half_dp has changed"):
        harness.run(suite_of(MINE), out, device=torch.device("cpu"), jobs=1)


def test_a_path_is_explained_and_accounted_for(mine, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["epsilon", "--defense", "mine/half_dp.py:half_dp", "--noise-multiplier", "1", "--sample-rate", "0.1",
              "--steps", "10", "--delta", "1e-5"])  # fmt: skip
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "epsilon 2.855" in out
    assert "unverified: " in out and "Half" in out  # the claim takes the word of code of others
    found = explain.explain("mine/half_dp.py:half_dp")
    assert (found.kind, found.summary) == ("defense", "DP-SGD on one half of the coordinates.")
    assert [setting.name for setting in found.settings] == ["clip_norm", "noise_multiplier"]
    assert explain.explain("mine/coin.py:coin").requires == {"access": "BLACK_BOX", "knows": [], "controls": []}


BOUND_OF_ITS_OWN = '''
from leakbench.defenses.core import Bound, Defense, Whole

class Box(Bound):
    """Cuts every coordinate off by itself."""

def boxed(*, noise_multiplier=None):
    """DP-SGD with a bound of its own, behind a method of the library."""
    return Defense(Whole(bound=Box(kind="clip", norm=1.0)), noise_multiplier)
'''


def test_a_bound_of_ones_own_is_named_though_the_method_is_ours(mine, capsys):
    (mine / "boxed.py").write_text(BOUND_OF_ITS_OWN)
    with pytest.raises(SystemExit):
        main(["epsilon", "--defense", "mine/boxed.py:boxed", "--noise-multiplier", "1", "--sample-rate", "0.1",
              "--steps", "10", "--delta", "1e-5"])  # fmt: skip
    assert "unverified: bound Box (of boxed.py)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["explain", "mine/boxed.py:boxed"])
    assert "unverified: bound Box (of boxed.py)" in capsys.readouterr().out


WRONG = {
    "nowhere.py:half_dp": "no file 'mine/nowhere.py' for defense",
    "half_dp.py:halfdp": "no function 'halfdp' in mine/half_dp.py; it has Half, half_dp",
    "half_dp.py": "must be written FILE.py:FUNCTION",
    "broken.py:f": "mine/broken.py raised ZeroDivisionError: ",
    "unparsable.py:f": "mine/unparsable.py raised SyntaxError",
    "number.py:f": "must hold a function named 'f', got int",
    "absent.py:f": "needs nothing_of_that_name, which is not installed",
    "plain.py:f": "mine/plain.py:f must return a leakbench.defenses.core.Defense, got dict",
    "raising.py:f": "mine/raising.py:f raised KeyError: 'x'",
}

FILES = {
    "broken.py": "\nx = 1 / 0\n",
    "unparsable.py": "def f(:\n",
    "number.py": "f = 3\n",
    "absent.py": "import nothing_of_that_name\n",
    "plain.py": "def f():\n    return {}\n",
    "raising.py": "def f():\n    raise KeyError('x')\n",
}


@subtests("path", WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence_that_names_it_before_any_compute(suite_of, mine, path):
    for name, content in FILES.items():
        (mine / name).write_text(content)
    with pytest.raises(SuiteError) as caught:
        suite_of(SUITE.replace('{ name = "dp_sgd" }', f'{{ name = "mine/{path}" }}'))
    assert WRONG[path] in str(caught.value) and "\n" not in str(caught.value)


def test_an_attack_that_is_not_decorated_is_refused(suite_of, mine):
    (mine / "plain.py").write_text("def f(target, coins):\n    return None\n")
    with pytest.raises(
        CatalogError, match=r"got \(target\): decorate it with leakbench\.attacks\.core\.attack, if it is one"
    ):
        explain.explain("mine/plain.py:f")
    with pytest.raises(
        SuiteError, match=r"attack 'mine/plain\.py:f' must be decorated with leakbench\.attacks\.core\.attack"
    ):
        suite_of(SUITE.replace('{ name = "likelihood_ratio" }', '{ name = "mine/plain.py:f" }'))


def test_what_goes_wrong_while_it_runs_names_the_file_and_the_line(suite_of, mine, tmp_path):
    (mine / "half_dp.py").write_text(
        HALF.replace("order = torch", "if context.step: raise AssertionError('lost')\n        order = torch")
    )
    (mine / "coin.py").write_text(COIN.replace("return MembershipScores", "return str(1) or MembershipScores"))
    records = harness.run(suite_of(MINE), tmp_path / "out", device=torch.device("cpu"), jobs=1)
    failed = {(r.defense.name, r.attack and r.attack.name): r.reason or "" for r in records if r.status == "failed"}
    for (defense, _), reason in failed.items():
        if defense.startswith("mine/"):
            assert (
                reason.startswith("AssertionError: lost") and "mine/half_dp.py, line" in reason and "in plan" in reason
            )
    assert "mine/coin.py:coin" in failed["sgd", "mine/coin.py:coin"]
    assert "must return MembershipScores, got str" in failed["sgd", "mine/coin.py:coin"]


def test_a_file_is_run_once_for_each_content(mine):
    (mine / "counted.py").write_text("import beside\nbeside.runs = getattr(beside, 'runs', 0) + 1\nf = beside.share\n")
    first = plugins.load("defense", "mine/counted.py:f")
    assert plugins.load("defense", "mine/counted.py:f") is first and sys.modules["beside"].runs == 1
    (mine / "counted.py").write_text((mine / "counted.py").read_text() + "# edited\n")
    plugins.load("defense", "mine/counted.py:f")
    assert sys.modules["beside"].runs == 2
    assert [path.name for path in plugins.source_files("mine/counted.py:f")] == ["beside.py", "counted.py"]


def test_names_of_the_catalogue_are_no_paths():
    assert not plugins.is_path("dp_sgd") and plugins.is_path("dp_sgd.py") and plugins.is_path("a/b.py:c")
    with pytest.raises(CatalogError, match=r"a path is written FILE\.py:FUNCTION"):
        catalog.find("defenses", "mine/half_dp")


def test_what_lies_beside_a_file_is_the_code_that_runs_and_that_records_name(mine, tmp_path):
    text = "from leakbench.defenses.core import Defense, Whole, clip\n{}\ndef f(*, noise_multiplier=None):\n"
    text += "    return Defense(Whole(bound=clip(NORM)), noise_multiplier)\n"
    (mine / "zz.py").write_text(text.format("from apkg import NORM"))
    (mine / "apkg").mkdir()
    (mine / "apkg" / "__init__.py").write_text("from .inner import NORM\n")
    (mine / "apkg" / "inner.py").write_text("NORM = 1.0\n")
    asked = RequestedMethod(kind="defenses", name="mine/zz.py:f")
    before = third_party(asked)
    assert catalog.defense(asked.name).method.bound.norm == 1  # type: ignore[union-attr]
    (mine / "apkg" / "inner.py").write_text("NORM = 25.0\n")
    assert third_party(asked) != before
    assert catalog.defense(asked.name).method.bound.norm == 25  # type: ignore[union-attr]
    other = tmp_path / "other"
    (other / "apkg").mkdir(parents=True)
    (other / "apkg" / "__init__.py").write_text("NORM = 3.0\n")
    (other / "m.py").write_text(text.format("from apkg import NORM"))
    with pytest.raises(CatalogError, match="its name is that of another module"):
        catalog.defense(f"{other}/m.py:f")
    (mine / "wave.py").write_text("NORM = 3.0\n")  # which the standard library has, too
    (mine / "m.py").write_text(text.format("from wave import NORM"))
    with pytest.raises(CatalogError, match="its name is that of another module"):
        catalog.defense("mine/m.py:f")
    (mine / "hidden.py").write_text("NORM = 3.0\n")
    (mine / "m.py").write_text(text.format("NORM = __import__('hidden').NORM"))
    with pytest.raises(CatalogError, match="in a way that does not show in its text"):
        catalog.defense("mine/m.py:f")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apkg", "hidden")]:
        del sys.modules[name]


def test_a_file_leaves_the_path_as_it_was_and_cannot_end_the_run(mine):
    before = list(sys.path)
    (mine / "m.py").write_text("import sys\nsys.path.insert(0, '/nowhere')\nsys.exit(0)\n")
    with pytest.raises(CatalogError, match=r"m\.py raised SystemExit: 0 \(line 3, in <module>\)"):
        catalog.find("defenses", "mine/m.py:f")
    assert sys.path == before


def test_a_setting_at_another_type_is_another_request_and_one_that_no_record_holds_is_refused(mine):
    (mine / "m.py").write_text("def f(*, mode=1, size: float = 1, noise_multiplier=None): ...\n")
    ids = {
        str(RequestedMethod(kind="defenses", name="mine/m.py:f", settings={"mode": mode, "size": size}).canonical())
        for mode in (1, True, 1.0)
        for size in (1, 1.0)
    }
    assert len(ids) == 3
    (mine / "m.py").write_text("def f(*, mode=float('nan'), noise_multiplier=None): ...\n")
    with pytest.raises(CatalogError, match="mode must be a value that a record can hold"):
        catalog.resolve("defenses", "mine/m.py:f", {})


PLAIN = HALF.replace("from beside import share\n", "").replace("share(context.dim)", "context.dim // 2")

OWN_NOISE = {
    "fixed": PLAIN.replace("noise_multiplier=noise_multiplier)", "noise_multiplier=0.5)"),
    "swapped": PLAIN.replace("noise_multiplier=noise_multiplier)", "noise_multiplier=clip_norm)"),
    "not_taken": PLAIN.replace(", noise_multiplier: float | None = None", "").replace(
        "noise_multiplier=noise_multiplier)", "noise_multiplier=2.0)"
    ),
}


@subtests("source", OWN_NOISE)
def test_noise_that_a_file_decides_by_itself_is_refused(suite_of, mine, source):
    """It would pass over the budget of a suite, and what the user asked `leakbench epsilon` about."""
    assert OWN_NOISE[source] != PLAIN
    (mine / "own.py").write_text(OWN_NOISE[source])
    with pytest.raises(SuiteError, match=r"mine/own\.py:half_dp must hand on the noise multiplier"):
        suite_of(SUITE.replace('{ name = "dp_sgd" }', '{ name = "mine/own.py:half_dp" }'))
    with pytest.raises(
        CatalogError, match=r"must hand on the noise multiplier that it is given, 1\.5, and its defense"
    ):
        catalog.defense("mine/own.py:half_dp", noise_multiplier=1.5)


def test_a_noise_multiplier_that_is_taken_and_dropped_is_refused(mine):
    (mine / "own.py").write_text(PLAIN.replace(", noise_multiplier=noise_multiplier)", ")"))
    assert catalog.defense("mine/own.py:half_dp").noise_multiplier is None
    with pytest.raises(CatalogError, match=r"given, 1\.5, and its defense has None"):
        catalog.defense("mine/own.py:half_dp", noise_multiplier=1.5)


def test_one_file_in_two_spellings_is_one_defense(suite_of, mine):
    both = '{ name = "mine/half_dp.py:half_dp" }, { name = "./mine/../mine/half_dp.py:half_dp" }'
    with pytest.raises(SuiteError, match=r"defense\[2\]: repeats defense\[1\]"):
        suite_of(SUITE.replace('{ name = "dp_sgd" }', both))


@pytest.mark.long
def test_an_edit_into_a_bug_is_other_code_and_no_traceback(suite_of, mine, tmp_path):
    (mine / "half_dp.py").write_text(PLAIN)
    run = partial(harness.run, suite_of(MINE), tmp_path / "out", device=torch.device("cpu"), jobs=1)
    run()
    (mine / "half_dp.py").write_text(PLAIN.replace("clip(self.clip_norm)", "clip(self.clip_norm / 0)"))
    with pytest.raises(ValueError, match=r"the code of defense mine/half_dp\.py:half_dp has changed"):
        run()
    own = [record for record in run(recompute=True) if record.defense.name.startswith("mine/")]
    assert own and all("ZeroDivisionError" in (record.reason or "") for record in own)


def test_settings_that_a_suite_could_not_name_are_refused(mine):
    (mine / "own.py").write_text(PLAIN.replace("def half_dp(*, ", "def half_dp("))
    with pytest.raises(
        CatalogError, match=r"must take keyword-only settings, got \(clip_norm: float = 1\.0\): write \*,"
    ):
        catalog.settings("defenses", "mine/own.py:half_dp")


def test_what_a_plan_raises_names_the_file_also_where_epsilon_is_asked_for(mine, capsys):
    (mine / "own.py").write_text(
        PLAIN.replace("kept = Coordinates", "raise KeyError('lost')\n        kept = Coordinates")
    )
    options = ["--noise-multiplier", "1", "--sample-rate", "0.1", "--steps", "10", "--delta", "1e-5"]
    with pytest.raises(SystemExit) as ended:
        main(["epsilon", "--defense", "mine/own.py:half_dp", *options])
    assert ended.value.code == 2
    assert "error: mine/own.py:half_dp raised KeyError: 'lost' (line 1" in capsys.readouterr().err


def test_what_a_file_prints_is_no_part_of_a_commands_result(mine, capsys):
    (mine / "own.py").write_text(PLAIN + "\nprint('hello')\n")
    with pytest.raises(SystemExit) as ended:
        main(["explain", "mine/own.py:half_dp", "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and json.loads(out)["kind"] == "defense" and "hello" in err


def test_an_attack_whose_answer_no_suite_asks_its_access_for_is_told_what_may_be_wrong(suite_of, mine):
    (mine / "coin.py").write_text(COIN.replace("MembershipScores", "Reconstruction"))
    skipped = plan(suite_of(SUITE.replace('{ name = "likelihood_ratio" }', '{ name = "mine/coin.py:coin" }'))).skipped
    assert skipped and all(
        cell.skip.endswith("for reconstruction, but for membership: is what it returns annotated right?")
        for cell in skipped
    )


def test_a_bound_of_others_that_is_called_adaptive_is_theirs(mine):
    text = HALF.replace("*, ", '*, bound: str = "clip", ', 1)
    assert text != HALF
    (mine / "bounded.py").write_text(text)
    made = catalog.defense("mine/bounded.py:half_dp", {"bound": "adaptive"}, noise_multiplier=1.0)
    assert not isinstance(made.method, Adapted)
