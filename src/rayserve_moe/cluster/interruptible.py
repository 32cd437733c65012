"""Waiting for what Ray computes, until another thread gives up on it."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

POLL_S = 0.25


class GivenUpError(RuntimeError):
    """Nobody wants any more what was being waited for."""


def get(refs: Any, *, timeout_s: float, given_up: threading.Event) -> Any:
    """As `ray.get`, of one or of several, but GivenUpError soon after the event was set.

    A thread that still waits when its process leaves Ray takes the process with it.
    """
    deadline = time.monotonic() + timeout_s
    while not given_up.is_set():
        try:
            return ray.get(refs, timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))
        except GetTimeoutError:
            if time.monotonic() >= deadline:
                raise
    raise GivenUpError("the start was given up")
