"""Store of recent responses that later ones may continue, in bounded memory of this replica."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_BYTES = 64 << 20


class StoredResponse(NamedTuple):
    """Response as answered, with the messages that lead to it, including its own."""

    answer: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """LRU store of responses, bounded by `max_bytes` of JSON."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, answer: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keep a response under its id, unless it exceeds the bound."""
        size = len(json.dumps(answer)) + len(json.dumps(list(messages)))
        self.drop(answer["id"])
        if size > self._max_bytes:
            return
        self._responses[answer["id"]] = StoredResponse(answer, messages, size)
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response with this id, or None."""
        if response_id in self._responses:
            self._responses.move_to_end(response_id)
        return self._responses.get(response_id)

    def drop(self, response_id: str) -> bool:
        """Remove a response; return False if it is not stored."""
        found = self._responses.pop(response_id, None)
        self._num_bytes -= found.num_bytes if found else 0
        return found is not None
