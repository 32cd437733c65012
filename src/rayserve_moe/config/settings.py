"""All settings, frozen, in a section per owner. `load` builds them, `derive` computes values from them.

A field declares its key (YAML, keyword arguments) if it differs from its name, and its aliases. Numbers declare bounds,
words their choices; the loader rejects all other values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.config.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS
from rayserve_moe.config.replay_settings import ReplaySettings
from rayserve_moe.config.replica_settings import ReplicaSettings
from rayserve_moe.config.setting_fields import DAY_S
from rayserve_moe.config.setting_fields import choice as _choice
from rayserve_moe.config.setting_fields import named as _named
from rayserve_moe.config.setting_fields import number as _number
from rayserve_moe.requests.fields import MAX_CONSTRAINT_BYTES


@dataclass(frozen=True)
class ServerSettings:
    """HTTP front end."""

    api_key: str = ""
    """Bearer token for every route except probes (`/health`, `/ready`) and the empty page `/experts`; empty disables
    authentication."""
    admin_api_key: str = ""
    """Bearer token for routes that affect all clients: weight updates, pauses, flushes, aborts of all requests. It is
    valid on all other routes too. If it is empty, `api_key` is valid on these routes."""
    log_requests: bool = False
    """Write a log line per request: route, status, times, tokens and finish reasons. It costs about as much CPU time as
    a short answer."""
    max_body_bytes: int = _number(16 << 20, (1, 1 << 30))
    """Maximum size of a request body."""
    max_intake_bytes: int = _number(256 << 20, (1, 1 << 40))
    """Bytes of bodies and prompts that are read, parsed and tokenized at once; further requests receive status 429."""
    drain_timeout_s: float = _number(120.0, (0, DAY_S))
    """Seconds that running requests have to finish at shutdown."""
    hand_over_after_s: float = _number(DAY_S, (0, DAY_S))
    """Seconds after which a replica that Serve stops ends requests that the journal keeps, so that clients resume them
    on another replica. It ends them at the latest 5 s before `drain_timeout_s` is over."""
    tool_call_parser: str = _choice("auto", "none", *TOOL_CALL_PARSERS)
    """Parser of tool calls in chat answers: `auto` uses the tokenizer's `response_template`, else the markers in the
    chat template; `none` leaves tool calls in the content; other values are names of parsers in vLLM or SGLang."""
    prefix_routing: str = _choice("auto", "on", "off")
    """`on`: routers choose replicas by their cached prefixes, including replicas that `rayserve-moe scale` adds.
    `auto`: `on` if there are several replicas at the start."""
    journal: str = _choice("auto", "on", "off")
    """`on`: requests with a client-supplied id outlive their replica, by a journal of committed tokens. `auto`: `on` if
    there are several replicas at the start, and a journal."""
    journal_address: str = ""
    """`HOST:PORT` of the journal. The start command runs a journal and sets RAYSERVE_MOE_JOURNAL."""
    journal_key: str = ""
    """Secret by which replicas and the journal authenticate each other; the start command generates one."""
    journal_max_bytes: int = _number(1 << 30, (1 << 20, 1 << 40))
    """Memory of the journal that the start command runs. A full journal drops the oldest answers, then keeps no more
    requests."""
    resume_ttl_s: float = _number(120.0, (0, DAY_S))
    """Seconds that a request can be resumed after its last byte was sent, or its connection or replica was lost."""
    reasoning_parser: str = _choice("auto", "none", *REASONING_PARSERS)
    """Parser of reasoning in chat answers, with values as for `tool_call_parser`."""
    exclude_tools_when_tool_choice_none: bool = False
    """Omit tools from the chat template if `tool_choice` is none. The answer is content in either case."""
    session_headers: tuple[str, ...] = ()
    """Additional request headers that name a session. They take precedence over the built-in ones. A session never
    changes an answer."""


MAX_DRAFTS = 7
DRAFT_MODELS = ("EAGLE", "EAGLE3", "NEXTN")
"""Values of `speculative_algorithm` that take a draft model."""


@dataclass(frozen=True)
class SpeculationSettings:
    """Speculative decoding: drafted tokens are verified several at a time. It changes the speed of answers only."""

    algorithm: str = _choice("off", "NGRAM", "SIBLINGS", *DRAFT_MODELS, key="speculative_algorithm")
    """Source of drafts: `NGRAM` takes tokens that followed an earlier occurrence of a sequence's last tokens;
    `SIBLINGS` also searches other answers to its prompt; `EAGLE`, `EAGLE3` and `NEXTN` use a draft model; `off` or null
    disables drafts."""
    draft_model_path: str = _named("", "speculative_draft_model_path")
    """Path of the `EAGLE` or `EAGLE3` head, as `model_path`. `NEXTN` uses a layer of the checkpoint instead."""
    num_steps: int = _number(0, (0, 7), "speculative_num_steps")
    """Maximum number of drafts of a sequence in one step; 0 is 7. Measured times choose 0, 1, 3, 5 or 7 drafts for each
    step."""
    num_draft_tokens: int = _number(0, (0, MAX_DRAFTS + 1), "speculative_num_draft_tokens")
    """Rows verified per sequence: `speculative_num_steps` plus 1."""
    min_match: int = _number(2, (1, 64), "speculative_ngram_min_match_window_size")
    """Minimum length of a match with the end of a sequence, tokens, before anything is drafted."""
    max_match: int = _number(8, (1, 64), "speculative_ngram_max_match_window_size")
    """Maximum length of a match with the end of a sequence, tokens."""

    @property
    def max_drafts(self) -> int:
        """Return the maximum number of drafts per sequence and step; 0 without speculation."""
        return 0 if self.algorithm == "off" else self.num_steps or max(self.num_draft_tokens - 1, 0) or MAX_DRAFTS


class SettingsError(ValueError):
    """Error for a setting that is unknown, has the wrong type, is out of range, or contradicts another."""


MAX_SEQUENCE_TOKENS = 1 << 24
"""Maximum tokens of a sequence: above any model, and positions times pages stay far below 32 bits."""
TPU_PAGE_SIZE = 128
"""Default tokens per page on a TPU: the attention kernel copies a layer's page at once."""


