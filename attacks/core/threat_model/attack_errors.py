"""Errors of attacks: a target outside of their scope, undetermined unknowns, or contradictory data."""


class NotApplicable(ValueError):
    """Architecture, loss or release is outside of the attack's scope: the board shows n/a, with this message."""


class RankDeficient(NotApplicable):
    """The equations do not determine the unknowns.

    Attributes:
        layer: number of the layer, from 1 at the input; 0 if the attack inverts a single layer.
        deficit: number of dimensions of the unknowns that the equations leave undetermined.
    """

    def __init__(self, message: str, *, layer: int = 0, deficit: int) -> None:
        super().__init__(message)
        self.layer, self.deficit = layer, deficit


class InconsistentObservation(ValueError):
    """No data under the attack's assumptions give this update: its batch size, mask, learning rate or noise differs."""
