"""A submission of a tiny suite, computed once by the command, and copies of it that tests may damage."""

import shutil
from pathlib import Path

import pytest

from leakbench.audit.cli import app as cli
from leakbench.audit.submission import suites as submission_suites
from leakbench.audit.suite import suite as suites

SUITE = """
name = "tiny"
seeds = [0, 1]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, batch = 70, epochs = 1, lr = 0.5, candidates = 100 }
budget = { noise_multiplier = 1.0, delta = 1e-5 }
defense = [{ name = "sgd" }, { name = "dp_sgd" }]
attack = [{ name = "likelihood_ratio" }]
controls = true
"""

METHOD = '''"""DP-SGD under another name."""

import os
from pathlib import Path

from leakbench.defenses.core import Defense
from leakbench.defenses.dp_sgd import dp_sgd

if "CANARY" in os.environ:
    Path(os.environ["CANARY"]).write_text("this file was run")


def half_dp(*, clip_norm: float = 1.0, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD under another name."""
    return dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier)
'''

FILLED = {
    "who": "Ada, Example University",
    "contact": "ada at example.org",
    "hardware": "2 cores",
    "public_data": "none",
    "new": "DP-SGD under another name.",
}


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    """Runs the command in this process: code, stdout, stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr() if capsys is not None else None
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out if captured else "", captured.err if captured else ""


def fill(folder: Path) -> None:
    """Completes a draft."""
    path = folder / "SUBMISSION.toml"
    lines = [line.partition("  #")[0] for line in path.read_text().splitlines()]
    path.write_text(
        "\n".join(f'{key} = "{FILLED[key]}"' if (key := line.partition(" = ")[0]) in FILLED else line for line in lines)
    )


@pytest.fixture(scope="session")
def tiny_suite(tmp_path_factory):
    """Makes `tiny` the name of a built-in suite."""
    path = tmp_path_factory.mktemp("suite") / "tiny.toml"
    path.write_text(SUITE)
    load = suites.load

    def loaded(name, *, small=False):
        return load(path if str(name) == "tiny" else name, small=small)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites, "load", loaded)
        assert submission_suites.suites is suites
        yield path


@pytest.fixture(scope="session")
def computed(tiny_suite, tmp_path_factory):
    """Folder of submissions with one of ada's, computed by the printed command."""
    import json
    import os

    root = tmp_path_factory.mktemp("root")
    (root / "half_dp.py").write_text(METHOD)
    from leakbench.audit.submission.draft import new_submission

    draft = new_submission(
        root / "submissions", handle="ada", suite="tiny", defense=str(root / "half_dp.py") + ":half_dp"
    )
    fill(draft.folder)
    before = Path.cwd()
    os.chdir(draft.folder)
    try:
        seeds = json.dumps(list(draft.seeds), separators=(",", ":"))
        code, *_ = run_command(
            None, "run", "tiny", "--add-defense", "half_dp.py:half_dp", "--set", f"seeds={seeds}", "--out", ".",
            "--jobs", 1,
        )  # fmt: skip
    finally:
        os.chdir(before)
    assert code == 0
    return root / "submissions"


@pytest.fixture
def tree(computed, tmp_path, monkeypatch):
    """A copy of the folder of submissions, and a canary that appears if a method file is run."""
    copy = tmp_path / "submissions"
    shutil.copytree(computed, copy)
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    yield copy


@pytest.fixture
def submission(tree):
    """The folder of ada's submission in the copy."""
    (folder,) = (path for path in (tree / "ada").iterdir() if path.is_dir())
    return folder
