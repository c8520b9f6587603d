"""Test of a privacy claim against a training transcript: its consistency, the measured noise, and canaries.

Three kinds of evidence, reported in this order. Statements: the steps, noise and divisor that the transcript states are
compared with the claim, and so is the epsilon that they prove. Noise: the noise in the releases is compared with the
stated noise (`noise`), which needs no private data. Canaries: their scores bound epsilon from below, if the training
had any (`canaries`).

Only evidence above the claim refutes it. A transcript is written by the audited party: a writer that knows these tests
can invent updates that moved no model and pass them all. Consistency limits this: under plain SGD each step's
parameters must follow from the step before, and the last ones must be the model's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakbench.attacks.core import NotApplicable
from leakbench.defenses.core import Loss, cross_entropy
from leakbench.defenses.core.privacy.accounting import epsilon as proved_epsilon
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.leaderboard.records.transcript_report import CanaryBound, NoiseFound, TranscriptReport

from ...evidence.estimate import EpsilonEstimate, check_level, judge
from ..claim import StatedClaim
from ..files.unwrap import without_wrappers
from .canaries import CanaryScores, GradientCanaries
from .format import WatchedStep, WatchedTranscript
from .noise import NoiseTests, independent, lowest, zero_coordinates
from .view import fitted

_SLACK = 1e-3
"""Relative amount by which a claim may be below the epsilon that the transcript's noise proves: owners round."""
_ROUNDED = 1e-6
"""Relative tolerance of stated numbers, which are written as floats."""
_LEAST_RATIO = 0.05
"""Ratio of found to stated noise below which epsilon is not computed: it would be in the thousands, and takes long."""


@dataclass(frozen=True, kw_only=True)
class TranscriptVerdict:
    """Verdict of a transcript on a claim, with all results of its tests.

    Attributes:
        word: `violation`; `no verdict`, if the transcript contradicts itself or the model and nothing else refutes the
            claim; or `no violation found`, which confirms nothing.
        refuted: evidence that refutes the claim, a sentence each, the plainest first.
        problems: contradictions of the transcript with itself or the model, a sentence each.
        remarks: further limitations for the reader.
        skipped: tests not run, each with the reason and the remedy.
        steps: updates released, as far as the transcript shows.
        epsilon: proved by the stated noise over these steps, nats, infinite without noise; None if the claim does not
            state enough.
        noise: results of all noise tests, the strongest evidence of too little first.
        between_steps: z-score of the correlation of noise between steps; None if no pure noise is observed.
        canaries: the lower bound on epsilon by canaries; None without canaries.
        level: joint confidence of all tests.
    """

    word: Literal["violation", "no violation found", "no verdict"]
    refuted: tuple[str, ...]
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    skipped: tuple[str, ...]
    steps: int
    epsilon: float | None
    noise: tuple[NoiseFound, ...]
    between_steps: float | None
    canaries: EpsilonEstimate | None
    level: float

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        if self.word == "violation":
            return f"The transcript refutes the claim: {'; '.join(self.refuted)}."
        if self.word == "no verdict":
            return f"The transcript allows no verdict: {'; '.join(self.problems)}."
        return "No violation was found in the transcript, which confirms nothing."

    def report(self, *, refuted: bool) -> TranscriptReport:
        """Returns the transcript's part of a report; its sentences contradict no refutation by other evidence.

        Args:
            refuted: whether the audit as a whole refutes the claim.
        """
        alone = refuted and self.word == "no violation found"
        word = "by itself it does not refute the claim" if alone else self.word
        sentences = (f"The transcript of {self.steps} updates: {word}.", *self.refuted, *self.problems, *self.remarks)
        # Without noise epsilon is infinite, which `refuted` states in words and JSON has no number for.
        epsilon = self.epsilon if self.epsilon is not None and math.isfinite(self.epsilon) else None
        return TranscriptReport(
            word=self.word,
            refuted=self.refuted,
            problems=self.problems,
            remarks=self.remarks,
            skipped=self.skipped,
            steps=self.steps,
            epsilon=epsilon,
            between_steps=self.between_steps,
            level=self.level,
            noise=self.noise,
            canaries=None if self.canaries is None else CanaryBound(**self.canaries.to_dict()),
            sentence=self.sentence,
            sentences=sentences,
        )


