"""The candidate to take, and the settings of a config that serves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayserve_moe.config.topology import possible_slices
from rayserve_moe.tools.plan_slice.candidates import Assumptions, Candidate, Traffic


def best_of(own: Candidate | None, found: Mapping[str, Iterable[Candidate]], *, traffic: Traffic) -> Candidate | None:
    """Return the candidate to take, or None if there is none.

    With a config it is of the config's own slice, otherwise of any slice. Those that serve all requests at once come
    first, then those with the most tokens per second and chip.
    """
    every = [one for candidates in found.values() for one in candidates]
    on_slice = [one for one in every if own is None or one.split.topology == own.split.topology]
    return min(on_slice or every, key=lambda one: (one.served < traffic.concurrency, -one.per_chip), default=None)


def settings_of(one: Candidate, *, traffic: Traffic, given: Assumptions) -> dict[str, object]:
    """Return the settings that serve a candidate, for `args` of a config or as options of `serve MODEL`."""
    version, _, topology = one.split.topology.partition(":")
    tpu = possible_slices(topology, version)[0]
    settings: dict[str, object] = {
        "tpu_version": tpu.version,
        "tpu_topology": tpu.topology,
        "tpu_chips_per_host": tpu.chips_per_host,
        "num_hosts": tpu.num_hosts,
        "data_parallel_size": one.split.dp,
        "max_model_len": traffic.length,
        "max_running_requests": one.split.rows,
        "max_step_tokens": given.prefill_tokens,
    }
    if one.split.redundant:
        settings |= {"num_redundant_experts": one.split.redundant, "enable_eplb": True}
    if given.kv_dtype != "bfloat16":
        settings["kv_cache_dtype"] = "fp8"
    if given.expert_dtype != "auto":
        settings["expert_dtype"] = given.expert_dtype
    return settings


def advice(one: Candidate, *, traffic: Traffic, given: Assumptions) -> Iterable[str]:
    """Yield the lines after the tables: which row, why, and its settings to paste."""
    serves_all = one.served == traffic.concurrency
    how_many = "all requests" if serves_all else f"{one.served} of {traffic.concurrency} requests"
    settings = settings_of(one, traffic=traffic, given=given)
    yield ""
    yield f"Take the row with >: {how_many} at once, and the most tokens per second and chip. Under `args`:"
    yield ""
    yield from (f"    {name}: {str(value).lower() if value is True else value}" for name, value in settings.items())
