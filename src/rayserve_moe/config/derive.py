"""Values derived from the settings and the limits of the model."""

from __future__ import annotations

from dataclasses import replace

from rayserve_moe.config.replica_settings import ReplicaSettings
from rayserve_moe.config.settings import (
    CacheSettings,
    ClusterSettings,
    ExpertSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    Settings,
    SettingsError,
    SpeculationSettings,
)

SPARE_REQUESTS = 256
MAX_VERIFY_ROWS = 256


def max_model_len(model: ModelSettings, max_position_embeddings: int) -> int:
    """Return the maximum sequence length in tokens.

    Raises: SettingsError if the setting exceeds the limit.
    """
    if model.max_model_len > max_position_embeddings:
        limit = f"the checkpoint's max_position_embeddings {max_position_embeddings}"
        raise SettingsError(f"max_model_len {model.max_model_len} exceeds {limit}")
    return model.max_model_len or max_position_embeddings


def pages_per_sequence(num_tokens: int, page_size: int) -> int:
    """Return the number of pages for `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def max_useful_pages(scheduler: SchedulerSettings, cache: CacheSettings, *, max_tokens: int) -> int:
    """Return the maximum useful number of pages of a data rank.

    It covers full rows, the same number again for cached prefixes, and the null page.
    """
    shares = 2 if cache.enable_prefix_caching else 1
    return shares * scheduler.max_running_requests * pages_per_sequence(max_tokens, cache.page_size) + 1


def max_live_requests(scheduler: SchedulerSettings, *, num_data_ranks: int) -> int:
    """Return the number of running and waiting requests at which the engine rejects more; rows are per data rank."""
    return scheduler.max_running_requests * num_data_ranks + scheduler.max_waiting_requests


def max_open_requests(scheduler: SchedulerSettings, *, num_data_ranks: int) -> int:
    """Return the maximum number of concurrent HTTP requests per replica.

    It exceeds the engine's limit, so that the engine rejects requests.
    """
    return max_live_requests(scheduler, num_data_ranks=num_data_ranks) + SPARE_REQUESTS


def units_of_loss(cluster: ClusterSettings, parallel: ParallelSettings) -> int:
    """Return the number of units that are lost as a whole: slices, or the hosts of a single emulated slice."""
    return parallel.num_slices if cluster.tpu_topology or parallel.num_slices > 1 else parallel.num_hosts


def group_sizes(cluster: ClusterSettings, parallel: ParallelSettings) -> tuple[ParallelSettings, ...]:
    """Return the parallel settings of a group by descending size: first with all hosts, then with fewer.

    Raises: SettingsError if an elastic group cannot shrink as configured.
    """
    if not cluster.elastic_after_s:
        return (parallel,)
    units, max_lost = units_of_loss(cluster, parallel), cluster.elastic_max_lost
    if units <= max_lost:
        raise SettingsError(
            f"elastic_after_s: elastic_max_lost {max_lost} leaves none of {units} slices or emulated hosts"
        )
    ranks, rest = divmod(parallel.data_parallel_size, units)
    if rest:
        raise SettingsError(
            f"elastic_after_s: {units} slices or emulated hosts have no whole data ranks each with data_parallel_size "
            f"{parallel.data_parallel_size}: take a multiple of {units}"
        )
    hosts = parallel.num_hosts // units
    return tuple(
        replace(
            parallel,
            num_hosts=hosts * left,
            num_slices=min(left, parallel.num_slices),
            data_parallel_size=ranks * left,
        )
        for left in range(units, units - max_lost - 1, -1)
    )


def server_platform(cluster: ClusterSettings) -> str:
    """Resolve `platform: auto` for the hosts of a server."""
    if cluster.platform != "auto":
        return cluster.platform
    return "tpu" if cluster.tpu_topology else "cpu"


def transport(cluster: ClusterSettings) -> str:
    """Resolve `transport: auto`."""
    if cluster.transport != "auto":
        return cluster.transport
    return "compiled_graph" if cluster.tpu_topology else "sockets"


def verify_rows(scheduler: SchedulerSettings, speculation: SpeculationSettings) -> int:
    """Return the rows of a data rank in the largest step without prompts: each row with all its drafts.

    The number is capped at MAX_VERIFY_ROWS, beyond which drafts gain little, but never below the number of rows. It is
    0 without speculation.
    """
    if not speculation.max_drafts:
        return 0
    rows = scheduler.max_running_requests
    return max(rows, min(rows * (1 + speculation.max_drafts), MAX_VERIFY_ROWS))


def prefill_chunk_tokens(scheduler: SchedulerSettings) -> int:
    """Return the maximum prompt tokens of a sequence per step."""
    return min(scheduler.chunked_prefill_size or scheduler.max_step_tokens, scheduler.max_step_tokens)


def compute_dtype(setting: str, *, platform: str, checkpoint_dtype: str) -> str:
    """Resolve `dtype: auto`: the checkpoint's dtype on an accelerator, float32 if XLA computes on a CPU."""
    if setting != "auto":
        return setting
    if platform == "cpu":
        return "float32"
    return "float32" if checkpoint_dtype == "float32" else "bfloat16"