@dataclass
class _Sentences:
    """Results of the tests, a sentence each, by the fields of `TranscriptVerdict`."""

    refuted: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass
class _Stated:
    """Accumulates the statements of a transcript's steps, and checks that each follows from the one before."""

    claim: StatedClaim
    transcript: WatchedTranscript
    multipliers: Counter[float] = field(default_factory=Counter)
    divisors: set[float] = field(default_factory=set)
    odd: list[str] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    followed: int = 0
    resumed: int = 0
    last: WatchedStep | None = None

    def add(self, step: WatchedStep, clip_norm: float | None) -> None:
        clip_norm = step.clip_norm if step.clip_norm is not None else clip_norm
        sigma = step.noise_multiplier
        if sigma is None:
            sigma = math.nan if clip_norm is None else step.noise_std / clip_norm
        # Adaptive clipping adds more noise than its multiplier states, never less.
        elif clip_norm is not None and step.noise_std < sigma * clip_norm * (1 - _ROUNDED):
            self.odd.append(
                f"step {step.step} states a noise multiplier of {sigma:g} and a clip norm of {clip_norm:g}, and noise "
                f"of {step.noise_std:g}, which is less"
            )
            sigma = step.noise_std / clip_norm
        self.multipliers[sigma] += 1
        self.divisors.add(step.expected_batch)
        before = self.last
        if before is not None and step.session != before.session:
            self.resumed += 1
        elif before is not None and before.step == step.step - 1 and before.after is not None and not step.derived:
            self.followed += 1
            if not _same(before.after, step.parameters, before):
                self.broken.append(step.step)
        self.last = step

    def proved(self, ratio: float) -> float | None:
        """Computes epsilon of all steps at a multiple of their stated noise; None if too little is stated."""
        claim, transcript = self.claim, self.transcript
        rate = 1.0 if claim.sampling == "full" else claim.sample_rate if claim.sampling == "poisson" else None
        # The accountants' epsilon holds for add/remove neighbours.
        if rate is None or claim.relation != "add_remove" or any(math.isnan(sigma) for sigma in self.multipliers):
            return None
        if 0 in self.multipliers:
            return math.inf
        counts = Counter(self.multipliers)
        # Missing steps are given the largest noise observed, in favour of the claim.
        counts[max(counts)] += transcript.steps_counted - len(transcript)
        events = [Gaussian(rate, sigma * ratio, count) for sigma, count in sorted(counts.items())]
        return proved_epsilon(events, claim.delta).value


