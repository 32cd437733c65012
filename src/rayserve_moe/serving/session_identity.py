"""Identity of the session that a request belongs to: an agent's turns, or the turns of a rollout.

Clients name sessions in headers or in the body; the first match counts. A session affects the queue and the cache, and
never an answer. `user` and `safety_identifier` name a person, who may have many sessions, and are not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Scope

from rayserve_moe.serving.journalling import caller_of

HEADERS = (
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "x-session-id",
    "session-id",
    "session_id",
    "x-dynamo-session-id",
    "x-session-token",
    "x-smg-routing-key",
)
"""Headers by precedence: of llm-d, Claude Code, OpenCode, vLLM and SkyRL, Codex, Dynamo, slime and Miles."""
FIELDS = (
    ("session_id",),
    ("vllm_xargs", "session_id"),
    ("prompt_cache_key",),
    ("agent_hint", "session_id"),
    ("nvext", "agent_context", "session_id"),
)
"""Paths in bodies by precedence, after all headers."""
_KEY_BYTES = 16
_SCOPE_KEY = "rayserve_moe.session"


def named_in_body(fields: Mapping[str, Any]) -> str:
    """Return the session that a parsed body names; empty for none.

    Tinker's bodies name no session: sampler and order stand for it.
    """
    names = (_text_at(fields, path) for path in FIELDS)
    if name := next(filter(None, names), ""):
        return name
    sampler, order = fields.get("sampling_session_id"), fields.get("seq_id")
    return f"{sampler}:{order}" if isinstance(sampler, str) and isinstance(order, int) else ""


def record_name(scope: Scope, name: str) -> None:
    """Record the session that the body of an HTTP request names."""
    scope[_SCOPE_KEY] = name


def session_name(scope: Scope, *, first_headers: Iterable[str] = ()) -> str:
    """Return the name of an HTTP request's session, by `first_headers`, HEADERS, then the body; empty for none."""
    headers = dict(scope["headers"])
    values = (headers.get(name.lower().encode("latin-1"), b"") for name in (*first_headers, *HEADERS))
    return next(filter(None, (_decoded(value).strip() for value in values)), "") or scope.get(_SCOPE_KEY, "")


def session_key(name: str, *, scope: Scope, cache_salt: str) -> str | None:
    """Return the key of a named session, of fixed length; None without a name.

    It depends on the API key and the cache salt: callers with another key or salt cannot name the session.
    """
    if not name:
        return None
    parts = (caller_of(scope), cache_salt, name)
    lengths_and_parts = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(lengths_and_parts.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).hexdigest()


def _decoded(value: bytes) -> str:
    """Return a header as UTF-8, as bodies are, or else as Latin-1."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _text_at(fields: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = fields
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
