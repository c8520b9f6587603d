"""Files looked through as a process without PyTorch does it, which is also how long and how much memory it took."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PROGRAM = """
import importlib.util, json, pathlib, sys, time
root, folder = map(pathlib.Path, sys.argv[1:])
spec = importlib.util.spec_from_file_location("checks", root / "__init__.py", submodule_search_locations=[str(root)])
checks = sys.modules["checks"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)
found = {}
for path in sorted(folder.iterdir()):
    before, sentence = time.process_time(), None
    try:
        with path.open("rb") as file:
            checks.check(file)
    except checks.FileRefused as error:
        sentence = str(error)
    found[path.name] = (sentence, time.process_time() - before)
# The peak that getrusage has is that of the process that started this one, where it was higher.
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
resident = int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
print(json.dumps({"files": found, "resident": resident, "modules": sorted(sys.modules)}))
"""


@pytest.fixture
def looked_through():
    """Of a folder: the sentence and the seconds of computation of each file, peak KiB resident, modules imported."""

    def of(folder):
        if not Path("/proc/self/status").exists():
            pytest.skip("the peak memory of a process is read from /proc, which this system has not")
        checks = ROOT / "audit" / "external" / "files" / "checks"
        command = [sys.executable, "-I", "-c", PROGRAM, str(checks), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return of
