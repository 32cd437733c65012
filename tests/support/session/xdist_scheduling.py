"""Which tests run in the same process, where several processes share the work."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.support.session.scopes import scope_of


class Distribution(LoadScopeScheduling):
    """Hands out one directory after the other: tests of a directory share engines, and the TPU compiler."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Hand out what an ended process left; return the test that ended it, or None where it had finished.

        The base class runs that test again, in a new process each time, until none may be started.
        """
        workload = self.assigned_work.pop(node)
        left = [(unit, nodeid) for unit in workload.values() for nodeid, is_done in unit.items() if not is_done]
        if not left:
            return None
        unit, crashed = left[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in workload.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
