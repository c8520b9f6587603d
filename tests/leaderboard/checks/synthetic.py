"""Ten thousand records from a real run, for measurements of the time and memory of a check.

    python tests/leaderboard/checks/synthetic.py RESULTS OUT --records 10000 --suites 20
    /usr/bin/time -v leakbench leaderboard check OUT

Each copy of the run has settings, ids, arrays and seals of its own, and its own request, so that OUT has no fault. Its
suite is no built-in one, whose cells the command would resolve with PyTorch.
"""

import argparse
import dataclasses
import hashlib
import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pyarrow.parquet as pq

from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.folder import read_folder


def copied_id(identifier: str, number: int) -> str:
    """Id of a copy of a record."""
    return hashlib.sha256(f"{identifier} {number}".encode()).hexdigest()[:32]


def copied_arrays(content: bytes, number: int) -> bytes:
    """The same table in a file of another digest."""
    table = pq.read_table(BytesIO(content))
    file = BytesIO()
    pq.write_table(table.replace_schema_metadata({"copy": str(number)}), file)
    return file.getvalue()


def multiply(results: Path, out: Path, records: int, suites: int = 1) -> int:
    """Writes whole copies of a run, in turn to each suite, until there are so many records; returns their number."""
    folder = read_folder(results)
    assert folder.complete.manifests is not None
    (manifest,) = folder.complete.manifests
    out.mkdir(parents=True)
    written = number = 0
    while written < records:
        suite = "synthetic" if suites == 1 else f"synthetic_{number % suites}"
        for record in folder.records:
            identifier = copied_id(record.id, number)
            defense = replace(record.defense, settings=record.defense.settings | {"copy": number})
            fields = {"id": identifier, "suite": suite, "defense": defense}
            if record.arrays is not None:
                content = copied_arrays((folder.path / record.arrays).read_bytes(), number)
                (out / f"{identifier}.parquet").write_bytes(content)
                fields |= {"arrays": f"{identifier}.parquet", "arrays_digest": digest_of_bytes(content)}
            (out / f"{identifier}.json").write_text(replace(record, **fields).to_json(), encoding="utf-8")
            written += 1
        cells = tuple(
            replace(
                cell,
                id=copied_id(cell.id, number),
                defense=replace(cell.defense, settings=cell.defense.settings | {"copy": number}),
            )
            for cell in manifest.cells
        )
        request = replace(manifest, suite=suite, cells=cells)
        (out / request.name).write_text(json.dumps(dataclasses.asdict(request)), encoding="utf-8")
        number += 1
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--suites", type=int, default=1)
    arguments = parser.parse_args()
    print(multiply(arguments.results, arguments.out, arguments.records, arguments.suites), "records in", arguments.out)
