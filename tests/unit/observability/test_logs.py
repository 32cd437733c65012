"""Every line of the log says when, how grave, about which request and what, in the form that was chosen."""

from __future__ import annotations

import io
import json
import logging
from datetime import datetime
from logging.handlers import MemoryHandler

import pytest

from rayserve_moe.config.settings import LoggingSettings
from rayserve_moe.observability.logs import MAX_REQUEST_ID_LENGTH, REQUEST_ID, request_id_from, use_logging

log = logging.getLogger("rayserve_moe.tests")


@pytest.fixture
def written(monkeypatch):
    root = logging.getLogger("rayserve_moe")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    return io.StringIO()


@pytest.mark.parametrize("buffered", [False, True])
def test_a_line_of_json_has_its_parts(written, buffered):
    handler = logging.StreamHandler(written)
    use_logging(LoggingSettings(format="json"), handlers=[MemoryHandler(9, target=handler) if buffered else handler])
    token = REQUEST_ID.set("abc")
    log.warning("two\nlines of %s", "text")
    REQUEST_ID.reset(token)
    try:
        raise ValueError("seen")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert first | {"time": ""} == {
        "time": "",
        "level": "WARNING",
        "logger": "rayserve_moe.tests",
        "message": "two\nlines of text",
        "request_id": "abc",
    }
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert "request_id" not in second and "ValueError: seen" in second["trace"]


def test_a_line_of_text_has_them_too(written):
    use_logging(LoggingSettings(level="info"), handlers=[logging.StreamHandler(written)])
    token = REQUEST_ID.set("abc")
    log.info("within")
    REQUEST_ID.reset(token)
    log.info("outside")
    log.debug("too much")
    within, outside = written.getvalue().splitlines()
    assert within.endswith("Z INFO rayserve_moe.tests [abc] within")
    assert outside.endswith("Z INFO rayserve_moe.tests outside")


def test_a_level_above_info_leaves_info_out(written):
    use_logging(LoggingSettings(level="error"), handlers=[logging.StreamHandler(written)])
    log.warning("not told")
    assert not written.getvalue()


def test_an_id_from_outside_cannot_forge_a_line():
    assert request_id_from(b"a\n2026 ERROR\x1b[31m \xff") == "a?2026?ERROR?[31m??"
    assert len(request_id_from(b"x" * 9999)) == MAX_REQUEST_ID_LENGTH
