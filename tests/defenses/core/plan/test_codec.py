"""Codecs are linear, orthonormal, and decode by their adjoint; posts are projections."""

import pytest
import torch
from jaxtyping import TypeCheckError

from leakbench.defenses.core import (
    Complement,
    Coordinates,
    Everything,
    Identity,
    Keep,
    Masked,
    Offset,
    Project,
    Subspace,
    spread,
)

from ....parameters import subtests

DIM = 12


def basis(rows, columns, seed=0):
    draw = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(draw).Q


BLOCKED = Subspace((basis(4, 2), basis(5, 1, seed=1)), ((1, 5), (6, 11)), DIM)
KEPT = Coordinates(torch.tensor([10, 1, 2, 5, 6, 9, 11]), dim=DIM)
OF_KEPT = Subspace((basis(3, 2), basis(0, 0), basis(4, 1, seed=1)), ((0, 3), (3, 3), (3, 7)), 7)
CODECS = {
    "everything": Everything(DIM),
    "coordinates": Coordinates(torch.tensor([7, 1, 4]), dim=DIM),
    "no coordinates": Coordinates(torch.tensor([], dtype=torch.int64), dim=DIM),
    "subspace": Subspace.of(basis(DIM, 3)),
    "layer-wise subspace": BLOCKED,
    "whole space": Subspace.of(basis(DIM, DIM)),
    "empty subspace": Subspace((), (), DIM),
    "complement": Complement(BLOCKED),
    "complement of nothing": Complement(Subspace((), (), DIM)),
    "complement of everything": Complement(Subspace.of(basis(DIM, DIM))),
    "everything of a mask": Masked(KEPT, Everything(7)),
    "subspace of a mask": Masked(KEPT, OF_KEPT),
    "complement within a mask": Masked(KEPT, Complement(OF_KEPT)),
    "mask of a mask": Masked(KEPT, Masked(Coordinates(torch.tensor([0, 4]), dim=7), Everything(2))),
}
each = subtests("name", CODECS)


