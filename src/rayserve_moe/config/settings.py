"""All settings, frozen, one section per owner. `load` fills them, `derive` computes what follows from them.

Each field names its key on the wire (YAML, keyword arguments) where that differs from its own name, and other names
that users know it by. Numbers state their bounds, words what they may say: the loader refuses all else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rayserve_moe.config.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS
from rayserve_moe.config.setting_fields import DAY_S
from rayserve_moe.config.setting_fields import choice as _choice
from rayserve_moe.config.setting_fields import named as _named
from rayserve_moe.config.setting_fields import number as _number
from rayserve_moe.requests.fields import LONGEST_CONSTRAINT


@dataclass(frozen=True)
class ServerSettings:
    """The HTTP edge."""

    api_key: str = ""
    """Bearer token that every route but `/health` and the empty page `/experts` asks for; empty for none."""
    admin_api_key: str = ""
    """Bearer token for routes that affect all clients: weight updates, pauses, flushes, aborting everything. It opens
    all other routes too. If it is empty, `api_key` opens these routes."""
    max_body_bytes: int = _number(16 << 20, (1, 1 << 30))
    """Maximum size of a request body."""
    max_intake_bytes: int = _number(256 << 20, (1, 1 << 40))
    """Bytes of bodies and prompts that are read, parsed and tokenized at once; a request beyond is answered 429."""
    drain_timeout_s: float = _number(120.0, (0, DAY_S))
    """Seconds running requests get to finish at shutdown."""
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
    shortest_match: int = _number(2, (1, 64), "speculative_ngram_min_match_window_size")
    """Minimum length of a match with the end of a sequence, tokens, before anything is drafted."""
    longest_match: int = _number(8, (1, 64), "speculative_ngram_max_match_window_size")
    """Maximum length of a match with the end of a sequence, tokens."""

    @property
    def max_drafts(self) -> int:
        """Return the maximum number of drafts per sequence and step; 0 without speculation."""
        return 0 if self.algorithm == "off" else self.num_steps or max(self.num_draft_tokens - 1, 0) or MAX_DRAFTS


class SettingsError(ValueError):
    """A setting that is unknown, of the wrong type, out of range, or at odds with another."""


MOST_TOKENS = 1 << 24
"""Of one sequence: beyond any model, and positions times pages stay far below 32 bits."""
TPU_PAGE_SIZE = 128
"""Tokens per page on a TPU where none are given: a page of a layer is one copy of the attention kernel."""


@dataclass(frozen=True)
class ModelSettings:
    """Which checkpoint is served, and as what."""

    path: str = _named("", "model_path")
    """A Hugging Face directory; a folder behind a URL, such as `gs://bucket/folder`; a model of the Hugging Face Hub,
    `organisation/name` or `hf://organisation/name`, `@revision` or not; `trained:calculator` for the small model that
    comes with this package; or `synthetic:<preset>` for a seeded random checkpoint made on first start."""
    served_name: str = _named("", "served_model_name")
    """Name on the API; the checkpoint directory's name when empty."""
    dtype: str = _choice("auto", "float32", "bfloat16")
    """`float32`, `bfloat16`, or `auto`: the checkpoint's on an accelerator or by native CPU kernels, else float32."""
    max_model_len: int = _number(0, (0, MOST_TOKENS))
    """Longest prompt plus output, tokens; 0 takes the checkpoint's own limit."""
    logprobs_mode: str = _choice("processed_logprobs", "raw_logprobs")
    """Log-probs of outputs where a request does not say: of what is sampled before truncation, or the model's own."""
    checkpoint_cache: str = "auto"
    """Directory on each host's own disk that keeps what was read of a remote checkpoint, for later starts; `auto` is
    one in the user's cache directory, `off` none. A tenth of the disk stays free."""


@dataclass(frozen=True)
class SchedulerSettings:
    """How much one step may hold."""

    max_running_requests: int = _number(16, (1, 8192))
    """Sequences (choices) that run at once; each owns a row of device state."""
    max_waiting_requests: int = _number(1024, (0, 1_000_000))
    """Requests queued for a row before new ones are refused."""
    max_step_tokens: int = _number(1024, (32, 1 << 20))
    """Prompt tokens computed in one step."""
    chunked_prefill_size: int = _number(0, (0, 1 << 20))
    """Prompt tokens of one sequence computed in one step; 0 allows a whole step."""
    overlap_steps: bool = True
    """Plan and submit a step before the tokens of the one before are on the host."""
    decode_batch_sizes: tuple[int, ...] = _number((), (1, 8192), "precompile_bs_paddings")
    """Batch sizes that decode steps are compiled for and padded to; empty derives them from the number of rows."""


