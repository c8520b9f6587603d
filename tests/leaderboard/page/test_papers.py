"""Papers' figures beside ours: the rule that decides, and the publisher's sentences."""

from statistics import mean, stdev

import pytest

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.page.build import _template_environment
from leakbench.leaderboard.page.papers import UNKNOWN, read_explanations, refuse_unused, table
from leakbench.leaderboard.records.fields import Reported
from leakbench.leaderboard.records.validation import RecordError

from ..conftest import claim, metric, record


def rows(values, theirs, half: float | None = 0.02, metric_name="accuracy", **fields):
    figure = Reported(metric=metric_name, value=theirs, source="a paper, Table 1")
    accuracies = [{"accuracy": metric(value, half, better="higher")} for value in values]
    made = [
        record("utility", seed=seed, metrics=numbers, reported=(figure,), **fields)
        for seed, numbers in enumerate(accuracies)
    ]
    return Board.from_records(made).rows


def explanations(tmp_path, text):
    (tmp_path / "explanations.toml").write_text(text)
    return read_explanations([tmp_path, tmp_path / "none"])


ENTRY = """[[explanation]]
suite = "quick"
defense = "dp_sgd"
epsilon = 3
metric = "accuracy"
sentence = "The paper trains longer."
"""


def shown(figures):
    return _template_environment().get_template("papers.html").module.papers_table(figures)


@pytest.mark.parametrize(("theirs", "differs"), [(0.80, False), (0.815, False), (0.83, True), (0.77, True)])
def test_seeds_decide_by_two_standard_deviations_of_single_runs(theirs, differs):
    values = [0.79, 0.80, 0.81]
    (figure,) = table(rows(values, theirs))
    assert (figure.n, figure.decided_by, figure.differs) == (3, "seeds", differs)
    assert figure.deviation == pytest.approx(stdev(values))
    assert figure.deviations == pytest.approx((mean(values) - theirs) / stdev(values))
    assert differs == (abs(mean(values) - theirs) > 2 * stdev(values))
    assert figure.why == (UNKNOWN if differs else "")
    assert (UNKNOWN in shown([figure])) == differs


@pytest.mark.parametrize(("theirs", "differs"), [(0.81, False), (0.83, True)])
def test_one_seed_is_judged_by_the_interval_of_its_record_and_the_table_says_so(theirs, differs):
    (figure,) = table(rows([0.80], theirs))
    assert (figure.deviation, figure.deviations, figure.decided_by) == (None, None, "the record's interval")
    assert figure.differs == differs
    assert "interval of one seed" in shown([figure])


def test_seeds_that_are_equal_are_judged_by_the_interval_and_without_any_nothing_is():
    (figure,) = table(rows([0.80, 0.80], 0.9))
    assert figure.differs and figure.decided_by == "the record's interval"
    (bare,) = table(rows([0.80], 0.9, half=None))
    assert not bare.differs and bare.decided_by is None and "not judged" in shown([bare])


@pytest.mark.parametrize(("theirs", "differs"), [(3.0, False), (2.97, False), (2.96, True), (2.9, True), (3.1, True)])
def test_a_claimed_epsilon_is_compared_in_the_digits_that_the_paper_prints(theirs, differs):
    (figure,) = table(rows([0.8], theirs, metric_name="epsilon", claim=claim(2.9712)))
    assert figure.ours == pytest.approx(2.9712) and figure.differs == differs
    (infinite,) = table(rows([0.8], theirs, metric_name="epsilon", claim=claim(None)))
    assert infinite.ours is None and "∞" in infinite.reason and not infinite.differs


def test_a_difference_has_the_publishers_sentence_and_an_agreement_none(tmp_path):
    known = explanations(tmp_path, ENTRY)
    (figure,) = table(rows([0.79, 0.80, 0.81], 0.9), known)
    assert figure.why == "The paper trains longer."
    other = rows([0.79, 0.80, 0.81], 0.9, budget={"epsilon": 8.0, "delta": 1e-5})
    assert table(other, known)[0].why == UNKNOWN
    refuse_unused(rows([0.79, 0.80, 0.81], 0.9), known)
    with pytest.raises(RecordError, match=r"quick, dp_sgd, epsilon 3, accuracy explains .* do not differ; remove it"):
        refuse_unused(rows([0.79, 0.80, 0.81], 0.80), known)
    with pytest.raises(RecordError, match="no record has a paper's figure"):
        refuse_unused(other, known)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[explanation", "must be TOML"),
        ("x = 1", r"must hold tables \[\[explanation\]\]"),
        (ENTRY + "extra = 1", "explanation 1: extra"),
        (ENTRY.replace('"accuracy"', '"loss_of_nerve"'), "metric must be one that papers report"),
        (ENTRY + "noise_multiplier = 2.0", "not both"),
        (ENTRY.replace("longer.", "longer.\\n"), "line of printable text"),
        (ENTRY.replace('"quick"', "1"), "explanation 1: suite"),
    ],
)
def test_a_bad_file_is_refused_by_entry_and_field(tmp_path, text, words):
    with pytest.raises(RecordError, match=words):
        explanations(tmp_path, text)


def test_two_sentences_on_a_cell_are_refused(tmp_path):
    both = explanations(tmp_path, ENTRY + ENTRY.replace("epsilon = 3\n", ""))
    with pytest.raises(RecordError, match="explain each cell once"):
        table(rows([0.8], 0.9), both)


def test_text_of_strangers_is_escaped_and_rows_without_figures_have_no_line():
    (figure,) = table(rows([0.80], 0.81, defense="<script>alert(1)</script>"))
    assert "<script>" not in shown([figure])
    assert table(Board.from_records([record("utility")]).rows) == ()
