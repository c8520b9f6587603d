"""Croissant 1.1 with the fields of responsible AI (RAI 1.0): the board as a data set of Parquet files."""

import json
from typing import Any

from ..board.identity import board_version
from ..board.notes import alarms
from ..board.table import Board
from ..records.files import digest_of_bytes
from .parquet import parquet
from .publication import Publication
from .safe_text import portable, slug
from .tidy import COLUMNS

_TYPES = {str: "sc:Text", float: "sc:Float", int: "sc:Integer", bool: "sc:Boolean"}

_RAI = {
    "rai:dataCollection": "Each number is computed by leakbench from records of trainings and of attacks on them.",
    "rai:dataCollectionType": ["Experiments"],
    "rai:dataCollectionMissingData": "A number that was not measured is null, and the column reason says why.",
    "rai:dataUseCases": ["Comparison of private training methods by accuracy, claimed epsilon and measured leakage"],
    "rai:dataLimitations": [
        "An attack that finds nothing proves no privacy: worst cases are those of the attacks that were run.",
        "Rows are comparable within a suite, data set, model and privacy unit.",
    ],
    "rai:dataBiases": ["Data sets and models are small, so that many trainings and attacks can be repeated."],
    "rai:personalSensitiveInformation": ["None: the board holds statistics of attacks, no examples and no scores."],
}


def croissant(board: Board, publication: Publication) -> dict[str, bytes]:
    """Returns `croissant.json` and the Parquet file of each privacy unit.

    License, creator and citation are left out if the publication does not name them.

    Args:
        board: of any records.
        publication: names the data set and its license.
    """
    files = parquet(board, publication)
    suites = ", ".join(dict.fromkeys(row.suite for row in board.rows))
    lost = portable(alarms(board.controls, board.violations, board.gaps))
    date, version = publication.at.date().isoformat(), board_version()
    document: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": ["http://mlcommons.org/croissant/1.1", "http://mlcommons.org/croissant/RAI/1.0"],
        "name": slug((publication.dataset or "leakbench-board").replace("/", "-")),
        "description": " ".join([f"Board of {version}: {portable(suites)}.", *lost]),
        "datePublished": date,
        "version": "1.0.0",
        **_RAI,
        "distribution": [_file(name, content) for name, content in files.items()],
        "recordSet": [_records(name) for name in files],
    }
    if publication.license:
        document["license"] = publication.license
    if publication.organization:
        document["creator"] = {"@type": "sc:Organization", "name": publication.organization}
        document["citeAs"] = (
            f"@misc{{{document['name']}, author = {{{publication.organization}}}, title = {{Board of {version}}}, "
            f"year = {{{date[:4]}}}, note = {{{publication.dataset}}}}}"
        )
    return {"croissant.json": json.dumps(document, indent=1, allow_nan=False).encode() + b"\n", **files}


def _file(name: str, content: bytes) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "encodingFormat": "application/x-parquet",
        "sha256": digest_of_bytes(content),
    }


def _records(name: str) -> dict[str, Any]:
    unit = name.partition(".")[0]
    return {
        "@type": "cr:RecordSet",
        "@id": unit,
        "name": unit,
        "description": f"Rows whose privacy unit is a {unit}: a line per row of the board and metric.",
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{unit}/{column}",
                "name": column,
                "description": meaning,
                "dataType": _TYPES[kind],
                "source": {"fileObject": {"@id": name}, "extract": {"column": column}},
            }
            for column, (kind, meaning) in COLUMNS.items()
        ],
    }


_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "recordSet": "cr:recordSet",
    "sc": "https://schema.org/",
    "source": "cr:source",
}
