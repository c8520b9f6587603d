"""Installed versions beside those that were tested together."""

import re
import tomllib
from pathlib import Path

from leakbench import audit
from leakbench.audit import versions
from leakbench.audit.versions import CORE, EXTRAS, Environment, environments, installed, verdict

from ..parameters import subtests

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLD = Environment("lowest", "3.11", "2026-01-02", {"python": "3.11", "torch": "2.10.0", "scipy": "1.11.1"})
NEW = Environment("newest", "3.13", "2026-01-03", {"python": "3.13", "torch": "2.15.0", "scipy": "1.18.1"})


def names(requirements):
    return {re.split(r"[^A-Za-z0-9._-]", one)[0] for one in requirements}


def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def test_every_dependency_is_known_and_no_other():
    assert set(CORE) == names(PROJECT["dependencies"])
    for extra, distributions in EXTRAS.items():
        assert set(distributions) == names(PROJECT["optional-dependencies"][extra])


@subtests(
    ("here", "expected"),
    [
        ({"python": "3.13", "torch": "2.15.0", "scipy": "1.18.1"}, "tested together (newest versions on Python 3.13, "),
        ({"python": "3.11", "torch": "2.10.0", "scipy": "1.11.1"}, "tested together (lowest versions on Python 3.11, "),
        (
            {"python": "3.13", "torch": "2.12.1", "scipy": "1.18.1"},
            "not tested together; the nearest that were (newest versions on Python 3.13, 2026-01-03) have torch 2.15.0",
        ),
        (
            {"python": "3.12", "torch": "2.10.0", "scipy": "1.12.0"},
            "not tested together; the nearest that were (lowest versions on Python 3.11, 2026-01-02) have "
            "python 3.11, scipy 1.11.1",
        ),
    ],
)
def test_the_nearest_environment_is_named_with_what_differs(here, expected):
    assert verdict(here, (OLD, NEW)).startswith(expected)


def test_a_dependency_that_every_installation_has_is_missed():
    known = (Environment("newest", "3.13", "2026-01-01", {"python": "3.13", "torch": "2.15.0", "opacus": "1.6"}),)
    assert verdict({"python": "3.13", "torch": "2.15.0"}, known).startswith("tested together")
    assert "have torch 2.15.0" in verdict({"python": "3.13"}, known)
    assert "have python 3.13, torch 2.15.0" in verdict({}, known)


def test_what_no_test_ran_with_is_said_to_be_absent():
    here = {**NEW.versions, "lpips": "0.1.4"}
    assert verdict(here, (OLD, NEW)) == "tested together (newest versions on Python 3.13, 2026-01-03), without lpips"
    assert verdict(here, ()) == "no versions were tested together"


def test_build_tags_and_patch_levels_of_python_are_no_versions(monkeypatch):
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: "2.15.0+cu132")
    monkeypatch.setattr(versions.platform, "python_version_tuple", lambda: ("3", "13", "7"))
    found = installed()
    assert (found["python"], found["torch"]) == ("3.13", "2.15.0")
    assert set(found) == {"python", *CORE, *EXTRAS["engines"], *EXTRAS["images"]}


def test_show_versions_prints_what_a_report_needs(capsys):
    audit.show_versions()
    said = capsys.readouterr().out
    for name, version in installed().items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(version)}$", said, re.MULTILINE)
    assert verdict(installed()) in said


# Deselected in a lane that records, whose entry they ask for (tests/lanes.py).
def test_the_lowest_versions_that_are_admitted_were_tested():
    """A bound below what the lane on lowest versions ran with says more than anybody knows."""
    (lowest,) = (one for one in environments() if one.lane == "lowest")
    admitted = [re.match(r"([\w-]+)>=([\d.]+)", one) for one in PROJECT["dependencies"]]
    assert all(admitted)
    for bound in filter(None, admitted):
        assert numbers(lowest.versions[bound[1]]) <= numbers(bound[2] + ".0" * 3), bound[0]


@subtests("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_that_is_admitted_was_tested(python):
    assert python in {one.python for one in environments()}
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
