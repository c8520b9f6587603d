"""The error of stacked training, raised by all its modules."""


class StackError(ValueError):
    """These models, or this defense, cannot be trained as a stack; they can be trained separately."""
