"""How pools are dealt from a training part, and that they are slices of one tensor."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.benchmarks.core import LabelledImages, Sizes, Splits
from leakbench.benchmarks.core.data.dealing import pool_sizes

from ..parameters import subtests

DEFAULTS = Sizes(private=40, non_member=40, public=20)
POOLS = ("private", "non_member", "public")


def dataset(train: int = 100, test: int = 30) -> LabelledImages:
    """Every pixel of an image is its id."""
    ids = torch.arange(train + test)
    pixels = (ids % 256).to(torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2).contiguous()
    return LabelledImages(pixels=pixels, labels=ids % 5, train=train, classes=5)


def deal(
    whole: LabelledImages, *, seed: int = 0, sizes: Sizes | None = None, defaults: Sizes | None = DEFAULTS
) -> Splits:
    return whole.deal(name="toy", about="toys", seed=seed, sizes=sizes or Sizes(), defaults=defaults)


def present(splits: Splits):
    return [pool for pool in (splits.private, splits.non_member, splits.public, splits.test) if pool is not None]


def test_members_non_members_and_public_come_from_the_training_part_and_the_test_part_is_whole():
    splits = deal(dataset())
    assert [len(pool) for pool in present(splits)] == [40, 40, 20, 30]
    dealt = torch.cat([pool.ids for pool in present(splits)[:3]])
    assert sorted(dealt.tolist()) == list(range(100))
    assert splits.test is not None
    assert splits.test.ids.tolist() == list(range(100, 130))


def test_inputs_and_labels_follow_the_ids():
    for pool in present(deal(dataset())):
        assert torch.equal(pool.inputs[:, 2, 1, 1], (pool.ids % 256) / 255)
        assert torch.equal(pool.labels, pool.ids % 5)


def test_the_public_pool_is_the_same_under_every_seed_and_the_members_are_not():
    splits = [deal(dataset(), seed=seed) for seed in range(4)]
    assert len({tuple(s.public.ids.tolist()) for s in splits}) == 1
    assert len({tuple(s.private.ids.tolist()) for s in splits}) == 4


def test_nobody_is_private_whose_image_is_public():
    whole = dataset(train=100)
    copies = whole.pixels.clone()
    copies[50:100] = copies[:50]  # everybody twice
    splits = deal(replace(whole, pixels=copies))
    looks = [set(pool.inputs[:, 0, 0, 0].tolist()) for pool in present(splits)]
    assert not looks[2] & (looks[0] | looks[1])
    # What was not asked for shrinks alike: 20 public ones, and as many as are unlike them.
    left = 100 - 20 - len(set((splits.public.ids + 50).remainder(100).tolist()) - set(splits.public.ids.tolist()))
    assert [len(pool) for pool in present(splits)] == [left // 2, left // 2, 20, 30]
    sentence = "sizes of toy, without .* images that equal public ones, must add up to at most .*, got 100"
    with pytest.raises(ValueError, match=sentence):
        deal(replace(whole, pixels=copies), sizes=Sizes(private=40, non_member=40, public=20))
    assert [len(pool) for pool in present(deal(replace(whole, pixels=copies), sizes=Sizes(public=0)))][:2] == [40, 40]


def test_members_and_non_members_are_exchangeable():
    """Each of 100 examples is a member half as often as it is either, 5 standard deviations at 400 seeds."""
    whole, member, either = dataset(), torch.zeros(100), torch.zeros(100)
    for seed in range(400):
        splits = deal(whole, seed=seed)
        member[splits.private.ids] += 1
        either[splits.private.ids] += 1
        either[splits.non_member.ids] += 1
    assert set(either.tolist()) == {0.0, 400.0}  # never or always: who is public is fixed
    assert (member[either > 0] / 400 - 0.5).abs().max() < 5 * (0.25 / 400) ** 0.5


def test_smaller_pools_are_parts_of_larger_ones():
    whole, part = deal(dataset()), deal(dataset(), sizes=Sizes(private=10, public=20))
    assert set(part.private.ids.tolist()) < set(whole.private.ids.tolist())
    assert torch.equal(part.public.ids, whole.public.ids)


def test_all_training_data_may_be_members_and_then_the_test_set_stands_in_for_the_non_members():
    splits = deal(dataset(), sizes=Sizes(private=100, non_member=0, public=0))
    assert len(splits.private) == 100
    assert len(splits.public) == 0
    assert splits.non_member is splits.test
    assert splits.about == "toys; non-members are the official test set"
    assert deal(dataset()).about == "toys"
    assert splits.to("meta").non_member.ids.shape == (30,)


@given(
    asked=st.tuples(*[st.none() | st.integers(0, 60)] * 3),
    available=st.integers(1, 120),
    tested=st.booleans(),
    own=st.booleans(),
)
def test_pools_fit_have_what_is_asked_for_and_are_empty_only_where_asked(asked, available, tested, own):
    if asked[0] == 0:
        return
    sizes = Sizes(private=asked[0], non_member=asked[1], public=asked[2])
    try:
        counts = pool_sizes(sizes, None if own else DEFAULTS, available=available, name="toy", tested=tested)
    except ValueError:
        given_ = [count for count in asked if count is not None]
        assert available - sum(given_) < asked.count(None) or (asked[1] == 0 and not tested)
        return
    assert sum(counts.values()) <= available
    for pool, count in zip(POOLS, asked, strict=True):
        assert counts[pool] == count if count is not None else counts[pool] >= 1
        if count is None and not own:
            assert counts[pool] <= getattr(DEFAULTS, pool)


def test_data_without_sizes_of_their_own_are_dealt_two_to_two_to_one():
    assert pool_sizes(Sizes(), None, available=1000, name="x", tested=False) == dict(
        zip(POOLS, (400, 400, 200), strict=True)
    )


@subtests(
    "sizes, sentence",
    [
        (
            Sizes(private=90, non_member=20),
            "sizes of toy must add up to at most 100, got 110 (private=90, non_member=20)",
        ),
        (
            Sizes(private=100),
            "toy must have examples left for non_member and public, got 0 of 100 beside private=100; ask for fewer, or "
            "for non_member=0 and public=0",
        ),
    ],
)
def test_more_examples_than_there_are_are_refused(sizes, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        deal(dataset(), sizes=sizes)


def test_too_few_examples_for_three_pools_are_refused():
    with pytest.raises(
        ValueError, match=r"toy must have examples left for private and non_member and public, got 2 of 2$"
    ):
        deal(dataset(train=2, test=0), defaults=None)


@subtests(
    "sizes, sentence",
    [
        ({"private": 0}, "private must be a whole number from 1, got 0"),
        ({"non_member": -1}, "non_member must be a whole number from 0, got -1"),
        ({"public": True}, "public must be a whole number from 0, got True"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Sizes(**sizes)


def test_without_an_official_test_set_somebody_has_to_be_a_non_member():
    with pytest.raises(ValueError, match="non_member of toy must be at least 1, got 0: it has no official test set"):
        deal(dataset(test=0), sizes=Sizes(non_member=0))


def test_all_pools_are_slices_of_one_tensor():
    splits = deal(dataset())
    for values in ("ids", "inputs", "labels"):
        tensors = [getattr(pool, values) for pool in present(splits)]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert tensors[0].untyped_storage().nbytes() == sum(tensor.nbytes for tensor in tensors)
        ends = [tensor.storage_offset() + tensor.numel() for tensor in tensors]
        assert [tensor.storage_offset() for tensor in tensors] == [0, *ends[:-1]]


def test_moving_keeps_the_pools_slices_of_one_tensor():
    moved = deal(dataset()).to("meta")
    assert {pool.inputs.device.type for pool in present(moved)} == {"meta"}
    assert [tuple(pool.inputs.shape) for pool in present(moved)] == [(n, 3, 2, 2) for n in (40, 40, 20, 30)]
    assert [pool.inputs.storage_offset() for pool in present(moved)] == [12 * n for n in (0, 40, 80, 100)]
    assert len({pool.inputs.untyped_storage()._cdata for pool in present(moved)}) == 1


def test_moving_to_where_they_are_does_nothing():
    splits = deal(dataset())
    assert splits.to("cpu") is splits
    assert splits.to(torch.device("cpu")) is splits


@pytest.mark.gpu
def test_pools_on_a_gpu_hold_the_same_values_once():
    splits = deal(dataset())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    moved = splits.to("cuda")
    assert torch.cuda.memory_allocated() - before < 3 * 512 + 130 * (12 * 4 + 8 + 8)  # blocks of 512 bytes
    for here, there in zip(present(splits), present(moved), strict=True):
        assert torch.equal(here.inputs, there.inputs.cpu())
        assert torch.equal(here.labels, there.labels.cpu())
    assert moved.to("cuda") is moved


def test_the_digest_names_content_pools_and_test_set():
    digests = {
        deal(dataset()).digest,
        deal(dataset(), seed=1).digest,
        deal(dataset(), sizes=Sizes(private=39)).digest,
        deal(dataset(test=29)).digest,
    }
    other = dataset()
    other.pixels[129] = 0
    assert len(digests | {deal(other).digest}) == 5
    assert deal(dataset()).digest == deal(dataset()).digest


def test_the_digest_says_who_is_in_the_test_set_also_where_the_content_is_the_same():
    whole, pools = dataset(), [torch.arange(40), torch.arange(40, 80), torch.arange(80, 100)]
    digests = {
        Splits.cut(
            whole.pixels, whole.labels, pools, name="x", classes=5, in_distribution_public=True, about="", test=test
        ).digest
        for test in (None, torch.arange(100, 130), torch.arange(100, 129))
    }
    assert len(digests) == 3
