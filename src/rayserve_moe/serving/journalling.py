"""Journalled requests: a request with a client-supplied id is kept in the journal, and any replica can resume it."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from rayserve_moe.engine.adapters import UnknownAdapterError
from rayserve_moe.engine.admission import Capacity
from rayserve_moe.fleet.journal_client import TAKEN_OVER, JournalClient, JournalDownError
from rayserve_moe.fleet.journal_records import AskedRequest, committed_in
from rayserve_moe.fleet.journal_tickets import Found, Ticket
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.front.limits import UNNAMED
from rayserve_moe.serving.kept_paths import KEPT_PATHS

HANDED_OVER = FinishReason("error", message="this replica is shutting down: resume this request on another replica")
_IDENTITY_BYTES = 16
EVENT_STREAM = "text/event-stream"


@dataclass
class Resumed:
    """Request that this replica has taken over."""

    ticket: Ticket
    asked: AskedRequest
    committed: list[ChoiceResult]
    """Committed output of each choice."""
    told: list[int]
    """Tokens of each choice that the client has received."""


@dataclass
class Asking:
    """HTTP request in progress, with its journal identity."""

    journal: JournalClient
    path: str
    caller: str
    """API key of the request."""
    name: str
    """Client-supplied id."""
    accept: str
    cursor: str
    """`Last-Event-ID` of the request."""
    body: bytes = b""
    stem: str = field(default_factory=lambda: uuid.uuid4().hex)
    resumed: Resumed | None = None
    is_named_in_body: bool = False

    @property
    def identity(self) -> bytes:
        return identity_of(self.caller, self.name)

    @property
    def reads_event_ids(self) -> bool:
        """Return True if the client may read ids of events.

        One that only names its request in a header, as for a log, may expect lines of data and nothing else.
        """
        return self.is_named_in_body or self.resumed is not None or bool(self.cursor) or EVENT_STREAM in self.accept

    def resume(self, resumed: Resumed) -> None:
        """Continue from the state that was taken over."""
        self.resumed, self.stem = resumed, resumed.asked.stem


_KEY = "rayserve_moe.asking"


def asking_of(scope: Scope) -> Asking | None:
    """Return the journalled request of an HTTP request, or None."""
    return scope.get(_KEY)


def identity_of(caller: str, name: str) -> bytes:
    """Return a request's key in the journal, which depends on the caller's API key."""
    return hashlib.blake2b(f"{caller}\0{name}".encode(), digest_size=_IDENTITY_BYTES).digest()


def journal_requests(app: ASGIApp, journal: JournalClient | None) -> ASGIApp:
    """Return ASGI middleware that records generation requests with a client-supplied id."""

    async def journalled(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if journal is not None and path in KEPT_PATHS:
            scope[_KEY] = _new_asking(scope, path, journal)
        await app(scope, receive, send)

    return app if journal is None else journalled


def resumed_scope(asking: Asking) -> dict[str, Asking]:
    """Return the addition to the scope of a request that another one replays."""
    return {_KEY: asking}


def caller_of(scope: Scope) -> str:
    """Return the API key of a request."""
    headers = dict(scope["headers"])
    key = headers.get(b"authorization", b"") or b"Bearer " + headers.get(b"x-api-key", b"")
    return key.partition(b" ")[2].strip().decode("latin-1")


def note_body(scope: Scope, body: bytes, *, checked: BaseModel) -> None:
    """Record the validated body of a journalled request and its client-supplied id."""
    if (asking := asking_of(scope)) is not None:
        asking.body = body
        given = [getattr(checked, name) for name in ("rid", "request_id") if name in checked.model_fields_set]
        named = next((name for name in given if isinstance(name, str) and name), "")
        asking.name, asking.is_named_in_body = named or asking.name, bool(named)


def answer_stem(asking: Asking | None) -> str:
    """Return the stem of an answer's ids: the same on every replica that resumes the request."""
    return uuid.uuid4().hex if asking is None else asking.stem


