"""Features of a public encoder: standardised by public statistics alone, or refused in one sentence."""

import re

import numpy as np
import pytest
import torch

from leakbench.benchmarks import data, models
from leakbench.benchmarks.core import Sizes
from leakbench.benchmarks.data.own.features import LARGEST

from ..parameters import subtests

DIM = 6


def vectors(n: int, seed: int = 0) -> np.ndarray:
    """Rows of which no two are equal; each feature has a mean and a scale of its own, and the last is constant."""
    rows = np.random.default_rng(seed).normal(size=(n, DIM)).astype(np.float32) * np.arange(1, DIM + 1) + 5
    rows[:, -1] = 3.3
    return rows.astype(np.float32)


def stored(place, **changes) -> str:
    arrays = {"x_train": vectors(60), "y_train": np.arange(60) % 3, "x_test": vectors(20, 1)}
    arrays |= {"y_test": np.arange(20) % 3} | changes
    np.savez(place, **{name: array for name, array in arrays.items() if array is not None})
    return f"features:{place}"


def test_they_are_standardised_by_the_public_pool_whoever_is_private(tmp_path):
    name, raw = stored(tmp_path / "own.npz"), vectors(60).astype(np.float64)
    splits = data.load(name, sizes=Sizes(private=20, non_member=20, public=20))
    public = splits.public.inputs
    torch.testing.assert_close(public.mean(0), torch.zeros(DIM), atol=1e-5, rtol=0)
    torch.testing.assert_close(public[:, :-1].std(0, correction=0), torch.ones(DIM - 1))
    seen = raw[splits.public.ids]
    std = seen.std(0)
    std[-1] = 1  # of the constant feature
    for pool in (splits.private, splits.non_member):
        expected = (raw[pool.ids] - seen.mean(0)) / std
        torch.testing.assert_close(pool.inputs.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
    assert splits.test is not None
    expected = (vectors(20, 1) - seen.mean(0)) / std
    torch.testing.assert_close(splits.test.inputs.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
    assert splits.private.inputs[:, -1].abs().max() < 1e-5
    assert (splits.input_shape, splits.classes, splits.low, splits.high) == ((DIM,), 3, -LARGEST, LARGEST)


def test_a_private_row_moves_nothing_but_itself(tmp_path):
    splits = data.load(stored(tmp_path / "own.npz"))
    rows = vectors(60)
    rows[splits.private.ids[0]] = 1e4
    moved = data.load(stored(tmp_path / "moved.npz", x_train=rows))
    assert torch.equal(moved.private.inputs[1:], splits.private.inputs[1:])
    assert torch.equal(moved.public.inputs, splits.public.inputs)
    # What is far out is cut to the range of valid inputs.
    assert moved.private.inputs[0].tolist() == [LARGEST] * DIM
    assert moved.digest != splits.digest


def test_loading_again_standardises_once(tmp_path):
    name = stored(tmp_path / "own.npz")
    first, again = data.load(name), data.load(name)
    assert torch.equal(first.private.inputs, again.private.inputs) and first.digest == again.digest
    # The test set in the place of the non-members is one tensor, and is not standardised twice.
    alone = data.load(name, sizes=Sizes(private=40, non_member=0, public=12))
    assert torch.equal(alone.public.ids, first.public.ids) and alone.test is not None and first.test is not None
    assert torch.equal(alone.non_member.inputs, first.test.inputs)


def test_without_a_public_pool_they_are_standardised_by_the_file_or_refused(tmp_path):
    everybody = Sizes(private=60, non_member=0, public=0)
    with pytest.raises(
        ValueError, match=r"must have public examples to be standardised by, got none; set task\.public"
    ):
        data.load(stored(tmp_path / "own.npz"), sizes=everybody)
    given = {"mean": np.full(DIM, 5.0), "std": np.arange(1.0, DIM + 1)}
    splits = data.load(stored(tmp_path / "given.npz", **given), sizes=everybody)
    expected = (vectors(60) - given["mean"]) / given["std"]
    torch.testing.assert_close(splits.private.inputs.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
    # They go before those of a public pool, which would be others under other sizes.
    some = data.load(stored(tmp_path / "given.npz", **given))
    torch.testing.assert_close(some.public.inputs, splits.private.inputs[some.public.ids])
    other = data.load(stored(tmp_path / "given.npz", **(given | {"std": np.full(DIM, 2.0)})), sizes=everybody)
    assert other.digest != splits.digest


def test_the_paper_s_head_has_its_parameters():
    model = models.build("linear", input_shape=(4096,), classes=10)
    assert sum(p.numel() for p in model.parameters()) == 40_970
    assert model(torch.zeros(2, 4096)).shape == (2, 10)


NAN = vectors(60)
NAN[7, 2] = np.nan
LARGE = vectors(60).astype(np.float64)
LARGE[5, 1] = 1e300


@subtests(
    "changes, sentence",
    [
        ({"x_train": NAN}, "x_train of {file} must be finite as floats of 32 bits, got another value in row 7"),
        ({"x_train": LARGE}, "x_train of {file} must be finite as floats of 32 bits, got another value in row 5"),
        (
            {"x_train": np.zeros((60, 3, 4, 4), np.float32)},
            "x_train of {file} must be floats [n, dim], got float32 of shape [60, 3, 4, 4]; images are read by npz:",
        ),
        ({"x_test": np.zeros((20, DIM), np.uint8)}, "x_test of {file} must be floats [n, dim], got uint8"),
        ({"x_test": vectors(20)[:, 1:]}, "features of {file} must be as many in training as in test, got 6 and 5"),
        ({"y_train": np.arange(60) / 2}, "y_train of {file} must be one whole number an example, got float64"),
        ({"y_test": np.arange(19)}, "y_test of {file} must have one class an example, got 19 for 20 examples"),
        ({"y_train": None}, "{file} must have arrays x_train and y_train, x and y (one pair of them), got x_train"),
        ({"y_train": np.zeros(60, int)}, "{name} must have at least two classes, got 1: a classifier needs two"),
        ({"x_train": np.array([{}] * 60)}, "{file} must be a whole .npz file of plain numeric arrays"),
        ({"std": np.ones(DIM)}, "mean of {file} must be floats [6], one a feature, got none"),
        ({"mean": np.ones(5), "std": np.ones(DIM)}, "mean of {file} must be floats [6], one a feature, got float64 of"),
        ({"mean": np.full(DIM, np.inf), "std": np.ones(DIM)}, "mean of {file} must be finite, got values from inf"),
        (
            {"mean": np.ones(DIM), "std": np.zeros(DIM)},
            "std of {file} must be finite and positive, 1 for a constant feature, got values from 0 to 0",
        ),
    ],
)
def test_what_are_no_features_is_refused_in_one_sentence(tmp_path, changes, sentence):
    file = tmp_path / "own.npz"
    name = stored(file, **changes)
    with pytest.raises(ValueError, match=re.escape(sentence.format(file=file, name=name))) as caught:
        data.load(name)
    assert "\n" not in str(caught.value)
