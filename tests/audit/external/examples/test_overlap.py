"""Copies and near-copies between groups, and groups without them."""

import numpy as np
import pytest
import torch

from leakbench.attacks.core import Examples
from leakbench.audit.external.examples import overlap
from leakbench.audit.external.examples.groups import DataFile, groups_of
from leakbench.audit.external.examples.overlap import contents, near_duplicates, without_shared
from leakbench.benchmarks import data


@pytest.fixture(scope="module")
def digits():
    splits = data.load("digits")
    return splits.private.inputs, splits.non_member.inputs


def test_copies_have_one_number_and_nothing_else_has(digits):
    first, second = digits
    own, other = contents([first, torch.cat([second, first[5:6], first[5:6] + 1e-6])])
    assert len(np.unique(own)) == 700
    assert np.flatnonzero(np.isin(other, own)).tolist() == [700]
    # Values at exchanged places, and numbers that differ in their highest bits alone, are other inputs.
    rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [-0.0, 2.0], [0.0, 0.0]])
    (codes,) = contents([rows])
    assert len(np.unique(codes)) == 4
    assert codes[2] == codes[3]
    bits = torch.tensor(2.0) ** torch.arange(-60, 60)
    (codes,) = contents([torch.stack([bits, bits.flip(0)], 1)])
    assert len(np.unique(codes)) == 120


def _file(inputs, name):
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    return DataFile(source=name, sha256="", inputs=inputs, labels=labels, names=tuple(map(str, range(len(inputs)))))


def test_shared_examples_leave_both_groups_and_the_population(digits):
    first, second = digits
    groups = groups_of(
        _file(first, "in"),
        _file(torch.cat([first[:9], second]), "out"),
        _file(torch.cat([first[:20], second[:3] / 2]), "p"),
    )
    left = without_shared(groups)
    assert torch.equal(left.members.inputs, first[9:])
    assert torch.equal(left.non_members.inputs, second)
    assert left.population is not None
    assert torch.equal(left.population.inputs, second[:3] / 2)
    assert left.sources["members"].notes == ("9 examples that another group has were left out",)
    assert not torch.isin(left.members.ids, left.non_members.ids).any()
    alike = groups_of(_file(first, "in"), _file(first, "out"))
    with pytest.raises(ValueError, match="all 700 are shared"):
        without_shared(alike)


@pytest.mark.parametrize("make", [lambda x, noise: x + 0.02 * noise, lambda x, noise: 0.97 * x])
def test_near_copies_are_found_and_strangers_are_not(digits, make):
    first, second = digits
    noise = torch.randn(700, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert near_duplicates(first, second).count == 0
    found = near_duplicates(first, torch.cat([second, make(first, noise)[:50]]))
    # Two of the same class may be near one another already, so that a near-copy is not much nearer.
    assert 45 <= found.count <= 50
    assert near_duplicates(first, first).count == 0  # these are copies


def test_points_of_a_dense_cloud_are_near_one_another_and_no_duplicates():
    coins = torch.Generator().manual_seed(0)
    for numbers, most in ((2, 0), (8, 10)):
        first, second = torch.rand(2, 2000, numbers, generator=coins)
        assert near_duplicates(first, second).count <= most


def test_wide_inputs_are_shortened_and_large_groups_drawn_from(monkeypatch):
    coins = torch.Generator().manual_seed(0)
    for shape in ((3, 40, 40), (5000,)):
        first, second = torch.rand(2, 60, *shape, generator=coins)
        assert near_duplicates(first, second).count == 0
        second[:10] = first[:10] + 0.01 * torch.randn(10, *shape, generator=coins)
        found = near_duplicates(first, second)
        assert (found.count, found.compared, found.of) == (10, 60, 60)
    monkeypatch.setattr(overlap, "LARGEST", 30)
    found = near_duplicates(first, second)
    assert (found.compared, found.of) == (30, 60)


def test_groups_keep_their_examples_where_nothing_is_shared(digits):
    groups = groups_of(_file(digits[0], "in"), _file(digits[1], "out"))
    left = without_shared(groups)
    assert isinstance(left.members, Examples)
    assert torch.equal(left.members.ids, groups.members.ids)
    assert left.population is None
    assert left.sources == groups.sources
