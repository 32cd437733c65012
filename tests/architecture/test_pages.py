"""Generated pages are those that the code says, and would not be after a change of it."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from rayserve_moe.config.setting_texts import field_texts
from rayserve_moe.config.settings import Settings
from rayserve_moe.model.families import mixtral
from tests.architecture import (
    cli_page,
    endpoints_page,
    families_page,
    kernels_page,
    metrics_page,
    picture_page,
    settings_page,
)
from tests.architecture.limits import NOT_PLAIN

ROOT = settings_page.PAGE.parents[1]
WORDED = [page for page in sorted(ROOT.glob("docs/**/*.md")) if page.parent.name != "adr"] + [ROOT / "README.md"]
SHORT = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("index.md", "architecture.md", "figures.md"))]
SHORT += [page for folder in ("start", "operate") for page in sorted(ROOT.glob(f"docs/{folder}/*.md"))]
MAX_CELL_WORDS, MAX_PARAGRAPH_WORDS = 15, 90
PAGES = {
    "settings": settings_page,
    "cli": cli_page,
    "endpoints": endpoints_page,
    "metrics": metrics_page,
    "picture": picture_page,
    "families": families_page,
    "kernels": kernels_page,
}


def long_parts(text):
    """Cells and paragraphs of a page that have too many words; code counts as none."""
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    found = []
    for part in re.split(r"\n\n+|\n(?=\s*[-|]|\d+\. )", text):
        cells = part.strip().strip("|").split("|") if part.lstrip().startswith("|") else []
        found += [cell.strip() for cell in cells if len(cell.split()) > MAX_CELL_WORDS]
        found += [part.strip()] * (not cells and len(part.split()) > MAX_PARAGRAPH_WORDS)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_the_one_that_the_code_says(name):
    """`python -m tests.architecture.<name>_page` writes it anew."""
    module = PAGES[name]
    assert module.PAGE.read_text(encoding="utf-8") == module.page()


@pytest.mark.parametrize("page", WORDED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_the_words_of_the_field(page):
    """Names in backticks and comments aside."""
    text = re.sub(r"`[^`]*`|<!--.*?-->", "", page.read_text(encoding="utf-8"))
    assert [found[0] for found in NOT_PLAIN.finditer(text)] == []


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.name)
def test_a_page_has_short_cells_and_short_paragraphs(page):
    assert long_parts(page.read_text(encoding="utf-8")) == []


def test_a_long_cell_and_a_long_paragraph_are_found():
    cell, paragraph = "word " * 16, "word " * 91
    assert long_parts(f"| a | {cell}|\n\n- item\n- item\n\n{paragraph}\n") == [cell.strip(), paragraph.strip()]
    assert long_parts(f"```text\n{paragraph}\n```\n\n| `{cell}` | b |\n\n{'word ' * 90}\n") == []


def test_every_setting_says_what_it_is():
    sections = [type(getattr(Settings(), field.name)) for field in dataclasses.fields(Settings)]
    texts = {f"{section.__name__}.{name}": text for section in sections for name, text in field_texts(section).items()}
    assert len(texts) == sum(len(dataclasses.fields(section)) for section in sections)
    assert [name for name, text in texts.items() if not text] == []


def test_a_route_that_the_page_does_not_list_is_found(monkeypatch):
    for group in ({}, {**endpoints_page.GROUPS["Model"], "/gone": "nothing"}):
        monkeypatch.setitem(endpoints_page.GROUPS, "Model", group)
        with pytest.raises(AssertionError, match=r"/v1/models|/gone"):
            endpoints_page.page()


def test_the_picture_shows_every_package_once_and_no_arrow_up():
    packages = {path.stem for path in picture_page.PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    packages -= {"__init__", "__pycache__"}
    drawn = [name for _, names in picture_page.KINDS.values() for name in names.split()]
    assert sorted(drawn) == sorted(packages) == sorted(name for layer in picture_page.layers() for name in layer)
    assert picture_page.arrows_up(picture_page.imports()) == set()


def test_an_arrow_up_and_one_within_a_layer_are_found():
    up, beside = ("requests", "engine"), ("engine", "execution")
    assert picture_page.arrows_up({up, beside, ("cli", "requests")}) == {up, beside}


def test_an_import_that_follows_from_others_is_not_drawn():
    assert picture_page.direct({("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")}) == [("a", "b"), ("b", "c"), ("c", "d")]


def test_the_worked_example_of_a_family_is_its_module():
    page = (picture_page.ROOT / "docs" / "add_a_model_family.md").read_text(encoding="utf-8")
    assert page.split("```python\n")[1].split("```")[0] == inspect.getsource(mixtral)


def test_links_between_pages_lead_to_files():
    pages = [*picture_page.ROOT.glob("*.md"), *(picture_page.ROOT / "docs").rglob("*.md")]
    links = {
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    }
    assert links == set()
