"""tunix' `Sampler` over a server: samples with rows, and weight syncs as staged updates. Imports nothing of tunix.

Read at google/tunix c7d8950f: `experimental/rollout/sampler.py`. Its protocol is structural: objects with the fields
below are requests and answers.
"""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.header import DTYPES
from rayserve_moe.rollouts.adapters.tunix import UNSET
from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.client import REQUEST_TIMEOUT_S, RolloutClient
from rayserve_moe.rollouts.schema import Rollout
from rayserve_moe.rollouts.weights import StagedWeights

_FINISHED = {"abort": "cancelled"}
"""tunix' names of our finish reasons, where they differ."""
_REFUSED = {"return_logits": "logits are not returned; return_logprobs has their log-softmax", "beam_size": "no beams"}


@dataclass(kw_only=True)
class ErrorInfo:
    """Why a prompt has no sample."""

    error_type: str
    message: str
    retryable: bool = False
    traceback: str = ""


@dataclass(kw_only=True)
class SamplingResponse:
    """A sample of a prompt, or its error."""

    request_id: str = ""
    text: str = ""
    prompt_token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [P]."""
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [C]."""
    logprobs: np.ndarray | None = None
    """float32 [C]; None if not requested."""
    finish_reason: str = "stop"
    """stop, length, cancelled or error."""
    routed_experts: np.ndarray | None = None
    """int16 [P + C - start, all layers, k], UNSET for the last token, missing rows and layers without experts."""
    error: ErrorInfo | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """`weight_version`, `policy_version` (None if no integer, or of several versions), `routing_missing`."""


@dataclass(kw_only=True)
class LoadInfo:
    """Load of the server."""

    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0
    """0 to 1, as vLLM's metric of this name."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a weight, by its name in the checkpoint."""

    shape: tuple[int, ...]
    dtype: str


class Phase(StrEnum):
    """Progress of a weight sync."""

    IDLE = "idle"
    PREPARED = "prepared"
    STAGED = "h2d_done"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass
class _Round:
    """A weight sync, named by the `req_id` and `uuid` of its requests."""

    key: tuple[str, str]
    weight_version: str
    phase: Phase = Phase.PREPARED
    staged: StagedWeights | None = None
    model_path: str | None = None
    """Checkpoint to read in place of sent weights."""


