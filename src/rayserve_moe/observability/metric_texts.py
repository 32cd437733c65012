"""Names, kinds, help texts and labels of all Prometheus metrics."""

from __future__ import annotations

from typing import Literal, NamedTuple


class MetricText(NamedTuple):
    """The declaration of a metric."""

    name: str
    """Without the prefix, and without the `_total` of a counter."""
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    """The help text."""
    labels: tuple[str, ...] = ()
    """Labels besides the model's name."""

    @property
    def sample(self) -> str:
        """Return the name under which Prometheus shows the metric, without the prefix."""
        return self.name + "_total" * (self.kind == "counter")


def _gauge(name: str, text: str, *labels: str) -> MetricText:
    return MetricText(name, "gauge", text, labels)


def _counter(name: str, text: str, *labels: str) -> MetricText:
    return MetricText(name, "counter", text, labels)


def _histogram(name: str, text: str) -> MetricText:
    return MetricText(name, "histogram", text)


_DECLARED = (
    _gauge("build_info", "1, labelled with the versions of packages", "version", "jax", "ray"),
    _gauge("weight_version_info", "1, labelled with the version of the served weights", "weight_version"),
    _gauge("kv_pages", "KV pages of all data ranks; windowed layers keep fewer"),
    _gauge("kv_pages_free", "KV pages that no running choice holds, with or without a cached prefix"),
    _gauge("kv_pages_cached", "KV pages that hold cached prefixes"),
    _gauge("kv_tokens_in_use", "tokens of running choices whose keys and values are in KV pages"),
    _gauge("kv_usage_ratio", "fraction of KV pages held by running choices"),
    _gauge("requests_live", "requests in the engine"),
    _gauge("requests_running", "choices that are running"),
    _gauge("requests_waiting", "choices that wait to run"),
    _gauge("paused", "1 while generation is paused"),
    _gauge("picks_kept_ratio", "fraction of expert selections unchanged by slot limits"),
    _gauge("rank_imbalance_ratio", "expert selections of the hottest rank divided by the mean, over all steps"),
    _gauge("start_load_seconds", "time spent loading weights"),
    _gauge("start_compile_seconds", "wall time spent compiling programs"),
    _gauge("start_compile_work_seconds", "sum of the compile times of all programs"),
    _gauge("start_first_run_seconds", "time spent running every program once"),
    _gauge("start_programs", "programs compiled or read from disk at the start"),
    _gauge("start_programs_found", "programs read from disk at the start"),
    _gauge("host_pages", "pages that host memory can hold for all data ranks"),
    _gauge("host_pages_used", "evicted KV pages in host memory"),
    _counter("host_pages_offloaded", "evicted KV pages copied to host memory"),
    _counter("host_pages_restored", "KV pages copied back from host memory"),
    _counter("host_pages_computed", "KV pages in host memory that were computed again, because that was faster"),
    _counter("host_pages_without_rows", "evicted KV pages not copied, because some routing rows were not known"),
    _counter("pushed_pages_sent", "KV pages of prompts read for other replicas"),
    _counter("pushed_pages_received", "KV pages of prompts that another replica has computed"),
    _counter("pushes_refused", "prompts for which some or all pages pushed by another replica were dropped"),
    _counter("preemptions", "preemptions of running choices"),
    _counter("steps", "steps computed"),
    _counter("tokens_computed", "tokens computed, including prompts, without cached tokens"),
    _counter("tokens_sampled", "tokens sampled"),
    _counter("schedule_seconds", "time spent planning steps"),
    _counter("pack_seconds", "time spent packing steps"),
    _counter("transport_seconds", "time spent sending steps and receiving results"),
    _counter("device_seconds", "time spent waiting for devices"),
    _counter("commit_seconds", "time spent committing results"),
    _counter("mask_seconds", "time spent filling masks of constrained answers"),
    _counter("picks_rerouted", "expert selections moved to another expert because slots were full"),
    _counter("picks_unfilled", "expert selections without a slot"),
    _gauge("hosts_missing", "lost hosts that the group continues without"),
    _counter("rebuilds", "replacements of lost hosts"),
    _counter("requests_carried_over", "choices continued after a replacement of hosts"),
    _counter("rebuild_seconds", "time spent replacing hosts"),
    _counter("rebuild_phase_seconds", "time spent replacing hosts, by phase", "phase"),
    _histogram("time_to_first_token_seconds", "time from a request to its first token"),
    _histogram("inter_token_latency_seconds", "time between consecutive tokens of a choice"),
    _histogram("queue_time_seconds", "time that a choice waits to run"),
    _histogram("request_duration_seconds", "time from a request to the end of a choice"),
    _histogram("prompt_length_tokens", "tokens of a prompt"),
    _histogram("output_length_tokens", "output tokens of a choice"),
    _counter("choices_finished", "ended choices, by finish reason", "reason"),
    _counter("prompt_tokens", "prompt tokens of ended requests"),
    _counter("prompt_tokens_cached", "prompt tokens found in the cache"),
    _counter("draft_chains", "verifications of a choice's drafts", "proposer"),
    _counter("draft_tokens", "tokens drafted and verified", "proposer"),
    _counter("draft_tokens_accepted", "draft tokens accepted", "proposer"),
    _counter("draft_seconds", "time spent drafting", "proposer"),
    _gauge("draft_accepted_length", "tokens per verification, on average", "proposer"),
    _gauge("adapters_loaded", "LoRA adapters in host memory"),
    _gauge("adapters_resident", "LoRA adapters on the devices"),
    _counter("adapter_loads", "times that a LoRA adapter was put on the devices"),
    _counter("adapters_dropped", "LoRA adapters that left host memory for others"),
    _counter("http_requests", "answers by route and status", "route", "status"),
    _gauge("replica_up", "1 for a replica that answers, 0 for a listed replica that does not", "replica"),
    _gauge("journal_up", "1 while requests are kept in the journal"),
    _gauge("journal_entries", "requests in the journal"),
    _gauge("journal_bytes", "bytes in the journal"),
    _counter("journal_requests_dropped", "requests that did not fit into the journal"),
    _counter("journal_requests_resumed", "requests resumed on this replica"),
    _counter("journal_requests_lost", "kept answers lost with a journal"),
    _gauge("expert_imbalance", "load of the hottest device divided by the mean", "placement", "layer"),
    _gauge("expert_imbalance_max", "maximum over layers of the load imbalance", "placement"),
    _gauge("expert_imbalance_mean", "mean over layers of the load imbalance", "placement"),
    _gauge("expert_balancer_up", "1 while the planner answers"),
    _counter("expert_plans_refused", "plans refused, by reason", "reason"),
    _counter("expert_rebalances_begun", "rebalances begun"),
    _counter("expert_rebalances_finished", "rebalances finished"),
    _counter("expert_rebalances_replaced", "rebalances replaced by a newer plan"),
    _counter("expert_rebalances_failed", "rebalances that failed"),
    _counter("expert_slots_moved", "slots that received another expert"),
    _counter("expert_planning_seconds", "time spent on requests for plans"),
    _counter("expert_balancer_restarts", "reconnections to a restarted planner"),
    _gauge("expert_plan_age_seconds", "time since the planner last decided, by a plan or against one"),
    _gauge("expert_plan_overdue_periods", "steps since then over the interval of plans; about 1 while plans are made"),
    _gauge("expert_plan_wait_seconds", "time that the running call of the planner has taken"),
    _gauge("expert_plan_problem_time_seconds", "time of the last refusal or failure, by reason, unix time", "reason"),
    _gauge("expert_slots_under_way", "slots of the running rebalance that are not transferred yet"),
    _gauge("expert_imbalance_promised", "imbalance that the plan of the current placement expects, mean over layers"),
    _gauge("expert_imbalance_realised", "imbalance of the tokens counted since its rebalance, mean over layers"),
    _gauge("expert_distinct_ranks", "devices that compute a token, if requests ask for routing", "layer"),
    _gauge("expert_peak_rows_ratio", "rows of the hottest expert divided by the mean, last reading", "layer"),
)
METRICS = {each.name: each for each in _DECLARED}
"""All metrics by name."""
