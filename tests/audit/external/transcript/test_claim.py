"""Claims held against transcripts: half the noise is found by its scale and by canaries, and a true claim stands.

`FORGERIES` are transcripts that somebody changed; what none of the tests finds is tested, too, since the page on the
format says so.
"""

import functools
import json
import math
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import nn

from leakbench import audit
from leakbench.attacks.core import AccessError, Examples
from leakbench.audit.catalog import methods
from leakbench.audit.external.claim import StatedClaim
from leakbench.audit.external.transcript.canaries import GradientCanaries, read_canaries
from leakbench.audit.external.transcript.claim import judge_transcript
from leakbench.audit.external.transcript.format import TranscriptHeader, WatchedStep, read_transcript, step_file
from leakbench.audit.external.transcript.noise import NoiseTests, zero_coordinates
from leakbench.audit.external.transcript.view import TranscriptView
from leakbench.audit.targets.observe import PublicKnowledge
from leakbench.defenses.core import Defense, Whole, calibrate, clip, full
from leakbench.defenses.core.privacy.accounting import epsilon
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.leaderboard.records.validation import json_values

from ....parameters import long_but
from .watched import BATCH, RECORDS, digits, perceptron, private_steps

STEPS = 20
RATE = BATCH / RECORDS


def trained(folder, *, sigma, stated=1.0, steps=STEPS, model=None, **settings):
    """A plain loop with noise of `sigma` that states another; its model."""
    model = model or perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers: dict[str, Any] = {"noise_multiplier": stated, "clip_norm": 1.0, "expected_batch": float(BATCH)}
    with audit.watch(optimizer, folder, model=model, **{**numbers, **settings}):
        private_steps(model, optimizer, digits(), sigma=sigma, steps=steps)
    return model


@functools.cache
def epsilon_of(sigma, steps=STEPS):
    return epsilon([Gaussian(RATE, sigma, steps)], 1e-5).value


def claimed(sigma=1.0, **changed):
    """The claim that so much noise proves."""
    known: dict[str, Any] = {"epsilon": epsilon_of(sigma), "sampling": "poisson", "sample_rate": RATE}
    return StatedClaim(**{**known, "noise_multiplier": sigma, "steps": STEPS, **changed})


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest") / "run"
    return folder, trained(folder, sigma=1.0)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half") / "run"
    return folder, trained(folder, sigma=0.5)


def test_the_stated_noise_passes_and_its_scale_is_found(honest):
    folder, model = honest
    found = judge_transcript(
        read_transcript(folder), claimed(), model=model, members=digits()[0], final=model.state_dict()
    )
    assert (found.word, found.problems, found.skipped) == ("no violation found", (), ())
    assert found.epsilon == pytest.approx(epsilon_of(1.0))
    zero = next(one for one in found.noise if one.low is not None)
    assert zero.coordinates == STEPS * 16 * 8 and zero.low is not None and zero.low < 1 < zero.high
    assert found.between_steps is not None and abs(found.between_steps) < 5
    assert "confirms nothing" in found.sentence


@pytest.mark.parametrize("known", ["nothing", "members", "coordinates"])
def test_half_the_noise_is_found_with_and_without_private_data(half, known):
    folder, model = half
    there = read_transcript(folder)
    columns = (64 * torch.arange(16)[:, None] + 8 * torch.arange(8)).flatten()
    given = {
        "nothing": {},
        "members": {"model": model, "members": digits()[0]},
        "coordinates": {"coordinates": columns},
    }
    found = judge_transcript(there, claimed(), **given[known])
    assert found.word == "violation" and "times what is stated" in found.sentence
    assert found.epsilon == pytest.approx(epsilon_of(1.0))  # the statement itself is in order
    if known != "nothing":
        zero = next(one for one in found.noise if one.low is not None)
        assert zero.low is not None and zero.low < 0.5 < zero.high < 0.56 and zero.z < -20
    assert found.noise[0].p_value < 1e-6
    assert f"an epsilon of {epsilon_of(found.noise[0].high):.3g}"[:16] in found.sentence


def test_coordinates_of_dark_pixels_are_found_and_no_others(honest):
    folder, model = honest
    header = read_transcript(folder).header
    inputs = digits()[0]
    found = zero_coordinates(model, header.layout, inputs)
    columns = (64 * torch.arange(16)[:, None] + 8 * torch.arange(8)).flatten()
    assert isinstance(found, torch.Tensor) and torch.equal(found, columns)
    assert "no entry" in str(zero_coordinates(model, header.layout, inputs + 1))
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    assert "is a Conv2d" in str(zero_coordinates(convolution, header.layout, inputs))


