"""Prose of docstrings and comments: it begins with the field's noun or a verb, and pronouns do not stand for nouns."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .parameters import subtests

ROOT = Path(__file__).parents[1]
PARTS = ("attacks", "audit", "benchmarks", "defenses", "leaderboard", "leakbench")
FIRST = {"What", "Whether", "Those", "Of", "As", "Where", "Who", "Whoever", "Which", "How", "Why", "Beside"}
# Most per 1,000 words. Anchors of the field have 0.0 to 0.2, 0.6 to 2.2 and 1.0 to 1.7.
MOST = {"what": 1.0, "where": 2.0, "one": 3.5, "whoever": 0.1}
# Variables that say nothing of what they hold.
EMPTY = {"found", "told", "asked", "there", "seen", "said", "taken", "made", "held", "got", "wanted", "given"}
EMPTY |= {"other", "rest", "what", "these", "coins", "some", "here", "which"}
# Variables that are clear only beside another one, as sides or numbers.
PAIRED = {"left": {"right", "rights", "top", "columns"}, "one": {"zero"}}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Modules, classes and functions."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]


def teardown_module() -> None:
    """Frees the trees of all sources, which collections of garbage would search from here on."""
    for kept in (nodes_of, docstrings, tokens, sources):
        kept.cache_clear()


@cache
def docstrings(source: str) -> list[str]:
    """Docstrings of modules, classes and functions, and strings behind attributes."""
    documented: list[Any] = nodes_of(source)
    alone = [line.value for node in documented for line in node.body if isinstance(line, ast.Expr)]
    return [text.value.strip() for text in alone if isinstance(text, ast.Constant) and isinstance(text.value, str)]


@cache
def tokens(source: str) -> list[tokenize.TokenInfo]:
    """Tokens that are comments."""
    read = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in read if token.type == tokenize.COMMENT]


def comments(source: str) -> list[str]:
    return [token.string for token in tokens(source)]


def blocks(source: str) -> Iterator[str]:
    """The first line of each block of comments that has lines of its own."""
    last = -1
    for token in tokens(source):
        if token.line.strip().startswith("#"):
            if token.start[0] > last + 1:
                yield token.string.lstrip("#!: ") or "-"
            last = token.start[0]


@cache
def sources(part: str) -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / part).rglob("*.py")}


def rates(texts: list[str]) -> dict[str, float]:
    """Occurrences of each word that is counted, per 1,000 words."""
    words = [word.lower() for text in texts for word in re.findall(r"[A-Za-z']+", text)]
    counted = Counter(words)
    return {word: 1000 * counted[word] / len(words) for word in MOST}


def first_word(text: str) -> str:
    return text.split()[0].strip("`*:,.")


@subtests("part", PARTS)
def test_docstrings_and_comments_begin_with_a_noun_or_a_verb(part):
    found = [
        f"{path}: {text.splitlines()[0]}"
        for path, source in sources(part).items()
        for text in (*docstrings(source), *blocks(source))
        if first_word(text) in FIRST
    ]
    assert not found, "begin with the field's noun, or with a verb like Returns or Computes"


@subtests("part", PARTS)
def test_pronouns_are_rare(part):
    texts = [text for source in sources(part).values() for text in (*docstrings(source), *comments(source))]
    found = {word: round(rate, 1) for word, rate in rates(texts).items() if rate > MOST[word]}
    assert not found, f"per 1,000 words, at most {MOST}: name the thing that is meant"


def test_what_is_counted_is_found():
    source = '"""What it is."""\nx = 1  # one of what one has\n'
    assert [first_word(text) for text in docstrings(source)] == ["What"]
    assert [first_word(text) for text in docstrings('class A:\n    x = 1\n    """As `y`."""\n')] == ["As"]
    assert [first_word(text) for text in blocks("x = 1  # of it\n# As here:\n# where it is\n")] == ["As"]
    assert rates([*docstrings(source), *comments(source)]) == {
        "what": 250.0,
        "where": 0.0,
        "one": 250.0,
        "whoever": 0.0,
    }


def words_of(node: ast.AST) -> set[str]:
    return set(re.findall(r"\w+", ast.unparse(node)))


def empty_names(source: str) -> Iterator[str]:
    """Functions with the variables of theirs that do not say what they hold."""
    for function in nodes_of(source):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            bound = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
            alone = {name for name in bound & PAIRED.keys() if not PAIRED[name] & words_of(function)}
            for name in sorted(bound & EMPTY | alone):
                yield f"{function.name} (line {function.lineno}): {name}"


@subtests("part", PARTS)
def test_variables_are_named_for_what_they_hold(part):
    assert [f"{name} {place}" for name, source in sources(part).items() for place in empty_names(source)] == []


def test_the_check_of_names_finds_empty_ones():
    source = "def f(rows):\n    found = 1\n    left, right = rows\n    return [one for one in rows if found]\n"
    assert list(empty_names(source)) == ["f (line 1): found", "f (line 1): one"]
    assert list(empty_names("def f(rows):\n    left = rows\n    return left\n")) == ["f (line 1): left"]
