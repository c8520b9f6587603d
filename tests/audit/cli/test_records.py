"""The commands on folders of records: exit codes, tables that fit a terminal, JSON, and forged figures recomputed."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from leakbench.audit.cli.records import _key, _send_listed
from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.manifest import manifest_of
from leakbench.audit.scoring import shift
from leakbench.audit.suite import suite as suites
from leakbench.leaderboard.checks import figures
from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.manifest import Manifest, write_manifest
from leakbench.leaderboard.records.record import SEAL

from ..conftest import SUITE
from ..run.runs import run

CHECK = ("leaderboard", "check")
PUBLISHED = Path(__file__).parents[3] / "leaderboard" / "published"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Output of a run without controls."""
    folder = tmp_path_factory.mktemp("results")
    text = SUITE.replace('{ name = "sgd" }, ', "").replace('{ name = "likelihood_ratio" }, ', "")
    run(text, folder, command=("leakbench", "run", "toy"))
    return folder


@pytest.fixture
def copied(results, tmp_path) -> Path:
    return Path(shutil.copytree(results / "records", tmp_path / "copied" / "records")).parent


def edit(folder: Path, kind: str, change) -> Path:
    """Changes the record of a kind and seals it again."""
    path = next(p for p in sorted(folder.rglob("*.json")) if json.loads(p.read_text())["kind"] == kind)
    data = json.loads(path.read_text())
    change(data)
    del data[SEAL]
    data[SEAL] = digest_of_bytes(json.dumps(data, sort_keys=True).encode())
    path.write_text(json.dumps(data))
    return path


def forged(data):
    auc = data["metrics"]["auc"]
    auc.update({key: 0.5 + (auc[key] - auc["value"]) / 2 for key in ("low", "high")}, value=0.5)


def test_a_clean_folder_is_only_flagged_and_the_exit_code_is_0(command, results):
    code, out, err = command(*CHECK, results, "--verify")
    assert (code, err) == (0, "") and "[flagged] it requests no controls" in out
    assert out.endswith("2 records, 1 manifests, 1 flagged\n")


def test_forged_figures_with_a_new_seal_are_recomputed(command, copied):
    path = edit(copied, "membership", forged)
    assert command(*CHECK, copied)[0] == 0  # nothing but its arrays contradicts it
    code, out, _ = command(*CHECK, copied, "--verify", "--json")
    (refused,) = [f for f in json.loads(out)["folders"][0]["faults"] if f["severity"] == "refused"]
    assert code == 3 and refused["file"] == f"records/{path.name}" and refused["field"] == "metrics.auc"
    assert refused["problem"].startswith("its auc is 0.5 [") and "its scores give" in refused["problem"]


def test_a_claim_that_its_steps_do_not_prove_is_refused(command, copied):
    edit(copied, "utility", lambda data: data["claim"].update(epsilon=1.0))
    code, out, _ = command(*CHECK, copied, "--verify", "--json")
    problems = {f["field"]: f["problem"] for f in json.loads(out)["folders"][0]["faults"]}
    assert code == 3 and "does not follow from its steps" in problems["claim"]


def test_faults_fit_eighty_columns_and_every_folder_is_checked(command, results, copied):
    edit(copied, "membership", lambda data: data["metrics"]["auc"].update(value=2.0, low=2.0, high=2.0))
    (copied / "records" / ("x" * 90 + ".txt")).write_text("")
    code, out, _ = command(*CHECK, copied, results)
    lines = out.splitlines()
    assert code == 3 and any("metrics.auc.value" in line for line in lines)
    assert max(len(line) for line in lines if not line.startswith("/")) <= 80  # the last line names the folder
    assert "2 faults refused" not in lines[-1] and lines[-1].endswith("1 flagged")


def test_a_shift_is_flagged_at_the_level_of_its_test():
    assert figures.SHIFTED == shift.LEVEL


def test_a_folder_that_is_not_there_is_one_sentence(command):
    code, out, err = command(*CHECK, "nowhere")
    assert (code, out) == (3, "") and err.startswith("error: no results in nowhere")


