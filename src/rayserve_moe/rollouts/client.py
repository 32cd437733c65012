"""A trainer's client of a server: sample, pause, update weights, resume. Async, and a blocking wrapper.

All calls raise `Unavailable` if a retry may help, `Faulty` if a retry is unlikely to help, `Refused` if the request
cannot be answered, and `Unusable` if no request can.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import aiohttp

from rayserve_moe.replay.encoding import ROLLOUT_MEDIA_TYPE
from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, Unusable, rollouts_in
from rayserve_moe.rollouts.schema import Rollout
from rayserve_moe.rollouts.weights import (
    SAFETENSORS,
    HeldDtypes,
    StagedWeights,
    WeightBucket,
    WeightSending,
    in_chunks,
    rounded,
    sent_tensors,
)

REQUEST_TIMEOUT_S = 1800.0
CONNECT_TIMEOUT_S = 30.0
IDLE_S = 2.0
"""Idle connections are closed after this time, before servers close them (uvicorn: after 5 s)."""
CALL_PROMPTS = 32
"""Maximum prompts per call if all are awaited anyway: a call costs as much as a short sample."""
_TRANSIENT = frozenset({404, 408, 425, 429, 502, 503, 504})
"""Includes 404: a proxy answers it while its application is being deployed."""
_FAULTS = frozenset({422, 500})
_CUT = frozenset({500, 502, 503, 504})
"""Status of a proxy whose replica is lost, and of a replica that ends."""
_NOT_FOUND = 404
RESUME_S, RETRY_S = 60.0, 0.25
"""Maximum time for resuming an interrupted answer at other replicas, and the interval of attempts."""
DROP_S = 10.0
"""Maximum time for dropping an update that ends early."""
_TENSOR_PATH = "/update_weights_from_tensor"
_UNUSABLE = frozenset({401, 403, 405, 501})
"""The key is wrong, or this is another kind of server."""
_Result = TypeVar("_Result")


class RolloutClient:
    """A client of a server with concurrent calls. An async context manager."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        """Sample a prompt and return all samples, in order."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Sample prompts with a single call; return the samples of each, once all are complete.

        Raises ValueError if the requests need different parts.
        """
        started_at, wanted = time.time(), {_wanted(request) for request in requests}
        if len(wanted) != 1:
            raise ValueError("all prompts of a call must return the same parts, from the same position")
        (fields,) = wanted
        prompts = [[int(token_id) for token_id in request.prompt_ids] for request in requests]
        samplings = [request.all_sampling for request in requests]
        is_one = len(requests) == 1
        body = {
            "input_ids": prompts[0] if is_one else prompts,
            "sampling_params": samplings[0] if is_one else samplings,
            "return_logprob": True,
            "indexer_topk_format": "packed",
            **dict(fields),
        }
        raw = await self._ask_to_the_end({**body, "rid": uuid.uuid4().hex})
        return rollouts_in(raw, requests, started_at=started_at)

    async def _ask_to_the_end(self, body: dict[str, Any]) -> bytes:
        """Send a request, and resume the answer at another replica if its own is lost.

        Raises the first call's error if the server does not keep requests, or not this request.
        """
        try:
            return await self._ask("POST", "/generate", body=body, accept=ROLLOUT_MEDIA_TYPE)
        except Unavailable as error:
            first = error
        again: dict[str, Any] = {"rid": body["rid"]}
        deadline = time.monotonic() + RESUME_S
        while first.is_cut:
            try:
                return await self._ask("POST", "/resume_request", body=again, accept=ROLLOUT_MEDIA_TYPE)
            except Unavailable as error:
                if error.status == _NOT_FOUND or time.monotonic() > deadline:
                    break
                await asyncio.sleep(max(RETRY_S, error.retry_after_s))
        raise first

    async def model_info(self) -> dict[str, Any]:
        """Return the served model: `model_path`, `served_model_name`, `weight_version`, `vocab_size`, ..."""
        return await self.call("GET", "/model_info")

    async def weight_version(self) -> str:
        """Return the weight version that is served now."""
        return str((await self.call("GET", "/get_weight_version"))["weight_version"])

    async def pause(self, mode: str = "abort") -> None:
        """Pause generation: running requests are ended (`abort`), requeued (`retract`), or kept as they are
        (`in_place`).
        """
        await self.call("POST", "/pause_generation", body={"mode": mode})

    async def resume(self) -> None:
        """Resume generation."""
        await self.call("POST", "/continue_generation", body={})

    async def update_weights(self, model_path: str, *, weight_version: str, **options: bool) -> dict[str, Any]:
        """Switch to another checkpoint of the same model, which every host reads from `model_path`.

        `options` are `flush_cache` and `abort_all_requests`. Raises Refused, with the path, if the server keeps its old
        weights: its own answers never repeat what they were sent.
        """
        body = {"model_path": model_path, "weight_version": weight_version, **options}
        try:
            answer = await self.call("POST", "/update_weights_from_disk", body=body)
        except Refused as refusal:
            raise Refused(f"{model_path}: {refusal}", refusal.status) from refusal
        if not answer.get("success"):
            raise Refused(f"{model_path}: {answer.get('message')}")
        return answer

    async def update_weights_from(
        self, params: Mapping[str, Any], *, weight_version: str, base: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Send `params` and switch to them: numpy or JAX arrays under the checkpoint's names, all weights or some.

        They are rounded to nearest even to the server's dtypes, as `weights.rounded` does, and sent in buckets. `base`
        are the arrays of the version that serves now; if a tensor differs in few elements, only those are sent.
        `options` are the fields of `weights.WeightSending`. Raises Refused if the server keeps its old weights, with
        status 409 if it serves another version than `base_version`.
        """
        held, sending = await self._sending(weight_version, options)
        tensors = sent_tensors(rounded(params, held), None if base is None else rounded(base, held))
        return (await self._send(sending, sending.buckets(tensors, is_delta=base is not None)))[-1]

    async def _sending(self, weight_version: str, options: dict[str, Any]) -> tuple[HeldDtypes, WeightSending]:
        info = await self.model_info()
        held = HeldDtypes(info["dtype"], tuple(info["float32_tensors"]))
        return held, WeightSending(weight_version, served_version=info["weight_version"], **options)

    async def _send(self, sending: WeightSending, buckets: Iterable[WeightBucket]) -> list[dict[str, Any]]:
        """Send buckets in order and return the answers; drop the update if it does not get to the end."""
        is_whole = False
        try:
            answers = [await self._send_bucket(bucket) for bucket in buckets]
            is_whole = True
        finally:
            if not is_whole:
                await self._drop(sending.update_id)
        return answers

    async def _send_bucket(self, bucket: WeightBucket) -> dict[str, Any]:
        query, content = bucket
        path = f"{_TENSOR_PATH}?{urlencode(query)}"
        return json.loads(await self._ask("POST", path, body=None, accept="application/json", content=content))

    async def expert_placement(self) -> dict[str, Any]:
        """Return where experts are, as the content of a placement file."""
        return await self.call("GET", "/experts/placement")

    async def place_experts(self, placement: Mapping[str, Any]) -> dict[str, Any]:
        """Move experts to the placement of a file's content, while the server answers.

        Raises Refused if it does not fit the server or experts never move there; with status 409 while experts still
        move to another placement of a client.
        """
        return await self.call("POST", "/experts/placement", body=placement)

    async def flush(self) -> None:
        """Drop all cached prefixes. Raises Refused while requests run."""
        await self.call("POST", "/flush_cache", body={})

    async def _drop(self, update_id: str) -> None:
        """Free what hosts have staged of an update that ends early; without an answer they do so in ten minutes."""
        with suppress(Unavailable, Faulty, Refused, Unusable, TimeoutError):
            await asyncio.wait_for(self.call("DELETE", f"{_TENSOR_PATH}?update_id={update_id}"), DROP_S)

    async def call(self, method: str, path: str, *, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call a route of the server that answers with a JSON object."""
        raw = await self._ask(method, path, body=body, accept="application/json")
        try:
            answer = json.loads(raw)
        except ValueError as error:
            raise Faulty(f"the answer of {path} is not JSON") from error
        if not isinstance(answer, dict):
            raise Faulty(f"the answer of {path} is not an object")
        return answer

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None,
        accept: str,
        content: Sequence[bytes | memoryview] | None = None,
    ) -> bytes:
        assert self._session is not None, "enter the client first"
        headers, sent = {"Accept": accept}, None
        if content is not None:
            headers |= {"Content-Type": SAFETENSORS, "Content-Length": str(sum(map(len, content)))}
            sent = in_chunks(content)
        try:
            async with self._session.request(
                method, self._url + path, json=body, data=sent, headers=headers
            ) as response:
                raw = await response.read()
        except aiohttp.ClientError as error:
            is_cut = not isinstance(error, aiohttp.ClientConnectorError)
            raise Unavailable(f"the server does not answer: {type(error).__name__}", is_cut=is_cut) from error
        except TimeoutError as error:
            raise Faulty("the answer took too long") from error
        if response.status == 200:
            return raw
        raise _failure_of(response.status, raw, response.headers.get("Retry-After", ""))


class WeightStaging:
    """Updates whose transfer is parted from the switch, by an entered client."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client

    async def stage(self, params: Mapping[str, Any], *, weight_version: str, **options: Any) -> StagedWeights:
        """Send all weights as `RolloutClient.update_weights_from`; they serve after `swap`.

        The server drops them ten minutes after their last bucket.
        """
        client = self._client
        held, sending = await client._sending(weight_version, options)
        buckets = sending.buckets(sent_tensors(rounded(params, held), None), is_delta=False, is_staged=True)
        return StagedWeights(sending, len(await client._send(sending, buckets)))

    async def swap(self, staged: StagedWeights) -> dict[str, Any]:
        """Switch to staged weights. They stay staged if the answer is lost: compare the served version, or try again.

        Raises: Refused if the server no longer has them, or keeps its old weights.
        """
        return await self._client._send_bucket(staged.sending.swap(staged.num_buckets))

    async def drop(self, staged: StagedWeights) -> None:
        """Free staged weights that are not to serve."""
        await self._client._drop(staged.sending.update_id)


class BlockingRolloutClient:
    """A blocking client for programs without an event loop. A context manager."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._client = RolloutClient(url, api_key=api_key, timeout_s=timeout_s)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._run(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._client.__aexit__(None, None, None))
        self._runner.close()

    def generate(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Sample all prompts concurrently; return the samples of each, in order."""
        return self._run(self._gathered(requests))

    def model_info(self) -> dict[str, Any]:
        """Call `RolloutClient.model_info`."""
        return self._run(self._client.model_info())

    def weight_version(self) -> str:
        """Call `RolloutClient.weight_version`."""
        return self._run(self._client.weight_version())

    def pause(self, mode: str = "abort") -> None:
        """Call `RolloutClient.pause`."""
        self._run(self._client.pause(mode))

    def resume(self) -> None:
        """Call `RolloutClient.resume`."""
        self._run(self._client.resume())

    def update_weights(self, model_path: str, *, weight_version: str, **options: bool) -> dict[str, Any]:
        """Call `RolloutClient.update_weights`."""
        return self._run(self._client.update_weights(model_path, weight_version=weight_version, **options))

    def update_weights_from(self, params: Mapping[str, Any], *, weight_version: str, **options: Any) -> dict[str, Any]:
        """Call `RolloutClient.update_weights_from`."""
        return self._run(self._client.update_weights_from(params, weight_version=weight_version, **options))

    def expert_placement(self) -> dict[str, Any]:
        """Call `RolloutClient.expert_placement`."""
        return self._run(self._client.expert_placement())

    def place_experts(self, placement: Mapping[str, Any]) -> dict[str, Any]:
        """Call `RolloutClient.place_experts`."""
        return self._run(self._client.place_experts(placement))

    def audit(self, samples: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Audit trajectories on the server; return the report of `/audit`.

        `samples` and `options` are the fields of its body. Raises Refused with status 409 for other weights.
        """
        return self._run(self._client.call("POST", "/audit", body={"samples": list(samples), **options}))

    def flush(self) -> None:
        """Call `RolloutClient.flush`."""
        self._run(self._client.flush())

    async def _gathered(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        calls: dict[tuple[Any, int], list[int]] = {}
        for place, request in enumerate(requests):
            calls.setdefault((_wanted(request), place // CALL_PROMPTS), []).append(place)
        of_calls = [[requests[place] for place in places] for places in calls.values()]
        answers = await asyncio.gather(*map(self._client.generate_many, of_calls))
        places = [place for of_call in calls.values() for place in of_call]
        samples = [samples for of_call in answers for samples in of_call]
        return [samples for _, samples in sorted(zip(places, samples, strict=True), key=lambda pair: pair[0])]

    def _run(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        return self._runner.run(call)


def _wanted(request: SampleRequest) -> tuple[tuple[str, int], ...]:
    """Return the fields that all prompts of a call share."""
    return (*request.returned.items(), ("routed_experts_start_len", request.rows_from))


def _failure_of(status: int, raw: bytes, retry_after: str) -> Exception:
    """Return the exception for a status other than 200; a 500 without our error object comes from a proxy."""
    message = _message_in(raw)
    if status in _TRANSIENT or (status == 500 and message is None):
        wait_s = float(retry_after) if retry_after.isdigit() else 0.0
        return Unavailable(f"status {status}: {message}", wait_s, status=status, is_cut=status in _CUT)
    if status in _UNUSABLE:
        return Unusable(message or f"status {status}")
    if status in _FAULTS:
        return Faulty(f"status {status}: {message}")
    return Refused(message or f"status {status}", status)


def _message_in(raw: bytes) -> str | None:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
