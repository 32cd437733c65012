"""One choice of one request while it is being generated: the only mutable view of it."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from rayserve_moe.requests.fields import MAX_LISTED_IDS
from rayserve_moe.requests.records import (
    ChoiceResult,
    DraftCounts,
    FinishReason,
    GenerationRequest,
    HiddenStates,
    RoutedExperts,
    TopLogprobs,
)
from rayserve_moe.requests.token_evidence import WANTS_SUPPORT
from rayserve_moe.scheduling.cached_prefix import CachedPrefix
from rayserve_moe.scheduling.chunk_demands import ChunkDemand, PromptScoring, demand_of
from rayserve_moe.scheduling.inspection import PromptInspection

NO_ROW = -1
NUM_TOKENS, NUM_COMPUTED, NUM_PAGES, TARGET, LIMIT = range(5)
"""Places in `Sequence.counters`."""

NUM_COUNTERS = 5


class KnownRows(NamedTuple):
    """Routing rows of positions `start ...`: arrays [N, ...] whose entries mean something where `is_known`.

    `versions` int32 and `kinds` int8 are numbers that only the capture of routing understands.
    """

    start: int
    is_known: np.ndarray
    rows: np.ndarray
    versions: np.ndarray
    kinds: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


class Guide(Protocol):
    """Says which words may follow the outputs of one choice; `last_ms` is what that took last."""

    last_ms: float

    def next_mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        """Return bits int32 [W] as in `SampleMasks`, given all outputs so far, which begin with those given before; or
        why none may follow. They hold until the next call."""
        ...


class Sequence:
    """Tokens, pages and row of one choice.

    What it samples is what its `guide` allows; `processed` int32 [X] is what its request gives to logit
    processors (`processed_row`); `asked` int32 [F] is the evidence that its request wants of samples, a
    row of `decoding.sampling`, and `evidence_of_outputs` what was found at each output. It ends at `stop_token_ids`;
    its first `min_new_tokens` tokens are none of `withheld_ids`. `choices` are those of its request, itself among them;
    `followers` wait for its prompt. Its client knows the first `num_published` tokens. `num_to_recompute` positions
    were computed before it was preempted. `origins` are ranges `(from, to, "cached" or "recomputed")` of positions that
    it found cached, or computed once more; later ones outrank. `top_of_outputs` are the likeliest tokens at each
    output, `scoring` what is found of its prompt's scores, `inspection` of its tokens, and `hidden_of_outputs` are the
    states at its outputs, `support_of_outputs` what truncation left them; its client has, or does not want, the first
    `num_published_rows` routing rows. `kept_rows` are those that outlive a preemption, `num_cacheable` the tokens whose
    rows and keys come from the same weights, and may be found by others. `weight_versions` are those of its outputs, as
    in `ChoiceResult`. It came, first got a row, and got its last token, at `accepted_at`, `started_at` and, out of a
    row, `token_at`.

    Positions fall into `[computed | known, not computed | free]`. `num_computed` positions have their KV in `pages`, or
    will once the submitted steps have run; `num_tokens` tokens are known, while that of a submitted step may be on its
    way. A sequence samples when the last of its tokens is computed.

    `counters` int64 [NUM_COUNTERS], `token_ids` int32, `logprobs` float32 and `ranks` int32 by position, `page_ids`
    int32 and `page_generations` int64 by page index are views of its row in the `RowTable` while it runs, so that a
    step can process all running sequences at once. They may be longer than what is known.
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
        prompt_len, max_new_tokens = len(request.prompt_ids), request.sampling.max_new_tokens
        limit = prompt_len + max_new_tokens
        self.request = request
        self.choice_index, self.seed = choice_index, seed
        self.stop_token_ids, self.withheld_ids = stop_token_ids, withheld_ids
        self.guide = guide
        self.processed: np.ndarray | None = None
        self.num_prompt_tokens = prompt_len
        self.num_cached, self.data_rank, self.row = 0, 0, NO_ROW
        self.finish: FinishReason | None = None
        self.choices: list[Sequence] = [self]
        self.followers: list[Sequence] = []
        self.num_top = request.num_top_logprobs
        self.asked = asked_of(request)
        self.namespace: Hashable = request.cache_salt
        self.prefix: CachedPrefix | None = None
        self.num_flushes = self.num_passed_over = 0
        self.num_published, self.num_to_recompute = prompt_len, 0
        self.origins: tuple[tuple[int, int, str], ...] = ()
        self.weight_versions: tuple[tuple[int, str], ...] = ()
        self.accepted_at = time.monotonic()
        self.started_at: float | None = None
        self.token_at = math.nan
        self.kept_rows: KnownRows | None = None
        self.num_cacheable = limit
        self.num_published_rows = request.routed_experts_start
        self.final_routing: RoutedExperts | None = None
        self.top_of_outputs: list[tuple[np.ndarray, np.ndarray]] = []
        self.evidence_of_outputs: list[np.ndarray] = []
        self.hidden_of_outputs: list[np.ndarray] = []
        self.support_of_outputs: list[tuple[np.ndarray, float]] = []
        self.scoring: PromptScoring | None = None
        self.inspection: PromptInspection | None = None
        self.drafts = DraftCounts()
        self.counters = np.array([prompt_len, 0, 0, max(prompt_len, limit - 1), limit], np.int64)
        self.token_ids = np.asarray(request.prompt_ids, np.int32)
        self.logprobs = np.zeros(prompt_len, np.float32)
        self.ranks = np.zeros(prompt_len, np.int32)
        self.page_ids = np.zeros(0, np.int32)
        self.page_generations = np.zeros(0, np.int64)

    @property
    def is_held(self) -> bool:
        """Whether its samples are drawn by a program of their own."""
        return not (self.guide is None and self.asked is None and self.processed is None)

    @property
    def takes_drafts(self) -> bool:
        """Whether its tokens may be verified several at a time."""
        return self.request.speculative and not self.is_held and not self.request.return_hidden_states

    @property
    def num_tokens(self) -> int:
        return int(self.counters[NUM_TOKENS])

    @property
    def num_computed(self) -> int:
        return int(self.counters[NUM_COMPUTED])

    @property
    def limit(self) -> int:
        """Prompt tokens and all that may be generated."""
        return int(self.counters[LIMIT])

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def pages(self) -> np.ndarray:
        """Pages held, int32, by page index."""
        return self.page_ids[: self.counters[NUM_PAGES]]

    def note_start(self, num_cached: int) -> None:
        """Note that it starts to run after `num_cached` cached tokens, for the first time or once more."""
        num_known = self.num_to_recompute
        if num_known == 0:
            self.num_cached = num_cached
        if self.started_at is None:
            self.started_at = time.monotonic()
        again = (num_cached, min(num_known, self.num_prompt_tokens), "recomputed")
        ranges = ((num_known, num_cached, "cached"), again)
        self.origins += tuple(origin for origin in ranges if origin[0] < origin[1])

    def let_go(self) -> np.ndarray:
        """Drop all pages and with them everything computed; returns the pages for release."""
        pages = self.pages.copy()
        self.counters[NUM_PAGES] = 0
        self.counters[NUM_COMPUTED] = 0
        return pages


