"""Citations: read by a parser with BibTeX's rules, and compiled where LaTeX is installed."""

import hashlib
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime

import pytest

from leakbench.leaderboard.board.identity import row_id
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.site.cite import bibtex, records_digest
from leakbench.leaderboard.site.links import row_page
from leakbench.leaderboard.site.site import SiteRow, SubmissionOnSite
from leakbench.leaderboard.submissions.tiers import TierOf, tier_of
from tests.leaderboard.exports.conftest import HOSTILE
from tests.leaderboard.submissions.declarations import declaration

from ..conftest import complete, record

PUBLICATION = Publication(at=datetime(2031, 5, 1, tzinfo=UTC), url="https://example.org/board/")
NAMES = (*HOSTILE, "}}}, year = {1", "{{{", r"\end{document}", "a% comment", "O'Neil and others", "@misc{x, title={y}}")


def site_row(name="dp_sgd", who=None, seed=0):
    made = record(defense=name, seed=seed)
    row = Board.from_records([made], complete(made)).rows[0]
    submission = None
    if who is not None:
        declared = declaration(who=who)
        tier = TierOf("self-reported", False, "nobody but its submitter has computed it")
        submission = SubmissionOnSite(handle="ada", digest="0" * 32, declaration=declared, tier=tier)
    return SiteRow(id=row_id(row), row=row, tier=tier_of(row.flags), submission=submission)


def parsed(text):
    """Key and fields of one entry; braces are counted without regard to backslashes, as BibTeX counts them."""
    head = re.match(r"@misc\{([a-z0-9-]+),\n", text)
    assert head, text
    place, fields = head.end(), {}
    while text[place] != "}":
        name = re.compile(r"  ([a-z]+) = \{").match(text, place)
        assert name, text[place:]
        start = place = name.end()
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            place += 1
        assert name[1] not in fields
        fields[name[1]] = text[start : place - 1]
        assert text[place : place + 2] == ",\n"
        place += 2
    assert text[place:] == "}\n"
    return head[1], fields


def test_a_citation_names_row_version_date_address_and_the_digest_of_its_records():
    row = site_row()
    key, fields = parsed(bibtex(row, PUBLICATION))
    assert key == f"leakbench-{row.id}" and fields["author"] == "{leakbench}" and fields["year"] == "2031"
    assert (
        fields["url"] == f"https://example.org/board/{row_page(row.id)}" and "record schema" in fields["howpublished"]
    )
    (one,) = row.row.records
    seal = json.loads(one.to_json())["seal"]
    assert hashlib.sha256(f"{one.id} {seal}\n".encode()).hexdigest() in fields["note"]
    assert "url" not in parsed(bibtex(row, Publication()))[1]


def test_another_number_or_another_record_changes_the_digest():
    assert records_digest(site_row()) != records_digest(site_row(seed=1))
    row = site_row()
    assert records_digest(row) == records_digest(row, row.row.records) != records_digest(row, [])


def test_a_submission_is_cited_by_its_submitters_with_its_tier():
    _, fields = parsed(bibtex(site_row("ada/half_dp.py:half_dp", who="Ada & Bob, 100 %"), PUBLICATION))
    assert fields["author"] == r"{Ada \& Bob, 100 \% (ada)}" and "tier: self-reported" in fields["note"]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_stay_text(name):
    who = "".join(c for c in name if c.isprintable() and c not in "<>`") or "x"
    for row in (site_row(name), site_row("ada/x", who=who)):
        _, fields = parsed(bibtex(row, PUBLICATION))
        assert list(fields) == ["title", "author", "year", "howpublished", "note", "url"]
        for value in fields.values():
            commands = set(re.findall(r"\\([A-Za-z]+|.)", value))
            assert commands <= {*"&%$#_", "textbackslash", "textasciitilde", "textasciicircum", "textless"} | {
                *("textgreater", "textbar", "varepsilon", "delta", "sigma", "infty", "times", "cdot", "textsuperscript")
            }
            assert value.isprintable() and not re.search(r"(?<!\\)[%#]", value)


@pytest.mark.parametrize(
    "url", ["http://example.org", "https://example.org/a%20b", "https://x.org/?q", "https://x", "https://a.org/}{\\"]
)
def test_an_address_that_bibtex_could_misread_is_refused(url):
    with pytest.raises(ValueError, match="url must be an address"):
        Publication(url=url)


@pytest.mark.skipif(
    shutil.which("pdflatex") is None or shutil.which("bibtex") is None,
    reason="pdflatex or bibtex is not installed (Debian: texlive-latex-recommended, texlive-binaries)",
)
def test_hostile_citations_compile(tmp_path):
    rows = [site_row(name) for name in NAMES]
    rows += [
        site_row("ada/x", who="".join(c for c in n if c.isprintable() and c not in "<>`") or "x") for n in NAMES[:1]
    ]
    entries = {row.id: bibtex(row, PUBLICATION) for row in rows}
    (tmp_path / "board.bib").write_text("\n".join(entries.values()))
    (tmp_path / "paper.tex").write_text(
        r"\documentclass{article}\begin{document}\nocite{*}\bibliographystyle{plain}\bibliography{board}\end{document}"
    )
    latex = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "paper.tex"]
    for command in (latex, ["bibtex", "paper"], latex):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout.decode(errors="replace")[-1500:]
        assert b"Warning--" not in done.stdout
    assert (tmp_path / "paper.bbl").read_text().count(r"\bibitem{leakbench-") == len(entries)
    if shutil.which("pdftotext"):
        subprocess.run(["pdftotext", "paper.pdf"], cwd=tmp_path, check=True)  # noqa: S607
        shown = re.sub(r"\s", "", (tmp_path / "paper.txt").read_text(errors="replace"))
        assert r"\input(/etc/passwd)" in shown or r"\input(passwd)" in shown
