"""Docstrings in words of the field: few of the words that make puzzles, and names of bounds with `max` and `min`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.house import PACKAGE

MAX_PER_THOUSAND = {"where": 3, "what": 2, "one": 3}
"""Maximum number of each word in 1,000 words of docstrings."""
PLAIN_NAME = re.compile(r"^_?(most|longest|least)_|_(most|longest|least)$", re.IGNORECASE)
KEPT = {"is_least", "most_common", "at_least"}
"""Names of a stored format, of the standard library, and a plain phrase."""


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the parsed files of the package."""
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}


def docstrings() -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and fields."""
    for tree in trees().values():
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else ():
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    text = statement.value.value
                    yield from [text] if isinstance(text, str) else []


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    return Counter(word for text in docstrings() for word in re.findall(r"[a-z']+", text.lower()))


@pytest.mark.parametrize("word", MAX_PER_THOUSAND)
def test_docstrings_have_few_words_that_make_puzzles(counts: Counter[str], word: str) -> None:
    per_thousand = 1000 * counts[word] / counts.total()
    assert per_thousand <= MAX_PER_THOUSAND[word], f"{word!r} {per_thousand:.1f} times in 1,000 words"


def test_bounds_are_named_max_and_min() -> None:
    names = {
        (file.relative_to(PACKAGE).as_posix(), name)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        for name in (getattr(node, "id", None), getattr(node, "arg", None), getattr(node, "name", None))
        if isinstance(name, str) and PLAIN_NAME.search(name) and name not in KEPT
    }
    assert not names, sorted(names)
