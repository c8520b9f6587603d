"""Bias division against known answers; the duties of every attack are in test_every_attack.py."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.bias_division import bias_division
from leakbench.attacks.core import (
    Examples,
    InconsistentObservation,
    NotApplicable,
    Observation,
    RankDeficient,
    ReleasedPart,
)
from leakbench.attacks.core.closed_form.rank_one import bilinear, completed, total_least_squares
from leakbench.benchmarks import models
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.per_layer import per_layer
from leakbench.defenses.random_sparsification import random_sparsification

from ..parameters import subtests
from . import toys

PIXELS = 784


def network(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Linear layers with ReLUs between them, on a flattened input."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    net = nn.Sequential(*layers[:-1]).to(dtype)
    coins = toys.generator(seed + 40)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=coins, dtype=torch.float64) / (p[0].numel() ** 0.5))
    return net


def drawn(count: int, pixels: int = PIXELS, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(count, 1, pixels, generator=toys.generator(seed), dtype=torch.float64).to(dtype)


def update(
    model: nn.Sequential,
    inputs: Tensor,
    labels: list[int],
    *,
    parts: tuple[ReleasedPart, ...] | None = None,
    noise: float = 0.0,
    clip_norm: float | None = None,
    divisor: float = 1.0,
    seed: int = 0,
    told: int | None = None,
) -> Observation:
    """An update by hand: of coordinates, of all of them by default, or of directions."""
    dim = sum(p.numel() for p in model.parameters())
    if parts is None:
        parts = (ReleasedPart(start=0, stop=dim, kind="coordinates", coordinates=torch.arange(dim)),)

    def encoded(rows: Tensor) -> Tensor:
        found = []
        for part in parts:
            if part.coordinates is not None:
                shown = rows[:, part.coordinates]
            else:
                pairs = zip(part.spans, part.bases, strict=True)
                shown = torch.cat([rows[:, a:b] @ basis for (a, b), basis in pairs], dim=1)
            if clip_norm is not None:
                shown = shown * (clip_norm / shown.norm(dim=1, keepdim=True)).clamp(max=1)
            found.append(shown)
        return torch.cat(found, dim=1)

    def contributions(x: Tensor, y: Tensor) -> Tensor:
        return encoded(toys.rows(model, x, y)).detach()

    truth = torch.tensor(labels)
    sums = contributions(inputs, truth).sum(0)
    sums = sums + noise * torch.randn(sums.shape, generator=toys.generator(seed + 900), dtype=sums.dtype)
    described = toys.described(model, torch.eye(1), tuple(inputs.shape[1:]))
    return Observation(
        released=sums / divisor,
        simulate=lambda x, y: contributions(x, y).sum(0) / divisor,
        contributions=contributions,
        residual=lambda predicted: sums / divisor - predicted,
        logits=model,
        input_shape=tuple(inputs.shape[1:]),
        input_low=0.0,
        input_high=1.0,
        classes=model(inputs).shape[1],
        step=0,
        expected_batch=divisor,
        batch_size=len(inputs) if told is None else told,
        noise_std=torch.full_like(sums, noise),
        structure=lambda: replace(described, parts=parts),
    )


def kept(coordinates: Tensor) -> tuple[ReleasedPart, ...]:
    return (ReleasedPart(start=0, stop=len(coordinates), kind="coordinates", coordinates=coordinates),)


def orthonormal(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    drawn = torch.randn(rows, columns, generator=toys.generator(seed), dtype=torch.float64)
    return torch.linalg.qr(drawn)[0]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_the_input_of_a_linear_classifier_is_its_quotient(dtype, most):
    truth = drawn(1, dtype=dtype)
    result = bias_division(update(network(PIXELS, 10, dtype=dtype), truth, [3]))
    assert (result.inputs - truth).abs().max() < most
    assert result.labels.tolist() == [3] and result.status == "ok"
    assert result.certified is not None and result.certified.all()
    assert result.determined is not None and result.determined.all()


def test_clipping_and_divisor_change_nothing():
    truth, model = drawn(1), network(PIXELS, 10)
    plain = bias_division(update(model, truth, [3])).inputs
    clipped = bias_division(update(model, truth, [3], clip_norm=1e-3, divisor=256.0))
    assert (clipped.inputs - plain).abs().max() < 1e-10
    assert clipped.labels.tolist() == [3] and clipped.certified is not None and clipped.certified.all()


@pytest.mark.parametrize("deep", ["mlp", "relu"])
def test_what_the_library_shares_is_inverted_too(deep):
    photo = torch.rand(1, 1, 8, 8, generator=toys.generator(2), dtype=torch.float64)
    net = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0) if deep == "mlp" else network(64, 30, 10)
    for defense in (dp_sgd(clip_norm=0.1, noise_multiplier=0.0), per_layer(clip_norm=0.1, noise_multiplier=0.0)):
        target, truth = audit.share_update(net.double(), photo, torch.tensor([7]), defense)
        result = bias_division(target)
        assert (result.inputs - photo).abs().max() < 1e-10 and result.labels.tolist() == [7]
        scored = audit.score(result, replace(truth, labels_given=False))
        assert scored["label_accuracy"].value == 1.0


def masked(rate: float, outputs: int, *, biases_seen: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[k x^T | k] of random factors, and which entries a mask of that dropping rate leaves."""
    coins = toys.generator(seed)
    left = torch.randn(outputs, generator=coins, dtype=torch.float64)
    right = torch.rand(PIXELS + 1, generator=coins, dtype=torch.float64)
    right[-1] = 1.0
    seen = torch.rand(outputs, PIXELS + 1, generator=coins) >= rate
    seen[:, -1] |= biases_seen
    return torch.outer(left, right), seen


