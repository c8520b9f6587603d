"""`leakbench rank`: a table, a document, a picture, and mistakes in one sentence."""

import json

import pytest

from leakbench.audit.cli import app as cli

from ...parameters import subtests

FCN = ("fcn3", "--input-shape", "1,4,4")


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs the command in an empty folder: code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["rank", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_the_table_has_both_verdicts(command):
    code, out, err = command(*FCN)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "fcn3, sparsity 0" and lines[1].split()[:2] == ["layer", "unknowns"]
    # Layer, unknowns, outputs and their rank, gradients and their rank, rank of both.
    assert lines[2].split()[:7] == ["1", "16", "1000", "16", "16000", "16", "16"]
    assert lines[4].split()[:7] == ["3", "100", "1", "1", "100", "100", "100"]
    assert lines[5].startswith("the recursion reaches the input; a search is not excluded")


@pytest.mark.long
def test_masks_are_rows_of_the_document_and_points_of_the_picture(command, tmp_path):
    code, out, err = command(*FCN, "--sparsity", "0.5,0", "--sparsity", "0.9", "--json", "--plot", "here/ranks.png")
    assert code == 0 and err == "written: here/ranks.png\n"
    document = json.loads(out)
    assert [one["sparsity"] for one in document["masks"]] == [0.0, 0.5, 0.9]
    lost = [mask["layers"][-1]["deficit"] for mask in document["masks"]]
    # One logit: whatever the mask drops of the last layer's 100 entries is open. Five standard deviations.
    assert lost[0] == 0 and 25 <= lost[1] <= 75 and 75 <= lost[2] <= 100
    assert [layer["rank_outputs"] for layer in document["masks"][1]["layers"]] == [16, 100, 1]
    assert (tmp_path / "here/ranks.png").read_bytes().startswith(b"\x89PNG")


@subtests(
    ("arguments", "sentence"),
    [
        (["cnn7"], "no model named 'cnn7'"),
        (["fcn3", "--sparsity", "1"], "--sparsity must be in [0, 1), got '1'"),
        (["fcn3", "--sparsity", "half"], "--sparsity must be in [0, 1), got 'half'"),
        (["fcn3", "--input-shape", "1x4x4"], "--input-shape must be positive numbers with commas between"),
        (["fcn3", "--plot", "ranks.pdf"], "--plot must end in .png or .svg, got ranks.pdf"),
        (["fcn3", "--batches", "2,x"], "--batches must be positive numbers with commas between"),
        (["dp_cnn_small"], "every layer must be one that can be inverted, and"),
    ],
)
def test_a_mistake_is_one_sentence(command, arguments, sentence):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and sentence in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.long
def test_the_share_that_spear_recovers_stands_beside_the_ranks(command, tmp_path):
    asked = (*FCN, "--sparsity", "0,0.95", "--batches", "2,4", "--trials", "1")
    code, out, _ = command(*asked, "--json", "--plot", "line.png")
    told = json.loads(out)["phase_line"]
    assert code == 0 and told["batches"] == [2, 4]
    assert (told["width"], told["inputs"], told["trials"]) == (200, 100, 1)
    dense, sparse = told["shares"]
    assert dense == {"sparsity": 0.0, "recovered": [1.0, 1.0]} and sparse["recovered"] == [0.0, 0.0]
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = command(*FCN, "--batches", "2", "--trials", "1")
    assert code == 0 and out.splitlines()[-1].split() == ["0", "1.00"]
