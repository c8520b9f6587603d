"""The grid of pictures: the largest leak first, the mean public image in its place, the strongest attack of each."""

import dataclasses
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.page.images import floor_image
from leakbench.leaderboard.records import record as records_of
from leakbench.leaderboard.records.files import digest_of_bytes

ORIGINAL = np.linspace(0, 1, 48).reshape(1, 48)


@pytest.fixture
def pictured(record, metric, tmp_path):
    """A reconstruction with its arrays, of a given error, and the mean public image in its first row."""

    def make(error, *, floor=True, noise="calibrated", flags=(), **fields):
        noisy = np.clip(ORIGINAL + error, 0, 1)
        value = -10 * np.log10(np.square(ORIGINAL - noisy).mean())
        task = {"data": "photos", "model": "convnet", "batch": 1, "step": 2, "noise": noise}
        metrics = {"psnr": metric(value), "psnr_floor": metric(11.0)}
        made = record("reconstruction", metrics=metrics, task=task, flags=flags, **fields)
        columns = {"target": [0], "label": [3], "original": ORIGINAL.tolist(), "reconstruction": noisy.tolist()}
        if floor:
            columns["floor"] = [[0.5] * 48]
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        path = folder / f"{made.id}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        made = dataclasses.replace(made, arrays=path.name, arrays_digest=digest_of_bytes(path.read_bytes()))
        records_of.write(made, folder)
        return made

    return make


@pytest.fixture
def tiles(tmp_path):
    """Tiles of the page's grid, as (words, whether it has a picture)."""

    def read():
        text = build(tmp_path / "run", tmp_path / "page").read_text(encoding="utf-8").replace("<wbr>", "")
        grid = text.partition('<ol class="grid">')[2].partition("</ol>")[0]
        return [(" ".join(re.sub(r"<[^>]*>", " ", tile).split()), "<img" in tile) for tile in grid.split("<li")[1:]]

    return read


def names(tiles):
    return [words.lstrip("> ").removeprefix('class="guess"> ').split(" ")[0] for words, _ in tiles]


def test_pictures_stand_by_their_leak_with_the_public_guess_among_them(pictured, tiles):
    for defense, error in (("dp_sgd", 0.6), ("sgd", 0.01), ("dpdr", 0.2)):
        pictured(error, defense=defense)
    grid = tiles()
    assert names(grid) == ["original", "sgd", "dpdr", "mean", "dp_sgd"]
    assert all(picture for _, picture in grid) and "11.0 dB, 1 seed" in grid[3][0]


def test_the_attack_is_the_strongest_on_the_release_as_it_is_made(pictured, tiles):
    pictured(0.001, noise="none", attack="strong_without_noise")
    pictured(0.5, attack="strong_without_noise")
    pictured(0.3, noise="none", attack="strong_with_noise")
    pictured(0.2, attack="strong_with_noise", flags=("degraded",))
    _, (words, _), *_ = tiles()
    assert "strong_with_noise" in words and "with noise" in words and words.endswith("degraded")


def test_a_negative_control_is_left_out(pictured, tiles):
    pictured(0.1, defense="dp_sgd")
    pictured(0.001, defense="sgd", control="negative")
    assert names(tiles()) == ["original", "dp_sgd", "mean"]


def test_without_the_public_image_in_the_arrays_its_number_has_no_picture(pictured, tiles, tmp_path):
    made = pictured(0.1, floor=False)
    assert [picture for _, picture in tiles()] == [True, True, False]
    assert floor_image(made, tmp_path / "run") is None


def test_the_public_image_is_the_one_of_the_arrays(pictured, tmp_path):
    image = floor_image(pictured(0.1), tmp_path / "run")
    assert image is not None and image.shape == (3, 4, 4) and (image == 0.5).all()
