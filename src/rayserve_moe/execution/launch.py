"""Starting compiled programs without waiting for those before them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import jax

from rayserve_moe.execution.step_types import StepOutput

Launch = Callable[[Callable[[], StepOutput]], Future[StepOutput]]
"""Runs calls one after the other, in the order in which they were given."""


def launch_for(devices: list[jax.Device]) -> Launch:
    """How to start programs on the local `devices`.

    A call returns before its program has run, so it is made at once. But on several emulated CPU devices a second
    call waits for the first program: there a thread makes the calls.
    """
    if devices[0].platform == "cpu" and len(devices) > 1:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launch")
        return cast(Launch, pool.submit)
    return _now


def _now(call: Callable[[], StepOutput]) -> Future[StepOutput]:
    future: Future[StepOutput] = Future()
    future.set_result(call())
    return future
