"""What is particular to GradInversion; the duties of every attack are in test_every_attack.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.core import NotApplicable, Observation
from leakbench.attacks.core.search.batch_statistics import statistics_mismatches
from leakbench.attacks.core.search.consensus import consensus, shifts
from leakbench.attacks.core.search.restarts import jittered_adams
from leakbench.attacks.grad_inversion import grad_inversion
from leakbench.attacks.inverting_gradients import inverting_gradients
from leakbench.audit.external.update.attacks import observed, read_update
from leakbench.audit.targets.observe import PublicKnowledge
from leakbench.benchmarks import data
from leakbench.defenses.core import cross_entropy
from leakbench.defenses.sgd import sgd

from ..parameters import subtests
from . import toys


def known_network(seed: int = 0):
    observation, batch = toys.update_target(net="batch_norm", seed=seed)
    assert observation.structure is not None
    return observation, batch, observation.structure().known_network()


def test_the_mismatch_of_statistics_is_that_of_hooks_in_the_model():
    """Two guesses of three images, by PyTorch's own layers: mean and variance of what enters each batch norm."""
    network = known_network()[2]
    model = toys.batch_norm_net().eval()
    guesses = torch.rand(2, 3, 1, 8, 8, generator=toys.generator(1))
    entered: list[Tensor] = []
    norm = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
    norm.register_forward_pre_hook(lambda _, given: entered.append(given[0].detach()))
    expected = []
    for guess in guesses:
        entered.clear()
        model(guess)
        (z,) = entered
        mean, variance = z.mean((0, 2, 3)), z.var((0, 2, 3), unbiased=False)
        assert norm.running_mean is not None and norm.running_var is not None
        expected.append((mean - norm.running_mean).norm() + (variance - norm.running_var).norm())
    found = statistics_mismatches(network, guesses)(guesses)
    torch.testing.assert_close(found, torch.stack(expected))
    assert (found > 0.1).all()


def test_the_mismatch_of_statistics_on_paper():
    """One channel that passes pixels on: mean 2 and variance 1 against 0.5 and 0.25."""
    observation, _, network = known_network()
    one = next(o for o in network.operations if o.kind == "batch_norm")
    plain = replace(
        network,
        operations=(network.operations[0], replace(one, inputs=(network.operations[0].name,), shape=(1, 2, 2))),
        parameters={one.settings["mean"]: torch.tensor([0.5]), one.settings["variance"]: torch.tensor([0.25])},
    )
    first = replace(plain.operations[0], shape=(1, 2, 2))
    plain = replace(plain, operations=(first, plain.operations[1]))
    images = torch.tensor([1.0, 3.0, 1.0, 3.0]).view(1, 1, 1, 2, 2)
    assert statistics_mismatches(plain, observation.released)(images).tolist() == [1.5 + 0.75]


@pytest.mark.long
def test_statistics_of_the_private_batch_help_where_gradients_alone_do_not():
    """Of a batch whose statistics the model has seen, at few steps: as far as it gets with them and without."""
    gains = []
    for seed in range(3):
        batch = toys.examples(8, (1, 8, 8), seed=seed)
        model = toys.batch_norm_net(seed=seed)
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.reset_running_stats()
            model.train()(batch.inputs)
        dim = sum(p.numel() for p in model.eval().parameters())
        step = toys.Step(model=model, batch=batch, encoder=torch.eye(dim)[::16], noise_std=torch.zeros(dim)[::16])
        observation = step.observe(**toys.everything(step))
        found = [
            grad_inversion(observation, toys.generator(seed), iterations=100, restarts=1, statistics_weight=weight)
            for weight in (0.1, 0.0)
        ]
        with_statistics, without = (toys.psnr(one.inputs, batch.inputs) for one in found)
        gains.append(with_statistics - without)
    assert sum(gains) / len(gains) > 0.3


