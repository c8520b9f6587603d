"""The central training loop: plan, sample, release, divide, post-process, optimize, observe; ledger and transcript.

Sums are divided by the expected batch, a public constant. Momentum, Adam and schedules act on releases, so they cost
no privacy. The loop reads no loss value except in a step's trial, where it is released with noise and charged: length,
rate and schedule are fixed before a run starts.

Guarantee:
    `Run.claim` is derived from the plans that were executed, and states its assumptions. Relation and sampler as in
    `sampling.py`; released: every noisy block of every step, the trained parameters, and the vectors of power
    iterations, which follow from the parameters (any other change by a forward pass is refused). A run that was killed
    may have released steps after its last checkpoint, and takes them again. With `os` or `secure` noise, whose key no
    checkpoint contains, the releases are new, and the ledger charges these steps once more. `seeded` noise is drawn
    again, which gives the same releases, because a digest of all their inputs ensures that the sums are the same
    (`fingerprint.py`) up to rounding, and nothing that is known to decide of rounding has changed (`run_file.py`).
    Otherwise the noise is another, and the steps are charged once more, too. That the device itself rounds alike twice
    is assumed, and the claim says so. A run that was interrupted between two steps has no such steps.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..gradients.augmentation import draws, draws_at_start, global_draws
from ..gradients.checks.batch_norm import into_training_mode
from ..gradients.checks.model_checks import Untrained
from ..gradients.checks.synthetic_examples import Domains
from ..gradients.executor import Engine, Release
from ..gradients.power_iteration import PowerIterations
from ..inputs import Inputs
from ..plan.defense import Context, NoisyPlan, Trial
from ..plan.public_data import GradientBatch, PublicGradients, chosen_from, refuse_shared, selected
from ..privacy.ledger import Ledger
from ..privacy.sampling import poisson
from ..randomness.keys import global_generators, key_from, seed_from
from ..randomness.noise import of_one_run
from .assumptions import unverified
from .average import ParameterAverage
from .interrupts import HeldInterrupts
from .labelled import LabelledData, as_examples, fitting
from .resuming import Resumption
from .run import Run
from .settings import TrainingSettings
from .statistics import release_statistics, standardised
from .step import Account, Stepper
from .transcript import Step

_AT_ONCE = 64  # examples in a pass over all data for their features

_OTHERWISE = (
    "a run that is taken once more must be the same bit for bit, got other numbers at {}: the device, or the method, "
    "does not compute alike twice; take fewer steps, or a smaller model, so that all of them can be kept"
)


class OngoingRun:
    """A run in progress: data, engine, optimizer, and the releases so far."""

    def __init__(
        self, model: nn.Module, examples: LabelledData, public: LabelledData | None, settings: TrainingSettings
    ) -> None:
        """Refuses invalid models, data and settings; nothing is released yet."""
        s, self.sigma = settings, settings.defense.calibrated_multiplier
        self.settings, self.model = s, model
        self.inputs, self.labels = as_examples(examples, "examples", s.execution.device)
        self.device = torch.device(s.execution.device or self.inputs.device)
        pool = None if public is None else as_examples(public, "public", self.device)
        model.to(self.device)
        self.inputs, self.labels = fitting(self.inputs, self.labels, model, s.recipe.loss, "examples")
        if pool is not None:
            pool = fitting(*pool, model, s.recipe.loss, "public")
            # Compared in the same precision: a public copy in another precision is the same example.
            refuse_shared(self.inputs, pool[0])
        if not model.training:  # in training mode, submodules were put in evaluation mode on purpose, and stay
            into_training_mode(model)
        self.iterations = PowerIterations(model)
        self.features = None
        if s.recipe.statistics is not None:
            self.features = standardised(model, s.recipe.statistics, self.inputs)
        self.noise = of_one_run(s.noise)
        self.runner = Engine(
            model,
            loss=s.recipe.loss,
            noise=self.noise,
            microbatch=s.execution.microbatch,
            memory_budget=s.execution.memory_budget,
            precision=s.execution.precision,
            engine=s.execution.engine,
            augmentation=s.recipe.augmentation,
            expected_batch=s.sampling.expected_batch(s.recipe.nominal_size or len(self.inputs)),
            domains=Domains(s.recipe.input_domain, s.recipe.target_domain),
            unchecked=s.execution.unchecked,
        )
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = s.recipe.optimizer_of(self.parameters, s.lr)
        # A schedule multiplies the initial rates of the optimizer; a user's own may have several.
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        parts = {"noise": s.noise, "augmentation": s.recipe.augmentation, "sampling": s.sampling}
        remarks = unverified(**parts, defense=s.defense, optimizer=self.optimizer)
        self.account = Account(Ledger(s.sampling), s.noise.exact, remarks)
        self.average = ParameterAverage(s.recipe.average)
        self.transcript = s.recording.transcript(self.runner.layout)
        self.started = False
        self.checkpoint = Resumption(self, pool)
        # The public seed need only differ between runs; the sampler's key is a secret, and long enough for it.
        self.seed = secrets.randbits(63) if s.seed is None else s.seed
        self.key = secrets.randbits(256) if s.sampler_key is None else s.sampler_key
        self.public = None if pool is None else PublicGradients(self._gradients, *pool, self._factored)
        self.stepper = Stepper(s.defense, self._context(), partial(self.runner.layout.write, model))

    def run(self) -> Run:
        """Takes the remaining steps, from the start or from a checkpoint."""
        total = self.settings.steps
        between_steps, done = False, 0
        with HeldInterrupts(wanted=self.checkpoint.file.path is not None) as interrupts:
            try:
                first = done = self.begin()
                between_steps = True
                for step in range(first, total):
                    interrupts.raise_held()
                    between_steps = False
                    self.step(step, check=step == first or step + 1 == total)
                    between_steps, done = True, step + 1
                    if done == self.checkpoint.file.due(step):
                        self.checkpoint.save(done)
                    self._report(done)
                interrupts.raise_held()
            except (KeyboardInterrupt, SystemExit):  # the latter by a handler of SIGTERM, say
                if between_steps:  # otherwise the last checkpoint is the last consistent state
                    self.checkpoint.save(done, nothing_since=True)
                raise
            except Exception:
                self.checkpoint.forget()
                raise
        return self._finished()

    def _report(self, done: int) -> None:
        """Calls `progress`, whose error interrupts the run between two steps."""
        progress = self.settings.recording.progress
        if progress is None:
            return
        try:
            progress(done, self.settings.steps)
        except Exception:
            self.checkpoint.save(done, nothing_since=True)
            raise

    def begin(self) -> int:
        """Starts the method, or restores a checkpoint; returns the number of the first step to take."""
        first = self.checkpoint.restore()
        self.checkpoint.open(first)
        if not self.started:
            with global_generators(global_draws(self.seed, None), self.device), self.iterations.held():
                self._release_statistics()
                self.stepper.start()
            self.started = True
        self.untrained = Untrained(self.model)
        return first

    def retake(self, run: Run) -> Iterator[Step]:
        """Repeats the steps of a finished run, and yields each as an observer of updates saw it, without keeping it.

        The same noise on the same sums is the same release, so nothing more is released. Equality is checked at the
        steps that the run kept, and on the final parameters.

        Args:
            run: with the same initial model, examples and settings, and the seeds that it had.

        Raises:
            ValueError: for noise that cannot be drawn again, a release that differs from the run's, or a recording that
                would resume from a checkpoint, or not keep the step that is yielded.
        """
        recording = self.settings.recording
        if recording.observer != "updates" or not (recording.checkpoint is recording.memory is recording.only is None):
            raise ValueError(
                "recording of steps that are taken once more must be Recording(observer='updates'), without checkpoint "
                f"and limits, got {recording}"
            )
        # Also for one-off releases, whose noise may be the only noise: they are repeated before the first step.
        if run.noise != "none" and self.settings.noise.kind != "seeded":
            raise ValueError(
                f"noise must be seeded for steps to be taken once more, got {self.settings.noise.kind}: nobody can "
                "draw it again; take fewer steps, or a smaller model, so that all of them can be kept"
            )
        kept = {step.step: step for step in run.transcript.steps}
        with _any_mode():
            first = self.begin()
        for step in range(first, self.settings.steps):
            with _any_mode():
                self.step(step)
            observed = self.transcript.steps.pop()
            if not _same_release(observed, kept.get(step, observed)):
                raise ValueError(_OTHERWISE.format(f"step {step}"))
            yield observed
        ended = self.runner.layout.read(self.model) if self.average.value is None else self.average.value
        if not _same_bits(ended, self.runner.layout.read(run.model)):
            raise ValueError(_OTHERWISE.format("the end"))

    def step(self, step: int, *, check: bool = False) -> None:
        """Takes a single step.

        Args:
            step: its number, consecutive.
            check: whether to check that tensors that are not trained are unchanged; `run` does so in its first and last
                step.
        """
        before = self.runner.layout.read(self.model)

        def execute(plan: NoisyPlan) -> Release:
            # Drawn inside, so that the plan exists before the batch can be known.
            return self._on_batch(plan, self.settings.sampling.indices(step, len(self.inputs), self.key))

        self.iterations.advance()
        with global_generators(global_draws(self.seed, step), self.device), self.iterations.held():
            observed = self.stepper.take(step, before, execute, self.account)
        if check:
            # First step: a change by a forward pass is found before more is released. Last step: the model is handed
            # over.
            self.untrained.check()
        if self.settings.recording.meter is not None:
            # Before the step's trial, which may restore the update of an earlier step.
            self.settings.recording.meter.add(step, self.stepper.update)
        trial, undo = self.stepper.trial, None
        if trial is not None:
            undo = copy.deepcopy(self.optimizer.state_dict())
        factor, update = self.settings.recipe.rate(step, self.settings.steps), self.stepper.update
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        # A copy, because an optimizer may change gradients in place, and the context keeps the update.
        gradients = self.runner.layout.unflatten(update.clone())
        for parameter, gradient in zip(self.parameters, gradients.values(), strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        if self.stepper.moves is not None:
            self.stepper.hold(self.runner.layout.read(self.model))
        if trial is not None and undo is not None:
            with self.iterations.held():
                observed = replace(observed, verdict=self._tried(trial, step))
            if not self.stepper.stands:
                self.optimizer.load_state_dict(undo)
        self.transcript.record(observed)
        if self.average.decay is not None:
            self.average.add(step, observed.parameters, self.runner.layout.read(self.model))

    def _tried(self, trial: Trial, step: int) -> Tensor | None:
        """Returns the release of a step's trial, on its own sample; a step that fails is undone."""
        # Under another key: with the step's key both samples would follow from the same random numbers, so that the
        # step's participants reveal the trial's.
        drawn, key = poisson(trial.rate), key_from("trial", self.key)

        def execute(plan: NoisyPlan) -> Release:
            return self._on_batch(plan, drawn.indices(step, len(self.inputs), key))

        return self.stepper.judge(execute, self.account, drawn)

    def _on_batch(self, plan: NoisyPlan, batch: Tensor) -> Release:
        """Executes a plan on the examples with these numbers."""
        chosen = batch.to(self.device)
        inputs, labels = chosen_from(self.inputs, chosen), selected(self.labels, chosen)
        return self.runner.run(plan, inputs, labels, seed=self._draws())

    def _draws(self) -> int:
        """Public seed of the random draws in models and views, for the current step."""
        return draws(self.seed, self.stepper.context.step)

    def _gradients(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """Returns per-example gradients of public examples at the current parameters."""
        return self.runner.gradients(inputs, labels, seed=self._draws())(None)

    def _factored(self, inputs: Inputs, labels: Tensor) -> GradientBatch:
        """Returns the same gradients, in factored form if available."""
        return self.runner.batch(inputs, labels, seed=self._draws())

    def _on_everybody(self, plan: NoisyPlan) -> Release:
        """Executes a release on all the data, before the first step."""
        context = self.stepper.context
        before = self.runner.layout.read(self.model)
        # A seed of its own, so that its views and dropout are not those of step 0.
        out = self.runner.run(plan, self.inputs, self.labels, seed=draws_at_start(self.seed))
        # Public like the expected batch, from which it follows.
        count = self.expected_batch / self.settings.sampling.rate
        self.transcript.record_one_off(Step(context.step, before, plan.noise_multiplier, count, 1.0, plan, out.noisy))
        return out

    def _release_statistics(self) -> None:
        """Releases the statistics that standardise features, before a method looks at the model."""
        s, sampling = self.settings, self.settings.sampling
        if self.features is None or s.recipe.statistics is None:
            return

        def execute(engine: Engine, plan: NoisyPlan) -> Release:
            self.account.charge(plan, step=0, one_off=True)
            return engine.run(plan, self.inputs, self.labels, seed=seed_from(self.seed, "draws for statistics"))

        # Public like the expected batch, which follows from it.
        count = self.expected_batch / sampling.rate
        engines = release_statistics(
            self.features,
            s.recipe.statistics,
            execute,
            noise=self.noise,
            count=count,
            at_once=s.execution.microbatch or min(_AT_ONCE, math.ceil(count)),
            memory_budget=self.runner.settled_budget(),
            input_domain=s.recipe.input_domain,
            unchecked=s.execution.unchecked,
        )
        for engine in engines:
            if engine.unverified:
                self.account.remarks["unverified_model"] = engine.unverified

    def _context(self) -> Context:
        sampling, layout = self.settings.sampling, self.runner.layout
        return Context(
            step=0,
            steps=self.settings.steps,
            steps_per_epoch=sampling.steps_per_epoch,
            layout=layout,
            parameters=layout.read(self.model),
            expected_batch=self.expected_batch,
            architecture=partial(copy.deepcopy, self.model),
            input_shape=tuple(self.inputs.shape[1:]) if isinstance(self.inputs, Tensor) else None,
            seed=self.seed,
            public=self.public,
            one_off=self.account.one_off(self._on_everybody),
            device=self.device,
        )

    @property
    def expected_batch(self) -> float:
        """Public constant that sums are divided by."""
        return self.settings.recipe.divisor(self.settings.sampling, len(self.inputs))

    def _finished(self) -> Run:
        self.optimizer.zero_grad(set_to_none=True)
        self.runner.release_memory()
        remarks = self.account.remarks
        if self.runner.unverified:
            remarks["unverified_model"] = self.runner.unverified
        last = None
        if self.average.value is not None:
            last = self.runner.layout.read(self.model)
            self.runner.layout.write(self.model, self.average.value)
        return Run(
            model=self.model.eval(),
            ledger=self.account.ledger,
            transcript=self.transcript,
            state=self.stepper.state,
            seed=self.seed,
            sampler_key=self.key,
            engine=self.runner.name,
            precision=self.runner.precision,
            noise=self.account.drew(self.noise, self.sigma, self.transcript.one_offs),
            public_used=self.public is not None and self.public.used,
            remarks=tuple(remarks),
            unverified=tuple(sentence for sentence in remarks.values() if sentence),
            key_given=self.settings.sampler_key is not None,
            last=last,
            augmentation=self.settings.recipe.augmentation,
            resumed=self.checkpoint.file.resumed,
            repeated=self.checkpoint.file.repeated,
            nominal_size=self.settings.recipe.nominal_size,
        )


@contextmanager
def _any_mode() -> Iterator[None]:
    """Enables gradients whatever autograd mode the caller of `retake` has set between two steps."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


def _same_release(step: Step, other: Step) -> bool:
    """Returns whether two records of a step have the same numbers."""
    noisy, kept = step.noisy or (), other.noisy or ()
    pairs = zip((step.parameters, *noisy), (other.parameters, *kept), strict=True)
    return len(noisy) == len(kept) and all(_same_bits(mine, theirs) for mine, theirs in pairs)


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are the same bit for bit, NaN included: a diverged run can be repeated, too."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(tensor.contiguous().view(torch.uint8), other.to(tensor.device).contiguous().view(torch.uint8))
