"""Pages of words: complete, and of one source with the repository's."""

import re
from datetime import UTC, datetime
from html.parser import HTMLParser

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.metrics import columns
from leakbench.leaderboard.site.site import Guide, Site
from leakbench.leaderboard.site.texts import PITFALLS, methods_page, pitfalls_page

from ..conftest import record

SITE = Site(
    board=Board.from_records([record()]), rows=(), folders={}, guide=Guide(),
    publication=Publication(at=datetime(2026, 11, 28, tzinfo=UTC)),
)  # fmt: skip


class Text(HTMLParser):
    """Text, ids and targets of links within the page."""

    def __init__(self):
        super().__init__()
        self.words, self.ids, self.targets = [], set(), []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.add(value)
            if name == "href" and value and value.startswith("#"):
                self.targets.append(value[1:])

    def handle_data(self, data):
        self.words.append(data)


def read(page):
    parser = Text()
    parser.feed(page)
    assert set(parser.targets) <= parser.ids
    return " ".join(" ".join(parser.words).split())


def test_every_line_of_the_table_of_pitfalls_is_on_the_page():
    shown = read(pitfalls_page(SITE))
    lines = [line for line in PITFALLS.read_text().splitlines() if line.startswith("|")][2:]
    assert len(lines) > 20
    for line in lines:
        for cell in line.strip("| ").split(" | "):
            assert re.sub(r"\s", "", cell.replace("`", "").strip()) in re.sub(r"\s", "", shown), cell


def test_every_column_of_a_board_is_defined():
    shown = read(methods_page(SITE))
    for metric, column in columns(written=True):
        assert (column.title or " ".join(column.header)) in shown and (column.hint or metric.label) in shown
    for words in ("Claimed ε", "Rank", "Seeds", "verified", "self-reported", "unverified parts"):
        assert words in shown
