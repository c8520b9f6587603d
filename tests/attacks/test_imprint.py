"""Images of a batch in bins of their own are read off a layer that the server has chosen."""

import pytest
import torch

from leakbench.attacks.core import NotApplicable, Observation, Reconstruction
from leakbench.attacks.core.closed_form.layer_rows import layer_rows
from leakbench.attacks.imprint import imprint

from ..parameters import subtests
from . import toys


def exact(result: Reconstruction, inputs: torch.Tensor) -> int:
    """Number of images of a batch that some result equals."""
    apart = (result.inputs[None] - inputs[:, None]).flatten(2).abs().amax(dim=2)
    return int((apart.amin(dim=1) < 1e-3).sum()) if len(result.inputs) else 0


@pytest.mark.long
@subtests("clip_norm", [None, 0.1])
def test_most_images_of_a_batch_are_in_bins_of_their_own_and_clipping_does_not_mix_them(clip_norm):
    recovered = 0
    for seed in range(6):
        target, batch = toys.active_target(count=8, seed=seed, clip_norm=clip_norm)
        result = imprint(target, toys.generator(seed))
        recovered += exact(result, batch.inputs)
        # Images that share a bin are noticed: there are fewer bins than images.
        assert (result.status == "ok") == (len(result.inputs) == 8)
        assert result.objective == pytest.approx(1 - len(result.inputs) / 8)
    # There are 48 images and 48 bins of equal weight; two of 8 share a bin with probability 0.45 if they are uniform.
    assert recovered >= 30


def test_noise_hides_the_images_and_the_attack_says_so():
    target, batch = toys.active_target(count=4, clip_norm=0.1, noise=0.4)
    result = imprint(target, toys.generator(0))
    assert result.status == "degraded" and not exact(result, batch.inputs)
    quiet, batch = toys.active_target(count=4, clip_norm=0.1, noise=1e-7)
    result = imprint(quiet, toys.generator(0))
    assert exact(result, batch.inputs) >= 2 and result.expected_error is not None


def test_other_networks_get_a_block_in_front_which_toys_do_not_have():
    with pytest.raises(NotApplicable, match="toys have no blocks"):
        imprint(toys.active_target(net="conv")[0])


@subtests("settings", [{"bins": 1}, {"gain": 0.0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="bins must be at least 2 and gain positive"):
        imprint(toys.active_target()[0], **settings)


@subtests("share", [0.5, 0.25])
def test_of_a_mask_pixels_are_determined_where_released_rows_enclose_no_other_image(share):
    """Determined pixels are the image's; a mask leaves fewer of them."""
    model = toys.relu_net((1, 8, 8))
    dim = sum(p.numel() for p in model.parameters())
    kept = torch.randperm(dim, generator=toys.generator(3))[: int(share * dim)].sort().values
    whole, batch = toys.active_target(count=2, seed=4)
    release = whole.release
    assert release is not None

    def masked(parameters, block):
        message = release(parameters, block)
        assert isinstance(message, Observation) and isinstance(message.noise_std, torch.Tensor)
        structure = toys.described(model, torch.eye(dim)[kept], (1, 8, 8))
        return toys.replace(
            message, released=message.released[kept], noise_std=message.noise_std[kept], structure=lambda: structure
        )

    result = imprint(toys.replace(whole, release=masked), toys.generator(0))
    determined = result.determined
    assert determined is not None and result.status == "degraded"
    for image, own in zip(result.inputs, determined, strict=True):
        apart = [float((image - true)[own].abs().max()) for true in batch.inputs if own.any()]
        assert not apart or min(apart) < 1e-3
    assert 0 < float(determined.double().mean()) < 1


def test_coefficients_along_directions_are_the_gradient_in_their_span():
    model, dim = toys.relu_net((1, 8, 8)), 0
    dim = sum(p.numel() for p in model.parameters())
    basis = torch.linalg.qr(torch.randn(dim, 30, generator=toys.generator(0), dtype=torch.float64))[0]
    gradient = torch.randn(dim, generator=toys.generator(1), dtype=torch.float64)
    structure = toys.described(model, basis.T, (1, 8, 8))
    std = torch.ones(30, dtype=torch.float64)
    layer = layer_rows(structure, ("1.weight", "1.bias"), basis.T @ gradient, std)
    projected = (basis @ (basis.T @ gradient))[: 48 * 64].view(48, 64)
    torch.testing.assert_close(layer.values[:, :-1], projected)
    torch.testing.assert_close(layer.std[:, :-1], basis.norm(dim=1)[: 48 * 64].view(48, 64))
    assert not layer.whole and bool(layer.observed.all())
