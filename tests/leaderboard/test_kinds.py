"""The table of kinds of result: it is sound, and a third kind of attack needs its row and its metrics' rows alone."""

import json
from dataclasses import replace

import pytest

from leakbench.leaderboard.board.notes import sizes_words
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.kinds import KINDS, KindOfResult, NoiseVariant
from leakbench.leaderboard.metrics import METRICS, BoardColumn, Floor, KnownMetric
from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.records.manifest import read_manifests, write_manifest
from leakbench.leaderboard.records.record import RecordError, read_all, write

from .conftest import asked_for, complete

ATTRIBUTE = KindOfResult(
    name="attribute", main="attribute_accuracy", counts="guesses", question="asked for a hidden attribute",
    absent="no attribute attack", powerless="does not guess the attributes of {}",
)  # fmt: skip
ACCURACY = KnownMetric(
    name="attribute_accuracy", kind="attribute", label="attribute accuracy", better="lower", chance=0.25,
    columns=(
        BoardColumn(key="attribute", header=("attribute", "accuracy"), title="Attribute", hint="0.25 is chance."),
    ),
)  # fmt: skip


@pytest.fixture
def third_kind(monkeypatch):
    monkeypatch.setitem(KINDS, "attribute", ATTRIBUTE)
    monkeypatch.setitem(METRICS, "attribute_accuracy", ACCURACY)


@pytest.fixture
def run(third_kind, record, metric):
    """A defense and both controls, each with its utility and an attack of the third kind."""

    def make(leak=0.9, quiet=0.26, **fields):
        made = []
        for name, value, role in (("dp_sgd", 0.3, None), ("sgd", leak, "positive"), ("sgd", quiet, "negative")):
            given = {"defense": name, "control": role, **fields}
            measured = {"attribute_accuracy": metric(value, 0.05, n=40)}
            made += [record("utility", **given), record("attribute", attack="guess", metrics=measured, **given)]
        return made

    return make


def test_records_of_a_third_kind_are_checked_written_and_read(run, record, metric, tmp_path):
    with pytest.raises(
        RecordError, match="attack must be null in utility or federation or rounds records only, got kind 'attribute'"
    ):
        record("attribute", attack=None, metrics={"attribute_accuracy": metric(0.5)})
    with pytest.raises(RecordError, match="attribute_accuracy must be in a attribute record, got kind 'membership'"):
        record(metrics={"attribute_accuracy": metric(0.5)})
    made = run()
    for one in made:
        write(one, tmp_path)
    write_manifest(asked_for(*made), tmp_path)
    assert read_all(tmp_path) == sorted(made, key=lambda one: one.id)
    assert read_manifests(tmp_path) == [asked_for(*made)]


def test_a_kind_of_no_row_is_refused_in_records_and_manifests(record):
    one = record()
    for refused in (one, asked_for(one).cells[0]):
        with pytest.raises(
            RecordError,
            match=f"one of {', '.join(KINDS)}, got 'gossip'",
        ):
            replace(refused, kind="gossip")
    with pytest.raises(RecordError, match="noise must be one of none, calibrated, got 'loud'"):
        replace(asked_for(record("reconstruction")).cells[0], noise="loud")


def test_a_third_kind_is_on_the_board_with_its_worst_case_and_its_controls(run):
    made = run()
    board = Board.from_records(made, complete(*made))
    assert board.trustworthy
    assert [(control.name.rpartition(", ")[2], control.expected) for control in board.controls] == [
        ("attribute", "attribute accuracy above 0.25"), ("attribute", "attribute accuracy not above 0.25"),
    ]  # fmt: skip
    row = board.rows[0]
    assert (row.estimates["attribute"].value, row.estimates["attribute"].attack) == (0.3, "guess")
    assert board.to_dict()["rows"][0]["attribute"]["value"] == 0.3 and "attribute_low" in board.to_csv()
    for words in (board.to_text(width=220), board.to_markdown(), board.to_latex()):
        assert "attribute accuracy" in words and "0.30" in words and "40 guesses" in words


