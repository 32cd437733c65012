"""Which tests a process of several takes together, and which it takes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.session.scopes import APART, LONGEST, place_of, scope_of


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/cluster/test_hosts.py::test_it[1]", "ray"),
        ("tests/deploy/test_exposition.py::test_it", "ray"),
        ("tests/unit/text/test_tokenizer.py::test_it[a/b::c]", "tests/unit/text"),
        ("tests/pipelines/test_routing.py::test_it", "tests/pipelines"),
        ("tests/pipelines/test_windows.py::test_it", "tests/pipelines/test_windows.py"),
        ("tests/http/test_journal.py::test_it", "tests/http/test_journal.py"),
    ],
)
def test_a_scope_is_a_directory_what_several_share_or_a_file_that_is_apart(nodeid: str, scope: str):
    assert scope_of(nodeid) == scope


def test_the_longest_begin_first_then_files_that_are_apart():
    others = [f"{directory}/{name}.py" for directory, names in APART.items() for name in names]
    first = [f"{scope.replace('ray', 'tests/cluster')}/test_x.py" for scope in LONGEST]
    found = sorted(["tests/unit/a.py", *others, *first[::-1]], key=place_of)
    assert found == [*first, *others, "tests/unit/a.py"]


@pytest.mark.parametrize("directory", APART)
def test_files_that_are_apart_are_there(directory: str):
    assert [name for name in APART[directory] if not Path(directory, f"{name}.py").is_file()] == []
