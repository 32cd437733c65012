"""openai's own client: completions, chats and streams, with routing in the fields that it passes through."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest

from rayserve_moe import Engine
from tests.clients.conftest import client_package, decode_int32, uncached_rows

client_package("strands_sglang")

ROUTED = {"return_routed_experts": True, "ignore_eos": True}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_completions_of_token_ids(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(
        model="m", prompt=[10, 11, 12], max_tokens=5, logprobs=1, n=2, seed=1, extra_body={**ROUTED}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None and len(choice.logprobs.token_logprobs) == 5
        assert all(len(top) >= 1 for top in choice.logprobs.top_logprobs)
        rows = decode_int32(choice.model_extra["meta_info"]["routed_experts"])
        assert len(rows) == 3 + 5 - 1
        assert choice.model_extra["sgl_ext"]["routed_experts"] == choice.model_extra["meta_info"]["routed_experts"]
        np.testing.assert_array_equal(rows[:3], uncached_rows(engine, [10, 11, 12, 13]))


def test_a_chat_with_likeliest_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Hello"}],
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={**ROUTED},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for position in choice.logprobs.content:
        values = [top.logprob for top in position.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert position.logprob == pytest.approx(values[0], abs=1e-6), "greedy takes the likeliest"
    assert answer.usage is not None
    assert len(decode_int32(choice.model_extra["meta_info"]["routed_experts"])) == answer.usage.total_tokens - 1


def test_a_stream_brings_routing_with_its_last_chunk(client: openai.OpenAI) -> None:
    arguments = {"model": "m", "prompt": [20, 21, 22, 23], "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**arguments, extra_body={**ROUTED})
    chunks = list(
        client.completions.create(
            **arguments, extra_body={**ROUTED}, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    with_routing = [choice for choice in choices if (choice.model_extra or {}).get("meta_info")]
    assert [choice.finish_reason for choice in with_routing] == ["length"]
    assert with_routing[0].model_extra["meta_info"] == whole.choices[0].model_extra["meta_info"] | {
        "routed_experts_info": with_routing[0].model_extra["meta_info"]["routed_experts_info"]
    }


def test_responses_whole_streamed_and_continued(client: openai.OpenAI) -> None:
    asked = {"model": "m", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert final.output_text == text == whole.output_text and final.usage is not None
    after = client.responses.create(**asked | {"input": "And?"}, previous_response_id=whole.id)
    assert after.usage is not None and after.usage.input_tokens > final.usage.input_tokens
