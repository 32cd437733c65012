"""A client that asks for an answer until it has it: cut off, it goes on where it was, at whatever replica answers."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

RETRY_S = 0.2
_AGAIN = frozenset({404, 409, 429, 500, 502, 503, 504})


class CutOffError(Exception):
    """The answer ended too early, after so many tokens were `told`."""

    def __init__(self, message: str, told: int) -> None:
        super().__init__(message)
        self.told = told


class ResumingClient:
    """Asks `/generate` for one choice. `num_cut` counts how often answers were cut off, `num_resumed` how often they
    were gone on with."""

    def __init__(self, url: str, *, within_s: float) -> None:
        self._url, self._within_s = url, within_s
        self.num_cut = self.num_resumed = 0

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the whole answer to a body with a `rid`. Certificates, which take a while to load, are none of its."""
        deadline, path, asked, told = time.monotonic() + self._within_s, "/generate", body, 0
        with httpx.Client(base_url=self._url, timeout=self._within_s, verify=False) as client:
            while True:
                try:
                    answer, told = self._read(client, path, asked, told)
                    self.num_resumed += path != "/generate"
                    return answer
                except CutOffError as error:
                    if time.monotonic() > deadline:
                        raise
                    told = error.told
                    is_unknown = str(error) == "404" and not told
                    self.num_cut += path == "/generate"
                    path = "/generate" if is_unknown else "/resume_request"
                    asked = body if is_unknown else {"rid": body["rid"], "from_token": told}
                    time.sleep(RETRY_S)

    def _read(self, client: httpx.Client, path: str, asked: dict, told: int) -> tuple[dict[str, Any], int]:
        last: dict[str, Any] = {}
        is_done = False
        try:
            with client.stream("POST", path, json=asked) as answer:
                if answer.status_code in _AGAIN:
                    raise CutOffError(str(answer.status_code), told)
                assert answer.status_code == 200, answer.read()
                if "event-stream" not in answer.headers["content-type"]:
                    return json.loads(answer.read()), told
                for line in answer.iter_lines():
                    is_done |= line == "data: [DONE]"
                    if line.startswith("id: "):
                        next_told = int(line.removeprefix("id: "))
                    elif line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            break
                        last, told = event, next_told
        except httpx.HTTPError as error:
            raise CutOffError(str(error), told) from error
        if not is_done or not last or last["meta_info"]["finish_reason"] is None:
            raise CutOffError("the stream has no end", told)
        return last, told
