"""The front page in headless Chromium: real clicks and keys, the address kept and restored, nothing requested.

`make browser` installs Debian's chromium and chromium-driver and runs this file.
"""

import json
import os
import shutil
from importlib.util import find_spec

import pytest

from leakbench.leaderboard.site import links
from leakbench.leaderboard.site.front import PAGE, front_page
from leakbench.leaderboard.site.headline import headline

from ..conftest import claim, metric, record
from .front_sites import front_site

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = next(filter(None, map(shutil.which, ("chromedriver", "chromium.chromedriver"))), None)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and its driver are not installed"),
    pytest.mark.skipif(find_spec("selenium") is None, reason="selenium is not installed"),
]


def requires(access):
    return {"access": access, "knows": [], "controls": []}


def records():
    made = []
    for i in range(60):
        name, epsilon = f"defense_{i:02d}", 3.0 if i % 2 else 8.0
        fields = {"defense": name, "budget": {"epsilon": epsilon, "delta": 1e-5}, "claim": claim(epsilon)}
        accuracy = metric(0.7 + i / 300, 0.01, better="higher")
        made.append(record("utility", metrics={"accuracy": accuracy}, **fields))
        # The weaker attack is strongest on the rows that the stronger one is weakest on.
        for attack, access, auc in (("loss", "BLACK_BOX", 0.56 - i / 1000), ("ratio", "ALL_STEPS", 0.6 + i / 200)):
            if (i, attack) != (4, "loss"):
                worst = {"auc": metric(auc, 0.02), "tpr_at_1pct_fpr": metric(0.05, 0.02)}
                made.append(record(attack=attack, metrics=worst, requires=requires(access), **fields))
    return made


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of a front page, with a stand-in for every page of a row, and the content."""
    folder, content = tmp_path_factory.mktemp("site"), front_site(*records())
    (folder / links.FRONT).write_text(front_page(content), encoding="utf-8")
    for row in content.rows:
        page = folder / links.row_page(row.id)
        page.parent.mkdir(parents=True)
        page.write_text(f"<!doctype html><title>{row.id}</title><h1>{row.row.label}</h1>", encoding="utf-8")
    return folder, content


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    """Browser that logs its console and every request."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    profile = tmp_path_factory.mktemp("profile")
    for argument in (
        "--headless=new", "--disable-gpu", "--disable-background-networking", "--no-first-run",
        "--window-size=1440,1000", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with it
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


class Front:
    """The page as a reader uses it."""

    def __init__(self, driver, folder):
        self.driver, self.url = driver, (folder / links.FRONT).as_uri()
        driver.get("about:blank")
        driver.get_log("performance")  # of the browser's own first page
        driver.get(self.url)

    def css(self, selector):
        return self.driver.find_elements("css selector", selector)

    def click(self, selector):
        element = self.css(selector)[0]
        # The page scrolls smoothly, and a click during it would miss.
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        element.click()

    def names(self):
        """Visible defenses, in order."""
        return self.driver.execute_script(
            "return [...document.querySelectorAll('#board tr.line')].filter((line) => line.offsetParent)"
            ".map((line) => line.querySelector('.name').textContent)"
        )

    def choose(self, name, words):
        from selenium.webdriver.support.select import Select

        Select(self.css(f"#filters [name={name}]")[0]).select_by_visible_text(words)

    def sort(self, key):
        self.click(f"th[data-key={key}] button")
        return self.css(f"th[data-key={key}]")[0].get_attribute("aria-sort")

    def cell(self, name, title):
        """Words of a visible row's cell."""
        return self.driver.execute_script(
            "const [name, title] = arguments;"
            "const line = [...document.querySelectorAll('#board tr.line')]"
            ".find((line) => line.querySelector('.name').textContent === name);"
            "return line.querySelector(`[data-head^='${title}'] .value`).textContent",
            name,
            title,
        )

    @property
    def said(self):
        return self.css(".paging output")[0].text

    @property
    def fragment(self):
        return self.driver.current_url.partition("#")[2]


@pytest.fixture
def front(chrome, site):
    page = Front(chrome, site[0])
    yield page
    # In every test: no word on the console, and no request but of files of the site.
    assert chrome.get_log("browser") == []
    messages = [json.loads(line["message"])["message"] for line in chrome.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert sent and not [url for url in sent if not url.startswith((site[0].as_uri(), "about:"))]


def test_the_first_click_sorts_best_first_within_each_budget_and_n_a_stays_last(front):
    assert front.sort("accuracy") == "descending"
    assert front.names()[:3] == ["defense_59", "defense_57", "defense_55"]
    assert front.fragment == "sort=accuracy.descending"
    assert front.sort("accuracy") == "ascending"
    assert front.names()[:2] == ["defense_01", "defense_03"]
    front.choose("epsilon", "8")
    front.choose("threat", "answers of the final model")
    for _ in range(2):
        front.sort("auc")
        assert front.names()[-1] == "defense_04"


def test_filters_are_in_the_address_and_back_forward_and_a_pasted_address_restore_them(front):
    whole = front.names()
    assert len(whole) == PAGE and "60 of 60 rows match, 50 are shown and 10 further ones hidden" in front.said
    front.choose("epsilon", "3")
    assert len(front.names()) == 30 and front.fragment == "epsilon=3"
    front.css("#filters [name=q]")[0].send_keys("defense_1")
    some = front.names()
    assert some == sorted(some, key=whole.index) and set(some) == {f"defense_1{i}" for i in (1, 3, 5, 7, 9)}
    front.sort("accuracy")
    pasted = front.driver.current_url
    front.driver.back()
    assert set(front.names()) == set(some) and "sort" not in front.fragment
    front.driver.back()  # letters are one step together with the choice before them
    assert front.names() == whole and front.css("#filters [name=q]")[0].get_property("value") == ""
    front.driver.forward()
    front.driver.forward()
    assert front.driver.current_url == pasted and front.names() == [f"defense_1{i}" for i in (9, 7, 5, 3, 1)]
    front.driver.get("about:blank")
    front.driver.get(pasted)
    assert front.names() == [f"defense_1{i}" for i in (9, 7, 5, 3, 1)]
    assert front.css("#filters [name=epsilon]")[0].get_property("value") == "3"
    front.click("#filters button[type=reset]")
    assert front.names() == whole


def test_rows_beyond_a_page_are_shown_when_asked_for(front):
    front.click("[data-more='all']")
    assert len(front.names()) == 60 and front.fragment == "rows=all"


def test_a_threat_model_swaps_worst_cases_and_back_restores_them(front, site):
    before = front.cell("defense_01", "Worst AUC")
    assert before == "0.605" and front.cell("defense_01", "Strongest attack") == "ratio"
    front.choose("threat", "answers of the final model")
    assert front.cell("defense_01", "Worst AUC") == "0.559" and front.cell("defense_01", "Strongest attack") == "loss"
    assert front.cell("defense_04", "Worst AUC") == "n/a"
    title = "return document.querySelector(arguments[0]).title"
    (row,) = [row.id for row in site[1].rows if row.row.defense.name == "defense_04"]
    selector = f"[data-row='{row}'] [data-head='Worst AUC'] .value"
    assert front.driver.execute_script(title, selector) == "not attacked under this threat model"
    front.choose("threat", "the update of every step")
    assert front.cell("defense_01", "Strongest attack") == "ratio"
    front.driver.back()
    (section,) = headline(site[1].rows, "BLACK_BOX")
    order = [entry.row.defense.name for group in section.groups for entry in group.entries]
    assert order[:5] != [row.row.defense.name for row in site[1].rows][:5] and front.names() == order[:PAGE]
    marked = front.css("#board tr.front")
    assert len(marked) == sum(entry.front for group in section.groups for entry in group.entries)
    front.driver.back()
    assert front.cell("defense_01", "Worst AUC") == before and front.names() != order[:PAGE]


def test_an_unknown_state_in_the_address_shows_the_whole_board(front):
    front.driver.get("about:blank")
    front.driver.get(f"{front.url}#data=%3Cscript%3E&threat=NONE&sort=x.y&rows=-3&q=")
    assert len(front.names()) == PAGE


def test_a_row_opens_its_page_and_its_permanent_link_works(front, site):
    name = front.names()[0]
    (row,) = [row for row in site[1].rows if row.row.defense.name == name]
    front.choose("epsilon", "3")
    front.click(f"[data-row='{row.id}'] .name a")
    assert front.driver.title == row.id and front.driver.current_url.endswith(links.row_page(row.id))
    front.driver.back()
    assert front.fragment == "epsilon=3" and len(front.names()) == 30
    front.driver.get((site[0] / links.row_page(row.id)).as_uri())
    assert front.driver.title == row.id


def test_the_page_is_no_wider_than_the_window_and_complete_without_scripts(front):
    for width in (420, 800, 1440):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        front.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert front.driver.execute_script(
            "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )
    front.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    front.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        front.driver.get(front.url + "?plain")
        front.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        # The scripts of the page did not run; this one only looks.
        assert len(front.names()) == 60 and not front.css("#filters")[0].is_displayed()
    finally:
        front.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