def test_of_a_mask_the_recovered_pixels_are_exact_and_their_share_is_the_one_foretold():
    """p = 0.9, 100 outputs: 0.634 by rows with a bias alone, 0.99997 with all biases or with rank-one completion."""
    alone, together, whole = [], [], []
    for seed in range(20):
        values, seen = masked(0.9, 100, biases_seen=False, seed=seed)
        rows = seen & seen[:, -1:]
        for entries, share in ((rows, alone), (seen, together)):
            right, known = completed(values, entries)
            share.append(known[:-1].double().mean())
            assert (right - values[0] / values[0, -1])[known].abs().max() < 1e-10
        whole.append(completed(*masked(0.9, 100, biases_seen=True, seed=seed))[1][:-1].double().mean())
    expected = 1 - (1 - 0.01) ** 100
    # A share over 20 draws has std 0.004 by pixels, and more by the number of rows with a bias, which draws share.
    assert abs(torch.stack(alone).mean() - expected) < 0.05 and torch.stack(alone).mean() < 0.75
    assert torch.stack(together).mean() > 0.9998 and torch.stack(whole).mean() > 0.9998


def test_a_pixel_of_value_0_does_not_carry_a_row_that_has_no_bias():
    values = torch.outer(torch.tensor([2.0, 3.0]).double(), torch.tensor([0.0, 5.0, 1.0]).double())
    seen = torch.tensor([[True, False, True], [True, True, False]])
    right, known = completed(values, seen)
    assert known.tolist() == [True, False, True] and right.tolist() == [0.0, 0.0, 1.0]


