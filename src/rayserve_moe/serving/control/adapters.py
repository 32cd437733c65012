"""LoRA adapters that all replicas merge into the configured checkpoint, by the routes of SGLang and vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rayserve_moe.checkpoints.adapters.config import CONFIG_FILE
from rayserve_moe.checkpoints.adapters.directory import NO_ADAPTER, adapter_body, holds
from rayserve_moe.checkpoints.bucket import SentAdapter, read_bucket
from rayserve_moe.checkpoints.files import CONFIG_FILE as CHECKPOINT_CONFIG
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.config.given_files import Reach, is_url, one_line
from rayserve_moe.engine.updates.adapters import adapter_order, load_fault, unload_fault
from rayserve_moe.engine.updates.orders import WeightOrder, WeightOutcome
from rayserve_moe.engine.updates.tensors import AnyBucket, BucketOrder, UpdateConflictError
from rayserve_moe.serving.api.schemas.control import LoadAdapterBody, UnloadAdapterBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.errors import ApiError


@dataclass(frozen=True)
class AdapterOutcome:
    """Result of loading or unloading an adapter."""

    outcome: WeightOutcome
    name: str
    path: str = ""
    """Directory of a loaded adapter."""


async def load_adapter(fleet: Fleet, body: LoadAdapterBody) -> AdapterOutcome:
    """Merge the adapter of a directory into the configured checkpoint on all replicas, or on none.

    Raises: ApiError 404 if there is no adapter, 400 if the directory is not permitted, 409 if other weights serve.
    """
    reach = reach_of(fleet.state, body.lora_path)
    if not await asyncio.to_thread(holds, body.lora_path, CONFIG_FILE, reach=reach):
        raise ApiError(404, f"`lora_path` has no {CONFIG_FILE}", param="lora_path", code="adapter_not_found")
    order = WeightOrder("", body.weight_version or None, aborts_requests=body.abort_all_requests)
    return AdapterOutcome(
        await merge_directory(fleet, body.lora_path, order=order, name=body.lora_name), body.lora_name, body.lora_path
    )


async def unload_adapter(fleet: Fleet, body: UnloadAdapterBody) -> AdapterOutcome:
    """Restore the configured checkpoint on all replicas.

    Raises: ApiError 404 unless the adapter of this name is merged.
    """
    if fault := unload_fault(fleet.state.loop.control.adapter, body.lora_name):
        raise ApiError(404, fault, param="lora_name", code="adapter_not_found")
    content = bytearray(NO_ADAPTER)
    order = adapter_order("", weight_version=body.weight_version or None, aborts_requests=body.abort_all_requests)
    return AdapterOutcome(await _staged(fleet, read_bucket(content), content=content, order=order), body.lora_name)


async def merge_directory(fleet: Fleet, path: str, *, order: WeightOrder, name: str) -> WeightOutcome:
    """Merge the adapter of a directory, under a name, by an order for its weights.

    Raises: ApiError 409 if weights other than the configured checkpoint serve.
    """
    check_base(fleet.state)
    try:
        content = await asyncio.to_thread(adapter_body, path, reach_of(fleet.state, path))
        bucket = await asyncio.to_thread(read_bucket, content)
    except CheckpointError as error:
        message = one_line(str(error).replace(f"{path.rstrip('/')}/", ""))
        return WeightOutcome(False, message, fleet.state.card.weight_version)
    named = adapter_order(name, weight_version=order.weight_version, aborts_requests=order.aborts_requests)
    return await _staged(fleet, bucket, content=content, order=named)


async def _staged(fleet: Fleet, bucket: AnyBucket, *, content: bytearray, order: BucketOrder) -> WeightOutcome:
    """Stage an update of a single bucket on all replicas and serve it. Raises: ApiError 409 if another update runs."""
    try:
        return await fleet.stage_bucket(bucket, sent=content, order=order)
    except UpdateConflictError as error:
        raise ApiError(409, str(error), code="weights_conflict") from error


async def names_adapter(state: ApiState, path: str) -> bool:
    """Return True if a directory of weights holds an adapter and no checkpoint."""
    reach = Reach(state.weight_roots)
    found = () if is_url(path) else (CONFIG_FILE, CHECKPOINT_CONFIG)
    return [await asyncio.to_thread(holds, path, file, reach=reach) for file in found] == [True, False]


def check_base(state: ApiState) -> None:
    """Raise ApiError 409 if weights other than the configured checkpoint, alone or with an adapter, serve."""
    if fault := load_fault(state.loop.control.adapter):
        raise ApiError(409, fault, code="weights_conflict")


def reach_of(state: ApiState, path: str) -> Reach:
    """Return the files that adapters may be read from. Raises ApiError 400 for a directory beyond `weight_roots`."""
    roots = state.weight_roots
    if is_url(path) or not Reach(roots).covers(path):
        reason = "should be a directory" if is_url(path) else "lies outside of weight_roots"
        raise ApiError(400, f"`lora_path` {reason}", param="lora_path", code="weights_refused")
    return Reach(roots)


def sent_name(state: ApiState, bucket: object, *, name: str) -> str | None:
    """Return the name under which a sent bucket's adapter serves: by default the model's; None for other weights.

    Raises: ApiError 409 for an adapter if weights other than the configured checkpoint serve.
    """
    if not isinstance(bucket, SentAdapter):
        return None
    check_base(state)
    return "" if bucket.restores_base else name or state.card.name