@pytest.mark.long
def test_an_image_is_recovered_and_starts_together_find_it_where_one_alone_fails():
    observation, batch, _ = known_network(1)
    alone, group = (
        grad_inversion(observation, toys.generator(1), iterations=100, restarts=n, jitter=0.0) for n in (1, 4)
    )
    assert toys.psnr(group.inputs, batch.inputs) > 30 and group.status == "ok"
    assert group.objective < alone.objective
    assert group.history is not None and group.history.shape == (4, 100)


def whole_network(number: int, pixels: int) -> tuple[Observation, Tensor, nn.Sequential, Tensor]:
    """One photo's gradient at a network of three batch norms that have seen public photos, the photo and their mean."""
    photos = data.load("photos")
    public, photo = (
        nn.functional.avg_pool2d(images, 32 // pixels)
        for images in (photos.public.inputs, photos.private.inputs[number : number + 1])
    )
    label = photos.private.labels[number : number + 1]
    torch.manual_seed(number)
    layers: list[nn.Module] = []
    for below, above, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 2)):
        convolution = nn.Conv2d(below, above, 3, stride=stride, padding=1)
        layers += [convolution, nn.BatchNorm2d(above, momentum=None), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * pixels**2, photos.classes)).train()
    with torch.no_grad():
        model(public)
    model.eval()
    gradients = torch.autograd.grad(cross_entropy(model(photo), label).mean(), list(model.parameters()))
    named = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
    world = PublicKnowledge(
        input_shape=(3, pixels, pixels), classes=photos.classes, low=0.0, high=1.0, loss=cross_entropy, population=None
    )
    shared = read_update(model, named, batch_size=1, labels=label.tolist())
    return observed(shared, world), photo, model, public.mean(dim=0, keepdim=True)


@pytest.mark.long
def test_a_whole_network_as_leakbench_update_reads_it_gives_a_photo_away():
    observation, photo, model, mean = whole_network(0, 8)
    assert observation.structure is not None
    statistics = statistics_mismatches(observation.structure().known_network(), photo)
    entered: list[Tensor] = []
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda norm, given: entered.append(_distance(norm, given[0].detach())))
    model(photo)
    assert len(entered) == 3
    torch.testing.assert_close(statistics(photo[None])[0], torch.stack(entered).sum())
    found = grad_inversion(observation, toys.generator(1), iterations=250, restarts=1, statistics_weight=0.01)
    assert found.status == "ok" and toys.psnr(found.inputs, photo) > toys.psnr(mean, photo) + 3


def _distance(norm: nn.Module, entering: Tensor) -> Tensor:
    """Of mean and variance of what enters from those that a batch norm remembers."""
    mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
    flat = entering.transpose(0, 1).flatten(1)
    return (flat.mean(dim=1) - mean).norm() + (flat.var(dim=1, unbiased=False) - variance).norm()


@pytest.mark.slow
def test_photos_behind_three_batch_norms_are_seen_far_better_than_by_inverting_gradients():
    """Measured on CIFAR, nine photos: 30.3 dB against 20.4, and 11.4 of the mean image; with statistics at 0.1 15.2."""
    gains = []
    for number in (0, 20):
        observation, photo, _, mean = whole_network(number, 32)
        settings = {"iterations": 2000, "restarts": 2}
        ours = grad_inversion(observation, toys.generator(1), statistics_weight=0.01, **settings)
        theirs = inverting_gradients(observation, toys.generator(1), **settings)
        gains.append(toys.psnr(ours.inputs, photo) - max(toys.psnr(theirs.inputs, photo), toys.psnr(mean, photo)))
    # Measured: 2.8 and 23.4.
    assert min(gains) > 1 and sum(gains) > 10


def test_models_of_private_training_are_refused_in_one_sentence():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 4))
    batch = toys.examples(1, (1, 8, 8), seed=0)
    observation, _ = audit.share_update(model, batch.inputs, batch.labels, sgd())
    with pytest.raises(NotApplicable, match="must have batch norms with running statistics, and it has none"):
        grad_inversion(observation)
    with pytest.raises(NotApplicable, match="the network must be known"):
        grad_inversion(replace(observation, structure=None))


