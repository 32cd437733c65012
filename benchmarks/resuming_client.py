"""A client that asks for an answer until it has it: cut off, it goes on where it was, at whatever replica answers."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

RETRY_S = 0.2
_AGAIN = frozenset({404, 409, 429, 500, 502, 503, 504})


class CutOffError(Exception):
    """The answer ended too early."""


@dataclass
class _Seen:
    """What a client has of an answer: so many tokens, its end as one more, and the last event."""

    has_begun: threading.Event
    begins_at: int
    told: int = 0
    last: dict[str, Any] = field(default_factory=dict)


class ResumingClient:
    """Asks `/generate` for one choice. `num_cut` counts how often answers were cut off, `num_resumed` how often they
    were gone on with; `has_begun` is set when a stream has told `begins_at` tokens."""

    def __init__(self, url: str, *, within_s: float, begins_at: int = 1) -> None:
        self._url, self._within_s, self._begins_at = url, within_s, begins_at
        self.num_cut = self.num_resumed = 0
        self.has_begun = threading.Event()

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the whole answer to a body with a `rid`. Certificates, which take a while to load, are none of its."""
        deadline, path, asked = time.monotonic() + self._within_s, "/generate", body
        seen = _Seen(self.has_begun, self._begins_at)
        with httpx.Client(base_url=self._url, timeout=self._within_s, verify=False) as client:
            while True:
                try:
                    answer = _read(client, path, asked=asked, seen=seen)
                    self.num_resumed += path != "/generate"
                    return answer
                except CutOffError as error:
                    if time.monotonic() > deadline:
                        raise
                    is_unknown = str(error) == "404" and not seen.told
                    self.num_cut += path == "/generate"
                    path = "/generate" if is_unknown else "/resume_request"
                    asked = body if is_unknown else {"rid": body["rid"], "from_token": seen.told}
                    time.sleep(RETRY_S)


def _read(client: httpx.Client, path: str, *, asked: dict[str, Any], seen: _Seen) -> dict[str, Any]:
    """Return the whole answer, or note what has come of it. CutOffError where that is not all."""
    is_done = False
    try:
        with client.stream("POST", path, json=asked) as answer:
            if answer.status_code in _AGAIN:
                raise CutOffError(str(answer.status_code))
            assert answer.status_code == 200, answer.read()
            if "event-stream" not in answer.headers["content-type"]:
                return json.loads(answer.read())
            for line in answer.iter_lines():
                is_done |= line == "data: [DONE]"
                if line.startswith("id: "):
                    next_told = int(line.removeprefix("id: "))
                elif line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        break
                    seen.last, seen.told = event, next_told
                    if next_told >= seen.begins_at:
                        seen.has_begun.set()
    except httpx.HTTPError as error:
        raise CutOffError(str(error)) from error
    if not is_done or not seen.last or seen.last["meta_info"]["finish_reason"] is None:
        raise CutOffError("the stream has no end")
    return seen.last