class TunixSampler:
    """A sampler that honours each request's own parameters. Every call is made on one event loop.

    A sync pauses the server, stages the new weights beside those that serve, and switches to all of them at once. Each
    phase may be repeated; a round other than the current one is refused.
    """

    def __init__(
        self, url: str, *, api_key: str = "", checkpoint: str = "", timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self._client = RolloutClient(url, api_key=api_key, timeout_s=timeout_s)
        self._checkpoint = checkpoint
        """Directory whose tensors `get_target_state` describes."""
        self._round: _Round | None = None
        self._lock = asyncio.Lock()

    def initialize(self) -> None:
        """Do nothing: the server holds the model."""

    async def start(self, **_: Any) -> None:
        """Connect to the server. Raises as `RolloutClient` if it does not answer."""
        await self._client.__aenter__()
        try:
            await self._client.model_info()
        except BaseException:
            await self._client.__aexit__()
            raise

    async def stop(self, **_: Any) -> None:
        """Disconnect; the server goes on."""
        await self._client.__aexit__()

    async def pause(self, **_: Any) -> None:
        """Pause generation; running requests are recomputed after `resume`."""
        await self._client.pause("retract")

    async def resume(self, **_: Any) -> None:
        """Resume generation."""
        await self._client.resume()

    async def get_mesh(self, **_: Any) -> None:
        """Return None: the devices belong to the server."""

    def get_target_state(self) -> dict[str, TensorSpec]:
        """Return shape and dtype of each tensor that a sync sends. Raises ValueError without a readable checkpoint."""
        if not self._checkpoint:
            raise ValueError("get_target_state needs the `checkpoint` whose names and shapes a sync has")
        tensors = open_checkpoint(self._checkpoint).tensors
        return {name: TensorSpec(tuple(entry.shape), DTYPES[entry.dtype].name) for name, entry in tensors.items()}

    async def get_load_info(self, **_: Any) -> LoadInfo:
        """Return the requests and the pages in use, over all replicas."""
        load = await self._client.load()
        return LoadInfo(
            num_requests_waiting=load["num_waiting_reqs"],
            num_requests_running=load["num_running_reqs"],
            kv_cache_usage_perc=load["token_usage"],
        )

    async def migrate_kv_cache(
        self, source_server_id: str, target_server_id: str, token_ids: Sequence[int], **_: Any
    ) -> bool:
        """Return False: pages do not move between servers, which compute them anew."""
        return False

    async def sample(self, sampling_requests: Any, **_: Any) -> list[SamplingResponse]:
        """Sample every request concurrently; return their answers in order.

        Requests have `prompt` (text, token ids, or messages of a chat) and `sampling_params`, either of which may lack
        fields. A prompt that fails has an answer with `error`.
        """
        is_one = hasattr(sampling_requests, "prompt")
        requests = [sampling_requests] if is_one else list(sampling_requests)
        return list(await asyncio.gather(*map(self._answer, requests)))

    async def bind_weight_sync(self, **_: Any) -> dict[str, Any]:
        """Return the transport: weights arrive in the request of `weight_sync`."""
        return {"transport": "http"}

    async def get_weight_sync_metadata(self, **_: Any) -> dict[str, Any]:
        """Return the server's dtypes, which sent weights are rounded to, and its weight version."""
        info = await self._client.model_info()
        return {name: info[name] for name in ("dtype", "float32_tensors", "weight_version")}

    async def pre_weight_sync(self, sync_request: Any = None, **_: Any) -> str:
        """Begin a round: pause the server. Raises ValueError if another round is open, or this one has ended."""
        async with self._lock:
            key, current = _key_of(sync_request), self._round
            if current is not None and current.key == key:
                return current.phase
            if current is not None and current.phase in (Phase.PREPARED, Phase.STAGED):
                raise ValueError(f"round {current.key} is {current.phase}; end it before round {key}")
            await self._client.pause("retract")
            self._round = _Round(key, str(sync_request.policy_version))
            return self._round.phase

    async def weight_sync(self, sync_request: Any = None, **_: Any) -> str:
        """Stage the request's `weights`, by their names in the checkpoint; or take note of a checkpoint to read.

        The checkpoint is `model_path` of `extra_config`. The old weights still serve.
        """
        async with self._lock:
            current = self._current(sync_request, Phase.PREPARED, Phase.STAGED)
            if current.phase == Phase.PREPARED:
                weights = getattr(sync_request, "weights", None)
                current.model_path = (sync_request.extra_config or {}).get("model_path")
                if (weights is None) == (current.model_path is None):
                    raise ValueError("a sync has either `weights` or `model_path` in `extra_config`")
                if weights is not None:
                    version = current.weight_version
                    current.staged = await self._client.stage_weights(weights, weight_version=version)
                current.phase = Phase.STAGED
            return current.phase

    async def post_weight_sync(self, sync_request: Any = None, **_: Any) -> str:
        """Switch to the staged weights and resume. Raises Refused if the server keeps its old weights."""
        async with self._lock:
            current = self._current(sync_request, Phase.STAGED, Phase.COMMITTED)
            if current.phase == Phase.STAGED:
                if current.staged is not None:
                    await self._client.swap_staged(current.staged)
                else:
                    assert current.model_path is not None, "a staged round has weights or a path"
                    await self._client.update_weights(current.model_path, weight_version=current.weight_version)
                await self._client.resume()
                current.phase = Phase.COMMITTED
            return current.phase

    async def abort_weight_sync(self, sync_request: Any = None, **_: Any) -> str:
        """Drop what the round has staged, and resume with the old weights. Raises ValueError after a switch."""
        async with self._lock:
            current = self._current(sync_request, Phase.PREPARED, Phase.STAGED, Phase.ABORTED)
            if current.phase != Phase.ABORTED:
                if current.staged is not None:
                    await self._client.drop_staged(current.staged)
                await self._client.resume()
                current.phase = Phase.ABORTED
            return current.phase

    async def get_transfer_status(self, req_id: str, **_: Any) -> str:
        """Return the phase of the round of `req_id`, `idle` if it is not the current one."""
        current = self._round
        return current.phase if current is not None and current.key[0] == req_id else Phase.IDLE

    def _current(self, sync_request: Any, *phases: Phase) -> _Round:
        """Return the round of a request. Raises ValueError if it is stale or in none of the `phases`."""
        key, current = _key_of(sync_request), self._round
        if current is None or current.key != key:
            raise ValueError(f"round {key} was not begun, or another has begun since")
        if current.phase not in phases:
            raise ValueError(f"round {key} is {current.phase}, not {' or '.join(phases)}")
        return current

    async def _answer(self, request: Any) -> SamplingResponse:
        request_id, params = str(getattr(request, "request_id", "")), getattr(request, "sampling_params", None)
        try:
            sampling = sampling_of(params)
            rollouts = await self._client.generate(
                SampleRequest(
                    request_id,
                    await self._prompt_ids(request.prompt),
                    sampling,
                    seed=_or_else(getattr(params, "seed", None), secrets.randbits(32)),
                    returns_routing=bool(getattr(params, "return_routed_experts", False)),
                    rows_from=_or_else(getattr(params, "routed_experts_prompt_start", None), 0),
                )
            )
        except (Unavailable, Faulty, Refused, Unusable, ValueError, TypeError) as error:
            is_transient = isinstance(error, Unavailable | Faulty)
            found = ErrorInfo(
                error_type=type(error).__name__,
                message=str(error),
                retryable=is_transient,
                traceback=traceback.format_exc(),
            )
            return SamplingResponse(request_id=request_id, finish_reason="error", error=found)
        return response_of(rollouts[0], request_id, has_logprobs=bool(getattr(params, "return_logprobs", False)))

    async def _prompt_ids(self, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            return await self._client.tokenize({"prompt": prompt})
        if isinstance(prompt, Mapping):
            return await self._client.tokenize(prompt if "messages" in prompt else {"messages": [prompt]})
        if len(prompt) and isinstance(prompt[0], Mapping):
            return await self._client.tokenize({"messages": list(prompt)})
        return np.asarray(prompt, np.int32).tolist()


def sampling_of(params: Any) -> dict[str, Any]:
    """Return tunix' sampling parameters in our names; `params` may be None or lack fields. Raises ValueError for what
    the server does not do.
    """
    for name, why in _REFUSED.items():
        if getattr(params, name, None):
            raise ValueError(f"{name} is not supported: {why}")
    found = {"max_new_tokens": getattr(params, "max_tokens", 64), "temperature": getattr(params, "temperature", 1.0)}
    given = {name: getattr(params, name, None) for name in ("top_p", "top_k")}
    return found | {name: value for name, value in given.items() if value is not None}


def response_of(rollout: Rollout, request_id: str, *, has_logprobs: bool) -> SamplingResponse:
    """Return a rollout as an answer."""
    versions = {version for _, _, version in rollout.logprob_versions}
    known = next(iter(versions)) if len(versions) == 1 else ""
    return SamplingResponse(
        request_id=request_id,
        text=rollout.text,
        prompt_token_ids=rollout.prompt_ids,
        token_ids=rollout.output_ids,
        logprobs=rollout.logprobs if has_logprobs else None,
        finish_reason=_FINISHED.get(rollout.finish_reason, rollout.finish_reason),
        routed_experts=_rows_of(rollout),
        metadata={
            "weight_version": rollout.weight_version,
            "policy_version": int(known) if known.isdigit() else None,
            "routing_missing": list(rollout.routing.missing) if rollout.routing is not None else [],
        },
    )


def _rows_of(rollout: Rollout) -> np.ndarray | None:
    routing, layout = rollout.routing, rollout.layout
    if routing is None or layout is None:
        return None
    num_rows = len(rollout.prompt_ids) + len(rollout.output_ids) - routing.start
    rows = np.full((num_rows, layout.num_hidden_layers, layout.top_k), UNSET, np.int16)
    rows[: len(routing.rows), list(layout.layer_ids)] = routing.rows
    for first, last in routing.missing:
        rows[first - routing.start : last - routing.start] = UNSET
    return rows


def _key_of(sync_request: Any) -> tuple[str, str]:
    """Return the name of a round. Raises ValueError without a request."""
    if sync_request is None:
        raise ValueError("a weight sync needs its request: `policy_version`, and `req_id` and `uuid` in `extra_config`")
    config = getattr(sync_request, "extra_config", None) or {}
    return str(config.get("req_id", getattr(sync_request, "request_id", ""))), str(config.get("uuid", ""))


def _or_else(value: Any, default: int) -> int:
    return default if value is None else int(value)
