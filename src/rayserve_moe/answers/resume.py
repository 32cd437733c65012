"""Splitting and joining of a choice's results, and withholding of results from a client."""

from __future__ import annotations

from collections.abc import Sequence as Updates

from rayserve_moe.replay.encoding.ranges import routing_from, routing_until
from rayserve_moe.requests.columns import take
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult, joined_routing


def joined(updates: Updates[ChoiceResult]) -> ChoiceResult:
    """Join consecutive updates of a choice; routing rows are copied once."""
    whole = ChoiceResult(updates[0].request_id, updates[0].choice_index)
    whole_routing = joined_routing([update.routing for update in updates])
    for update in updates:
        update.routing = None
        whole.add(update)
    whole.routing = whole_routing
    return whole


def split(result: ChoiceResult, at: int, *, prompt_len: int) -> tuple[ChoiceResult, ChoiceResult]:
    """Split the result of a choice before output `at`; its finish and prompt columns go to the second part.

    The first part has the routing rows that are known with its last token. It has no text.
    """
    head, tail = (ChoiceResult(result.request_id, result.choice_index) for _ in range(2))
    for part, span in ((head, slice(0, at)), (tail, slice(at, None))):
        part.token_ids, part.logprobs = result.token_ids[span], result.logprobs[span]
        part.ranks, part.columns = result.ranks[span], take(result.columns, span)
        part.weight_versions, part.num_cached_tokens = result.weight_versions, result.num_cached_tokens
        part.drafts = result.drafts
    tail.finish, tail.prompt = result.finish, result.prompt
    if (routing := result.routing) is not None:
        border = max(routing.start, prompt_len + at - 1) if at else routing.start
        head.routing, tail.routing = routing_until(routing, border), routing_from(routing, border)
    return head, tail


class HeldBack:
    """Withholding of results until the end of a choice: everything for a plain answer, routing rows for a stream."""

    def __init__(self, request: GenerationRequest) -> None:
        self._holds_all = not request.incremental
        self._holds_rows = not request.stream_routed_experts
        self._held: dict[int, list[ChoiceResult]] = {}

    def pass_on(self, updates: Updates[ChoiceResult]) -> list[ChoiceResult]:
        """Return the results for the client after new updates."""
        passed = []
        for update in updates:
            held = self._held.setdefault(update.choice_index, [])
            if self._holds_all:
                held.append(update)
                passed += [joined(held)] if update.finish is not None else []
                continue
            if self._holds_rows and update.routing is not None:
                held.append(ChoiceResult(routing=update.routing))
                update.routing = None
            if self._holds_rows and update.finish is not None and held:
                update.routing = joined(held).routing
            passed.append(update)
        return passed
