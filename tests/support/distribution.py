"""Which tests run in the same process, where several processes share the work."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

WITH_RAY = ("tests/cluster", "tests/deploy")
"""They have ports and clusters of the machine to themselves."""


class Distribution(LoadScopeScheduling):
    """Hands out one directory after the other: tests of a directory share engines, and the TPU compiler."""

    def _split_scope(self, nodeid: str) -> str:
        directory = nodeid.partition("::")[0].rpartition("/")[0]
        return "ray" if directory in WITH_RAY else directory
