"""LoRA adapters by the routes of SGLang and vLLM: all replicas hold them beside the weights, or merge one into them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from rayserve_moe.serving.control.adapter_probe import probe_of
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.errors import ApiError


@dataclass(frozen=True)
class AdapterOutcome:
    """Result of loading or unloading an adapter."""

    outcome: WeightOutcome
    name: str
    is_loaded: bool
    """True after a load, False after an unload."""
    loaded: Mapping[str, str]
    """Directory of each adapter that requests may name."""


async def load_adapter(fleet: Fleet, body: LoadAdapterBody) -> AdapterOutcome:
    """Load the adapter of a directory on all replicas: beside the weights, or merged into the configured checkpoint.

    Raises: ApiError 404 if there is no adapter, 400 if the directory is not permitted, 409 if it is merged and other
        weights serve.
    """
    reach = reach_of(fleet.state, body.lora_path)
    if not await asyncio.to_thread(holds, body.lora_path, CONFIG_FILE, reach=reach):
        raise ApiError(404, f"`lora_path` has no {CONFIG_FILE}", param="lora_path", code="adapter_not_found")
    if holds_beside(fleet.state) and not body.merge:
        outcome = await _load_directory(fleet, body.lora_path, name=body.lora_name)
        return AdapterOutcome(outcome, body.lora_name, True, _beside(fleet.state))
    order = WeightOrder("", body.weight_version or None, aborts_requests=body.abort_all_requests)
    outcome = await _merge_probed(fleet, body.lora_path, order=order, name=body.lora_name)
    return AdapterOutcome(outcome, body.lora_name, True, {body.lora_name: body.lora_path} | _beside(fleet.state))


async def unload_adapter(fleet: Fleet, body: UnloadAdapterBody) -> AdapterOutcome:
    """Unload the adapter of a name on all replicas; if it is merged, restore the configured checkpoint.

    Raises: ApiError 404 unless an adapter of this name is loaded.
    """
    if body.lora_name in _beside(fleet.state):
        outcome = await fleet.unload_adapter(body.lora_name)
        return AdapterOutcome(outcome, body.lora_name, False, _beside(fleet.state))
    if fault := unload_fault(fleet.state.loop.control.adapter, body.lora_name):
        raise ApiError(404, fault, param="lora_name", code="adapter_not_found")
    content = bytearray(NO_ADAPTER)
    order = adapter_order("", weight_version=body.weight_version or None, aborts_requests=body.abort_all_requests)
    outcome = await _staged(fleet, read_bucket(content), content=content, order=order)
    return AdapterOutcome(outcome, body.lora_name, False, _beside(fleet.state))


def holds_beside(state: ApiState) -> bool:
    """Return True if a server holds adapters beside the weights."""
    return state.loop.control.adapters is not None


def is_loaded(state: ApiState, name: str) -> bool:
    """Return True if requests may name an adapter, beside the weights or merged."""
    return name in _beside(state) or (bool(name) and state.loop.control.adapter == name)


def _beside(state: ApiState) -> dict[str, str]:
    """Return the directories of the adapters beside the weights, by name."""
    loads = state.loop.control.adapters
    if loads is None:
        return {}
    paths = {each.name: each.path for each in loads.table.named()}
    return {name: paths[name] for name in [*loads.table.current] if name in paths}


async def _load_directory(fleet: Fleet, path: str, *, name: str) -> WeightOutcome:
    """Hold the adapter of a directory beside the weights on all replicas."""
    found = await _read(fleet.state, path)
    if isinstance(found, WeightOutcome):
        return found
    adapter, content = found
    return await fleet.load_adapter(adapter, name, path=path, sent=content)


async def _read(state: ApiState, path: str) -> tuple[SentAdapter, bytearray] | WeightOutcome:
    """Return the adapter of a directory with its body, or the refusal of one that is not readable."""
    try:
        content = await asyncio.to_thread(adapter_body, path, reach_of(state, path))
        adapter = await asyncio.to_thread(read_bucket, content)
    except CheckpointError as error:
        message = one_line(str(error).replace(f"{path.rstrip('/')}/", ""))
        return WeightOutcome(False, message, state.card.weight_version)
    assert isinstance(adapter, SentAdapter), "the body of an adapter"
    return adapter, content


async def take_sent_adapter(fleet: Fleet, adapter: SentAdapter, *, name: str, sent: bytearray) -> WeightOutcome:
    """Hold a sent adapter beside the weights on all replicas; without an adapter, unload the name.

    Raises: ApiError 404 for the name of no loaded adapter.
    """
    if not adapter.restores_base:
        return await fleet.load_adapter(adapter, name, path="", sent=sent)
    if name not in _beside(fleet.state):
        raise ApiError(404, unload_fault("", name), param="lora_name", code="adapter_not_found")
    return await fleet.unload_adapter(name)


async def _merge_probed(fleet: Fleet, path: str, *, order: WeightOrder, name: str) -> WeightOutcome:
    """Merge the adapter of a directory; if this server also holds it beside the weights, compare both on a probe."""
    check_base(fleet.state)
    probe = None
    if holds_beside(fleet.state):
        adapter = await _read(fleet.state, path)
        probe = await probe_of(fleet.state, adapter[0]) if isinstance(adapter, tuple) else None
    outcome = await merge_directory(fleet, path, order=order, name=name)
    if probe is None or not outcome.success:
        return outcome
    return replace(outcome, probe_kl=await probe.kl(fleet.state))


async def merge_directory(fleet: Fleet, path: str, *, order: WeightOrder, name: str) -> WeightOutcome:
    """Merge the adapter of a directory, under a name, by an order for its weights.

    Raises: ApiError 409 if weights other than the configured checkpoint serve.
    """
    check_base(fleet.state)
    found = await _read(fleet.state, path)
    if isinstance(found, WeightOutcome):
        return found
    adapter, content = found
    named = adapter_order(name, weight_version=order.weight_version, aborts_requests=order.aborts_requests)
    return await _staged(fleet, adapter, content=content, order=named)


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