@pytest.mark.long
def test_a_true_claim_is_refuted_in_no_more_trials_than_the_level_allows():
    """Of noise with a signal that follows from earlier noise, on every group of coordinates at once."""
    header = TranscriptHeader(names=("a", "b"), shapes=((300,), (40,)))
    trials, level, refuted, shrunk = 150, 0.8, 0, 0
    for scale in (1.0, 0.93):
        for trial in range(trials):
            coins = torch.Generator().manual_seed(trial)
            tests, before = NoiseTests(header, torch.arange(300, 340)), torch.zeros(340)
            for number in range(6):
                noise = scale * torch.randn(340, generator=coins)
                # A gradient that turns against what was released before, as near a minimum.
                released = noise - 0.3 * before * (torch.arange(340) < 300)
                before = released
                tests.add(WatchedStep(step=number, session=0, released=released, expected_batch=1.0, noise_std=1.0))
            found = tests.found(level)
            over = found[0].p_value <= (1 - level) / len(found)
            refuted, shrunk = refuted + (scale == 1.0) * over, shrunk + (scale < 1.0) * over
    # One-sided, by Bonferroni: at most a fifth of the trials, and a tenth too little noise is seen in most.
    assert stats.binom.sf(refuted - 1, trials, 1 - level) > 1e-6
    assert 0 < refuted < 0.2 * trials and shrunk > 0.6 * trials


@pytest.mark.long
def test_what_is_stated_is_compared_before_anything_is_measured(honest):
    there = read_transcript(honest[0])
    cases: list[tuple[StatedClaim, dict[str, Any], str]] = [
        (claimed(steps=STEPS - 1), {}, f"{STEPS} updates were released, and the claim is about {STEPS - 1}"),
        (claimed(1.2), {}, "states a noise multiplier of 1, and 1.2 is claimed"),
        (claimed(epsilon=1.0, noise_multiplier=None), {}, "proves an epsilon of"),
        (claimed(), {"expected_batch": 16.0}, "divided by 32, and a divisor of 16"),
    ]
    for claim, given, sentence in cases:
        found = judge_transcript(there, claim, **given)
        assert found.word == "violation" and sentence in found.refuted[0], found.refuted
    fewer = judge_transcript(there, claimed(1.0, steps=STEPS + 5))
    assert any("what is missing" in remark for remark in fewer.remarks)
    silent = judge_transcript(there, StatedClaim(epsilon=50.0))
    assert silent.epsilon is None and any("sampling=poisson" in one for one in silent.skipped)


@pytest.mark.parametrize("stated", [{"sampling": "poisson", "sample_rate": RATE}, {}, {"relation": "replace_one"}])
def test_updates_without_noise_refute_any_epsilon_whatever_is_said_of_sampling(tmp_path, stated):
    claim = StatedClaim(epsilon=3.0, **stated)
    trained(tmp_path / "run", sigma=0.0, stated=0.0, steps=3)
    found = judge_transcript(read_transcript(tmp_path / "run"), claim)
    assert found.word == "violation" and "3 of 3 updates are stated to have no noise" in found.sentence
    # An infinite epsilon is no number of JSON.
    assert json.dumps(json_values(found.report(refuted=True)), allow_nan=False)


def forged(source, target, change, steps=STEPS):
    """A copy of a transcript whose steps were changed; None leaves a step out and numbers the others anew."""
    shutil.copytree(source, target)
    number = 0
    for step in range(steps):
        path = target / step_file(step)
        tensors = load_file(path)
        path.unlink()
        if (tensors := change(step, tensors)) is None:
            continue
        save_file(tensors | {"step": torch.tensor([number])}, target / step_file(number))
        number += 1
    (target / "end.json").write_text(f'{{"steps": {number}}}')
    return read_transcript(target)


def right_where_it_is_looked(step, tensors):
    """The noise of the dark pixels is made up, as large as it is stated."""
    columns = (64 * torch.arange(16)[:, None] + 8 * torch.arange(8)).flatten()
    coins = torch.Generator().manual_seed(step)
    tensors["released"][columns] = torch.randn(len(columns), generator=coins) / BATCH
    return tensors


