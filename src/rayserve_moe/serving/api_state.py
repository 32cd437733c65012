"""Shared state of the routes: an explicit object per application."""

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
from rayserve_moe.observability.spans import SpanExporter, exporter_from_environment
from rayserve_moe.requests.records import ModelCard
from rayserve_moe.serving.control.membership import Membership
from rayserve_moe.serving.errors import ApiError, path_of
from rayserve_moe.serving.future_store import FutureStore
from rayserve_moe.serving.kept_paths import KEPT_PATHS
from rayserve_moe.serving.middleware.admission import Admission
from rayserve_moe.serving.middleware.traffic import Traffic
from rayserve_moe.serving.response_store import ResponseStore
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tokenizer import Tokenizer

_ENCODING_THREADS = partial(ThreadPoolExecutor, max_workers=2, thread_name_prefix="encode")


@dataclass(frozen=True)
class ApiState:
    """Engine with the state of the HTTP front end."""

    loop: EngineLoop
    tokenizer: Tokenizer
    server: ServerSettings = field(default_factory=ServerSettings)
    encoding: ThreadPoolExecutor = field(default_factory=_ENCODING_THREADS)
    """Threads that serialize long answers and decode routing."""
    started_at: float = field(default_factory=time.time)
    responses: ResponseStore = field(default_factory=ResponseStore)
    futures: FutureStore = field(default_factory=FutureStore)
    traffic: Traffic = field(default_factory=Traffic)
    membership: Membership | None = None
    """This replica among all of the application; None for a standalone engine."""
    journal: JournalClient | None = None
    """Journal of requests that outlive this process; None without a journal."""
    weight_roots: tuple[str, ...] = ()
    """Directories and URLs below which weights may be read; empty permits every directory."""
    exporter: SpanExporter | None = field(default_factory=exporter_from_environment)
    """Exporter of spans; None unless the environment names an endpoint."""
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "admission", Admission(self.server.max_intake_bytes))

    @cached_property
    def chat_output(self) -> ChatOutput:
        """Return the splitter factory of chat answers.

        Raises: ValueError if the tokenizer has no usable template for it.
        """
        return ChatOutput(
            self.tokenizer,
            tool_call_parser=self.server.tool_call_parser,
            reasoning_parser=self.server.reasoning_parser,
        )

    @property
    def awaited_weights(self) -> str:
        """Return the version that must be sent before any answer; empty if none is awaited."""
        return "" if self.membership is None else self.membership.member.awaited

    async def refuse_requests(self, request: Request) -> None:
        """Reject a generation request before its body is read.

        A request that resumes may need no capacity, so it skips that check. It is a single dependency because each one
        adds cost to every request.

        Raises: ApiError 503 while draining or without weights; EngineBusyError if the engine has no capacity.
        """
        await self.traffic.refuse_when_draining()
        await self.refuse_without_weights()
        if path_of(request.scope) in KEPT_PATHS and b"last-event-id" not in dict(request.scope["headers"]):
            self.loop.capacity.check()

    async def refuse_without_weights(self) -> None:
        """Raise a 503 while weights are awaited. It is a coroutine because FastAPI runs plain functions on a thread."""
        if version := self.awaited_weights:
            raise ApiError(503, lost_sentence(version), code="weights_lost")

    @property
    def card(self) -> ModelCard:
        """Return the served model; weight updates replace it."""
        return self.loop.card
