"""Several local steps of a client: their sum is that of a loop by hand, what it costs, and who may not share it."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakbench import audit
from leakbench.attacks.bias_division import bias_division
from leakbench.attacks.core import Attack, Examples, NotApplicable, Observation
from leakbench.attacks.inverting_gradients import inverting_gradients
from leakbench.attacks.label_recovery import label_recovery
from leakbench.attacks.r_gap import r_gap
from leakbench.attacks.sme import sme
from leakbench.attacks.spear import spear
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.targets import simulated_update
from leakbench.audit.targets.local_steps import LocalTraining, LocalUpdate, why_not_summed
from leakbench.audit.targets.simulated_update import simulate_share
from leakbench.defenses.core import Context, Defense, Ledger, full, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.sgd import sgd

from ...parameters import subtests
from .test_observe import holds, reachable

LR = 0.3
TWICE = LocalTraining(epochs=2, batch=2)  # of the four examples below: four steps
SHAPE, CLASSES = (1, 4, 4), 3


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, CLASSES)).double()


def data(count: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, torch.arange(count) % CLASSES


def public() -> Examples:
    inputs, labels = data(40, seed=9)
    return Examples(ids=torch.arange(40), inputs=inputs, labels=labels)


def shared(defense: Defense, local: LocalTraining | None = TWICE, *, count: int = 4, **settings) -> Observation:
    settings = {"lr": LR, "noise": seeded(0), "population": public()} | settings
    return audit.share_update(net(), *data(count), defense, local=local, **settings)[0]


def by_hand(local: LocalTraining, clip_norm: float = math.inf) -> Tensor:
    """(theta_0 - theta_E) / lr by a loop over epochs, batches and examples."""
    model, (inputs, labels) = net(), data()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    for _ in range(local.epochs):
        for x, y in zip(inputs.split(local.batch), labels.split(local.batch), strict=True):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for one, label in zip(x, y, strict=True):
                gradient = torch.autograd.grad(cross_entropy(model(one[None]), label[None]), list(model.parameters()))
                norm = torch.cat([g.flatten() for g in gradient]).norm()
                total = [t + g * min(1.0, clip_norm / float(norm)) for t, g in zip(total, gradient, strict=True)]
            with torch.no_grad():
                for p, t in zip(model.parameters(), total, strict=True):
                    p -= LR * t / local.batch
    return (start - torch.cat([p.detach().flatten() for p in model.parameters()])) / LR


@subtests("epochs", [1, 2])
@subtests(("defense", "clip_norm"), [(sgd(), math.inf), (dp_sgd(clip_norm=0.4), 0.4)])
def test_the_released_sum_is_that_of_a_loop_by_hand(epochs, defense, clip_norm):
    local = LocalTraining(epochs=epochs, batch=2)
    seen, expected = shared(defense.with_noise(0.0), local), by_hand(local, clip_norm)
    assert torch.allclose(seen.released, expected, rtol=0, atol=1e-13)
    # The steps count: all of them at the first weights give something else.
    assert (seen.released - by_hand(LocalTraining(batch=4), clip_norm) * 2 * epochs).norm() > 1e-2


@subtests(
    "defense",
    [
        dp_sgd(clip_norm=0.4, noise_multiplier=1.3),
        random_sparsification(clip_norm=0.4, final_sparsity=0.6, noise_multiplier=0.7),
    ],
)
def test_one_local_step_is_one_shared_step_to_the_last_digit(defense):
    inputs, labels = data()
    one, other = (
        simulate_share(net(), inputs, labels, defense, lr=LR, step=1, noise=seeded(3), local=local)
        for local in (None, LocalTraining(batch=4))
    )
    assert torch.equal(one.observation.released, other.observation.released)
    assert one.claim(1e-5) == other.claim(1e-5)
    assert other.observation.surrogate is None


SUMMED = (
    "dp_sgd", "random_sparsification", "random_pruning", "posterior_freeze", "per_layer", "rpdp", "psac", "noisy_sgd"
)  # fmt: skip


@subtests("name", SUMMED)
def test_without_noise_the_same_data_simulate_what_was_released(name):
    inputs, labels = data()
    seen = shared(catalog.defense(name, {}).with_noise(0.0))
    assert torch.allclose(seen.simulate(inputs, labels), seen.released, rtol=0, atol=1e-12)
    assert not seen.residual(seen.released).any()
    as_shares = torch.eye(CLASSES, dtype=torch.float64)[labels]
    assert torch.allclose(seen.simulate(inputs, as_shares), seen.released, rtol=0, atol=1e-12)


def test_simulated_steps_are_differentiable_in_inputs_and_the_surrogate_in_its_share_too():
    (inputs, labels), seen = data(), shared(dp_sgd(clip_norm=0.4, noise_multiplier=0.0))
    assert seen.surrogate is not None
    weights = torch.randn(len(seen.released), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    surrogate = seen.surrogate
    for count in (1, 4):  # a batch of one goes another way
        x, y = inputs[:count].clone().requires_grad_(), labels[:count]
        share = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(lambda x, y=y: seen.simulate(x, y) @ weights, (x,), fast_mode=True)
        torch.autograd.gradcheck(lambda x, a, y=y: surrogate(x, y, a) @ weights, (x, share), fast_mode=True)
        (moved,) = torch.autograd.grad(surrogate(x, y, share) @ weights, share)
        assert moved.abs() > 1e-6


@pytest.mark.parametrize("name", ["dp_sgd", "random_pruning", "random_sparsification"])
def test_a_surrogate_is_every_step_at_one_point(name, monkeypatch):
    defense, (inputs, labels) = catalog.defense(name, {}).with_noise(0.0), data()
    seen = shared(defense)
    assert seen.surrogate is not None
    # At so small a learning rate that no step moves: the steps as they are.
    still = shared(defense, lr=1e-13)
    start, end = (seen.surrogate(inputs, labels, torch.tensor(a, dtype=torch.float64)) for a in (0.0, 1.0))
    assert torch.allclose(start, still.released, rtol=0, atol=1e-10)
    assert (start - end).norm() > 1e-3 * start.norm()
    # Equal plans are taken together; the long way round is the same.
    monkeypatch.setattr(LocalUpdate, "_are_linear", False)
    again = shared(defense).surrogate
    assert again is not None
    assert torch.allclose(again(inputs, labels, torch.tensor(1.0, dtype=torch.float64)), end, rtol=0, atol=1e-12)


def test_coordinates_that_a_fixed_mask_holds_do_not_count():
    dense, pruned = shared(sgd()), shared(catalog.defense("random_pruning", {}).with_noise(0.0))
    assert dense.released.numel() == sum(p.numel() for p in net().parameters())
    assert 0 < pruned.released.numel() < dense.released.numel()
    assert (pruned.released != 0).double().mean() > 0.5  # ReLUs are off for the rest


@pytest.mark.long
@subtests("name", SUMMED)
def test_the_residual_is_in_units_of_the_noise_of_all_steps(name):
    # Noise of one step moves the gradients of the next; at a small learning rate hardly.
    (inputs, labels), defense = data(), catalog.defense(name, {}).with_noise(2.0)
    draws = [shared(defense, lr=1e-7, noise=seeded(seed)) for seed in range(12)]
    scale = torch.stack([seen.residual(seen.simulate(inputs, labels)) for seen in draws]).square().mean().sqrt()
    # Of 12 draws of a hundred numbers and more: 5 standard errors are within, and 2/3 or 3/2 of the noise are not.
    assert 0.8 < scale < 1.22


def test_the_deviation_of_the_noise_grows_with_the_root_of_the_steps():
    seen = shared(dp_sgd(clip_norm=0.4, noise_multiplier=2.0))
    assert seen.noise_std is not None
    # On the sum times the batch: sigma C sqrt(4).
    assert torch.allclose(seen.noise_std, torch.full_like(seen.noise_std, 2.0 * 0.4 * 2))


@subtests("batch", [2, 4])
def test_an_example_pays_for_the_steps_that_it_is_in_one_an_epoch(batch):
    defense = dp_sgd(clip_norm=0.4, noise_multiplier=2.0)
    found = simulate_share(net(), *data(), defense, local=LocalTraining(epochs=3, batch=batch), noise=seeded(0))
    assert found.ledger.steps == 3 * 4 // batch
    composed = Ledger(full())
    _, plan = defense.plan(None, Context(step=0, steps=3, dim=5))
    for step in range(3):
        composed.record(plan.at(2.0), step=step)
    assert found.claim(1e-5).epsilon == pytest.approx(composed.claim(1e-5).epsilon, rel=1e-9)


@subtests(
    ("name", "reads"),
    [
        ("dpdr", "follows from what the earlier ones released"),
        ("ranked", "follows from what the earlier ones released"),
        ("pcdp", "reads public gradients at the parameters between them"),
        ("diff", "reads the update of the step before"),
        ("magnitude_dropping", "reads the parameters between them"),
        ("band_mf", "has noise of the steps before"),
        ("dpsur", "is tried, and may be taken back"),
    ],
)
def test_plans_that_a_server_cannot_know_are_refused_before_anything_is_computed(name, reads, monkeypatch):
    defense = catalog.defense(name, {"rank": 3} if name == "pcdp" else {}).with_noise(1.0)
    sentence = f"'{name}' cannot be shared as the sum of 4 local steps, because a later one {reads}"
    assert why_not_summed(defense, TWICE, 4).startswith(sentence)
    assert why_not_summed(defense, LocalTraining(batch=4), 4) == ""  # one step
    monkeypatch.setattr(simulated_update.Engine, "run", lambda *_: pytest.fail("something was computed"))
    with pytest.raises(ValueError, match=f"^{sentence}; share single steps"):
        shared(defense)


def test_a_basis_of_public_data_that_all_steps_use_is_no_secret():
    defense = catalog.defense("pcdp", {"rank": 3, "interval": 8}).with_noise(0.0)
    assert why_not_summed(defense, TWICE, 4) == ""
    (inputs, labels), seen = data(), shared(defense)
    assert torch.allclose(seen.simulate(inputs, labels), seen.released, rtol=0, atol=1e-12)


def test_local_steps_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^batch of local steps must divide the client's 4 examples, got 3$"):
        shared(sgd(), LocalTraining(batch=3))
    with pytest.raises(ValueError, match=r"^step must begin an epoch, a multiple of the 2 local steps of one, got 1$"):
        shared(sgd(), step=1)
    for name in ("epochs", "batch", "max_unroll"):
        with pytest.raises(ValueError, match=f"^{name} of local steps must be at least 1, got 0$"):
            LocalTraining(**{"batch": 2, name: 0})


def test_a_client_may_share_local_steps_later_in_its_training():
    first, later = shared(sgd(), step=0), shared(sgd(), step=2)
    assert (first.step, later.step) == (0, 2)
    inputs, labels = data()
    assert torch.allclose(later.simulate(inputs, labels), later.released, rtol=0, atol=1e-12)
    assert not torch.allclose(first.released, later.released)


def test_more_steps_than_are_unrolled_are_left_to_sme():
    seen = shared(sgd(), LocalTraining(epochs=2, batch=2, max_unroll=3))
    coins = torch.Generator().manual_seed(0)
    with pytest.raises(NotApplicable, match=r"unrolling 4 local steps .* allows 3; sme needs one gradient"):
        inverting_gradients(seen, coins, iterations=2)
    assert sme(seen, coins, iterations=2).inputs.isfinite().all()


@subtests("closed_form", [r_gap, spear, bias_division, label_recovery])
def test_closed_forms_read_one_gradient_and_say_that_this_is_none(closed_form: Attack):
    one_image = LocalTraining(epochs=3, batch=1)
    count = 1 if closed_form in (r_gap, bias_division) else 4
    with pytest.raises(NotApplicable, match=r"sum of .* local steps"):
        closed_form(shared(sgd(), one_image, count=count), torch.Generator().manual_seed(0))
    with pytest.raises(NotApplicable, match="no sum over examples"):
        shared(sgd()).contributions(*data())


def test_the_server_sees_the_sum_and_nothing_between_or_private(monkeypatch):
    real, taken = simulated_update.observe_local, []
    monkeypatch.setattr(
        simulated_update, "observe_local", lambda steps, *a, **k: (taken.extend(steps), real(steps, *a, **k))[1]
    )
    inputs, labels = data()
    defense = dp_sgd(noise_multiplier=1.0)
    observation, truth = audit.share_update(net(), inputs, labels, defense, local=TWICE, lr=LR, noise=seeded(1))
    top_rows = inputs[:, 0, 0]
    assert holds(truth, top_rows)  # the search finds what is there
    assert not holds(observation, top_rows)
    start, *between = (step.parameters for step in taken)
    between += [part for step in taken for part in (step.noisy or ())]
    reached = [tensor.flatten().double() for tensor in reachable(observation) if tensor.numel() == start.numel()]
    assert len(between) == 3 + 4 and any(torch.equal(tensor, start) for tensor in reached)
    assert not any(torch.allclose(tensor, one, atol=1e-9) for tensor in reached for one in between)


def test_the_model_that_is_asked_is_the_one_that_was_sent():
    inputs, _ = data()
    assert torch.equal(shared(sgd()).logits(inputs), net()(inputs))


@subtests("share", [0.0, 0.25, 1.0])
def test_what_an_example_adds_at_a_point_between_is_its_bounded_gradient_there(share):
    update = shared(dp_sgd(clip_norm=0.4, noise_multiplier=0.0))
    assert update.contributions_between is not None
    model, (inputs, labels) = net(), data(6, seed=4)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    nn.utils.vector_to_parameters(start - share * LR * update.released, model.parameters())
    found = update.contributions_between(inputs, labels, torch.tensor(share, dtype=torch.float64))
    rows = []
    for x, y in zip(inputs, labels, strict=True):
        loss = cross_entropy(model(x[None]), y[None])
        row = torch.cat([g.flatten() for g in torch.autograd.grad(loss, tuple(model.parameters()))])
        rows.append(row * min(1.0, 0.4 / float(row.norm())))
    torch.testing.assert_close(found, torch.stack(rows))


def test_small_steps_add_up_to_what_their_examples_add_at_the_start():
    for defense in (
        dp_sgd(clip_norm=0.4, noise_multiplier=0.0),
        random_sparsification(clip_norm=0.4, final_sparsity=0.5, noise_multiplier=0.0),
    ):
        update = shared(defense, LocalTraining(epochs=1, batch=2), lr=1e-6)
        assert update.contributions_between is not None
        rows = update.contributions_between(*data(), torch.tensor(0.0, dtype=torch.float64))
        assert rows.shape == (4, len(update.released))
        torch.testing.assert_close(rows.sum(0), update.released * update.expected_batch, rtol=1e-4, atol=1e-6)
