"""Hints of clients about cached pages, in the bodies and headers of all dialects, as one record (`Retention`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.types import Scope

from rayserve_moe.requests.fields import INT32_MAX, number, whole
from rayserve_moe.requests.retention import NO_RETENTION, Retention
from rayserve_moe.serving.errors import ApiError

FINAL_HEADER = b"x-dynamo-session-final"
"""Header of the last request of a session, with the value `true`."""
DEFAULT_TTL_S = 300.0
"""Anthropic's TTL for a `cache_control` without one."""
DEFAULT_PRIORITY = 35
"""TensorRT-LLM's priority of pages without hints; only pages above it are protected."""
KEPT_S = {"24h": 86_400.0, "in_memory": 0.0, "in-memory": 0.0}
"""Seconds by value of OpenAI's `prompt_cache_retention`."""
MAX_RANGES = 16
_SECONDS = number(0, 31_536_000)
"""Up to a year; the setting `max_protected_s` limits the effect."""
_MILLISECONDS = whole(0, 31_536_000_000)
_POSITION, _PRIORITY = whole(0, INT32_MAX), whole(0, 100)
_TTL = re.compile(r"(\d{1,9})([smh])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_SCOPE_KEY = "rayserve_moe.retention"


def retention_in_body(fields: Mapping[str, Any]) -> Retention:
    """Return the hints of a parsed body. Anthropic's breakpoints protect the whole prompt for the longest TTL.

    Raises: ApiError 400 for a hint that cannot be read.
    """
    seconds = max(map(_ttl_s, _cache_controls(fields)), default=0.0)
    if (kept := fields.get("prompt_cache_retention")) is not None:
        if not isinstance(kept, str) or kept not in KEPT_S:
            raise _fault("prompt_cache_retention", "should be in_memory or 24h")
        seconds = max(seconds, KEPT_S[kept])
    whole_prompt = ((INT32_MAX, seconds),) if seconds else ()
    protected = (*whole_prompt, *_ranges(fields.get("kv_cache_retention_config")))
    return Retention(protected) if protected else NO_RETENTION


def record_retention(scope: Scope, retention: Retention) -> None:
    """Record the hints in the body of an HTTP request."""
    scope[_SCOPE_KEY] = retention


def retention_of(scope: Scope) -> Retention:
    """Return the hints of an HTTP request, in its body and headers."""
    retention = scope.get(_SCOPE_KEY, NO_RETENTION)
    ends_session = dict(scope["headers"]).get(FINAL_HEADER, b"").strip().lower() == b"true"
    return retention._replace(ends_session=True) if ends_session else retention


def _cache_controls(fields: Mapping[str, Any]) -> Iterator[Any]:
    """Yield each `cache_control` of a body, its system prompt, tools, messages, their parts, and extensions."""
    objects = [fields, *(fields.get(name) for name in ("nvext", "agent_hint"))]
    for name in ("system", "tools", "messages"):
        listed = fields.get(name)
        for item in listed if isinstance(listed, list) else ():
            content = item.get("content") if isinstance(item, dict) else None
            objects += [item, *(content if isinstance(content, list) else ())]
    for each in objects:
        if isinstance(each, dict) and (control := each.get("cache_control")) is not None:
            yield control


def _ttl_s(control: Any) -> float:
    """Return the TTL of a `cache_control` in seconds: text such as `5m` or `1h`, or a number of seconds."""
    ttl = control.get("ttl") if isinstance(control, dict) else ""
    if ttl is None:
        return DEFAULT_TTL_S
    if isinstance(ttl, str) and (found := _TTL.fullmatch(ttl)):
        ttl = int(found[1]) * _UNIT_S[found[2]]
    try:
        return float(_SECONDS.read(ttl))
    except ValueError:
        raise _fault("cache_control", "should be an object whose `ttl` is such as 5m or 1h, at most a year") from None


def _ranges(config: Any) -> Iterator[tuple[int, float]]:
    """Yield the protected ranges of TensorRT-LLM's configuration as (end, seconds); each begins at the first token."""
    if config is None:
        return
    param = "kv_cache_retention_config"
    try:
        listed = config.get("token_range_retention_configs") or []
        if len(listed) > MAX_RANGES:
            raise _fault(param, f"should have at most {MAX_RANGES} ranges")
        answer = {"priority": config.get("decode_retention_priority"), "duration_ms": config.get("decode_duration_ms")}
        for each in (*listed, answer):
            end, priority, duration = (each.get(name) for name in ("token_end", "priority", "duration_ms"))
            _POSITION.read(each.get("token_start") or 0)
            end = INT32_MAX if end is None else _POSITION.read(end)
            seconds = _SECONDS.schema["maximum"] if duration is None else _MILLISECONDS.read(duration) / 1e3
            if _PRIORITY.read(DEFAULT_PRIORITY if priority is None else priority) > DEFAULT_PRIORITY and seconds:
                yield end, seconds
    except (AttributeError, TypeError, ValueError):
        raise _fault(
            param,
            "should be an object of `token_range_retention_configs` (`token_start`, `token_end`, `priority` 0 to 100, "
            "`duration_ms` up to a year), `decode_retention_priority` and `decode_duration_ms`",
        ) from None


def _fault(param: str, sentence: str) -> ApiError:
    return ApiError(400, f"`{param}` {sentence}", param=param)