def note_weights(sequence: Sequence, weight_version: str) -> None:
    """Note which weights the next output of a sequence is sampled under."""
    before = tuple(known for known in sequence.weight_versions if known[0] < sequence.num_tokens)
    if not before or before[-1][1] != weight_version:
        before = (*before, (sequence.num_tokens, weight_version))
    sequence.weight_versions = before


def top_of(sequence: Sequence, start: int, *, stop: int) -> TopLogprobs | None:
    """The likeliest tokens where those at positions `[start, stop)` were sampled; None where they are not wanted."""
    if not (count := sequence.num_top):
        return None
    entries = sequence.top_of_outputs[start - sequence.num_prompt_tokens : stop - sequence.num_prompt_tokens]
    ids, logprobs = ([entry[i] for entry in entries] for i in (0, 1))
    return TopLogprobs(
        np.asarray(ids, np.int32).reshape(-1, count), np.asarray(logprobs, np.float32).reshape(-1, count)
    )


def asked_of(request: GenerationRequest) -> np.ndarray | None:
    """What a request asks of its samples, padded with -1; None where that is nothing."""
    ids = request.logprob_token_ids
    if not (ids or request.return_entropy or request.raw_logprobs or request.return_sampling_mask):
        return None
    asked = np.full(1 + MAX_LISTED_IDS, -1, np.int32)
    asked[: 1 + len(ids)] = (request.raw_logprobs + WANTS_SUPPORT * request.return_sampling_mask, *ids)
    return asked


