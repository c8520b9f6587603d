"""The pictures of a page are those of the arrays, and its PSNRs those of the records."""

import base64
import dataclasses
import io
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.page.images import PictureError, pairs_of, png
from leakbench.leaderboard.page.reconstructions import MOST, OPEN, PictureAllowance
from leakbench.leaderboard.records import record as records_of
from leakbench.leaderboard.records.files import digest_of_bytes

from ...parameters import subtests


def decibel(a, b):
    return float(np.mean([-10 * np.log10(np.square(x - y).mean()) for x, y in zip(a, b, strict=True)]))


@pytest.fixture
def shared(record, metric, tmp_path):
    """A reconstruction of n images, its arrays beside it: (record, folder, originals, reconstructions)."""

    def make(n=1, shape=(3, 4, 4), *, error=0.1, order=None, targets=None, task=None, psnr=None, **fields):
        generator = np.random.default_rng(0)
        originals = generator.uniform(size=(n, *shape))
        found = np.clip(originals + error * generator.normal(size=originals.shape), 0, 1)
        value = decibel(originals, found) if psnr is None else psnr
        metrics = {"psnr": metric(value), "psnr_floor": metric(11.0), "ssim": metric(0.5)}
        base = {"data": "photos", "model": "convnet", "batch": 1, "step": 2, "noise": "none"}
        made = record("reconstruction", metrics=metrics, task=base | (task or {}), **fields)
        folder = tmp_path / "run" / "records"
        folder.mkdir(parents=True, exist_ok=True)
        columns = {
            "target": list(range(n)) if targets is None else targets,
            "label": list(range(n)),
            "original": originals.reshape(n, -1).tolist(),
            "reconstruction": found[list(range(n)) if order is None else order].reshape(n, -1).tolist(),
        }
        path = folder / f"{made.id}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        made = dataclasses.replace(made, arrays=path.name, arrays_digest=digest_of_bytes(path.read_bytes()))
        records_of.write(made, folder)
        return made, folder, originals, found

    return make


@pytest.fixture
def page(tmp_path):
    return lambda: build(tmp_path / "run", tmp_path / "page").read_text(encoding="utf-8")


def test_the_psnr_of_the_pictures_is_that_of_the_record(shared, page):
    made, folder, *_ = shared(n=3)
    pairs, remark = pairs_of(made, folder)
    assert remark == ""
    assert np.mean([pair.psnr for pair in pairs]) == pytest.approx(made.metrics["psnr"].value)
    text = page()
    for pair in pairs:
        assert f'<span class="db">{pair.psnr:.1f} dB</span>' in text


def test_the_pictures_of_the_page_are_the_arrays(shared, page):
    _, _, originals, found = shared()
    pictures = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))))
        for uri in re.findall(r'src="data:image/png;base64,([^"]+)"', page())
    ]
    for image in (originals[0], found[0]):
        want = np.rint(255 * np.moveaxis(image, 0, -1)).astype(np.uint8)
        # In the opening, in the grid and in the gallery.
        assert sum(np.array_equal(picture, want) for picture in pictures) == 3


def test_reconstructions_are_matched_within_their_target_as_in_the_record(shared):
    made, folder, originals, found = shared(n=4, order=[1, 0, 3, 2], targets=[0, 0, 1, 1])
    pairs, remark = pairs_of(made, folder)
    assert remark == ""
    for pair, original, guess in zip(pairs, originals, found, strict=True):
        np.testing.assert_allclose(pair.original, original)
        np.testing.assert_allclose(pair.reconstruction, guess)


def test_arrays_that_contradict_their_record_are_shown_with_a_warning(shared, page):
    made, _, originals, found = shared(psnr=35.0)
    again = decibel(originals, found)
    assert f"record {made.id} says PSNR 35.00 dB, its arrays give {again:.2f} dB: do not trust this strip" in page()


def test_inputs_are_stretched_from_their_range_and_clamped(shared, tmp_path):
    made, folder, *_ = shared(task={"input_range": [-1.0, 3.0]}, shape=(1, 2, 2))
    columns = {
        "target": [0],
        "label": [0],
        "original": [[-1.0, 0.0, 1.0, 3.0]],
        "reconstruction": [[-9.0, 0.0, 1.0, 9.0]],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / made.arrays)
    ((pair,), _) = pairs_of(made, folder)
    np.testing.assert_allclose(pair.original.ravel(), [0, 0.25, 0.5, 1])
    assert pair.psnr == pytest.approx(120)


