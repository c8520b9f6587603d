"""What is particular to SPEAR: exact batches, masks, clipping, patches, and certificates that are never false."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from leakbench.attacks.core import (
    Examples,
    Network,
    NotApplicable,
    Observation,
    Operation,
    RankDeficient,
    Reconstruction,
    ReleasedPart,
    Structure,
)
from leakbench.attacks.core.closed_form.keep_rate import random_update, recovered_share
from leakbench.attacks.core.closed_form.low_rank import completed, factorised, rounding_floor
from leakbench.attacks.spear import spear

from ..parameters import subtests
from . import toys


def errors(found: Tensor, true: Tensor) -> Tensor:
    """MSE of each true input to the nearest found one."""
    return (found.flatten(1)[:, None] - true.flatten(1)[None]).square().mean(dim=2).amin(dim=0)


def false_certificates(result: Reconstruction, true: Tensor, within: float = 1e-12) -> int:
    assert result.certified is not None
    nearest = errors(true, result.inputs)
    return int((result.certified & (nearest > within)).sum())


def answered(update: Observation, seed: int = 1, **settings: int) -> Reconstruction | None:
    """The result, or None where too few directions were found to answer at all."""
    try:
        return spear(update, toys.generator(seed), **settings)
    except RankDeficient as refused:
        assert refused.deficit > 0
        return None


def whole(result: Reconstruction) -> bool:
    return result.certified is not None and bool(result.certified.all())


@pytest.mark.parametrize(
    ("batch", "width", "inputs"),
    [(1, 50, 40), (4, 200, 100), (8, 200, 100), pytest.param(15, 300, 400, marks=pytest.mark.slow)],
)
def test_every_input_of_a_batch_is_exact_and_certified(batch, width, inputs):
    update, shared = random_update(batch, width=width, inputs=inputs, seed=batch)
    result = spear(update, toys.generator(1))
    assert errors(result.inputs, shared.inputs).max() < 1e-20
    assert len(result.inputs) == batch and whole(result)
    assert result.objective == 0 and result.status == "ok"
    assert sorted(result.labels.tolist()) == sorted(shared.labels.tolist())


def test_clipping_of_each_example_changes_nothing():
    free, shared = random_update(6, width=200, inputs=100, seed=2)
    clipped, _ = random_update(6, width=200, inputs=100, seed=2, clip_norm=1e-3)
    assert clipped.released.norm() < 1e-2 * free.released.norm()
    for update in (free, clipped):
        result = spear(update, toys.generator(1))
        assert errors(result.inputs, shared.inputs).max() < 1e-20 and whole(result)


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_a_known_mask_hides_nothing_while_enough_is_kept(keep):
    update, shared = random_update(5, width=200, inputs=100, keep=keep, clip_norm=0.1, seed=3)
    result = spear(update, toys.generator(1))
    assert errors(result.inputs, shared.inputs).max() < 1e-20
    assert result.objective == 0 and whole(result)


def test_a_mask_that_leaves_fewer_entries_than_unknowns_is_not_attacked():
    update, _ = random_update(5, width=100, inputs=50, keep=0.05, seed=3)
    with pytest.raises(NotApplicable, match="released entries of the layer's gradient must complete"):
        spear(update, toys.generator(1))


def test_in_float32_the_inputs_are_exact_to_its_digits():
    update, shared = random_update(6, width=200, inputs=100, seed=4, dtype=torch.float32)
    result = spear(update, toys.generator(1))
    assert result.inputs.dtype == torch.float32
    assert errors(result.inputs, shared.inputs).max() < 1e-8 and whole(result)


@subtests("relative", [1e-6, 1e-3, 1e-1])
@subtests("dtype", [torch.float64, torch.float32])
def test_nothing_is_certified_under_noise(relative, dtype):
    size = random_update(4, width=200, inputs=100, seed=5)[0].released.square().mean().sqrt().item()
    # Below what float32 rounds there is no noise to see.
    noise = size * max(relative, 1e-4 if dtype == torch.float32 else 0.0)
    update, _ = random_update(4, width=200, inputs=100, seed=5, noise=noise, dtype=dtype)
    result = answered(update, draws=512)
    assert result is None or (result.certified is not None and not result.certified.any())


@pytest.mark.long
def test_under_little_noise_inputs_are_found_and_noise_decides_how_well():
    found = []
    for relative in (1e-3, 1e-2):
        size = random_update(4, width=400, inputs=100, seed=6)[0].released.square().mean().sqrt().item()
        update, shared = random_update(4, width=400, inputs=100, seed=6, noise=relative * size)
        found.append(float(errors(spear(update, toys.generator(1), draws=2048).inputs, shared.inputs).max()))
    assert found[0] < 1e-3 and found[0] < found[1] < 0.1


@pytest.mark.long
@pytest.mark.parametrize(("keep", "most"), [pytest.param(0.5, 3e-6, marks=pytest.mark.slow), (0.2, 3e-5)])
def test_under_noise_a_masked_gradient_is_completed_as_well_as_its_entries_are_known(keep, most):
    found = []
    for relative in (1e-3, 1e-2):
        size = random_update(4, width=200, inputs=100, seed=1)[0].released[:20000].square().mean().sqrt().item()
        update, shared = random_update(4, width=200, inputs=100, seed=1, keep=keep, noise=relative * size)
        result = spear(update, toys.generator(1), draws=1024)
        assert result.status == "degraded" and result.certified is not None and not result.certified.any()
        found.append(float(errors(result.inputs, shared.inputs).max()))
    # A hundredth of the noise's variance, and noise decides how well.
    assert found[0] < most and 30 < found[1] / found[0] < 300


@pytest.mark.long
def test_entries_that_are_mostly_noise_complete_to_nothing():
    update, _ = random_update(4, width=100, inputs=50, seed=1, keep=0.3, noise=1.0)
    with pytest.raises(NotApplicable, match="predicts entries that were held out"):
        spear(update, toys.generator(1))


def test_noise_alone_is_no_batch():
    update, _ = random_update(2, width=60, inputs=50, seed=7, noise=1e4)
    with pytest.raises(NotApplicable, match="no direction that stands out"):
        spear(update, toys.generator(1))


def test_of_a_decoy_nothing_of_the_target_is_certified():
    """The update is of another batch: what is certified is in that one."""
    update, decoy = random_update(4, width=200, inputs=100, seed=8)
    target = torch.randn(4, 100, generator=toys.generator(80), dtype=torch.float64)
    result = spear(update, toys.generator(1))
    assert false_certificates(result, decoy.inputs) == 0
    assert errors(result.inputs, target).min() > 0.1


def test_a_matrix_of_low_rank_that_is_no_gradient_certifies_nothing():
    """Sparse columns, exact rank, a bias gradient that fits: all but the network."""
    for rank in (1, 4):
        update, _ = random_update(rank, width=200, inputs=100, seed=9)
        coins = toys.generator(90)
        columns = torch.randn(200, rank, generator=coins).double() * (torch.rand(200, rank, generator=coins) < 0.5)
        rows = torch.randn(rank, 100, generator=coins).double()
        forged = update.released.clone()
        forged[:20000], forged[20000:20200] = (columns @ rows).flatten(), columns.sum(dim=1)
        result = spear(replace(update, released=forged), toys.generator(1), draws=1024)
        assert result.certified is not None and not result.certified.any()


def test_one_changed_number_takes_the_certificates_away():
    update, _ = random_update(4, width=200, inputs=100, seed=10)
    released = update.released.clone()
    released[1234] *= 1.001
    result = answered(replace(update, released=released), draws=512)
    assert result is None or (result.certified is not None and not result.certified.any())


def test_too_few_draws_are_degraded_or_refused_and_certify_nothing_false():
    degraded = 0
    for seed in range(4):
        update, shared = random_update(12, width=200, inputs=100, seed=seed)
        result = answered(update, seed, draws=600)
        if result is not None:
            degraded += 1
            assert result.status == "degraded"
            assert false_certificates(result, shared.inputs) == 0
    assert degraded < 4
    with pytest.raises(RankDeficient, match=r"single out the 12 directions of the gradient, and those of 20 draws"):
        spear(random_update(12, width=200, inputs=100)[0], toys.generator(0), draws=20)


def alike(batch: int, spread: float, *, seed: int) -> tuple[Observation, Examples, float]:
    """An update of inputs near 1, which turn most neurons on for all or for none, and the share of the first."""
    update, drawn = random_update(batch, width=200, inputs=100, seed=seed)
    x = 1 + spread * drawn.inputs
    assert update.structure is not None
    values = update.structure().known_network().parameters
    on = x @ values["0.weight"].T + values["0.bias"] > 0
    shared = Examples(ids=drawn.ids, inputs=x, labels=drawn.labels)
    return (
        replace(update, released=update.simulate(x, drawn.labels)),
        shared,
        float(on.all(dim=0).sum() / on.any(dim=0).sum()),
    )


@pytest.mark.long
@subtests("spread, seed, share", [(0.5, 1, 0.38), (0.3, 1, 0.55), (0.2, 2, 0.69)])
def test_neurons_that_are_on_for_all_eight_examples_do_not_hide_them(spread, seed, share):
    update, shared, on = alike(8, spread, seed=seed)
    assert on == pytest.approx(share, abs=0.01)
    result = spear(update, toys.generator(1), draws=2**17)
    assert errors(result.inputs, shared.inputs).max() < 1e-20 and whole(result)


def test_a_batch_that_no_neuron_tells_apart_is_refused():
    update, _, on = alike(8, 0.05, seed=2)
    assert on > 0.9
    with pytest.raises(RankDeficient, match="too many neurons of layer 0 are on for the whole batch") as refused:
        spear(update, toys.generator(1), draws=2**13)
    assert 0 < refused.value.deficit <= 8


def test_an_input_that_is_in_the_batch_twice_is_found_and_counted():
    update, shared = random_update(4, width=200, inputs=100, seed=11)
    x, y = shared.inputs[[0, 1, 2, 2]], shared.labels[[0, 1, 2, 2]]
    result = spear(replace(update, released=update.simulate(x, y)), toys.generator(1))
    assert errors(result.inputs, x).max() < 1e-20 and len(result.inputs) == 4
    # As a sum it might be that of two neighbours.
    assert result.certified is not None and int(result.certified.sum()) == 2 and result.status == "degraded"
    # Under two labels it is in the sum once, by another gradient than that of either: found, and not proved.
    other = y.clone()
    other[3] = (y[3] + 1) % 10
    result = spear(replace(update, released=update.simulate(x, other)), toys.generator(1), draws=512)
    assert errors(result.inputs, x).max() < 1e-20
    assert result.certified is not None and int(result.certified.sum()) == 2


@pytest.mark.parametrize(("sure", "spread"), [(1.0, 1e-4), (30.0, 0.02)])
def test_neighbours_whose_sum_is_that_of_twice_their_mean_are_not_certified_as_it(sure, spread):
    """Of two classes all columns point one way, and of a network that is sure they are equally long, too."""
    update, shared = random_update(1, width=40, inputs=20, classes=2, seed=1)
    assert update.structure is not None
    values = update.structure().known_network().parameters
    values["2.weight"].mul_(sure)
    step = spread * torch.randn(20, generator=toys.generator(5), dtype=torch.float64)
    inputs = torch.stack([shared.inputs[0] + step, shared.inputs[0] - step])
    before = inputs @ values["0.weight"].T + values["0.bias"]
    logits = before.relu() @ values["2.weight"].T + values["2.bias"]
    assert torch.equal(before[0] > 0, before[1] > 0)
    result = spear(replace(update, released=update.simulate(inputs, logits.argmin(dim=1))), toys.generator(1))
    assert errors(result.inputs, shared.inputs).max() < 1e-12 and errors(result.inputs, inputs).min() > 1e-10
    assert result.status == "degraded" and result.certified is not None and not result.certified.any()


@subtests("seed", [1, 2, 4])
def test_mixtures_of_examples_for_which_the_same_neurons_are_on_are_told_though_lambda_is_1(seed):
    update, shared = random_update(3, width=20, inputs=30, seed=seed)
    inputs = shared.inputs.clone()
    inputs[1] = 2 * inputs[0]
    update = replace(update, released=update.contributions(inputs, shared.labels).sum(dim=0))
    result = spear(update, toys.generator(1), draws=1024)
    assert result.objective == 0 and errors(inputs, result.inputs).max() > 1e-3
    assert result.status == "degraded" and result.certified is not None and not result.certified.any()


@subtests("dtype", [torch.float32, torch.float64])
@subtests("batch", [2, 4])
def test_a_mean_of_examples_is_not_taken_for_copies_where_the_loss_is_saturated(batch, dtype):
    """Both are taken for another class for certain, and the same neurons are on: their sum is twice their mean's."""
    update, shared = random_update(batch, width=200, inputs=100, seed=1, dtype=dtype)
    assert update.structure is not None
    values = update.structure().known_network().parameters
    values["2.bias"][0] += 200
    inputs, labels = shared.inputs.clone(), torch.tensor([1, 1, 2, 3])[:batch]
    before = inputs[0] @ values["0.weight"].T + values["0.bias"]
    values["0.bias"].add_(0.4 * before.sign())
    inputs[1] = inputs[0] + 0.1 * inputs[1]
    update = replace(update, released=update.contributions(inputs, labels).sum(dim=0))
    result = spear(update, toys.generator(1), draws=4096)
    assert errors(result.inputs, inputs)[:2].min() > 1e-3
    assert result.status == "degraded" and false_certificates(result, inputs) == 0


