"""Table of the formats of a board, and the files of an export, written whole."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ..board.identity import board_version
from ..board.table import Board
from ..records.files import refuse_links, write_bytes
from .croissant import croissant
from .eval_results import eval_results
from .every_eval_ever import every_eval_ever
from .latex import latex
from .model_index import model_index
from .parquet import parquet
from .private_ml import private_ml
from .publication import Publication
from .safe_text import portable

Files = dict[str, bytes]
"""Path below the export's folder -> content."""


def _csv(board: Board, publication: Publication) -> Files:
    return {"board.csv": portable(board.to_csv()).encode()}


def _markdown(board: Board, publication: Publication) -> Files:
    return {"board.md": portable(f"{board.to_markdown()}\n{board_version()}\n").encode()}


FORMATS: dict[str, Callable[[Board, Publication], Files]] = {
    "markdown": _markdown,
    "csv": _csv,
    "latex": latex,
    "parquet": parquet,
    "eval_results": eval_results,
    "model_index": model_index,
    "every_eval_ever": every_eval_ever,
    "private_ml": private_ml,
    "croissant": croissant,
}
"""Name of a format -> function that returns its files."""


def printable(files: Files, name: str) -> str:
    """Returns the text of an export that is a single file of text.

    Args:
        files: of the export.
        name: of the format, for the message.

    Raises:
        ValueError: there is no file, there are several, or it is no text.
    """
    _refuse_empty(files)
    content = next(iter(files.values()))
    if len(files) > 1 or content.startswith(b"PAR1"):
        raise ValueError(f"format {name} is several files or no text: add --out FOLDER")
    return content.decode()


def write(files: Mapping[str, bytes], out: Path) -> list[Path]:
    """Writes the files of an export.

    Args:
        files: path below the folder -> content.
        out: folder; or, for a single file, a path with that file's suffix that is no folder.

    Returns:
        The paths written.

    Raises:
        ValueError: there is no file, or there are several and `out` is a file.
        WriteError: a file could not be written.
    """
    _refuse_empty(files)
    if len(files) == 1 and out.suffix == Path(next(iter(files))).suffix and not out.is_dir():
        return [write_bytes(out, content) for content in files.values()]
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder for {', '.join(list(files)[:3])}, got the file {out}")
    refuse_links(out, *(out / folder for name in files for folder in list(Path(name).parents)[:-1]))
    return [write_bytes(out / name, content) for name, content in files.items()]


def _refuse_empty(files: Mapping[str, bytes]) -> None:
    if not files:
        raise ValueError("records must have a number to export, got none; --format text says why")
