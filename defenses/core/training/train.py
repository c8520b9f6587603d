"""The training loop as a function: takes a model, data and a defense, returns the trained model, ledger and transcript.

`ongoing.py` has the loop, `step.py` a single step.
"""

from __future__ import annotations

from torch import nn

from ..plan.defense import Defense
from ..privacy.sampling import Sampling
from ..randomness.noise import Noise, from_os
from .labelled import LabelledData
from .ongoing import OngoingRun
from .run import Run
from .settings import Execution, Recipe, Recording, TrainingSettings


def train(
    model: nn.Module,
    examples: LabelledData,
    defense: Defense,
    *,
    sampling: Sampling,
    epochs: float | None = None,
    steps: int | None = None,
    lr: float = 0.1,
    public: LabelledData | None = None,
    noise: Noise | None = None,
    seed: int | None = None,
    sampler_key: int | None = None,
    recipe: Recipe | None = None,
    execution: Execution | None = None,
    recording: Recording | None = None,
) -> Run:
    """Trains a model in place under a defense.

    Args:
        model: refused if it mixes examples, or if a forward pass changes anything but its gradients. A model in
            evaluation mode is put in training mode; in a model in training mode, submodules in evaluation mode stay in
            it.
        examples: the private data: (inputs [n, ...], labels [n]), or a map-style dataset of such pairs, which is read
            into memory once.
        defense: with its noise multiplier set.
        sampling: the batch sampler.
        epochs: length of the run; give either this or `steps`.
        steps: length of the run in steps.
        lr: learning rate, of the update averaged over the expected batch.
        public: (inputs, labels) for methods that use public data; refused if an input is among `examples`.
        noise: secret source of noise; keyed by the operating system if None.
        seed: key of the public randomness (masks, views, dropout); drawn if None.
        sampler_key: secret key of the sampler; drawn from the operating system if None.
        recipe: optimizer, momentum, schedule, loss, augmentation, averaging, features, and the divisor of sums; its
            `nominal_size` makes the number of examples a secret.
        execution: engine, memory and device.
        recording: transcript, checkpoints, a measurement, progress; by default only the model is kept.

    Returns:
        The trained model with its ledger and transcript.

    Raises:
        ValueError: for an uncalibrated defense, a model that is refused, sizes that do not fit, public examples among
            the private examples, or a checkpoint of another run.
    """
    settings = TrainingSettings(
        defense=defense,
        sampling=sampling,
        steps=_length(sampling, epochs, steps),
        lr=lr,
        noise=noise or from_os(),
        seed=seed,
        sampler_key=sampler_key,
        recipe=recipe or Recipe(),
        execution=execution or Execution(),
        recording=recording or Recording(),
    )
    return OngoingRun(model, examples, public, settings).run()


def _length(sampling: Sampling, epochs: float | None, steps: int | None) -> int:
    """Returns the number of steps of the run."""
    if (epochs is None) == (steps is None):
        raise ValueError("give exactly one of epochs and steps, got both or neither")
    total = steps if steps is not None else round((epochs or 0) * sampling.steps_per_epoch)
    if total < 1:
        raise ValueError(f"a run must have at least one step, got {total}")
    return total