def test_a_batch_as_large_as_the_layer_is_not_taken_apart():
    update, shared = random_update(60, width=60, inputs=50, seed=12)
    try:
        result = spear(update, toys.generator(1), draws=256)
    except NotApplicable:
        return
    assert false_certificates(result, shared.inputs) == 0


def test_an_input_column_that_was_not_released_is_said_to_be_a_guess():
    update, shared = random_update(3, width=100, inputs=50, seed=13)
    structure = update.structure
    assert structure is not None
    at = torch.arange(len(update.released))
    kept = at[~((at < 5000) & (at % 50 == 7))]
    part = replace(structure().parts[0], stop=len(kept), coordinates=kept)
    less = replace(
        update,
        released=update.released[kept],
        contributions=lambda x, y: update.contributions(x, y)[:, kept],
        structure=lambda: replace(structure(), parts=(part,)),
    )
    result = spear(less, toys.generator(1), draws=512)
    assert result.determined is not None and not result.determined[:, 7].any() and result.determined[:, 8].all()
    assert result.certified is not None and not result.certified.any()
    known = torch.arange(50) != 7
    assert errors(result.inputs[:, known], shared.inputs[:, known]).max() < 1e-3


def test_a_pixel_that_only_silent_neurons_show_is_a_guess_and_no_certificate_covers_it():
    update, shared = random_update(1, width=100, inputs=50, seed=13)
    structure = update.structure
    assert structure is not None
    # Nothing behind looks at the pixel, so that its contribution says nothing of it either.
    structure().known_network().parameters["0.weight"][:, 7] = 0
    released = update.simulate(shared.inputs, shared.labels)
    at, silent = torch.arange(len(released)), released[5000:5100] == 0
    kept = at[~((at < 5000) & (at % 50 == 7) & ~silent[(at // 50).clamp(max=99)])]
    part = replace(structure().parts[0], stop=len(kept), coordinates=kept)
    less = replace(
        update,
        released=released[kept],
        contributions=lambda x, y: update.contributions(x, y)[:, kept],
        structure=lambda: replace(structure(), parts=(part,)),
    )
    result = spear(less, toys.generator(1))
    assert result.certified is not None and not result.certified.any()
    assert result.determined is not None and not result.determined[:, 7].any()
    known = torch.arange(50) != 7
    assert result.determined[:, known].all() and errors(result.inputs[:, known], shared.inputs[:, known]).max() < 1e-20


def test_parts_that_were_bounded_apart_are_refused():
    update, _ = random_update(3, width=100, inputs=50, seed=14)
    structure = update.structure
    assert structure is not None
    at = torch.arange(len(update.released))
    parts = (
        ReleasedPart(start=0, stop=5000, kind="coordinates", coordinates=at[:5000]),
        ReleasedPart(start=5000, stop=len(at), kind="coordinates", coordinates=at[5000:]),
    )
    apart = replace(update, structure=lambda: replace(structure(), parts=parts))
    with pytest.raises(NotApplicable, match="must be bounded together"):
        spear(apart, toys.generator(1))


@subtests(
    "change, sentence",
    [
        ({"kind": "tanh"}, "must have a ReLU behind it, and the network has none|cannot be undone"),
        ({"bias": None}, "must have a bias"),
    ],
)
def test_networks_that_it_cannot_invert_are_refused(change, sentence):
    update, _ = random_update(2, width=30, inputs=20, seed=15)
    structure = update.structure
    assert structure is not None and structure().network is not None
    network = structure().known_network()
    at = 2 if "kind" in change else 1
    operations = list(network.operations)
    operations[at] = replace(operations[at], **change)
    other = replace(structure(), network=replace(network, operations=tuple(operations)))
    with pytest.raises(NotApplicable, match=sentence):
        spear(replace(update, structure=lambda: other), toys.generator(1))


def layered(
    model: nn.Sequential, kinds: list[dict], batch: Examples, low: float = 0.0, high: float = 1.0
) -> Observation:
    """The update of any chain of layers, with its equations."""
    names = [name for name, _ in model.named_parameters()]
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (one[None],)), label[None])

    def contributions(x: Tensor, y: Tensor) -> Tensor:
        found = vmap(grad(loss), in_dims=(None, 0, 0))(values, x, y)
        return torch.cat([found[name].flatten(1) for name in names], dim=1)

    operations = [Operation(name="input", kind="input", inputs=(), shape=tuple(batch.inputs.shape[1:]))]
    passing = batch.inputs[:1]
    for (name, layer), about in zip(model.named_children(), kinds, strict=True):
        passing = layer(passing)
        own = {"weight": f"{name}.weight", "bias": f"{name}.bias"} if hasattr(layer, "weight") else {}
        operations.append(
            Operation(
                name=name, inputs=(operations[-1].name,), shape=tuple(passing.shape[1:]), words=name, **own, **about
            )
        )
    released = contributions(batch.inputs, batch.labels).sum(dim=0).detach()
    part = ReleasedPart(start=0, stop=len(released), kind="coordinates", coordinates=torch.arange(len(released)))
    network = Network(operations=tuple(operations), parameters=values, loss="cross_entropy")
    shapes = tuple(tuple(value.shape) for value in values.values())
    structure = Structure(network=network, names=tuple(names), shapes=shapes, parts=(part,))
    return Observation(
        released=released,
        simulate=lambda x, y: contributions(x, y).sum(dim=0),
        contributions=lambda x, y: contributions(x, y).detach(),
        residual=lambda predicted: released - predicted,
        logits=model,
        input_shape=tuple(batch.inputs.shape[1:]),
        input_low=low,
        input_high=high,
        classes=10,
        step=0,
        expected_batch=1.0,
        structure=lambda: structure,
    )


def drawn(model: nn.Sequential, seed: int) -> nn.Sequential:
    coins = toys.generator(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=coins).double() / (p[0].numel() if p.ndim > 1 else 10) ** 0.5)
    return model


def uniform(count: int, *shape: int, seed: int) -> Examples:
    coins = toys.generator(seed)
    x = torch.rand(count, *shape, generator=coins).double()
    return Examples(ids=torch.arange(count), inputs=x, labels=torch.randint(10, (count,), generator=coins))


def test_a_layer_behind_what_can_be_undone_is_attacked():
    model = drawn(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 120), nn.ReLU(), nn.Linear(120, 10)), 16)
    kinds = [{"kind": kind} for kind in ("linear", "tanh", "linear", "relu", "linear")]
    batch = uniform(4, 20, seed=16)
    result = spear(layered(model.double(), kinds, batch), toys.generator(1))
    assert errors(result.inputs, batch.inputs).max() < 1e-20 and whole(result)


