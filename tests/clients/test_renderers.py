"""renderers, the client of vLLM's token-in-token-out dialect under prime-rl: strict log-probs, packed routing."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import openai
import pytest

from rayserve_moe import Engine
from tests.clients.conftest import NUM_LAYERS, TOP_K, client_package, logprobs_of, uncached_rows

renderers = client_package("renderers")
generate = client_package("renderers.client").generate

SAMPLING = {"max_tokens": 8, "temperature": 1.0, "seed": 4}
"""The renderer adds the stop ids of its tokenizer, so that a turn may be shorter."""


def test_two_turns_with_a_start_offset(url: str, engine: Engine) -> None:
    first, second = asyncio.run(play(url, engine))
    for turn, start in ((first, 0), (second, len(first["prompt_ids"]) + len(first["completion_ids"]) - 1)):
        routed, num_new = turn["routed_experts"], len(turn["completion_ids"])
        assert routed["shape"] == [len(turn["prompt_ids"]) + num_new - 1 - start, NUM_LAYERS, TOP_K]
        assert (routed["start"], routed["dtype"]) == (start, "uint8")
        assert len(turn["completion_logprobs"]) == num_new
        stopped = turn["completion_ids"][-1] in engine.card.eos_token_ids
        assert turn["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or num_new == SAMPLING["max_tokens"]
    token_ids = second["prompt_ids"] + second["completion_ids"]
    rows = np.concatenate([decode(first["routed_experts"]), decode(second["routed_experts"])])
    np.testing.assert_array_equal(rows, uncached_rows(engine, token_ids))
    expected = logprobs_of(engine, token_ids)[len(second["prompt_ids"]) :]
    np.testing.assert_allclose(second["completion_logprobs"], expected, rtol=0, atol=1e-4)


def decode(routed: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(bytes(routed["data"])), routed["dtype"]).reshape(routed["shape"])


async def play(url: str, engine: Engine) -> list[dict[str, Any]]:
    """Render the first turn; the second begins with all tokens of the first, and asks for the rows that are new."""
    renderer = renderers.create_renderer(engine.tokenizer.backing, renderers.DefaultRendererConfig())
    turns: list[dict[str, Any]] = []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        for news in ("Hello", "And then?"):
            messages = [{"role": "user", "content": news}]
            said = turns[-1]["prompt_ids"] + turns[-1]["completion_ids"] if turns else []
            asked = await generate(
                client=client,
                renderer=renderer,
                messages=messages,
                model="m",
                prompt_ids=said + renderer.render_ids(messages, add_generation_prompt=True),
                sampling_params={**SAMPLING, "routed_experts_prompt_start": max(0, len(said) - 1)},
                cache_salt="v0",
            )
            turns.append(asked)
    return turns


def test_a_prompt_beyond_the_context_is_never_sent(url: str, engine: Engine) -> None:
    async def ask() -> None:
        renderer = renderers.create_renderer(engine.tokenizer.backing, renderers.DefaultRendererConfig())
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
            await generate(client=client, renderer=renderer, messages=[], model="m", prompt_ids=[5] * 513)

    with pytest.raises(renderers.OverlongPromptError):
        asyncio.run(ask())
