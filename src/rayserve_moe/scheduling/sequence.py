"""Mutable state of a choice of a request during generation."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from rayserve_moe.requests.columns import ColumnLog, PromptColumns, evidence_row, output_widths
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, RoutedExperts
from rayserve_moe.requests.results import ChoiceResult, DraftCounts
from rayserve_moe.scheduling.chunk_demands import ChunkDemand, demand_of
from rayserve_moe.scheduling.eviction_order import CachedPrefix
from rayserve_moe.scheduling.token_probe import PromptProbe

NO_ROW = -1
NUM_TOKENS, NUM_COMPUTED, NUM_PAGES, TARGET, LIMIT = range(5)
"""Indices in `RowArrays.counters`."""

NUM_COUNTERS = 5


class KnownRows(NamedTuple):
    """Routing rows of positions `start ...`, as arrays [N, ...] that are valid for entries with `is_known`."""

    start: int
    """First position."""
    is_known: np.ndarray
    """bool [N]."""
    rows: np.ndarray
    """Routing rows [N, MoE layers, k]."""
    versions: np.ndarray
    """Weight version, int32 [N]; a number of the routing capture."""
    kinds: np.ndarray
    """Source of the row, int8 [N]; a number of the routing capture."""
    parts: dict[str, np.ndarray]
    """Parts of the rows by name (`requests.row_parts`)."""

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


class Guide(Protocol):
    """Constraint on the outputs of a choice."""

    last_ms: float
    """Milliseconds of the last mask."""

    def next_mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        """Return the bits int32 [W] of ids that may follow, as in `SampleMasks`, or the finish reason if none may.

        `output_ids` are all outputs so far and extend the outputs of earlier calls. The result is valid until the next
        call.
        """
        ...


class RowArrays(NamedTuple):
    """State of a sequence that a step reads and writes for all running sequences at once.

    While a sequence has a row, its arrays are views of the row in the `RowTable`, longer than the known data.
    """

    counters: np.ndarray
    """int64 [NUM_COUNTERS]."""
    token_ids: np.ndarray
    """int32, by position."""
    logprobs: np.ndarray
    """float32, by position; 0 for the prompt."""
    ranks: np.ndarray
    """int32, by position; 0 for the prompt."""
    page_ids: np.ndarray
    """int32, by page index."""
    page_generations: np.ndarray
    """Generation of each page's allocation, int64, by page index."""


@dataclass(slots=True)
class SampleRules:
    """Rules for the tokens that a sequence samples, and for its end."""

    stop_token_ids: frozenset[int]
    """Ids that end the sequence."""
    withheld_ids: frozenset[int]
    """Ids that may not be among the first `min_new_tokens` tokens."""
    guide: Guide | None
    """Restricts the samples."""
    processed: np.ndarray | None = None
    """Arguments for logit processors, int32 [X] (`processed_row`)."""
    requested: np.ndarray | None = None
    """Requested evidence of samples, int32 [F] (`evidence_row`)."""


@dataclass(slots=True)
class ChoiceGroup:
    """The choices of a request, as held by each of them."""

    choices: list[Sequence]
    """All choices, including itself."""
    followers: list[Sequence] = field(default_factory=list)
    """Choices that wait for its prompt."""
    prompt: Hashable = None
    """Key of its namespace and prompt in `forks.PromptPins`; None without pins."""


@dataclass(slots=True)
class QueueState:
    """State of a sequence in the waiting queue."""

    num_passed_over: int = 0
    """Number of times that others were admitted before it while it was at the front."""
    num_to_recompute: int = 0
    """Positions that were computed before a preemption."""
    awaited_rank: int | None = None
    """Rank that would have computed its prompt first at the last match; None before the first match."""


@dataclass(slots=True)
class CacheState:
    """Relation of a sequence to the prefix cache of its rank."""

    namespace: Hashable
    """Namespace of prefixes that it may match."""
    num_cacheable: int
    """Tokens whose rows and keys come from the same weights, so that others may match them."""
    prefix: CachedPrefix | None = None
    """Its locked prefix while it has pages."""
    num_flushes: int = 0
    """Number of flushes of the rank before it got its row."""
    num_cached: int = 0
    """Tokens found cached at its first start."""
    kept_positions: tuple[int, ...] = ()
    """Positions, ascending, whose state entries are kept for other sequences."""
    owner: str | None = None
    """Session that owns the pages it computes; None if sessions have no effect on eviction."""
    ends_session: bool = False
    """True if its session was finished while it waited or ran."""
    page_names: list[bytes] = field(default_factory=list)
    """Names of the whole pages of its known tokens, if they were looked up in host memory (`host_pages`)."""
    origins: tuple[tuple[int, int, str], ...] = ()
    """Ranges `(from, to, "cached", "transferred" or "recomputed")` of positions that were found cached or recomputed.

    Later ranges take precedence.
    """
    is_pushed: bool = False
    """True if another replica has pushed pages of its prompt to host memory."""
    transferred: tuple[tuple[int, int], ...] = ()
    """Ranges of positions of its cached prefix that another replica has computed."""


