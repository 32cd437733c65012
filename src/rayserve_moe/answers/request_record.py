"""Times and counts of an HTTP request in the engine, for its log line and its spans."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass, field

from rayserve_moe.scheduling.sequence import Sequence

RUNNING = "abort"
"""Finish reason of a choice whose client has left before its end is known."""


@dataclass
class RequestRecord:
    """Choices that an HTTP request has in the engine; they are read once its answer has ended."""

    received_at: float
    """Monotonic time of the request."""
    choices: list[Sequence] = field(default_factory=list)

    @property
    def time_to_first_token_s(self) -> float:
        """Return the seconds from the request to the first token of any choice; NaN without tokens."""
        times = [choice.times.first_token_at for choice in self.choices]
        return min((at for at in times if not math.isnan(at)), default=math.nan) - self.received_at

    @property
    def queue_s(self) -> float:
        """Return the longest time that a choice waited for a row; NaN if none got one."""
        times = [choice.times for choice in self.choices]
        return max((each.started_at - each.accepted_at for each in times if each.started_at), default=math.nan)

    @property
    def tokens(self) -> dict[str, int]:
        """Return the numbers of prompt, cached and output tokens; a prompt counts once, whatever `n` is."""
        prompts = [choice for choice in self.choices if choice.choice_index == 0]
        return {
            "prompt_tokens": sum(choice.num_prompt_tokens for choice in prompts),
            "cached_tokens": sum(choice.cache.num_cached for choice in prompts),
            "output_tokens": sum(choice.num_outputs for choice in self.choices),
        }

    @property
    def finish_reasons(self) -> list[str]:
        """Return the finish reasons of the choices, each once, in order."""
        kinds = [RUNNING if choice.finish is None else choice.finish.kind for choice in self.choices]
        return list(dict.fromkeys(kinds))


RECORD: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
"""Record of the current HTTP request; None if nothing reads one."""
