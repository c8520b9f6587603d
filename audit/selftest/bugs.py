"""Planted bugs: trainers with the claim of leakbench's own loop, each with a single mistake that was made in practice.

Each is the real loop, engine, sampler or noise with a single change. Nothing in the catalogue imports this module, and
no defense can use it. A buggy trainer's claim is derived from the plans it was meant to execute.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from leakbench.defenses.core import (
    Bound,
    Defense,
    Engine,
    Execution,
    NoisyPlan,
    Recipe,
    Recording,
    Release,
    Run,
    Sampling,
    from_os,
    keyed,
    seed_from,
    seeded,
)
from leakbench.defenses.core.gradients.executor import add_noise
from leakbench.defenses.core.inputs import Inputs, called
from leakbench.defenses.core.plan.bound import finite_rows
from leakbench.defenses.core.randomness.noise import CipherNoise
from leakbench.defenses.core.training.ongoing import OngoingRun
from leakbench.defenses.core.training.settings import TrainingSettings

from .protocol import Trainer, TrainerTask
from .trainers import VIEWS, plain, under_defense


@dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """A trainer with a mistake.

    Attributes:
        name: of the mistake.
        words: description of the mistake.
        trainer: the trainer with the mistake.
    """

    name: str
    words: str
    trainer: Trainer


def fit_by(kind: type[OngoingRun]) -> Callable[..., Run]:
    """Returns a function like `train` whose run is of another class.

    Args:
        kind: the class.
    """

    def fit(
        model: nn.Module,
        examples: tuple[Tensor, Tensor],
        defense: Defense,
        *,
        sampling: Sampling,
        steps: int,
        lr: float,
        public: tuple[Tensor, Tensor],
        noise: Any,
        seed: int,
        recipe: Recipe,
        recording: Recording,
    ) -> Run:
        settings = TrainingSettings(
            defense=defense,
            sampling=sampling,
            steps=steps,
            lr=lr,
            noise=noise,
            seed=seed,
            sampler_key=None,
            recipe=recipe,
            execution=Execution(),
            recording=recording,
        )
        return kind(model, examples, public, settings).run()

    return fit


def with_engine(kind: type[Engine]) -> Callable[..., Run]:
    """Returns a function like `train` whose engine is of another class.

    Args:
        kind: the class.
    """

    class WithEngine(OngoingRun):
        """A run with that engine."""

        def __init__(self, model: nn.Module, examples: Any, public: Any, settings: TrainingSettings) -> None:
            super().__init__(model, examples, public, settings)
            self.runner = kind(
                model,
                loss=settings.recipe.loss,
                noise=settings.noise,
                augmentation=settings.recipe.augmentation,
                # The constant that sums are divided by, which the recipe may set regardless of the sample rate.
                expected_batch=self.expected_batch,
            )

    return fit_by(WithEngine)


class SumsOwnRows(Engine):
    """Sums per-example gradients by a replaceable method, with correct noise."""

    def summed(self, rows: Float[Tensor, "rows dim"], bound: Bound, seed: int | None) -> Float[Tensor, " dim"]:
        """Returns the sum to which noise is added; correct here."""
        return bound(rows).sum(dim=0)

    def run(self, plan: NoisyPlan, inputs: Inputs, targets: Tensor, *, seed: int | None = None, **own: Any) -> Release:
        """Executes a plan with a single block of all coordinates."""
        if not len(inputs):
            return super().run(plan, inputs, targets, seed=seed, **own)
        rows = self.gradients(inputs, targets, seed=seed)(None)
        total = self.summed(rows, plan.blocks[0].bound, seed)
        return self.noisy(plan, total, rows.dtype, seed)

    def noisy(self, plan: NoisyPlan, total: Tensor, dtype: torch.dtype, seed: int | None) -> Release:
        """Returns the release of a sum; correct here."""
        return add_noise(plan, [total.double().clone()], self.noise, dtype)


class HalfNoise(CipherNoise):
    """Noise of half the requested standard deviation."""

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds noise of half the standard deviation."""
        return super().add(sums, std / 2)


class NoiseOverBatch(CipherNoise):
    """Noise divided by the batch size, and again together with the sum."""

    expected_batch = 1.0

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds noise divided by the expected batch."""
        return super().add(sums, std / self.expected_batch)


class SameNoise(CipherNoise):
    """Reuses the first draw in every step: the noise stream restarts."""

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds the first draw."""
        self._draws = 0
        return super().add(sums, std)


