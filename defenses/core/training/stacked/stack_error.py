"""What a stack refuses, whichever part of it finds out."""


class NotTogether(ValueError):
    """These models, or this defense, cannot be trained as one stack; one after another they can."""