@dataclass(frozen=True)
class ModelSettings:
    """Served checkpoint."""

    path: str = _named("", "model_path")
    """A Hugging Face directory; a folder behind a URL, such as `gs://bucket/folder`; a model of the Hugging Face Hub,
    `organisation/name` or `hf://organisation/name`, optionally with `@revision`; `trained:calculator` for the small
    model in this package; or `synthetic:<preset>` for a seeded random checkpoint, created on first start."""
    served_name: str = _named("", "served_model_name")
    """Model name on the API; empty takes the checkpoint directory's name."""
    dtype: str = _choice("auto", "float32", "bfloat16")
    """`float32`, `bfloat16`, or `auto`: the checkpoint's dtype on an accelerator or with native CPU kernels, else
    float32."""
    max_model_len: int = _number(0, (0, MAX_SEQUENCE_TOKENS))
    """Maximum prompt plus output, tokens; 0 takes the checkpoint's limit."""
    logprobs_mode: str = _choice("processed_logprobs", "raw_logprobs")
    """Default log-probs of outputs: of the sampled distribution before truncation (processed), or the model's (raw)."""
    checkpoint_cache: str = "auto"
    """Directory on each host's own disk that keeps downloaded checkpoint data for later starts; `auto` is in the user's
    cache directory, `off` disables it. A tenth of the disk stays free."""


@dataclass(frozen=True)
class SchedulerSettings:
    """Limits of a step."""

    max_running_requests: int = _number(16, (1, 8192))
    """Sequences (choices) that run concurrently; each owns a row of device state."""
    max_waiting_requests: int = _number(1024, (0, 1_000_000))
    """Requests that may wait for a row; further requests are rejected."""
    max_step_tokens: int = _number(1024, (32, 1 << 20))
    """Maximum prompt tokens per step."""
    chunked_prefill_size: int = _number(0, (0, 1 << 20))
    """Maximum prompt tokens of a sequence per step; 0 allows a whole step."""
    overlap_steps: bool = True
    """Plan and submit a step before the tokens of the previous step are on the host."""
    decode_batch_sizes: tuple[int, ...] = _number((), (1, 8192), "precompile_bs_paddings")
    """Batch sizes to which decode steps are padded, each compiled once; empty derives them from the number of rows."""


