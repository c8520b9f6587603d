"""The page in headless Chromium: no error on its console, nothing loaded, sorting and links to cells."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess

import pytest

from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.records import record as records_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

PROBE = """
const events = [];
addEventListener("error", (event) => events.push("error: " + event.message));
addEventListener("unhandledrejection", (event) => events.push("rejection: " + event.reason));
addEventListener("securitypolicyviolation", (event) => events.push("refused: " + event.blockedURI));
addEventListener("load", () => {
  const report = { clicks: [] };
  for (const [selector, title] of CLICKS) {
    const table = document.querySelector(selector);
    const heads = [...table.tHead.rows[0].cells];
    const head = heads.find((cell) => cell.textContent.includes(title));
    head.querySelector("button").click();
    const lines = [...table.tBodies].map((body) =>
      [...body.querySelectorAll("tr.line")].map((line) => line.querySelector(".name").textContent));
    report.clicks.push({ sort: head.getAttribute("aria-sort"), lines });
  }
  location.hash = HASH;
  setTimeout(() => {
    const cell = document.getElementById(HASH);
    report.open = cell.open && cell.parentElement.open;
    report.focus = document.activeElement === cell.querySelector("summary");
    report.live = document.querySelectorAll(".vega-embed").length;
    report.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
    report.events = events;
    const element = document.createElement("pre");
    element.id = "probe";
    element.textContent = JSON.stringify(report);
    document.body.append(element);
  }, 500);
});
"""


def browse(path, tmp_path):
    """Document of a page after its scripts ran, and the lines of its console."""
    options = [
        "--headless", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    if os.geteuid() == 0:
        options.insert(0, "--no-sandbox")  # Chromium refuses to run as root with it
    done = subprocess.run([str(CHROMIUM), *options], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.fixture
def page(record, metric, claim, tmp_path):
    """A page of three methods of one budget and a control, under two attacks; and the records."""
    records = []
    for name, accuracy, auc, fields in (
        ("dp_sgd", 0.8, 0.55, {}),
        ("dpdr", 0.9, 0.6, {}),
        ("gep", 0.7, 0.52, {}),
        ("sgd", 0.95, 0.97, {"claim": claim(None), "control": "positive"}),
    ):
        records.append(
            record("utility", defense=name, metrics={"accuracy": metric(accuracy, 0.01, better="higher")}, **fields)
        )
        for attack in ("lira", "rmia"):
            records.append(record(defense=name, attack=attack, metrics={"auc": metric(auc, 0.02)}, **fields))
    for each in records:
        records_of.write(each, tmp_path / "run")
    return build(tmp_path / "run", tmp_path / "page"), records


@pytest.fixture
def probed(page, tmp_path):
    """Report of a script in the page that clicks and follows a link; the policy of the page stays in force."""
    path, records = page
    (cell,) = [r.id for r in records if r.defense.name == "gep" and r.attack and r.attack.name == "rmia"]
    board, matrix = "table.board", "table.matrix"
    titles = (board, "Accuracy"), (board, "Worst AUC"), (board, "Defense"), (matrix, "lira")
    clicks = [titles[0], *titles, titles[-1]]
    script = PROBE.replace("CLICKS", json.dumps(clicks)).replace("HASH", json.dumps(f"cell-{cell}"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = path.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    clicked = tmp_path / "clicked.html"
    clicked.write_text(text.replace("<style>", f"<script>{script}</script><style>", 1), encoding="utf-8")
    document, console = browse(clicked, tmp_path)
    report = re.search(r'<pre id="probe">(.*?)</pre>', document, re.DOTALL)
    assert report is not None, console
    return json.loads(html.unescape(report[1]))


def test_nothing_is_written_on_the_console_and_the_live_plots_are_drawn(page, tmp_path):
    document, console = browse(page[0], tmp_path)
    assert console == [] and "vega-embed" in document


def test_the_first_click_sorts_best_first_and_the_next_reverses(probed):
    clicks = [(click["sort"], click["lines"][0]) for click in probed["clicks"]]
    assert clicks[0] == ("descending", ["dpdr", "dp_sgd", "gep"])  # the largest accuracy
    assert clicks[1] == ("ascending", ["gep", "dp_sgd", "dpdr"])
    assert clicks[2] == ("ascending", ["gep", "dp_sgd", "dpdr"])  # the smallest AUC
    assert clicks[3] == ("ascending", ["dp_sgd", "dpdr", "gep"])
    assert clicks[4] == ("ascending", ["gep", "dp_sgd", "dpdr", "sgd"])
    assert clicks[5] == ("descending", ["sgd", "dpdr", "dp_sgd", "gep"])
    assert all(click["lines"][1] == ["sgd"] for click in probed["clicks"][:4])  # controls stay below


def test_a_link_to_a_cell_opens_it_and_nothing_is_requested_or_refused(probed):
    assert probed["open"] and probed["focus"] and probed["live"]
    assert [name for name in probed["resources"] if not name.startswith("data:")] == []
    assert probed["events"] == []