def judge_transcript(
    transcript: WatchedTranscript,
    claim: StatedClaim,
    *,
    model: nn.Module | None = None,
    members: Float[Tensor, "n ..."] | None = None,
    coordinates: Int[Tensor, " z"] | None = None,
    canaries: GradientCanaries | None = None,
    final: Mapping[str, Any] | None = None,
    expected_batch: float | None = None,
    loss: Loss = cross_entropy,
    level: float = 0.95,
    device: torch.device | str = "cpu",
) -> TranscriptVerdict:
    """Tests a claim against a transcript; reads every step once.

    Args:
        transcript: of the training that the claim is about.
        claim: the owner's.
        model: a model of its architecture, needed for members and canaries.
        members: inputs of the training set as fed to the model, from which coordinates without a gradient are found.
        coordinates: coordinates without a gradient, if the owner knows them: flat indices in the order of the header.
        canaries: records included by random coins; counted as part of the training set.
        final: the finished model's tensors by name, which must follow from the last step under plain SGD. (Any: tensors
            that are not parameters of the transcript are ignored, whatever their type.)
        expected_batch: the divisor that the owner states; None if there is no such statement.
        loss: per-example, as in the training.
        level: joint confidence of all tests.
        device: for the computation of canaries' gradients.

    Raises:
        FileRefused: a step's file is damaged, or holds NaN.
        TranscriptRefused: a step contradicts its position.
        ValueError: arguments that do not fit one another or the transcript.
    """
    check_level(level)
    header, sentences = transcript.header, _Sentences()
    zero = coordinates
    if zero is None:
        zero = _zero(transcript, model, members, canaries, sentences)
    # Three families of tests share the error: the scale of the noise, its independence, and canaries.
    share = (1 - level) / (1 + (zero is not None) + (canaries is not None))
    tests, stated = NoiseTests(header, zero), _Stated(claim, transcript)
    scores = _scores(stated, model, canaries, loss, sentences, device)
    for step in transcript:
        tests.add(step)
        stated.add(step, header.clip_norm)
        if scores is not None:
            try:
                scores.add(step)
            except NotApplicable as error:
                sentences.skipped.append(f"canaries: {error}")
                scores = None
    sentences.problems += _problems(stated, final)
    sentences.remarks += [*transcript.remarks, *_remarks(stated)]
    epsilon = stated.proved(1.0)
    sentences.refuted += _against_itself(stated, expected_batch, tests.noiseless, epsilon)
    if epsilon is None:
        sentences.skipped.append(
            "epsilon of the stated noise: the claim must be of add_remove and say sampling=poisson with its "
            "sample_rate, or sampling=full, and the transcript its noise multipliers"
        )
    estimates = tests.found(1 - share)
    _judge_noise(tests, estimates, stated, share, sentences)
    bound = None if scores is None or canaries is None else _canary_bound(scores, canaries, claim, share, sentences)
    return TranscriptVerdict(
        word="violation" if sentences.refuted else "no verdict" if sentences.problems else "no violation found",
        **{name: tuple(texts) for name, texts in vars(sentences).items()},
        steps=transcript.steps_counted,
        epsilon=epsilon,
        noise=estimates,
        between_steps=tests.between_steps,
        canaries=bound,
        level=level,
    )


def _zero(
    transcript: WatchedTranscript,
    model: nn.Module | None,
    members: Tensor | None,
    canaries: GradientCanaries | None,
    sentences: _Sentences,
) -> Tensor | None:
    """Finds coordinates without a gradient from the inputs of all members and canaries."""
    if model is None or members is None:
        sentences.skipped.append(
            "noise on coordinates without a gradient: it needs the model and the members' inputs, or these coordinates"
        )
        return None
    everybody = members if canaries is None else torch.cat([members, canaries.inputs.to(members)])
    coordinates = zero_coordinates(model, fitted(transcript.header, model)[0], everybody)
    if isinstance(coordinates, str):
        sentences.skipped.append(f"noise on coordinates without a gradient: {coordinates}")
        return None
    return coordinates


def _scores(
    stated: _Stated,
    model: nn.Module | None,
    canaries: GradientCanaries | None,
    loss: Loss,
    sentences: _Sentences,
    device: torch.device | str,
) -> CanaryScores | None:
    if canaries is None:
        return None
    if model is None:
        sentences.skipped.append("canaries: they need the model")
        return None
    claim = stated.claim
    rate = claim.sample_rate if claim.sampling == "poisson" and claim.sample_rate is not None else 1.0
    return CanaryScores(canaries, model, stated.transcript.header, sample_rate=rate, loss=loss, device=device)


