"""Requested sizes of the pools of a data set."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Requested number of examples in each pool; None: the data set's default.

    Args:
        private: members, at least 1.
        non_member: non-members; 0 only if an official test set can stand in for them.
        public: public examples.
    """

    private: int | None = None
    non_member: int | None = None
    public: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("private", 1), ("non_member", 0), ("public", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be a whole number from {least}, got {value}")


DEFAULT_SIZES = Sizes()
"""Default size of every pool."""
