"""A folder of a real run, and ways to tamper with a copy of it as a stranger could."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leakbench.leaderboard.checks.check import check_folder
from leakbench.leaderboard.checks.fault import Fault
from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.manifest import Manifest
from leakbench.leaderboard.records.record import SEAL, Record
from leakbench.leaderboard.records.validation import build

from ...audit.run.runs import run

SUITE = """
name = "tiny"
seeds = [0, 1]
budget = { epsilon = 3.0, delta = 1e-5 }
defense = [{ name = "sgd", lr = 1.0 }, { name = "dp_sgd", clip_norm = 1.0 }]
attack = [{ name = "likelihood_ratio" }]
controls = true

[task]
data = "digits"
model = { name = "mlp", hidden = 16 }
private = 200
batch = 50
epochs = 2
lr = 2.0
candidates = 100
"""


@pytest.fixture(scope="session")
def clean(tmp_path_factory) -> Path:
    """Output of a run, which tests read and do not write."""
    folder = tmp_path_factory.mktemp("clean")
    run(SUITE, folder, command=("leakbench", "run", "tiny"))
    return folder


class Tampered:
    """Copy of a run's output, edited as by somebody who computes seals and digests anew."""

    def __init__(self, source: Path, out: Path) -> None:
        shutil.copytree(source / "records", out / "records")
        self.out, self.folder = out, out / "records"

    @property
    def faults(self) -> list[Fault]:
        return check_folder(self.out)

    @property
    def manifest(self) -> Path:
        (path,) = self.folder.glob("*.manifest")
        return path

    def named(self, **fields: Any) -> list[Path]:
        """Records with these fields; methods by their names."""
        return [path for path in sorted(self.folder.glob("*.json")) if _has(json.loads(path.read_text()), fields)]

    def first(self, **fields: Any) -> Path:
        return self.named(**fields)[0]

    def edit(self, path: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool = True) -> Path:
        """Changes a record's document, and by default its seal and file name as well."""
        data = json.loads(path.read_text())
        change(data)
        if sealed:
            data.pop(SEAL)
            content = json.dumps(data, sort_keys=True)
            data[SEAL] = digest_of_bytes(content.encode())
        path.write_text(json.dumps(data))
        return path

    def arrays(self, path: Path, content: bytes) -> Path:
        """Replaces a record's arrays, with a digest that fits."""
        arrays = path.with_suffix(".parquet")
        arrays.write_bytes(content)
        self.edit(path, lambda data: data.update(arrays_digest=digest_of_bytes(content)))
        return arrays

    def ask(self, change: Callable[[dict[str, Any]], object]) -> Path:
        """Changes the request, and its name with it."""
        data = json.loads(self.manifest.read_text())
        change(data)
        manifest = build(Manifest, data)
        self.manifest.unlink()
        path = self.folder / manifest.name
        path.write_text(json.dumps(data))
        return path

    def forget(self, path: Path) -> None:
        """Removes a record, its arrays and the request for it."""
        identifier = path.stem
        path.unlink()
        path.with_suffix(".parquet").unlink(missing_ok=True)
        self.ask(lambda data: data.update(cells=[cell for cell in data["cells"] if cell["id"] != identifier]))

    def copy(self, path: Path, identifier: str, change: Callable[[dict[str, Any]], object] = lambda data: None) -> Path:
        """Adds a record with its arrays and request under another id."""
        twin = path.with_name(f"{identifier}.json")
        twin.write_bytes(path.read_bytes())
        shutil.copy(path.with_suffix(".parquet"), twin.with_suffix(".parquet"))
        self.edit(twin, lambda data: (data.update(id=identifier, arrays=f"{identifier}.parquet"), change(data)))

        def requested(data: dict[str, Any]) -> None:
            cell = next(cell for cell in data["cells"] if cell["id"] == path.stem)
            data["cells"].append(cell | {"id": identifier})

        self.ask(requested)
        return twin


def _has(data: dict[str, Any], fields: dict[str, Any]) -> bool:
    plain = {key: data[key]["name"] if key in ("defense", "attack") and data[key] else data[key] for key in data}
    return all(plain[key] == value for key, value in fields.items())


@pytest.fixture
def tampered(clean, tmp_path) -> Tampered:
    return Tampered(clean, tmp_path / "run")


@pytest.fixture
def records(clean) -> list[Record]:
    return [Record.from_json(path.read_text()) for path in sorted((clean / "records").glob("*.json"))]
