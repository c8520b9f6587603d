"""Placement of a run's units: on the CPU or on a GPU, by the static cost of a step of their training.

A GPU takes as long for a step of a small network as its kernels take to be launched: on an H100 a private step of `mlp`
at batch 1024 takes 3.2 ms, where ResNet-18 at batch 256, with 5,500 times the operations, takes 167 ms. The suite
`quick` took 106 s there, and 39 s on the cores of the same machine. Small networks are therefore trained on the CPU,
several at once, beside the others. Nothing is timed, so a suite is placed alike on every machine with a GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import torch

from leakbench.benchmarks import models
from leakbench.benchmarks.core import Sizes

from ..plan.artifact import Artifact
from ..plan.build import planned
from ..plan.cells import Job
from ..plan.request import Request, TrainingRequest
from ..plan.splits_cache import load_data

MOST_ON_CPU = 2e8
"""Floating-point operations of a step that is still computed on the CPU: what a core computes, at 60 Gflop/s, in the
3.2 ms that a step takes on an H100 however small it is."""

_CPU = torch.device("cpu")
_PASSES = 3  # forward, and backward to activations and to parameters, at the cost of a forward pass each


def accelerator() -> torch.device:
    """Returns the GPU of this machine, or the CPU if PyTorch finds none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_of(unit: Job | Artifact, device: torch.device | None) -> torch.device:
    """Returns the device that a unit is computed on.

    Args:
        unit: of a run.
        device: of all units; None to decide by the cost of a step of the unit's training.
    """
    if device is not None:
        return device
    gpu = accelerator()
    if gpu.type == "cpu":
        return gpu
    if isinstance(unit, Job):
        step = max(flops_of_step(cell.request) for cell in unit.cells)
    else:
        step = 0.0 if unit.training is None else unit.models * flops_of_step(unit.training)
    return _CPU if step <= MOST_ON_CPU else gpu


def flops_of_step(request: TrainingRequest) -> float:
    """Returns the floating-point operations of a step: products and convolutions, of all examples of a batch.

    Args:
        request: of a training; of a cell on a shared update, whose batch is counted in each restart of a search.
    """
    if isinstance(request, Request) and request.update is not None:
        update, attack = request.update, request.attack
        data = _PublicFacts.of(update.data, request.seed, update.sizes)
        restarts = 1 if attack is None else attack.settings.get("restarts", 1)
        name, settings, examples = update.model, update.model_settings, float(update.batch * restarts)
    else:
        task = request.training
        data = _PublicFacts.of(task.data, request.seed, task.sizes)
        name, settings = task.model.name, task.model.settings
        examples = planned(request, data.private)[0].expected_batch(data.private) * (task.views or 1)
    return _PASSES * examples * _flops(name, json.dumps(settings), data)


@dataclass(frozen=True)
class _PublicFacts:
    """Public facts of a data set: number of private examples, shape and dtype of an input, number of classes."""

    private: int
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    classes: int

    @classmethod
    @cache  # a user's own data are read from their file each time
    def of(cls, name: str, seed: int, sizes: Sizes) -> _PublicFacts:
        splits = load_data(name, seed, sizes)
        return cls(len(splits.private), splits.input_shape, splits.private.inputs.dtype, splits.classes)


@cache
def _flops(name: str, settings: str, data: _PublicFacts) -> float:
    """Returns the operations of a model's forward pass over one example."""
    from torch.utils.flop_counter import FlopCounterMode  # takes half a second

    shape = data.input_shape
    model = models.build(name, input_shape=shape, classes=data.classes, seed=0, **json.loads(settings)).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *shape, dtype=data.dtype))
    return float(counter.get_total_flops())
