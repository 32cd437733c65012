"""Guides of requests (grammars, reasoning budgets, banned words), and their masks for the samples of steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import ConstraintCompiler
from rayserve_moe.constraints.matchers import Vocabulary
from rayserve_moe.constraints.token_guide import EMPTY, id_bits
from rayserve_moe.engine.extension import StepExtension
from rayserve_moe.requests.columns import OUTPUT_COLUMNS
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.processor_arguments import NUM_RECENT
from rayserve_moe.requests.reasoning_span import ReasoningSpan, ThinkingLimit
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RequestError
from rayserve_moe.scheduling.plan_builder import Ending, Schedule
from rayserve_moe.scheduling.record_copies import with_fields
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Guide, Sequence
from rayserve_moe.scheduling.step_plan import SampleMasks
from rayserve_moe.text.tokenizer import Tokenizer


def constraint_compiler(
    tokenizer: Tokenizer, card: ModelCard, *, settings: StructuredSettings
) -> ConstraintCompiler | None:
    """Return a compiler for a model's tokenizer; None if constraints are off or the model has no end of sequence."""
    if not settings.enabled or not card.eos_token_ids:
        return None
    return ConstraintCompiler(vocabulary_of(tokenizer, card.vocab_size, eos_ids=card.eos_token_ids), settings)


def vocabulary_of(tokenizer: Tokenizer, num_ids: int, *, eos_ids: Several[int]) -> Vocabulary:
    """Return the vocabulary of a tokenizer for a model with `num_ids` ids."""
    special = tuple(sorted(token_id for token_id in tokenizer.special_ids if token_id < num_ids))
    return Vocabulary(tuple(map(tokenizer.token_bytes, range(num_ids))), special, tuple(eos_ids))


def guides_of(
    request: GenerationRequest, compiler: ConstraintCompiler | None, *, num_ids: int
) -> Several[Guide | None]:
    """Return a guide for each choice of a request; None for choices without restrictions.

    Waits until the constraint is compiled.

    Raises: RequestError if it cannot be compiled or structured output is off.
    """
    constraint, sampling, words = request.constraint, request.sampling, request.bad_word_ids
    guides: list[Guide | None] = [None] * sampling.n
    wanting = _wanting(request)
    if wanting is None:
        return guides
    if compiler is None:
        raise RequestError(
            "structured output is off: it needs `structured_output: true`, and a tokenizer with an end of sequence",
            wanting,
        )
    if constraint is not None:
        compiled = compiler.submit(constraint).result()
        guides = [compiled.guide(sampling) for _ in guides]
    allowed = sampling.allowed_token_ids
    if (limit := request.thinking) is not None:
        guides = [ThinkingBudget(limit, compiler.vocabulary, allowed_ids=allowed, inner=guide) for guide in guides]
    if not words:
        return guides
    return [WordBans(words, num_ids=num_ids, allowed_ids=allowed, inner=guide) for guide in guides]


def _wanting(request: GenerationRequest) -> str | None:
    """Return the request field that needs deferred sampling, or None."""
    if request.constraint is not None:
        return request.constraint.param
    wants: dict[str, object] = {"bad_words": request.bad_word_ids, "thinking_token_budget": request.thinking}
    for column in OUTPUT_COLUMNS.values():
        if column.source == "evidence":
            wants[column.param] = column.width(request) is not None
    wants |= {"vllm_xargs": request.sampling.processor_arguments, "logprobs_mode": request.raw_logprobs}
    for name, is_wanted in wants.items():
        if is_wanted:
            return name
    return None


class TimedGuide(ABC):
    """Guide of a choice (`scheduling.sequence.Guide`) that measures its own time."""

    last_ms = 0.0
    """Thread milliseconds of the last mask, inner guides included."""

    def next_mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        """Return bits int32 [W] of ids that may follow `output_ids` int32 [T], or the finish reason if none may."""
        begun = time.thread_time()
        mask = self._mask(output_ids)
        self.last_ms = 1e3 * (time.thread_time() - begun)
        return mask

    @abstractmethod
    def _mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason: ...


class ThinkingBudget(TimedGuide):
    """Guide that limits the reasoning tokens of a choice, within the mask of an `inner` guide.

    Tokens count from the start of the output if the prompt has begun reasoning, else from the marker that begins it.
    """

    def __init__(
        self,
        limit: ThinkingLimit,
        vocabulary: Vocabulary,
        *,
        allowed_ids: Collection[int] = (),
        inner: Guide | None = None,
    ) -> None:
        """Begin a choice. If `allowed_ids` is not empty, only its ids may be sampled."""
        self._limit, self._inner, self._allowed_ids = limit, inner, frozenset(allowed_ids)
        self._span = ReasoningSpan(limit.markers, vocabulary.token_bytes.__getitem__)
        self._any = np.full(vocabulary.mask_words, -1, np.int32)

    def _mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        span = self._span
        span.follow(output_ids[span.num_outputs :].tolist())
        within = self._any if self._inner is None else self._inner.next_mask(output_ids)
        if isinstance(within, FinishReason) or span.begun_at is None:
            return within
        if span.num_outputs - span.begun_at < self._limit.num_tokens:
            return within
        # Continue a partly written marker: otherwise its tokens would be reasoning beyond the limit.
        forced = self._limit.markers.end_ids[span.num_written_of_end]
        if self._allowed_ids and forced not in self._allowed_ids:
            return EMPTY
        return id_bits((forced,), num_words=len(self._any))