def evidence_of(sequence: Sequence, start: int, *, stop: int) -> np.ndarray | None:
    """Evidence of the outputs at positions `[start, stop)`, as in `ChoiceResult`; None where it is not wanted."""
    if sequence.asked is None:
        return None
    first = sequence.num_prompt_tokens
    rows = sequence.evidence_of_outputs[start - first : stop - first]
    return np.asarray(rows, np.float32).reshape(-1, 1 + len(sequence.request.logprob_token_ids))


def support_of(sequence: Sequence, start: int, *, stop: int) -> list[tuple[np.ndarray, float]]:
    """The support of the outputs at positions `[start, stop)`: ids, and the log-prob of the output among them."""
    first = sequence.num_prompt_tokens
    return sequence.support_of_outputs[start - first : stop - first]


def hidden_of(sequence: Sequence) -> HiddenStates | None:
    """The hidden states that were found at the tokens of a sequence; None where none are, or none are wanted."""
    if sequence.inspection is None or not len(states := sequence.inspection.states()):
        return None
    if not sequence.request.return_hidden_states:
        return None
    outputs = sequence.hidden_of_outputs
    return HiddenStates(states, np.stack(outputs) if outputs else np.zeros((0, states.shape[1]), np.float32))


def chunk_demand(sequence: Sequence, start: int, *, stop: int) -> ChunkDemand | None:
    """What a sequence asks of a chunk over positions `[start, stop)` besides computing it."""
    forced = sequence.request.forced_routing
    if sequence.scoring is None and forced is None:
        return None
    return demand_of(start, stop, scoring=sequence.scoring, forced=forced)


def restore(choices: Iterable[Sequence], committed: Iterable[ChoiceResult]) -> None:
    """Give new choices the outputs that they have had elsewhere: they go on as after a preemption, or have ended.

    Their seed has to be the same, and their client has what is committed. Where nothing is, they are as new.
    """
    for sequence, outputs in zip(choices, committed, strict=False):
        _restore(sequence, outputs)


def _restore(sequence: Sequence, committed: ChoiceResult) -> None:
    sequence.finish = committed.finish
    if not committed.token_ids:
        return
    sequence.token_ids = np.concatenate([sequence.token_ids, np.asarray(committed.token_ids, np.int32)])
    sequence.logprobs = np.concatenate([sequence.logprobs, np.asarray(committed.logprobs, np.float32)])
    sequence.ranks = np.concatenate([sequence.ranks, np.asarray(committed.ranks, np.int32)])
    sequence.counters[NUM_TOKENS] = sequence.num_published = len(sequence.token_ids)
    sequence.num_to_recompute = len(sequence.token_ids) - 1
    sequence.num_cached, sequence.drafts = committed.num_cached_tokens, committed.drafts
    sequence.weight_versions = committed.weight_versions
    sequence.token_at = time.monotonic()
    if committed.top is not None:
        sequence.top_of_outputs = list(zip(committed.top.token_ids, committed.top.logprobs, strict=True))
    if committed.evidence is not None:
        sequence.evidence_of_outputs = list(committed.evidence)
    sequence.support_of_outputs = list(committed.support)
    if (routing := committed.routing) is not None:
        sequence.num_published_rows = routing.start + len(routing.rows)
