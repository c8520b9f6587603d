"""One example of a batch keeps a gradient: of a class that has no other, or by a score that the server bisects."""

import pytest
import torch

from leakbench.attacks.core import Examples, NotApplicable
from leakbench.attacks.fishing import fishing

from ..parameters import subtests
from . import toys


def of_labels(labels: list[int], *, calls: int = 1, seed: int = 0, clip_norm: float | None = 0.1, noise: float = 0.0):
    """A client whose images have these labels."""
    original = toys.examples

    def labelled(count, shape, *, seed, first_id=0):
        drawn = original(count, shape, seed=seed, first_id=first_id)
        return drawn if first_id else Examples(ids=drawn.ids, inputs=drawn.inputs, labels=torch.tensor(labels))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "examples", labelled)
        return toys.active_target(count=len(labels), seed=seed, clip_norm=clip_norm, noise=noise, calls=calls)


@subtests("clip_norm", [None, 0.1])
def test_the_only_example_of_a_class_is_isolated_whatever_the_clip_norm(clip_norm):
    for seed in range(3):
        target, batch = of_labels([0, 0, 1, 1, 2, 3, 3, 3], seed=seed, clip_norm=clip_norm)
        result = fishing(target, toys.generator(0))
        assert result.status == "ok" and result.labels.tolist() == [2]
        assert float((result.inputs[0] - batch.inputs[4]).abs().max()) < 1e-3


@pytest.mark.long
def test_of_a_class_with_several_one_is_isolated_by_bisection_within_the_calls_allowed():
    isolated = 0
    for seed in range(4):
        # Labels of toys are drawn: no score keeps other classes below a threshold, so the client has one class.
        target, batch = of_labels([0] * 6, calls=8, seed=seed)
        result = fishing(target, toys.generator(0))
        apart = [float((image - result.inputs[0]).abs().max()) for image in batch.inputs] if len(result.inputs) else [1]
        isolated += min(apart) < 1e-3
        assert len(result.inputs) or result.status == "degraded"
    assert isolated >= 2


@pytest.mark.long
def test_without_enough_calls_nothing_is_returned_rather_than_a_mixture():
    answers = [fishing(of_labels([0] * 8, seed=seed)[0], toys.generator(0)) for seed in range(6)]
    for result in answers:
        assert result.status == "degraded" or len(result.inputs) == 1
    assert any(not len(result.inputs) for result in answers)


@pytest.mark.long
def test_noise_of_a_real_size_hides_the_example():
    for seed in range(3):
        target, batch = of_labels([0, 0, 1, 2, 2, 3, 3, 3], seed=seed, noise=0.4)
        result = fishing(target, toys.generator(0))
        assert result.status == "degraded"
        grey = toys.psnr(torch.full((1,), 0.5), batch.inputs[2])
        assert toys.psnr(result.inputs[0], batch.inputs[2]) < grey + 1


def test_a_convolution_first_is_refused():
    with pytest.raises(NotApplicable, match="the first layer must be linear on the flattened input"):
        fishing(toys.active_target(net="conv")[0])