class Float32Noise(CipherNoise):
    """Noise in float32, added in float32, as in most programs."""

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds noise on the float32 grid of its own magnitude."""
        draws = torch.randn(len(sums), generator=keyed(secrets.randbits(256)))
        return (sums.float() + draws * std).double()


class NoClipping(SumsOwnRows):
    """Omits clipping."""

    def summed(self, rows: Float[Tensor, "rows dim"], bound: Bound, seed: int | None) -> Float[Tensor, " dim"]:
        """Returns the sum of raw gradients."""
        return finite_rows(rows).sum(dim=0)


class MeanClipping(SumsOwnRows):
    """Clips the mean of the batch, as in training without privacy."""

    def summed(self, rows: Float[Tensor, "rows dim"], bound: Bound, seed: int | None) -> Float[Tensor, " dim"]:
        """Returns the clipped mean, times the batch."""
        mean = finite_rows(rows).sum(dim=0, keepdim=True) / self._expected_batch
        return bound(mean)[0] * self._expected_batch


class LayerwiseFullNorm(SumsOwnRows):
    """Clips every layer to the full clip norm."""

    def summed(self, rows: Float[Tensor, "rows dim"], bound: Bound, seed: int | None) -> Float[Tensor, " dim"]:
        """Returns the sum with each layer bounded by itself."""
        return torch.cat([bound(rows[:, start:stop]).sum(dim=0) for start, stop in self.layout.slices])


class InnerProductNorms(SumsOwnRows):
    """Takes norms from inner products between positions, whatever rounding leaves of them.

    Goodfellow, "Efficient Per-Example Gradient Computations", 2015, over several positions: Li et al., "Large Language
    Models Can Be Strong Differentially Private Learners", ICLR 2022. Terms that cancel need the gradient itself.
    """

    def run(self, plan: NoisyPlan, inputs: Inputs, targets: Tensor, *, seed: int | None = None, **own: Any) -> Release:
        """Executes a plan with a single block of all coordinates."""
        self._norms = self._by_inner_products(inputs, targets) if len(inputs) else torch.zeros(0)
        return super().run(plan, inputs, targets, seed=seed, **own)

    def summed(self, rows: Float[Tensor, "rows dim"], bound: Bound, seed: int | None) -> Float[Tensor, " dim"]:
        """Returns the sum of gradients, each scaled by its supposed norm."""
        return bound.scale(self._norms.double(), rows.dtype) @ finite_rows(rows)

    def _by_inner_products(self, inputs: Inputs, targets: Tensor) -> Float[Tensor, " rows"]:
        """Returns norms of the gradients of linear layers without biases, in float32."""
        calls: list[tuple[Tensor, Tensor]] = []
        layers = [layer for layer in self.model.modules() if isinstance(layer, nn.Linear)]

        def keep(_: nn.Module, entering: tuple[Tensor, ...], leaving: Tensor) -> None:
            calls.append((entering[0], leaving))

        hooks = [layer.register_forward_hook(keep) for layer in layers]
        try:
            losses = self.loss(called(self.model, inputs), targets)
        finally:
            for hook in hooks:
                hook.remove()
        signals = torch.autograd.grad(losses.sum(), [leaving for _, leaving in calls])
        squares = torch.zeros(len(inputs))
        for (entering, _), signal in zip(calls, signals, strict=True):
            a, s = (tensor.detach().reshape(len(inputs), -1, tensor.shape[-1]) for tensor in (entering, signal))
            squares += ((a @ a.mT) * (s @ s.mT)).sum(dim=(1, 2))
        return squares.clamp(min=0).sqrt()


class PrivateMask(SumsOwnRows):
    """Keeps the half of the coordinates on which the sum of clipped gradients is largest."""

    def noisy(self, plan: NoisyPlan, total: Tensor, dtype: torch.dtype, seed: int | None) -> Release:
        """Adds noise to all coordinates, then applies a mask computed from the data."""
        kept = torch.zeros_like(total).index_fill_(0, total.abs().topk(len(total) // 2).indices, 1.0)
        masked = super().noisy(plan, total, dtype, seed).total * kept
        return Release((masked,), masked)


class MaskChanges(SumsOwnRows):
    """Draws a mask for each half of a batch, and adds noise only where the mask of the last half keeps a coordinate."""

    def summed(self, rows: Float[Tensor, "rows dim"], bound: Bound, seed: int | None) -> Float[Tensor, " dim"]:
        """Returns the sum of both halves, each masked before it is clipped."""
        halves = rows.tensor_split(2)
        return torch.stack([bound(half * self._mask(i, seed)).sum(dim=0) for i, half in enumerate(halves)]).sum(dim=0)

    def noisy(self, plan: NoisyPlan, total: Tensor, dtype: torch.dtype, seed: int | None) -> Release:
        """Adds noise where the last mask is 1."""
        released = torch.where(self._mask(1, seed) > 0, super().noisy(plan, total, dtype, seed).total, total)
        return Release((released,), released)

    def _mask(self, half: int, seed: int | None) -> Tensor:
        draws = torch.rand(self.layout.dim, generator=keyed(seed_from("mask", seed, half)))
        return (draws < 0.5).float()


class DividesByBatch(Engine):
    """Divides by the number of records that were drawn."""

    def run(self, plan: NoisyPlan, inputs: Inputs, targets: Tensor, *, seed: int | None = None, **own: Any) -> Release:
        """Rescales the release, so that the loop's division by the expected batch gives the batch mean."""
        out = super().run(plan, inputs, targets, seed=seed, **own)
        factor = self._expected_batch / max(1, len(inputs))
        return Release(tuple(block * factor for block in out.noisy), out.total * factor)