@dataclass(frozen=True)
class StructuredSettings:
    """Answers that keep to a schema, an expression or a grammar, and what constraints may cost."""

    enabled: bool = _named(True, "structured_output")
    """Take constraints; samples are then drawn by a program of its own for each size of decode steps."""
    processors: str = _named("", "logit_processors")
    """A Python module, or the path of its file, on every host, with functions that change logits where a request gives
    their arguments (docs/logit_processors.md)."""
    num_threads: int = _number(2, (1, 64), "structured_output_threads")
    """Threads that compile constraints; others wait for them."""
    timeout_s: float = _number(5.0, (0.1, 600), "structured_output_timeout_s")
    """Seconds until a constraint that is not compiled is refused, waiting for a thread included."""
    max_bytes: int = _number(LONGEST_CONSTRAINT, (64, 1 << 24), "structured_output_max_bytes")
    """Longest schema, expression or grammar, as UTF-8 without spaces."""
    max_alternatives: int = _number(4096, (1, 1 << 20), "structured_output_max_alternatives")
    """Values of all `enum` in a schema together, and choices."""
    max_mask_ms: float = _number(20.0, (0.1, 10_000), "structured_output_max_mask_ms")
    """Milliseconds of one mask, beyond which its answer ends with an error: all others wait for it."""


@dataclass(frozen=True)
class CacheSettings:
    """The KV page pool."""

    kv_dtype: str = _choice("auto", "bfloat16", "fp8", key="kv_cache_dtype")
    """What keys and values are kept in: `auto` is what the model is computed in, `fp8` is float8_e4m3fn without scales,
    which takes half of bfloat16's memory, rounds to 4 significant bits and cuts off beyond 448. Not by native CPU
    kernels, which keep bfloat16, and on TPUs not for latents."""
    page_size: int = _number(16, (1, 4096))
    """Tokens per page; where it is not given, 128 where `tpu_topology` is, or where one process computes on a TPU: its
    kernel copies page by page. A TPU takes multiples of 16. `num_pages` counts pages of this size."""
    num_pages: int = _number(0, (0, 1 << 26))
    """Pages that sequences can hold, of which layers with a window keep fewer; 0 sizes the pool from the memory that
    is free after loading."""
    enable_prefix_caching: bool = True
    """Keep the pages of whole prompts and answers for later requests that begin alike."""
    mem_fraction: float = _number(0.8, (0.01, 1.0))
    """Part of the free memory given to pages when `num_pages` is 0."""


@dataclass(frozen=True)
class ReplaySettings:
    """Return of routed experts and hidden states."""

    enabled: bool = _named(False, "enable_return_routed_experts")
    """Compile routing capture into the steps and accept `return_routed_experts` on requests."""
    by_default: str = _choice("off", "nested", key="routed_experts_by_default")
    """What `/v1/completions` and `/v1/chat/completions` return of routing where a request says nothing: `nested` is the
    lists of vLLM's server flag, `off` none."""
    shows_hidden: bool = _named(False, "enable_return_hidden_states")
    """Have hidden states leave decode steps too: for `return_hidden_states` and `/v1/embeddings`. A program that
    gathers probed tokens is compiled for each size of steps."""


@dataclass(frozen=True)
class ParallelSettings:
    """Devices of the slice."""

    num_hosts: int = _number(1, (1, 4096))
    """Worker processes, one per host."""
    devices_per_host: int = _number(0, (0, 128))
    """Devices each host uses; 0 takes all of an accelerator host, and one of a CPU (where more are emulated)."""
    data_parallel_size: int = _number(1, (1, 4096), "data_parallel_size", "dp_size")
    """Groups of devices that run sequences of their own; attention heads are split within a group, experts over all."""
    num_slices: int = _number(1, (1, 1024))
    """Slices that the hosts lie on; whole data-parallel groups lie on each."""