def expert_dtype(experts: ExpertSettings, *, dtype: str) -> str:
    """Resolve `expert_dtype` for a model computed in `dtype`.

    Raises: SettingsError for bfloat16 experts of a model computed in another dtype.
    """
    if experts.weight_dtype == "bfloat16" and dtype != "bfloat16":
        raise SettingsError(f"expert_dtype bfloat16: the model is computed in {dtype}; take auto, int8 or fp8")
    return {"auto": dtype, "fp8": "float8_e4m3fn"}.get(experts.weight_dtype, experts.weight_dtype)


def kv_dtype(cache: CacheSettings, *, dtype: str) -> str:
    """Resolve `kv_cache_dtype` for a model computed in `dtype`."""
    return {"auto": dtype, "fp8": "float8_e4m3fn"}.get(cache.kv_dtype, cache.kv_dtype)


def keeps_journal(settings: Settings) -> bool:
    """Return True if requests outlive their replica: by the setting, or by default with several replicas."""
    return {"on": True, "off": False}.get(settings.server.journal, max_num_replicas(settings.replicas) > 1)


def max_num_replicas(replicas: ReplicaSettings) -> int:
    """Return the number of replicas that the server may reach without a manual scale-up.

    Raises: SettingsError if the bounds contradict each other.
    """
    minimum, number, maximum = replicas.min_replicas, replicas.num_replicas, replicas.max_replicas
    if maximum and not minimum <= number <= maximum:
        raise SettingsError(
            f"num_replicas {number} must lie between min_replicas {minimum} and max_replicas {maximum} (0: no scaling)"
        )
    return max(number, maximum)


def check_roles(settings: Settings) -> None:
    """Raise SettingsError if there are prefill replicas without `host_cache_mib`, or without a replica that decodes."""
    number, replicas = settings.replicas.num_prefill, settings.replicas
    if not number:
        return
    if not settings.cache.host_mib:
        raise SettingsError(f"num_prefill_replicas {number} needs host_cache_mib: pages pass through host memory")
    minimum = replicas.min_replicas if replicas.max_replicas else replicas.num_replicas
    if number >= minimum:
        raise SettingsError(f"num_prefill_replicas {number} leaves none of {minimum} replicas to answer requests")
    if settings.server.prefix_routing == "off":
        raise SettingsError(f"num_prefill_replicas {number} needs prefix_routing: requests go to the other replicas")


def sent_copies(cluster: ClusterSettings) -> tuple[int, int]:
    """Return the memory of a sent update beyond the serving weights, in copies of a host's share.

    Returns: copies for the first update, and copies beyond the kept ones for a later update; both 0 if the setting does
    not require memory for kept copies.
    """
    at_once = {"before_swap": 2, "after_swap": 1}.get(cluster.keep_sent_weights, 0)
    each, staged = 2 if cluster.keep_next_weights else 1, 1
    return (staged + at_once * each, staged + (at_once - 1) * each) if at_once else (0, 0)