def _against_itself(stated: _Stated, expected_batch: float | None, noiseless: int, epsilon: float | None) -> list[str]:
    """Lists contradictions between claim and statements, before anything is measured.

    Args:
        stated: statements of all steps.
        expected_batch: the divisor that the owner states; None if there is no such statement.
        noiseless: updates that are stated to have no noise.
        epsilon: proved by the stated noise; None if too little is stated.
    """
    claim, transcript = stated.claim, stated.transcript
    contradictions = [*claim.errors]
    if claim.steps is not None and transcript.steps_counted > claim.steps:
        contradictions.append(f"{transcript.steps_counted} updates were released, and the claim is about {claim.steps}")
    least = min((sigma for sigma in stated.multipliers if not math.isnan(sigma)), default=None)
    if least is not None and claim.noise_multiplier is not None and least < claim.noise_multiplier * (1 - _ROUNDED):
        contradictions.append(
            f"the transcript states a noise multiplier of {least:g}, and {claim.noise_multiplier:g} is claimed"
        )
    if expected_batch is not None and any(
        abs(divisor - expected_batch) > _ROUNDED * divisor for divisor in stated.divisors
    ):
        contradictions.append(
            f"sums were divided by {_range(stated.divisors)}, and a divisor of {expected_batch:g} is claimed"
        )
    if noiseless:
        # Holds under any sampling, so the claim need not state it.
        contradictions.append(
            f"{noiseless} of {len(transcript)} updates are stated to have no noise, which proves no epsilon, and "
            f"{claim.epsilon:g} is claimed"
        )
    if epsilon is not None and math.isfinite(epsilon) and epsilon > claim.epsilon * (1 + _SLACK):
        contradictions.append(
            f"the noise that the transcript states proves an epsilon of {epsilon:.3g} at delta {claim.delta:g} over "
            f"{transcript.steps_counted} steps, and {claim.epsilon:g} is claimed"
        )
    return contradictions


def _remarks(stated: _Stated) -> list[str]:
    claim, transcript = stated.claim, stated.transcript
    remarks = []
    if len(stated.divisors) > 1:
        remarks.append(
            f"Divisors range over {_range(stated.divisors)}: they must be public, and the size of a batch is not."
        )
    if claim.steps is not None and transcript.steps_counted < claim.steps:
        remarks.append(
            f"The transcript has {transcript.steps_counted} steps and the claim is about {claim.steps}: what is "
            "missing was not looked at."
        )
    if stated.resumed:
        remarks.append(
            f"The training was gone on with {stated.resumed} times; steps that were taken twice from a checkpoint were "
            "released twice, and count twice."
        )
    if not stated.followed:
        remarks.append(
            "Nothing shows that these updates moved the model: only under plain SGD with parameters kept at every step "
            "does a step follow from the one before."
        )
    return remarks


def _problems(stated: _Stated, final: Mapping[str, Any] | None) -> list[str]:
    """Lists contradictions of the transcript with itself or the finished model."""
    problems = stated.odd[:1]
    if stated.broken:
        problems.append(
            f"parameters before step {stated.broken[0]} do not follow from the step before it by plain SGD, nor at "
            f"{len(stated.broken) - 1} other steps: updates were changed or left out, or are not those that were taken"
        )
    last = stated.last
    if final is not None and last is not None and last.after is not None and not stated.transcript.lost:
        bare, _ = without_wrappers(final)
        names = stated.transcript.header.names
        if all(name in bare for name in names):
            model = torch.cat([bare[name].detach().reshape(-1).to(last.after) for name in names])
            if model.shape != last.after.shape or not _same(last.after, model, last):
                problems.append("the finished model does not follow from the last step of the transcript")
    return problems


def _same(expected: Tensor, parameters: Tensor | None, step: WatchedStep) -> bool:
    """Returns whether parameters are as expected, to the rounding of a step."""
    if parameters is None or step.lr is None:
        return True
    moved = step.lr * float(step.released.double().norm())
    rounding = torch.finfo(expected.dtype).eps * float(expected.double().norm())
    return float((expected.double() - parameters.double()).norm()) <= 1e-3 * moved + 4 * rounding