@pytest.mark.long
def test_a_request_is_compared_with_the_suite_of_its_name(command, tmp_path):
    suite = suites.load("quick").with_overrides(["seeds=[0]"])
    whole = manifest_of(plan(suite), suite, False, ("leakbench", "run", "quick", "--set", "seeds=[0]"))

    def problems(cells, digest=suite.digest, command_line=whole.command):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        request = type(whole)(suite="quick", suite_digest=digest, command=command_line, cells=cells)
        write_manifest(request, folder)
        (folder / f"{'0' * 32}.json").write_text("{}")
        _, out, _ = command(*CHECK, folder, "--json")
        faults = json.loads(out)["folders"][0]["faults"]
        return [f for f in faults if "has no record" not in f["problem"] and f["file"].endswith("manifest")]

    assert problems(whole.cells) == []
    (left_out,) = problems(tuple(cell for cell in whole.cells if cell.defense.name != "dpdr"))
    assert left_out["severity"] == "flagged" and "cells of the suite are not requested, as dpdr" in left_out["problem"]
    fields = {f["field"]: f for f in problems(tuple(c for c in whole.cells if c.control != "positive"))}
    assert fields["controls"]["severity"] == "refused"
    weaker = [cell if i else type(cell)(**{**vars(cell), "id": "a" * 32}) for i, cell in enumerate(whole.cells)]
    assert "does not follow from the suite" in problems(tuple(weaker))[0]["problem"]
    (changed,) = problems(whole.cells, digest="b" * 64)
    assert changed["field"] == "suite_digest" and changed["severity"] == "flagged"
    (other_seeds,) = problems(whole.cells, command_line=("leakbench", "run", "quick"))
    assert other_seeds["field"] == "suite_digest"


def test_the_command_of_a_request_opens_no_file(command, copied, tmp_path):
    (request,) = copied.rglob("*.manifest")
    data = json.loads(request.read_text())
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    data |= {"suite": "quick", "command": ["leakbench", "run", "quick", "--set", f'task.data="{tmp_path}/evil.py:f"']}
    request.write_text(json.dumps(data))
    assert command(*CHECK, copied)[0] == 3 and not mark.exists()


def test_diff_says_by_its_exit_code_whether_anything_differs(command, results, copied):
    assert command("leaderboard", "diff", results, copied) == (0, "no difference\n", "")
    edit(copied, "membership", forged)
    code, out, _ = command("leaderboard", "diff", results, copied)
    assert code == 1 and "auc: 1 of 1 differ" in out
    code, out, _ = command("leaderboard", "diff", results, copied, "--json")
    (changed,) = json.loads(out)["cells"]["changed"]
    assert code == 1 and changed["numbers"][0]["after"][0] == 0.5


def test_merge_writes_a_folder_that_the_board_reads_or_nothing(command, results, copied, tmp_path):
    code, out, _ = command("leaderboard", "merge", results, copied, "--out", "merged")
    assert code == 0 and out.endswith("merged: 2 records\n")
    assert command("leaderboard", "table", "merged")[1] == command("leaderboard", "table", results)[1]
    path = edit(copied, "membership", forged)
    code, out, err = command("leaderboard", "merge", results, copied, "--out", "other")
    assert (code, err) == (3, "") and out.endswith("nothing was merged: 1 fault refused\n")
    assert not (tmp_path / "other").exists()
    code, out, _ = command("leaderboard", "merge", results, copied, "--out", "other", "--json")
    (fault,) = json.loads(out)["faults"]
    assert code == 3 and fault["file"] == str(path) and path.name in fault["problem"].partition("differs from")[2]
    code, _, err = command("leaderboard", "merge", results, "--out", "merged")
    assert code == 3 and "must be a new or empty folder" in err


def test_schemas_are_printed_and_accept_the_files_of_a_run(command, results):
    for name, pattern in (("record", "*.json"), ("manifest", "*.manifest")):
        code, out, err = command("leaderboard", "schema", name)
        assert (code, err) == (0, "")
        for path in results.rglob(pattern):
            Draft202012Validator(json.loads(out)).validate(json.loads(path.read_text()))
    assert command("leaderboard", "schema")[1] == command("leaderboard", "schema", "record")[1]


def test_a_schema_of_another_name_is_refused_with_the_nearest(command):
    assert command("leaderboard", "schema", "recrod")[::2] == (
        2,
        "error: no schema named 'recrod'; did you mean 'record'?\n",
    )
    assert (
        command("leaderboard", "schema", "board")[2] == "error: no schema named 'board'; there are record, manifest\n"
    )


def test_a_run_is_published_and_its_folder_checked_merged_and_shown_as_one(command, copied, tmp_path):
    out = tmp_path / "published"
    publish = ("leaderboard", "publish", copied, "--out", out)
    code, printed, err = command(*publish, "--verify")
    assert (code, err) == (0, "") and f"{out}/toy: new, 2 records, " in printed and "0 arrays left out" in printed
    code, printed, _ = command(*publish, "--json")
    (suite,) = json.loads(printed)["suites"]
    assert code == 0 and (suite["suite"], suite["state"], suite["records"]) == ("toy", "unchanged", 2)
    (out / "README.md").write_text("what this is")
    code, printed, _ = command(*CHECK, out)
    assert code == 0 and f"{out}/toy: 2 records, 1 manifests, 1 flagged" in printed
    code, printed, _ = command("leaderboard", "table", out, "--format", "csv")
    assert len(printed.splitlines()) == 2
    assert command("leaderboard", "merge", out, "--out", tmp_path / "merged")[0] == 0
    edit(copied, "utility", lambda data: data.update(seconds=9.0))
    code, printed, _ = command(*publish)
    assert code == 0 and "toy: replaced" in printed and "0 added, 0 removed, 1 changed" in printed


