"""Images that kernels for convolutions read: channels last in memory, examples split over threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from .machine_code import in_threads, processor

_WORTH_A_THREAD = 2e7  # flops, below which handing the work to a thread takes longer

Images = Float[Tensor, "images channels height width"]


def readable_images(inputs: Tensor, signals: Tensor) -> bool:
    """Returns whether code for images can read the layer's input and the loss's gradient at its output."""
    if signals.dtype not in (torch.float32, torch.float64) or inputs.dtype != signals.dtype:
        return False
    plain = all(type(values) is Tensor and values.is_cpu for values in (inputs, signals))
    # Without channels there is nothing to sum; all sizes of a kernel must be positive.
    return plain and min(inputs.shape[1], signals.shape[1]) > 0 and processor() is not None


def over_images(
    run: Callable[..., None],
    images: tuple[Images, Images],
    examples: int,
    *,
    scratch: tuple[int, torch.dtype],
    flops: float,
) -> None:
    """Splits examples over threads and calls a kernel in each, with addresses, scratch memory and a range of examples.

    Args:
        run: takes the addresses of inputs, signals and scratch memory, the first example and the end.
        images: inputs and signals.
        examples: number of examples.
        scratch: number and dtype of the zeros in each thread's scratch memory.
        flops: flops per example.
    """
    inputs, signals = (values.permute(0, 2, 3, 1).contiguous() for values in images)
    if not examples:  # a compiled loop runs its first round before the test
        return
    count = max(1, min(torch.get_num_threads(), int(examples * flops / _WORTH_A_THREAD), examples))
    edges = [round(examples * i / count) for i in range(count + 1)]

    def share(number: int) -> None:
        zeros = signals.new_zeros(scratch[0], dtype=scratch[1])
        run(inputs.data_ptr(), signals.data_ptr(), zeros.data_ptr(), edges[number], edges[number + 1])

    in_threads(share, count, at_once=count)
