"""Page of federated records: its sections are there if their kinds are, and it keeps the two privacy units apart."""

import re

import numpy as np
import pytest

from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.page.plots import bundle
from leakbench.leaderboard.records import record as records_of
from leakbench.leaderboard.records.manifest import write_manifest

from ..conftest import asked_for
from .test_build import Document


@pytest.fixture
def page(tmp_path):
    """Builds the page of records."""

    def make(*records):
        results = tmp_path / "run"
        for record in records:
            records_of.write(record, results / "records")
        write_manifest(asked_for(*records), results / "records")
        return build(results, tmp_path / "page").read_text(encoding="utf-8")

    return make


@pytest.fixture
def accuracy(record, metric):
    """A record of the accuracy."""

    def make(value=0.8, **fields):
        return record("utility", metrics={"accuracy": metric(value, 0.02, better="higher", n=700)}, **fields)

    return make


def sections(text):
    return {attrs["id"] for attrs in Document(text).all("section")} & {"clients", "classes"}


@pytest.mark.long
def test_a_page_has_rounds_clients_and_classes(page, federated, accuracy, claim):
    records = [accuracy(seed=seed) for seed in (0, 1)]
    records += [federated(kind, seed=seed)[0] for kind in ("rounds", "federation") for seed in (0, 1)]
    records.append(federated("client_property")[0])
    records.append(accuracy(0.95, control="public_only", defense="sgd", claim=claim(0.0)))
    text = page(*records)
    document = Document(text)
    assert sections(text) == {"clients", "classes"}
    targets = {attrs["href"] for attrs in document.all("a")}
    assert {"#clients", "#classes"} <= targets
    figures = {attrs["id"] for attrs in document.all("figure")}
    assert {"s1-b1-rounds", "s1-b1-bytes", "s1-client-epsilon", "s1-client-accuracy-b1"} <= figures
    assert "above every cell that proves an epsilon" in document.text
    assert "refutes no claim whose unit is a record" in document.text
    assert len(document.all("table", class_="heat")) == 1
    # Every plot has a name for a screen reader, and a caption.
    assert all(attrs["aria-label"] for attrs in document.all("div", class_="plot"))
    assert text.count("<figcaption>") == len(document.all("figure", class_="plot-card"))
    assert page(*records) == text


SECTION = {"rounds": "clients", "federation": "clients", "client_property": "classes"}


@pytest.mark.parametrize("kinds", [(), *((kind,) for kind in SECTION)])
def test_missing_kinds_leave_no_section(page, federated, accuracy, kinds):
    shown = {SECTION[kind] for kind in kinds}
    text = page(accuracy(), *(federated(kind)[0] for kind in kinds))
    assert sections(text) == shown
    document = Document(text)
    for word in {"clients", "classes"} - shown:
        assert not document.all("a", href=f"#{word}")
    assert (".heat" in text) == ("classes" in shown)


@pytest.mark.long
def test_units_are_in_pictures_of_their_own(page, federated, accuracy, claim):
    records = []
    for defense, unit in (("fed_avg", "record"), ("dp_fed_avg", "client")):
        given = {"defense": defense, "claim": claim(3.0, unit=unit)}
        records += [accuracy(**given), *(federated(kind, **given)[0] for kind in ("rounds", "federation"))]
    specifications = Document(page(*records)).specifications
    assert len(specifications) >= 8
    for specification in specifications:
        assert len(set(re.findall(r"\b(?:dp_)?fed_avg\b", specification))) == 1


@pytest.mark.long
def test_public_data_alone_stands_beside_the_methods_of_either_unit(page, federated, accuracy, claim):
    records = [accuracy(0.95, control="public_only", defense="sgd", claim=claim(0.0))]
    for defense, unit in (("fed_avg", "record"), ("dp_fed_avg", "client")):
        given = {"defense": defense, "claim": claim(3.0, unit=unit)}
        records += [accuracy(**given), federated("rounds", **given)[0]]
    drawn = Document(page(*records)).specifications
    by_round = [text for text in drawn if '"title": "round"' in text and "accuracy on held-out data" in text]
    assert len(by_round) == 2 and all("public_only 0.950" in text for text in by_round)


@pytest.mark.long
def test_a_page_of_many_long_trainings_is_small(page, federated, accuracy):
    long = {"accuracy": np.linspace(0.1, 0.9, 3000) + np.sin(np.arange(3000)) / 20, "drift": np.ones(3000)}
    long |= {key: np.arange(1, 3001) * 1000 for key in ("bytes_up", "bytes_down")}
    long |= {"round": np.arange(3000), "loss": np.ones(3000)}
    names = [f"method_{i}" for i in range(8)]
    records = [
        one for name in names for one in (accuracy(defense=name), federated("rounds", defense=name, columns=long)[0])
    ]
    text = page(*records)
    # The script of the plots is the same in every page with plots.
    assert len(text) - len(bundle()) < 500_000


def test_words_of_records_are_escaped(page, federated, accuracy):
    evil = "<script>alert('x')</script>"
    text = page(
        accuracy(defense=evil),
        *(federated(kind, defense=evil)[0] for kind in ("rounds", "federation", "client_property")),
    )
    assert evil not in text
