"""The pages of a site in headless Chromium, from a folder: live plots by the shared script, and a silent console."""

import re

import pytest

from ..page.test_browser import CHROMIUM, browse

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

LIVE, STILL = r'<div class="plot vega-embed', r'<div class="plot"[^>]*><svg'


@pytest.mark.parametrize("kind", ["suites/quick", "defenses/dp_sgd", "attacks/lira", "rows"])
def test_no_page_complains_and_plots_of_a_suite_are_live(site, some, tmp_path, kind):
    out = site(some())
    page = next(path for path in sorted(out.rglob("index.html")) if f"{path.relative_to(out)}".startswith(kind))
    document, console = browse(page, tmp_path)
    assert not console
    assert bool(re.search(LIVE, document)) == (kind == "suites/quick") and not re.search(STILL, document)


def test_plots_stay_still_without_the_shared_script(site, some, tmp_path):
    out = site(some())
    (out / "vega.js").unlink()
    document, _ = browse(out / "suites/quick/index.html", tmp_path)
    assert re.search(STILL, document) and not re.search(LIVE, document)