class WordBans(TimedGuide):
    """Guide that bans words in a choice, within the mask of an `inner` guide."""

    def __init__(
        self,
        words: Several[tuple[int, ...]],
        *,
        num_ids: int,
        allowed_ids: Collection[int] = (),
        inner: Guide | None = None,
    ) -> None:
        """Begin a choice. `words` hold token ids. If `allowed_ids` is not empty, only its ids may be sampled."""
        num_words = -(-num_ids // 32)
        self._longer = [word for word in words if len(word) > 1]
        single = id_bits({word[0] for word in words if len(word) == 1}, num_words=num_words)
        ids = allowed_ids or range(num_ids)
        self._left = id_bits(ids, num_words=num_words) & ~single
        self._inner = inner

    def _mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        mask = self._left
        if self._inner is not None:
            within = self._inner.next_mask(output_ids)
            if isinstance(within, FinishReason):
                return within
            mask = mask & within
        tail = output_ids.tolist()[-max(map(len, self._longer), default=0) :]
        completed = {word[-1] for word in self._longer if tuple(tail[-len(word) + 1 :]) == word[:-1]}
        if completed:
            mask = mask & ~id_bits(completed, num_words=len(mask))
        return mask if mask.any() else EMPTY


BUDGET_MS = 30.0
"""Budget for all masks of a step. Once it is spent, no further mask is computed, because all running requests wait."""
OVER_BUDGET = FinishReason(
    "error", message="the constraints of running requests take too long; this is among the slowest", source="constraint"
)


class DeferredSampling(StepExtension):
    """Extension that adds masks to each plan for the deferred samples of the step in flight.

    All tokens before that step have been committed, so guides know them.
    """

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._seconds = 0.0

    def plan(self, schedule: Schedule, before: Schedule | None) -> Schedule:
        """Add masks for the samples of `before`, and endings of sequences that cannot continue."""
        if before is None or not before.plan.holds_samples:
            return schedule
        started = time.perf_counter()
        masks, endings = sample_masks(self._table, before)
        self._seconds += time.perf_counter() - started
        return with_fields(schedule, plan=with_fields(schedule.plan, masks=masks), endings=tuple(endings))

    def statistics(self) -> dict[str, float]:
        """Return the seconds spent on masks."""
        return {"mask_s": self._seconds}


def sample_masks(table: RowTable, schedule: Schedule) -> tuple[SampleMasks, list[Ending]]:
    """Return masks and requested evidence for the deferred samples of a step, and sequences that cannot continue.

    All tokens before the step must have been committed. Samples of rows whose owner has changed are not restricted.
    Fast guides run first, so that only slow guides exceed the budget.
    """
    samples, bits, endings, spent_ms = [], [], [], 0.0
    guided, requesting, processing = [], [], []
    for sample, sequence in _held(table, schedule):
        rules = sequence.rules
        if (guide := rules.guide) is not None:
            guided.append((sample, sequence, guide))
        if rules.requested is not None:
            requesting.append((sample, rules.requested))
        if rules.processed is not None:
            processing.append((sample, _processed(sequence, rules.processed)))
    for sample, sequence, guide in sorted(guided, key=lambda each: each[2].last_ms):
        outputs = sequence.token_ids[sequence.num_prompt_tokens : sequence.num_tokens]
        mask = guide.next_mask(outputs) if spent_ms < BUDGET_MS else OVER_BUDGET
        spent_ms += guide.last_ms
        if isinstance(mask, FinishReason):
            endings.append((sequence, mask))
        else:
            samples.append(sample)
            bits.append(mask)
    stacked = np.concatenate(bits).reshape(len(bits), -1) if bits else np.zeros((0, 0), np.int32)
    masks = SampleMasks(np.asarray(samples, np.intp), stacked)
    if requesting:
        of_samples, requested = zip(*requesting, strict=True)
        masks = replace(masks, evidence_samples=np.asarray(of_samples, np.intp), requested=np.stack(requested))
    if processing:
        of_samples, given = zip(*processing, strict=True)
        masks = replace(masks, processing=np.asarray(of_samples, np.intp), processed=np.stack(given))
    return masks, endings


def _processed(sequence: Sequence, given: np.ndarray) -> np.ndarray:
    """Return the processor inputs of a sequence: arguments of its request, number of outputs, latest tokens."""
    recent = np.full(NUM_RECENT, -1, np.int32)
    known = sequence.token_ids[max(0, sequence.num_tokens - NUM_RECENT) : sequence.num_tokens]
    recent[NUM_RECENT - len(known) :] = known
    return np.concatenate([given, np.array([sequence.num_outputs], np.int32), recent])


def _held(table: RowTable, schedule: Schedule) -> Iterator[tuple[int, Sequence]]:
    """Yield the deferred samples of a step whose rows still have their owner, with their sequences."""
    rows, sequences = schedule.sampling_rows, table.sequences
    is_own = table.generations[rows] == schedule.sampling_generations
    (samples,) = (table.wants.are_held[rows] & is_own).nonzero()
    for sample, row in zip(samples.tolist(), rows[samples].tolist(), strict=True):
        sequence = sequences[row]
        assert sequence is not None, "a row whose samples are held has a sequence"
        yield sample, sequence
