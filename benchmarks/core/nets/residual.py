"""What residual networks are made of: a block with a shortcut, a convolution, the initial weights.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.
"""

from torch import Tensor, nn


class Residual(nn.Module):
    """What a body makes of its input, added to what a shortcut makes of it, and something done to the sum.

    Args:
        body: the branch with the weights.
        skip: the other branch; passes its input on where None.
        after: of the sum; nothing where None.
    """

    def __init__(self, body: nn.Module, skip: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        # Modules even where they do nothing, so that every block prints and saves alike.
        self.body, self.skip, self.after = body, skip or nn.Identity(), after or nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum, and what is done to it."""
        return self.after(self.body(inputs) + self.skip(inputs))


def conv(entering: int, leaving: int, size: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the resolution up to its stride."""
    return nn.Conv2d(entering, leaving, size, stride=stride, padding=size // 2, bias=bias)


def he_normal(model: nn.Module) -> nn.Module:
    """Draws the weights of all convolutions as He et al. do, for ReLUs and by what leaves them; returns the model."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model
