"""A family is named where it is described, and nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rayserve_moe.model.family_table import FAMILIES

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "rayserve_moe"
MODULES = sorted(module.__name__.rsplit(".", 1)[1] for module in FAMILIES.values())
NAMED = re.compile("|".join(map(re.escape, [*FAMILIES, *MODULES])))
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "families"]
MAY_NAME = ("checkpoints/synthetic", "config/model_names.py", "config/parser_names.py")
"""What writes configs of random models says whose they are; parsers of answers have their names from elsewhere."""


def names_in(text: str) -> set[str]:
    """Families that code names: in imports, names and strings, docstrings aside."""
    found: set[str] = set()
    if not NAMED.search(text):
        return found
    tree = ast.parse(text)
    docstrings = {
        id(statement.value)
        for node in ast.walk(tree)
        for statement in ast.iter_child_nodes(node)
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if id(node) not in docstrings:
            words = [getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "module", "") or ""]
            words += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            words += [node.name] if isinstance(node, ast.alias) else []
            found |= {name for word in words for name in NAMED.findall(str(word))}
    return found


def test_nothing_but_a_family_names_one():
    named = {str(path.relative_to(PACKAGE)): names_in(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: names for path, names in named.items() if names and not path.startswith(MAY_NAME)} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from rayserve_moe.model.families import mixtral",
        "from rayserve_moe.model.families.olmoe import spec_from_hf",
        "if spec.family == 'gpt_oss': pass",
        "x = families.deepseek_v3",
        "x = 'MixtralForCausalLM'",
    ],
)
def test_a_name_is_found(text: str):
    assert names_in(text)


def test_a_docstring_may_name_its_source():
    assert names_in('"""As gpt_oss does."""\nx = 1') == set()
