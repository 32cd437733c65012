"""A trainer's client against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.client import BlockingRolloutClient, RolloutClient
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.rollouts.conftest import KEY, UnreliableRoad
from tests.support.engine.shared_settings import SERVED, write_served
from tests.support.engine.step_gate import unhurried, wait_for_tokens
from tests.support.serving.http_server import running
from tests.support.serving.trainer_guide import guide_snippets

SAMPLING = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
REQUEST = SampleRequest("a", [5, 6, 7], SAMPLING, seed=11, count=3)


def outputs(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.output_ids.tolist() for rollout in rollouts]


def test_parts_of_the_samples_are_those_samples(url: str) -> None:
    """Samples asked for alone, or some of them, are the same, with the same rows."""
    first = SampleRequest("a", [5, 6, 7], SAMPLING, seed=11)
    last = SampleRequest("a", [5, 6, 7], SAMPLING, seed=11, first=1, count=2)
    with BlockingRolloutClient(url, api_key=KEY) as client:
        assert client.model_info()["weight_version"] == client.weight_version() == "0"
        whole, alone, rest = client.generate([REQUEST, first, last])
    assert outputs(whole) == outputs(alone + rest) and len({*map(tuple, outputs(whole))}) == 3
    for one, other in zip(whole, alone + rest, strict=True):
        assert one.sample_index == other.sample_index
        assert one.routing is not None and other.routing is not None
        assert one.routing.rows.shape == (10, 3, 2) and np.array_equal(one.routing.rows, other.routing.rows)
        assert one.routing.weight_version == other.routing.weight_version == ((0, 10, "0"),)
        assert one.logprob_versions == ((3, 11, "0"),)


def test_samples_without_routing(url: str) -> None:
    with BlockingRolloutClient(url, api_key=KEY) as client:
        ((rollout,),) = client.generate([SampleRequest("a", [5], SAMPLING, seed=0, returns_routing=False)])
    assert rollout.routing is None and rollout.layout is None and len(rollout.logprobs) == 8


def test_prompts_alone_have_rows(url: str) -> None:
    """Nothing is sampled: every prompt position has its row, for both samples."""
    with BlockingRolloutClient(url, api_key=KEY) as client:
        ((one, other),) = client.generate([SampleRequest("a", [5, 6], {"max_new_tokens": 0}, seed=0, count=2)])
    for rollout in (one, other):
        assert len(rollout.output_ids) == 0 and rollout.routing is not None and len(rollout.routing.rows) == 2


def test_what_is_refused_is_told(url: str) -> None:
    with BlockingRolloutClient(url, api_key=KEY) as client:
        with pytest.raises(Refused, match="vocabulary") as refusal:
            client.generate([SampleRequest("a", [10**6], SAMPLING, seed=0)])
        assert refusal.value.status == 400
    with BlockingRolloutClient(url, api_key="wrong") as client, pytest.raises(Unusable, match="key"):
        client.weight_version()
    with BlockingRolloutClient("http://127.0.0.1:9") as client, pytest.raises(Unavailable, match="does not answer"):
        client.weight_version()


def test_an_answer_that_takes_too_long(url: str, road: UnreliableRoad) -> None:
    long = SampleRequest("a", [5], {"max_new_tokens": 200, "ignore_eos": True}, seed=0)
    with BlockingRolloutClient(url, api_key=KEY, timeout_s=0.01) as client, pytest.raises(Faulty, match="too long"):
        client.generate([long])


def test_an_answer_to_something_else_is_noticed(url: str, road: UnreliableRoad) -> None:
    """The answer to another prompt, or to fewer samples, is none to this request."""
    kept: list = []

    def answer_first(_: int, asked: dict, messages: list) -> list:
        """What is left of a request that an earlier client gave up is none of ours."""
        kept.extend([messages] if messages[0]["status"] == 200 else [])
        return kept[0] if kept else messages

    road.road = answer_first
    with BlockingRolloutClient(url, api_key=KEY) as client:
        client.generate([REQUEST])
        for other in (
            SampleRequest("b", [5, 6], SAMPLING, seed=11, count=3),
            SampleRequest("a", [5, 6, 7], SAMPLING, 11),
        ):
            with pytest.raises(Faulty, match="not an answer"):
                client.generate([other])


def test_flush(url: str) -> None:
    with BlockingRolloutClient(url, api_key=KEY) as client:
        client.generate([REQUEST])
        client.flush()
        ((first, *_),) = client.generate([REQUEST])
    assert first.num_cached_tokens == 0


@pytest.fixture
def own_engine(checkpoint: Path) -> Iterator[Engine]:
    """An engine of which the weights may change."""
    with Engine(str(checkpoint), **SERVED) as engine:
        yield engine


@pytest.fixture
def updatable(own_engine: Engine) -> Iterator[str]:
    """A server over it."""
    with running(create_api(ApiState(own_engine.loop, own_engine.tokenizer, ServerSettings()))) as url:
        yield url


def test_the_client_of_the_guide_runs(updatable: str, tmp_path: Path) -> None:
    """All of the guide's Python that asks a server: what it samples is of the old weights, and new ones serve then."""
    write_served(tmp_path / "other", seed=9)
    _, (snippet,) = guide_snippets()
    for written, ours in (("http://127.0.0.1:8000", updatable), ("/checkpoints/step-8", str(tmp_path / "other"))):
        assert snippet.count(f'"{written}"') == 1
        snippet = snippet.replace(f'"{written}"', repr(ours))
    names: dict = {"prompt_ids": [5, 6, 7]}
    exec(compile(snippet, "docs/rl", "exec"), names)
    assert [sample.sample_index for sample in names["samples"]] == list(range(8))
    assert versions(names["samples"]) == {"0"}
    with BlockingRolloutClient(updatable) as client:
        assert client.weight_version() == "8"


