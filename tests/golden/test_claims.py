"""What every defense of the catalogue claims at one setting: epsilon, relation, sampling, accountant, word for word.

`python -m tests.golden.test_claims` writes the golden file anew, after a claim was changed on purpose.
"""

import json
import math
import re
from pathlib import Path

import pytest

from leakbench.audit.catalog import methods as catalog
from leakbench.defenses.core import Sampling, predicted

from ..parameters import subtests

FILE = Path(__file__).with_name("claims.json")
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))

SIGMA, RATE, STEPS, DELTA = 1.3, 0.05, 40, 1e-5
SAMPLINGS = ("poisson", "partition")


def claimed(name, sampling):
    """The claim as `leakbench epsilon` computes it, as plain data."""
    made = catalog.defense(name, {}, noise_multiplier=SIGMA)
    claim = predicted(made, sampling=Sampling(sampling, RATE), steps=STEPS).ledger.claim(DELTA)
    proved = math.isfinite(claim.epsilon)
    return {
        "epsilon": claim.epsilon if proved else None,
        "epsilon_rdp": claim.epsilon_rdp if proved else None,
        "as_if_poisson": claim.as_if_poisson,
        "relation": claim.relation,
        "sampling": claim.sampling,
        "accountant": re.sub(r"(dp-accounting) [\d.]+", r"\1", claim.accountant),  # of any version
        "events": list(claim.events),
        "reason": claim.reason,
    }


@subtests("name", list(GOLDEN))
def test_a_claim_is_what_it_was(name):
    # Words exactly, numbers to nine digits; blt's follow from an optimiser, which ends elsewhere on other processors.
    rel = 1e-5 if name == "blt" else 1e-9
    for sampling, golden in GOLDEN[name].items():
        expected = {
            key: pytest.approx(value, rel=rel) if isinstance(value, float) else value for key, value in golden.items()
        }
        assert claimed(name, sampling) == expected, sampling


def main() -> None:
    """Writes the golden file."""
    found = {name: {one: claimed(name, one) for one in SAMPLINGS} for name in catalog.central_names()}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
