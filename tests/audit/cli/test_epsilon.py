"""What `leakbench epsilon` says of tests of membership, and the noise that it finds for them."""

import pytest
from scipy.stats import norm

from ...parameters import subtests

ONE = ["epsilon", "--defense", "dp_sgd", "--sample-rate", 1.0, "--steps", 4, "--sampling", "full", "--delta", 1e-5]
ASKED = ["--advantage", "--tpr-at-fpr", 0.01, "--tpr-at-fpr", 0.001, "--delta-at", 2.0]


def test_what_is_asked_for_is_in_the_document_and_in_words(document, command):
    found = document(*ONE, "--noise-multiplier", 2.0, *ASKED)
    assert found["advantage"] == pytest.approx(2 * norm.cdf(0.5) - 1, rel=1e-6)
    assert found["auc"] == pytest.approx(0.760250, abs=1e-6)
    assert [round(one["tpr"], 6) for one in found["tpr_at_fpr"]] == [0.092362, 0.018298]
    assert [one["fpr"] for one in found["tpr_at_fpr"]] == [0.01, 0.001]
    assert found["delta_at"][0]["delta"] == pytest.approx(norm.cdf(-1.5) - 7.38905609893065 * norm.cdf(-2.5), rel=1e-6)
    code, out, _ = command(*ONE, "--noise-multiplier", 2.0, *ASKED)
    assert code == 0 and "advantage at most 0.3829, AUC at most 0.7602" in out
    assert "TPR at most 0.0183 at FPR 0.001" in out and "from    closed form of the Gaussian" in out
    assert document(*ONE, "--noise-multiplier", 2.0).keys() == found.keys() - {
        "advantage", "auc", "tpr_at_fpr", "delta_at", "allowed_by"
    }  # fmt: skip


@subtests(
    ("wanted", "sigma"),
    [
        ("advantage=0.3829249", 2.0),
        ("tpr=0.0923622@0.01", 2.0),
        ("epsilon=4.377178", 2.0),
    ],
)
def test_noise_is_found_for_what_is_wanted(document, wanted, sigma):
    assert document(*ONE, "--calibrate", wanted)["noise_multiplier"] == pytest.approx(sigma, rel=1e-4)


@subtests(
    ("arguments", "sentence"),
    [
        ([], "one of --noise-multiplier and --calibrate must be given"),
        (["--noise-multiplier", 1, "--calibrate", "epsilon=1"], "one of --noise-multiplier and --calibrate"),
        (["--calibrate", "delta=1"], "calibrate must be epsilon=NUMBER, advantage=NUMBER or tpr=NUMBER@NUMBER"),
        (["--calibrate", "tpr=0.1"], "calibrate must be epsilon=NUMBER"),
        (["--calibrate", "advantage=2"], "advantage must be in (0, 1), got 2.0"),
        (["--noise-multiplier", 1, "--tpr-at-fpr", 2], "tpr_at_fpr must be a rate in [0, 1], got 2.0"),
        (["--noise-multiplier", 1, "--delta-at", "nan"], "delta_at must be a finite epsilon of at least 0, got nan"),
        (["--noise-multiplier", 1, "--delta-at", "inf", "--json"], "delta_at must be a finite epsilon"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(command, arguments, sentence):
    code, out, err = command(*ONE, *arguments)
    assert code == 2 and not out and err.startswith("error: ") and sentence in err and err.count("\n") == 1


def test_nothing_proved_allows_everything(document):
    found = document(*ONE[:1], "--defense", "clipped_sgd", *ONE[3:], "--noise-multiplier", 0, *ASKED)
    assert found["epsilon"] is None and found["advantage"] == found["auc"] == 1
    assert [one["tpr"] for one in found["tpr_at_fpr"]] == [1, 1] and found["delta_at"][0]["delta"] == 1
    assert found["allowed_by"] == "nothing is proved"
