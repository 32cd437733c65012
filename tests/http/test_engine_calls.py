"""Calls of `Engine` as other engines have them: streams from `generate`, async iterators, aborts and flushes."""

from __future__ import annotations

import asyncio

import pytest

from rayserve_moe import Engine
from rayserve_moe.requests.records import RequestError

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_generate_streams_what_it_answers(engine: Engine):
    whole = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    events = list(engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, stream=True))
    assert events[-1]["output_ids"] == whole["output_ids"] and events[-1]["text"] == whole["text"]
    assert [len(event["output_ids"]) for event in events] == sorted(len(event["output_ids"]) for event in events)
    with pytest.raises(RequestError):
        next(iter(engine.generate(input_ids=[[5], [6]], stream=True)))


def test_an_async_call_may_be_iterated(engine: Engine):
    async def last():
        ids = []
        async for event in await engine.async_generate(input_ids=[5, 6, 7], sampling_params=GREEDY, stream=True):
            ids = event["output_ids"]
        return ids, (await engine.async_generate(input_ids=[5, 6, 7], sampling_params=GREEDY))["output_ids"]

    streamed, whole = asyncio.run(last())
    assert streamed == whole


def test_a_request_is_aborted_by_its_id(engine: Engine):
    stream = engine.generate(input_ids=[5], sampling_params=GREEDY | {"max_new_tokens": 40}, rid="mine", stream=True)
    first = next(stream)
    assert first["meta_info"]["id"] == "mine" and not engine.flush_cache()
    engine.abort_request("mine")
    assert [*stream][-1]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert engine.flush_cache()
    answers = engine.generate(input_ids=[[5], [6]], sampling_params=GREEDY, rid="both")
    assert [answer["meta_info"]["id"] for answer in answers] == ["both_0", "both_1"]
    engine.abort_request(abort_all=True)
