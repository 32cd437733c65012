"""tunix' `Sampler` over a server, with rows and weight syncs. Imports nothing of tunix.

Read at google/tunix c7d8950f: `experimental/rollout/sampler.py`. Its protocol is structural: objects with the fields
below are requests and answers.
"""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.header import DTYPES
from rayserve_moe.rollouts.adapters.tunix import UNSET
from rayserve_moe.rollouts.adapters.tunix_sync import WeightSync
from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.client import REQUEST_TIMEOUT_S, RolloutClient
from rayserve_moe.rollouts.schema import Rollout

_FINISHED = {"abort": "cancelled"}
"""tunix' names of our finish reasons, where they differ."""
_REFUSED = {"return_logits": "logits are not returned; return_logprobs has their log-softmax", "beam_size": "no beams"}


@dataclass(kw_only=True)
class SamplingError:
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
    error: SamplingError | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """`weight_version`, `policy_version` (None if no integer, or of several versions), `routing_missing`."""


@dataclass(kw_only=True)
class ServerLoad:
    """Load of the server."""

    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0
    """0 to 1, as vLLM's metric of this name."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a weight, by its name in the checkpoint."""

    shape: tuple[int, ...]
    dtype: str


class TunixSampler(WeightSync):
    """A sampler that honours each request's own parameters. Every call is made on one event loop."""

    def __init__(
        self, url: str, *, api_key: str = "", checkpoint: str = "", timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        super().__init__(RolloutClient(url, api_key=api_key, timeout_s=timeout_s))
        self._checkpoint = checkpoint
        """Directory whose tensors `get_target_state` describes."""

    def initialize(self) -> None:
        """Do nothing: the server holds the model."""

    async def start(self, **_: Any) -> None:
        """Connect to the server. Raises as `RolloutClient` if it does not answer."""
        await self._client.__aenter__()
        answers = False
        try:
            await self._client.model_info()
            answers = True
        finally:
            if not answers:
                await self._client.__aexit__()

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

    async def get_load_info(self, **_: Any) -> ServerLoad:
        """Return the requests and the pages in use, over all replicas."""
        load = await self._client.call("GET", "/v1/loads")
        return ServerLoad(
            num_requests_waiting=load["num_waiting_reqs"],
            num_requests_running=load["num_running_reqs"],
            kv_cache_usage_perc=load["token_usage"],
        )

    async def migrate_kv_cache(self, *_: Any, **__: Any) -> bool:
        """Return False: pages do not move between servers, which compute them anew."""
        return False

    async def sample(self, sampling_requests: Any, **_: Any) -> list[SamplingResponse]:
        """Sample every request concurrently; return their answers in order.

        A request has a `prompt` (text, token ids, or chat messages) and `sampling_params` with optional fields.
        A prompt that fails is answered with `error`.
        """
        is_one = hasattr(sampling_requests, "prompt")
        requests = [sampling_requests] if is_one else list(sampling_requests)
        return list(await asyncio.gather(*map(self._answer, requests)))

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
            found = SamplingError(
                error_type=type(error).__name__,
                message=str(error),
                retryable=is_transient,
                traceback=traceback.format_exc(),
            )
            return SamplingResponse(request_id=request_id, finish_reason="error", error=found)
        return response_of(rollouts[0], request_id, has_logprobs=bool(getattr(params, "return_logprobs", False)))

    async def _prompt_ids(self, prompt: Any) -> Sequence[int]:
        body: Mapping[str, Any]
        if isinstance(prompt, str):
            body = {"prompt": prompt}
        elif isinstance(prompt, Mapping):
            body = prompt if "messages" in prompt else {"messages": [prompt]}
        elif len(prompt) and isinstance(prompt[0], Mapping):
            body = {"messages": list(prompt)}
        else:
            return np.asarray(prompt, np.int32).tolist()
        return (await self._client.call("POST", "/tokenize", body=body))["tokens"]


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


def _or_else(value: Any, default: int) -> int:
    return default if value is None else int(value)
