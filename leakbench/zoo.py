"""Trained checkpoints by name: `leakbench.zoo.load("digits_mlp/dp_sgd/eps3/seed0").model`."""

from leakbench.audit.zoo.checkpoint import Checkpoint, load
from leakbench.audit.zoo.index import ZooError, names

__all__ = ["Checkpoint", "ZooError", "load", "names"]
