"""Every Eval Ever: the structure here, and its own validator in an environment of Python 3.12 (make test-peers)."""

import json
import math
import subprocess

import pytest

from leakbench.leaderboard.exports.every_eval_ever import every_eval_ever
from leakbench.leaderboard.exports.formats import write

from .conftest import PUBLICATION, board, lines, numbers, python_with

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


@pytest.mark.peers
def test_its_validator_accepts_every_file_without_a_warning(tmp_path):
    python = python_with("every_eval_ever", f"every-eval-ever=={VERSION}", tmp_path / "environment", (3, 12))
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
