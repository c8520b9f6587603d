"""An attack of another's code chooses models across the boundary of its process, and gets messages alone."""

import pytest
import torch

from leakbench.attacks.imprint import imprint
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.isolation.answers import Respondent
from leakbench.audit.isolation.channel import GarbledError
from leakbench.audit.isolation.worker import InProcessRuns

from ...attacks import toys

FOREIGN = '''
"""Sends what imprint sends, from a process of its own."""

import importlib

import torch

from leakbench.attacks.core import Access, AccessError, ActiveServer, Controls, Knows, Reconstruction, attack

method = importlib.import_module("leakbench.attacks.imprint")


@attack(
    access=Access.ACTIVE_SERVER, knows=Knows.BATCH_SIZE | Knows.DEFENSE | Knows.POPULATION, controls=Controls.MODEL
)
def foreign(target: ActiveServer, generator: torch.Generator) -> Reconstruction:
    """Imprints, and tries to read the labels of the message."""
    result = method.imprint.on_view(target, generator, method.imprint.settings())
    try:
        target.release(target.parameters, None).labels
    except AccessError:
        return result
    raise RuntimeError("labels of a message were not declared")
'''


@pytest.mark.long
def test_models_are_sent_and_messages_come_back_narrowed_from_the_process_with_the_data(tmp_path):
    (tmp_path / "foreign.py").write_text(FOREIGN)
    attack, before = catalog.attack(f"{tmp_path / 'foreign.py'}:foreign"), InProcessRuns.times
    target, _ = toys.active_target(count=3, calls=2)
    result = attack(target, toys.generator(0))
    assert InProcessRuns.times == before
    again, _ = toys.active_target(count=3, calls=2)
    torch.testing.assert_close(result.inputs, imprint(again, toys.generator(0)).inputs)


def test_tensors_by_name_hold_tensors_alone():
    respondent, calls = Respondent(), []
    number = respondent.number(lambda named, nothing: calls.append((named, nothing)) or torch.zeros(1))
    sent = {"ask": "call", "of": number, "grad": False}
    blob = bytearray(torch.ones(2).numpy().tobytes())
    described = {"dtype": "float32", "shape": [2], "order": [0], "device": "cpu"}
    named = {"named": [["a.b", {"tensor": 0}]]}
    respondent.answer(sent | {"arguments": [named, {"none": True}], "tensors": [described]}, [blob])
    assert calls[0][0]["a.b"].tolist() == [1, 1] and calls[0][1] is None
    pairs = [["a", named]], [[1, {"tensor": 0}]], [["a"]], [["a", {"tensor": 5}]]
    for wrong in ({"named": pair} for pair in pairs):
        with pytest.raises(GarbledError):
            respondent.answer(sent | {"arguments": [wrong, {"none": True}], "tensors": [described]}, [blob])
