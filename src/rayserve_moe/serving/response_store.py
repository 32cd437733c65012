"""Responses that later ones continue: the latest, in bounded memory of this replica."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_BYTES = 64 << 20


class StoredResponse(NamedTuple):
    """A response as it was answered, and the messages that lead to it, its own included."""

    answer: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """Keeps responses up to `most_bytes` of JSON; those that were used longest ago go first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, answer: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keep a response under its id, unless it is larger than all that may be kept."""
        size = len(json.dumps(answer)) + len(json.dumps(list(messages)))
        self.drop(answer["id"])
        if size > self._most_bytes:
            return
        self._responses[answer["id"]] = StoredResponse(answer, messages, size)
        self._num_bytes += size
        while self._num_bytes > self._most_bytes:
            self.drop(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return what is kept under an id."""
        if response_id in self._responses:
            self._responses.move_to_end(response_id)
        return self._responses.get(response_id)

    def drop(self, response_id: str) -> bool:
        """Forget a response; False where it is not kept."""
        found = self._responses.pop(response_id, None)
        self._num_bytes -= found.num_bytes if found else 0
        return found is not None