@dataclass
class OneKeeper:
    """Journal writer of an engine request whose choices are numbered from `first` within the HTTP request."""

    journal: JournalClient
    ticket: Ticket
    first: int
    committed: Sequence[ChoiceResult]
    told: Sequence[int]

    def keep(self, updates: list[ChoiceResult], deliver: Callable[[], object]) -> None:
        """Commit updates, except failures of this replica: then another replica may resume the request."""
        if any(each.finish and each.finish.kind == "error" and each.finish.source is None for each in updates):
            self.journal.close(self.ticket, deliver)
        else:
            numbered = [(self.first + each.choice_index, each) for each in updates]
            self.journal.commit(self.ticket, numbered, deliver=deliver)


@dataclass
class KeptRequest:
    """Journalled HTTP request: its engine requests with their writers, and the tokens its client has of each choice."""

    journal: JournalClient
    ticket: Ticket
    requests: list[GenerationRequest]
    keepers: list[OneKeeper]
    told: list[int]
    has_event_ids: bool

    def on_loss(self, retire: Callable[[FinishReason], Future[None] | None]) -> None:
        """Register the callback that ends the streams with a reason when another connection takes over."""
        self.ticket.on_loss = retire
        if self.ticket.is_over:  # already taken over
            retire(TAKEN_OVER)

    def close(self) -> None:
        """Stop writing to the journal."""
        self.journal.close(self.ticket)


async def kept_request(
    asking: Asking | None,
    requests: Sequence[GenerationRequest],
    *,
    card: ModelCard,
    capacity: Capacity,
    keyed: Callable[[GenerationRequest], GenerationRequest],
) -> KeptRequest | None:
    """Record an HTTP request in the journal, or resume it; None without an id, and for hidden states.

    Raises: ApiError 409 if the adapter of a resumed request, with the bytes that it began with, is no longer loaded.
    """
    if asking is None or not asking.name or any(request.return_hidden_states for request in requests):
        return None
    if asking.resumed is None and asking.cursor:
        cursor = _cursor_in(asking.cursor)
        found = await take_over(asking.journal, asking.identity, told=cursor, capacity=capacity)
        if (found.asked.path, found.asked.body) != (asking.path, asking.body):
            asking.journal.close(found.ticket)
            raise ApiError(400, "`Last-Event-ID` belongs to a request with another body", code="other_body")
        asking.resume(found)
    resumed = asking.resumed
    if resumed is None:
        capacity.check(len(requests))  # before any write to the journal
        requests = [_seeded(request) for request in requests]
        resumed = _begun(asking, requests, card)
    else:
        asked = resumed.asked
        given = zip(requests, asked.prompts, asked.seeds, asked.adapters, strict=True)
        try:
            requests = [
                keyed(_as_asked(request, prompt, seed, adapter=adapter)) for request, prompt, seed, adapter in given
            ]
        except UnknownAdapterError as error:
            asking.journal.close(resumed.ticket)
            message = "the adapter of this request is no longer loaded with the bytes that it began with"
            raise ApiError(409, message, code="adapter_gone") from error
    firsts = [0, *accumulate(request.sampling.n for request in requests)]
    spans = [slice(first, first + request.sampling.n) for first, request in zip(firsts, requests, strict=False)]
    keepers = [
        OneKeeper(asking.journal, resumed.ticket, span.start, _renumbered(resumed.committed[span]), resumed.told[span])
        for span in spans
    ]
    return KeptRequest(
        asking.journal,
        resumed.ticket,
        list(requests),
        keepers,
        resumed.told,
        has_event_ids=asking.reads_event_ids,
    )


def hand_over(journal: JournalClient) -> int:
    """End the connections of all journalled requests so that clients resume them elsewhere; return their number.

    It returns 0 if the journal is down, because it may lack sent tokens. Callable from any thread.
    """
    open_now = [ticket for ticket in list(journal.tickets.values()) if ticket.on_loss is not None and journal.is_up]
    for ticket in open_now:
        journal.close(ticket)
        if ticket.on_loss is not None:
            ticket.on_loss(HANDED_OVER)
    return len(open_now)


