"""Every format: numbers read back equal by its own reader, hostile names as text, versions, units apart, no path."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
from functools import cache

import pytest

from leakbench.leaderboard.board.identity import board_version, row_id
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.exports.formats import FORMATS, printable, write
from leakbench.leaderboard.exports.latex import LINES
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.exports.safe_text import in_one_line, portable
from leakbench.leaderboard.metrics import columns
from leakbench.leaderboard.records.validation import RecordError

from ...parameters import subtests
from ..conftest import complete, metric, record
from .conftest import HOSTILE, PUBLICATION, board, lines, numbers

NEEDS_YAML = ("eval_results", "model_index", "private_ml")


def files(name):
    if name in NEEDS_YAML:
        pytest.importorskip("yaml")
    return FORMATS[name](board(), PUBLICATION)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_its_version_and_no_path(name):
    for path, content in files(name).items():
        assert b"/home" not in content and b"bob" not in content, path
        assert not path.startswith("/") and ".." not in path.split("/")
        assert board_version().encode() in content or b"leakbench.version" in content, path


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("csv", "markdown", "latex", "croissant")])
def test_rows_of_clients_share_no_file_with_others(name):
    """Markdown and LaTeX have tables by unit, CSV a column."""
    of_client = [path for path, content in files(name).items() if b"dp_fed_avg" in content]
    assert of_client and not any(b"clipped_sgd" in files(name)[path] for path in of_client)


def test_csv_keeps_its_columns_ends_with_the_new_ones_and_holds_no_formula():
    text = printable(files("csv"), "csv")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert list(rows[0])[:3] == ["controls", "suite", "rank"]
    assert list(rows[0])[-3:] == ["row_id", "unit", "version"]
    values = {
        (row["row_id"], name): float(row[name])
        for row in rows
        for name in (column.field or column.key for _, column in columns())
        if row[name]
    }
    assert values == numbers() | numbers("client")
    assert {row["unit"] for row in rows} == {"record", "client"}
    assert not [cell for row in rows for cell in row.values() if cell[:1] in "=+-@" and not _is_number(cell)]
    assert f"'{HOSTILE[1]}" in {row["defense"] for row in rows}


def test_what_is_left_of_a_path_is_no_formula():
    paths = ["/x/=1+1", "C:/x/@SUM(1)", "file:///x/+9", "~/x/-9", "C:\\x\\=1"]
    hostile = Board.from_records([record(defense=path, suite="plain") for path in paths])
    text = printable(FORMATS["csv"](hostile, PUBLICATION), "csv")
    names = {row["defense"] for row in csv.DictReader(io.StringIO(text))}
    assert names == {"'=1+1", "'@SUM(1)", "'+9", "'-9", "'=1"}


def _is_number(cell):
    try:
        return cell == "" or math.isfinite(float(cell))
    except ValueError:
        return False


def test_markdown_shows_hostile_names_as_text():
    text = printable(files("markdown"), "markdown")
    assert "<script>" not in re.sub(r"\\[<>]", "", text)
    assert "[click](" not in text and r"[click\](" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in tables}) <= 3  # a table may lack a column
    assert "### quick · digits · mlp · unit: client" in text


def test_latex_has_booktabs_two_lines_of_notes_and_the_numbers_of_the_board():
    text = printable(files("latex"), "latex")
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 2
    assert len([line for line in text.splitlines() if re.match(r"\\noindent [A-Za-z]", line)]) == 2
    assert r"\hline" not in text and "reconstruction record" in text  # reasons of n/a are comments
    for row in board().rows:
        at = text.index(f"% row {row_id(row)}")
        printed = text[at:].splitlines()[1]
        for key in ("accuracy", "auc"):
            if row.estimates[key].value is not None:
                assert f"{row.estimates[key].value:.2f}" in printed


NEEDS_LATEX = pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="pdflatex is not installed (Debian: texlive-latex-recommended)"
)


def compiled(exported, folder):
    """Log and text of a document of 17 cm with an export, by pdflatex and pdftotext; empty text without the latter."""
    write(exported, folder)
    packages = r"\usepackage[textwidth=17cm]{geometry}\usepackage{booktabs}"
    document = rf"\documentclass{{article}}{packages}\begin{{document}}\input{{board.tex}}\end{{document}}"
    (folder / "paper.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "paper.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode == 0, done.stdout[-1500:]
    if not shutil.which("pdftotext"):
        return done.stdout, ""
    subprocess.run(["pdftotext", "-layout", "paper.pdf"], cwd=folder, check=True)  # noqa: S607
    return done.stdout, (folder / "paper.txt").read_text(errors="replace")


@NEEDS_LATEX
def test_latex_compiles_and_shows_hostile_names_as_text(tmp_path):
    log, text = compiled(files("latex"), tmp_path)
    assert (tmp_path / "paper.pdf").stat().st_size > 10_000
    assert not re.findall(r"(?:Overfull|Underfull|Warning).*", log)
    for words in ("random_sparsification", "[click](javascript", "U+65E5", "<script>alert(1)") if text else ():
        # The font draws an underscore as a rule, which is no character.
        assert words.replace("_", "") in re.sub(r"[\s_]", "", text)


@cache
def many():
    """A board of 60 rows with long names, their settings and flags, all with numbers of their own."""
    made = []
    for i in range(60):
        fields = {
            "defense": f"a_method_with_a_long_name_{i}_" + "withoutaplacetobreakat" * 2,
            "defense_settings": {"clip_norm": 1.0 + i, "learning_rate_of_the_second_half": 0.001},
            "flags": ("public_in_distribution", "noise_matched"),
        }
        accuracy = metric(0.2 + i / 100, 0.011, better="higher")
        made.append(record("utility", **fields, metrics={"accuracy": accuracy}))
        attack = {"attack": "an_attack_with_a_long_name_too", "metrics": {"auc": metric(0.5 + i / 200, 0.02)}}
        made.append(record(**fields, **attack))
        for kind in ("reconstruction", "canaries"):
            numbers = {"canary_epsilon": metric(i / 50)} if kind == "canaries" else None
            made.append(record(kind, **fields, **({"metrics": numbers} if numbers else {})))
    return Board.from_records(tuple(made), complete(*made))


@NEEDS_LATEX
def test_latex_of_many_rows_breaks_across_pages_and_is_no_wider_than_it_says(tmp_path):
    exported = FORMATS["latex"](many(), PUBLICATION)
    log, text = compiled(exported, tmp_path)
    assert not re.findall(r"(?:Overfull|Underfull|Warning).*", log)
    pages = re.search(r"Output written on paper.pdf \((\d+) pages", log)
    assert pages is not None and int(pages[1]) > 4
    assert b"continued" in exported["board.tex"]
    if text:
        shown = re.findall(r"\d\.\d\d\b", text)
        for row in many().rows:
            accuracy = row.estimates["accuracy"]
            for value in (accuracy.value, accuracy.low, accuracy.high):
                assert value is not None and f"{value:.2f}" in shown


def test_no_cell_of_latex_is_lost_where_a_board_takes_several_tables():
    text = printable(FORMATS["latex"](many(), PUBLICATION), "latex")
    tables = [table.partition(r"\end{tabular}")[0] for table in text.split(r"\begin{tabular}")[1:]]
    named = [re.findall(r"^% row (\w+)", table, re.MULTILINE) for table in tables]
    for row in many().rows:
        identifier = row_id(row)
        holding = [table for table, names in zip(tables, named, strict=True) if identifier in names]
        printed = "".join(table.partition(f"% row {identifier}")[2].partition("% row")[0] for table in holding)
        for key, digits in (("accuracy", 2), ("auc", 2), ("canary_epsilon", 2), ("psnr_free", 1)):
            estimate = row.estimates.get(key)
            if estimate is not None and estimate.value is not None:
                assert f"{estimate.value:.{digits}f}" in printed, key
        assert printed.count("public") == len(holding)
    for table in tables:
        lines = [line for line in table.splitlines() if line.endswith(r"\tabularnewline")]
        assert len(lines) <= LINES + 4 and len({len(re.findall(r"(?<!\\)&", line)) for line in lines}) == 1


def test_eval_results_are_accepted_by_the_parser_of_the_hub():
    yaml, hub = pytest.importorskip("yaml"), pytest.importorskip("huggingface_hub")
    if not hasattr(hub, "parse_eval_result_entries"):
        pytest.skip(f"huggingface_hub {hub.__version__} does not parse .eval_results")
    read, tasks = {}, set()
    exported = files("eval_results")
    benchmark = yaml.safe_load(exported.pop("benchmark/eval.yaml"))
    for path, content in exported.items():
        document = yaml.safe_load(content)
        entries = hub.parse_eval_result_entries(document)
        assert hub.eval_result_entries_to_yaml(entries) == document
        for entry in entries:
            notes = json.loads(entry.notes)
            metric = entry.task_id.rpartition(".")[2]
            read[path.partition("/")[0], metric] = entry.value
            line = lines()[notes["row_id"], metric]
            assert (notes.get("low"), notes.get("high"), notes["n"]) == (line["low"], line["high"], line["n"])
            assert notes["epsilon"] == ("inf" if line["epsilon"] == math.inf else line["epsilon"])
            assert notes["defense"] == line["defense"] and entry.dataset_id == "somebody/board"
            tasks.add(entry.task_id)
    assert read == numbers() | numbers("client")
    assert {task["id"] for task in benchmark["tasks"]} == tasks
    assert set(benchmark) == {"name", "description", "evaluation_framework", "tasks"}


def test_model_index_is_a_round_trip_of_model_cards():
    hub = pytest.importorskip("huggingface_hub")
    read = {}
    for path, content in files("model_index").items():
        card = hub.ModelCard(content.decode())
        again = hub.ModelCard(str(card))
        assert again.data.eval_results == card.data.eval_results and card.data.license == "cc-by-4.0"
        for result in card.data.eval_results:
            row = path.partition("/")[0]
            read[row, result.metric_type] = result.metric_value
            assert (
                result.metric_args["row_id"] == row and result.metric_args["defense"] == lines()[row, "auc"]["defense"]
            )
            epsilon = lines()[row, "auc"]["epsilon"]
            assert result.metric_args["epsilon"] == ("inf" if epsilon == math.inf else epsilon)
    assert read == numbers() | numbers("client")


def test_private_ml_claims_are_those_of_rows_with_an_unrefuted_claim():
    yaml = pytest.importorskip("yaml")
    read = {}
    for path, content in files("private_ml").items():
        for entry in yaml.safe_load(content):
            assert set(entry) == {"name", "url", "authors", "code", "venue", "venue_date", "claims"}
            for stated in entry["claims"]:
                row = stated["model"].rpartition(" ")[2]
                assert set(stated) >= {"model", "epsilon", "delta", "private_accuracy", "dp_accountant", "analyses"}
                assert "<" not in stated["model"] and ("client" in path) == ((row, "accuracy") in numbers("client"))
                read[row] = (stated["epsilon"], float(stated["private_accuracy"].removesuffix("%")) / 100)
    expected = {
        row: (line["epsilon"], pytest.approx(line["value"], rel=1e-15))
        for (row, metric), line in lines().items()
        if metric == "accuracy" and line["value"] is not None and not line["control"]
    }
    assert read == expected and math.inf in {epsilon for epsilon, _ in read.values()}
    assert b"left out: refuted, its claim was refuted" in files("private_ml")["digits_no.yml"]


def test_names_come_back_from_every_structured_format():
    names = {portable(name) for name in HOSTILE}
    assert names <= {line["defense"] for line in lines().values()}
    assert all(in_one_line(name).isprintable() for name in HOSTILE)


@subtests(
    "fields, sentence",
    [
        ({"dataset": "../x"}, "dataset must be ORG/NAME"),
        ({"dataset": "a/b/c"}, "dataset must be ORG/NAME"),
        ({"license": "MIT\n- x"}, "license must be an SPDX name"),
    ],
)
def test_statements_of_the_publisher_are_checked(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        Publication(**fields)


@subtests("name", ["eval_results", "every_eval_ever"])
def test_a_format_that_names_its_data_set_says_so(name):
    with pytest.raises(ValueError, match=f"format {name} names the data set .* add --dataset ORG/NAME"):
        FORMATS[name](board(), Publication())


def test_a_single_file_may_be_named_and_several_need_a_folder(tmp_path):
    assert write({"board.csv": b"x"}, tmp_path / "mine.csv") == [tmp_path / "mine.csv"]
    assert write({"board.csv": b"x"}, tmp_path / "folder") == [tmp_path / "folder/board.csv"]
    with pytest.raises(ValueError, match="out must be a folder for a, b, got the file"):
        write({"a": b"", "b": b""}, tmp_path / "mine.csv")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(RecordError, match="is a symbolic link"):
        write({"a": b"", "b": b""}, tmp_path / "link")


def test_a_board_without_numbers_is_refused_in_one_sentence(tmp_path):
    empty = Board.from_records([record(status="failed", reason="out of memory")])
    with pytest.raises(ValueError, match="records must have a number to export"):
        write(FORMATS["parquet"](empty, PUBLICATION), tmp_path)
    with pytest.raises(ValueError, match="format parquet is several files or no text: add --out FOLDER"):
        printable(files("parquet"), "parquet")