@subtests(
    "given, why",
    [
        ({"shape": (1, 2, 3)}, "6 numbers are no square image, and its record has no task.input_shape"),
        ({"shape": (2, 2, 2), "task": {"input_shape": [2, 2, 2]}}, "no grey or colour images"),
        (
            {"task": {"input_shape": [3, 4, 5]}},
            "inputs of shape .3, 4, 5. with 48 numbers are no grey or colour images",
        ),
        ({"task": {"input_range": [1.0, 1.0]}}, "task.input_range must be two growing numbers"),
        ({"error": float("nan")}, "has values that are not finite"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_sentence(shared, page, given, why):
    made, folder, *_ = shared(**{**given, "psnr": 20.0})
    with pytest.raises(PictureError, match=why):
        pairs_of(made, folder)
    assert re.search(f"no pictures of seed 0, no noise: .*{why.split('.')[0]}", page())


def test_a_shape_in_the_record_decides(shared):
    made, folder, *_ = shared(shape=(1, 3, 12), task={"input_shape": [1, 3, 12]})
    ((pair,), _) = pairs_of(made, folder)
    assert pair.original.shape == (1, 3, 12)


def test_without_a_shape_grey_and_colour_squares_are_told_apart_by_their_size(shared):
    for shape in ((1, 6, 6), (3, 4, 4)):
        made, folder, *_ = shared(shape=shape, seed=shape[0])
        assert pairs_of(made, folder)[0][0].original.shape == shape


def test_absent_and_broken_arrays_are_said(shared, page):
    made, folder, *_ = shared()
    (folder / made.arrays).write_bytes(b"not Parquet")
    with pytest.raises(PictureError, match=f"{made.arrays} holds no images with their reconstructions"):
        pairs_of(made, folder)
    assert f"its arrays {made.arrays} are not those that it was written with: cut or altered" in page()
    (folder / made.arrays).unlink()
    with pytest.raises(PictureError, match=f"{made.arrays} is not beside its record"):
        pairs_of(made, folder)
    assert f"its arrays {made.arrays} are not beside it" in page()


def test_both_variants_of_one_image_stand_in_one_tile(shared, page):
    shared()
    shared(task={"noise": "calibrated"}, error=0.5)
    text = page()
    assert text.count('<figure class="tile">') == 1 and text.count('class="frame original"') == 3


def test_a_variant_that_was_not_run_says_so(shared, page):
    shared()
    assert '<div class="none" title="n/a: no noisy reconstruction record">n/a</div>' in page()


def test_many_images_are_folded_and_the_rest_is_counted(shared, page):
    shared(n=MOST + 5)
    text = page()
    assert text.count('<figure class="tile">') == MOST
    assert f"<summary>{MOST - OPEN} more images</summary>" in text
    assert f"5 more of {MOST + 5} images are in the arrays beside the records" in text


def test_an_allowance_gives_only_what_is_left():
    allowance = PictureAllowance(10)
    assert allowance.take(6) and not allowance.take(5) and allowance.take(4) and not allowance.take(1)


def test_a_png_is_the_picture_without_loss():
    image = np.arange(12).reshape(3, 2, 2) / 12
    read = np.asarray(Image.open(io.BytesIO(base64.b64decode(png(image).partition(",")[2]))))
    np.testing.assert_array_equal(read, np.rint(255 * np.moveaxis(image, 0, -1)))


def test_of_several_attacks_the_strongest_is_seen_first(shared, page):
    shared(attack="weak", error=0.6)
    shared(attack="strong", error=0.01)
    text = page()
    assert text.index("<h5>strong</h5>") < text.index("1 weaker attack") < text.index("<h5>weak</h5>")


def test_a_method_with_several_settings_opens_the_page_once(shared, page):
    for defense in ("dp_sgd", "pcdp"):
        for multiplier in (6.0, 30.0):
            shared(defense=defense, budget={"noise_multiplier": multiplier}, noise_multiplier=multiplier)
    opening = page().partition('class="opening"')[2].partition("</figure>")[0]
    names = [name.replace("<wbr>", "") for name in re.findall(r"<b>(.+?)</b>", opening)]
    assert names == ["original", "dp_sgd", "pcdp"]


def test_the_opening_names_the_attack_behind_each_picture(shared, page):
    shared(defense="dp_sgd", attack="strong", error=0.01)
    shared(defense="pcdp", attack="general", error=0.1)
    assert "what strong (pcdp: general) recovers from each" in page()
