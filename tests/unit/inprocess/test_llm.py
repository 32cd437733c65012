"""`LLM` under vLLM's names: what it answers is what the engine computed, and routing that is missing is None."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import LLM, RequestOutput, SamplingParams
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.inprocess.llm import OutputWriter
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, RequestError, RoutedExperts
from rayserve_moe.requests.records import SamplingParams as EngineSampling
from rayserve_moe.requests.results import ChoiceResult
from tests.support.engine.shared_settings import CORE
from tests.support.models.core import CORE_CONFIG

IDS = [5, 6, 7, 8, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(quick_checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        str(quick_checkpoint),
        tensor_parallel_size=1,
        enable_expert_parallel=True,
        enable_return_routed_experts=True,
        max_model_len=CORE_CONFIG.max_position_embeddings,
        max_num_seqs=16,
        max_num_batched_tokens=CORE["max_step_tokens"],
        block_size=CORE["page_size"],
        precompile_bs_paddings=CORE["precompile_bs_paddings"],
        num_pages=CORE["num_pages"],
        max_waiting_requests=2,
    ) as llm:
        yield llm


def only(outputs: list[RequestOutput]) -> RequestOutput:
    (output,) = outputs
    return output


def test_rows_are_split_where_the_prompt_ends(llm: LLM) -> None:
    output = only(llm.generate({"prompt_token_ids": IDS}, GREEDY))
    (completion,) = output.outputs
    assert output.prompt_routed_experts is not None and completion.routed_experts is not None
    assert output.prompt_routed_experts.shape == (5, 2, 2) and completion.routed_experts.shape == (5, 2, 2)
    assert output.prompt_routed_experts.dtype == completion.routed_experts.dtype == np.int16
    answer = llm.engine.generate(
        input_ids=IDS, max_new_tokens=6, temperature=0, ignore_eos=True, return_routed_experts=True
    )
    assert completion.token_ids == answer["output_ids"] and completion.text == answer["text"]
    assert completion.routed_experts_info is not None
    assert completion.routed_experts_info["crc32"] == answer["meta_info"]["routed_experts_info"]["crc32"]
    assert (output.prompt, output.prompt_token_ids, output.finished) == (None, IDS, True)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_choices_share_the_rows_of_their_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=2, max_tokens=4, ignore_eos=True)
    output = only(llm.generate({"prompt_token_ids": IDS}, params))
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    for choice in output.outputs:
        fed = [*IDS, *choice.token_ids]
        again = only(llm.generate({"prompt_token_ids": fed}, SamplingParams(max_tokens=0)))
        assert again.outputs[0].token_ids == [] and again.outputs[0].routed_experts is not None
        assert len(again.outputs[0].routed_experts) == 0
        rows = np.concatenate([output.prompt_routed_experts, choice.routed_experts])
        np.testing.assert_array_equal(rows, again.prompt_routed_experts[:-1])


def test_rows_before_a_start_are_left_out(llm: LLM) -> None:
    whole = only(llm.generate({"prompt_token_ids": IDS}, GREEDY))
    part = only(
        llm.generate(
            {"prompt_token_ids": IDS},
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, routed_experts_prompt_start=2),
        )
    )
    np.testing.assert_array_equal(part.prompt_routed_experts, whole.prompt_routed_experts[2:])
    np.testing.assert_array_equal(part.outputs[0].routed_experts, whole.outputs[0].routed_experts)
    assert part.outputs[0].routed_experts_info["start"] == 2
    with pytest.raises(RequestError, match="routed_experts_prompt_start"):
        llm.generate({"prompt_token_ids": IDS}, SamplingParams(routed_experts_prompt_start=6))


def test_the_end_of_a_long_prompt_is_kept(llm: LLM) -> None:
    def kept(ids: list[int], **params: Any) -> list[int]:
        return only(llm.generate({"prompt_token_ids": ids}, SamplingParams(ignore_eos=True, **params))).prompt_token_ids

    context = llm.engine.card.max_model_len
    ids = [5 + place % 50 for place in range(context + 20)]
    assert kept(ids, truncate_prompt_tokens=7, max_tokens=1) == ids[-7:]
    assert kept(ids, truncate_prompt_tokens=-1, max_tokens=1) == ids[1 - context :]
    assert kept(ids, truncate_prompt_tokens=-1, max_tokens=0) == ids[-context:]
    assert kept(IDS, truncate_prompt_tokens=len(IDS) + 1, max_tokens=None)[: len(IDS)] == IDS
    for wrong in (0, -2, context + 1, 1.5, "7", True):
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            kept(ids, truncate_prompt_tokens=wrong)


@pytest.mark.parametrize(
    ("missing", "has_prompt", "has_generated"),
    [((), True, True), (((1, 2),), False, True), (((4, 6),), False, False), (((6, 7),), True, False)],
)
def test_a_missing_row_makes_its_part_none_and_is_told(
    llm: LLM, missing: tuple, has_prompt: bool, has_generated: bool
) -> None:
    card = llm.engine.card
    rows = np.ones((8, *card.routing.row_shape), card.routing.dtype)
    request = GenerationRequest("r", np.asarray(IDS, np.int32), EngineSampling(max_new_tokens=4))
    result = ChoiceResult(
        "r",
        token_ids=[1, 2, 3, 4],
        logprobs=[-1.0] * 4,
        ranks=[1] * 4,
        finish=FinishReason("abort"),
        routing=RoutedExperts(rows, missing=missing),
    )
    writer = OutputWriter(llm.get_tokenizer(), card.routing)
    output = writer.request_output(request, [result], params=SamplingParams(), prompt=None)
    assert (output.prompt_routed_experts is not None) == has_prompt
    assert (output.outputs[0].routed_experts is not None) == has_generated
    assert output.outputs[0].routed_experts_info["missing"] == [list(entry) for entry in missing]


def test_logprobs_name_the_token_first_and_rank_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    output = only(llm.generate({"prompt_token_ids": IDS}, params))
    (completion,) = output.outputs
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(position)) == token_id and len(position) in (3, 4)
        ranked = sorted((entry.rank, entry.logprob) for entry in position.values())
        assert [rank for rank, _ in ranked[:3]] == [1, 2, 3] and len({rank for rank, _ in ranked}) == len(ranked)
        assert [value for _, value in ranked] == sorted((value for _, value in ranked), reverse=True)
    total = sum(p[i].logprob for i, p in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(IDS)
    scored = only(
        llm.generate({"prompt_token_ids": IDS + completion.token_ids}, SamplingParams(max_tokens=0, prompt_logprobs=0))
    )
    again = [p[i].logprob for i, p in zip(completion.token_ids, scored.prompt_logprobs[len(IDS) :], strict=True)]
    assert sum(again) == pytest.approx(total, abs=1e-4)


def test_more_prompts_than_the_engine_takes_at_once_all_come_back_in_order(llm: LLM) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [10 + i, 20]} for i in range(40)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)


def test_texts_chats_and_parameters_of_their_own(llm: LLM) -> None:
    few, more = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 3))
    first, second = llm.generate(["Hello", {"prompt": "Bye", "cache_salt": "s"}], [few, more])
    assert (first.prompt, second.prompt) == ("Hello", "Bye")
    assert [len(o.outputs[0].token_ids) for o in (first, second)] == [1, 3]
    conversation = [{"role": "user", "content": "Hello"}]
    chat = only(llm.chat(conversation, few))
    assert chat.prompt == "user: Hello</s>\nassistant: "
    assert [output.prompt for output in llm.chat([conversation, conversation], few)] == [chat.prompt] * 2


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ([[1, 2]], GREEDY),
        ({"prompt_token_ids": [1], "prompt": "x"}, GREEDY),
        ({"tokens": [1]}, GREEDY),
        ({"prompt_token_ids": [1.5]}, GREEDY),
        (["a"], [GREEDY, GREEDY]),
        ("a", SamplingParams(logprobs=-1)),
        ("a", SamplingParams(logprobs=10_000)),
        ("a", SamplingParams(max_tokens=1000)),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(llm: LLM, prompts: Any, params: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, params)
    assert llm.engine.loop.statistics()["requests_live"] == 0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tensor_parallel_size": 2, "enable_expert_parallel": False}, "enable_expert_parallel"),
        ({"tensor_parallel_size": 2, "devices_per_host": 2}, "give one of them"),
        ({"max_num_seqs": 2, "max_running_requests": 2}, "twice"),
        ({"max_num_sequences": 2}, "unknown setting 'max_num_sequences'"),
    ],
)
def test_settings_at_odds_are_refused(core_checkpoint: Path, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        LLM(str(core_checkpoint), **settings)


def test_all_ways_to_generate_take_the_same_options(llm: LLM) -> None:
    asked = {"input_ids": IDS, "max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    options = {
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "return_routed_experts": True,
        "routed_experts_start_len": 3,
        "cache_salt": "ways",
    }
    whole = llm.engine.generate(**asked, **options)
    *_, last = llm.engine.generate_stream(**asked, **options)
    later = asyncio.run(llm.engine.async_generate(**asked, **options))
    for answer in (last, later):
        assert answer["output_ids"] == whole["output_ids"]
        found, expected = answer["meta_info"], whole["meta_info"]
        assert found["routed_experts"] == expected["routed_experts"] and found["routed_experts_start_len"] == 3
        for field in ("input_token_logprobs", "output_token_logprobs"):
            assert [entry[1] for entry in found[field]] == [entry[1] for entry in expected[field]]
            np.testing.assert_allclose(
                *([entry[0] for entry in each[field][1:]] for each in (found, expected)), rtol=0, atol=1e-5
            )
        assert [len(likeliest) for likeliest in found["output_top_logprobs"]] == [2] * 6
    assert whole["meta_info"]["routed_experts_info"]["shape"] == [len(IDS) + 6 - 1 - 3, 2, 2]
    assert [entry[1] for entry in whole["meta_info"]["input_token_logprobs"]] == IDS[1:]