@pytest.mark.parametrize(("leak", "quiet", "failed"), [(0.26, 0.26, "positive"), (0.9, 0.9, "negative")])
def test_controls_of_a_third_kind_can_fail(run, leak, quiet, failed):
    board = Board.from_records(run(leak=leak, quiet=quiet))
    assert [f"{failed} control" in control.name for control in board.controls if not control.ok] == [True]
    assert ("guess does not guess the attributes of sgd" in board.to_text(width=400)) == (failed == "positive")


def test_a_third_kind_that_failed_makes_its_worst_case_a_lower_end(run, record):
    failed = record("attribute", attack="other", status="failed", reason="out of memory")
    row = next(row for row in Board.from_records([*run(), failed]).to_dict()["rows"] if row["control"] is None)
    assert row["at_least"] == ["attribute"]


def test_a_third_kind_is_on_the_page_and_its_absence_too(run, record, tmp_path):
    made = [*run(), record("utility", suite="other")]
    for one in made:
        write(one, tmp_path)
    page = build(tmp_path, tmp_path / "page").read_text(encoding="utf-8")
    assert "guess asked for a hidden attribute." in page
    assert 'title="0.25 is chance."' in page and '<span class="value">0.300</span>' in page
    assert "the labels of a shared update and no attribute attack in these records." in page
    assert json.loads((tmp_path / "page/board.json").read_text())["rows"][1]["attribute"]["value"] == 0.3


def test_a_kind_with_a_target_variants_and_a_floor_of_its_own_joins_the_rows_of_trainings(monkeypatch, record, metric):
    """Its direction is the other one: a smaller distance is a larger leak."""
    variants = (NoiseVariant(name="none", label="plain", preposition="without", adjective="plain"),)
    kind = replace(ATTRIBUTE, main="distance", target="one upload", variants=variants, powerless="")
    known = replace(
        ACCURACY, name="distance", better="higher", chance=None, label="distance", unit="m", digits=1,
        floor=Floor(metric="guess", of="the blind guess", margin=2.0),
        columns=(BoardColumn(key="distance", variant="none", header=("distance",)),),
    )  # fmt: skip
    blind = replace(
        ACCURACY, name="guess", most=99.0, better="higher", chance=None, over_attacks="leading",
        columns=(BoardColumn(key="guess"),),
    )  # fmt: skip
    monkeypatch.setitem(KINDS, "attribute", kind)
    monkeypatch.setitem(METRICS, "distance", replace(known, most=99.0))
    monkeypatch.setitem(METRICS, "guess", blind)

    def upload(found, role):
        metrics = {"distance": metric(found, better="higher"), "guess": metric(9.0, better="higher")}
        return record("attribute", defense="sgd", attack="locate", control=role, metrics=metrics)

    trained = [record("utility", defense="sgd", control=role) for role in ("positive", "negative")]
    board = Board.from_records([*trained, upload(1.0, "positive"), upload(8.0, "negative")])
    assert len(board.rows) == 2 and board.trustworthy
    assert board.controls[0].expected == "distance below the blind guess's"
    assert board.controls[0].measured == "distance 1.0 m against 9.0 m by locate"
    said = " ".join(board.to_text(width=300).split())
    assert "one upload (photos, convnet, batch 1, step 2), without its noise. The blind guess alone has 9.0 m." in said
    assert "Lower distance leaks more." in said
    assert not Board.from_records([*trained, upload(8.0, "positive"), upload(1.0, "negative")]).controls[1].ok


def test_the_table_agrees_with_itself():
    for name, kind in KINDS.items():
        main = METRICS[kind.main]
        assert name == kind.name and main.kind == name and main.columns and kind.counts.endswith("s")
        assert not kind.controls or main.chance is not None or main.floor is not None
        assert kind.attacked == bool(kind.question)
        # What few suites ask is missed on no page.
        assert bool(kind.absent) == (kind.attacked and not all(column.optional for column in main.columns))
        assert {column.variant for column in main.columns} in ({None}, {variant.name for variant in kind.variants})


@pytest.mark.parametrize(
    ("kind", "one", "many"), [("labels", "1 batch", "2 batches"), ("reconstruction", "1 image", "2 images")]
)
def test_what_a_number_rests_on_is_said_in_the_singular_too(kind, one, many, record, metric):
    main = KINDS[kind].main
    for n, words in ((1, one), (2, many)):
        assert sizes_words([record(kind, metrics={main: metric(0.5, n=n)})]) == words
