"""Finding methods by name: near-misses, settings, missing extras, entry points."""

import importlib.metadata
import inspect
import json
import sys
import textwrap
from functools import cache

import pytest

from leakbench import defenses
from leakbench.audit.catalog import explain, listing
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.catalog.methods import CatalogError, MissingExtra
from leakbench.audit.selftest.certificate import representatives
from leakbench.defenses.core import Adapted, poisson, predict

from ...parameters import subtests

METHOD = '''
    """A defense in a file of its own, for tests.

    Nobody wrote a paper about it.
    """
    from typing import Literal

    def {name}(*, rate: float, layers: tuple[int, ...] = (1, 2), kind: Literal["soft", "hard"] = "soft",
               fast: bool = False, cap: float | None = None, noise_multiplier: float | None = None):
        """Does nothing.

        Args:
            rate: fraction of coordinates,
                in a second line.
            layers: which ones: all of them.
        """
        from leakbench.defenses.dp_sgd import dp_sgd

        return dp_sgd(clip_norm=rate, noise_multiplier=noise_multiplier)
'''


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a method file that `defenses` finds, and forgets it afterwards."""
    monkeypatch.setattr(defenses, "__path__", [*defenses.__path__, str(tmp_path)])

    def write(name, text=METHOD):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text.replace("{name}", name)))
        monkeypatch.delitem(sys.modules, f"leakbench.defenses.{name}", raising=False)
        return name

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"leakbench.defenses.{path.stem}", None)


@pytest.fixture
def third_party(monkeypatch):
    """Pretends that an installed distribution has these entry points for defenses."""

    def install(**points):
        group = "leakbench.defenses"
        found = [importlib.metadata.EntryPoint(name, value, group) for name, value in points.items()]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda *, group: found if group.endswith("defenses") else []
        )
        listing._entry_points.cache_clear()

    yield install
    listing._entry_points.cache_clear()


def test_a_file_is_found_by_its_name_and_core_is_no_method(written):
    written("toy_method")
    assert "toy_method" in catalog.names("defenses")
    assert "core" not in catalog.names("defenses")
    assert {"dp_sgd", "dpdr"} <= set(catalog.names("defenses"))
    assert {"likelihood_ratio", "loss_threshold"} <= set(catalog.names("attacks"))
    assert {"digits", "photos"} <= set(catalog.names("data"))
    assert "quick" in catalog.names("suites")
    assert "mlp" in catalog.names("models")


def test_listing_and_describing_import_no_method(written):
    written("broken_method", '"""Says what it is."""\nraise RuntimeError("imported")')
    assert listing.describe("defenses", "broken_method") == "Says what it is."


def test_a_near_miss_is_suggested_and_without_one_all_names_are_given():
    with pytest.raises(CatalogError, match=r"^no defense named 'dp_sdg'; did you mean 'dp_sgd'\?$"):
        catalog.find("defenses", "dp_sdg")
    with pytest.raises(CatalogError, match=r"no attack named 'zzzz'; there are .*loss_threshold"):
        catalog.find("attacks", "zzzz")
    with pytest.raises(CatalogError, match="no defense, attack, suite, data set or model named 'digist'; did you mean"):
        explain.explain("digist")


def test_settings_are_read_from_the_signature_and_the_docstring(written):
    found = catalog.settings("defenses", written("toy_method"))
    assert list(found) == ["rate", "layers", "kind", "fast", "cap"]  # the noise multiplier is the budget's
    assert (found["rate"].required, found["rate"].type) == (True, "a number")
    assert found["rate"].about == "fraction of coordinates, in a second line."
    assert found["layers"].about == "which ones: all of them."
    assert found["kind"].type == "one of 'soft', 'hard'"
    assert (found["cap"].required, found["cap"].type) == (False, "a number")


def test_settings_of_every_method_can_be_read_and_say_what_they_are():
    for kind in ("defenses", "attacks"):
        for name in catalog.names(kind):
            for setting in catalog.settings(kind, name).values():
                assert setting.about, f"{name}: {setting.name} is not explained"
                if not setting.required and setting.default is not None:
                    assert setting.conform(setting.default) == setting.default


@subtests("name", catalog.names("defenses"))
def test_norms_of_gradients_and_what_is_added_to_them_have_their_unit(name):
    for key, setting in catalog.settings("defenses", name).items():
        if key in ("clip_norm", "clip_norm_along", "clip_norm_rest", "regulariser"):
            assert "in gradient units" in setting.about, f"{name}: {key} has no unit"


def test_values_are_taken_as_the_type_says_and_never_as_another(written):
    resolved = catalog.resolve("defenses", written("toy_method"), {"rate": 1, "layers": [3], "cap": 2})
    assert resolved == {"rate": 1.0, "layers": (3,), "kind": "soft", "fast": False, "cap": 2.0}
    assert isinstance(resolved["rate"], float)


@subtests(
    ("given", "sentence"),
    [
        ({}, "defense 'toy_method': rate is missing"),
        ({"rate": "0.5"}, "rate must be a number, got '0.5'"),
        ({"rate": True}, "rate must be a number, got True"),
        ({"rate": float("nan")}, "rate must be a number, got nan"),
        ({"rate": 0.5, "fast": 1}, "fast must be true or false, got 1"),
        ({"rate": 0.5, "kind": "sfot"}, "kind must be one of 'soft', 'hard', got 'sfot'"),
        ({"rate": 0.5, "layers": [1.5]}, "layers must be a list, each an integer, got [1.5]"),
        ({"rate": 0.5, "layer": [1]}, "unknown setting 'layer'; did you mean 'layers'?"),
        ({"rate": 0.5, "noise_multiplier": 1.0}, "unknown setting 'noise_multiplier'"),
        (
            {"rat": 0.5, "fast": 2},
            "rate is missing; unknown setting 'rat'; did you mean 'rate'?; fast must be",
        ),
    ],
)
def test_what_is_wrong_with_settings_is_said_in_one_sentence(written, given, sentence):
    with pytest.raises(CatalogError) as caught:
        catalog.resolve("defenses", written("toy_method"), given)
    assert sentence in str(caught.value)


def test_a_defense_gets_its_noise_multiplier_if_it_has_use_for_one(written):
    assert catalog.defense(written("toy_method"), {"rate": 0.5}, noise_multiplier=2.0).noise_multiplier == 2.0
    for name in catalog.names("defenses"):
        if name != "toy_method":
            required = {key: 1.0 for key, setting in catalog.settings("defenses", name).items() if setting.required}
            made = catalog.method(name, required, noise_multiplier=1.5)
            takes = "noise_multiplier" in inspect.signature(catalog.find("defenses", name)).parameters
            assert (made.noise_multiplier == 1.5) == takes


@pytest.mark.parametrize(("module", "extra"), [("opacus_not_here", None), ("kymatio", "images")])
def test_a_missing_extra_is_one_sentence(written, monkeypatch, module, extra):
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails, installed or not
    name = written("needy_method", f"import {module}.part\ndef needy_method(): ...")
    with pytest.raises(MissingExtra) as caught:
        catalog.find("defenses", name)
    expected = f"defense 'needy_method' needs {module}, which is not installed"
    assert str(caught.value) == expected + (f": pip install 'leakbench[{extra}]'" if extra else "")
    assert listing.describe("defenses", name) == ""


def test_an_extra_that_is_missed_only_when_the_defense_is_made_is_named_too(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(MissingExtra, match=r"needs opacus, .*leakbench\[engines\]"):
        catalog.defense(written("late_method", "def late_method():\n    import opacus"))


def test_a_mistake_in_our_own_imports_is_not_called_a_missing_extra(written):
    with pytest.raises(ImportError, match="no_such_thing"):
        catalog.find("defenses", written("wrong_method", "from leakbench.defenses.core import no_such_thing"))


def test_a_file_without_its_function_is_refused(written):
    with pytest.raises(CatalogError, match=r"defenses/empty_method.py must hold a function named 'empty_method'"):
        catalog.find("defenses", written("empty_method", "other = 1"))


def test_third_parties_add_methods_by_entry_points(third_party, written):
    third_party(borrowed="leakbench.defenses.dp_sgd:dp_sgd")
    assert "borrowed" in catalog.names("defenses")
    assert catalog.find("defenses", "borrowed") is catalog.find("defenses", "dp_sgd")
    assert listing.describe("defenses", "borrowed") == "added by leakbench.defenses.dp_sgd:dp_sgd"
    assert "borrowed" not in catalog.names("attacks")


def test_two_methods_of_one_name_are_refused(third_party):
    third_party(dp_sgd="elsewhere:dp_sgd")
    with pytest.raises(CatalogError, match=r"got 'dp_sgd' from defenses/dp_sgd.py and elsewhere:dp_sgd"):
        catalog.find("defenses", "dp_sgd")


@subtests(
    ("name", "setting", "value", "sentence"),
    [
        ("dpdr", "clip_norm_along", 0.0, "clip_norm_along must be a positive finite number, got 0.0"),
        ("gep", "clip_norm_rest", -1.0, "clip_norm_rest must be a positive finite number, got -1.0"),
        ("diff", "first_clip_norm", 0.0, "first_clip_norm must be a positive finite number, got 0.0"),
        ("diff2", "smoothness", 0.0, "smoothness must be a positive finite number, got 0.0"),
        ("dp_snip", "score_clip_norm", 0.0, "score_clip_norm must be a positive finite number, got 0.0"),
        ("dp_ssgd", "score_clip_norm", 0.0, "score_clip_norm must be a positive finite number, got 0.0"),
        ("dp_adam_bc", "stabiliser", 1e300, "stabiliser must be above 0 and at most 1e18, got"),
        ("dp_macadam", "beta1", 1e-300, "beta1 must be in .*, got"),
        ("blt", "buffers", 500, "buffers must be at most 10, got 500"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_own_name(name, setting, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        catalog.defense(name, {setting: value})


def test_a_suite_is_explained_with_the_comment_at_its_head():
    about = explain.explain("dpdr_cosine").about
    summary, _, small, comment = about.split("\n\n")
    assert listing.describe("suites", "dpdr_cosine") == f"{summary} Has --small." and "successive_cosine" in about
    assert small.startswith("With --small: The cosine") and comment == "Trainings have 1,200, 300 and 80 steps."
    assert "#" not in about and "seeds" not in about


explained = cache(explain.explain)  # rehearses a defense


@pytest.mark.long
@pytest.mark.parametrize("methods", ["representatives", pytest.param("all", marks=pytest.mark.slow)])
def test_everything_can_be_explained(methods):
    few = {"defenses": representatives()} if methods == "representatives" else {}  # each is rehearsed
    for kind in catalog.KINDS:
        for name in few.get(kind, catalog.names(kind)):
            assert json.loads(json.dumps(explained(name).to_dict(), allow_nan=False))["summary"]
    attack = explained("loss_threshold")
    assert attack.requires == {"access": "BLACK_BOX", "knows": [], "controls": []}
    assert explained("dp_sgd").kind == "defense"


def test_models_and_data_sets_are_explained_with_what_may_be_set():
    model = explain.explain("wrn_16_4")
    assert {setting.name for setting in model.settings} == {"standardised", "bias", "groups"}
    assert "Zagoruyko" in model.about and model.summary in model.about
    assert explain.explain("digits").settings == ()


def test_models_are_counted_and_names_without_a_file_are_patterns():
    assert listing.parameters("dp_cnn") == 550_570
    assert listing.parameters("torchvision:NAME") is None
    assert set(listing.patterns("models")) == {"torchvision:NAME", "FILE.py:FUNCTION"}
    assert "folder:PATH" in listing.patterns("data") and set(listing.patterns("defenses")) == {"FILE.py:FUNCTION"}


FIXED = {"adaptive_clipping", "diff2", "dp_macadam", "dp_muon", "dpdr", "geoclip", "gep", "per_layer"}
"""What has several things to bound, a clip norm that moves by itself, or one that others are measured by."""
BOUNDED = [name for name in catalog.central_names() if "bound" in catalog.settings("defenses", name)]


def offers_adaptive(name):
    offered = next(one for one in explained(name).settings if one.name == "bound")
    assert "'normalize'" in offered.type
    return "'adaptive'" in offered.type


@pytest.mark.long
def test_the_clip_norm_of_most_methods_may_follow_their_rows():
    found = {name for name in BOUNDED if offers_adaptive(name)}
    assert not found & FIXED
    assert len(found) >= 25 and {"dp_sgd", "pcdp", "rpdp", "random_sparsification", "dp_adam", "band_mf"} <= found


@pytest.mark.long
@subtests("name", BOUNDED)
def test_the_clip_norm_of_a_method_that_offers_it_follows_its_rows_by_name(name):
    if not offers_adaptive(name):
        with pytest.raises(CatalogError, match=f"defenses/{name}.py cannot have the bound 'adaptive': "):
            catalog.defense(name, {"bound": "adaptive"})
        return
    plain, adaptive = (catalog.defense(name, {"bound": b}, noise_multiplier=1.0) for b in ("clip", "adaptive"))
    assert adaptive.name == name and isinstance(adaptive.method, Adapted)
    found = [predict(one, sampling=poisson(0.1), steps=3).claim(1e-5).epsilon for one in (adaptive, plain)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