def test_a_masked_update_is_inverted_where_it_is_determined():
    model, truth = network(PIXELS, 100, 10), drawn(1)
    dim = sum(p.numel() for p in model.parameters())
    few = torch.randperm(dim, generator=toys.generator(4))[: dim // 20].sort().values
    result = bias_division(update(model, truth, [6], parts=kept(few), clip_norm=1.0))
    assert result.determined is not None and 0.9 < result.determined.double().mean() < 1
    assert (result.inputs - truth)[result.determined].abs().max() < 1e-10
    assert (result.inputs[~result.determined] == 0.5).all()
    assert result.certified is not None and not result.certified.any()


def test_random_sparsification_hides_nothing_of_one_example_behind_a_wide_layer():
    photo = torch.rand(1, 1, 8, 8, generator=toys.generator(2), dtype=torch.float64)
    defense = random_sparsification(final_sparsity=0.7, noise_multiplier=0.0)
    target, _ = audit.share_update(network(64, 100, 10), photo, torch.tensor([7]), defense, step=3, steps=4)
    result = bias_division(target)
    assert result.determined is not None and result.determined.all()
    assert (result.inputs - photo).abs().max() < 1e-10


def averaged_ratios(values: Tensor) -> Tensor:
    return (values[:, :-1] / values[:, -1:]).mean(0)


def test_under_noise_total_least_squares_beats_least_squares_and_that_beats_averaged_ratios():
    """Paired over 30 draws at noise of 0.6 of a bias's gradient, each by more than five standard errors."""
    errors = []
    for seed in range(30):
        coins = toys.generator(seed)
        left = torch.randn(60, generator=coins, dtype=torch.float64)
        pixels = torch.rand(40, generator=coins, dtype=torch.float64)
        right = torch.cat([pixels, torch.ones(1).double()])
        values = torch.outer(left, right) + 0.6 * torch.randn(60, 41, generator=coins, dtype=torch.float64)
        seen, std = torch.ones_like(values, dtype=torch.bool), torch.full_like(values, 0.6)
        simple, _ = completed(values, seen)
        total, strength = total_least_squares(values, seen, std, simple)
        assert strength > 1
        found = (total[:-1] / total[-1], simple[:-1], averaged_ratios(values))
        errors.append(torch.stack([(one - pixels).square().mean() for one in found]))
    total, simple, ratios = torch.stack(errors).T
    for better, worse in ((total, simple), (simple, ratios)):
        gain = worse.log() - better.log()
        assert gain.mean() > 5 * gain.std() / 30**0.5


def test_alternation_over_seen_entries_is_the_singular_vector_where_all_are_seen():
    values, seen = masked(0.0, 30, biases_seen=True)
    values = values + 0.1 * torch.randn(values.shape, generator=toys.generator(3), dtype=torch.float64)
    std = torch.full_like(values, 0.1)
    start, _ = completed(values, seen)
    exact, strength = total_least_squares(values, seen, std, start)
    # A last digit in one column's deviation takes the other way.
    other, again = total_least_squares(values, seen, std * (1 + 1e-12 * torch.arange(30)[:, None]), start)
    assert torch.allclose(exact / exact[-1], other / other[-1], rtol=1e-6)
    assert strength == pytest.approx(again, rel=1e-6)


@pytest.mark.long
def test_a_noisy_update_is_attacked_by_total_least_squares_and_by_the_other_where_asked():
    model, truth = network(64, 60, 4), drawn(1, 64)
    errors = {"total_least_squares": 0.0, "least_squares": 0.0}
    for seed in range(12):
        target = update(model, truth, [2], noise=0.05, seed=seed)
        assert torch.equal(bias_division(target).inputs, bias_division(target, estimator="total_least_squares").inputs)
        for name in errors:
            result = bias_division(target, estimator=name)
            errors[name] += float((result.inputs - truth).square().mean())
            assert result.certified is not None and not result.certified.any()
    assert errors["total_least_squares"] < 0.8 * errors["least_squares"]


def test_a_masked_update_under_little_noise_is_found_up_to_the_noise():
    model, truth = network(64, 100, 4), drawn(1, 64)
    dim = sum(p.numel() for p in model.parameters())
    half = torch.randperm(dim, generator=toys.generator(4))[: dim // 2].sort().values
    result = bias_division(update(model, truth, [2], parts=kept(half), noise=1e-3))
    assert result.determined is not None and result.determined.all()
    assert (result.inputs - truth).abs().max() < 0.05 and result.status == "ok"


def test_noise_alone_is_called_degraded():
    assert bias_division(update(network(64, 60, 4), drawn(1, 64), [2], noise=1e3)).status == "degraded"
    half = kept(torch.randperm(4144, generator=toys.generator(3))[:2000].sort().values)
    assert bias_division(update(network(64, 60, 4), drawn(1, 64), [2], parts=half, noise=1e3)).status == "degraded"


def test_of_a_batch_those_with_rows_of_their_own_are_found_and_nothing_else():
    truth, labels = drawn(3, 64), [0, 3, 9]
    for clip_norm in (None, 0.1):
        result = bias_division(update(network(64, 120, 10), truth, labels, clip_norm=clip_norm))
        assert 1 <= len(result.inputs) <= 3 and result.status == "ok"
        distance = torch.cdist(result.inputs.flatten(1), truth.flatten(1))
        assert (distance.amin(1) < 1e-8).all()
        assert len(set(distance.argmin(1).tolist())) == len(result.inputs)
        assert result.labels.tolist() == [labels[i] for i in distance.argmin(1)]
        assert result.certified is not None and result.certified.all()
        assert result.objective < 1e-6 or len(result.inputs) < 3


def test_of_a_masked_batch_rows_are_compared_where_both_are_seen():
    truth, labels, model = drawn(2, 64), [0, 3], network(64, 120, 10)
    dim = sum(p.numel() for p in model.parameters())
    most = torch.randperm(dim, generator=toys.generator(4))[: int(0.6 * dim)].sort().values
    result = bias_division(update(model, truth, labels, parts=kept(most)))
    assert len(result.inputs) == 2 and result.determined is not None and result.determined.double().mean() > 0.8
    for found, known in zip(result.inputs, result.determined, strict=True):
        assert min(float((found - one)[known].abs().max()) for one in truth) < 1e-8


def test_of_a_batch_under_little_noise_rows_are_grouped_and_under_much_none_is_found():
    truth, labels, model = drawn(2, 64), [0, 3], network(64, 120, 10)
    result = bias_division(update(model, truth, labels, noise=1e-5))
    assert len(result.inputs) == 2
    assert (torch.cdist(result.inputs.flatten(1), truth.flatten(1)).amin(1) < 1e-2).all()
    nothing = bias_division(update(model, truth, labels, noise=10.0))
    assert len(nothing.inputs) == 0 and nothing.status == "degraded"


def test_equal_rows_of_several_examples_are_not_taken_for_one():
    """With two classes every row's upstream gradient is the same multiple of one vector, so mixtures repeat."""
    truth, model = drawn(2, 64), network(64, 120, 2)
    result = bias_division(update(model, truth, [0, 1]))
    distance = torch.cdist(result.inputs.flatten(1), truth.flatten(1))
    assert len(result.inputs) and (distance.amin(1) < 1e-8).all()


def test_a_batch_without_rows_of_its_own_scores_as_the_floor():
    photos = torch.rand(4, 1, 8, 8, generator=toys.generator(2), dtype=torch.float64)
    model = network(64, 20, 10)
    with torch.no_grad():
        list(model.parameters())[1].fill_(50.0)  # everybody activates every row
    target, truth = audit.share_update(model, photos, torch.arange(4), dp_sgd(noise_multiplier=0.0))
    result = bias_division(target)
    assert len(result.inputs) == 0 and result.status == "degraded" and result.objective == 1.0
    grey = torch.full((1, 8, 8), 0.5, dtype=torch.float64)
    scored = audit.score(result, replace(truth, floor=grey, labels_given=False))
    assert scored["psnr"].value == scored["psnr_floor"].value and scored["label_accuracy"].value == 0.0


def own_block(model: nn.Sequential, size: int, *, seed: int = 0) -> tuple[ReleasedPart, ...]:
    """A basis of `size` directions of the first layer, and one of the rest."""
    sizes = [p.numel() for p in model.parameters()]
    first, dim = sum(sizes[:2]), sum(sizes)
    bases = (orthonormal(first, size, seed=seed), orthonormal(dim - first, 10, seed=seed + 1))
    spans = ((0, first), (first, dim))
    return (ReleasedPart(start=0, stop=size + 10, kind="directions", spans=spans, bases=bases),)


def test_a_basis_of_the_layer_is_inverted_from_as_many_coefficients_as_unknowns_and_some():
    model, truth = network(36, 12, 4), drawn(1, 36)
    for size, clip_norm in ((70, None), (70, 0.01), (444, None)):
        result = bias_division(update(model, truth, [2], parts=own_block(model, size), clip_norm=clip_norm))
        assert (result.inputs - truth).abs().max() < 1e-8 and result.status == "ok"
        assert result.labels.tolist() == [2] and result.certified is not None and result.certified.all()


def test_a_basis_under_noise_is_found_up_to_the_noise_and_lost_in_much():
    model, truth = network(36, 12, 4), drawn(1, 36)
    little = bias_division(update(model, truth, [2], parts=own_block(model, 200), noise=1e-4))
    assert (little.inputs - truth).abs().max() < 0.02 and little.status == "ok"
    assert bias_division(update(model, truth, [2], parts=own_block(model, 200), noise=1e3)).status == "degraded"


def test_too_few_coefficients_are_refused_with_what_is_missing():
    model = network(36, 12, 4)
    with pytest.raises(RankDeficient, match="40 coefficients must be at least as many as the 48 unknowns") as raised:
        bias_division(update(model, drawn(1, 36), [2], parts=own_block(model, 40)))
    assert raised.value.deficit == 8


def test_directions_that_leave_unknowns_open_are_refused_although_there_are_enough():
    weight = torch.zeros(3, 4, 9, dtype=torch.float64)
    weight[:, :3] = orthonormal(9, 9).view(3, 3, 9)  # nothing of the last input
    with pytest.raises(RankDeficient, match="leave 2 of them open"):
        bilinear(torch.ones(9).double(), weight, torch.zeros(3, 9).double(), [torch.ones(4).double()])


def test_what_it_cannot_invert_is_refused_in_a_sentence():
    model, truth = network(36, 12, 4), drawn(1, 36)
    dim = sum(p.numel() for p in model.parameters())
    across = (ReleasedPart(start=0, stop=60, kind="directions", spans=((0, dim),), bases=(orthonormal(dim, 60),)),)
    no_bias = kept(torch.arange(36 * 12))
    apart = (
        ReleasedPart(start=0, stop=432, kind="coordinates", coordinates=torch.arange(432)),
        ReleasedPart(start=432, stop=444, kind="coordinates", coordinates=torch.arange(432, 444)),
    )
    own, rest = own_block(model, 60)[0], torch.arange(444, dim)
    nothing = kept(rest)
    for parts, sentence in (
        (across, "must be of the first layer alone"),
        (no_bias, "the first layer's bias must be released, and none"),
        (nothing, "the first layer's bias must be released, and none"),
        (apart, "bounded together with its bias, and none"),
        (
            (ReleasedPart(start=0, stop=dim, kind="other", coordinates=torch.arange(dim)),),
            "coordinates of one gradient",
        ),
    ):
        with pytest.raises(NotApplicable, match=sentence):
            bias_division(update(model, truth, [2], parts=parts))
    with pytest.raises(NotApplicable, match="one example behind a basis, got 2"):
        bias_division(update(model, drawn(2, 36), [2, 1], parts=(own,)))
    with pytest.raises(NotApplicable, match="the structure of the update must be known"):
        bias_division(replace(update(model, truth, [2]), structure=None))


def test_a_dead_layer_says_so():
    model = network(36, 12, 4)
    with torch.no_grad():
        list(model.parameters())[1].fill_(-100.0)
    with pytest.raises(NotApplicable, match="zero upstream gradient"):
        bias_division(update(model, drawn(1, 36), [2]))


@subtests(
    "layers, batch, sentence",
    [
        ([nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)], 1, "must be linear on the flattened input, got 0"),
        ([nn.Linear(8, 3), nn.Flatten(), nn.Linear(24, 3)], 1, "must be linear on the flattened input, got 0"),
        ([nn.Flatten(), nn.Linear(64, 3, bias=False)], 1, "must have a bias"),
        ([nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)], 2, "followed by a ReLU .* got 2"),
        ([nn.Flatten(), nn.Linear(64, 3)], 2, "followed by a ReLU .* got nothing"),
    ],
)
def test_other_networks_are_refused(layers, batch, sentence):
    photos = torch.rand(batch, 1, 8, 8, generator=toys.generator(2))
    target, _ = audit.share_update(nn.Sequential(*layers), photos, torch.arange(batch), dp_sgd(noise_multiplier=0.0))
    with pytest.raises(NotApplicable, match=sentence):
        bias_division(target)


def test_a_frozen_or_shared_first_layer_is_refused():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.own(torch.relu(self.own(x))))

    frozen = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    frozen[0].requires_grad_(False)
    for model, sentence in ((Twice(), "must be its own"), (frozen, "must be trained")):
        target, _ = audit.share_update(model, torch.rand(1, 5), torch.tensor([1]), dp_sgd(noise_multiplier=0.0))
        with pytest.raises(NotApplicable, match=sentence):
            bias_division(target)


def test_a_batch_that_is_said_to_be_one_example_is_found_out():
    with pytest.raises(InconsistentObservation, match="is the batch larger"):
        bias_division(update(network(36, 12, 4), drawn(2, 36), [2, 1], told=1))


@subtests(
    "settings, sentence", [({"estimator": "mean"}, "estimator must be one of"), ({"restarts": 0}, "restarts must be")]
)
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        bias_division(toys.update_target(net="linear")[0], **settings)


def test_a_smooth_toy_image_is_found_by_the_quotient_too():
    target, truth = toys.update_target(net="relu")
    result = bias_division(target)
    assert toys.psnr(result.inputs, truth.inputs) > 80
    assert isinstance(truth, Examples) and torch.equal(result.labels, truth.labels)
