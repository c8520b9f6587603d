"""What the machine has, in data and in words."""

import json

import torch

from leakbench.audit.cli import doctor
from leakbench.audit.versions import installed, verdict


def test_everything_a_report_of_a_problem_needs_is_there():
    found = doctor.examine()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["auto"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert found["cores"] >= 1 and found["device"]
    assert found["versions"]["numpy"] and found["versions"]["dp-accounting"]
    assert found["tested"] == verdict(installed()) and found["tested"] in doctor.words(found)
    assert set(found["data"]) >= {"digits", "photos"}
    assert set(found["extras"]) == {"engines", "images"}


def test_what_is_missing_comes_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: None)
    said = doctor.words(doctor.examine())
    assert "torch          not installed" in said
    assert "without opacus" in said and "pip install 'leakbench[engines]'" in said
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda module: module)
    assert "pip install" not in doctor.words(doctor.examine())


def test_folders_that_are_named_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("LEAKBENCH_DATA", raising=False)
    assert "LEAKBENCH_DATA: not set" in doctor.words(doctor.examine())
    monkeypatch.setenv("LEAKBENCH_DATA", str(tmp_path))
    found = doctor.examine()
    assert found["data_folder"]["there"] and f"LEAKBENCH_DATA: {tmp_path}" in doctor.words(found)
    monkeypatch.setenv("LEAKBENCH_DATA", str(tmp_path / "gone"))
    assert f"{tmp_path / 'gone'} is not there" in doctor.words(doctor.examine())
    variable = found["lpips_weights"]["variable"]
    (tmp_path / "weights").write_text("", encoding="utf-8")
    monkeypatch.setenv(variable, str(tmp_path / "weights"))
    assert doctor.examine()["lpips_weights"]["there"]
