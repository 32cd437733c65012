"""What the routes work with: one explicit object, made once per application."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial

from starlette.requests import Request

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.fleet.journal_client import JournalClient
from rayserve_moe.fleet.member import lost_sentence
from rayserve_moe.requests.records import ModelCard
from rayserve_moe.serving.errors import ApiError, path_of
from rayserve_moe.serving.fleet import Fleet
from rayserve_moe.serving.kept_paths import KEPT_PATHS
from rayserve_moe.serving.middleware.admission import Admission
from rayserve_moe.serving.middleware.traffic import Traffic
from rayserve_moe.serving.response_store import ResponseStore
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tokenizer import Tokenizer

_ENCODING_THREADS = partial(ThreadPoolExecutor, max_workers=2, thread_name_prefix="encode")


@dataclass(frozen=True)
class ApiState:
    """The engine and what the HTTP edge adds. `encoding` are threads that serialize long answers and decode routing.

    `fleet` are all replicas of the application; None where this engine has no others beside it. `journal` keeps
    requests that are to outlive this process; None where none are.
    """

    loop: EngineLoop
    tokenizer: Tokenizer
    server: ServerSettings = field(default_factory=ServerSettings)
    encoding: ThreadPoolExecutor = field(default_factory=_ENCODING_THREADS)
    started_at: float = field(default_factory=time.time)
    responses: ResponseStore = field(default_factory=ResponseStore)
    traffic: Traffic = field(default_factory=Traffic)
    fleet: Fleet | None = None
    journal: JournalClient | None = None
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "admission", Admission(self.server.max_intake_bytes))

    @cached_property
    def chat_output(self) -> ChatOutput:
        """How answers of chats are split. ValueError where the tokenizer has no usable template for it."""
        return ChatOutput(
            self.tokenizer,
            tool_call_parser=self.server.tool_call_parser,
            reasoning_parser=self.server.reasoning_parser,
        )

    @property
    def awaited_weights(self) -> str:
        """The version that has to be pushed before anything is answered; empty where nothing is awaited."""
        return "" if self.fleet is None else self.fleet.member.awaited

    async def refuse_requests(self, request: Request) -> None:
        """Raise a 503 where nothing is to be generated, and EngineBusyError before a body is read in vain.

        What goes on with another request may need no place. A single dependency, since each costs every request.
        """
        await self.traffic.refuse_when_draining()
        await self.refuse_without_weights()
        if path_of(request.scope) in KEPT_PATHS and b"last-event-id" not in dict(request.scope["headers"]):
            self.loop.capacity.check()

    async def refuse_without_weights(self) -> None:
        """Raise a 503 while weights are awaited. A coroutine, since FastAPI calls plain functions on a thread."""
        if version := self.awaited_weights:
            raise ApiError(503, lost_sentence(version), code="weights_lost")

    @property
    def card(self) -> ModelCard:
        """The model being served; weight updates replace it."""
        return self.loop.card
