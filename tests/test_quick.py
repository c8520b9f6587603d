"""The quick suite, uncut, by the command: the ids, statuses and epsilons that it has on every version of everything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# id of a cell: its status and its epsilon, None where nothing is proved.
GOLDEN = json.loads((Path(__file__).parent / "golden_quick.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_quick_has_its_ids_statuses_and_epsilons(tmp_path):
    command = [
        sys.executable,
        "-c",
        "from leakbench.audit.cli import main; main()",
        "run",
        "quick",
        "--out",
        str(tmp_path),
    ]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "records").glob("*.json")]
    found = {each["id"]: each for each in records}
    assert {name: each["status"] for name, each in found.items()} == {name: one for name, (one, _) in GOLDEN.items()}
    for name, (_, epsilon) in GOLDEN.items():
        claim = found[name]["claim"] or {}
        assert claim.get("epsilon") == (None if epsilon is None else pytest.approx(epsilon, rel=1e-9)), name