def draws(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@each
def test_decoding_is_the_adjoint_of_encoding(name):
    codec = CODECS[name]
    rows, values = draws(5, DIM), draws(codec.size, seed=4)
    torch.testing.assert_close(codec.encode(rows) @ values, rows @ codec.decode(values))


@each
def test_what_is_encoded_and_decoded_is_the_orthogonal_projection(name):
    codec = CODECS[name]
    assert (codec.dim, codec.encode(draws(2, DIM)).shape) == (DIM, (2, codec.size))
    projected = torch.stack([codec.decode(v) for v in codec.encode(draws(5, DIM))])
    twice = torch.stack([codec.decode(v) for v in codec.encode(projected)])
    torch.testing.assert_close(twice, projected)
    inner = ((draws(5, DIM) - projected) * projected).sum(dim=1)
    torch.testing.assert_close(inner, torch.zeros(5, dtype=torch.float64))


@each
def test_no_row_gets_longer_and_nothing_is_lost_inside(name):
    codec = CODECS[name]
    rows = draws(20, DIM)
    norms = codec.encode(rows).norm(dim=1)
    assert (norms <= rows.norm(dim=1) + 1e-12).all()
    decoded = torch.stack([codec.decode(v) for v in codec.encode(rows)])
    torch.testing.assert_close(decoded.norm(dim=1), norms)


@each
def test_rows_are_encoded_one_by_one(name):
    codec, rows = CODECS[name], draws(6, DIM)
    one_by_one = torch.cat([codec.encode(row) for row in rows.split(1)])
    torch.testing.assert_close(one_by_one, codec.encode(rows))
    assert codec.encode(rows[:0]).shape == (0, codec.size)


@each
def test_the_signal_is_what_rows_can_reach(name):
    codec = CODECS[name]
    reachable = codec.encode(draws(9, DIM))
    torch.testing.assert_close(codec.signal(reachable), reachable)
    values = draws(4, codec.size)
    torch.testing.assert_close(codec.signal(values), torch.stack([codec.signal(v) for v in values]))
    torch.testing.assert_close(codec.signal(codec.signal(values)), codec.signal(values))


@each
def test_encoding_is_differentiable(name):
    rows = draws(2, DIM).requires_grad_()
    assert torch.autograd.gradcheck(CODECS[name].encode, (rows,))


def test_directions_of_a_mask_are_directions_of_whole_rows_that_are_zero_where_it_drops():
    whole, rows = spread(OF_KEPT, KEPT), draws(5, DIM)
    assert whole.spans == ((1, 6), (0, 0), (6, 12)) and whole.ranks == OF_KEPT.ranks
    torch.testing.assert_close(whole.encode(rows), Masked(KEPT, OF_KEPT).encode(rows))
    assert bool((whole.decode(draws(3))[[0, 3, 4, 7, 8]] == 0).all())
    with pytest.raises(ValueError, match="codec must be of the 7 kept coordinates, got one of 12"):
        Masked(KEPT, BLOCKED)


def test_a_complement_and_its_subspace_split_a_row_by_pythagoras():
    rows = draws(7, DIM)
    inside, rest = BLOCKED.encode(rows), Complement(BLOCKED).encode(rows)
    torch.testing.assert_close(inside.square().sum(dim=1) + rest.square().sum(dim=1), rows.square().sum(dim=1))
    sums = BLOCKED.decode(inside.sum(dim=0)) + Complement(BLOCKED).decode(rest.sum(dim=0))
    torch.testing.assert_close(sums, rows.sum(dim=0))


def test_a_complement_decodes_noise_inside_the_subspace_only_when_told_to():
    noise = draws(DIM)
    torch.testing.assert_close(BLOCKED.project(Complement(BLOCKED).decode(noise)[None]), torch.zeros(1, DIM).double())
    assert torch.equal(Complement(BLOCKED, project_noise=False).decode(noise), noise)


def test_kept_coordinates_are_released_in_order_and_the_others_are_exactly_zero():
    codec = Coordinates(torch.tensor([7, 1, 4]), dim=9)
    assert codec.encode(torch.arange(9.0)[None]).tolist() == [[1.0, 4.0, 7.0]]
    assert codec.decode(torch.tensor([10.0, 40.0, 70.0])).tolist() == [0, 10, 0, 0, 40, 0, 0, 70, 0]


def test_coordinates_in_order_are_those_that_were_given_whatever_the_caller_writes_later():
    given = torch.tensor([1, 4, 7])
    codec = Coordinates(given, dim=9)
    given[0] = 8
    assert codec.kept.tolist() == [1, 4, 7]
    with pytest.raises((RuntimeError, TypeCheckError)):
        Coordinates(given[None], dim=9)


@subtests("share", [0.0, 0.01, 0.5, 1.0])
@subtests("dim", [1, 9, 1000])
def test_coordinates_of_a_mask_are_those_that_it_marks(share, dim):
    mask = torch.rand(dim, generator=torch.Generator().manual_seed(0)) < share
    codec = Coordinates.of(mask)
    assert codec.dim == dim and codec.kept.dtype == torch.int64
    assert codec.kept.tolist() == [number for number, kept in enumerate(mask.tolist()) if kept]
    assert torch.equal(Coordinates(codec.kept.flip(0), dim=dim).kept, codec.kept)
    assert torch.equal(codec.decode(torch.ones(codec.size)), mask.float())


def test_float32_bases_stay_orthogonal_to_what_they_leave_over():
    subspace = Subspace.of(basis(2000, 30).float())
    rows = 1e3 * torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    rest = Complement(subspace).encode(rows)
    assert (subspace.encode(rest).norm(dim=1) <= 1e-5 * rows.norm(dim=1)).all()


@subtests(
    ("kept", "message"),
    [
        ([0, 5], r"kept must lie in \[0, 5\), got 0 to 5"),
        ([-1, 2], r"kept must lie in \[0, 5\), got -1 to 2"),
        ([1, 3, 1], "kept must not repeat a coordinate"),
    ],
)
def test_coordinates_that_are_no_mask_are_refused(kept, message):
    with pytest.raises(ValueError, match=message):
        Coordinates(torch.tensor(kept), dim=5)


@subtests(
    ("bases", "spans", "message"),
    [
        ((torch.ones(4, 1),), ((0, 4),), "basis must have orthonormal columns, got an error of"),
        (
            (torch.full((4, 1), 0.5, dtype=torch.bfloat16),),
            ((0, 4),),
            "basis must be float32 or float64, got torch.bfloa",
        ),
        ((torch.full((4, 1), torch.nan),), ((0, 4),), "basis must have orthonormal columns"),
        ((basis(4, 1),), ((0, 3),), "basis must have 3 rows for its span, got 4"),
        ((basis(4, 1), basis(4, 1)), ((0, 4), (3, 7)), "spans must be disjoint, increasing and inside"),
        ((basis(4, 1), basis(4, 1)), ((4, 8), (0, 4)), "spans must be disjoint, increasing and inside"),
        ((basis(4, 1),), ((9, 13),), r"spans must be disjoint, increasing and inside \[0, 12\)"),
        ((basis(4, 1),), (), "spans must be disjoint, increasing and inside"),
    ],
)
def test_a_basis_that_would_decode_wrongly_is_refused(bases, spans, message):
    with pytest.raises(ValueError, match=message):
        Subspace(bases, spans, DIM)


def test_posts_project_mask_shift_or_leave_alone():
    update = draws(DIM)
    assert torch.equal(Identity()(update), update)
    projected = BLOCKED.project(update[None])[0]
    torch.testing.assert_close(Project(BLOCKED)(update), projected)
    projected[1:5] *= 4 / 2  # length of the span over its rank
    projected[6:11] *= 5 / 1
    torch.testing.assert_close(Project(BLOCKED, rescale=True)(update), projected)
    kept = Keep(Coordinates(torch.tensor([0, 3]), dim=DIM))(update)
    assert kept.nonzero().squeeze(1).tolist() == [0, 3]
    assert torch.equal(kept[[0, 3]], update[[0, 3]])
    assert torch.equal(Offset(torch.ones(DIM))(update), update + 1)


def test_a_mask_is_refused_with_what_to_write_instead():
    mask = torch.tensor([True, False, True])
    made = object.__new__(Coordinates)  # past the types that are checked while tests run, and nowhere else
    object.__setattr__(made, "kept", mask)
    object.__setattr__(made, "dim", 3)
    with pytest.raises(ValueError, match=r"kept must be coordinates, int64, got torch\.bool; .*Coordinates\.of"):
        made.__post_init__()
    assert Coordinates(mask.nonzero().flatten(), dim=3).size == 2


def test_the_complement_of_coordinates_is_the_rows_with_those_exactly_zero():
    rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    left_out = Coordinates(torch.tensor([7, 2, 3]), dim=9)
    rest = Complement(left_out)
    expected = rows.index_fill(1, left_out.kept, 0.0)
    assert torch.equal(rest.encode(rows), expected) and torch.equal(rest.signal(rows), expected)
    assert torch.equal(rest.decode(rows[0]), expected[0])
    assert torch.equal(Complement(left_out, project_noise=False).decode(rows[0]), rows[0])
