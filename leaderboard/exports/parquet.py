"""Parquet: the tidy table with the meaning of its columns, and the board's alarms, as metadata."""

import json

from ..board.notes import alarms
from ..board.table import Board
from .publication import Publication
from .safe_text import portable
from .tidy import arrow, tables


def parquet(board: Board, publication: Publication) -> dict[str, bytes]:
    """Returns a file for each privacy unit, `record.parquet` and `client.parquet`.

    Args:
        board: of any records.
        publication: its license is in the metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    banner = portable(alarms(board.controls, board.violations, board.gaps))
    remarks = {"leakbench.alarms": json.dumps(banner), "license": publication.license or ""}
    files = {}
    for unit, lines in tables(board).items():
        sink = pa.BufferOutputStream()
        pq.write_table(arrow(lines, remarks), sink)
        files[f"{unit}.parquet"] = sink.getvalue().to_pybytes()
    return files