@pytest.mark.parametrize(
    "mode", ["in_place", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("abort", "retract"))]
)
def test_sample_update_sample(own_engine: Engine, updatable: str, tmp_path: Path, mode: str) -> None:
    """Weights change while samples run: each is of the versions that it names, and those after it of the new one.

    What runs when it is paused is ended by `abort`, with what it has of the old version, and spans both otherwise.
    """
    other = write_served(tmp_path / "other", seed=9)
    requests = [
        SampleRequest(str(i), [5 + i, 6], {**SAMPLING, "max_new_tokens": 60}, seed=i, count=4) for i in range(3)
    ]

    async def rounds() -> tuple[list[Rollout], ...]:
        async with RolloutClient(updatable) as client:
            before = await sampled_by(client, requests)
            with unhurried(own_engine.loop, delay_s=0.02):
                under_way = asyncio.create_task(sampled_by(client, requests))
                await asyncio.to_thread(wait_for_tokens, own_engine.loop, 20)
                await client.pause(mode)
            await client.pause(mode)
            with pytest.raises(Refused):
                await client.update_weights(str(tmp_path), weight_version="bad")
            assert await client.weight_version() == "0"
            await client.update_weights(str(other), weight_version="1")
            await client.resume()
            assert await client.weight_version() == "1"
            return before, await under_way, await sampled_by(client, requests)

    before, meanwhile, after = asyncio.run(rounds())
    assert versions(before) == {"0"} and versions(after) == {"1"}
    assert outputs(before[:4]) != outputs(after[:4])
    ended = [rollout for rollout in meanwhile if rollout.finish_reason == "abort"]
    spanning = [rollout for rollout in meanwhile if versions([rollout]) == {"0", "1"}]
    if mode == "abort":
        assert versions(ended) == {"0"} and not spanning
        assert any(len(rollout.output_ids) for rollout in ended)
    else:
        assert spanning and not ended
    for rollout in (*before, *meanwhile, *after):
        if rollout.finish_reason != "abort":
            assert rollout.routing is not None and rollout.logprob_versions[-1][1] == 62


async def sampled_by(client: RolloutClient, requests: list[SampleRequest]) -> list[Rollout]:
    """All samples of all requests, asked for at once."""
    return [rollout for rollouts in await asyncio.gather(*map(client.generate, requests)) for rollout in rollouts]


def versions(rollouts: list[Rollout]) -> set[str]:
    """Those that log-probs are of."""
    return {version for rollout in rollouts for *_, version in rollout.logprob_versions}