async def take_over(journal: JournalClient, identity: bytes, *, told: int | list[int], capacity: Capacity) -> Resumed:
    """Take ownership of a request; its client has received `told` tokens.

    A connection that still runs here is ended first.

    Raises: ApiError 404 for an unknown request, 400 for a cursor past its end, 503 if the journal is down;
    EngineBusyError if the engine has no capacity for its unfinished choices.
    """
    try:
        asked, committed, _ = _resumed(await asyncio.wrap_future(journal.ask(identity)), told)
        if (own := journal.tickets.get(identity)) is None:
            ends = list(accumulate(asked.choices))
            prompts = [committed[end - number : end] for number, end in zip(asked.choices, ends, strict=True)]
            capacity.check(sum(any(choice.finish is None for choice in prompt) for prompt in prompts))
        else:
            journal.close(own)
            if own.on_loss is not None and isinstance(ended := own.on_loss(TAKEN_OVER), Future):
                await asyncio.wrap_future(ended)
        found = await asyncio.wrap_future(journal.ask(identity, takes_over=True))
    except JournalDownError as error:
        raise ApiError(503, str(error), code="journal_down") from error
    asked, committed, cursors = _resumed(found, told)
    assert found is not None, "it was found"
    return Resumed(journal.own(identity, found), asked, committed, cursors)


def _resumed(found: Found | None, told: int | list[int]) -> tuple[AskedRequest, list[ChoiceResult], list[int]]:
    if found is None or not found.records:
        raise ApiError(404, "no such request is kept: expired, or of another caller", code="request_not_found")
    asked = AskedRequest.read(found.records[0])
    committed = committed_in(found.records[1:], sum(asked.choices))
    cursors = [told] * len(committed) if isinstance(told, int) else told
    if len(cursors) != len(committed):
        raise ApiError(400, f"`from_token` has to be one number, or {len(committed)}", param="from_token")
    for result, cursor in zip(committed, cursors, strict=True):
        if cursor > len(result.token_ids) + (result.finish is not None):
            raise ApiError(400, f"`from_token` is past the {len(result.token_ids)} tokens kept", param="from_token")
    return asked, committed, cursors


def _begun(asking: Asking, requests: Sequence[GenerationRequest], card: ModelCard) -> Resumed:
    asked = AskedRequest(
        *(asking.path, asking.body, asking.accept, asking.stem),
        prompts=tuple(np.asarray(request.prompt_ids, np.int32).tobytes() for request in requests),
        seeds=tuple(request.sampling.seed or 0 for request in requests),
        choices=tuple(request.sampling.n for request in requests),
        weight_version=card.weight_version,
        adapters=tuple(request.adapter for request in requests),
    )
    return Resumed(asking.journal.open(asking.identity, asked), asked, [], [0] * sum(asked.choices))


def _seeded(request: GenerationRequest) -> GenerationRequest:
    """Return the request with a fixed seed, drawn here if it has none."""
    seed = secrets.randbits(32) if request.sampling.seed is None else request.sampling.seed
    return replace(request, sampling=replace(request.sampling, seed=seed))


def _as_asked(request: GenerationRequest, prompt: bytes, seed: int, *, adapter: str) -> GenerationRequest:
    sampling = replace(request.sampling, seed=seed)
    return replace(request, prompt_ids=np.frombuffer(prompt, np.int32), sampling=sampling, adapter=adapter)


def _renumbered(results: Sequence[ChoiceResult]) -> list[ChoiceResult]:
    return [replace(result, choice_index=index) for index, result in enumerate(results)]


def _cursor_in(header: str) -> list[int]:
    parts = header.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and len(part) < 10 for part in parts):
        raise ApiError(400, "`Last-Event-ID` has to be the id of an event", param="Last-Event-ID")
    return list(map(int, parts))


def _new_asking(scope: Scope, path: str, journal: JournalClient) -> Asking:
    headers: dict[bytes, Any] = dict(scope["headers"])

    def header(name: bytes) -> str:
        return headers.get(name, b"").decode("latin-1")

    name = "" if header(UNNAMED.encode()) else header(b"x-request-id")
    names = (name, header(b"accept"), header(b"last-event-id"))
    return Asking(journal, path, caller_of(scope), *names)
