"""Which tests run in the same process, where several processes share the work."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from tests.support.session.scopes import scope_of


class Distribution(LoadScopeScheduling):
    """Hands out one directory after the other: tests of a directory share engines, and the TPU compiler."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
