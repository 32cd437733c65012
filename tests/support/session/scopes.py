"""Which tests share engines, clusters and compilers, and so a process, and which of these scopes take longest."""

from __future__ import annotations

WITH_RAY = ("tests/cluster", "tests/deploy")
"""They have ports and clusters of the machine to themselves."""
LONGEST = ("ray", "tests/http", "tests/pipelines", "tests/unit/kernels")
"""Begin first, so that no process is left with one of them at the end."""


def scope_of(nodeid: str) -> str:
    """Return the directory of a test, or what tests of several directories share."""
    directory = nodeid.partition("::")[0].rpartition("/")[0]
    return "ray" if directory in WITH_RAY else directory


def place_of(nodeid: str) -> int:
    """Return the place of a test's scope in the order in which scopes begin."""
    scope = scope_of(nodeid)
    return LONGEST.index(scope) if scope in LONGEST else len(LONGEST)
