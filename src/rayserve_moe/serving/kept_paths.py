"""Paths of generation requests, which a journal can keep and a full server rejects before it reads the body."""

from __future__ import annotations

KEPT_PATHS = frozenset(
    {
        *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
        *("/inference/v1/generate", "/skyrl/v1/generate"),
    }
)
