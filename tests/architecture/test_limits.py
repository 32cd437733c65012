"""The house rules hold for every source file, and each rule is able to fail."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest

from tests.architecture import limits, package_pages, picture_page

ROOT = Path(__file__).resolve().parents[2]
sources = cache(partial(limits.read_sources, ROOT / "src" / "rayserve_moe"))
"""Sources of the package, parsed by the process that runs these tests only."""


def _lines(count: int, line: str = "x = 1") -> str:
    return "\n".join([line] * count)


def _function(num_lines: int) -> str:
    return "def measure():\n" + _lines(num_lines - 1, "    x = 1")


def _class_of_methods(count: int) -> str:
    return "class Queue:\n" + "\n".join(f"    def step_{i}(self): ..." for i in range(count))


VIOLATIONS = [
    ("short_file", "a.py", _lines(401)),
    ("short_function", "a.py", _function(61)),
    ("short_function", "a.py", "async " + _function(61)),
    ("small_class", "a.py", _class_of_methods(13)),
    ("keywords_after_two", "a.py", "def place(a, b, c): ..."),
    ("keywords_after_two", "a.py", "class Queue:\n    def __init__(self, a, b, c): ..."),
    ("keywords_after_two", "a.py", "class Queue:\n    async def put(self, a, b, c=1): ..."),
    ("keywords_at_the_call", "a.py", "how = {'n': 1}\nf(**how)"),
    ("keywords_at_the_call", "a.py", "class Queue:\n    how = dict(n=1)\n    def put(self):\n        f(**self.how)"),
    ("keywords_at_the_call", "a.py", "f(**({'n': 1} if x else {}))"),
    ("documented_module", "a.py", "x = 1"),
    ("empty_init", "model/__init__.py", '"""Doc."""\nprint(1)'),
    ("empty_init", "model/__init__.py", "def __getattr__(name): ..."),
    ("empty_init", "__init__.py", "def start(): ..."),
    ("no_root_import", "model/spec.py", "from rayserve_moe import Engine"),
    ("no_root_import", "model/spec.py", "import rayserve_moe"),
    ("no_root_import", "__init__.py", "from rayserve_moe.engine.loop import EngineLoop"),
    ("compiles_in_one_place", "execution/step/function.py", "import jax\nf = jax.jit(g)"),
    ("compiles_in_one_place", "execution/step/function.py", "import jax\n@jax.jit\ndef f(): ..."),
    ("compiles_in_one_place", "model/rope.py", "from jax import jit as compiled"),
    ("reads_environment_in_one_place", "cluster/host_worker.py", "import os\nx = os.environ['A']"),
    ("reads_environment_in_one_place", "config/derive.py", "from os import getenv"),
    ("catches_by_name", "a.py", "try:\n    f()\nexcept Exception:\n    raise"),
    ("catches_by_name", "a.py", "try:\n    f()\nexcept (OSError, BaseException) as error:\n    g(error)"),
    ("catches_by_name", "a.py", "try:\n    f()\nexcept:\n    raise"),
    ("imports_are_plain", "a.py", "if TYPE_CHECKING:\n    import jax"),
    ("imports_are_plain", "a.py", "import typing\nif typing.TYPE_CHECKING:\n    import jax"),
    ("imports_are_plain", "a.py", "try:\n    import zstandard\nexcept ImportError:\n    zstandard = None"),
    ("known_third_parties", "scheduling/queue.py", "import pybase64"),
    ("known_third_parties", "model/rope.py", "from safetensors.numpy import load_file"),
    ("known_third_parties", "requests/records.py", "import jax.numpy as jnp"),
    ("no_filler", "scheduling/utils.py", ""),
    ("no_filler", "common/pages.py", ""),
    ("no_filler", "a.py", "class PageManager: ..."),
    ("no_filler", "a.py", "class BaseRouter: ..."),
    ("no_filler", "a.py", "class RoutingInfo: ..."),
    ("no_filler", "a.py", "def place(ctx): ..."),
    ("no_filler", "a.py", "pages_v2 = 1"),
    ("numbered_todo", "a.py", "# TODO later"),
    ("numbered_todo", "a.py", '"""FIXME: this."""'),
    ("nothing_silenced", "a.py", "import jax  # noqa: E501, PLC0415"),
    ("nothing_silenced", "a.py", "x = f()  # type: ignore"),
    ("nothing_silenced", "a.py", "# ruff: noqa"),
    ("plain_english", "a.py", '"""Returns a row; strangers\\nget none."""'),
    ("plain_english", "a.py", 'class Queue:\n    x = 1\n    """Takes a\n    seat."""'),
    ("plain_english", "a.py", "x = 1  # what somebody holds"),
    ("plain_english", "a.py", "x = 1  # no room for further picks"),
]

ALLOWED = [
    ("short_file", "a.py", _lines(400)),
    ("short_function", "a.py", _function(60)),
    ("small_class", "a.py", _class_of_methods(12) + "\n    def _hidden(self): ..."),
    ("keywords_after_two", "a.py", "class Queue:\n    def put(self, a, b, *, c): ..."),
    ("keywords_after_two", "a.py", "class Queue:\n    def __exit__(self, kind, error, trace): ..."),
    ("keywords_after_two", "a.py", "def _place(a, b, c): ..."),
    ("keywords_after_two", "kernels/a.py", "def attend(q, k, v): ..."),
    ("keywords_after_two", "a.py", "def outer():\n    def on_device(a, b, c): ..."),
    ("keywords_at_the_call", "a.py", "how = json.loads(text)\nf(**how, n=1)\nf({**given})"),
    ("documented_module", "a.py", '"""Doc."""\nx = 1'),
    ("documented_module", "model/__init__.py", ""),
    ("empty_init", "model/__init__.py", '"""Doc."""\nfrom a import b\n\n__all__ = ["b"]'),
    ("empty_init", "__init__.py", '"""Doc."""\nimport importlib\ndef __getattr__(name): ...'),
    ("no_root_import", "model/spec.py", "from rayserve_moe.requests.records import RoutingLayout"),
    ("compiles_in_one_place", "execution/programs/compiled.py", "import jax\nf = jax.jit(g)"),
    ("reads_environment_in_one_place", "config/load.py", "import os\nx = os.environ['A']"),
    ("catches_by_name", "engine/loop.py", "try:\n    f()\nexcept Exception:\n    raise"),
    ("catches_by_name", "a.py", "try:\n    f()\nexcept (OSError, errors.Gone):\n    raise"),
    ("imports_are_plain", "a.py", "import jax\ntry:\n    f()\nexcept OSError:\n    g()"),
    ("known_third_parties", "replay/encoding.py", "import pybase64\nimport json\nfrom rayserve_moe import requests"),
    ("known_third_parties", "serving/app.py", "import fastapi"),
    ("no_filler", "a.py", "class Database: ...\nclass Informed: ...\ndef cut(num_new_tokens): ..."),
    ("numbered_todo", "a.py", "# TODO(#12): later\n# TODO: see ADR-0003"),
    ("nothing_silenced", "a.py", "x = f()  # noqa: E501\n# types: ignored"),
    ("plain_english", "a.py", 'house = "a seat"  # `seat` and seat_id are names'),
]


@pytest.mark.parametrize("name", limits.CHECKS)
def test_every_source_file_keeps_the_rule(name: str) -> None:
    problems = [
        f"src/rayserve_moe/{source.path}:{text}" for source in sources() for text in limits.CHECKS[name](source)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("name", "path", "text"), VIOLATIONS)
def test_a_violation_is_found(name: str, path: str, text: str) -> None:
    assert list(limits.CHECKS[name](limits.Source(path, text)))


@pytest.mark.parametrize(("name", "path", "text"), ALLOWED)
def test_what_the_rule_allows_passes(name: str, path: str, text: str) -> None:
    assert not list(limits.CHECKS[name](limits.Source(path, text)))


def test_every_check_has_a_violation_and_an_allowed_case() -> None:
    assert {case[0] for case in VIOLATIONS} == {case[0] for case in ALLOWED} == set(limits.CHECKS)


imports = cache(picture_page.imports)


@pytest.mark.parametrize("folder", package_pages.packages(), ids=lambda folder: folder.name)
def test_a_package_says_what_it_is_for_what_it_imports_and_where_to_begin(folder: Path) -> None:
    imported = {other for importer, other in imports() if importer == folder.name}
    assert package_pages.faults(folder, imported) == []


def test_faults_of_a_package_page_are_found(tmp_path: Path) -> None:
    assert package_pages.faults(tmp_path, set()) == ["there is no README.md"]
    (tmp_path / "README.md").write_text("# other\n\nImports `a`.\n\nBegin with:\n- `gone.py`: the loop\n")
    assert package_pages.faults(tmp_path, {"b"}) == [
        "its title is '# other'",
        "it states the imports ['a'], the code has ['b']",
        "it names the missing file gone.py",
    ]
    (tmp_path / "README.md").write_text(f"# {tmp_path.name}\n\nImports no other package.\n" + "\n" * 20)
    assert package_pages.faults(tmp_path, set()) == ["it has more than 14 lines", "it names no file to begin with"]


def _is_source(file: Path) -> bool:
    return file.is_file() and not {"__pycache__", "built"} & set(file.parts) and file.name != "README.md"


def test_every_source_file_says_what_it_is() -> None:
    tracked = [file for file in package_pages.PACKAGE.rglob("*") if _is_source(file)]
    silent = [file for file in tracked if file.stat().st_size and not package_pages.first_sentence(file)]
    assert not silent
