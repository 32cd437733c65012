"""tunix' sampler protocol over a real server: its requests, its answers, and the phases of a weight sync."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_moe import Engine
from rayserve_moe.rollouts.adapters.tunix import UNSET
from rayserve_moe.rollouts.adapters.tunix_sampler import TunixSampler
from rayserve_moe.rollouts.adapters.tunix_sync import Phase
from rayserve_moe.rollouts.answers import Refused, Unavailable
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.engine.shared_settings import SERVED, write_served
from tests.support.serving.http_server import running

SYNC, ASYNC = (
    ("initialize", "get_target_state"),
    (
        *("start", "stop", "pause", "resume", "get_mesh", "sample", "get_weight_sync_metadata", "bind_weight_sync"),
        *("pre_weight_sync", "weight_sync", "post_weight_sync", "abort_weight_sync", "get_transfer_status"),
        *("migrate_kv_cache", "get_load_info"),
    ),
)
"""Methods of the protocol."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [write_served(folder / str(seed), seed=seed) for seed in (0, 1)]


@dataclass
class LosesAnswer:
    """An application behind a proxy that answers 502 to the next request for `path`."""

    app: ASGIApp
    path: str = ""
    arrives: bool = False
    """True if the application receives the request and only its answer is lost."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != self.path:
            await self.app(scope, receive, send)
            return
        self.path = ""
        if self.arrives:
            await self.app(scope, receive, _drop)
        await Response(status_code=502)(scope, receive, send)


async def _drop(message: Message) -> None: ...


@pytest.fixture(scope="module")
def proxy(paths: list[Path]) -> Iterator[LosesAnswer]:
    with Engine(model_path=str(paths[0]), dtype="float32", **SERVED) as engine:
        yield LosesAnswer(create_api(ApiState(engine.loop, engine.tokenizer)))


@pytest.fixture(scope="module")
def url(proxy: LosesAnswer) -> Iterator[str]:
    with running(proxy) as url:
        yield url


def with_sampler(url: str, use: Callable[[TunixSampler], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        sampler = TunixSampler(url, **options)
        sampler.initialize()
        await sampler.start()
        try:
            return await use(sampler)
        finally:
            await sampler.stop()

    return asyncio.run(run())


def request(prompt: Any, **params: Any) -> SimpleNamespace:
    return SimpleNamespace(request_id=f"r-{prompt}", prompt=prompt, sampling_params=SimpleNamespace(**params))


def sync(number: int, *, weights: Any = None, **config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        policy_version=number, weights=weights, extra_config={"req_id": f"round {number}", "uuid": "a", **config}
    )


def test_every_method_of_the_protocol_is_there():
    members = {name: getattr(TunixSampler, name) for name in (*SYNC, *ASYNC)}
    assert [name for name in members if inspect.iscoroutinefunction(members[name])] == list(ASYNC)


def test_each_request_has_its_own_parameters(url: str, paths: list[Path]):
    own = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "return_logprobs": True, "return_routed_experts": True}
    asked = [
        request([5, 6, 7], **own),
        request([5, 6, 7], **own | {"seed": 4, "top_k": 2, "top_p": 0.9}),
        request([5, 6, 7], **own | {"routed_experts_prompt_start": 2}),
        request("1+1=", max_tokens=2),
        request([{"role": "user", "content": "1+1="}], max_tokens=1),
        SimpleNamespace(prompt={"role": "user", "content": "1+1="}),
    ]

    async def use(sampler: TunixSampler) -> Any:
        return await sampler.sample(asked), await sampler.sample(asked[0]), await sampler.get_load_info()

    found, again, load = with_sampler(url, use)
    assert [each.error for each in found] == [None] * 6
    first, other, later, text, chat, bare = found
    assert again[0].token_ids.tolist() == first.token_ids.tolist() == later.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist() and first.request_id == "r-[5, 6, 7]"
    assert first.logprobs.shape == first.token_ids.shape == (5,) and first.finish_reason == "length"
    assert first.routed_experts.dtype == np.int16 and first.routed_experts.shape[0] == 8
    assert (first.routed_experts[-1] == UNSET).all() and (first.routed_experts[:-1] != UNSET).any(axis=(1, 2)).all()
    np.testing.assert_array_equal(later.routed_experts, first.routed_experts[2:])
    assert first.metadata == {"weight_version": "0", "policy_version": 0, "routing_missing": []}
    assert len(text.token_ids) == 2 and text.logprobs is None is text.routed_experts and len(text.prompt_token_ids)
    assert len(chat.prompt_token_ids) > len(text.prompt_token_ids)
    assert bare.prompt_token_ids.tolist() == chat.prompt_token_ids.tolist() and len(bare.token_ids) <= 64
    assert load.num_requests_waiting == 0 and 0 <= load.kv_cache_usage_perc <= 1


@pytest.mark.parametrize(
    ("params", "prompt", "message"),
    [
        ({"return_logits": True}, [5], "return_logits is not supported"),
        ({"beam_size": 4}, [5], "beam_size is not supported"),
        ({"top_p": 7.0}, [5], "top_p"),
        ({}, [10**6], "vocabulary"),
        ({}, object(), "len"),
    ],
)
def test_a_prompt_that_fails_has_its_error_and_the_others_their_samples(
    url: str, params: Any, prompt: Any, message: str
):
    async def use(sampler: TunixSampler) -> Any:
        return await sampler.sample([request(prompt, **params), request([5, 6], max_tokens=1)])

    wrong, right = with_sampler(url, use)
    assert message in wrong.error.message and not wrong.error.retryable and wrong.finish_reason == "error"
    assert right.error is None and len(right.token_ids) == 1


def test_a_sync_serves_the_new_weights_at_once_and_an_aborted_one_never(url: str, paths: list[Path]):
    async def use(sampler: TunixSampler) -> None:
        async def sampled() -> Any:
            (found,) = await sampler.sample(request([5, 6, 7], max_tokens=4, temperature=0.0, return_logprobs=True))
            return found

        other, original = (load_file(path / "model.safetensors") for path in paths[::-1])
        shapes = {name: (values.shape, "float32") for name, values in other.items()}
        assert {name: tuple(spec) for name, spec in sampler.get_target_state().items()} == shapes
        assert (await sampler.get_weight_sync_metadata())["dtype"] == "float32"
        before = await sampled()
        assert await sampler.pre_weight_sync(sync(1)) == await sampler.pre_weight_sync(sync(1)) == Phase.PREPARED
        with pytest.raises(ValueError, match=r"end it before round \('round 2', 'a'\)"):
            await sampler.pre_weight_sync(sync(2))
        with pytest.raises(ValueError, match="either `weights` or `model_path`"):
            await sampler.weight_sync(sync(1))
        for _ in range(2):
            assert await sampler.weight_sync(sync(1, weights=other)) == Phase.STAGED
        assert await sampler.get_transfer_status("round 1") == "h2d_done"
        assert await sampler.get_transfer_status("round 2") == "idle"
        assert (await sampler.get_weight_sync_metadata())["weight_version"] == before.metadata["weight_version"]
        assert await sampler.abort_weight_sync(sync(1)) == await sampler.abort_weight_sync(sync(1)) == Phase.ABORTED
        same = await sampled()
        assert same.logprobs.tolist() == before.logprobs.tolist() and same.metadata == before.metadata
        with pytest.raises(ValueError, match="is aborted, not"):
            await sampler.post_weight_sync(sync(1))
        for number, extra in ((2, {"weights": other}), (3, {"weights": original}), (4, {"model_path": str(paths[1])})):
            await sampler.bind_weight_sync()
            await sampler.pre_weight_sync(sync(number))
            await sampler.weight_sync(sync(number, **extra))
            for _ in range(2):
                assert await sampler.post_weight_sync(sync(number)) == Phase.COMMITTED
            with pytest.raises(ValueError, match="is committed, not"):
                await sampler.abort_weight_sync(sync(number))
            now = await sampled()
            assert now.metadata["policy_version"] == number
            assert (now.logprobs.tolist() == before.logprobs.tolist()) == (number == 3)
        with pytest.raises(ValueError, match="was not begun"):
            await sampler.weight_sync(sync(2, weights=other))

    with_sampler(url, use, checkpoint=str(paths[0]))


@pytest.mark.parametrize("arrives", [False, True])
def test_a_phase_whose_answer_is_lost_is_repeated(url: str, paths: list[Path], proxy: LosesAnswer, arrives: bool):
    """The server is not left paused, and weights that serve are never called aborted."""
    weights = load_file(paths[1] / "model.safetensors")
    sent, read, resume = "/update_weights_from_tensor", "/update_weights_from_disk", "/continue_generation"
    by_path = {"model_path": str(paths[1])}

    async def use(sampler: TunixSampler) -> None:
        for number, (path, extra) in enumerate(((sent, {}), (resume, {}), (read, by_path), (resume, by_path)), 20):
            this = sync(number + 10 * arrives, weights=None if extra else weights, **extra)
            await sampler.pre_weight_sync(this)
            await sampler.weight_sync(this)
            proxy.path, proxy.arrives = path, arrives
            with pytest.raises(Unavailable):
                await sampler.post_weight_sync(this)
            if arrives or path == resume:
                with pytest.raises(ValueError, match="has switched the weights"):
                    await sampler.abort_weight_sync(this)
            assert await sampler.post_weight_sync(this) == Phase.COMMITTED
            (found,) = await sampler.sample(request([5], max_tokens=1))
            assert found.error is None and found.metadata["policy_version"] == this.policy_version
        this = sync(40 + arrives, weights=weights)
        await sampler.pre_weight_sync(this)
        await sampler.weight_sync(this)
        proxy.path = resume
        with pytest.raises(Unavailable):
            await sampler.abort_weight_sync(this)
        assert await sampler.abort_weight_sync(this) == Phase.ABORTED
        (found,) = await sampler.sample(request([5], max_tokens=1))
        assert found.metadata["policy_version"] == 23 + 10 * arrives

    with_sampler(url, use)


def test_a_switch_that_did_not_arrive_can_be_aborted(url: str, paths: list[Path], proxy: LosesAnswer):
    weights = load_file(paths[0] / "model.safetensors")

    async def use(sampler: TunixSampler) -> None:
        before = (await sampler.get_weight_sync_metadata())["weight_version"]
        await sampler.pre_weight_sync(sync(50))
        await sampler.weight_sync(sync(50, weights=weights))
        proxy.path, proxy.arrives = "/update_weights_from_tensor", False
        with pytest.raises(Unavailable):
            await sampler.post_weight_sync(sync(50))
        assert await sampler.abort_weight_sync(sync(50)) == Phase.ABORTED
        (found,) = await sampler.sample(request([5], max_tokens=1))
        assert found.metadata["weight_version"] == before

    with_sampler(url, use)


def test_weights_that_do_not_fit_are_refused_before_they_serve(url: str):
    async def use(sampler: TunixSampler) -> None:
        await sampler.pre_weight_sync(sync(8))
        with pytest.raises(Refused, match=r"no tensor model\.x"):
            await sampler.weight_sync(sync(8, weights={"model.x": np.zeros(3, np.float32)}))
        assert await sampler.abort_weight_sync(sync(8)) == Phase.ABORTED
        (found,) = await sampler.sample(request([5], max_tokens=1))
        assert found.error is None

    with_sampler(url, use)


def test_what_needs_a_checkpoint_a_request_or_a_server_says_so(url: str):
    async def use(sampler: TunixSampler) -> None:
        with pytest.raises(ValueError, match="needs the `checkpoint`"):
            sampler.get_target_state()
        with pytest.raises(ValueError, match="needs its request"):
            await sampler.pre_weight_sync()
        assert await sampler.get_mesh() is None
        assert not await sampler.migrate_kv_cache("a", "b", [1])
        await sampler.pause()
        await sampler.resume()

    with_sampler(url, use)
    with pytest.raises(Exception, match="does not answer"):
        with_sampler("http://127.0.0.1:9", use)
