"""An engine of this process that computes prompts for another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.engine.prefill import compute_pages
from rayserve_moe.engine.pushed_pages import Outcome, PromptRequest, Push, PushRefusedError

Spoil = Callable[[Push], Outcome]


class Neighbour:
    """Push pages of another engine in this process; `spoil` changes a push on its way."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop, self.requests = loop, list[PromptRequest]()
        self.spoil: Spoil = lambda push: push

    def ask(self, request: PromptRequest, deliver: Callable[[Outcome], object]) -> bool:
        self.requests.append(request)

        def arrived(done: Future[Push]) -> None:
            error = done.exception()
            assert error is None or isinstance(error, PushRefusedError)
            deliver(self.spoil(done.result()) if error is None else error)

        compute_pages(self.loop, request).add_done_callback(arrived)
        return True