def test_a_layer_that_is_not_known_is_refused_in_front_of_a_batch_norm_and_not_behind():
    observation, _, network = known_network()
    strange = replace(network.operations[1], kind="other", words="a strange layer")
    with pytest.raises(NotApplicable, match="a strange layer"):
        statistics_mismatches(
            replace(network, operations=(network.operations[0], strange, *network.operations[2:])),
            observation.released,
        )
    behind = (*network.operations[:3], replace(network.operations[3], kind="other"))
    assert (
        statistics_mismatches(replace(network, operations=behind), observation.released)(torch.rand(1, 1, 1, 8, 8)) > 0
    )


def test_a_shift_moves_pixels_and_repeats_the_border():
    image = torch.arange(9.0).view(1, 3, 3)
    found = shifts(image, 1)
    assert found.shape == (9, 1, 3, 3) and found[0].equal(image)
    moved = {tuple(one.flatten().tolist()) for one in found}
    assert (0, 1, 2, 0, 1, 2, 3, 4, 5) in moved  # down
    assert (1, 2, 2, 4, 5, 5, 7, 8, 8) in moved  # left
    assert len(moved) == 9


def test_the_consensus_is_of_registered_images():
    """Of a blob in four places the plain mean is four blobs; the registered one is sharper."""
    blob = toys.examples(1, (1, 12, 12), seed=2).inputs
    moved = torch.stack([torch.roll(blob, (dy, dx), (2, 3)) for dy, dx in ((0, 0), (0, 0), (0, 0), (0, 0), (2, 1))])
    error = lambda guess: float((guess - blob).square()[..., 4:-4, 4:-4].mean())  # noqa: E731 - away from the border
    assert error(consensus(moved, 4)) < 0.2 * error(consensus(moved, 0))
    assert consensus(moved, 0).equal(moved.mean(dim=0))
    rows = torch.rand(3, 2, 7)
    assert consensus(rows, 4).equal(rows.mean(dim=0))  # vectors have no places


def test_the_step_warms_up_and_dies_down_and_so_does_the_noise():
    positions: list[float] = []

    def slope(points: Tensor) -> tuple[Tensor, Tensor]:
        positions.append(points[0, 0].item())
        return points.sum(dim=1), points.sum(dim=1)

    def steps(jitter: float, width: int = 1) -> Tensor:
        positions.clear()
        starts = torch.zeros(1, width, dtype=torch.float64)
        jittered_adams(slope, [starts], toys.generator(0), iterations=40, lr=1.0, jitter=jitter)
        return -torch.tensor(positions).diff()

    lengths = steps(0.0)
    warm = torch.tensor([0.2, 0.4, 0.6, 0.8])
    torch.testing.assert_close(lengths[:4], warm)
    assert lengths[4] == pytest.approx(1.0) and lengths[22] == pytest.approx(0.5, abs=0.01) and lengths[-1] < 0.01
    noise = (steps(0.1) - lengths) / lengths
    # 39 draws of standard deviation 0.1.
    assert 0.05 < noise.std() < 0.17


@subtests(
    "settings, sentence",
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"restarts": 0}, "restarts must be at least 1, got 0"),
        ({"register_every": 0}, "register_every must be at least 1, got 0"),
        ({"largest_shift": -1}, "largest_shift must be at least 0 and finite, got -1"),
        ({"statistics_weight": -0.1}, r"statistics_weight must be at least 0 and finite, got -0\.1"),
        ({"jitter": float("inf")}, "jitter must be at least 0 and finite, got inf"),
        ({"lr": 0.0}, r"lr must be positive and finite, got 0\.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        grad_inversion(toys.update_target(net="batch_norm")[0], **settings)
