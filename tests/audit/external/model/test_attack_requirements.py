"""What runs with what is there, for every membership attack of the catalogue."""

import pytest

from leakbench.audit.catalog import methods as catalog
from leakbench.audit.external.model.attack_requirements import applicable
from leakbench.audit.external.model.attacks import final_model_attacks


def _membership():
    return [name for name in catalog.names("attacks") if catalog.attack(name).kind == "membership"]


def test_what_runs_follows_from_what_an_attack_declares():
    for one in applicable(_membership(), population=False, shadows=False):
        declared = catalog.attack(one.name).requires
        plain = one.name in final_model_attacks() and not declared.knows
        assert one.runs == plain
        assert one.runs == (one.needs == "")
        for word, option in (("POPULATION", "--population FILE"), ("SHADOWS", "--shadows 64")):
            assert (option in one.needs) == (word in declared.to_dict()["knows"])


def test_everything_that_asks_a_final_model_runs_with_everything():
    found = applicable(_membership(), population=True, shadows=True)
    assert {one.name for one in found if one.runs} == set(final_model_attacks())
    refused = [one for one in found if not one.runs]
    assert all("of which a finished model shows nothing" in one.needs for one in refused)


def test_a_transcript_gives_updates_and_not_what_others_contributed():
    found = {one.name: one for one in applicable(_membership(), population=True, shadows=True, transcript=True)}
    for name, one in found.items():
        informed = "OTHERS" in catalog.attack(name).requires.to_dict()["knows"]
        assert one.runs != informed
        assert ("everybody else" in one.needs) == informed


def test_without_parameters_what_reads_them_does_not_run():
    found = applicable(_membership(), population=True, shadows=True, white_box=False)
    white = [one for one in found if catalog.attack(one.name).requires.access.name == "WHITE_BOX"]
    assert white
    assert all(one.needs == "the parameters of the final model" for one in white)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no attack named"):
        applicable(["nothing_of_that_name"], population=False, shadows=False)
