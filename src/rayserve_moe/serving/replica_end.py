"""The end of a replica whose engine has failed: its hosts are given back, its clients are told, its process ends.

Serve replaces a replica that is gone at once; one that fails its checks only after several, and a drain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rayserve_moe.cluster.replica_engine import ReplicaEngine
from rayserve_moe.serving.middleware.traffic import Traffic

log = logging.getLogger(__name__)

ANSWERS_TIMEOUT_S = 5.0
"""For clients to take the error that ends their request."""
POLL_S = 0.02


def end_after_failure(engine: ReplicaEngine, traffic: Traffic, *, end_process: Callable[[], None]) -> None:
    """Wait for the engine to end; where it has failed, give its hosts back, let its clients hear of it, and end.

    By then every request has its error: the engine publishes it before its thread ends.
    """
    if not engine.loop.has_failed.result():
        return
    engine.shutdown()
    deadline = time.monotonic() + ANSWERS_TIMEOUT_S
    while traffic.num_open and time.monotonic() < deadline:
        time.sleep(POLL_S)
    log.error("the engine has failed: this replica ends, with %d requests unanswered", traffic.num_open)
    end_process()
