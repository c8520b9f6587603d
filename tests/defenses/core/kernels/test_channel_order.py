"""Images with their channels last hold the very numbers that they had, and nothing else is touched."""

import pytest
import torch

from leakbench.defenses.core.gradients.layerwise.engine import channels_last
from leakbench.defenses.core.kernels.channel_order import MOST_CHANNELS, channels_to_the_end


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", range(2, MOST_CHANNELS + 1))
@pytest.mark.parametrize("pixels", [1, 15, 16, 17, 32, 35, 784])
def test_every_number_is_copied_bit_for_bit(pixels, channels, dtype):
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    # Whatever the bits: NaN with a payload, infinities and subnormal numbers too.
    limits = torch.iinfo(bits)
    drawn = torch.randint(limits.min, limits.max, (3, channels, pixels), dtype=bits)
    room = torch.full((2 + 3 * pixels * channels + 2,), 7, dtype=bits)
    where = room.data_ptr() + 2 * room.element_size()
    channels_to_the_end(channels, wide=dtype == torch.float64)(drawn.data_ptr(), where, 3, pixels)
    assert torch.equal(room[2:-2].view(3, pixels, channels), drawn.transpose(1, 2))
    assert bool((room[:2] == 7).all() and (room[-2:] == 7).all())


@pytest.mark.parametrize(
    "shape",
    [
        (64, 3, 16, 16),
        (64, 2, 9, 11),
        (16, 4, 32, 32),
        (16, 5, 32, 32),
        (2, 3, 1, 1),
        (2048, 2, 1, 1),
        (2048, 3, 1, 5),
        (2048, 3, 5, 1),
        (0, 3, 64, 64),
    ],
)
@pytest.mark.parametrize("change", ["none", "strides", "gradient", "integers", "last"])
def test_a_batch_of_any_kind_has_its_channels_last(shape, change):
    images = torch.randn(shape)
    if change == "strides":
        images = torch.randn(shape[0], 2 * shape[1], *shape[2:])[:, ::2]
    elif change == "gradient":
        images.requires_grad_()
    elif change == "integers":
        images = images.to(torch.int64)
    elif change == "last":
        images = images.contiguous(memory_format=torch.channels_last)
    found = channels_last(images)
    assert torch.equal(found, images) and found.dtype == images.dtype and found.requires_grad == images.requires_grad
    if change != "integers":  # strides too, by which PyTorch chooses kernels
        assert found.stride() == images.contiguous(memory_format=torch.channels_last).stride()
