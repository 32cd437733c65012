"""The order of what a stream sends, route by route: every stream is a sentence of its route's grammar.

Each event becomes a letter; a regular expression states which sentences there are.
"""

from __future__ import annotations

import itertools
import re

import pytest

from tests.http.test_messages_and_responses import ANTHROPIC
from tests.http.test_messages_and_responses import ASKED as RESPONSE
from tests.http.test_tools import ASKED, on
from tests.support.models.scripted import SCRIPTS
from tests.support.serving.dialects import typed_events
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, TOKENS, stream

USAGE = {"stream_options": {"include_usage": True}}
GREEDY = {"temperature": 0, "ignore_eos": True}


def sentence(events, letter):
    return "".join(map(letter, events))


def of_choice(event, *, text):
    """`t` for more of a choice, `f` for its end, `u` for usage after all of them."""
    if not event["choices"]:
        assert event["usage"]["total_tokens"] > 0
        return "u"
    (choice,) = event["choices"]
    assert event.get("usage") is None and text in choice
    return "f" if choice["finish_reason"] else "t"


@pytest.mark.parametrize("usage", [{}, USAGE])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"echo": True}, {"return_token_ids": True}])
def test_completions(http, usage, extra):
    """Text, the end of the choice in its last chunk, usage where it is asked for; `stream` checks the [DONE]."""
    events = stream(http, COMPLETIONS, prompt=[5, 6], max_tokens=6, **GREEDY, **extra, **usage)
    assert re.fullmatch("t*fu" if usage else "t*f", sentence(events, lambda event: of_choice(event, text="text")))
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert all("stop_reason" in choice for choice in choices)
    if "return_token_ids" in extra:
        assert [bool(choice.get("prompt_token_ids")) for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert sum(len(choice["token_ids"]) for choice in choices) == 6


def test_completions_of_several_choices_end_once_each(http):
    events = stream(http, COMPLETIONS, prompt=[[5], [6]], n=2, max_tokens=4, seed=1, ignore_eos=True, **USAGE)
    assert of_choice(events[-1], text="text") == "u"
    by_index = {}
    for event in events[:-1]:
        by_index.setdefault(event["choices"][0]["index"], []).append(event)
    assert sorted(by_index) == [0, 1, 2, 3]
    for each in by_index.values():
        assert re.fullmatch("t*f", sentence(each, lambda event: of_choice(event, text="text")))


@pytest.mark.parametrize("usage", [{}, USAGE])
@pytest.mark.parametrize("script", SCRIPTS)
def test_chats(scripted_http, script, usage):
    """The role first, then reasoning, content and calls: name and id, then arguments; the end in the last delta."""
    events = stream(scripted_http, CHAT, **ASKED, **on(script), **usage, return_token_ids=True)

    def letter(event):
        if (kind := of_choice(event, text="delta")) == "u":
            return kind
        delta = event["choices"][0]["delta"]
        if delta.get("role"):
            assert delta == {"role": "assistant", "content": ""} and event["prompt_token_ids"]
            return "R"
        assert not event.get("prompt_token_ids")
        calls = delta.get("tool_calls")
        said = "n" if calls and "id" in calls[0] else "a" if calls else "s" if delta else ""
        return said + ("f" if kind == "f" else "")

    assert re.fullmatch("Rs*(na|s)*f" + "u" * bool(usage), sentence(events, letter))
    assert "stop_reason" in [event for event in events if event["choices"]][-1]["choices"][0]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_native_route_repeats_all_that_came_before(http, size):
    """Text and ids only grow; the end, and what is known of the whole, come with the last event."""
    sampling = {"max_new_tokens": 7, **GREEDY, "stream_interval": size}
    events = stream(http, GENERATE, input_ids=[5, 6], sampling_params=sampling, return_logprob=True)
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    ends = [event["meta_info"]["finish_reason"] for event in events]
    assert ends[:-1] == [None] * (len(ends) - 1) and ends[-1] == {"type": "length", "length": 7}
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == len(events[-1]["output_ids"]) == 7


@pytest.mark.parametrize("usage", [{}, USAGE])
def test_the_token_route_sends_what_is_new(http, usage):
    sampling = {"max_tokens": 6, **GREEDY}
    events = stream(http, TOKENS, token_ids=[5, 6], sampling_params=sampling, return_token_ids=True, **usage)
    assert re.fullmatch("t*fu" if usage else "t*f", sentence(events, lambda event: of_choice(event, text="token_ids")))
    assert [bool(event.get("prompt_token_ids")) for event in events] == [True] + [False] * (len(events) - 1)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert sum(len(choice["token_ids"]) for choice in choices) == 6
    assert [choice.get("routed_experts") is not None for choice in choices[:-1]] == [False] * (len(choices) - 1)
    assert choices[-1]["routed_experts"]


LETTERS = {
    "created": "C",
    "in_progress": "P",
    "output_item.added": "<",
    "output_item.done": ">",
    "content_part.added": "[",
    "content_part.done": "]",
    "reasoning_text.delta": "r",
    "reasoning_text.done": "R",
    "output_text.delta": "t",
    "output_text.done": "T",
    "function_call_arguments.delta": "a",
    "function_call_arguments.done": "A",
    "completed": "E",
    "incomplete": "E",
}
ITEMS = "(<\\[?r+R\\]?>|<\\[t+T\\]>|<a+A>)"


@pytest.mark.parametrize("limit", [1, 4, 30])
@pytest.mark.parametrize("script", SCRIPTS)
def test_responses(scripted_http, script, limit):
    """Items one after the other, each opened, filled and closed; numbers rise by one; no [DONE] follows."""
    events = typed_events(scripted_http, RESPONSES, **RESPONSE | {"max_output_tokens": limit}, **on(script))
    told = sentence(events, lambda event: LETTERS[event["type"].removeprefix("response.")])
    assert re.fullmatch(f"CP{ITEMS}*E", told), told
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        if event["type"].startswith("response.output_text"):
            assert isinstance(event["logprobs"], list) and {"item_id", "output_index", "content_index"} <= set(event)


@pytest.mark.parametrize("limit", [1, 4, 30])
@pytest.mark.parametrize("script", SCRIPTS)
def test_messages(scripted_http, script, limit):
    """Blocks one after the other; thinking is signed before its block ends; the reason to stop comes last but one."""
    events = typed_events(scripted_http, MESSAGES, **ANTHROPIC | {"max_tokens": limit}, **on(script))
    kinds = {"text_delta": "t", "thinking_delta": "k", "signature_delta": "s", "input_json_delta": "j"}
    names = {"message_start": "M", "content_block_start": "<", "content_block_stop": ">", "message_delta": "d"}
    told = sentence(
        [event for event in events if event["type"] != "ping"],
        lambda event: (
            kinds[event["delta"]["type"]] if event["type"] == "content_block_delta" else names.get(event["type"], "E")
        ),
    )
    assert re.fullmatch("M(<(k*s|t+|j*)>)*dE", told), told
    assert events[0]["message"]["type"] == "message" and events[0]["message"]["role"] == "assistant"
    assert events[-1]["type"] == "message_stop" and events[-2]["delta"]["stop_reason"]
