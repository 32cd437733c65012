"""What the routes work with: one explicit object, made once per application."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine.engine_loop import EngineLoop
from rayserve_moe.engine.eplb_control import EplbControl
from rayserve_moe.requests import ModelCard
from rayserve_moe.serving.middleware.admission import Intake
from rayserve_moe.serving.middleware.ignored_fields import IgnoredFields
from rayserve_moe.serving.middleware.traffic import Traffic
from rayserve_moe.text.tokenizer import Tokenizer

_ENCODING_THREADS = 2


def _encoding_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=_ENCODING_THREADS, thread_name_prefix="encode")


@dataclass(frozen=True)
class ApiState:
    """The engine and what surrounds it. What is long is done on threads: for requests those of `intake`, for answers
    and routing to replay those of `encoding`. `balancing` is there where experts move."""

    loop: EngineLoop
    tokenizer: Tokenizer
    server: ServerSettings = field(default_factory=ServerSettings)
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    encoding: ThreadPoolExecutor = field(default_factory=_encoding_threads)
    started_at: float = field(default_factory=time.time)
    balancing: EplbControl | None = None
    traffic: Traffic = field(default_factory=Traffic)
    intake: Intake = field(init=False)
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        object.__setattr__(self, "intake", Intake(self.server.max_intake_bytes))

    @property
    def card(self) -> ModelCard:
        """The model being served, as it is now."""
        return self.loop.card
