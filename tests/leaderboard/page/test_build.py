"""The page as a whole: whole HTML, nothing from outside, nothing of a record run as code, the same bytes again."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from leakbench.leaderboard.board.table import BoardError
from leakbench.leaderboard.page.build import MANY, build
from leakbench.leaderboard.page.tables import in_short
from leakbench.leaderboard.records import record as records_of
from leakbench.leaderboard.records.manifest import write_manifest

from ..conftest import asked_for, provenance

VOID = {"meta", "img", "input", "br", "hr", "link", "wbr"}
EVIL = "<script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)>\"' {{ 7*7 }}"


class Document(HTMLParser):
    """A parsed page: its elements, and whether every one of them is closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.specifications: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            kind = self.elements[-1][1].get("type")
            (self.specifications if kind == "application/json" else self.scripts).append(data)
        elif self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and all(value in attrs.get(key.rstrip("_"), "").split() for key, value in wanted.items())
        ]


@pytest.fixture
def page(tmp_path):
    """Writes records, builds their page, and returns its text."""

    def make(*records, name="run"):
        for record in records:
            records_of.write(record, tmp_path / name / "records")
        for suite in {record.suite for record in records}:
            own = [record for record in records if record.suite == suite]
            write_manifest(asked_for(*own, suite=suite), tmp_path / name / "records")
        return build(tmp_path / name, tmp_path / name / "page").read_text(encoding="utf-8")

    return make


@pytest.fixture
def run(record, metric, claim):
    """Three methods and both controls over two seeds; one has no proof, one failed against one attack."""
    made = []
    for seed in (0, 1):
        for name, auc, fields in (
            ("dp_sgd", 0.55, {}),
            ("dpdr", 0.6, {"claim": claim(8.0)}),
            ("clipped_sgd", 0.9, {"claim": claim(None), "noise_multiplier": 0.0}),
            ("sgd", 0.97, {"claim": claim(None), "control": "positive", "noise_multiplier": 0.0}),
            ("sgd", 0.49, {"claim": claim(None), "control": "negative", "noise_multiplier": 0.0}),
        ):
            given = {"seed": seed, "defense": name, **fields}
            made.append(
                record("utility", **given, metrics={"accuracy": metric(0.9 + seed / 50, 0.01, better="higher")})
            )
            made.append(record(**given, metrics={"auc": metric(auc + seed / 50, 0.02)}))
    failed = record(defense="dp_sgd", attack="loss_threshold", status="failed", reason="ValueError: scores were odd")
    return [*made, failed]


