"""Client of a load: a streamed request over HTTP, with the times at which its tokens arrive."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rayserve_moe.config.server_address import no_server, untrusted

_DATA, _DONE = b"data:", b"[DONE]"
_PARTS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a chat's delta with generated tokens."""
_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


class ServerUnusable(Exception):
    """Error for a server to which no load can be sent; the message is a sentence."""


@dataclass
class Outcome:
    """Outcome of a request. Times are seconds of `time.perf_counter`."""

    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Times at which events with text arrived."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
    """Kind of the failure, such as `HTTP 429`; empty after a complete answer."""
    message: str = ""
    """The failure in words."""

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def e2el(self) -> float:
        return self.arrivals[-1] - self.started

    @property
    def itls(self) -> list[float]:
        """Return the times between neighbouring events."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Return the mean time per output token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)


class BenchClient:
    """Client of a server. Use it as an asynchronous context manager."""

    def __init__(self, url: str, *, api_key: str, timeout_s: float) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> BenchClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, headers=self._headers, read_bufsize=1 << 20
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """Return the connections; only inside the context."""
        assert self._session is not None, "the client is a context manager"
        return self._session

    async def model(self) -> str:
        """Return the name of the server's first model. Raises ServerUnusable if there is no such server."""
        answer = await self._json("/v1/models")
        try:
            return answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise ServerUnusable(f"{self._url}/v1/models lists no model: name one with --model") from error

    async def vocab_size(self) -> int:
        """Return the server's number of token ids. Raises ServerUnusable if it does not report it."""
        try:
            return int((await self._json("/model_info"))["vocab_size"])
        except (ServerUnusable, KeyError, TypeError, ValueError) as error:
            raise ServerUnusable("the server does not report its vocabulary: give --vocab-size") from error

    async def texts(self, ids: list[list[int]], *, model: str) -> list[str]:
        """Return the texts of lists of ids, decoded by the server. Raises ServerUnusable if it has no such route."""
        calls = (self._json("/detokenize", {"model": model, "tokens": one}) for one in ids)
        try:
            return [answer["prompt"] for answer in await asyncio.gather(*calls)]
        except (ServerUnusable, KeyError, TypeError) as error:
            raise ServerUnusable(f"random chats are decoded by /detokenize: {error}; use --dataset-path") from error

    async def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            async with self.session.request("GET" if body is None else "POST", self._url + path, json=body) as answer:
                if answer.status == 401:
                    raise ServerUnusable(
                        "the API key is missing or wrong: give it by --api-key or RAYSERVE_MOE_API_KEY"
                    )
                if answer.status != 200:
                    raise ServerUnusable(f"{self._url}{path} answers {answer.status}")
                return await answer.json(content_type=None)
        except aiohttp.ClientConnectorError as error:
            raise ServerUnusable(_no_connection(self._url, error)) from error
        except _ERRORS as error:
            raise ServerUnusable(f"{self._url}{path}: {str(error) or type(error).__name__}") from error

    async def send(self, path: str, raw: bytes) -> Outcome:
        """Send a streamed request and read its answer; failures are in the outcome."""
        outcome = Outcome(started=time.perf_counter())
        headers = {"Content-Type": "application/json"}
        try:
            async with self.session.post(self._url + path, data=raw, headers=headers) as answer:
                if answer.status != 200:
                    outcome.error, outcome.message = f"HTTP {answer.status}", _message_of(await answer.read())
                else:
                    await _read(answer, outcome)
        except TimeoutError:
            outcome.error, outcome.message = "timeout", "the answer did not end in time"
        except _ERRORS as error:
            outcome.error, outcome.message = _kind_of(error), str(error) or type(error).__name__
        return outcome


async def _read(answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Read the events of an answer; all events of one read have its time."""
    rest, is_done = b"", False
    async for chunk in answer.content.iter_any():
        now, (*lines, rest) = time.perf_counter(), (rest + chunk).split(b"\n")
        for event in _events(lines):
            is_done |= event == _DONE
            if event != _DONE:
                _add(json.loads(event), outcome, now=now)
    if outcome.is_ok and not (is_done and outcome.arrivals):
        outcome.error = "incomplete" if outcome.arrivals else "empty"
        outcome.message = "the stream ended without [DONE]" if outcome.arrivals else "the answer has no text"
    outcome.num_output_tokens = outcome.num_output_tokens or len(outcome.arrivals)


def _events(lines: list[bytes]) -> Iterator[bytes]:
    for line in lines:
        if line.startswith(_DATA):
            yield line[len(_DATA) :].strip()


def _add(event: dict[str, Any], outcome: Outcome, *, now: float) -> None:
    """Count an event: text arrives with choices, numbers of tokens with usage."""
    if error := event.get("error"):
        is_object = isinstance(error, dict)
        outcome.error = f"error event {error.get('code') or error.get('type')}" if is_object else "error event"
        outcome.message = str(error.get("message")) if is_object else str(error)
        return
    if (choices := event.get("choices")) and _has_tokens(choices[0], is_first=not outcome.arrivals):
        outcome.arrivals.append(now)
    if usage := event.get("usage"):
        outcome.num_prompt_tokens = usage.get("prompt_tokens") or 0
        outcome.num_output_tokens = usage.get("completion_tokens") or 0


def _has_tokens(choice: dict[str, Any], *, is_first: bool) -> bool:
    """Return True unless an event of a chat only has the role, or the end of an answer with text."""
    if (delta := choice.get("delta")) is None:
        return True
    return any(delta.get(name) for name in _PARTS) or (is_first and bool(choice.get("finish_reason")))


def _message_of(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(raw.decode(errors="replace").split())[:200]


def _no_connection(url: str, error: aiohttp.ClientConnectorError) -> str:
    cause = error.os_error
    return untrusted(url, cause) if isinstance(cause, ssl.SSLCertVerificationError) else no_server(url)


def _kind_of(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection refused"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionError):
        return "connection lost"
    return type(error).__name__
