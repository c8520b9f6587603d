"""A result is kept as long as it is that of the tensors it was computed from."""

import copy
import pickle

import torch

from leakbench.defenses.core.plan.implicit_subspace import ImplicitSubspace
from leakbench.defenses.core.plan.linear_algebra.memo import Memo


def test_a_result_is_computed_once_and_again_when_somebody_writes():
    memo, tensor, calls = Memo[float](), torch.ones(3), []

    def total() -> float:
        calls.append(1)
        return float(tensor.sum())

    assert memo.empty
    assert memo.of((tensor,), total) == memo.of((tensor,), total) == 3 and len(calls) == 1 and not memo.empty
    tensor[0] = 5.0
    assert memo.of((tensor,), total) == 7 and len(calls) == 2
    tensor = torch.zeros(3)
    assert memo.of((tensor,), total) == 0 and len(calls) == 3


def test_nothing_is_kept_of_tensors_that_do_not_count_what_is_written():
    with torch.inference_mode():
        tensor = torch.ones(3)
    memo = Memo[float]()
    assert memo.of((tensor,), lambda: 1.0) == 1 and memo.of((tensor,), lambda: 2.0) == 2 and memo.empty


def test_copies_and_files_hold_no_result():
    memo = Memo[float]()
    memo.of((torch.ones(1),), lambda: 1.0)
    assert copy.deepcopy(memo).empty and pickle.loads(pickle.dumps(memo)).empty  # noqa: S301  our own


def test_moments_of_kept_bases_follow_them():
    basis = torch.linalg.qr(torch.randn(50, 4, generator=torch.Generator().manual_seed(0))).Q
    subspace = ImplicitSubspace((basis,), ((0, 50),), 50)
    (before,) = subspace.moments()
    assert subspace.moments()[0] is before
    torch.testing.assert_close(before, torch.eye(4).double(), rtol=0, atol=1e-6)
    basis *= 2
    torch.testing.assert_close(subspace.moments()[0], 4 * torch.eye(4).double(), rtol=0, atol=1e-5)
