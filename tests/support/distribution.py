"""Which tests run in the same process, where several processes share the work."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = {
    "cluster": "ray",
    "deploy": "ray",
    "compile": "compiler",
    "http": "http",
    "pipelines": "pipelines",
    "rollouts": "rollouts",
}
"""By directory: tests that have ports, a cluster or the TPU compiler to themselves, and tests that share engines."""


class Distribution(LoadScopeScheduling):
    """Hands out one file after the other, but whole what belongs together."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return TOGETHER.get(path.split("/")[1], path)