@dataclass(frozen=True)
class StructuredSettings:
    """Answers constrained by a schema, an expression or a grammar, and limits of their cost."""

    enabled: bool = _named(True, "structured_output")
    """Accept constraints. Sampling is then deferred to a program of its own, compiled per decode batch size."""
    processors: str = _named("", "logit_processors")
    """Python module, or the path of its file, on every host, with functions that change logits of requests with their
    arguments (docs/logit_processors.md)."""
    num_threads: int = _number(2, (1, 64), "structured_output_threads")
    """Threads that compile constraints; further constraints wait."""
    timeout_s: float = _number(5.0, (0.1, 600), "structured_output_timeout_s")
    """Seconds until an uncompiled constraint is rejected, including the wait for a thread."""
    max_bytes: int = _number(MAX_CONSTRAINT_BYTES, (64, 1 << 24), "structured_output_max_bytes")
    """Maximum size of a schema, expression or grammar, as UTF-8 without spaces."""
    max_alternatives: int = _number(4096, (1, 1 << 20), "structured_output_max_alternatives")
    """Maximum number of choices, and of `enum` values in a schema in total."""
    max_mask_ms: float = _number(20.0, (0.1, 10_000), "structured_output_max_mask_ms")
    """Milliseconds per mask beyond which an answer ends with an error, because masks block all other requests."""


@dataclass(frozen=True)
class CacheSettings:
    """KV page pool."""

    kv_dtype: str = _choice("auto", "bfloat16", "fp8", key="kv_cache_dtype")
    """Storage dtype of keys and values: `auto` is the compute dtype, `fp8` is float8_e4m3fn without scales. `fp8` takes
    half of bfloat16's memory, rounds to 4 significant bits and clips beyond 448. Native CPU kernels do not support it,
    and TPUs do not store latents in it."""
    index_dtype: str = _choice("auto", "fp8", key="index_cache_dtype")
    """Storage dtype of the index keys of sparse attention: the KV cache's dtype, or float8_e4m3fn (not on TPUs)."""
    page_size: int = _number(16, (1, 4096))
    """Tokens per page. The default is 128 with `tpu_topology` or if a single process computes on a TPU, because its
    kernel copies page by page. A TPU takes multiples of 16. `num_pages` counts pages of this size."""
    num_pages: int = _number(0, (0, 1 << 26))
    """Pages of the pool; windowed layers keep fewer. 0 sizes the pool from the memory that is free after loading."""
    enable_prefix_caching: bool = True
    """Keep the pages of prompts and answers for later requests with the same prefix."""
    evicts_by_session: bool = True
    """Evict cached pages of ended sessions, and branches that an edited history leaves, before others."""
    protected_share: float = _number(0.5, (0.0, 0.9))
    """Maximum share of the pages that hints of clients, such as TTLs, may protect. Protected pages are evicted last."""
    max_protected_s: float = _number(30.0, (0.0, 86_400.0))
    """Maximum seconds of a protection; longer TTLs last this long. Values above the pauses for tool calls cost cache
    hits, because pages of ended sessions stay (docs/figures/fleet.md)."""
    mem_fraction: float = _number(0.8, (0.01, 1.0))
    """Fraction of the free memory given to pages if `num_pages` is 0."""
    state_fraction: float = _number(0.3, (0.0, 0.9))
    """For models with recurrent layers: fraction of the cache's memory that holds states of cached prefixes; the rest
    holds pages."""
    host_mib: int = _number(0, (0, 1 << 24), "host_cache_mib")
    """MiB of each host's memory for evicted pages, which return from there instead of being computed. 0: none."""
    state_interval: int = _number(0, (0, 1 << 24))
    """For models with recurrent layers: prompt tokens between cached states, a multiple of 64. 0 caches the states at a
    prompt's end, at its first difference from other prompts, and at the end of a request."""


@dataclass(frozen=True)
class ParallelSettings:
    """Devices of the slices."""

    num_hosts: int = _number(1, (1, 4096))
    """Worker processes, one per host."""
    devices_per_host: int = _number(0, (0, 128))
    """Devices used per host; 0 takes all of an accelerator host, and one of a CPU (even if more are emulated)."""
    data_parallel_size: int = _number(1, (1, 4096), "data_parallel_size", "dp_size")
    """Device groups with their own sequences; attention heads are split within a group, experts over all devices."""
    num_slices: int = _number(1, (1, 1024))
    """Slices of the hosts; each holds whole data-parallel groups."""


