"""One shared update: it is what the engine releases, the truth stays apart, and the exact test has its exact power.

The power is measured on rows that are written down: under the loss of these tests an example's gradient is its input.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as torch_cross_entropy

from leakbench import audit
from leakbench.attacks.core import Examples, Observation
from leakbench.attacks.core.membership import likelihood_ratio
from leakbench.attacks.inverting_gradients import inverting_gradients
from leakbench.attacks.one_step_likelihood_ratio import one_step_likelihood_ratio
from leakbench.audit.evidence.claim_bounds import gaussian_auc, gaussian_tpr
from leakbench.audit.targets.observe import PublicKnowledge
from leakbench.audit.targets.simulated_update import simulate_share
from leakbench.benchmarks import data, models
from leakbench.defenses.core import (
    Block,
    Defense,
    Execution,
    Stateless,
    StepPlan,
    Subspace,
    clip,
    group_norm_instead,
    secure,
    seeded,
)
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.sgd import sgd

from ...parameters import subtests
from .test_observe import holds, reachable

DIM = 20
RELEASES = 100_000
AUC, TPR = 0.760, 0.092  # of the exact test at noise multiplier 1


class TwoLayers(nn.Module):
    """A linear form in two layers, 8 and 12 coordinates; its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 1, bias=False), nn.Linear(12, 1, bias=False)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.second.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs[:, :8]) + self.second(inputs[:, 8:])


def linear(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0]


class Projected(Stateless):
    """Three directions that everybody knows."""

    def plan(self, context):
        drawn = torch.randn(context.dim, 3, generator=context.coins(0))
        return StepPlan(Block(codec=Subspace.of(torch.linalg.qr(drawn).Q), bound=clip(2.0)))


WORLD = PublicKnowledge(input_shape=(DIM,), classes=1, low=-1e9, high=1e9, loss=linear)


def rows(n: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed))


def shared(defense: Defense, inputs: Tensor, *, noise: int = 0, step: int = 2, **settings) -> Observation:
    """The update of a client whose examples have these gradients, two steps into its training."""
    observation, _ = audit.share_update(
        TwoLayers(),
        inputs,
        torch.zeros(len(inputs), dtype=torch.int64),
        defense,
        public_knowledge=WORLD,
        step=step,
        history=(rows(9, 77), torch.zeros(9, dtype=torch.int64)),
        noise=seeded(noise),
        **settings,
    )
    return observation


DEFENSES = {
    "dense": dp_sgd(clip_norm=0.7, noise_multiplier=1.0),
    "masked": random_sparsification(clip_norm=1.3, final_sparsity=0.6, noise_multiplier=1.0),
    "projected": Defense(Projected(), noise_multiplier=1.0),
    "two_part": dpdr(clip_norm=1.0, clip_norm_along=0.2, share=0.3, noise_multiplier=1.0),
}
LENGTHS = {"dense": DIM, "masked": 8, "projected": 3, "two_part": DIM + 2}
CANARY = rows(1, 5, scale=1e6)  # longer than its bound wherever it has a component
each = pytest.mark.parametrize("kind", DEFENSES)


