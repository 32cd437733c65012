"""langchain-openai: chats and responses, whole and streamed, with token counts."""

from __future__ import annotations

import pytest

from tests.clients.conftest import client_package

langchain_openai = client_package("langchain_openai")


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(url: str, request: pytest.FixtureRequest):
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="EMPTY",
        model="m",
        max_tokens=8,
        temperature=0,
        max_retries=0,
        stream_usage=True,
        use_responses_api=request.param,
    )


def test_an_answer_counts_its_tokens(model) -> None:
    answer = model.invoke([("system", "Be brief."), ("human", "Hello")])
    assert 0 < answer.usage_metadata["output_tokens"] <= 8


def test_a_stream_is_the_whole_answer(model) -> None:
    whole = model.invoke("Hello")
    chunks = list(model.stream("Hello"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.text == whole.text and total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
