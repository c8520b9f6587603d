"""Records of runs, and the leaderboard computed from records alone."""

if __name__ == "leaderboard":
    # Two classes of the same name would make `isinstance` fail if both were imported.
    raise ImportError("leaderboard must be imported as leakbench.leaderboard")

from .records.record import Record, RecordError, read, read_all, write

__all__ = ["Record", "RecordError", "read", "read_all", "write"]
