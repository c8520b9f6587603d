"""Records of runs, and the board made from them alone."""

from .records.record import Record, RecordError, read, read_all, write

__all__ = ["Record", "RecordError", "read", "read_all", "write"]
