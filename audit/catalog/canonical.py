"""The settings that ids and digests depend on: those that differ from their defaults, and those that always did.

A setting that a method gains later is left out at its default, so that records of its former version keep their ids.
Settings that methods had before this rule are in the ids that exist whatever their value, and stay in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .methods import MethodKind, settings

_PROJECTED = frozenset({"clip_norm", "rank", "scope", "interval", "auxiliary", "auxiliary_size", "shortage"})

ALWAYS: dict[tuple[MethodKind, str], frozenset[str]] = {
    ("defenses", "clipped_sgd"): frozenset({"clip_norm"}),
    ("defenses", "dp_sgd"): frozenset({"clip_norm"}),
    ("defenses", "dpdr"): frozenset({"clip_norm", "clip_norm_along", "share", "switch_step", "project_noise"}),
    ("defenses", "noisy_sgd"): frozenset({"nominal_norm"}),
    ("defenses", "pcdp"): _PROJECTED,
    ("defenses", "pdp"): _PROJECTED,
    ("defenses", "random_sparsification"): frozenset({"clip_norm", "final_sparsity", "refreshes", "cooling"}),
    ("defenses", "rpdp"): frozenset({"clip_norm", "rank", "scope", "interval", "clip_first", "rescale"}),
    ("defenses", "rsdp"): frozenset({"clip_norm", "sparsity"}),
    ("attacks", "inverting_gradients"): frozenset({"iterations", "restarts", "tv_weight", "lr"}),
    ("attacks", "loss_threshold"): frozenset({"batch_size"}),
}
"""Settings of methods that are older than the rule. No row is ever added here."""


def canonical(kind: MethodKind, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method that its ids depend on.

    Args:
        kind: "defenses" or "attacks".
        name: of the method.
        given: every setting, decided.
    """
    known, always = settings(kind, name), ALWAYS.get((kind, name), frozenset())

    def counts(key: str, value: Any) -> bool:
        setting = known.get(key)
        return key in always or setting is None or setting.required or value != setting.default

    return {key: value for key, value in given.items() if counts(key, value)}