def convolution(stride: int, padding: int) -> tuple[nn.Sequential, list[dict]]:
    conv = nn.Conv2d(3, 120, 5, stride=stride, padding=padding)
    outputs = 120 * ((8 + 2 * padding - 5) // stride + 1) ** 2
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(outputs, 10)).double()
    names = ("kernel_size", "stride", "padding", "dilation", "groups")
    settings = {name: getattr(conv, name) for name in names}
    kinds = [{"kind": "conv2d", "settings": settings}, {"kind": "relu"}, {"kind": "flatten"}, {"kind": "linear"}]
    return drawn(model, 17), kinds


def test_images_behind_a_convolution_are_put_together_from_their_patches():
    model, kinds = convolution(stride=3, padding=0)
    batch = uniform(2, 3, 8, 8, seed=17)
    result = spear(layered(model, kinds, batch), toys.generator(1))
    assert errors(result.inputs, batch.inputs).max() < 1e-20
    assert len(result.inputs) == 2 and whole(result)


@pytest.mark.parametrize("size", [9, 10])
def test_pixels_that_are_in_no_patch_are_not_ok(size):
    conv = nn.Conv2d(3, 120, 5, stride=3)
    model = drawn(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(120 * 4, 10)).double(), 17)
    batch = uniform(2, 3, size, size, seed=17)
    result = spear(layered(model, convolution(stride=3, padding=0)[1], batch), toys.generator(1))
    seen = (..., slice(8), slice(8))
    assert errors(result.inputs[seen], batch.inputs[seen]).max() < 1e-20 < errors(result.inputs, batch.inputs).min()
    assert result.status == "degraded" and result.certified is not None and not result.certified.any()


