"""Which tests share engines, clusters and compilers, and so a process, and which of these scopes take longest."""

from __future__ import annotations

WITH_RAY = ("tests/cluster", "tests/deploy")
"""They have ports and clusters of the machine to themselves."""
LONGEST = ("ray", "tests/http", "tests/pipelines", "tests/unit/kernels")
"""Begin first, so that no process is left with one of them at the end."""
APART = {
    "tests/http": (
        *("test_control_table", "test_fleet_control", "test_handing_over", "test_journal", "test_random_bodies"),
        *("test_tensor_routes", "test_trainer_control", "test_trainer_flows", "test_weight_routes"),
    ),
    "tests/pipelines": (
        *("test_hybrid_bugs_of_peers", "test_later_shapes", "test_migration", "test_narrow_experts"),
        *("test_native_kernels", "test_resumed_states", "test_windows"),
    ),
}
"""Files of large directories that any process may take after `LONGEST`: programs that they share are on disk then."""


def scope_of(nodeid: str) -> str:
    """Return the directory of a test, what tests of several directories share, or the test's file where it is apart."""
    file = nodeid.partition("::")[0]
    directory, _, name = file.rpartition("/")
    if directory in WITH_RAY:
        return "ray"
    return file if name.removesuffix(".py") in APART.get(directory, ()) else directory


def place_of(nodeid: str) -> int:
    """Return the place of a test's scope in the order in which scopes begin."""
    scope = scope_of(nodeid)
    if scope in LONGEST:
        return LONGEST.index(scope)
    return len(LONGEST) + (not scope.endswith(".py"))
