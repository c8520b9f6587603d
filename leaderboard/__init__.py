"""Records of runs, and the board made from them alone."""

if __name__ == "leaderboard":
    # Two classes of one name would make `isinstance` fail where both are imported.
    raise ImportError("leaderboard must be imported as leakbench.leaderboard")

from .records.record import Record, RecordError, read, read_all, write

__all__ = ["Record", "RecordError", "read", "read_all", "write"]
