"""Sites of few records, and a reader of their pages."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.records.record import write
from leakbench.leaderboard.site.build import build_site
from leakbench.leaderboard.site.site import Guide, MethodWords

GUIDE = Guide(
    defenses={"dp_sgd": MethodWords(summary="Clips and adds noise.", source="Abadi et al.", family="bound")},
    attacks={"lira": MethodWords(summary="Shadow models.", source="Carlini et al.")},
    suites={"quick": "A first look."},
)
PUBLICATION = Publication(at=datetime(2026, 1, 1, tzinfo=UTC))


@dataclass
class Page(HTMLParser):
    """Links, ids and loaded addresses of a page.

    Attributes:
        links: values of href.
        ids: values of id, with repetitions.
        loads: values of src and of href of stylesheets.
        text: outside of tags, styles and scripts.
        tags: names of its elements.
    """

    content: str
    links: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    text: str = ""
    tags: set[str] = field(default_factory=set)

    def __post_init__(self):
        super().__init__()
        self._inside = ""
        self.feed(self.content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        self.tags.add(tag)
        values = {name: value for name, value in attrs if value}
        self.ids += [values["id"]] if "id" in values else []
        self.loads += [values["src"]] if "src" in values else []
        if "href" in values:
            (self.loads if tag == "link" else self.links).append(values["href"])

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data


def pages(out: Path) -> dict[str, Page]:
    """All pages of a site, by path."""
    return {str(path.relative_to(out)): Page(path.read_text(encoding="utf-8")) for path in sorted(out.rglob("*.html"))}


def content(out: Path) -> dict[str, bytes]:
    """All files of a site, by path."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.fixture
def some(record, metric, claim):
    """Records of two defenses and a control in one suite, under two attacks, and of one defense in another."""

    def make(seeds=(0, 1)):
        records = []
        for seed in seeds:
            for name, auc, fields in (
                ("dp_sgd", 0.55, {}),
                ("dpdr", 0.6, {"flags": ("tuned_on_public",)}),
                ("sgd", 0.97, {"claim": claim(None), "control": "positive"}),
            ):
                records.append(
                    record(
                        "utility", defense=name, seed=seed, metrics={"accuracy": metric(0.8, 0.01, better="higher")},
                        **fields,
                    )
                )  # fmt: skip
                for attack, more in (("lira", 0.0), ("rmia", -0.02)):
                    values = {"auc": metric(auc + more + seed / 100, 0.02)}
                    records.append(record(defense=name, attack=attack, seed=seed, metrics=values, **fields))
            records.append(record(defense="dp_sgd", attack="lira", suite="other", seed=seed))
        return records

    return make


@pytest.fixture
def site(tmp_path):
    """Writes records and builds their site; returns its folder."""

    def build(records, out="site", results="results"):
        folder = tmp_path / results / "records"
        for old in folder.glob("*.json"):
            old.unlink()
        for one in records:
            write(one, folder)
        build_site([tmp_path / results], tmp_path / out, guide=GUIDE, publication=PUBLICATION)
        return tmp_path / out

    return build