@dataclass(frozen=True)
class ExpertSettings:
    """Expert placement and token dispatch."""

    backend: str = _choice(
        "auto", "local", "replicated", "all_to_all", "fused", "low_latency_dispatch", key="expert_backend"
    )
    """`auto` chooses by the number of tokens, other values are fixed choices. `low_latency_dispatch` is one kernel of
    TPUs for few tokens; `all_to_all` computes the steps that it does not take."""
    weight_dtype: str = _choice("auto", "bfloat16", "int8", "fp8", key="expert_dtype")
    """What the matrices of experts are kept in: `auto` is what the model is computed in, whatever files hold; `int8`
    and `fp8` (e4m3) a byte per weight and a float32 scale per output channel, quantised while weights are read, at the
    start and at every update. A checkpoint of the same 8 bits in 128 x 128 blocks keeps its bytes and scales."""
    num_redundant: int = _number(0, (0, 128), "num_redundant_experts")
    """Expert slots per layer beyond one per expert, which hold replicas of busy experts; lowered until slots divide."""
    dispatch: str = _choice("shares", "static", "first", "capacity", key="eplb_dispatch")
    """Which slot of an expert a token takes: `shares` splits its tokens as planned, `static` has one slot per device,
    `first` uses no replica, for debugging, `capacity` fills the nearest slots up to the capacity, then all evenly."""
    selection: str = _choice("auto", "topk", "replicas_only", "balanced", key="expert_selection")
    """`topk` takes the router's best experts, each in one slot; `replicas_only` the same experts, in the slots that
    `eplb_dispatch` says; `balanced` sends a full slot's tokens to other experts, which changes what the model computes.
    `auto` is `replicas_only` where there are replicas, else `topk`."""
    capacity_factor: float = _number(2.0, (0.01, 1000.0))
    """Tokens that a slot takes at most in `balanced` selection and `capacity` dispatch, in parts of the even load."""
    capacity_scope: str = _choice("global", "data_rank")
    """Who competes for slots: `global` all tokens of a step, exactly; `data_rank` those of a data rank, for its share,
    which spares gathering scores."""


@dataclass(frozen=True)
class BalancingSettings:
    """Moving experts between devices while the server runs."""

    enabled: bool = _named(False, "enable_eplb")
    """Compile what moves experts, allocate one layer's slots beside the weights, and have experts follow loads."""
    interval: int = _number(500, (1, 1_000_000), "eplb_interval")
    """Steps from one plan to the next at least; none is made while experts still move."""
    window: int = _number(1000, (1, 1_000_000), "eplb_window")
    """Steps whose tokens a plan is made from; counts are read every 16 steps, and the last reading is always used."""
    slots_per_step: int = _number(8, (1, 1024), "eplb_slots_per_step")
    """Expert slots that a device receives, and that it sends, with one step at most."""


@dataclass(frozen=True)
class UpdateSettings:
    """Other weights while the server runs."""

    weight_roots: tuple[str, ...] = ()
    """Directories and URLs below which weights may be read, wherever links lead; empty: every local directory, and no
    URL."""
    staging_timeout_s: float = _number(600.0, (0.1, DAY_S))
    """Longest time that hosts may take to read and check other weights; after it the old ones serve on."""


@dataclass(frozen=True)
class CompileSettings:
    """Compiling the steps at the start."""

    cache: str = _named("auto", "compile_cache")
    """Directory that keeps compiled programs for later starts; `auto` is one in the user's cache directory, `off` none.
    Every host keeps its own, there or on a disk of its own. What another user could write to is refused: it is code."""
    cpu_kernels: str = _choice("auto", "off", "native")
    """On a CPU: `native` computes in bfloat16, by kernels that a C++ compiler of the machine builds on first use; `off`
    leaves everything to XLA. `auto` is native for a bfloat16 model on one device, where the machine can do it."""
    cpu_level: str = _choice("auto", "amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon")
    """Instructions that native kernels use: `auto` is the fastest level of the processor; a lower one computes as on a
    processor that has no more. All engines of a process share it."""