def test_a_page_is_whole_html_with_its_parts(page, run):
    document = Document(page(*run))
    assert {attrs["id"] for attrs in document.all("section")} == {
        "board", "matrix", "plots", "attackers", "unmeasured", "provenance",
    }  # fmt: skip
    ids = [attrs["id"] for _, attrs in document.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = [attrs["href"] for attrs in document.all("a")]
    assert {target for target in targets if not target.startswith("#")} == {"board.csv", "board.json"}
    assert all(target[1:] in ids for target in targets if target.startswith("#"))
    assert len(document.all("tr", class_="line", role="row")) == 5
    assert {attrs["class"] for attrs in document.all("tbody", role="rowgroup")} == {"contestants", "controls"}


def test_nothing_is_loaded_from_anywhere(page, run):
    text = page(*run)
    document = Document(text)
    for _, attrs in document.elements:
        for key in ("src", "srcset", "action", "data", "poster", "background", "xlink:href"):
            assert attrs.get(key, "data:").startswith("data:")
    vega, ours = document.scripts
    assert re.search(r"https?:|//[a-z]|@import|url\(|@font-face", text.replace(vega, "")) is None
    (policy,) = (m["content"] for m in document.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (vega, ours)]
    assert f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';" in policy
    assert "ast: true" in ours and "eval" not in policy  # expressions of plots are interpreted


def test_a_page_without_plots_has_no_script_that_draws(page, record):
    document = Document(page(record(status="failed", reason="no memory")))
    assert len(document.scripts) == 1 and not document.specifications


@pytest.mark.long
def test_a_plot_is_there_without_its_script_and_as_its_specification(page, run):
    document = Document(page(*run))
    plots = document.all("div", class_="plot")
    still = [svg for svg in document.all("svg") if svg.get("width") == "620"]
    assert len(plots) == len(still) == len(document.specifications) > 1
    for plot, text in zip(plots, document.specifications, strict=True):
        assert plot["aria-label"] and json.loads(text)["datasets"]["rows"][0]["title"]


@pytest.mark.long
def test_the_board_and_its_document_lie_beside_the_page_and_nothing_else(page, run, tmp_path):
    page(*run)
    assert sorted(path.name for path in (tmp_path / "run/page").iterdir()) == ["board.csv", "board.json", "index.html"]
    assert len(json.loads((tmp_path / "run/page/board.json").read_text())["rows"]) == 5
    assert (tmp_path / "run/page/board.csv").read_text().count("\n") == 6


def test_the_same_records_give_the_same_bytes_whatever_their_order(page, run):
    assert page(*run, name="a") == page(*reversed(run), name="b")


@pytest.mark.long
def test_a_page_is_replaced_as_a_whole(page, run, tmp_path):
    page(*run)
    (tmp_path / "run/page/index.html").write_text("old")
    assert page(*run).startswith("<!doctype html>")


def test_what_records_say_is_text_wherever_it_stands(page, record, metric, claim):
    evil = provenance(version=EVIL, third_party={EVIL: EVIL})
    fields = {"suite": EVIL, "defense": EVIL, "task": {"data": EVIL, "model": EVIL, "note": EVIL}, "engine": EVIL}
    reported = (records_of.Reported(metric="accuracy", value=0.9, source=EVIL),)
    other = {**fields, "defense": "dpdr"}
    made = [
        record("utility", **fields, reported=reported, device=EVIL, provenance=provenance(versions={EVIL: EVIL})),
        record("utility", **{**other, "defense_settings": {EVIL: 1}, "claim": claim(None, reason=EVIL)}),
        record("utility", **{**other, "defense_settings": {EVIL: EVIL}}),
        record(**fields, attack=EVIL, flags=(EVIL, "claim_violated"), requires={EVIL: [EVIL]}),
        record(**fields, attack="other", metrics={"auc": metric(None, reason=EVIL)}),
        record(**fields, attack="third", status="failed", reason=EVIL),
        record("reconstruction", suite=EVIL, defense=EVIL, attack=EVIL, provenance=evil),
    ]  # fmt: skip
    text = page(*made)
    document = Document(text)
    assert len(document.scripts) == 2 and all("alert('x')" not in script for script in document.scripts)
    assert document.specifications and all("<" not in text for text in document.specifications)
    assert "<script>alert" not in text and "{{ 7*7 }}" in text
    assert not document.all("img")
    for _, attrs in document.elements:
        assert not any(key.startswith("on") for key in attrs)
        assert "alert(1)" not in attrs.get("href", "") + attrs.get("id", "") + attrs.get("class", "")
    assert text.count("&lt;script&gt;alert(") > 20 and document.text.count(" ".join(EVIL.split())) > 10


def test_what_was_not_measured_is_na_with_its_reason_as_tooltip_and_footnote(page, record, metric):
    why = "the TPR at an FPR of 0.01 needs 100 non-members"
    metrics = {"auc": metric(0.6, 0.1), "tpr_at_1pct_fpr": metric(None, reason=why)}
    document = Document(page(record("utility"), record(metrics=metrics), record(defense="dpdr")))
    # Found at the value, at its note's number, and in the list of notes.
    assert {"title": why, "class": "value"} in document.all("span")
    numbers = {attrs["href"][1:] for attrs in document.all("a") if attrs.get("title") == why}
    assert {number[0] for number in numbers} == {"n", "m"}  # under the board, and under the matrix of attacks
    assert all(document.all("li", id=number) for number in numbers) and why in document.text
    dash = [attrs for attrs in document.all("td") if attrs.get("data-head") == "Worst TPR, at 1 % FPR"]
    assert sorted("data-order" in attrs for attrs in dash) == [False, True]


@pytest.mark.long
def test_an_interval_stands_under_its_value(page, run):
    text = page(*run[:-1])
    assert re.search(r'>0\.560</span><span class="ends">\[0\.\d{3}, 0\.\d{3}\]</span>', text)


@pytest.mark.long
def test_the_order_of_a_column_is_in_numbers_and_infinity_is_the_largest(page, run):
    document = Document(page(*run))
    claims = [attrs["data-order"] for attrs in document.all("td") if attrs.get("data-head", "").startswith("Claimed")]
    assert sorted(claims, key=float) == ["3.0", "8.0", "inf", "inf", "inf"]


def test_columns_that_no_record_speaks_of_are_not_there(page, record):
    document = Document(page(record("utility"), record("utility", defense="dpdr")))
    titles = [attrs["data-title"] for attrs in document.all("th", role="columnheader")]
    assert titles == ["Defense", "Claimed ε δ = 1e-5", "Accuracy", "Seeds"]
    assert "Left out, n/a in every row: Rank (no membership attack was measured" in document.text
    assert "no attack on the images of a shared update and no attack on the labels of a shared update" in document.text


@pytest.mark.long
def test_failed_cells_are_listed_with_their_reason(page, run):
    document = Document(page(*run))
    assert "failed dp_sgd x loss_threshold 0 ValueError: scores were odd" in document.text
    assert "an attack failed, or its scores are gone, so the worst case may be worse" in document.text


@pytest.mark.long
def test_a_banner_says_that_controls_failed_or_are_absent(page, run, record):
    assert not Document(page(*run[:-1])).all("div", class_="alarm")
    assert "1 of 21 records failed" in Document(page(*run, name="e")).text
    assert "There are no controls" in Document(page(record("utility"), name="b")).text
    leaks, chance = (record(defense="sgd", control="positive", metrics={"auc": run[i].metrics["auc"]}) for i in (7, -2))
    assert not Document(page(leaks, name="c")).all("div", class_="alarm")
    failed = Document(page(chance, name="d"))
    assert failed.all("div", class_="alarm") and "CONTROLS FAILED, do not trust this board" in failed.text


def test_a_violated_claim_marks_its_row_and_the_banner(page, run, record):
    document = Document(page(*run, record(defense="psac", flags=("claim_violated",))))
    assert len(document.all("tr", class_="violated")) == 1 and "CLAIM VIOLATED: psac" in document.text


def test_records_of_which_nothing_succeeded_still_make_a_page(page, record):
    document = Document(
        page(record(status="failed", reason="no memory"), record("utility", status="failed", reason="same"))
    )
    assert "Nothing could be measured" in document.text and "no memory" in document.text


@pytest.mark.long
def test_several_suites_have_a_table_each_and_many_rows_a_filter(page, record, run):
    assert not Document(page(*run)).all("input", id="filter")
    rows = [record("utility", suite=f"suite{i % 2}", defense=f"defense_{i}") for i in range(MANY + 1)]
    document = Document(page(*rows, name="b"))
    assert len(document.all("table", class_="board")) == 2
    assert document.all("input", id="filter") and document.all("p", class_="filter") == [
        {"class": "filter", "hidden": ""}
    ]


def test_a_papers_figure_stands_beside_ours_with_the_difference(page, record, metric):
    reported = (records_of.Reported(metric="accuracy", value=0.95, source="A paper, Table 1"),)
    made = [
        record("utility", seed=s, reported=reported, metrics={"accuracy": metric(v, 0.01, better="higher")})
        for s, v in enumerate((0.9, 0.92))
    ]
    text = Document(page(*made)).text
    assert "accuracy 0.95 0.910 [0.783, 1.000] 0.014 2 -0.040 -2.8 SD We do not know why. A paper, Table 1" in text


def test_where_the_numbers_come_from_is_said(page, run):
    text = Document(page(*run)).text
    for words in ("quick, digest d1", "leakbench 0.1.0", "PLD", "add_remove, unit example, poisson sampling", "21 s"):
        assert words in text
    assert all(record.id in text for record in run)


def test_a_claim_of_epsilon_0_is_a_claim(page, record, claim):
    found = page(record("utility", claim=claim(0.0)), record("utility", claim=claim(None), defense="sgd"))
    assert "claimed ε, where proved 0 " in Document(found).text


def test_settings_chosen_on_public_data_are_shown_with_the_choice_marked(page, record, tmp_path):
    point = {"low": 0.8, "high": 0.95, "n": 300}
    tuning = {
        "schema": 2, "defense": "pcdp", "budget": {"epsilon": 3.0}, "chosen": {"lr": 0.5},
        "request": {"task": {"data": "mnist", "model": "dp_cnn"}, "validation": 300},
        "grid": [{"lr": 0.1, "accuracy": 0.85, **point}, {"lr": 0.5, "accuracy": 0.9, **point}],
    }  # fmt: skip
    folder = tmp_path / "run" / "tuning"
    (folder / "points").mkdir(parents=True)
    (folder / "points" / "a.json").write_text("{}")
    (folder / "a.json").write_text(json.dumps(tuning))
    (folder / "former.json").write_text("{}")  # of a grid that no record rests on any more
    tuned = record("utility", task={"data": "mnist", "model": "dp_cnn", "tuning_digest": "a"})
    document = Document(page(tuned))
    assert len(document.all("tr", class_="chosen")) == 1
    assert "pcdp, epsilon 3 mnist, dp_cnn, judged on 300 public examples" in document.text
    assert "0.5 0.900 [0.800, 0.950] 300 chosen" in document.text
    (folder / "a.json").write_text('{"schema": 2}')
    with pytest.raises(records_of.RecordError, match="must have schema 2 and a grid"):
        page(tuned)


def test_the_self_test_beside_the_records_is_shown_and_a_miss_stands_out(page, record, tmp_path):
    assert "Self-test of the tool" not in Document(page(record("utility"))).text
    one = {"name": "half_noise", "about": "<b>half</b>", "planted": True, "accused": 9, "repetitions": 10, "low": 0.5}
    one |= {"high": 0.9975, "by": {"canary": 9, "low_bits": 1}}
    two = one | {"name": "Opacus", "about": "correct", "planted": False, "accused": 0, "low": 0.0, "by": {}}
    file = tmp_path / "run" / "selftest.json"
    file.write_text(json.dumps({"schema": 1, "level": 1e-3, "trainers": [one, two]}))
    document = Document(page(record("utility")))
    assert "1 of 1 planted bugs were caught; 0 of 1 correct trainers were accused" in document.text
    assert "<b>half</b> 9 of 10 [0.50, 1.00] canary, low bits" in document.text  # escaped
    bad = len(document.all("strong", class_="bad"))
    file.write_text(json.dumps({"schema": 1, "level": 1e-3, "trainers": [one | {"accused": 2}, two | {"accused": 1}]}))
    assert len(Document(page(record("utility"))).all("strong", class_="bad")) == bad + 2
    for text, sentence in (
        ("{", "cannot read self-test"),
        ('{"schema": 2}', "must have schema 1"),
        ('{"schema": 1, "level": 0.1, "trainers": [{"planted": true}]}', "KeyError"),
    ):
        file.write_text(text)
        with pytest.raises(records_of.RecordError, match=sentence):
            page(record("utility"))


def test_bad_places_are_refused_in_a_sentence(page, run, tmp_path):
    with pytest.raises(records_of.RecordError, match="there is no such directory"):
        build(tmp_path / "nothing", tmp_path / "out")
    page(*run)
    (tmp_path / "file").write_text("")
    with pytest.raises(records_of.RecordError, match=r"out must be a folder, and .* is a file"):
        build(tmp_path / "run", tmp_path / "file")
    twice = {**run[0].__dict__, "id": "f" * 16}
    records_of.write(type(run[0])(**twice), tmp_path / "run/records")
    with pytest.raises(BoardError, match="recorded twice"):
        build(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_every_footnote_is_needed_by_what_stands_above_it(page, run, record, metric):
    odd = {"auc": metric(None, reason="scores were odd"), "tpr_at_1pct_fpr": metric(None, reason="few non-members")}
    picture = {
        "psnr": metric(20.0, reason="one image"),
        "ssim": metric(None, reason="no patches"),
        "psnr_floor": metric(11.0),
    }
    more = [record(defense="gep", metrics=odd), record("reconstruction", defense="gep", metrics=picture)]
    document = Document(page(*run, *more))
    targets = {attrs["href"][1:] for attrs in document.all("a") if attrs["href"].startswith("#")}
    notes = [attrs["id"] for attrs in document.all("li") if re.fullmatch(r"[nmp]\d+", attrs.get("id", ""))]
    assert {note[0] for note in notes} == {"n", "m", "p"} and set(notes) <= targets
    # A reason that only a column which is left out has is no footnote.
    text = page(*run, *more)
    assert "few non-members" not in re.findall(r'<ol class="footnotes">.*?</ol>', text, re.DOTALL)[0]
    assert "Worst TPR at 1 % FPR (" in document.text and "few non-members" in document.text


@pytest.mark.long
def test_reading_notes_are_folded_and_the_board_stands_first(page, run):
    text = page(*run)
    reading = text.partition('<details class="reading">')[2].partition("</details>")[0]
    assert "are means over seeds" in reading and "an attack failed" in reading  # and the meanings of its flags
    assert text.index('<details class="reading">') < text.index('<table class="board"')


def test_budgets_are_bodies_of_the_table_with_ranks_of_their_own(page, run):
    document = Document(page(*run[:-1]))
    headings = [attrs for attrs in document.all("th", scope="rowgroup")]
    assert len(headings) == 4 and len(document.all("tbody", class_="contestants")) == 3
    for words in ("ε 3, δ 1e-5, unit example", "ε 8, δ 1e-5, unit example", "no proved ε"):
        assert words in document.text
    assert document.text.count("1 of 1") == 3


def test_degraded_stands_with_the_attack_and_not_under_the_defense(page, record):
    made = record("reconstruction", attack="inverting_gradients", flags=("degraded",))
    text = page(record("utility"), made)
    board = text.partition('<table class="board"')[2].partition("</table>")[0]
    assert "degraded" not in board
    assert "Attack inverting_gradients without noise: degraded (by its own account" in text


def test_headers_of_the_boards_tables_have_a_scope_and_a_best_direction(page, run):
    document = Document(page(*run))
    heads = document.all("th", role="columnheader")
    assert all(attrs["scope"] == "col" for attrs in heads)
    best = {attrs["data-title"].partition(" δ")[0]: attrs["data-best"] for attrs in heads}
    assert best["Accuracy"] == best["Seeds"] == "descending"
    assert best["Worst AUC"] == best["Claimed ε"] == best["Defense"] == "ascending"
    assert all("scope" in attrs for attrs in document.all("th"))


def test_reasons_that_differ_in_numbers_alone_are_given_once():
    reasons = ["it needs 100 non-members, got 20", None, "it needs 100 non-members, got 43", "no attack", ""]
    assert in_short(reasons) == "it needs 100 non-members, got 20, and 1 more with other numbers; no attack"
