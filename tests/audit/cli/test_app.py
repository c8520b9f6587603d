"""The command: golden numbers, one JSON document and nothing else, one sentence and the right code for a mistake."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from pyarrow import parquet

from leakbench.audit.catalog import explain, listing
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.cli import app as cli
from leakbench.audit.run import harness
from leakbench.leaderboard.records.manifest import read_manifests
from leakbench.leaderboard.records.record import read, read_all

from ...parameters import subtests
from ..conftest import INVERSION, SUITE
from ..run.runs import BROKEN, MEMBERSHIP

ROOT = Path(__file__).parents[3]
FAST = SUITE.replace("epsilon", "noise_multiplier")
ALONE = FAST.replace(MEMBERSHIP, '{ name = "loss_threshold" }').replace('{ name = "sgd" }, ', "")


def refused(answer: tuple[int, str, str], code: int, sentence: str) -> None:
    got, out, err = answer
    assert (got, out) == (code, ""), err
    assert sentence in err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err


def planned(*, defense="dp_sgd", sigma: float | str = 1.54, rate=0.02, steps=2000, delta=1e-5) -> list[object]:
    return [
        "epsilon",
        *("--defense", defense, "--noise-multiplier", sigma),
        *("--sample-rate", rate, "--steps", steps, "--delta", delta),
    ]


def test_epsilon_of_the_classic_run(document):
    found = document(*planned())
    assert round(found["epsilon"], 2) == 2.75 and round(found["epsilon_rdp"], 2) == 3.00
    assert found["delta"] == 1e-5 and found["relation"] == "add_remove" and found["sampling"] == "poisson"
    assert found["as_if_poisson"] is None and found["reason"] is None
    assert "PLD" in found["accountant"] and "pessimistic" in found["accountant"]
    assert found["events"] == ["2000 x Gaussian, noise 1.54 on a Poisson sample of rate 0.02"]


def test_epsilon_under_partition_is_that_of_its_epochs(document):
    found = document(*planned(), "--sampling", "partition")
    assert round(found["epsilon"], 1) == 25.3
    assert round(found["as_if_poisson"], 2) == 2.75
    assert found["relation"] == "zero_out"


@pytest.mark.slow  # another row of the papers' table; what is new in it is its length
def test_epsilon_with_much_noise(document):
    found = document(*planned(sigma=10, rate=0.025, steps=3200))
    assert (round(found["epsilon_rdp"], 3), round(found["epsilon"], 3)) == (0.549, 0.500)


def test_two_blocks_cost_what_one_does(document):
    one, two = (document(*planned(defense=name, steps=50)) for name in ("dp_sgd", "dpdr"))
    assert one.pop("defense") != two.pop("defense")
    assert one == two


@subtests(("name", "why"), [("noisy_sgd", "is not bounded"), ("clipped_sgd", "no noise is added")])
def test_an_infinite_epsilon_is_null_with_its_reason(document, command, name, why):
    found = document(*planned(defense=name, steps=20))
    assert found["epsilon"] is None and found["epsilon_rdp"] is None and why in found["reason"]
    code, out, _ = command(*planned(defense=name, steps=20))
    assert code == 0 and out.startswith("epsilon ∞ at delta 1e-05") and f"because {found['reason']}" in out


def test_epsilon_in_words_has_the_numbers_of_the_document(command):
    code, out, err = command(*planned(), "--sampling", "shuffle", "--set", "clip_norm=2.0")
    assert (code, err) == (0, "")
    assert "zero_out" in out and "by RDP" in out and "by      closed form" in out and "event   " in out
    assert "as if the sampling were Poisson, as papers do, it would be 2.75" in out


@subtests(
    ("arguments", "sentence"),
    [
        (planned(rate=2), "sample_rate must be in (0, 1], got 2.0"),
        (planned(rate=0), "sample_rate must be in (0, 1], got 0.0"),
        (planned(sigma=-1), "noise_multiplier must be zero or a positive number, got -1.0"),
        (planned(sigma="nan"), "noise_multiplier must be zero or a positive number, got nan"),
        (planned(sigma="much"), "--noise-multiplier"),
        (planned(delta=0), "delta must be in (0, 1), got 0.0"),
        (planned(delta=1), "delta must be in (0, 1), got 1.0"),
        (planned(defense="sgd", delta=0), "delta must be in (0, 1), got 0.0"),
        (planned(steps=0), "steps must be from 1 to 1000000 for a prediction, got 0"),
        (planned(defense="dp_sdg"), "no defense named 'dp_sdg'; did you mean 'dp_sgd'?"),
        ([*planned(), "--sampling", "shufle"], "no sampling named 'shufle'; did you mean 'shuffle'?"),
        ([*planned(), "--sampling", "full"], "sample_rate must be 1 for full batches, got 0.02"),
        ([*planned(), "--set", "clip_nrom=1"], "unknown setting 'clip_nrom'; did you mean 'clip_norm'?"),
        ([*planned(), "--set", "clip_norm"], "a setting must be key=value with a TOML value"),
        ([*planned(), "--set", "clip_norm='a'"], "clip_norm must be a number, got 'a'"),
        ([*planned(), "--set", "clip_norm=-1"], "norm must be a positive finite number, got -1"),
        ([*planned(), "--set", "noise_multiplier=1"], "unknown setting 'noise_multiplier'"),
        (planned()[:3], "--sample-rate"),
        (["nope"], "nope"),
        (["run"], "suite"),
        (["run", "quick", "--jbos", "2"], "--jbos"),
        (["run", "quick", "--jobs", "0"], "--jobs"),
        (["run", "quick", "--device", "gpu"], "device must be auto, cpu or cuda, got 'gpu'"),
        (["run", "quikc"], "no suite named 'quikc'; did you mean 'quick'?"),
        (["run", "quick", "--defense", "dp_sdg"], "no defense named 'dp_sdg'; did you mean 'dp_sgd'?"),
        (["run", "quick", "--attack", "lira"], "no attack named 'lira'; there are "),
        (["run", "quick", "--set", "task.epoch=2"], "task.epoch: unknown key; did you mean 'epochs'?"),
        (["run", "quick", "--set", "task.epochs"], "an override must be key.path=value"),
        (["run", "quick", "--set", "task.lr=fast"], "the value of task.lr must be TOML"),
        (["list", "defense"], "no kind named 'defense'; did you mean 'defenses'?"),
        (["explain", "dp_sdg"], "named 'dp_sdg'; did you mean 'dp_sgd'?"),
        (["leaderboard", "table", ".", "--format", "mrakdown"], "no format named 'mrakdown'; did you mean 'markdown'?"),
    ],
)
def test_bad_usage_is_one_sentence_and_code_2(command, arguments, sentence):
    refused(command(*arguments, "--json"), cli.USAGE, sentence)


@subtests(
    ("arguments", "sentence"),
    [
        (["run", "gone.toml"], "cannot read suite gone.toml: No such file"),
        (["run", "torn.toml"], "torn.toml: not TOML"),
        (["run", "bad.toml"], "bad.toml: task.epochs: must be >= 1, got 0"),
        (["run", "large.toml"], "large.toml: task.batch: must be at most 700, the private examples, got 1400"),
        (["run", "odd.toml"], "odd.toml: task.model.hidden: must be of type int, got '8'"),
        (["leaderboard", "table", "gone"], "no results in gone: there is no such directory"),
        (["leaderboard", "table", "."], "no records in .; run a suite with this directory as its output first"),
    ],
)
def test_a_bad_file_is_one_sentence_and_code_3(command, arguments, sentence):
    for name, (old, new) in {
        "torn": ("]", ""),
        "bad": ("epochs = 1", "epochs = 0"),
        "large": ("batch = 70", "batch = 1400"),
        "odd": ("hidden = 8", 'hidden = "8"'),
    }.items():
        Path(f"{name}.toml").write_text(SUITE.replace(old, new), encoding="utf-8")
    refused(command(*arguments), cli.BAD_FILE, sentence)


def test_a_missing_extra_is_one_sentence_with_the_way_to_get_it(command, site):
    site.add("defenses", "needy", "import kymatio_of_nobody\n\ndef needy():\n    pass\n")
    refused(command(*planned(defense="needy")), cli.USAGE, "defense 'needy' needs kymatio_of_nobody")
    source = "def lazy():\n    raise ModuleNotFoundError('no', name='kymatio')\n"
    site.add("defenses", "lazy", source)
    refused(command(*planned(defense="lazy")), cli.USAGE, "pip install 'leakbench[images]'")
    Path("toy.toml").write_text(SUITE.replace('"sgd"', '"lazy"'), encoding="utf-8")
    refused(command("run", "toy.toml"), cli.BAD_FILE, "needs kymatio, which is not installed: pip install")


@subtests("arguments", [[], ["leaderboard"]])
def test_without_arguments_there_is_help(command, arguments):
    code, out, err = command(*arguments)
    assert (code, err) == (2, "") and "Usage" in out


@subtests("arguments", [["--help"], ["run", "--help"], ["epsilon", "--help"]])
def test_help_is_no_mistake(command, arguments):
    code, out, err = command(*arguments)
    assert (code, err) == (0, "") and "Usage" in out


@subtests("kind", catalog.KINDS)
def test_lists_name_everything_with_a_line_each(command, document, kind):
    found = document("list", kind)
    assert tuple(found) == catalog.names(kind)  # what can be counted: a pattern is no method
    assert all(line and "\n" not in line for line in found.values())
    _, out, _ = command("list", kind)
    assert [line.split()[0] for line in out.splitlines()] == [*found, *listing.patterns(kind)]


@pytest.mark.long
def test_without_a_kind_everything_is_listed(command, document):
    found = document("list")
    assert list(found) == list(catalog.KINDS)
    assert all(f"{kind}:\n  {next(iter(found[kind]))} " in command("list")[1] for kind in ("models", "defenses"))


def test_explain_says_what_where_from_and_with_which_settings(command, document):
    found = document("explain", "dpdr")
    assert found["kind"] == "defense" and "arXiv" in found["about"]
    assert {s["name"]: s["default"] for s in found["settings"]}["share"] == 0.02
    code, out, err = command("explain", "dpdr")
    assert (code, err) == (0, "") and "share (a number, default 0.02): fraction of" in out
    assert (
        "noise_multiplier (a number, default calibrated to the budget): multiplier of the step as one Gaussian" in out
    )
    assert "an observer of the updates sees: noisy coefficients along the last release, and" in out
    needs = document("explain", "likelihood_ratio")["requires"]
    assert needs["access"] == "ALL_STEPS" and set(needs["knows"]) == {"OTHERS", "DEFENSE"}
    assert "needs: access ALL_STEPS" in command("explain", "likelihood_ratio")[1]
    for name in ("digits", "mlp", "quick"):  # all that can be explained is, in the tests of the catalogue
        assert document("explain", name)["summary"]


def test_doctor_says_the_same_in_words_and_in_json(command, document):
    found = document("doctor")
    code, out, _ = command("doctor")
    assert code == 0
    assert all(f"{name:<14} {version}" in out for name, version in found["versions"].items() if version)
    assert f"device     {found['auto']}" in out and "data  digits" in out


def write(text: str) -> None:
    Path("toy.toml").write_text(text, encoding="utf-8")


def test_a_run_prints_its_board_and_says_where_its_records_are(command):
    write(ALONE)
    code, out, err = command("run", "toy.toml", "--jobs", 1)
    assert code == 0 and "dp_sgd" in out and "results/toy" not in out
    assert re.fullmatch(r"\[0/2\] \d+ s: starting", err.splitlines()[0]) and "records: results/toy" in err
    assert len(read_all("results/toy")) == 2
    again = command("run", "toy.toml", "--jobs", 1)
    assert again[:2] == (0, out) and "2 of 2 cells are there already" in again[2]


def test_a_run_in_json_is_one_document(document):
    write(ALONE)
    found = document("run", "toy.toml", "--jobs", 1, "--out", "here")
    assert found["out"] == "here"
    assert sorted(found["records"]) == [record.id for record in read_all("here")]
    assert found["board"] == document("leaderboard", "table", "here")


def test_a_small_form_is_run_under_its_own_name_and_its_old_spelling_says_the_new_one(command):
    write(f"{ALONE}\n[small]\ntask.epochs = 1\n")
    code, _, err = command("run", "toy.toml", "--small", "--jobs", 1)
    assert code == 0 and "records: results/toy_small" in err
    (manifest,) = read_manifests(Path("results/toy_small/records"))
    assert manifest.command == ("leakbench", "run", "toy.toml", "--small") and manifest.suite == "toy_small"
    code, _, err = command("run", "rs_table2_small", "--defense", "dp_sdg")
    assert code == cli.USAGE and err.startswith(
        "leakbench run rs_table2_small is now leakbench run rs_table2_fmnist --small"
    )


@pytest.mark.long
def test_options_choose_what_is_run(command):
    write(FAST.replace("seeds = [0]", "seeds = [0, 1]"))
    options = ["--defense", "dp_sgd", "--attack", "loss_threshold", "--seed", 7, "--set", "task.epochs=2"]
    options += ["--set", "task.private=80", "--set", "task.batch=40"]
    assert command("run", "toy.toml", "--jobs", 1, "--out", "here", *options)[0] == 0
    records = read_all("here")
    assert {(r.defense.name, r.seed, r.task["epochs"]) for r in records} == {("dp_sgd", 7, 2)}
    assert {r.attack and r.attack.name for r in records} == {None, "loss_threshold"}
    assert command("run", "toy.toml", "--jobs", 1, "--out", "here", "--secure-noise", *options)[0] == 0
    assert {r.noise for r in read_all("here")} == {"seeded", "secure"}


def test_a_failed_cell_is_code_1_and_the_board_is_printed_all_the_same(command, site):
    site.add("attacks", "spy", BROKEN)
    write(FAST.replace(MEMBERSHIP, '{ name = "spy" }, { name = "loss_threshold" }'))
    code, out, err = command("run", "toy.toml", "--jobs", 1)
    assert code == 1 and "dp_sgd" in out and "RuntimeError" in out and "Traceback" not in err
    assert len(read_all("results/toy")) == 6
    code, out, _ = command("run", "toy.toml", "--jobs", 1, "--json")
    assert code == 1 and json.loads(out)["records"]
    write(FAST.replace(MEMBERSHIP, '{ name = "spy" }'))
    assert command("run", "toy.toml", "--jobs", 1, "--fail-fast", "--out", "fast")[0] == 1
    assert len(read_all("fast")) == 2


@pytest.mark.long
def test_a_control_that_fails_is_code_1_and_said_on_top(command):
    # Nothing leaks through the loss of a model that hardly learnt, so the positive control must fail.
    write(FAST.replace(MEMBERSHIP, '{ name = "loss_threshold" }').replace("controls = false", "controls = true"))
    code, out, _ = command("run", "toy.toml", "--jobs", 1)
    assert code == 1 and out.startswith("!! CONTROLS FAILED")
    assert command("leaderboard", "table", "results/toy")[0] == 1
    assert command("leaderboard", "page", "results/toy")[0] == 1
    assert command("leaderboard", "build", "results/toy")[0] == 1


def test_a_claim_that_is_violated_is_code_1(command, monkeypatch):
    from leakbench.audit.subjects import trained_model as trained

    write(ALONE)
    monkeypatch.setattr(trained, "noise_found", lambda *_: (0.5, -100.0, 0.0))
    code, out, _ = command("run", "toy.toml", "--jobs", 1)
    assert code == 1 and "violated" in out.lower()


def test_what_cannot_be_run_is_skipped_with_its_sentence_and_is_no_failure(command):
    write(ALONE.replace('{ name = "loss_threshold" }', INVERSION))
    code, out, _ = command("run", "toy.toml", "--jobs", 1)
    assert code == 0 and "needs a shared update" in " ".join(out.split())


def test_a_torn_record_is_code_3_and_is_named(command):
    write(ALONE)
    command("run", "toy.toml", "--jobs", 1)
    torn = sorted(Path("results/toy/records").glob("*.json"))[0]
    torn.write_text("{", encoding="utf-8")
    for arguments in (["run", "toy.toml", "--jobs", 1], ["leaderboard", "table", "results/toy"]):
        refused(command(*arguments), cli.BAD_FILE, f"bad record results/toy/records/{torn.name}: not a whole JSON")
    assert torn.read_text(encoding="utf-8") == "{"


def test_boards_come_in_four_formats(command, document):
    write(ALONE)
    command("run", "toy.toml", "--jobs", 1)
    shown = {form: command("leaderboard", "table", "results/toy", "--format", form)[1] for form in FORMATS}
    assert all("dp_sgd" in text.replace("\\_", "_") for text in shown.values())
    assert "| dp_sgd" in shown["markdown"].replace("`", "").replace("\\_", "_")
    assert r"\begin{tabular" in shown["latex"]
    (row,) = csv.DictReader(io.StringIO(shown["csv"]))
    record = next(r for r in read_all("results/toy") if r.kind == "utility")
    assert float(row["accuracy"]) == record.metrics["accuracy"].value
    assert document("leaderboard", "table", "results/toy", "--format", "csv")["rows"]


FORMATS = ("text", "markdown", "csv", "latex")


@pytest.mark.long
def test_boards_are_exported_from_several_folders_without_their_paths(command):
    write(ALONE)
    command("run", "toy.toml", "--jobs", 1)
    command("run", "toy.toml", "--jobs", 1, "--seed", 7, "--out", "more")
    whole = Path("results/toy").resolve()
    _, out, err = command("leaderboard", "table", whole, "more", "--format", "parquet", "--out", "board.parquet")
    assert (out, err) == ("", "written: board.parquet\n")
    measured = [
        r.metrics["accuracy"].value or 0.0
        for folder in (whole, "more")
        for r in read_all(folder)
        if r.kind == "utility"
    ]
    (line,) = (line for line in parquet.read_table("board.parquet").to_pylist() if line["metric"] == "accuracy")
    assert line["value"] == pytest.approx(sum(measured) / 2) and line["n"] == 2 and line["seeds"].endswith("7")
    for form in ("markdown", "latex", "csv", "croissant"):
        command("leaderboard", "table", whole, "--format", form, "--out", "exports")
    for path in Path("exports").iterdir():
        assert str(whole.parent).encode() not in path.read_bytes(), path


@subtests(
    "options, sentence",
    [
        (["--out", "x"], "--out needs a --format other than text"),
        (["--format", "every_eval_ever"], "format every_eval_ever names the data set that publishes the board"),
        (["--format", "parquet"], "format parquet is several files or no text: add --out FOLDER"),
        (["--format", "csv", "--dataset", "x"], "dataset must be ORG/NAME"),
    ],
)
def test_an_export_that_lacks_something_is_refused_in_one_sentence(command, options, sentence):
    if not Path("results/toy").exists():
        write(ALONE)
        command("run", "toy.toml", "--jobs", 1)
    refused(command("leaderboard", "table", "results/toy", *options), 2, sentence)


def test_out_that_is_no_folder_is_one_sentence(command):
    write(ALONE)
    code, out, err = command("run", "toy.toml", "--jobs", 1, "--out", "toy.toml")
    assert (code, out, err) == (2, "", "error: --out must be a folder, got the file toy.toml\n")


def test_interrupted_is_code_130(command, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    write(ALONE)
    monkeypatch.setattr(harness, "run_job", interrupt)
    before = signal.getsignal(signal.SIGINT)
    try:
        code, out, err = command("run", "toy.toml", "--jobs", 1)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # until the process has ended
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted; what was finished is kept, run the same command to go on"


def test_a_bug_keeps_its_traceback(command, monkeypatch):
    monkeypatch.setattr(explain, "explain", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["explain", "dpdr"])


def real(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Typer below 0.26 imports from click what click has deprecated.
    shown = ["-W", "always", "-W", "ignore:'click.utils"]
    command = [sys.executable, *shown, "-c", "from leakbench.audit.cli import main; main()", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_in_a_process_of_its_own_the_command_prints_one_document_and_nothing_else(command):
    write(ALONE)
    done = real("run", "toy.toml", "--jobs", "1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["records"]) == 2


def test_what_an_encoding_lacks_is_no_failure(command, monkeypatch):
    write(ALONE.replace('"dp_sgd"', '"sgd"'))
    assert command("run", "toy.toml", "--jobs", 1)[0] == 0
    assert "∞" in command("leaderboard", "table", "results/toy")[1]
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    with pytest.raises(SystemExit) as ended:
        cli.main(["leaderboard", "table", "results/toy"])
    assert ended.value.code == 0 and "?" in written.getvalue().decode("ascii")


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there, whatever the locale")
def test_a_path_that_an_encoding_lacks_is_shown_as_its_bytes(tmp_path):
    folder = os.fsencode(tmp_path) + b"/r\xc3\xa9p"
    command = [sys.executable, "-c", "from leakbench.audit.cli import main; main()", "leaderboard", "table", folder]
    ascii_only = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, check=False)
    assert done.returncode == 3 and folder in done.stderr
    assert done.stderr.decode("utf-8").count("\n") == 1


def test_an_error_of_the_system_begins_with_its_file(command):
    asked = ("--trials", "runs", "--method", "gaussian", "--threshold", "split", "--delta", "1e-5")
    assert command("evidence", "gone.csv", *asked)[::2] == (
        2,
        "error: gone.csv cannot be used: No such file or directory\n",
    )


@pytest.mark.long
def test_a_board_of_forged_numbers_is_no_success(command):
    write(FAST)
    assert command("run", "toy.toml", "--jobs", 1)[0] == 0
    paths = {path: read(path) for path in Path("results/toy/records").glob("*.json")}
    for forged, words in {"nothing": "", "auc": "its auc is", "claim": "does not follow from its steps"}.items():
        for path, record in paths.items():
            if forged == "auc" and "auc" in record.metrics:
                auc = record.metrics["auc"]
                assert auc.value is not None and auc.low is not None
                moved = replace(auc, value=(auc.value + auc.low) / 2)
                record = replace(record, metrics=record.metrics | {"auc": moved})
            if forged == "claim" and record.claim is not None and record.claim.epsilon:
                record = replace(record, claim=replace(record.claim, epsilon=record.claim.epsilon / 10))
            path.write_text(record.to_json(), encoding="utf-8")
        for asked in (["table"], ["page", "--out", "page"], ["build"]):
            code, _, err = command("leaderboard", asked[0], "results/toy", *asked[1:], "--verify")
            assert (code, "not verified" in err) == ((1, True) if words else (0, False))
            assert words in err


def test_a_missing_package_is_one_sentence_and_no_verdict(command, monkeypatch):
    def needs(*_, **__):
        raise ModuleNotFoundError("hf needs transformers, which is not installed: pip install transformers")

    monkeypatch.setattr("leakbench.audit.evidence.audit.audit_canaries", needs)
    rows = "".join(f"{i},{i},{i % 2}\n" for i in range(40))
    Path("s.csv").write_text("id,score,member\n" + rows, encoding="utf-8")
    code, _, err = command(
        "evidence", "s.csv", *("--trials", "canaries", "--method", "one_run", "--guesses", "5+5", "--delta", "1e-5")
    )
    assert (code, err) == (2, "error: hf needs transformers, which is not installed: pip install transformers\n")

    def lacks(*_, **__):
        from leakbench.defenses.core import no_such_thing  # noqa: F401 # pyright: ignore

    monkeypatch.setattr("leakbench.audit.evidence.audit.audit_canaries", lacks)
    with pytest.raises(ImportError, match="no_such_thing"):  # a bug of ours shows its traceback
        cli.main(
            ["evidence", "s.csv", "--trials", "canaries", "--method", "one_run", "--guesses", "5+5", "--delta", "1e-5"]
        )


def test_the_version_is_printed_alone(command):
    assert command("--version") == (0, f"{version('leakbench')}\n", "")