FORGERIES = {
    "noise only where it is looked": (right_where_it_is_looked, "times what is stated"),
    "more noise stated": (
        lambda s, t: t | {k: 1.5 * t[k] for k in ("noise_std", "noise_multiplier")},
        "times what is stated",
    ),
    "less noise than its own multiplier": (
        lambda s, t: t | {"noise_std": 0.5 * t["noise_std"]},
        "states a noise multiplier of 0.5",
    ),
    "scaled down": (lambda s, t: t | {"released": 0.4 * t["released"]}, "times what is stated"),
    "scaled up": (lambda s, t: t | {"released": 2 * t["released"]}, "do not follow from the step before"),
    "a step left out": (lambda s, t: None if s == 4 else t, "do not follow from the step before"),
    "the last step left out": (lambda s, t: None if s == STEPS - 1 else t, "the finished model does not follow"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_transcript_is_found_out(honest, half, tmp_path, name):
    change, sentence = FORGERIES[name]
    folder, model = half if name == "noise only where it is looked" else honest
    there = forged(folder, tmp_path / "run", change)
    found = judge_transcript(there, claimed(), model=model, members=digits()[0], final=model.state_dict(), level=0.99)
    assert found.word in ("violation", "no verdict") and sentence in found.sentence


def test_a_step_left_out_where_first_parameters_alone_are_kept_is_found_by_the_finished_model(tmp_path):
    model = trained(tmp_path / "run", sigma=1.0, parameters="first")
    whole = judge_transcript(read_transcript(tmp_path / "run"), claimed(), final=model.state_dict())
    assert whole.word == "no violation found"
    there = forged(tmp_path / "run", tmp_path / "less", lambda s, t: None if s == 4 else t)
    found = judge_transcript(there, claimed(), final=model.state_dict())
    assert found.word == "no verdict" and "the finished model does not follow" in found.sentence


def test_more_noise_stated_than_there_is_and_enough_for_the_claim_is_no_violation_and_no_verdict(honest, tmp_path):
    change = FORGERIES["more noise stated"][0]
    there = forged(honest[0], tmp_path / "run", change)
    found = judge_transcript(there, claimed(epsilon=2 * epsilon_of(1.0), noise_multiplier=None))
    assert found.word == "no verdict" and "would still prove an epsilon of" in found.sentence


def test_of_a_claim_about_replacement_no_epsilon_is_computed(honest):
    claim = claimed(epsilon=0.01, relation="replace_one", noise_multiplier=None)
    found = judge_transcript(read_transcript(honest[0]), claim)
    assert found.epsilon is None and found.word == "no violation found"


def test_the_same_noise_in_every_step_is_found_where_there_is_no_gradient(honest, tmp_path):
    columns = (64 * torch.arange(16)[:, None] + 8 * torch.arange(8)).flatten()
    noise = torch.randn(len(columns), generator=torch.Generator().manual_seed(5)) / BATCH

    def again(step, tensors):
        tensors["released"][columns] = noise
        return tensors

    found = judge_transcript(forged(honest[0], tmp_path / "run", again), claimed(), coordinates=columns)
    assert any("not independent of the noise before it" in sentence for sentence in found.refuted)
    assert any("less the mean of the releases before, is at most 0 times" in sentence for sentence in found.refuted)


def test_a_gradient_of_members_who_were_not_given_is_no_noise_that_lasts(tmp_path):
    """Pixels that are dark in the members that an owner gives, and bright in others that were trained on."""
    inputs, labels = digits()
    inputs[100:, ..., 0], labels[100:] = 1.0, 3
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with audit.watch(
        optimizer, tmp_path / "run", model=model, noise_multiplier=1.0, clip_norm=1.0, expected_batch=float(BATCH)
    ):
        private_steps(model, optimizer, (inputs, labels), sigma=1.0, steps=STEPS)
    found = judge_transcript(read_transcript(tmp_path / "run"), claimed(), model=model, members=inputs[:100])
    # The correlation is there, as far from chance as anything, and refutes nothing.
    assert found.between_steps is not None and found.between_steps > 10
    assert found.word == "no violation found"
    assert any("examples that were not given" in sentence for sentence in found.remarks)


@pytest.mark.parametrize(("steps", "share", "found"), [(20, 0.9, True), (400, 0.4, True), (20, 0.0, False)])
def test_noise_that_is_used_again_in_part_is_told_from_a_gradient(steps, share, found):
    """Of as much energy as is stated, so that nothing but its correlation shows it."""
    tests = NoiseTests(TranscriptHeader(names=("a",), shapes=((200,),)), torch.arange(200))
    coins, noise = torch.Generator().manual_seed(3), torch.zeros(200)
    for number in range(steps):
        noise = share * noise + math.sqrt(1 - share**2) * torch.randn(200, generator=coins)
        tests.add(WatchedStep(step=number, session=0, released=noise, expected_batch=1.0, noise_std=1.0))
    most = tests.most_by_gradient(0.025)
    assert tests.between_steps is not None and most is not None
    assert (tests.between_steps > most) == found


@pytest.mark.parametrize(("period", "repeats"), [(2, True), (5, True), (9, True), (None, False)])
def test_noise_that_repeats_after_some_steps_is_told_from_a_gradient(period, repeats):
    tests = NoiseTests(TranscriptHeader(names=("a",), shapes=((400,),)), torch.arange(400))
    coins = torch.Generator().manual_seed(3)
    noise = torch.randn(period or 240, 400, generator=coins)
    for number in range(240):
        released = noise[number % len(noise)]
        tests.add(WatchedStep(step=number, session=0, released=released, expected_batch=1.0, noise_std=1.0))
    most = tests.most_with_all_before(0.025)
    assert tests.with_all_before is not None and most is not None
    assert (tests.with_all_before > most) == repeats


@pytest.mark.parametrize("remaining", long_but([0.1], [0.0, 0.1, 1.0]))
def test_fresh_noise_and_a_gradient_that_remains_are_never_called_repetition(remaining):
    """The gradient is the worst that there is: along the sum of all releases before."""
    for seed in range(60):
        tests = NoiseTests(TranscriptHeader(names=("a",), shapes=((50,),)), torch.arange(50))
        coins, before = torch.Generator().manual_seed(seed), torch.ones(50)
        for number in range(40):
            released = torch.randn(50, generator=coins) + remaining * 50**0.5 * before / before.norm()
            before = before + released
            tests.add(WatchedStep(step=number, session=0, released=released, expected_batch=1.0, noise_std=1.0))
        z, most = tests.with_all_before, tests.most_with_all_before(0.025)
        assert z is not None and most is not None and abs(z) < most


def test_what_is_made_up_to_fit_is_not_found(tmp_path):
    """The limit that the page on the format states: nobody trained here."""
    coins = torch.Generator().manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit.watch(
        optimizer, tmp_path / "run", model=model, noise_multiplier=1.0, clip_norm=1.0, expected_batch=float(BATCH)
    ):
        for _ in range(STEPS):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=coins) / BATCH
            optimizer.step()
    found = judge_transcript(read_transcript(tmp_path / "run"), claimed(), model=model, members=digits()[0])
    assert found.word == "no violation found"


CANARIES, CANARY_STEPS = 1000, 4


@functools.cache
def multiplier_of_three():
    """Of full batches over these steps, at epsilon 3."""
    made = calibrate(
        Defense(Whole(bound=clip(1.0))), epsilon=3.0, delta=1e-5, sampling=full(), steps=CANARY_STEPS, precision=1e-4
    )
    return made.calibrated_multiplier


def canaries_of(seed):
    coins = torch.Generator().manual_seed(seed)
    return GradientCanaries(
        100 * torch.eye(CANARIES),
        torch.ones(CANARIES, dtype=torch.int64),
        torch.rand(CANARIES, generator=coins) < 0.5,
    )


def with_canaries(folder, *, share, seed, steps=CANARY_STEPS):
    """Full batches of a linear model over the canaries that are in, with a share of the noise of epsilon 3."""
    canaries = canaries_of(seed)
    model = nn.Linear(CANARIES, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sigma = multiplier_of_three()
    coins = torch.Generator().manual_seed(seed + 1000)
    kept = canaries.inputs[canaries.included]
    with audit.watch(
        optimizer, folder, model=model, noise_multiplier=sigma, clip_norm=1.0, expected_batch=float(CANARIES)
    ):
        for _ in range(steps):
            # By hand, for cross-entropy of class 1: -(1 - p) x in its own row, and the opposite in the other.
            miss = model(kept).softmax(1)[:, :1].detach()
            rows = torch.stack([miss * kept, -miss * kept], dim=1)
            rows = rows / rows.flatten(1).norm(dim=1).clamp(min=1)[:, None, None]
            noise = torch.randn(2, CANARIES, generator=coins)
            model.weight.grad = (rows.sum(0) + share * sigma * noise) / CANARIES
            optimizer.step()
    return canaries, model


@pytest.mark.parametrize(("share", "seed"), [(1.0, 0), (0.5, 0)])
def test_half_the_noise_at_epsilon_three_is_proved_by_gradient_canaries(tmp_path, share, seed):
    canaries, model = with_canaries(tmp_path / "run", share=share, seed=seed)
    claim = StatedClaim(epsilon=3.0, sampling="full", steps=CANARY_STEPS)
    found = judge_transcript(read_transcript(tmp_path / "run"), claim, model=model, canaries=canaries)
    assert found.canaries is not None and found.canaries.method == "one_run_f_dp"
    assert found.canaries.ceiling > 5
    by_canaries = [sentence for sentence in found.refuted if sentence.startswith("canaries prove an epsilon")]
    if share == 1:
        assert found.word == "no violation found" and found.canaries.value < 3
    else:
        assert found.word == "violation" and len(by_canaries) == 1 and found.canaries.value > 3


@pytest.mark.slow
def test_over_many_runs_canaries_refute_half_the_noise_and_the_noise_of_the_claim_never(tmp_path):
    claim = StatedClaim(epsilon=3.0, sampling="full", steps=CANARY_STEPS)
    for share, least, most in ((1.0, 0, 1), (0.5, 17, 20)):
        refuted = 0
        for seed in range(20):
            folder = tmp_path / f"{share}-{seed}"
            canaries, model = with_canaries(folder, share=share, seed=seed)
            found = judge_transcript(read_transcript(folder), claim, model=model, canaries=canaries)
            refuted += any(sentence.startswith("canaries prove") for sentence in found.refuted)
        assert least <= refuted <= most


def test_canaries_need_the_model_the_relation_and_the_parameters(tmp_path, honest):
    canaries, model = with_canaries(tmp_path / "run", share=1.0, seed=0, steps=1)
    there = read_transcript(tmp_path / "run")
    claim = StatedClaim(epsilon=3.0, sampling="full")
    assert "they need the model" in judge_transcript(there, claim, canaries=canaries).skipped[-1]
    replaced = replace(claim, relation="replace_one")
    found = judge_transcript(there, replaced, model=model, canaries=canaries)
    assert found.canaries is None and any("does not speak of" in one for one in found.skipped)
    by_layer = replace(there, header=replace(there.header, clipping="by_layer"))
    found = judge_transcript(by_layer, claim, model=model, canaries=canaries)
    assert found.canaries is None and any("one clip norm over all parameters" in one for one in found.skipped)
    with pytest.raises(ValueError, match="must have the transcript's parameter 'weight'"):
        judge_transcript(there, claim, model=nn.Linear(3, 2, bias=False), canaries=canaries)
    path = tmp_path / "canaries.safetensors"
    given = {"inputs": canaries.inputs, "labels": canaries.labels, "included": canaries.included}
    save_file(given, path)
    assert torch.equal(read_canaries(path).included, canaries.included)
    save_file(given | {"included": canaries.included.long()}, path)
    with pytest.raises(ValueError, match=r"included of .* must be bool"):
        read_canaries(path)
    save_file({"inputs": canaries.inputs}, path)
    with pytest.raises(ValueError, match="must hold inputs, labels and included"):
        read_canaries(path)
    with pytest.raises(ValueError, match="coins of canaries must be fair"):
        GradientCanaries(canaries.inputs, canaries.labels, torch.ones_like(canaries.included))


def test_attacks_on_updates_run_on_a_transcript_and_informed_ones_say_why_not(tmp_path):
    """A linear model of few records and little noise: members are told from others by what was released."""
    inputs, labels = torch.randn(40, 30, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 2
    torch.manual_seed(0)
    model = nn.Linear(30, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit.watch(optimizer, tmp_path / "run", noise_multiplier=0.1, clip_norm=1.0, expected_batch=10.0):
        private_steps(model, optimizer, (inputs[:20], labels[:20]), sigma=0.1, steps=6, rate=0.5, batch=10.0)
    candidates = Examples(ids=torch.arange(30), inputs=inputs[:30], labels=labels[:30])
    public = Examples(ids=torch.arange(10), inputs=inputs[30:], labels=labels[30:])
    world = PublicKnowledge(input_shape=(30,), classes=2, low=-5.0, high=5.0, population=public)
    view = TranscriptView(
        transcript=read_transcript(tmp_path / "run"),
        model=model,
        public_knowledge=world,
        candidates=candidates,
        sample_rate=0.5,
    )
    for name, log_ratio in (("gradient_similarity", False), ("gaussian_others", True)):
        scores = view.scores(methods.attack(name), log_ratio=log_ratio).scores.numpy()
        auc = np.mean(scores[:20, None] > scores[None, 20:30])
        assert auc > 0.75, name
    informed = methods.attack("likelihood_ratio")
    assert "withheld" in str(informed.check(view.seen()))
    with pytest.raises(AccessError):
        informed(view.seen())
    trace = methods.attack("loss_trace")(view.seen()).scores
    assert trace.shape == (30,) and math.isfinite(float(trace.sum()))
