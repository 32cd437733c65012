"""Replicas that compute prompts for this one, asked on a separate event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

from rayserve_moe.engine.pushed_pages import LOST, Outcome, PromptRequest, Push, PushRefusedError
from rayserve_moe.fleet.broadcast import FleetCalls
from rayserve_moe.fleet.member import FleetMember

PREFILL_S = 120.0
"""Maximum time for another replica to compute a prompt; then it is computed here."""


class PrefillPeers:
    """Asks the peer with the fewest unanswered prompt tokens; implements `engine.pushed_pages.PromptSource`."""

    def __init__(self, member: FleetMember, calls: FleetCalls) -> None:
        self._member, self._calls = member, calls
        self._asked: Counter[str] = Counter()
        """Number of unanswered prompt tokens per peer. Only the thread of `_loop` changes it."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="prefill", daemon=True).start()

    def ask(self, request: PromptRequest, deliver: Callable[[Outcome], object]) -> bool:
        peers = sorted(self._member.view.prefill - {self._member.name})
        if peers:
            asyncio.run_coroutine_threadsafe(self._ask(peers, request, deliver), self._loop)
        return bool(peers)

    async def _ask(self, peers: list[str], request: PromptRequest, deliver: Callable[[Outcome], object]) -> None:
        outcome: Outcome = PushRefusedError(LOST)
        peer = min(peers, key=self._asked.__getitem__)
        self._asked[peer] += len(request.token_ids)
        try:
            answer = await self._calls.ask_one(peer, "prefill", request, timeout_s=PREFILL_S)
            if answer is not None and answer.refusal is not None:
                outcome = PushRefusedError(answer.refusal.code or LOST)
            elif answer is not None and isinstance(answer.value, Push):
                outcome = answer.value
        finally:
            self._asked[peer] -= len(request.token_ids)
            deliver(outcome)