def attacked(observation: Observation, canary: Tensor, *, releases: int, seed: int):
    """AUC and TPR at 1 % of the test over fresh noise, half of the releases with the canary in them."""
    count, members = releases, torch.arange(releases // 2)
    candidates = Examples(
        ids=torch.arange(count), inputs=canary.expand(count, -1), labels=torch.zeros(count, dtype=torch.int64)
    )
    assert observation.noise_std is not None
    noise = torch.randn(count, len(observation.released), generator=torch.Generator().manual_seed(seed))
    remainder = noise * observation.noise_std
    remainder[: len(members)] += observation.contributions(canary, torch.zeros(1, dtype=torch.int64))
    target = replace(observation, candidates=candidates, others_removed=lambda part=slice(None): remainder[part])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(likelihood_ratio, "_AT_ONCE", count // 10)  # rows are of 22 numbers at most
        scores = one_step_likelihood_ratio(target)
    return audit.score(scores, audit.GroundTruth(members=members, candidates=candidates.ids))


def assert_within_three_errors(metric, expected: float) -> None:
    error = (metric.high - metric.low) / (2 * 1.96)
    assert error < 0.006  # or the test would say nothing
    assert abs(metric.value - expected) < 3 * error + 5e-4  # the golden values have three digits


@each
def test_the_exact_test_has_the_power_of_one_gaussian_whatever_the_plan(kind):
    observation = shared(DEFENSES[kind], CANARY)
    assert len(observation.released) == LENGTHS[kind]
    metrics = attacked(observation, CANARY, releases=RELEASES, seed=1)
    assert_within_three_errors(metrics["auc"], AUC)
    assert_within_three_errors(metrics["tpr_at_1pct_fpr"], TPR)


@subtests("kind", ["masked", "projected"])
def test_outside_the_mask_or_the_subspace_nothing_can_be_told(kind):
    observation = shared(DEFENSES[kind], CANARY)
    reached = observation.contributions(torch.eye(DIM), torch.zeros(DIM, dtype=torch.int64))
    outside = rows(1, 6)
    outside -= outside @ torch.linalg.pinv(reached.T) @ reached.T  # without its part in the released space
    metrics = attacked(observation, outside, releases=20_000, seed=2)
    # Of a projection rounding is left, which tells nothing: within five standard errors of chance.
    assert metrics["auc"].value == pytest.approx(0.5, abs=5 * 0.0041 if kind == "projected" else 0)


@pytest.mark.long
@subtests(("along", "mu"), [(True, 0.3**0.5), (False, 0.7**0.5)])
def test_a_canary_in_one_of_two_parts_shows_by_that_parts_share(along, mu):
    observation = shared(DEFENSES["two_part"], CANARY)
    short = 1e-3 * torch.eye(DIM)  # no bound reaches it
    directions = 1e3 * observation.contributions(short, torch.zeros(DIM, dtype=torch.int64))[:, -2:]
    torch.testing.assert_close(directions.T @ directions, torch.eye(2), atol=1e-5, rtol=0)  # one a layer
    canary = directions.sum(dim=1) if along else rows(1, 5)[0] - directions @ directions.T @ rows(1, 5)[0]
    metrics = attacked(observation, 100 * canary[None], releases=RELEASES, seed=3)
    assert_within_three_errors(metrics["auc"], gaussian_auc(mu))
    assert_within_three_errors(metrics["tpr_at_1pct_fpr"], gaussian_tpr(mu, 0.01))


def log_ratios(kind: str, count: int) -> tuple[Tensor, Tensor]:
    """Scores of a candidate that took part and of one that did not, each in releases of the engine of its own."""
    bystander, nobody = rows(1, 8, scale=0.1), torch.zeros(1, dtype=torch.int64)
    canary = Examples(ids=torch.tensor([1]), inputs=CANARY, labels=nobody)
    found: list[list[Tensor]] = [[], []]
    for noise in range(count):
        for member in (True, False):
            batch = torch.cat([bystander, CANARY]) if member else bystander
            seen = shared(DEFENSES[kind], batch, noise=2 * noise + member, steps=3)
            others = seen.contributions(bystander, nobody)
            remainder = seen.released * seen.expected_batch - others
            target = replace(
                seen, candidates=canary, others_removed=lambda part=slice(None), left=remainder: left[part]
            )
            found[member].append(one_step_likelihood_ratio(target).scores)
    return torch.cat(found[True]), torch.cat(found[False])


@pytest.mark.slow
@each
def test_log_ratios_of_releases_of_the_engine_have_the_power_of_one_gaussian(kind):
    members, others = log_ratios(kind, 1000)
    # Lambda is N(1/2, 1) for members and N(-1/2, 1) for the others when mu is 1; five standard errors.
    for scores, mean in ((members, 0.5), (others, -0.5)):
        assert abs(scores.mean() - mean) < 5 / 1000**0.5
        assert abs(scores.var() - 1) < 5 * (2 / 1000) ** 0.5
    above = (members[:, None] > others[None]).double().mean()
    assert abs(above - AUC) < 3 * 0.0106  # standard error at 1,000 against 1,000


def image_client():
    splits = data.load("digits", seed=0)
    model = models.build("mlp", input_shape=splits.input_shape, classes=10, seed=0, hidden=8)
    return model, splits.private.inputs[:3], splits.private.labels[:3], splits


def test_without_a_defense_the_update_is_the_mean_gradient_of_the_batch():
    model, inputs, labels, _ = image_client()
    observation, truth = audit.share_update(model, inputs, labels, sgd())
    loss = torch_cross_entropy(model(inputs), labels)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(observation.released, gradient)
    assert (observation.step, observation.expected_batch, observation.batch_size, observation.classes) == (
        0,
        3.0,
        3,
        10,
    )
    assert observation.labels is not None and torch.equal(observation.labels, labels)
    assert truth.inputs is inputs and truth.labels is labels and truth.floor is None


def test_the_truth_stays_apart_from_what_is_observed():
    model, inputs, labels, splits = image_client()
    public = Examples(ids=splits.public.ids, inputs=splits.public.inputs, labels=splits.public.labels)
    history = (splits.non_member.inputs[:6], splits.non_member.labels[:6])
    observation, truth = audit.share_update(
        model, inputs, labels, dpdr(noise_multiplier=1.0), step=2, history=history, population=public
    )
    observation.simulate(public.inputs[:2], public.labels[:2])
    flat = [tensor.flatten(1) for tensor in reachable(observation) if tensor.shape[1:] == inputs.shape[1:]]
    assert any(torch.equal(tensor, public.inputs.flatten(1)) for tensor in flat)  # the search finds what is there
    for private in (inputs, history[0]):
        assert not any((tensor[:, None] == private.flatten(1)).all(2).any() for tensor in flat)
    assert not holds(observation, inputs.flatten(1))
    assert truth.floor is not None and torch.equal(truth.floor, public.inputs.mean(dim=0))


def test_the_claim_says_what_it_assumes_and_names_what_is_none_of_ours():
    model, inputs, labels, splits = image_client()
    public = Examples(ids=splits.public.ids, inputs=splits.public.inputs, labels=splits.public.labels)
    kept = simulate_share(model, inputs, labels, dpdr(noise_multiplier=1.0), population=public, noise=seeded(0))
    assert [words.split(":")[0] for words in kept.claim(1e-5).assumes] == ["the noise follows from a seed"]
    assert (kept.noise, kept.public_used, kept.remarks) == ("seeded", False, ())
    silent = simulate_share(model, inputs, labels, dp_sgd(noise_multiplier=0.0))
    assert (silent.noise, silent.claim(1e-5).assumes) == ("none", ())
    reads = simulate_share(model, inputs, labels, Defense(PublicDirections(), 1.0), population=public, noise=secure())
    claim = reads.claim(1e-5)
    assert reads.remarks == ("unverified_method",) and "method PublicDirections" in claim.unverified[0]
    assert reads.public_used and len(claim.assumes) == 2
    assert all(entry.exact for entry in reads.ledger.entries)


def test_a_batch_that_is_among_the_public_examples_is_refused():
    model, inputs, labels, splits = image_client()
    mixed = torch.cat([splits.public.inputs[:5], inputs])
    public = Examples(ids=torch.arange(8), inputs=mixed, labels=torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be none of the private ones, got 3 of 8"):
        simulate_share(model, inputs, labels, dp_sgd(noise_multiplier=1.0), population=public)


def test_history_gives_a_method_its_past():
    dim = len(shared(DEFENSES["two_part"], CANARY, step=0).released)
    assert dim == DIM
    fresh, later = shared(DEFENSES["two_part"], CANARY, step=1), shared(DEFENSES["two_part"], CANARY, step=2)
    assert len(fresh.released) == len(later.released) == DIM + 2
    assert (fresh.step, later.step) == (1, 2)
    quiet = dpdr(noise_multiplier=0.0)
    released = []
    for past in (rows(2, 1), rows(2, 2), None):
        history = None if past is None else (past, torch.zeros(2, dtype=torch.int64))
        batch, label = rows(1, 3), torch.zeros(1, dtype=torch.int64)
        observation, _ = audit.share_update(
            TwoLayers(), batch, label, quiet, public_knowledge=WORLD, step=2, history=history
        )
        released.append(observation.released)
    assert not torch.allclose(released[0], released[1])
    # With its own batch for a past, the direction is that of the gradient: nothing is left over.
    torch.testing.assert_close(released[2][:DIM], torch.zeros(DIM), atol=1e-6, rtol=0)


def test_seeds_decide_the_release_and_other_noise_is_another_release():
    sparse = DEFENSES["masked"]
    batch = rows(3, 4)
    first, again = shared(sparse, batch, seed=1), shared(sparse, batch, seed=1)
    assert torch.equal(first.released, again.released)
    assert not torch.equal(first.released, shared(sparse, batch, seed=1, noise=5).released)
    assert not torch.equal(first.released, shared(sparse, batch, seed=2).released)
    unseeded = [
        audit.share_update(TwoLayers(), batch, torch.zeros(3, dtype=torch.int64), sparse, public_knowledge=WORLD)[
            0
        ].released
        for _ in range(2)
    ]
    assert not torch.equal(*unseeded)  # keyed by the operating system


def test_microbatches_change_nothing_and_the_model_is_left_as_it_is():
    model, inputs, labels, _ = image_client()
    before = [parameter.clone() for parameter in model.parameters()]
    model.train()
    settings = {"step": 2, "lr": 1.0}
    whole, _ = audit.share_update(model, inputs, labels, dp_sgd(noise_multiplier=1.0), noise=seeded(1), **settings)
    cut, _ = audit.share_update(
        model,
        inputs,
        labels,
        dp_sgd(noise_multiplier=1.0),
        noise=seeded(1),
        execution=Execution(microbatch=1),
        **settings,
    )
    torch.testing.assert_close(whole.released, cut.released, rtol=1e-4, atol=1e-6)
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class PublicDirections(Stateless):
    """The directions of four public gradients."""

    def plan(self, context):
        return StepPlan(Block(codec=Subspace.of(torch.linalg.qr(context.public_rows(4).T).Q), bound=clip(1.0)))


def test_several_inputs_are_refused():
    inputs: Any = {"words": torch.zeros(2, 4), "mask": torch.ones(2, 4)}
    sentence = "inputs of a shared update must be one tensor, got dict|parameter 'inputs'"
    with pytest.raises((ValueError, TypeCheckError), match=sentence):
        simulate_share(nn.Linear(4, 2), inputs, torch.zeros(2).long(), dp_sgd(noise_multiplier=1.0))


def test_public_examples_reach_methods_that_use_them():
    people = Examples(ids=torch.arange(6), inputs=rows(6, 9), labels=torch.zeros(6, dtype=torch.int64))
    observation = shared(Defense(PublicDirections(), noise_multiplier=0.0), rows(2, 4), population=people)
    assert len(observation.released) == 4
    few = replace(people, ids=people.ids[:2], inputs=people.inputs[:2], labels=people.labels[:2])
    with pytest.raises(ValueError, match="public data must have at least 4 examples, got 2"):
        shared(Defense(PublicDirections(), noise_multiplier=0.0), rows(2, 4), population=few)
    with pytest.raises(ValueError, match="needs public data, got none"):
        shared(Defense(PublicDirections(), noise_multiplier=0.0), rows(2, 4))


@pytest.mark.long
def test_three_lines_share_attack_and_score():
    splits = data.load("photos", seed=0)
    model = models.build("convnet", input_shape=splits.input_shape, classes=splits.classes, seed=0)
    public = Examples(ids=splits.public.ids, inputs=splits.public.inputs, labels=splits.public.labels)
    inputs, labels = splits.private.inputs[:1], splits.private.labels[:1]

    observation, truth = audit.share_update(model, inputs, labels, sgd(), population=public)
    result = inverting_gradients(observation, torch.Generator().manual_seed(0), iterations=60)
    metrics = audit.score(result, truth)

    psnr, floor = metrics["psnr"].value, metrics["psnr_floor"].value
    assert psnr is not None and floor is not None and psnr > floor + 3


@subtests(
    ("change", "sentence"),
    [
        ({"defense": dp_sgd()}, "noise_multiplier of 'dp_sgd' must be set before it runs, got None; give one"),
        ({"inputs": torch.zeros(0, 20)}, "inputs and labels must have one length above 0, got 0 and 3"),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, "inputs and labels must have one length above 0, got 3 and 2"),
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"step": 3, "steps": 3}, r"step must be in \[0, 3\), got 3"),
        (
            {"history": (torch.zeros(0, 20), torch.zeros(0, dtype=torch.int64))},
            "history must be .* of one length above 0, got 0 and 0",
        ),
        ({"execution": Execution(microbatch=0)}, "microbatch must be at least 1 or None, got 0"),
    ],
)
def test_a_mistake_is_one_sentence(change, sentence):
    arguments = {
        "model": TwoLayers(),
        "inputs": rows(3, 1),
        "labels": torch.zeros(3, dtype=torch.int64),
        "defense": dp_sgd(noise_multiplier=1.0),
        "public_knowledge": WORLD,
    }
    with pytest.raises(ValueError, match=sentence):
        audit.share_update(**arguments | change)