@dataclass(frozen=True)
class ReplicaSettings:
    """How many replicas serve, and how demand changes their number."""

    num_replicas: int = _number(1, (1, 4096))
    """Replicas at the start, each on hosts of its own; `rayserve-moe scale` changes their number later."""
    min_replicas: int = _number(1, (1, 4096))
    """The fewest replicas that are kept where `max_replicas` is set."""
    max_replicas: int = _number(0, (0, 4096))
    """The most replicas to which their demand may raise their number; 0 leaves the number alone."""
    target_demand: float = _number(0.7, (0.05, 1))
    """What the mean demand is kept at: rows or KV pages in use, and what waits for them, over what a replica has."""
    upscale_delay_s: float = _number(3.0, (0, DAY_S))
    """Seconds for which more replicas have to be wanted before they are started."""
    downscale_delay_s: float = _number(300.0, (0, DAY_S))
    """Seconds for which fewer have to be wanted before some drain and end."""


@dataclass(frozen=True)
class ClusterSettings:
    """How the serving replica drives its hosts over Ray."""

    transport: str = _choice("auto", "compiled_graph", "sockets")
    """`compiled_graph` or `sockets`; `auto` takes the graph on TPU hosts, sockets on others: processes
    that wait in the graph poll, which costs emulated hosts the very cores that compute."""
    idle_release_s: float = _number(2.0, (0, DAY_S))
    """Seconds without work after which busy-polling transports are torn down."""
    start_timeout_s: float = _number(600.0, (1, DAY_S))
    """Longest time loading and compiling may take."""
    step_timeout_s: float = _number(120.0, (1, DAY_S))
    """Longest time one step may take, and a collective between emulated hosts may wait for a peer."""
    most_rebuilds_in_10_minutes: int = _number(3, (0, 1_000_000))
    """Times that lost hosts are replaced within the replica; beyond it the replica ends. 0: at the first loss."""
    most_rebuilds_in_hour: int = _number(10, (0, 1_000_000))
    """The same within an hour."""
    elastic_after_s: float = _number(0.0, (0, DAY_S))
    """Seconds after which lost hosts (lost slices of TPUs) that have not come back are done without: all experts are
    spread over the others, until the lost ones have been there again for as long. 0: the group waits for them."""
    elastic_most_lost: int = _number(1, (1, 1024))
    """Slices, or emulated hosts, that are done without at the most."""
    standby_workers: bool = False
    """Keep a second process per host, libraries loaded, that waits to replace a lost worker: about 200 MB each."""
    keep_sent_weights: str = _choice("auto", "before_swap", "after_swap", "off")
    """Keep a copy of weights that were sent, which no disk has, in host memory, by a process per node: lost workers are
    replaced then too, and replicas that start later take them from there. `before_swap` writes it before they serve,
    beside that of the weights before them; `after_swap` once they serve, in its place: whoever is lost until it is
    written ends the replica. `auto` is `before_swap` where memory holds both, else `after_swap`; the others are refused
    at the start where memory does not hold them. Where there is no copy the replica ends with its workers."""
    keep_next_weights: bool = False
    """Copy each host's share of weights that were sent to the next host on another node too, which takes as much memory
    again: then such weights outlive a lost node as well."""
    cpus_per_host: float = _number(0.5, (0, 1024))
    """Ray CPU resource that each emulated host reserves on a CPU cluster."""
    tpu_topology: str = ""
    """Topology of the slice to reserve, such as `2x4`; empty runs on emulated hosts of a CPU cluster."""
    tpu_version: str = ""
    """Generation of the slice, such as `v6e`."""
    tpu_chips_per_host: int = _number(0, (0, 8))
    """Chips of one host, where topology and generation leave it open (v5e and v6e `2x4`); 0 lets Ray decide."""


@dataclass(frozen=True)
class LoggingSettings:
    """Lines that the replica, its workers and the rollout job write; an engine in your own process leaves it to you."""

    level: str = _choice("info", "debug", "warning", "error", key="log_level")
    """The least of what is written."""
    format: str = _choice("text", "json", key="log_format")
    """`text` for people; `json` has an object per line: `time`, `level`, `logger`, `message`, `request_id`, `trace`."""


@dataclass(frozen=True)
class Settings:
    """Everything, by owner. A component is given its own sections; only an engine reads the whole."""

    model: ModelSettings = field(default_factory=ModelSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    structured: StructuredSettings = field(default_factory=StructuredSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    balancing: BalancingSettings = field(default_factory=BalancingSettings)
    updates: UpdateSettings = field(default_factory=UpdateSettings)
    compile: CompileSettings = field(default_factory=CompileSettings)
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