@dataclass(frozen=True)
class ExpertSettings:
    """Expert placement and token dispatch."""

    backend: str = _choice(
        "auto",
        "local",
        "replicated",
        "all_to_all",
        "fused",
        "device_sums",
        "low_latency_dispatch",
        key="expert_backend",
    )
    """`auto` selects by the number of tokens, other values are fixed choices. `low_latency_dispatch` is a TPU kernel
    for few tokens; steps that it does not support use `all_to_all`."""
    weight_dtype: str = _choice("auto", "bfloat16", "int8", "fp8", key="expert_dtype")
    """Storage dtype of expert weights. `auto` is the compute dtype, whatever the files hold. `int8` and `fp8` (e4m3)
    take a byte per weight and a float32 scale per output channel; weights are quantised while they are read, at the
    start and at every update. A checkpoint of the same 8 bits in 128 x 128 blocks keeps its bytes and scales."""
    products: str = _choice("auto", "fp8", key="expert_products")
    """`fp8` also rounds tokens to e4m3 for experts in fp8, which changes answers (v7x; ADR 0052); `auto` does not."""
    num_redundant: int = _number(0, (0, 128), "num_redundant_experts")
    """Expert slots per layer for replicas of busy experts; lowered until the slots divide evenly over devices."""
    dispatch: str = _choice("shares", "static", "first", "capacity", key="eplb_dispatch")
    """Slot of an expert that a token takes. `shares` splits tokens as planned; on several slices, in steps of at most
    128 tokens, it takes the slot nearest to the token and its other experts. `static` uses one slot per device, `first`
    uses no replica (for debugging), `capacity` fills the nearest slots to their capacity, then all slots evenly."""
    selection: str = _choice("auto", "topk", "replicas_only", "balanced", key="expert_selection")
    """`topk` takes the router's best experts, each in a single slot; `replicas_only` the same experts, in slots
    selected by `eplb_dispatch`; `balanced` sends a full slot's tokens to other experts, which changes the model's
    output. `auto` is `replicas_only` if experts have replicas, else `topk`."""
    capacity_factor: float = _number(2.0, (0.01, 1000.0))
    """Maximum tokens of a slot in `balanced` selection and `capacity` dispatch, as a multiple of the even load."""
    capacity_scope: str = _choice("global", "data_rank")
    """Scope of the capacity: `global` counts all tokens of a step exactly; `data_rank` counts a data rank's tokens
    against its share of the capacity, which avoids an all-gather of scores."""


@dataclass(frozen=True)
class BalancingSettings:
    """Expert load balancing (EPLB) while the server runs."""

    enabled: bool = _named(False, "enable_eplb")
    """Compile expert migration, allocate slots of a layer beside the weights, and rebalance experts by their load."""
    interval: int = _number(500, (1, 1_000_000), "eplb_interval")
    """Minimum steps between plans; no plan is made while experts still move."""
    window: int = _number(1000, (1, 1_000_000), "eplb_window")
    """Steps of load that a plan uses; counts are read every 16 steps, and the last reading is always used."""
    slots_per_step: int = _number(8, (1, 1024), "eplb_slots_per_step")
    """Maximum expert slots that a device sends, and receives, per step."""
    placement: str = _named("", "expert_placement")
    """File of `plan-experts` with the placement that experts move to in the first steps; needs `enable_eplb`. Empty:
    experts start in their own order."""


@dataclass(frozen=True)
class UpdateSettings:
    """Weight updates while the server runs."""

    weight_roots: tuple[str, ...] = ()
    """Directories and URLs below which weights may be read, after following links; empty permits every local directory
    and no URL."""
    staging_timeout_s: float = _number(600.0, (0.1, DAY_S))
    """Maximum time of hosts to read and check new weights; on a timeout the old weights continue to serve."""


@dataclass(frozen=True)
class CompileSettings:
    """Compilation of steps at the start."""

    cache: str = _named("auto", "compile_cache")
    """Directory that keeps compiled programs for later starts; `auto` is in the user's cache directory, `off` disables
    it. Every host keeps its own. A directory that other users can write to is rejected, because it holds code."""
    cpu_kernels: str = _choice("auto", "off", "native")
    """On a CPU: `native` computes in bfloat16 by kernels that the machine's C++ compiler builds on first use; `off`
    leaves everything to XLA. `auto` is native for a bfloat16 model on one device if the machine supports it."""
    invariant_products: str = _choice("auto", "on", "off")
    """Compute the same bits of a token's ids, log-probs and rows in every batch. Native CPU kernels always do. XLA on
    CPUs needs `on`, which computes fixed blocks of rows and is slower. `auto` is on if it costs nothing. TPUs refuse
    `on` with the reason for models and layouts whose compiled steps were not compared; GPUs always refuse it."""
    cpu_level: str = _choice("auto", "amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon")
    """Instruction set of native kernels: `auto` is the fastest level of the processor; a lower level computes as on a
    processor without the higher ones. All engines of a process share it."""