@pytest.mark.parametrize("moved", ["labels", "history", "population"])
def test_data_on_another_device_than_the_inputs_are_refused_in_one_sentence(accelerator, moved):
    labels = torch.zeros(3, dtype=torch.int64)
    others = {
        "labels": labels.to(accelerator),
        "history": (rows(3, 2).to(accelerator), labels.to(accelerator)),
        "population": Examples(
            ids=torch.arange(3).to(accelerator), inputs=rows(3, 3).to(accelerator), labels=labels.to(accelerator)
        ),
    }
    given = {"labels": labels, "public_knowledge": WORLD, moved: others[moved]}
    told = f"{moved} must be on the device of inputs, cpu, got {accelerator}; move the tensors with .to('cpu')"
    with pytest.raises(ValueError, match=re.escape(told)):
        audit.share_update(TwoLayers(), rows(3, 1), defense=dp_sgd(noise_multiplier=1.0), **given)
    given["execution"] = Execution(device="cpu")
    assert audit.share_update(TwoLayers(), rows(3, 1), defense=dp_sgd(noise_multiplier=1.0), **given)


def test_a_model_with_batch_norm_is_refused_with_the_way_out():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))
    _, inputs, labels, _ = image_client()
    with pytest.raises(ValueError, match=r"BatchNorm.*group_norm_instead"):
        audit.share_update(model, inputs, labels, dp_sgd(noise_multiplier=1.0))
    observation, _ = audit.share_update(group_norm_instead(model), inputs, labels, dp_sgd(noise_multiplier=1.0))
    assert observation.released.isfinite().all()
