"""strands-sglang, an RL client of SGLang's dialect that decodes routing itself: two turns are one run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from tests.clients.conftest import NUM_LAYERS, TOP_K, client_package, decode_int32, logprobs_of, uncached_rows

strands_sglang = client_package("strands_sglang")
Rollout = client_package("strands_sglang.rollout").Rollout

SAMPLING = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}


def test_two_turns_with_a_start_offset(url: str, engine: Engine) -> None:
    rollout, answers = asyncio.run(play(url))
    assert len(rollout) == 3 + 8 + 2 + 8
    decoded = rollout.decode_routed_experts(NUM_LAYERS, TOP_K)
    whole = uncached_rows(engine, rollout.token_ids)
    np.testing.assert_array_equal(decoded, whole)
    assert answers[1]["meta_info"]["routed_experts_start_len"] == 10
    np.testing.assert_array_equal(decode_int32(answers[1]["meta_info"]["routed_experts"]), whole[10:])
    found = [value for _, value in zip(rollout.loss_mask, rollout.logprobs, strict=True) if value is not None]
    assert len(found) == len(rollout) - 1
    np.testing.assert_allclose(found, logprobs_of(engine, rollout.token_ids)[1:], rtol=0, atol=1e-4)


async def play(url: str) -> tuple[Any, list[dict]]:
    rollout, answers = Rollout(), []
    async with strands_sglang.SGLangClient(url, max_retries=0) as client:
        assert await client.health()
        info = await client.model_info()
        assert info is not None and info["model_path"]
        assert not await client.is_multimodal()
        for news in ([10, 11, 12], [20, 21]):
            start = max(0, len(rollout) - 1)
            answer = await client.generate(
                input_ids=rollout.token_ids + news,
                sampling_params=SAMPLING,
                return_logprob=True,
                logprob_start_len=start,
                return_routed_experts=True,
                routed_experts_start_len=start,
            )
            meta = answer["meta_info"]
            rollout.add_prompt(news, [entry[0] for entry in meta["input_token_logprobs"][-len(news) :]])
            sampled = meta["output_token_logprobs"]
            rollout.add_response([entry[1] for entry in sampled], [entry[0] for entry in sampled])
            rollout.add_routed_experts(meta["routed_experts"])
            answers.append(answer)
    return rollout, answers


def test_its_model_class_over_two_turns_of_a_chat(url: str, engine: Engine) -> None:
    model = asyncio.run(chat(url, engine))
    rollout = model.rollout
    assert len(rollout.routed_experts) == 2 and sum(rollout.loss_mask) == 16
    np.testing.assert_array_equal(
        rollout.decode_routed_experts(NUM_LAYERS, TOP_K), uncached_rows(engine, rollout.token_ids)
    )


async def chat(url: str, engine: Engine) -> Any:
    """The class renders, tracks tokens, and asks for what is new; routing, log-probs and start offsets are its own."""
    async with strands_sglang.SGLangClient(url, max_retries=0) as client:
        model = strands_sglang.SGLangModel(
            client=client, tokenizer=engine.tokenizer.backing, sampling_params=SAMPLING, return_routed_experts=True
        )
        messages: list[dict] = []
        for words in ("Hello", "And then?"):
            messages.append({"role": "user", "content": [{"text": words}]})
            events = [event async for event in model.stream(messages)]
            text = "".join(
                event["contentBlockDelta"]["delta"]["text"] for event in events if "contentBlockDelta" in event
            )
            usage = next(event["metadata"]["usage"] for event in events if "metadata" in event)
            assert usage["outputTokens"] == 8 and usage["totalTokens"] == len(model.rollout)
            messages.append({"role": "assistant", "content": [{"text": text}]})
    return model


def test_what_is_refused_reaches_the_client_as_its_own_error(url: str) -> None:
    async def ask() -> None:
        async with strands_sglang.SGLangClient(url, max_retries=0) as client:
            await client.generate(input_ids=[5] * 600, sampling_params=SAMPLING)

    with pytest.raises(strands_sglang.SGLangClientError, match="exceed"):
        asyncio.run(ask())


def test_generate_update_generate(url: str, checkpoint: Path, tmp_path: Path) -> None:
    """A trainer brings other weights between two rounds, and then the first ones again."""
    other = write_checkpoint(tmp_path / "other", PRESETS["tiny"], seed=1, dtype="float32")
    answers = asyncio.run(rounds(url, [other, checkpoint]))
    assert [answer["meta_info"]["weight_version"] for answer in answers] == ["0", "after 1", "after 2"]
    first, second, third = ((answer["output_ids"], answer["meta_info"]["routed_experts"]) for answer in answers)
    assert first == third and first[0] != second[0] and first[1] != second[1]


async def rounds(url: str, checkpoints: list[Path]) -> list[dict]:
    """The same prompt under the weights there are, and under those of every checkpoint."""
    greedy = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    asked = {"input_ids": [10, 11, 12], "sampling_params": greedy, "return_routed_experts": True}
    async with strands_sglang.SGLangClient(url, max_retries=0) as client, httpx.AsyncClient(base_url=url) as control:
        answers = [await client.generate(**asked)]
        for number, path in enumerate(checkpoints, 1):
            (await control.post("/pause_generation", json={"mode": "retract"})).raise_for_status()
            wanted = {"model_path": str(path), "weight_version": f"after {number}"}
            told = await control.post("/update_weights_from_disk", json=wanted, timeout=600)
            assert told.json()["success"], told.text
            (await control.post("/continue_generation", json={})).raise_for_status()
            answers.append(await client.generate(**asked))
    return answers