def test_patches_that_do_not_overlap_are_refused():
    conv = nn.Conv2d(3, 100, 4, stride=4)
    model = drawn(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(400, 10)).double(), 18)
    names = ("kernel_size", "stride", "padding", "dilation", "groups")
    settings = {name: getattr(conv, name) for name in names}
    kinds = [{"kind": "conv2d", "settings": settings}, {"kind": "relu"}, {"kind": "flatten"}, {"kind": "linear"}]
    with pytest.raises(NotApplicable, match="must overlap to be put together"):
        spear(layered(model, kinds, uniform(1, 3, 8, 8, seed=18)), toys.generator(1), draws=512)


def test_the_closed_form_of_random_updates_is_that_of_autograd():
    update, shared = random_update(3, width=20, inputs=10, seed=19)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10)).double()
    assert update.structure is not None
    model.load_state_dict(dict(update.structure().known_network().parameters))
    expected = toys.rows(model, shared.inputs, shared.labels).sum(dim=0)
    torch.testing.assert_close(update.released, expected, rtol=1e-10, atol=1e-12)


def test_a_completion_has_the_entries_that_were_not_known():
    coins = toys.generator(20)
    matrix = (torch.randn(60, 3, generator=coins) @ torch.randn(3, 40, generator=coins)).double()
    known = torch.rand(60, 40, generator=coins) < 0.5
    found = completed(torch.where(known, matrix, torch.nan), known, 1e-15, coins, most=10)
    assert (found.matrix - matrix).norm() < 1e-5 * matrix.norm() and (found.rank, found.noise) == (3, 0.0)
    noisy = matrix + 0.01 * torch.randn(60, 40, generator=coins).double()
    found = completed(torch.where(known, noisy, torch.nan), known, 1e-15, coins, most=10)
    assert found.rank == 3 and 0.01 < found.noise < 0.03
    assert (found.matrix - matrix).square().mean().sqrt() < 0.01
    assert factorised(matrix, 1e-6).rank == 3