@dataclass(frozen=True)
class ClusterSettings:
    """Hosts of a replica over Ray."""

    transport: str = _choice("auto", "compiled_graph", "sockets")
    """`compiled_graph` or `sockets`; `auto` takes the graph on TPU hosts and sockets on others, because processes that
    wait in the graph busy-poll, which costs emulated hosts the cores that compute."""
    idle_release_s: float = _number(2.0, (0, DAY_S))
    """Seconds without work after which busy-polling transports are torn down."""
    start_timeout_s: float = _number(600.0, (1, DAY_S))
    """Maximum time of loading and compiling."""
    step_timeout_s: float = _number(120.0, (1, DAY_S))
    """Maximum time of a step, and of a collective's wait for a peer between emulated hosts."""
    max_rebuilds_in_10_minutes: int = _number(3, (0, 1_000_000))
    """Maximum number of times that a replica replaces lost hosts in 10 minutes; beyond it the replica ends. 0 ends it
    at the first loss."""
    max_rebuilds_in_hour: int = _number(10, (0, 1_000_000))
    """The same maximum within an hour."""
    elastic_after_s: float = _number(0.0, (0, DAY_S))
    """Seconds after which the group continues without lost hosts (lost slices of TPUs). All experts are spread over the
    other hosts until the lost hosts have been back for the same time. 0: the group waits for them."""
    elastic_max_lost: int = _number(1, (1, 1024))
    """Maximum number of slices, or emulated hosts, without which the group continues."""
    standby_workers: bool = False
    """Keep a second process per host, with libraries loaded, to replace a lost worker: about 200 MB each."""
    keep_sent_weights: str = _choice("auto", "before_swap", "after_swap", "off")
    """Keep a copy of sent weights, which are on no disk, in host memory, in a process per node. Lost workers and
    replicas that start later load from it. `before_swap` writes the copy before the weights serve, beside the previous
    copy; `after_swap` replaces the previous copy once the weights serve, and a worker lost meanwhile ends the replica.
    `auto` is `before_swap` if memory suffices for both copies, else `after_swap`; explicit values are rejected at the
    start if memory does not suffice. Without a copy, the replica ends with its workers."""
    keep_next_weights: bool = False
    """Also copy each host's share of sent weights to the next host on another node, for the same memory again, so that
    they survive the loss of a node."""
    cpus_per_host: float = _number(0.5, (0, 1024))
    """Ray CPU resource that each emulated host reserves on a CPU cluster."""
    platform: str = _choice("auto", "cpu", "gpu", "tpu")
    """Devices that compute. `auto`: TPUs with `tpu_topology`, else a server's CPU, or what jax finds in one process."""
    tpu_topology: str = ""
    """Topology of the slice to reserve, such as `2x4`; empty runs on emulated hosts of a CPU cluster."""
    tpu_version: str = ""
    """Generation of the slice, such as `v6e`."""
    tpu_chips_per_host: int = _number(0, (0, 8))
    """Chips per host if topology and generation leave it open (v5e and v6e `2x4`); 0 lets Ray decide."""


@dataclass(frozen=True)
class LoggingSettings:
    """Log lines of the replica, its workers and the rollout job; an in-process engine leaves that to its user."""

    level: str = _choice("info", "debug", "warning", "error", key="log_level")
    """Minimum level of log lines."""
    format: str = _choice("text", "json", key="log_format")
    """`text` for people; `json` for an object per line: `time`, `level`, `logger`, `message`, `request_id`, `trace`,
    and the fields of `log_requests`."""


@dataclass(frozen=True)
class Settings:
    """All settings by owner. A component receives its own sections; only an engine reads all of them."""

    model: ModelSettings = field(default_factory=ModelSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    structured: StructuredSettings = field(default_factory=StructuredSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    balancing: BalancingSettings = field(default_factory=BalancingSettings)
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    updates: UpdateSettings = field(default_factory=UpdateSettings)
    compile: CompileSettings = field(default_factory=CompileSettings)
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
