"""`leakbench theory`: verdicts, one document, files, exit codes, and mistakes in one sentence."""

import json
from pathlib import Path

import pytest
import torch

from leakbench.audit.cli import app as cli
from leakbench.audit.theory import claims, symmetry
from leakbench.audit.theory.claim import Comparison, Measured, Panel, Setup, TheoryClaim, claim

from ...parameters import subtests


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs the command in an empty folder: code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["theory", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_a_claim_is_printed_with_both_numbers_and_its_verdict(command):
    code, out, err = command("--claim", "bytes_printed_by_pcdp", "--claim", "bytes_under_cooling")
    assert (code, err) == (0, "")
    assert "3.7 bytes_under_cooling: holds\n" in out and "3.7 bytes_printed_by_pcdp: does not hold\n" in out
    assert "NO  KiB of a PCDP message: 1.9141 = 0.48" in out and "because: both figures are numbers of entries" in out
    assert out.endswith("2 claims: holds 1, holds with a caveat 0, does not hold 1; all as known\n")


@pytest.mark.long
def test_the_document_and_the_files_say_the_same(command, monkeypatch, tmp_path):
    monkeypatch.setattr(symmetry, "FLIPS", 9)
    arguments = ("--claim", "gradient_symmetry", "--data", "digits", "--seed", "3", "--out", "here", "--json")
    code, out, err = command(*arguments)
    assert code == 0 and err.count("written: ") == 3
    document = json.loads(out)
    assert document["seed"] == 3 and document["as_expected"] is True
    assert [one["name"] for one in document["claims"]] == ["gradient_symmetry"]
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["symmetry.png", "theory.json", "theory.md"]
    assert json.loads((tmp_path / "here/theory.json").read_text(encoding="utf-8")) == document
    assert "| 3.8 | `gradient_symmetry`" in (tmp_path / "here/theory.md").read_text(encoding="utf-8")
    picture = (tmp_path / "here/symmetry.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert command(*arguments)[1] == out and (tmp_path / "here/symmetry.png").read_bytes() == picture


def test_without_a_scatter_there_is_no_picture(command, tmp_path):
    assert command("--claim", "bytes_under_cooling", "--out", "here")[0] == 0
    assert not (tmp_path / "here/symmetry.png").exists()


def failing(should_hold: bool) -> TheoryClaim:
    @claim("3.1", "One is two.", should_hold=should_hold)
    def one_is_two(setup: Setup) -> Measured:
        found = Comparison(what="one", measured=1.0, closed=2.0 if should_hold else 1.0)
        return Measured(comparisons=(found,), panels=(Panel("x", torch.zeros(2, 2)),))

    return one_is_two


@pytest.mark.parametrize(("should_hold", "said"), [(True, "which it should"), (False, "which is not as known")])
def test_a_verdict_that_is_not_the_known_one_is_a_failure(command, monkeypatch, should_hold, said):
    monkeypatch.setitem(claims.CLAIMS, "one_is_two", failing(should_hold))
    code, out, _ = command("--claim", "one_is_two")
    assert code == 1 and said in out and out.endswith("not as known: one_is_two\n")


@subtests(
    ("arguments", "code", "sentence"),
    [
        (["--claim", "theorem"], 2, "no claim named 'theorem'; there are sparsification_sensitivity, "),
        (["--data", "mnits"], 2, "no data set named 'mnits'; did you mean 'mnist'?"),
        (["--seed", "-1"], 2, "--seed"),
        (["--device", "tpu"], 2, "device must be auto, cpu or cuda, got 'tpu'"),
        (["--out", "taken"], 2, "--out must be a folder, got the file taken"),
        (["--draws", "4"], 2, "--draws"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_computed(command, monkeypatch, arguments, code, sentence):
    Path("taken").write_text("x", encoding="utf-8")
    monkeypatch.setattr(claims, "examined", lambda *_: pytest.fail("computed"))
    got, out, err = command(*arguments)
    assert (got, out) == (code, "") and sentence in err
    assert err.startswith("error: ") and err.count("\n") == 1