def test_rounding_is_measured_and_not_taken_at_its_worst():
    """At its worst it would blur zeros of examples whose gradients are a hundredth of the largest."""
    coins = toys.generator(21)
    left = torch.linalg.qr(torch.randn(200, 3, generator=coins).double()).Q
    matrix = left @ torch.diag(torch.tensor([1.0, 0.1, 0.01]).double()) @ torch.randn(3, 100, generator=coins).double()
    found = factorised(matrix.float(), torch.finfo(torch.float32).eps)
    assert found.rank == 3 and found.exact
    worst = rounding_floor(matrix.shape, torch.finfo(torch.float32).eps) * torch.linalg.matrix_norm(matrix, 2)
    assert found.error < worst / torch.linalg.svdvals(matrix)[2] / 200**0.5 / 10
    assert (found.left - left @ (left.T @ found.left)).square().mean().sqrt() < 3 * found.error


def test_the_line_falls_where_entries_run_out():
    share = recovered_share([1.0, 0.05], [2, 4], width=80, inputs=40, trials=2, draws=512)
    assert share.shape == (2, 2)
    assert share[0].tolist() == [1.0, 1.0] and share[1].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"keeps must be in \(0, 1\], got 1\.5"):
        recovered_share([1.5], [2])


def test_draws_must_be_positive():
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        spear(random_update(1, width=10, inputs=5)[0], draws=0)
