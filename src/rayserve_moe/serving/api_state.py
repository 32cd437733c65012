"""What the routes work with: one explicit object, made once per application."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine.engine_loop import EngineLoop
from rayserve_moe.engine.expert_balancing import ExpertBalancing
from rayserve_moe.requests import ModelCard
from rayserve_moe.serving.ignored_fields import IgnoredFields
from rayserve_moe.serving.traffic import Traffic
from rayserve_moe.text.tokenizer import Tokenizer

_ENCODING_THREADS = 2


def _tokenizing_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")


def _encoding_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=_ENCODING_THREADS, thread_name_prefix="encode")


@dataclass(frozen=True)
class ApiState:
    """The engine and what surrounds it. Prompts are tokenized in one thread: long ones must not stop the event loop,
    and the tokenizer is not safe to share. Large answers and routing to replay have threads of their own.
    `balancing` is there where experts move."""

    loop: EngineLoop
    tokenizer: Tokenizer
    server: ServerSettings = field(default_factory=ServerSettings)
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    tokenizing: ThreadPoolExecutor = field(default_factory=_tokenizing_thread)
    encoding: ThreadPoolExecutor = field(default_factory=_encoding_threads)
    started_at: float = field(default_factory=time.time)
    balancing: ExpertBalancing | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def card(self) -> ModelCard:
        """The model being served, as it is now."""
        return self.loop.card
