"""A declaration that is accepted, as a TOML document, for tests that change a field of it."""

from typing import Any

from leakbench.leaderboard.submissions.declaration import Declaration, parse

DOCUMENT: dict[str, Any] = {
    "schema": 1,
    "handle": "ada",
    "who": "Ada, Example University",
    "licence": "Apache-2.0",
    "contact": "ada at example.org",
    "hardware": "2 cores",
    "public_data": "none",
    "command": "leakbench run quick",
    "kind": "defense",
    "new": "DP-SGD under another name.",
    "suite": "quick",
    "suite_digest": "0" * 64,
    "method": {"file": "half_dp.py", "function": "half_dp", "sha256": "1" * 64, "settings": {"clip_norm": 2.0}},
}


def declaration(**changes: Any) -> Declaration:
    """Returns the declaration with other fields; None removes one."""
    document = {key: value for key, value in (DOCUMENT | changes).items() if value is not None}
    return parse(document)