@dataclass(slots=True)
class SequenceTimes:
    """Monotonic times of a sequence."""

    accepted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    """When it first got a row."""
    token_at: float = math.nan
    """Time of its last token; while it has a row, the `RowTable` has the time."""
    first_token_at: float = math.nan
    ended_at: float = math.nan


@dataclass(slots=True)
class Published:
    """Outputs that the client of a sequence has."""

    num_tokens: int
    """Published tokens, including the prompt."""
    num_routing_rows: int
    """Routing rows that it has or does not want."""


@dataclass(slots=True)
class SequenceRouting:
    """Routing rows that a sequence holds itself."""

    kept: KnownRows | None = None
    """Rows kept over a preemption."""
    final: RoutedExperts | None = None
    """At its end, the rows that its client does not have."""


@dataclass(slots=True)
class Evidence:
    """Records of the tokens of a sequence besides ids, log-probs and ranks."""

    columns: ColumnLog
    """Requested columns of its outputs."""
    weight_versions: tuple[tuple[int, str], ...] = ()
    """Weight versions of its outputs, as in `ChoiceResult`."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    probe: PromptProbe | None = None
    """Results at prompt positions; shared by all choices."""
    output_states: list[np.ndarray] = field(default_factory=list)
    """Hidden states of its outputs."""


class Sequence:
    """Tokens, pages and row of a choice.

    Positions fall into `[computed | known, not computed | free]`. `num_computed` positions have their KV in `pages`, at
    the latest once the submitted steps have run. `num_tokens` tokens are known; the token of a submitted step may be in
    flight. A sequence samples when its last token is computed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        choice_index: int,
        *,
        seed: int,
        stop_token_ids: frozenset[int],
        withheld_ids: frozenset[int] = frozenset(),
        guide: Guide | None = None,
    ) -> None:
        prompt_len = len(request.prompt_ids)
        limit = prompt_len + request.sampling.max_new_tokens
        widths = output_widths(request) if request.wants_evidence else {}
        self.request = request
        self.choice_index, self.seed = choice_index, seed
        self.num_prompt_tokens = prompt_len
        self.data_rank, self.row = 0, NO_ROW
        self.finish: FinishReason | None = None
        """Finish reason; None while unfinished."""
        self.state = RowArrays(
            np.array([prompt_len, 0, 0, max(prompt_len, limit - 1), limit], np.int64),
            token_ids=np.asarray(request.prompt_ids, np.int32),
            logprobs=np.zeros(prompt_len, np.float32),
            ranks=np.zeros(prompt_len, np.int32),
            page_ids=np.zeros(0, np.int32),
            page_generations=np.zeros(0, np.int64),
        )
        requested = evidence_row(request, widths) if widths or request.raw_logprobs else None
        self.rules = SampleRules(stop_token_ids, withheld_ids, guide=guide, requested=requested)
        self.group = ChoiceGroup([self])
        self.queue = QueueState()
        self.cache = CacheState(request.cache_salt, num_cacheable=limit)
        self.times = SequenceTimes()
        self.published = Published(prompt_len, num_routing_rows=request.routed_experts_start)
        self.routing = SequenceRouting()
        self.evidence = Evidence(ColumnLog(widths))

    @property
    def is_held(self) -> bool:
        """Return True if its sampling is deferred to a separate program."""
        rules = self.rules
        return not (rules.guide is None and rules.requested is None and rules.processed is None)

    @property
    def is_probed(self) -> bool:
        """Return True if its tokens may still have to be probed."""
        probe = self.evidence.probe
        return probe is not None and (probe.wants_hidden or not probe.is_complete)

    @property
    def takes_drafts(self) -> bool:
        """Return True if its tokens may be verified several at a time."""
        return self.request.speculative and not self.is_held and not self.request.return_hidden_states

    @property
    def num_tokens(self) -> int:
        return int(self.state.counters[NUM_TOKENS])

    @property
    def num_computed(self) -> int:
        return int(self.state.counters[NUM_COMPUTED])

    @property
    def limit(self) -> int:
        """Return the number of prompt tokens plus the maximum number of new tokens."""
        return int(self.state.counters[LIMIT])

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def token_ids(self) -> np.ndarray:
        """Return tokens by position, int32; the first `num_tokens` are known."""
        return self.state.token_ids

    @property
    def pages(self) -> np.ndarray:
        """Return the pages held, int32, by page index."""
        state = self.state
        return state.page_ids[: state.counters[NUM_PAGES]]

    @property
    def page_generations(self) -> np.ndarray:
        """Return the generations of the pages held, int64, by page index."""
        return self.state.page_generations

    def record_start(self, num_cached: int) -> None:
        """Record that it starts or restarts after `num_cached` cached tokens."""
        num_known, cache, times = self.queue.num_to_recompute, self.cache, self.times
        if num_known == 0:
            cache.num_cached = num_cached
        if times.started_at is None:
            times.started_at = time.monotonic()
        again = (num_cached, min(num_known, self.num_prompt_tokens), "recomputed")
        pushed = ((max(num_known, first), last, "transferred") for first, last in cache.transferred)
        ranges = ((num_known, num_cached, "cached"), *pushed, again)
        cache.origins += tuple(origin for origin in ranges if origin[0] < origin[1])

    def release_pages(self) -> np.ndarray:
        """Drop all pages, and with them everything computed; return the pages."""
        pages = self.pages.copy()
        counters = self.state.counters
        counters[NUM_PAGES] = counters[NUM_COMPUTED] = 0
        return pages


