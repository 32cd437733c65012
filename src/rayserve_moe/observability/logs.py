"""The common format of log lines: time, level, request, logger, message."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import MemoryHandler

from rayserve_moe.config.settings import LoggingSettings
from rayserve_moe.observability.progress import ConsoleWarnings

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current HTTP request, empty outside of a request."""
MAX_REQUEST_ID_LENGTH = 128
_ROOT = "rayserve_moe"


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO rayserve_moe.engine [request id] message`, with a trace below."""

    def __init__(self) -> None:
        super().__init__("%(at)s %(levelname)s %(name)s %(about)s%(message)s%(told)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id(record)
        record.at, record.about = _time(record), f"[{request_id}] " if request_id else ""
        record.told = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return super().format(record)


class JsonLines(logging.Formatter):
    """A JSON object per line: `time`, `level`, `logger`, `message`, and `request_id`, fields and `trace` if present."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        line |= _fields(record)
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


LINES = {"text": TextLines, "json": JsonLines}


def use_logging(settings: LoggingSettings, *, handlers: Sequence[logging.Handler] = ()) -> None:
    """Write the package's log lines of this process to `handlers`, by default to standard error.

    Warnings and errors also go to the console of the start command. Lines of other loggers through these handlers get
    the same format. Buffering handlers are bypassed, because the package writes few lines.
    """
    writers = [handler.target if isinstance(handler, MemoryHandler) else handler for handler in handlers]
    chosen = [writer for writer in writers if writer is not None] or [logging.StreamHandler()]
    for writer in chosen:
        writer.setFormatter(LINES[settings.format]())
        writer.addFilter(_add_request_id)
    log = logging.getLogger(_ROOT)
    log.handlers[:] = [*chosen, ConsoleWarnings()]
    log.setLevel(settings.level.upper())


def request_id_from(header: bytes) -> str:
    """Return the request id that a client or proxy sent: printable ASCII, cut to a maximum length."""
    text = header[:MAX_REQUEST_ID_LENGTH].decode("ascii", "replace")
    return "".join(character if " " < character <= "~" else "?" for character in text)


def _add_request_id(record: logging.LogRecord) -> bool:
    """Add the request's id to a line of the package; Serve's own lines have an id already, or none."""
    if record.name.startswith(_ROOT):
        record.request_id = REQUEST_ID.get()
    return True


def _request_id(record: logging.LogRecord) -> str:
    return getattr(record, "request_id", "") or ""


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the named values that a line brings beside its message."""
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
