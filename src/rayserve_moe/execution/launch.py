"""Starting compiled programs without waiting for those before them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, cast

import jax

from rayserve_moe.execution.step_types import StepOutput


class Launched(Protocol):
    """A call that was given to a `Launch`."""

    def result(self) -> StepOutput:
        """What it returned, once it has; raises what it raised."""
        ...


Launch = Callable[[Callable[[], StepOutput]], Launched]
"""Runs calls one after the other, in the order in which they were given."""


def launch_for(devices: list[jax.Device]) -> Launch:
    """How to start programs on the local `devices`.

    A call returns before its program has run, so it is made at once. But on several emulated CPU devices a second
    call waits for the first program: there a thread makes the calls.
    """
    if devices[0].platform == "cpu" and len(devices) > 1:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launch")
        return cast(Launch, pool.submit)
    return lambda call: _Done(call())


@dataclass(frozen=True)
class _Done:
    """A call that was made at once."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output
