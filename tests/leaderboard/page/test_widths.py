"""Widths of the page in headless Chromium: nothing is cut, and a table that goes on behind an edge shows it."""

import base64
import dataclasses
import hashlib
import html
import json
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.records import record as records_of
from leakbench.leaderboard.records.files import digest_of_bytes

from .test_browser import browse, pytestmark  # noqa: F401 -- skips these tests, too

WIDTHS = (1280, 1024, 768, 420)

PROBE = """
addEventListener("load", () => setTimeout(() => {
  const wide = [...document.querySelectorAll("main *")].filter((node) =>
    node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflowX !== "visible"
    && !node.closest(".unseen, svg"));
  const shadow = (node) => getComputedStyle(node).backgroundImage.includes("linear-gradient");
  parent.postMessage({
    width: innerWidth,
    page: document.documentElement.scrollWidth,
    cut: wide.filter((node) => !shadow(node)).map((node) => node.className),
    shadowed: wide.filter(shadow).map((node) => node.className),
  }, "*");
}, 300));
"""


@pytest.fixture
def page(record, metric, tmp_path):
    """A page with every measure of pictures and more attacks than a screen has columns for."""
    folder = tmp_path / "run"
    folder.mkdir()
    numbers = {
        name: metric(0.5, 0.1, better=known.better)
        for name, known in METRICS.items()
        if known.kind == "reconstruction" and known.pictured
    }
    image = np.linspace(0, 1, 48).reshape(1, 48)
    for attack in ("first_attack", "second_attack"):
        for noise in ("none", "calibrated"):
            task = {"data": "photos", "model": "convnet", "batch": 1, "step": 2, "noise": noise}
            metrics = numbers | {"psnr": metric(10.0, 1.0, better="lower"), "psnr_floor": metric(11.0)}
            made = record("reconstruction", metrics=metrics, task=task, attack=attack, flags=("degraded",))
            columns = {"target": [0], "label": [3], "original": image.tolist(), "reconstruction": (1 - image).tolist()}
            path = folder / f"{made.id}.parquet"
            pyarrow.parquet.write_table(pyarrow.table(columns), path)
            digest = digest_of_bytes(path.read_bytes())
            records_of.write(dataclasses.replace(made, arrays=path.name, arrays_digest=digest), folder)
    for attack in range(12):
        records_of.write(record(attack=f"membership_attack_{attack}"), folder)
    return build(folder, tmp_path / "page")


@pytest.fixture
def reports(page, tmp_path):
    """Report of each width."""
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("<style>", f"<script>{PROBE}</script><style>", 1), encoding="utf-8")
    frames = "".join(f'<iframe src="probed.html" width="{width}" height="900"></iframe>' for width in WIDTHS)
    collect = (
        "const reports = []; addEventListener('message', (event) => { reports.push(event.data);"
        "document.getElementById('probe').textContent = JSON.stringify(reports); });"
    )
    frame = tmp_path / "frame.html"
    frame.write_text(f'<pre id="probe"></pre><script>{collect}</script>{frames}', encoding="utf-8")
    document, console = browse(frame, tmp_path)
    report = re.search(r'<pre id="probe">(.*?)</pre>', document, re.DOTALL)
    assert report is not None and report[1], console
    return {one["width"]: one for one in json.loads(html.unescape(report[1]))}


def test_nothing_is_cut_at_any_width_and_what_goes_on_behind_an_edge_has_a_shadow(reports):
    assert set(reports) == set(WIDTHS)
    for width, report in reports.items():
        assert report["cut"] == [] and report["page"] <= width, (width, report)
        assert any("matrix-box" in name for name in report["shadowed"]), (width, report)
        assert not any("measures" in name for name in report["shadowed"]), (width, report)


def test_measures_of_pictures_have_a_line_each(page):
    text = page.read_text(encoding="utf-8").replace("<wbr>", "")
    table = text.partition('<div class="measures">')[2].partition("</table>")[0]
    heads = re.findall(r'<th scope="col" class="number">([\w ]+)', table)
    assert [head.strip() for head in heads] == ["no noise", "with noise"]
    lines = re.findall(r'<tr[^>]*><th scope="row">(.*?)</th>', table)
    shown = [known.title for known in METRICS.values() if known.kind == "reconstruction" and known.pictured]
    assert set(lines) == {*shown, "PSNR, dB of the mean public image"} and len(lines) == len(shown) + 1
    assert lines[1] == "PSNR, dB of the mean public image" and table.count("degraded</span>") == 2
