"""Residual networks: block with a shortcut, convolution that keeps the resolution, initial weights.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.
"""

from torch import Tensor, nn


class Residual(nn.Module):
    """Block with a shortcut: after(body(x) + skip(x)).

    Args:
        body: branch with the weights.
        skip: other branch; the identity where None.
        after: applied to the sum, as a ReLU; the identity where None.
    """

    def __init__(self, body: nn.Module, skip: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        # Identities are modules too, so that all blocks have the same structure when printed or saved.
        self.body, self.skip, self.after = body, skip or nn.Identity(), after or nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps [n, entering, height, width] to the block's output."""
        return self.after(self.body(inputs) + self.skip(inputs))


def conv(entering: int, leaving: int, size: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """Returns a convolution that keeps the resolution up to its stride."""
    # For odd sizes; with an even size this padding would add a pixel.
    return nn.Conv2d(entering, leaving, size, stride=stride, padding=size // 2, bias=bias)


def he_normal(model: nn.Module) -> nn.Module:
    """Draws the weights of all convolutions as He et al. do, for ReLUs and with fan-out; returns the model."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model
