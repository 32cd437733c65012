"""JSON of answers: what is no number raises, text may say anything, and an event is one line with the right name."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.serving.api.answers.streaming import EventStream, event_line, to_json
from rayserve_moe.serving.errors import ApiError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES))
def test_what_is_read_is_what_was_written(answer: dict) -> None:
    assert json.loads(to_json(answer)) == answer


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_float_that_is_not_finite_raises(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"text": "NaN", "logprobs": [[0.5, value]]})


def test_text_may_name_what_a_number_may_not_be() -> None:
    answer = {"text": "NaN, Infinity and -Infinity"}
    assert to_json(answer) == b'{"text":"NaN, Infinity and -Infinity"}'


def test_no_character_of_all_ends_the_line_of_an_event() -> None:
    every = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    (line, end) = event_line(to_json({every: every})).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == {every: every} and not end


@pytest.mark.parametrize("status", [409, 422, 503])
def test_an_error_ends_a_stream_of_typed_events_as_one_that_clients_know(status: int) -> None:
    error = ApiError(status, "no more", code="lost")

    async def events():
        yield to_json({"type": "ping"})
        raise error

    async def received() -> list[str]:
        stream = EventStream(events(), lambda: None, has_types=True)
        return [bytes(line).decode() async for line in stream.body_iterator]

    first, last = asyncio.run(received())
    assert first == 'event: ping\ndata: {"type":"ping"}\n\n'
    name, data = last.strip().split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert name == "event: error"
    assert told == {"type": "error", "message": "no more", "param": None, "code": "lost", **error.body()}
