"""What is particular to the float grid: it finds noise in single precision, and nothing in ours."""

import math
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from leakbench.attacks.float_grid import compared, evidence, float_grid
from leakbench.defenses.core import clip, from_os, secure, seeded
from leakbench.defenses.core.gradients.exact_sums import whole_units

from ..parameters import subtests
from . import toys

DIM = 40_000


def unit_rows(count: int, dim: int, seed: int = 0) -> Tensor:
    rows = torch.randn(count, dim, generator=toys.generator(seed))
    return rows / rows.norm(dim=1, keepdim=True)


def from_generator(rows: Tensor, std: float) -> Tensor:
    """As leakbench did until 2026-11: PyTorch's normal in float32, scaled and added in float32."""
    coins = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
    return rows.sum(dim=0).add_(torch.empty(rows.shape[1]).normal_(generator=coins), alpha=std)


def cast(rows: Tensor, std: float) -> Tensor:
    """As leakbench's `secure` did until 2026-11: drawn in float64 from the system's bits, cast, added in float32."""
    bits = torch.frombuffer(bytearray(os.urandom(32 * rows.shape[1])), dtype=torch.int64)
    uniform = ((bits >> 12).double() + (2.0**51 + 0.5)) / 2.0**52
    drawn = (torch.special.ndtri(uniform).view(4, -1).sum(dim=0) / 2).float()
    return rows.sum(dim=0).add_(drawn, alpha=std)


def opacus(rows: Tensor, std: float, **settings: bool) -> Tensor:
    noise = pytest.importorskip("opacus.optimizers.optimizer", reason="opacus is of leakbench[engines]")
    sums = rows.sum(dim=0)
    return sums + noise._generate_noise(std, sums, **settings)


def opacus_secure(rows: Tensor, std: float) -> Tensor:
    return opacus(rows, std, secure_mode=True)


PEERS = [pytest.param(release, marks=pytest.mark.peers) for release in (opacus, opacus_secure)]


def ours_os(rows: Tensor, std: float) -> Tensor:
    return from_os().add(rows.double().sum(dim=0), std).float()


def ours_secure(rows: Tensor, std: float) -> Tensor:
    source = secure()
    return source.add(sum_of_units(rows, source.unit(std)), std).float()


def sum_of_units(rows: Tensor, unit: float) -> Tensor:
    return torch.stack([whole_units(row[None].double(), clip(1.0), unit)[0] for row in rows]).sum(dim=0)


def suppositions(release, std: float, releases: int, dim: int, others: int = 20) -> tuple[Tensor, Tensor]:
    """Evidence for one candidate and against it [grids, releases], in releases with it and then in as many without."""
    rows = unit_rows(others + 1, dim)
    known, own = rows[:-1].double().sum(dim=0), rows[-1].double()
    sums = torch.stack([release(some, std) for some in (rows, rows[:-1]) for _ in range(releases)]).double()
    left, spread = sums - known, torch.full((dim,), std, dtype=torch.float64)
    return evidence(left - own, sums, spread), evidence(left, sums, spread)


def before_chance(with_it: Tensor, without: Tensor) -> Tensor:
    """The difference where fits are best, however small."""
    return (with_it - without).gather(0, torch.maximum(with_it, without).argmax(dim=0, keepdim=True))[0]


def auc(found: Tensor) -> float:
    return toys.auc(found, torch.arange(len(found)) < len(found) // 2)


@subtests("std", [2.0, 10.0])
@pytest.mark.parametrize("release", [from_generator, cast, *PEERS])
def test_noise_in_single_precision_gives_every_release_away(release, std):
    found = compared(*suppositions(release, std, 4, DIM))
    assert (found[:4] > 1).all() and (found[4:] < -1).all()


@pytest.mark.long
@subtests("std", [2.0, 10.0])
@subtests("release", [ours_os, ours_secure])
def test_nothing_is_found_in_ours(release, std):
    found = suppositions(release, std, 60, 2_000)
    assert (compared(*found) == 0).all()
    # Nor below what counts: 60 against 60 without any signal have an AUC of std 0.053.
    assert abs(auc(before_chance(*found)) - 0.5) < 6 * 0.053


@pytest.mark.slow
@pytest.mark.parametrize("std", [2.0, 10.0])
@pytest.mark.parametrize(
    ("release", "leaks"),
    [
        (from_generator, True),
        (cast, True),
        (opacus, True),
        (opacus_secure, True),
        (ours_os, False),
        (ours_secure, False),
    ],
)
def test_forty_releases_each_way_of_a_model_of_200_000_parameters(release, leaks, std):
    parts = [suppositions(release, std, 1, 200_000, others=100) for _ in range(40)]  # a few at a time, for memory
    found = [torch.stack([part[side] for part in parts], dim=2).flatten(1) for side in (0, 1)]
    assert auc(compared(*found)) == (1.0 if leaks else 0.5)
    assert leaks or abs(auc(before_chance(*found)) - 0.5) < 4 * 0.065


@pytest.mark.long
def test_the_noise_of_a_continuum_gives_evidence_around_zero_whatever_its_size():
    """Else the score would hold what Gaussian tests find already, and nothing could be learned from it."""
    drawn = torch.randn(200, 4_000, generator=toys.generator(2), dtype=torch.float64)
    sums = 0.98 * drawn  # finer than the noise where a power of two lies between them
    for size in (0.5, 1.0, 1.7):
        found = evidence(size * drawn, size * sums, torch.full((4_000,), 1.3, dtype=torch.float64))
        for grid in found[:2]:
            assert abs(grid.mean()) < 5 / 200**0.5 and 0.8 < grid.std() < 1.2
        assert abs(found[3].mean()) < 0.5 and 0.7 < found[3].std() < 1.3  # its spread is that of a largest of 16


@subtests("offset", [0, 1, 7, 13])
def test_pairs_are_found_wherever_a_tensor_begins(offset):
    drawn = torch.cat([torch.zeros(offset), torch.randn(8_000, generator=toys.generator(1))]).double()[None]
    assert evidence(drawn, drawn + 1e-3, torch.ones(drawn.shape[1], dtype=torch.float64))[3] > 20


def test_fewer_numbers_than_a_block_show_no_pairs():
    drawn = torch.randn(2, 5, generator=toys.generator(0), dtype=torch.float64)
    found = evidence(drawn, drawn, torch.full((5,), 1.3, dtype=torch.float64))
    assert (found[3] == -math.inf).all() and (found[1] > -math.inf).all()


def test_a_release_without_noise_has_no_grid_to_ask():
    target, _ = toys.membership_step(noise=0.0, count=20)
    assert (float_grid(target).scores == 0).all()


def test_the_key_of_seeded_noise_changes_nothing_about_it():
    source = seeded(3)
    release = lambda rows, std: source.add(rows.double().sum(dim=0), std).float()  # noqa: E731
    assert (compared(*suppositions(release, 10.0, 60, 2_000)) == 0).all()


def test_no_tensor_grows_with_the_number_of_candidates():
    largest = []
    for count in (100, 400):
        target, _ = toys.rounded_step(count=count)
        assert target.others_removed is not None
        rows, remainder = torch.randn(32, len(target.released)), target.others_removed()
        given = {"others_removed": lambda part, left=remainder: left[part]}
        own = replace(target, contributions=lambda x, y, rows=rows: rows, **given)
        with toys.LargestMade() as watched:
            assert len(float_grid(own).scores) == count
        largest.append(watched.entries)
    # Of a batch of contributions, in any number of columns that evidence pads them to.
    assert largest[0] == largest[1] < remainder.numel() / 2, (largest, remainder.shape)
