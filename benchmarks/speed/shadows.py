"""Training of many shadow models: stacked or in parallel processes, against a loop of the same trainer over the models.

Chains of linear layers are trained as one stack, with a leading model axis, and so are convolutional networks on CUDA.
On a CPU stacking slows convolutional networks down, which is timed too, and `leakbench` trains them in single-threaded
processes, as many as there are cores; the loop has all threads of a single process. The start of processes is not
counted, because a run starts them once.
"""

from __future__ import annotations

import importlib
import tomllib
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from leakbench.defenses.core import Defense, Execution, StackError, poisson, seeded, train, train_stacked

from .. import models as networks
from .part import ROUNDS, Options, SpeedPart
from .targets import SpeedTarget

LOOP, STACK, PROCESSES = "a loop over models", "one stack", "processes of one thread"
BATCH, POOL = 64, 700
MLP, CNN = "mlp 64-64-10", "cnn 28x28"
STEPS = {MLP: 24, CNN: 8}
GOALS = {(MLP, 16): 6.0, (MLP, 64): 10.0, (CNN, 8): 1.4}
"""Least speed-up by network and number of models."""
ON_CUDA = {(CNN, 64): 1.4}
"""Goals on CUDA alone, in the form of `GOALS`."""


@cache
def methods() -> dict[str, dict[str, Any]]:
    """Defenses of the quick suite that clip each contribution and can train as a stack: name -> settings."""
    rows = tomllib.loads((Path(__file__).parents[1] / "suites" / "quick.toml").read_text(encoding="utf-8"))["defense"]
    by_name = {}
    for entry in rows:
        settings = {key: value for key, value in entry.items() if key not in ("name", "lr")}
        if "clip_norm" not in settings:
            continue
        try:
            _as_stack([0], network=MLP, method=entry["name"], device="cpu", settings=settings, steps=2)
        except StackError:
            continue
        by_name[entry["name"]] = settings
    return by_name


def _defense(name: str, settings: dict[str, Any]) -> Defense:
    defense = getattr(importlib.import_module(f"leakbench.defenses.{name}"), name)(**settings)
    return defense if defense.noise_multiplier is not None else defense.with_noise(1.0)


def _network(name: str, seed: int) -> nn.Module:
    if name == MLP:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return networks.build("dp_cnn_small", input_shape=(1, 28, 28), classes=10, seed=seed)


def _pool(name: str, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 8, 8) if name == MLP else (1, 28, 28)
    inputs = torch.rand(2 * POOL, *shape, generator=generator)
    return inputs.to(device), torch.randint(0, 10, (2 * POOL,), generator=generator).to(device)


def _alone(numbers: Sequence[int], *, network: str, method: str, settings: dict[str, Any], device: str) -> list[Tensor]:
    """Trains models one after another; returns their parameters."""
    inputs, labels = _pool(network, device)
    parameters = []
    for number in numbers:
        model, chosen = _network(network, number).to(device), _chosen(number).to(device)
        train(
            model,
            (inputs[chosen], labels[chosen]),
            _defense(method, settings),
            sampling=poisson(BATCH / POOL),
            steps=STEPS[network],
            lr=0.1,
            noise=seeded(number),
            seed=number,
            sampler_key=number,
            execution=Execution(device=device),
        )
        parameters.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return parameters


def _chosen(number: int) -> Tensor:
    return torch.randperm(2 * POOL, generator=torch.Generator().manual_seed(number))[:POOL]


def _as_stack(
    numbers: Sequence[int],
    *,
    network: str,
    method: str,
    settings: dict[str, Any],
    device: str,
    steps: int | None = None,
) -> list[Tensor]:
    stack = [_network(network, number).to(device) for number in numbers]
    train_stacked(
        stack,
        _pool(network, device),
        torch.stack([_chosen(number) for number in numbers]),
        _defense(method, settings),
        sampling=poisson(BATCH / POOL),
        steps=steps or STEPS[network],
        lr=0.1,
        noise=torch.Generator().manual_seed(0),
        seeds=list(numbers),
        sampler_keys=list(numbers),
        even_if_slower=True,
    )
    return [nn.utils.parameters_to_vector(model.parameters()).detach() for model in stack]


def build(*, network: str, models: int, method: str, way: str, device: str = "cpu") -> Callable[[], list[Tensor]]:
    """Builds a way of training the models.

    Args:
        network: `MLP` or `CNN`.
        models: number of models.
        method: in `methods()`.
        way: `LOOP`, `STACK` or `PROCESSES`.
        device: "cpu" or "cuda".
    """
    numbers = list(range(models))
    about = {"network": network, "method": method, "settings": methods()[method], "device": device}
    if way == LOOP:
        return partial(_alone, numbers, **about)
    if way == STACK:
        return partial(_as_stack, numbers, **about)
    count = max(1, torch.get_num_threads())
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))

    def run() -> list[Tensor]:
        parts = pool.map(partial(_alone, **about), [numbers[start::count] for start in range(count)])
        return [parameters for part in parts for parameters in part]

    weakref.finalize(run, pool.shutdown)
    return run


def ways(network: str, device: str) -> tuple[str, ...]:
    """Ways of training models of a network besides the loop: that of `leakbench` first, then others that are timed.

    Args:
        network: `MLP` or `CNN`.
        device: "cpu" or "cuda".
    """
    return (STACK,) if network == MLP or device == "cuda" else (PROCESSES, STACK)


def measure(**options: Unpack[Options]) -> dict[str, Any]:
    """Compares the ways at every network, number of models and method; the smaller numbers if quick.

    Args:
        options: see `Options`; memory is not measured, because these ways do not differ in it.
    """
    part = SpeedPart(__name__, {**options, "memory": False}, rounds=9, budget=120.0)
    for (network, models), goal in (GOALS | (ON_CUDA if part.device == "cuda" else {})).items():
        if part.quick and models > 16:
            continue
        for method in methods():
            name, (ours, *others) = f"{network}, {models} models, {method}", ways(network, part.device)
            part.say(name)
            about = {"network": network, "models": models, "method": method}
            part.compare(name, (LOOP, ours, *others), about, peer=LOOP)
            part.targets.append(SpeedTarget(case=name, way=ours, against=LOOP, quantity="speed-up", limit=goal))
    return part.document(
        title="Training shadow models",
        method=(
            f"Batches of {BATCH} of {POOL} examples by Poisson sampling, noise multiplier 1; {STEPS[MLP]} steps of the "
            f"chain of linear layers, {STEPS[CNN]} of the network of convolutions. {ROUNDS}"
        ),
    )
