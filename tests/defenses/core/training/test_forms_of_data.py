"""Examples as people have them: rows of other forms, arrays, other precisions, labels that are written otherwise."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from leakbench.defenses.core import Recipe, poisson, seeded, train
from leakbench.defenses.dp_sgd import dp_sgd

from ....parameters import subtests

COINS = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 10, generator=COINS), torch.randint(0, 3, (24,), generator=COINS)


class Rows(Dataset):
    def __init__(self, row):
        self.row = row

    def __len__(self):
        return 24

    def __getitem__(self, number):
        return self.row(number)


def weights(data, loss=None):
    torch.manual_seed(0)
    run = train(
        nn.Linear(10, 3),
        data,
        dp_sgd(noise_multiplier=1.0),
        sampling=poisson(0.5),
        steps=2,
        noise=seeded(1),
        seed=2,
        sampler_key=3,
        recipe=Recipe(loss=loss or nn.CrossEntropyLoss()),
    )
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


@subtests(
    "data",
    [
        TensorDataset(X, Y),
        Rows(lambda i: (X[i], int(Y[i]))),
        Rows(lambda i: {"x": X[i], "label": int(Y[i])}),
        Rows(lambda i: {"image": X[i].numpy(), "target": Y[i]}),
        Rows(lambda i: (X[i].numpy(), np.int64(Y[i]))),
        Rows(lambda i: (X[i].tolist(), float(Y[i]))),
        (X.numpy(), Y.numpy()),
        [X, Y],
        (X.double(), Y),
        (X, Y.int()),
        (X, Y.float()),
        (X, nn.functional.one_hot(Y, 3)),
    ],
)
def test_what_can_be_read_in_one_way_trains_the_same_model(data):
    assert torch.equal(weights(data), weights((X, Y)))


@subtests(
    ("data", "words"),
    [
        (DataLoader(TensorDataset(X, Y), batch_size=4), "must be a dataset or tensors, got a DataLoader: .* pass its"),
        (DataLoader(TensorDataset(X, Y), batch_size=12), "must be a dataset or tensors, got a DataLoader"),
        (TensorDataset(X, Y, Y), r"must be \(inputs, labels\), got 3 parts"),
        (Rows(lambda i: (X[i], Y[i], Y[i])), r"rows of examples must be \(input, label\), got 3 values in row 0"),
        (
            Rows(lambda i: {"x": X[i], "mask": X[i], "label": 0}),
            "the arguments of Linear.forward, got mask, x: missing",
        ),
        (Rows(lambda i: {"a": X[i], "b": 0}), "got a dictionary of a, b in row 0"),
        (Rows(lambda i: (torch.zeros(3 + i % 2), 0)), r"of one shape, got \[3\] in row 0 and \[4\] in row 1"),
        ((pd.DataFrame(X.numpy()), Y), "must hold tensors, arrays or numbers, got DataFrame"),
        (Rows(lambda i: (object(), 0)), "must hold tensors, arrays or numbers, got object"),
        ((X, Y + 1), "must be class numbers from 0 to 2, as the model answers, got 1 to 3; subtract 1"),
        ((X, Y - 1), "must be class numbers from 0 to 2, as the model answers, got -1 to 1"),
        ((X, Y.float() + 0.5), "labels of examples must be class numbers, got [0-2].5"),
        ((X, Y[:20]), "of one length above 0, got 24, 20"),
        ((X, 3), "of one length above 0, got 24, a number"),
    ],
)
def test_what_can_not_is_one_sentence(data, words):
    with pytest.raises(ValueError, match=words):
        weights(data)


def test_labels_of_other_losses_are_left_as_they_are():
    def squares(outputs, targets):
        return (outputs[:, 0] - targets).square()

    halves = Y.float() / 2
    assert not torch.equal(weights((X, halves), squares), weights((X, halves.round()), squares))
    ignored = nn.CrossEntropyLoss(ignore_index=7)
    assert weights((X, torch.where(Y == 0, 7, Y)), ignored).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_an_example_that_is_public_in_another_precision_is_no_secret(dtype):
    def trained(private, public):
        train(nn.Linear(10, 3), private, dp_sgd(noise_multiplier=1.0), sampling=poisson(0.5), steps=1, public=public)

    halves = X.half().float()  # numbers that every precision has
    for private, public in ((halves.to(dtype), halves[:2]), (halves, halves[:2].to(dtype))):
        with pytest.raises(ValueError, match="public"):
            trained((private, Y), (public, Y[:2]))
    trained((halves.to(dtype), Y), (X[:2] + 100, Y[:2]))
