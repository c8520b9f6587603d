"""What is particular to the percentile filter: the entries that it drops and cuts, and that it proves nothing."""

import math

import numpy as np
import pytest

from leakbench.defenses.core import Federated
from leakbench.defenses.percentile_filter import percentile_filter
from leakbench.defenses.sgd import sgd

from .federated_runs import EVERYBODY, federated


def by_numpy(delta, steps, percentile, limit):
    """The rule as its framework documents it, entry by entry."""
    a_step = delta / steps
    cutoff = np.percentile(np.abs(a_step), percentile)
    kept = np.array([0.0 if -cutoff < entry < cutoff else min(max(entry, -limit), limit) for entry in a_step])
    return kept * steps


@pytest.mark.parametrize(("percentile", "limit"), [(10.0, 0.01), (60.0, 0.05), (0.0, 1e3), (100.0, 1e3)])
def test_small_entries_become_zero_and_large_ones_the_limit(percentile, limit):
    filtered = federated(percentile_filter(percentile=percentile, limit=limit), schedule=EVERYBODY)
    plain = federated(Federated(client=sgd()), schedule=EVERYBODY)
    for client in range(4):
        delta, sent = (run.rounds[0].messages[client].tensors["values"].numpy() for run in (plain, filtered))
        np.testing.assert_allclose(sent, by_numpy(delta.astype(float), 4, percentile, limit), rtol=1e-5, atol=1e-7)
        dropped = {0.0: 0, 10.0: 5, 60.0: 26, 100.0: 42}[percentile]  # of 43, at linear interpolation
        assert abs(int((sent == 0).sum()) - dropped) <= 1
        assert np.abs(sent).max() <= 4 * limit * (1 + 1e-6)


def test_it_proves_nothing_and_sends_all_numbers():
    run = federated(percentile_filter())
    claim = run.claim(1e-5)
    assert math.isinf(claim.epsilon) and run.noise == "none" and claim.unit == "record"
    assert {*run.rounds[0].bytes_up.values()} == {4 * 43}


@pytest.mark.parametrize(
    ("settings", "words"), [({"percentile": 101.0}, r"percentile must be in \[0, 100\]"), ({"limit": 0.0}, "limit")]
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        percentile_filter(**settings)
