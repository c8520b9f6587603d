"""What is particular to plain SGD: it is PyTorch's."""

import torch
from torch import nn

from leakbench.defenses.core import Context, Recipe, full, release, train
from leakbench.defenses.sgd import sgd

from . import duties


def test_on_full_batches_it_is_pytorchs_sgd_on_the_mean_loss():
    inputs, labels = duties.DATA
    run = train(duties.network(), duties.DATA, sgd(), sampling=full(), steps=5, lr=0.4, recipe=Recipe(momentum=0.9))
    model = duties.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    torch.testing.assert_close(duties.parameters(run), duties.LAYOUT.read(model), rtol=1e-5, atol=1e-6)


def test_its_release_is_the_plain_sum_and_needs_no_noise():
    rows = torch.tensor([[3.0, 4.0], [0.0, 1e6]])
    out = release(sgd(), rows, Context(step=0, steps=1, dim=2))
    assert torch.equal(out.total, torch.tensor([3.0, 1_000_004.0]))


def test_its_run_says_that_no_noise_was_drawn():
    assert duties.trained(sgd()).noise == "none"
