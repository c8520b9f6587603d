"""Errors of attacks: a target outside of their assumptions, unknowns left undetermined, or contradictory data."""


class NotApplicable(ValueError):
    """Architecture, loss or release are outside of the attack's scope: the cell is n/a, with this sentence."""


class RankDeficient(NotApplicable):
    """The equations do not determine the unknowns.

    Attributes:
        layer: the layer, counted from 1 at the input; 0 if there is only a single layer.
        deficit: number of dimensions of its input that they leave open.
    """

    def __init__(self, message: str, *, layer: int = 0, deficit: int) -> None:
        super().__init__(message)
        self.layer, self.deficit = layer, deficit


class InconsistentObservation(ValueError):
    """No data of the kind that the attack assumes give this update: another batch size, mask, rate, or noise."""