def reusable_tokens(sequence: Sequence) -> np.ndarray:
    """Return the known tokens but the last, which has to be computed to sample after it, and those to be probed."""
    count, probe = sequence.num_tokens - 1, sequence.evidence.probe
    if probe is not None and not probe.is_complete:
        count = min(count, probe.frontier)
    return sequence.token_ids[:count]


def record_weights(sequence: Sequence, weight_version: str) -> None:
    """Record the weight version that the next output of a sequence is sampled under, with its adapter."""
    evidence, position = sequence.evidence, sequence.num_tokens
    weight_version = sequence.request.version_label(weight_version)
    before = tuple(known for known in evidence.weight_versions if known[0] < position)
    if not before or before[-1][1] != weight_version:
        before = (*before, (position, weight_version))
    evidence.weight_versions = before


def prompt_columns(sequence: Sequence) -> PromptColumns | None:
    """Return the results of a sequence's probe; None without a probe."""
    evidence = sequence.evidence
    if evidence.probe is None:
        return None
    return evidence.probe.result(np.stack(evidence.output_states) if evidence.output_states else None)


def chunk_demand(sequence: Sequence, start: int, *, stop: int) -> ChunkDemand | None:
    """Return the extra work of a sequence's chunk over positions `[start, stop)`, or None."""
    probe, forced = sequence.evidence.probe, sequence.request.forced_routing
    if probe is None and forced is None:
        return None
    return demand_of(start, stop, probe=probe, forced=forced)


def restore(choices: Iterable[Sequence], committed: Iterable[ChoiceResult]) -> None:
    """Give new choices their outputs from elsewhere: they continue as after a preemption, or have ended.

    The seed must be the same. Their client has all committed outputs. Choices without outputs are unchanged.
    """
    for sequence, outputs in zip(choices, committed, strict=False):
        _restore(sequence, outputs)


def _restore(sequence: Sequence, committed: ChoiceResult) -> None:
    sequence.finish = committed.finish
    if not committed.token_ids:
        return
    state, evidence = sequence.state, sequence.evidence
    sequence.state = state._replace(
        token_ids=np.concatenate([state.token_ids, np.asarray(committed.token_ids, np.int32)]),
        logprobs=np.concatenate([state.logprobs, np.asarray(committed.logprobs, np.float32)]),
        ranks=np.concatenate([state.ranks, np.asarray(committed.ranks, np.int32)]),
    )
    num_tokens = len(sequence.state.token_ids)
    state.counters[NUM_TOKENS] = sequence.published.num_tokens = num_tokens
    sequence.queue.num_to_recompute = num_tokens - 1
    sequence.cache.num_cached = committed.num_cached_tokens
    sequence.times.token_at = time.monotonic()
    evidence.drafts, evidence.weight_versions = committed.drafts, committed.weight_versions
    evidence.columns.extend(committed.columns)
    if (routing := committed.routing) is not None:
        sequence.published.num_routing_rows = routing.start + len(routing.rows)
