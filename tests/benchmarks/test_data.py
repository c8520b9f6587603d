"""Data sets: fixed, disjoint, the right pixels, and refused when they are others."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.benchmarks import data
from leakbench.benchmarks.core import Catalogue, Sizes, Splits, choose, content_digest, verify
from leakbench.benchmarks.data import digits as digits_module
from leakbench.benchmarks.data import photos as photos_module

from ..parameters import subtests

SIZES = {"digits": (700, 700, 397), "photos": (64, 64, 109)}
POOLS = ("private", "non_member", "public")
EMBEDDED = pytest.mark.parametrize("name", sorted(SIZES))


def pools(splits: Splits):
    return [getattr(splits, pool) for pool in POOLS]


def test_every_file_is_a_data_set_and_says_what_it_is():
    assert set(SIZES) <= set(data.names())
    for name in data.names():
        assert data.describe(name)


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"no data set named 'digitz'; did you mean 'digits'\?"):
        data.load("digitz")
    with pytest.raises(ValueError, match=r"there are cifar10, .*digits, .*photos"):
        data.load("xxxxxxxx")


def test_a_name_is_checked_without_loading(monkeypatch, tmp_path):
    for name in data.names():
        monkeypatch.setattr(
            f"leakbench.benchmarks.data.{name}.{name}", lambda **_: pytest.fail("loaded"), raising=False
        )
    for name in ("digits", "mnist", f"folder:{tmp_path}", f"parquet:{tmp_path}?size=8&channels=1"):
        data.check(name)


@subtests(
    "name, sentence",
    [
        ("cifar", "no data set named 'cifar'; did you mean 'cifar10'?"),
        ("foldr:x", "no kind of data set named 'foldr'; did you mean 'folder'?"),
        ("folder", "data set 'folder' needs a path: write folder:PATH"),
        ("folder:", "folder needs a path: write folder:PATH"),
        ("digits?size=8", "data set 'digits?size=8' has no option 'size'; it has none"),
        ("npz:.?size=8", "data set 'npz:.?size=8' has no option 'size'; it has none"),
        ("folder:.?sise=8", "data set 'folder:.?sise=8' has no option 'sise'; it has size, channels"),
        ("folder:.?size", "options of data set 'folder:.?size' must be written as ?size=32&channels=3, got 'size'"),
        ("folder:.?size=0", "size of data set 'folder:.?size=0' must be in [1, 1024] pixels, got 0"),
        ("folder:.?channels=4", "channels of data set 'folder:.?channels=4' must be 1 (grey) or 3 (colour), got 4"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_refused_when_it_is_checked(name, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        data.check(name)


def test_a_path_where_nothing_is_is_refused_with_the_whole_of_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for written, whole in (("no/where", tmp_path / "no/where"), ("~/pictures", tmp_path / "home/pictures")):
        with pytest.raises(ValueError, match=re.escape(f"path of folder must be there, and nothing is at {whole}")):
            data.check(f"folder:{written}")
        data.check(f"folder:{written}", exists=False)


def test_every_kind_of_data_of_ones_own_has_a_line():
    assert set(data.patterns()) == {"folder:PATH", "parquet:PATH", "npz:PATH", "features:PATH"}
    assert all(data.patterns().values())
    assert data.describe("folder:anywhere") == data.patterns()["folder:PATH"]


@EMBEDDED
def test_pools_have_the_stated_sizes_and_shapes(name):
    splits = data.load(name)
    assert splits.name == name
    assert tuple(len(pool) for pool in pools(splits)) == SIZES[name]
    for pool in pools(splits):
        assert pool.inputs.shape == (len(pool), *splits.input_shape)
        assert pool.inputs.dtype == torch.float32
        assert pool.ids.shape == pool.labels.shape == (len(pool),)
        assert pool.labels.min() >= 0
        assert pool.labels.max() < splits.classes
        assert pool.inputs.min() >= splits.low
        assert pool.inputs.max() <= splits.high


@EMBEDDED
def test_inputs_use_the_box_that_is_declared(name):
    splits = data.load(name)
    everything = torch.cat([pool.inputs for pool in pools(splits)])
    assert everything.min() == splits.low
    assert everything.max() > splits.high - 0.01


@EMBEDDED
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_pools_share_no_example_and_no_image(name, seed):
    splits = data.load(name, seed=seed)
    ids = torch.cat([pool.ids for pool in pools(splits)])
    images = torch.cat([pool.inputs for pool in pools(splits)])
    assert len(ids.unique()) == len(ids)
    assert len(images.flatten(1).unique(dim=0)) == len(images)


@EMBEDDED
def test_the_same_seed_gives_the_same_split_and_another_seed_another(name):
    first, again, other = data.load(name, seed=3), data.load(name, seed=3), data.load(name, seed=4)
    assert first.digest == again.digest
    assert first.digest != other.digest
    torch.testing.assert_close(first.private.inputs, again.private.inputs, rtol=0, atol=0)
    assert first.private.ids.tolist() != other.private.ids.tolist()


@EMBEDDED
def test_an_id_means_the_same_image_under_every_seed(name):
    first, other = data.load(name, seed=0), data.load(name, seed=1)
    images = {i: image for pool in pools(first) for i, image in zip(pool.ids.tolist(), pool.inputs, strict=True)}
    shared = [
        (images[i], image)
        for pool in pools(other)
        for i, image in zip(pool.ids.tolist(), pool.inputs, strict=True)
        if i in images
    ]
    assert len(shared) > 100
    assert all(torch.equal(a, b) for a, b in shared)


@EMBEDDED
def test_loading_leaves_torchs_generator_alone(name):
    before = torch.get_rng_state()
    data.load(name)
    assert torch.equal(before, torch.get_rng_state())


def test_the_split_of_digits_at_seed_0_is_the_published_one():
    splits = data.load("digits")
    assert splits.private.ids[:8].tolist() == [0, 6, 10, 12, 13, 20, 26, 28]
    assert splits.digest == "c2305f5e6380677a4d0f1a3293698644ecb8b3640ee22c89e5ab4ca0d46d06f3"


def test_the_split_of_photos_at_seed_0_is_the_published_one():
    splits = data.load("photos")
    assert splits.private.ids[:8].tolist() == [69, 109, 118, 131, 134, 135, 137, 138]


@EMBEDDED
def test_smaller_pools_are_parts_of_the_larger_ones(name):
    whole, part = data.load(name), data.load(name, sizes=Sizes(private=10))
    assert len(part.private) == 10
    assert set(part.private.ids.tolist()) < set(whole.private.ids.tolist())


def test_pools_of_digits_that_are_not_asked_for_share_what_is_left():
    splits = data.load("digits", sizes=Sizes(private=1600))
    assert [len(pool) for pool in pools(splits)] == [1600, 125, 71]  # 197 left, in proportion 700 to 397
    with pytest.raises(ValueError, match=re.escape("sizes of digits must add up to at most 1797, got 2000")):
        data.load("digits", sizes=Sizes(private=2000))
    with pytest.raises(ValueError, match="non_member of digits must be at least 1, got 0: it has no official test set"):
        data.load("digits", sizes=Sizes(non_member=0))


def test_photos_have_no_larger_pools_and_one_public_one():
    assert len(data.load("photos", sizes=Sizes(non_member=3)).non_member) == 3
    for sizes, sentence in (
        (Sizes(private=65), "private of photos must be in [1, 64], got 65"),
        (Sizes(non_member=0), "non_member of photos must be in [1, 64], got 0"),
        (Sizes(public=9), "public of photos is fixed by where a crop lies, got 9; leave it out"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            data.load("photos", sizes=sizes)


def test_digits_are_scaled_by_their_sixteen_grey_levels():
    inputs = data.load("digits").private.inputs * 16
    torch.testing.assert_close(inputs, inputs.round(), rtol=0, atol=0)


def test_members_and_non_members_of_digits_have_the_same_classes_up_to_chance():
    splits = data.load("digits")
    counts = [torch.bincount(pool.labels, minlength=10).double() for pool in (splits.private, splits.non_member)]
    difference = (counts[0] - counts[1]).abs()
    assert difference.max() < 60  # 70 expected in each, standard deviation of the difference below 12


def test_other_digits_are_refused(monkeypatch):
    monkeypatch.setattr(digits_module, "CONTENT", "f" * 64)
    with pytest.raises(ValueError, match="SHA-256 of scikit-learn's digits must be ffffffffffffffff"):
        data.load("digits")


def test_another_photograph_is_refused(monkeypatch):
    monkeypatch.setitem(photos_module.FILES, "flower.jpg", "f" * 64)
    with pytest.raises(ValueError, match=re.escape("SHA-256 of scikit-learn's flower.jpg must be ffff")):
        data.load("photos")


def test_a_split_names_the_pixels_it_was_decoded_to(monkeypatch):
    """A decoder that differs by one grey level in one pixel is accepted, and shows in the digest."""
    reference = data.load("photos")
    decode = photos_module.photograph

    def one_level_brighter(name):
        image = decode(name).clone()
        image[0, 200, 300] += 1 / 255
        return image

    monkeypatch.setattr(photos_module, "photograph", one_level_brighter)
    assert data.load("photos").digest != reference.digest


def test_public_and_target_photos_are_a_whole_crop_apart():
    splits = data.load("photos")
    public = splits.public.ids % photos_module.COLUMNS
    target = torch.cat([splits.private.ids, splits.non_member.ids]) % photos_module.COLUMNS
    assert target.min() - public.max() >= 2  # at least one column lies between


def test_members_and_non_members_of_photos_come_from_the_same_columns():
    splits = data.load("photos")
    columns = [pool.ids % photos_module.COLUMNS for pool in (splits.private, splits.non_member)]
    assert (columns[0].double().mean() - columns[1].double().mean()).abs() < 3  # of 11 columns


def test_no_public_photo_is_nearly_a_target():
    """Nearest neighbours differ by more than 1/20 of the range (26 dB), whatever the seed."""
    splits = data.load("photos")
    target = torch.cat([splits.private.inputs, splits.non_member.inputs]).flatten(1)
    public = splits.public.inputs.flatten(1)
    rms = torch.cdist(target, public) / target.shape[1] ** 0.5
    assert rms.min() > 0.05
    centred = [x.reshape(len(x), 3, -1) for x in (target, public)]
    centred = [(x - x.mean(dim=2, keepdim=True)).flatten(1) for x in centred]
    cosine = torch.nn.functional.normalize(centred[0]) @ torch.nn.functional.normalize(centred[1]).T
    assert cosine.max() < 0.9


def test_a_photo_is_where_its_id_says():
    image = photos_module.photograph("flower.jpg")
    splits = data.load("photos")
    ids = splits.private.ids
    assert (ids >= 260).any()
    for i, crop, label in zip(ids.tolist(), splits.private.inputs, splits.private.labels, strict=True):
        if i >= 260:
            row, column = divmod(i - 260, 20)
            expected = image[:, 32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            assert torch.equal(crop, expected)
            assert label == 5 + row * 5 // 13


def test_photographs_decode_to_the_known_colours():
    """Within the rounding of a decoder: mean red, green and blue of each photograph."""
    for name, colours in {
        "china.jpg": (0.5675, 0.5705, 0.5526),
        "flower.jpg": (0.2162, 0.2885, 0.2235),
    }.items():
        image = photos_module.photograph(name)
        assert image.shape == (3, 427, 640)
        np.testing.assert_allclose(image.mean(dim=(1, 2)).numpy(), colours, atol=0.004)


def test_no_photo_is_so_close_to_featureless_that_a_decoder_could_decide():
    crops = torch.cat([photos_module.crops(photos_module.photograph(name)) for name in photos_module.FILES])
    contrast = crops.flatten(2).std(dim=2).mean(dim=1)
    assert (contrast - photos_module.FEATURELESS).abs().min() > 0.0007
    noisy = (crops + (torch.randint_like(crops, -1, 2) / 255)).flatten(2).std(dim=2).mean(dim=1)
    assert torch.equal(noisy >= photos_module.FEATURELESS, contrast >= photos_module.FEATURELESS)


@pytest.mark.long
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    spare=st.integers(0, 5),
    salt=st.text(max_size=5),
)
def test_choosing_deals_disjoint_sorted_pools_of_the_sizes_asked_for(sizes, spare, salt):
    candidates = torch.arange(sum(sizes) + spare) * 3 + 1
    dealt = choose(candidates, sizes, salt=salt)
    assert [len(pool) for pool in dealt] == sizes
    together = torch.cat(dealt)
    assert len(together.unique()) == len(together)
    assert torch.isin(together, candidates).all()
    assert all(torch.equal(pool, pool.sort().values) for pool in dealt)


def test_choosing_is_uniform():
    """Each of 20 candidates is in a pool of 5 a quarter of the time: 5 standard deviations at 2,000 salts."""
    chosen = torch.zeros(20)
    for salt in range(2000):
        chosen[choose(torch.arange(20), [5], salt=str(salt))[0]] += 1
    assert (chosen / 2000 - 0.25).abs().max() < 5 * (0.25 * 0.75 / 2000) ** 0.5


def test_choosing_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match=re.escape("sizes must add up to at most 3, got [2, 2]")):
        choose(torch.arange(3), [2, 2], salt="")


def test_an_example_in_two_pools_is_refused():
    with pytest.raises(ValueError, match="pools of toy must share no example"):
        Splits.cut(
            torch.zeros(4, 2),
            torch.zeros(4, dtype=torch.int64),
            [torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([3])],
            name="toy",
            classes=2,
            in_distribution_public=True,
            about="",
        )


def test_the_content_digest_tells_values_shapes_and_types_apart():
    ones = torch.ones(2, 3)
    digests = [content_digest(x) for x in (ones, ones.T, ones.double(), ones.int(), ones * 2)]
    assert len(set(digests)) == 5
    assert content_digest(ones.T) == content_digest(torch.ones(3, 2))  # memory layout is not content


def test_equal_digests_pass_and_different_ones_name_the_way_out():
    verify("a" * 64, "a" * 64, noun="x", way_out="do y")
    with pytest.raises(ValueError, match=r"must be bbbbbbbbbbbbbbbb..., got aaaaaaaaaaaaaaaa.*; do y"):
        verify("a" * 64, "b" * 64, noun="x", way_out="do y")


def test_a_new_file_is_found_without_an_edit_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "toy_entries").mkdir()
    (tmp_path / "toy_entries" / "__init__.py").write_text("")
    (tmp_path / "toy_entries" / "fresh.py").write_text(
        'def fresh(*, size: int = 3):\n    """Fresh."""\n    return size\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    catalogue = Catalogue("toy_entries", [str(tmp_path / "toy_entries")], "entry")
    assert catalogue.names() == ("fresh",)
    assert catalogue.find("fresh")() == 3
    assert catalogue.describe("fresh") == "Fresh."
    assert catalogue.defaults("fresh") == {"size": 3}
