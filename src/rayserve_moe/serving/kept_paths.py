"""Paths of requests for generation that a journal can keep, and that a full server refuses before it reads them."""

from __future__ import annotations

KEPT_PATHS = frozenset(
    {
        *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
        *("/inference/v1/generate", "/skyrl/v1/generate"),
    }
)