def test_a_run_with_a_fault_is_not_published(command, copied, tmp_path):
    edit(copied, "membership", lambda data: data["metrics"]["auc"].update(n=0))
    for options in ((), ("--json",)):
        code, printed, _ = command("leaderboard", "publish", copied, "--out", tmp_path / "published", *options)
        assert (
            code == 3 and "n must be at least 1" in " ".join(printed.split()) and not (tmp_path / "published").exists()
        )
    code, _, err = command("leaderboard", "publish", copied, "--out", tmp_path / "published", "--arrays-up-to", "1")
    assert code == 2 and "arrays of up to 65536 bytes must lie beside their records" in err


@pytest.mark.long
def test_cells_of_suites_are_listed_by_a_process_that_ends_so_that_a_check_loads_no_pytorch(tmp_path):
    program = (
        "import sys\n"
        "from leakbench.audit.cli.records import _known_suites\n"
        "from leakbench.leaderboard.records.manifest import Manifest\n"
        "if __name__ == '__main__':\n"
        "    def ask(name):\n"
        "        return Manifest(suite=name, suite_digest='0' * 64, command=('leakbench', 'run'), cells=())\n"
        "    known, other = _known_suites([ask('quick'), ask('none_of_ours')])\n"
        "    assert other is None and len(known.cells) > 100\n"
        "    assert not {'torch', 'sklearn'} & sys.modules.keys()\n"
    )
    (tmp_path / "program.py").write_text(program)
    # A check is often started in the folder of a stranger's files.
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("multiprocessing", "signal", "selectors"):
        (foreign / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a')\nraise SystemExit('hijacked')\n")
    run = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False, cwd=foreign
    )
    assert run.returncode == 0, run.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ended", ["kill", "interrupt"])
@pytest.mark.long
def test_a_process_of_listing_that_dies_is_a_sentence_and_prints_no_traceback(tmp_path, ended):
    program = (
        "import os, signal, sys, threading, time\n"
        "from multiprocessing import active_children\n"
        "from leakbench.audit.cli import records\n"
        "from leakbench.audit.cli.app import main\n"
        "def listed(key):\n"
        "    time.sleep(60)\n"
        "records.built_in = listed\n"  # in the spawned process too, which reads this file
        "def end():\n"
        "    while not active_children():\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(3)\n"
        f"    os.kill(active_children()[0].pid, signal.SIG{'KILL' if ended == 'kill' else 'INT'})\n"
        "if __name__ == '__main__':\n"
        "    threading.Thread(target=end, daemon=True).start()\n"
        f"    main(['leaderboard', 'check', {str(PUBLISHED / 'quick')!r}])\n"
    )
    (tmp_path / "program.py").write_text(program)
    run = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and run.stdout == ""
    code = -9 if ended == "kill" else -2
    assert run.stderr.startswith("error: the process that lists the cells of suites ended without an answer")
    assert f"(exit code {code})" in run.stderr and run.stderr.count("\n") == 1


def test_an_error_of_listing_keeps_the_traceback_of_its_process():
    class Channel:
        def send(self, answer):
            self.answer = answer
            raise InterruptedError  # instead of the end of this process

    channel, handler = Channel(), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(InterruptedError):
            _send_listed([("no_suite", (), False)], channel)  # pyright: ignore[reportArgumentType] -- a stand-in
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "in built_in" in channel.answer.__notes__[0]  # notes are sent, unlike tracebacks


def test_the_name_of_a_folder_of_suites_writes_nothing_to_a_terminal(command, tmp_path):
    for name in ("quick", "red\x1b[31m"):
        (tmp_path / "suites" / name / "records").mkdir(parents=True)
    code, printed, _ = command("leaderboard", "check", tmp_path / "suites")
    assert code == 3 and "red\\u001b[31m" in "".join(printed.split()) and "\x1b" not in printed


@pytest.mark.parametrize("word", ["seeds=" + "[" * 5000, "seeds={" + "a." * 900 + "a=1}", "seeds=[1e999]"])
def test_an_override_of_a_stranger_that_is_no_list_of_seeds_is_not_parsed(word):
    manifest = Manifest(suite="quick", suite_digest="0" * 64, command=("leakbench", "run", "--set", word), cells=())
    assert _key(manifest) == ("quick", (), False)
    free = dataclasses.replace(manifest, command=("leakbench", "run", "--set", "seeds=[0, 1]"))
    assert _key(free) == ("quick", ("seeds=[0, 1]",), False)
