"""Draft of a submission: its folder, named by the digest of the request, with a declaration to complete."""

from __future__ import annotations

import ast
import json
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakbench.leaderboard.records.files import digest_of_bytes, read_bytes, write_bytes
from leakbench.leaderboard.submissions.command import command_words
from leakbench.leaderboard.submissions.declaration import NAME, SCHEMA, TO_FILL, DeclarationError, parse
from leakbench.leaderboard.submissions.identity import request_digest

from ..catalog import plugins
from .suites import plain_suite, seeds_in, single_file

_WORDS = {
    "who": "names and affiliation",
    "contact": "an address for questions about it",
    "hardware": "for example: 8 cores, one A100",
    "public_data": 'data that nobody\'s privacy is about, for example for pretraining; "none"',
    "new": "what is new, in a sentence",
}


@dataclass(frozen=True)
class Draft:
    """A new submission.

    Attributes:
        folder: of the submission.
        seeds: that follow from its digest; those of the suite, if that attacks checkpoints.
        command: shell command that computes its records, in its folder.
        trial: shell command that runs the method beside one of the suite's, at the suite's first seed, in another
            folder; empty without a method.
    """

    folder: Path
    seeds: tuple[int, ...]
    command: str
    trial: str = ""


def new_submission(
    root: Path,
    *,
    handle: str,
    suite: str,
    small: bool = False,
    defense: str | None = None,
    attack: str | None = None,
    checkpoint: Path | None = None,
    licence: str = "Apache-2.0",
) -> Draft:
    """Writes a draft into `<root>/<handle>/<digest>/`; the method's file is copied there, and not run.

    Args:
        root: folder of all submissions.
        handle: of the submitter.
        suite: name of a suite.
        small: True for its small form.
        defense: `FILE.py:NAME`, or a TOML table with a name and settings.
        attack: the same; at most one of defense, attack and checkpoint.
        checkpoint: file of a trained model, which stays where it is.
        licence: SPDX identifier.

    Raises:
        ValueError: no such suite or file, or a field that the declaration refuses.
    """
    subjects = {"defense": defense, "attack": attack, "checkpoint": checkpoint}
    chosen = [kind for kind, value in subjects.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"a submission must be of one subject, got {' and '.join(chosen)}")
    kind = chosen[0] if chosen else "run"
    plain = plain_suite(suite, small)
    if plain.zoo is not None and kind in ("defense", "checkpoint"):
        raise ValueError(
            f"a {kind} must be submitted to a suite that trains, got {suite!r}, which attacks checkpoints of its zoo; "
            "it takes attacks"
        )
    document: dict[str, Any] = {"schema": SCHEMA, "handle": handle}
    document |= {key: TO_FILL for key in _WORDS} | {"licence": licence, "command": TO_FILL}
    document |= {"kind": kind, "suite": suite, "small": small, "suite_digest": plain.digest}
    source = None
    if method := defense or attack:
        source, document["method"] = _method(kind, method)
    if checkpoint is not None:
        document["checkpoint"] = {"sha256": digest_of_bytes(read_bytes(checkpoint, "checkpoint"))}
    try:
        # Words are no part of the digest, and a submitter's own are yet to come.
        declaration = parse(document | dict.fromkeys([*_WORDS, "command"], "draft"))
    except DeclarationError as error:
        raise ValueError(str(error)) from None
    digest = request_digest(declaration)
    seeds, folder = seeds_in(plain, digest), root / handle / digest
    words = command_words(declaration, seeds)
    document["command"] = shlex.join([*words, "--out", "."])
    if (folder / NAME).exists():
        raise ValueError(f"{folder} is there already: the same request has the same digest; go on there")
    if source is not None and declaration.method is not None:
        write_bytes(folder / declaration.method.file, read_bytes(source, "method file"))
    write_bytes(folder / NAME, _toml(document).encode())
    inside, trial = f"cd {shlex.quote(str(folder))} && ", ""
    if declaration.method is not None:
        beside = (plain.defense_grid() if kind == "defense" else plain.attack_grid())[0].name
        options = [f"--{kind}", beside, "--seed", str(plain.seeds[0]), "--out", f"../../../trial-{digest[:8]}"]
        trial = inside + shlex.join([*words[: words.index("--set")], *options])
    return Draft(folder, seeds, inside + document["command"], trial)


def _method(kind: str, text: str) -> tuple[Path, dict[str, Any]]:
    """Returns the path and the table of a method, written as a path or as a TOML table with a name."""
    entry: dict[str, Any] = {"name": text}
    if text.lstrip().startswith("{"):
        try:
            entry = tomllib.loads(f"entry = {text}")["entry"]
        except tomllib.TOMLDecodeError:
            entry = {}
    name = entry.pop("name", None)
    if not isinstance(name, str) or not plugins.is_path(name):
        raise ValueError(f"--{kind} must be {plugins.PATTERN}, or a TOML table with such a name, got {text!r}")
    plugins.check(kind, name)
    path, _, function = name.rpartition(":")
    source = Path(path)
    if why := single_file(source):
        raise ValueError(f"{source} {why}")
    if why := _undefined(source, function):
        raise ValueError(f"{source} {why}")
    table = {"file": source.name, "function": function, "sha256": digest_of_bytes(read_bytes(source, "method file"))}
    return source, table | ({"settings": entry} if entry else {})


def _undefined(source: Path, function: str) -> str:
    """Returns why a file has no such function; empty if it has. The file is parsed and not run."""
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return f"must be a Python file: {getattr(error, 'msg', error)}" + (f" (line {line})" if line else "")
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    bound = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if function in bound or "*" in bound:
        return ""
    return f"must define the function {function}; it has {', '.join(functions) or 'none'}"


def _toml(document: dict[str, Any]) -> str:
    """Formats a declaration. A JSON string, number, list or Boolean is the same in TOML."""
    lines, tables = [], []
    for key, value in document.items():
        if isinstance(value, dict):
            inner = {name: content for name, content in value.items() if not isinstance(content, dict)}
            tables += ["", f"[{key}]", *(f"{name} = {_value(content)}" for name, content in inner.items())]
            for name, content in value.items():
                if isinstance(content, dict):
                    tables += ["", f"[{key}.{name}]", *(f"{k} = {_value(v)}" for k, v in content.items())]
        else:
            lines.append(f"{key} = {_value(value)}" + (f"  # {_WORDS[key]}" if key in _WORDS else ""))
    return "\n".join([*lines, *tables, ""])


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