class ViewsByPosition(Engine):
    """Keys the views of a record by its position in the batch."""

    def _entry_keys(
        self, choice: Any, inputs: Inputs, targets: Tensor, views: int, seed: int | None
    ) -> Int64[Tensor, " entries"] | None:
        keys = super()._entry_keys(choice, inputs, targets, views, seed)
        if keys is None:
            return None
        return torch.arange(len(keys)) * 1_000_003 + seed_from("place", seed)


class ReleasesTwice(OngoingRun):
    """Releases two noisy sums of the same batch, and charges a single release."""

    def _on_batch(self, plan: NoisyPlan, batch: Tensor) -> Release:
        """Shows the first release as well as the second."""
        first = super()._on_batch(plan, batch)
        meter = self.settings.recording.meter
        if meter is not None:
            meter.add(self.stepper.context.step, first.total / self.expected_batch)
        return super()._on_batch(plan, batch)


class DealtBatches(Sampling):
    """Consecutive batches in order, charged as Poisson samples."""

    def indices(self, step: int, examples: int, key: int) -> Int[Tensor, " batch"]:
        """Returns the next batch in the order of the data."""
        size = max(1, round(self.rate * examples))
        return (torch.arange(size) + step * size) % examples


class FixedStatistics(nn.Module):
    """A batch norm with fixed statistics."""

    def __init__(self, norm: Any) -> None:
        """Takes over a layer's parameters and statistics, under the same names."""
        super().__init__()
        self.eps: float = norm.eps
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = (
            nn.Buffer(norm.running_mean.clone()),
            nn.Buffer(norm.running_var.clone()),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns standardised inputs, scaled and shifted."""
        return nn.functional.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


class PrivateStatistics(OngoingRun):
    """Takes the statistics of batch norms from a pass over the private data, and keeps them fixed in training."""

    def __init__(self, model: nn.Module, examples: Any, public: Any, settings: TrainingSettings) -> None:
        with torch.no_grad():
            model.train()(examples[0])
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.modules.batchnorm._BatchNorm):
                    setattr(parent, name, FixedStatistics(child))
        super().__init__(model, examples, public, settings)


def _os_key(kind: type[CipherNoise]) -> Callable[[TrainerTask], CipherNoise]:
    return lambda task: kind(secrets.token_bytes(32), "os")


def _over_batch(task: TrainerTask) -> CipherNoise:
    noise = NoiseOverBatch(secrets.token_bytes(32), "os")
    noise.expected_batch = task.expected_batch
    return noise


def _bug(name: str, words: str, **faults: Any) -> PlantedBug:
    return PlantedBug(name=name, words=words, trainer=under_defense(plain, **faults))


BUGS = (
    _bug("half_noise", "noise of half the scale", noise=_os_key(HalfNoise)),
    _bug("noise_divided_twice", "noise divided by the batch size twice", noise=_over_batch),
    _bug("no_clipping", "no clipping", fit=with_engine(NoClipping)),
    _bug("mean_clipped", "clipping of the batch mean", fit=with_engine(MeanClipping)),
    _bug("layers_at_full_norm", "per-layer clipping at the full clip norm", fit=with_engine(LayerwiseFullNorm)),
    _bug(
        "inner_product_norms",
        "norms by inner products between positions, in float32",
        fit=with_engine(InnerProductNorms),
    ),
    _bug("private_mask", "mask chosen from the private gradients", fit=with_engine(PrivateMask)),
    _bug("two_releases", "two releases of one batch charged as one", fit=fit_by(ReleasesTwice)),
    _bug("noise_reused", "noise reused across steps", noise=_os_key(SameNoise)),
    _bug(
        "dealt_batches",
        "fixed batches charged as Poisson",
        sampling=lambda rate: DealtBatches("poisson", rate),
    ),
    _bug("divided_by_batch", "normaliser from the sampled batch", fit=with_engine(DividesByBatch)),
    # The default recipe, whose claim says that the number of examples is public; tested against a claim without that.
    _bug("divided_by_records", "normaliser from the number of records", recipe=lambda task: Recipe()),
    _bug("batch_norm", "BatchNorm statistics of the private data", fit=fit_by(PrivateStatistics)),
    _bug("mask_changes", "un-noised coordinates when the mask changes within a batch", fit=with_engine(MaskChanges)),
    _bug(
        "seed_published",
        "noise seed published",
        noise=lambda task: seeded(task.published["noise_seed"]),
        publish=lambda task: {"noise_seed": secrets.randbits(63)},
    ),
    _bug("float_lattice", "noise added in float32", noise=_os_key(Float32Noise)),
    _bug(
        "views_by_position",
        "augmentation keyed by position",
        augmentation=VIEWS,
        fit=with_engine(ViewsByPosition),
        noise=lambda task: from_os(),
    ),
)
"""All planted bugs."""
