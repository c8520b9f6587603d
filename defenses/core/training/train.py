"""The central training loop: plan, sample, release, divide, post, optimize, observe; ledger and transcript.

The division is by the expected batch, a public constant. Momentum, Adam and schedules work on releases, so
they are free. Nothing here looks at a loss value: length, rate and schedule are fixed before a run starts.

Guarantee:
    `Run.claim` is derived from the plans that were executed, and says what it assumes. Relation and sampler as in
    `sampling.py`; released: every noisy block of every step, and of the model its trained parameters alone (what
    forward passes change besides is refused). A step interrupted halfway is done again from the last checkpoint: with
    `seeded` or `os` noise the same release, with `secure` noise a fresh one that replaces one nobody saw. Whether it
    would be the same release is known from a digest of all that it depends on (`fingerprint.py`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ..gradients.executor import Engine
from ..gradients.fingerprint import architecture, digest, source_digest
from ..gradients.model_checks import Untrained
from ..gradients.reference import Loss, cross_entropy
from ..plan.defense import Context, Defense, State, StepPlan
from ..plan.public import PublicGradients, refuse_shared
from ..privacy.keys import seed_from
from ..privacy.ledger import Claim, Ledger
from ..privacy.noise import Noise, NoiseSource, from_os
from ..privacy.verified import assumptions, unverified
from . import checkpoint as disk
from .augment import Augmentation
from .sampling import Sampling
from .transcript import Observer, Step, Transcript

Examples = tuple[Tensor, Tensor] | Dataset[Any]
Schedule = Callable[[int, int], float]
"""(step, steps) -> factor of the learning rate."""
_SCHEDULES: dict[str, Schedule] = {
    "constant": lambda step, steps: 1.0,
    "cosine": lambda step, steps: 0.5 * (1 + math.cos(math.pi * step / steps)),
    "linear": lambda step, steps: 1 - step / steps,
}


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        model: the trained model, in evaluation mode.
        ledger: what was released.
        transcript: what the chosen observer saw.
        state: the method's last state.
        seed: key of the public randomness.
        sampler_key: key of the sampler: secret, it tells who took part in which step.
        engine: how the sums were computed.
        noise: which kind of noise was drawn; `none` when the multiplier is 0.
        public_used: whether public examples were read.
        remarks: of the plans executed, each once, and marks of what took part and is none of ours.
        unverified: the same in sentences.
        key_given: whether the sampler's key was given, and not drawn from the operating system.
    """

    model: nn.Module
    ledger: Ledger
    transcript: Transcript
    state: State
    seed: int
    sampler_key: int
    engine: str
    noise: NoiseSource | Literal["none"]
    public_used: bool = False
    remarks: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    key_given: bool = False

    def claim(self, delta: float) -> Claim:
        """The guarantee of the run at `delta`, with what it assumes."""
        sampling = self.ledger.sampling
        assumes = assumptions(self.noise, sampling, key_given=self.key_given, public_used=self.public_used)
        return replace(self.ledger.claim(delta), assumes=assumes, unverified=self.unverified)