def _judge_noise(
    tests: NoiseTests, estimates: tuple[NoiseFound, ...], stated: _Stated, share: float, sentences: _Sentences
) -> None:
    """Adds sentences on too little noise, noise that depends on the noise before, and too much.

    Args:
        tests: of all steps.
        estimates: their results.
        stated: statements of all steps.
        share: error probability of each family of tests.
        sentences: to which they are added.
    """
    if (least := lowest(estimates, share)) is not None:
        refutes, sentence = _too_little(least, stated)
        (sentences.refuted if refutes else sentences.problems).append(sentence)
    z, most = tests.between_steps, tests.most_by_gradient(share)
    repeated, most_repeated = tests.with_all_before, tests.most_with_all_before(share)
    if z is not None and most is not None and abs(z) > most:
        sentences.refuted.append(f"the noise of a step is not independent of the noise before it, z = {z:.1f}")
    elif repeated is not None and most_repeated is not None and abs(repeated) > most_repeated:
        sentences.refuted.append(
            f"the noise of a step is not independent of the noise of all steps before it, z = {repeated:.1f}"
        )
    elif z is not None and not (independent(z, share / 2) and independent(repeated, share / 2)):
        strongest = max(z, repeated or 0.0, key=abs)
        sentences.remarks.append(
            f"Releases follow those of the step before on coordinates without a gradient, z = {strongest:.1f}, and no "
            "more than a gradient of examples that were not given would make them (all members, as they were trained "
            "on)."
        )
    surplus = next((estimate for estimate in estimates if estimate.low is not None and estimate.low > 1), None)
    if surplus is not None:
        sentences.remarks.append(
            f"Releases have {surplus.ratio:.3f} times the stated deviation on {surplus.where}: there is more noise "
            "than stated, or these coordinates have a gradient after all."
        )


def _too_little(least: NoiseFound, stated: _Stated) -> tuple[bool, str]:
    """Returns whether too little noise refutes the claim, with a description.

    A transcript may state more noise than its owner claims, so that the noise present is enough for the claim.
    """
    where = least.where + (", less the mean of the releases before," if least.centred else "")
    sentence = (
        f"the noise on {where} is at most {least.high:.3g} times what is stated (found {least.ratio:.3g}, "
        f"z = {least.z:.1f} over {least.coordinates} numbers)"
    )
    if least.high < _LEAST_RATIO:
        return True, f"{sentence}: next to none"
    claim, epsilon = stated.claim, stated.proved(least.high)
    if epsilon is None or math.isinf(epsilon):
        return True, sentence
    most = min(stated.multipliers) * least.high
    if epsilon <= claim.epsilon and (claim.noise_multiplier is None or claim.noise_multiplier <= most):
        return False, f"{sentence}, although so much would still prove an epsilon of {epsilon:.3g}"
    return (
        True,
        f"{sentence}; so much noise everywhere would prove an epsilon of {epsilon:.3g} and not {claim.epsilon:g}",
    )


def _canary_bound(
    scores: CanaryScores,
    canaries: GradientCanaries,
    claim: StatedClaim,
    share: float,
    sentences: _Sentences,
) -> EpsilonEstimate | None:
    if claim.relation != "add_remove":
        sentences.skipped.append(
            f"canaries: they are there or not, which a claim about {claim.relation} does not speak of"
        )
        return None
    bound = scores.bound(
        canaries.included, delta=claim.delta, relation="add_remove", full=claim.sampling == "full", level=1 - share
    )
    if judge(bound, epsilon=claim.epsilon, delta=claim.delta, relation="add_remove") == "violation":
        sentences.refuted.append(
            f"canaries prove an epsilon of at least {bound.value:.3g} at delta {bound.delta:g} "
            f"({bound.detail['correct']} of {bound.detail['guessed']} guesses right), and {claim.epsilon:g} is claimed"
        )
    return bound


def _range(values: set[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"
