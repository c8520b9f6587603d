"""Records of runs, and the leaderboard computed from records alone."""

if __name__ == "leaderboard":
    # Two classes of the same name would make `isinstance` fail if both were imported.
    raise ImportError("leaderboard must be imported as leakbench.leaderboard")

from typing import TYPE_CHECKING

from leakbench.lazy_names import lazy_names

if TYPE_CHECKING:
    from .exports.tidy import to_pandas
    from .records.record import Record, RecordError, read, read_all, write

__all__ = ["Record", "RecordError", "read", "read_all", "to_pandas", "write"]

__getattr__, __dir__ = lazy_names(__name__)