def train(
    model: nn.Module,
    examples: Examples,
    defense: Defense,
    *,
    sampling: Sampling,
    epochs: float | None = None,
    steps: int | None = None,
    lr: float = 0.1,
    momentum: float = 0.0,
    optimizer: Literal["sgd", "adam"] | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "sgd",
    schedule: Literal["constant", "cosine", "linear"] | Schedule = "constant",
    loss: Loss = cross_entropy,
    public: Examples | None = None,
    noise: Noise | None = None,
    seed: int | None = None,
    sampler_key: int | None = None,
    expected_batch: float | None = None,
    microbatch: int | None = None,
    memory_budget: int | None = None,
    engine: str = "auto",
    augmentation: Augmentation | None = None,
    device: torch.device | str = "cpu",
    observer: Observer = "final",
    observe_always: Collection[int] = (),
    observe_only: Collection[int] | None = None,
    observe_memory: int | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Trains a model in place under a defense.

    Args:
        model: refused when it mixes examples, or changes anything but its gradients in a forward pass. One in
            evaluation mode is put in training mode; of one in training mode, parts in evaluation mode stay in it.
        examples: the private data: (inputs [n, ...], labels [n]), or a map-style dataset of such pairs, which is
            read into memory once.
        defense: with its noise multiplier set.
        sampling: who takes part in a step.
        epochs: length of the run; give this or `steps`.
        steps: length of the run in steps.
        lr: learning rate, of the update averaged over the expected batch.
        momentum: PyTorch's: v <- momentum v + update. Of "sgd" only.
        optimizer: a name, or a function of the parameters; it sees releases only.
        schedule: factor of the learning rate by step.
        loss: per-example loss.
        public: (inputs, labels) for methods that use public data; refused where an input is one of `examples`.
        noise: secret source; keyed by the operating system where None.
        seed: key of the public randomness (masks, views, dropout); drawn where None.
        sampler_key: secret key of the sampler; drawn from the operating system where None.
        expected_batch: the public constant that sums are divided by; sample rate times number of examples where
            None, which takes that number for public.
        microbatch: most examples that are worked on at a time; None for what fits the memory budget.
        memory_budget: bytes that activations, their derivatives and rows may take, roughly; 2 GiB where None.
        engine: how clipped sums are computed: "auto", "layerwise", "torch.func", "one_by_one", "opacus" or "backpack".
        augmentation: views of each example, whose gradients are averaged and then bounded once.
        device: where to compute.
        observer: how much the transcript keeps of a step.
        observe_always: numbers of the steps that the transcript keeps whatever their size.
        observe_only: numbers of the other steps that it keeps; None for all of them.
        observe_memory: bytes that these may take; no further ones are kept where they would outgrow it. None for any
            number.
        checkpoint: file to resume from if it exists, and to write to. What the run computes must then be of a kind that
            can be looked into: functions of plain values, no open files.
        checkpoint_every: steps between writes; an epoch where None.
        progress: called with (steps done, steps) after each step.

    Returns:
        The trained model with its ledger and transcript.

    Raises:
        ValueError: for an uncalibrated defense, a model that must not be trained, sizes that do not fit, public
            examples among the private ones, or a checkpoint of another run.
    """
    sigma = defense.calibrated_multiplier
    if (epochs is None) == (steps is None):
        raise ValueError("give exactly one of epochs and steps, got both or neither")
    total = steps if steps is not None else round((epochs or 0) * sampling.steps_per_epoch)
    if total < 1:
        raise ValueError(f"a run must have at least one step, got {total}")
    inputs, labels = _checked(examples, "examples", device)
    public_data = None if public is None else _checked(public, "public", device)
    if public_data is not None:
        refuse_shared(inputs, public_data[0])
    expected_batch = sampling.expected_batch(len(inputs)) if expected_batch is None else expected_batch
    if not (math.isfinite(expected_batch) and expected_batch > 0):
        raise ValueError(f"expected_batch must be a positive finite number, got {expected_batch}")
    model.to(device)
    if not model.training:  # otherwise a part in evaluation mode was put there by somebody who wants it so
        model.train()
    source = noise or from_os()
    runner = Engine(
        model,
        loss=loss,
        noise=source,
        microbatch=microbatch,
        memory_budget=memory_budget,
        engine=engine,
        augmentation=augmentation,
        expected_batch=sampling.expected_batch(len(inputs)),
    )
    layout, trained = runner.layout, [p for p in model.parameters() if p.requires_grad]
    updater = _optimizer(optimizer, trained, lr, momentum)
    factor = _schedule(schedule)
    base_rates = [group["lr"] for group in updater.param_groups]
    ledger = Ledger(sampling)
    only = None if observe_only is None else frozenset(observe_only)
    transcript = Transcript(observer, layout, frozenset(observe_always), only, observe_memory)
    remarks: dict[str, str] = unverified(
        noise=source, augmentation=augmentation, sampling=sampling, defense=defense, optimizer=updater
    )
    mark = ""
    if checkpoint is not None:
        # Everything that decides what a step releases: a resumed run draws the same noise again, and the same
        # noise on another sum would give the difference of the two away.
        settings = (total, lr, momentum, optimizer, schedule, loss, observer, source.kind, expected_batch, microbatch)
        how = (engine, memory_budget, augmentation, sorted(observe_always), only and sorted(only), observe_memory)
        data = (inputs, labels, *(public_data or ()))
        made_of = (source_digest(), defense, sampling, layout, dict(architecture(model)))
        mark = digest(*made_of, *settings, *how, *data, seed, sampler_key)
    coins = secrets.randbits(63) if seed is None else seed
    key = secrets.randbits(256) if sampler_key is None else sampler_key

    def draws() -> int:
        """The public seed of what is drawn inside models and views, in the step under way."""
        return seed_from(coins, "draws", context.step)

    def one_off(plan: StepPlan, noise_multiplier: float) -> tuple[Tensor, ...]:
        remarks.update(unverified(plan=plan))
        ledger.record(plan, noise_multiplier, step=context.step, one_off=True, exact=source.exact)
        return runner.run(plan, inputs, labels, noise_multiplier, coins=seed_from(coins, "draws at the start")).noisy

    readable = None
    if public_data is not None:
        readable = PublicGradients(lambda x, y: runner.gradients(x, y, coins=draws())(None), *public_data)
    context = Context(
        step=0,
        steps=total,
        steps_per_epoch=sampling.steps_per_epoch,
        layout=layout,
        parameters=layout.read(model),
        expected_batch=expected_batch,
        seed=coins,
        public=readable,
        one_off=one_off,
        device=torch.device(device),
    )
    first, state = 0, None
    if checkpoint is not None and checkpoint.exists():
        saved = disk.load(checkpoint, fingerprint=mark)
        first, state = saved["step"], _to(saved["state"], device)
        key, coins = saved["sampler_key"], saved["seed"]
        model.load_state_dict(saved["model"])
        updater.load_state_dict(saved["optimizer"])
        source.load(saved["noise"])
        ledger.entries, remarks = saved["entries"], remarks | saved["remarks"]
        transcript.load(saved["transcript"])
        if readable is not None:
            readable.used = saved["public_used"]
        update = saved["update"]
        context = replace(context, seed=coins, update=None if update is None else update.to(device))
    else:
        state = defense.start(context)
    every = checkpoint_every or sampling.steps_per_epoch

    def save(done: int) -> None:
        if checkpoint is not None:
            rest.check()  # a resumed run takes what it finds there for untouched
            content: dict[str, Any] = {
                "fingerprint": mark,
                "step": done,
                "state": state,
                "sampler_key": key,
                "seed": coins,
                "model": model.state_dict(),
                "optimizer": updater.state_dict(),
                "noise": source.state(),
                "entries": ledger.entries,
                "transcript": transcript.state(),
                "remarks": dict(remarks),
                "public_used": readable is not None and readable.used,
                "update": context.update,
            }
            disk.save(content, checkpoint)

    between_steps, done, rest = True, first, Untrained(model)
    try:
        for step in range(first, total):
            between_steps = False
            before = layout.read(model)
            context = context.at(step, parameters=before)
            batch = sampling.indices(step, len(inputs), key).to(device)
            with _global_coins(coins, step, context.device):
                state, plan = defense.plan(state, context)
                out = runner.run(plan, inputs[batch], labels[batch], sigma, coins=draws())
            ledger.record(plan, sigma, step=step, exact=source.exact)
            remarks |= dict.fromkeys(plan.remarks, "") | unverified(plan=plan)
            if step == first or step + 1 == total:
                rest.check()
            transcript.record(Step(step, before, sigma, expected_batch, sampling.rate, plan, out.noisy))
            update = plan.post(out.total / expected_batch)
            for group, rate in zip(updater.param_groups, base_rates, strict=True):
                group["lr"] = rate * factor(step, total)
            for parameter, gradient in zip(trained, layout.unflatten(update).values(), strict=True):
                parameter.grad = gradient.clone()
            updater.step()
            state = defense.observe(state, context, out.noisy, update)
            context = replace(context, update=update)
            between_steps, done = True, step + 1
            if done % every == 0 or done == total:
                save(done)
            if progress is not None:
                progress(done, total)
    except KeyboardInterrupt:
        if between_steps:  # otherwise the last checkpoint is the last consistent state
            save(done)
        raise
    updater.zero_grad(set_to_none=True)
    runner.rest()
    if runner.unverified:
        remarks["unverified_model"] = runner.unverified
    return Run(
        model=model.eval(),
        ledger=ledger,
        transcript=transcript,
        state=state,
        seed=coins,
        sampler_key=key,
        engine=runner.name,
        noise=source.kind if sigma > 0 else "none",
        public_used=readable is not None and readable.used,
        remarks=tuple(remarks),
        unverified=tuple(sentence for sentence in remarks.values() if sentence),
        key_given=sampler_key is not None,
    )


def _checked(examples: Examples, argument: str, device: torch.device | str) -> tuple[Tensor, Tensor]:
    if isinstance(examples, TensorDataset):
        pair = examples.tensors
    elif isinstance(examples, Dataset):
        if not hasattr(examples, "__len__"):
            raise ValueError(f"{argument} must have a length, got {type(examples).__name__}; sampling needs to know it")
        rows = [examples[i] for i in range(len(examples))]  # pyright: ignore[reportArgumentType]  checked above
        pair = (torch.stack([row[0] for row in rows]), torch.as_tensor([row[1] for row in rows])) if rows else ()
    else:
        pair = examples
    if len(pair) != 2 or len(pair[0]) != len(pair[1]) or len(pair[0]) == 0:
        sizes = ", ".join(str(len(part)) for part in pair) or "nothing"
        raise ValueError(f"{argument} must be (inputs, labels) of one length above 0, got {sizes}")
    return pair[0].to(device), pair[1].to(device)


def _optimizer(
    name: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    parameters: list[nn.Parameter],
    lr: float,
    momentum: float,
) -> torch.optim.Optimizer:
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"lr must be a positive finite number, got {lr}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if callable(name):
        return name(parameters)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    if name == "adam":
        if momentum:
            raise ValueError(f"momentum must be 0 for 'adam', which has its own, got {momentum}")
        return torch.optim.Adam(parameters, lr=lr)
    raise ValueError(f"optimizer must be 'sgd', 'adam' or a function of the parameters, got '{name}'")


def _schedule(schedule: str | Schedule) -> Schedule:
    if callable(schedule):
        return schedule
    if schedule not in _SCHEDULES:
        known = "', '".join(_SCHEDULES)
        raise ValueError(f"schedule must be '{known}' or a function of (step, steps), got '{schedule}'")
    return _SCHEDULES[schedule]


@contextmanager
def _global_coins(seed: int, step: int, device: torch.device) -> Iterator[None]:
    """Keys the global generators, so that a method of somebody's that draws from them does so again when resumed."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        number = seed_from(seed, "layers", step)
        torch.default_generator.manual_seed(number)
        if on_gpu:
            torch.cuda.manual_seed(number)
        yield


def _to(state: State, device: torch.device | str) -> State:
    """A method's state with its tensors on the device."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {k: _to(v, device) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_to(v, device) for v in state)
    return state
