"""Every Eval Ever: the structure here, and its own validator in an environment of Python 3.12 (make test-peers)."""

import json
import math
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from leakbench.leaderboard.exports.every_eval_ever import every_eval_ever
from leakbench.leaderboard.exports.formats import write

from .conftest import PUBLICATION, board, lines, numbers

VERSION = "0.3.0"


def test_scores_are_the_numbers_of_the_board_and_details_say_what_they_mean():
    read = {}
    for path, content in every_eval_ever(board(), PUBLICATION).items():
        document = json.loads(content)
        about = document["model_info"]["additional_details"]
        row = about["row_id"]
        assert path.startswith("data/leakbench_quick") and ("_client/" in path) == (about["unit"] == "client")
        assert document["schema_version"] == VERSION and document["model_info"]["id"].startswith("somebody/")
        line = lines()[row, "auc"]
        assert float(about["epsilon"]) == line["epsilon"]
        assert (about.get("epsilon_reason"), document["model_info"]["name"]) == (
            line["epsilon_reason"],
            line["defense"],
        )
        missing = json.loads(document["source_metadata"]["additional_details"]["not_measured"])
        for result in document["evaluation_results"]:
            metric = result["metric_config"]["metric_id"].removeprefix("leakbench.")
            line, score = lines()[row, metric], result["score_details"]
            read[row, metric] = score["score"]
            ends = score["uncertainty"].get("confidence_interval", {})
            assert (ends.get("lower"), ends.get("upper")) == (line["low"], line["high"])
            assert score["uncertainty"]["num_samples"] == line["n"] and metric not in missing
            assert result["metric_config"]["lower_is_better"] == (line["better"] == "lower")
        assert missing == {m: x["reason"] for (of, m), x in lines().items() if of == row and x["value"] is None}
    assert read == numbers() | numbers("client")
    assert math.inf in {line["epsilon"] for line in lines().values()}


def python_with_validator(folder: Path) -> Path:
    """An interpreter of at least Python 3.12 with the package, made in `folder` if this one has none."""
    if find_spec("every_eval_ever"):
        return Path(sys.executable)
    names = [f"python3.{minor}" for minor in (12, 13, 14)] if sys.version_info < (3, 12) else [sys.executable]
    for base in filter(None, map(shutil.which, names)):
        if subprocess.run([base, "-m", "venv", str(folder)], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("every-eval-ever needs Python 3.12, and there is none")
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", f"every-eval-ever=={VERSION}"]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"every-eval-ever {VERSION} could not be installed: {installed.stderr.strip()[-200:]}")
    return python


@pytest.mark.peers
def test_its_validator_accepts_every_file_without_a_warning(tmp_path):
    python = python_with_validator(tmp_path / "environment")
    paths = write(every_eval_ever(board(), PUBLICATION), tmp_path / "store")
    validate = [str(python), "-m", "every_eval_ever.validator.validate", "--format", "json", *map(str, paths)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        validate, cwd=tmp_path / "store", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    broken = json.loads(paths[0].read_text())
    broken["evaluation_results"][0]["score_details"]["score"] = "n/a"
    paths[0].write_text(json.dumps(broken))
    assert (
        subprocess.run(validate, cwd=tmp_path / "store", env=environment, capture_output=True, check=False).returncode
        == 1
    )
