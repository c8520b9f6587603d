"""Errors of attacks that look at what they are given: out of their assumptions, undetermined, or contradictory."""


class NotApplicable(ValueError):
    """Architecture, loss or release are outside of what the attack can invert: its cell is n/a, with this sentence."""


class RankDeficient(NotApplicable):
    """The equations do not determine the unknowns.

    Attributes:
        layer: which layer, counted from 1 at the input; 0 where there is one layer only.
        deficit: how many dimensions of its input they leave open.
    """

    def __init__(self, message: str, *, layer: int = 0, deficit: int) -> None:
        super().__init__(message)
        self.layer, self.deficit = layer, deficit


class InconsistentObservation(ValueError):
    """No data of the kind that the attack assumes give this update: another batch size, mask, rate, or noise."""
