"""Admission checks: requests that the model can never serve, and the limit of live requests."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sized
from dataclasses import dataclass

import numpy as np

from rayserve_moe.engine.recovery.hosts import Recovery
from rayserve_moe.replay.index_rows import unpacked_index
from rayserve_moe.requests.fields import MAX_LISTED_IDS, MAX_LOGIT_BIASES, declared
from rayserve_moe.requests.processor_arguments import processed_row
from rayserve_moe.requests.records import (
    GenerationRequest,
    ModelCard,
    RequestError,
    RoutedExperts,
    SamplingParams,
)
from rayserve_moe.scheduling.sequence import Guide, Sequence
from rayserve_moe.scheduling.step_plan import MAX_WITHHELD_IDS

FORCED, FORCED_INDEX, FORCED_GATES = "forced_routed_experts", "forced_indexer_topk", "forced_router_gates"
MAX_HIDDEN_NUMBERS = 1 << 24
"""Maximum number of float32 hidden state values returned for a request: 64 MiB."""


MAX_QUEUE_S = 5.0
"""Seconds after a loss during which new requests are queued; later they are rejected until the hosts are replaced."""


class EngineBusyError(RuntimeError):
    """Raised if too many requests wait or run; the client may retry later."""


class EngineRebuildingError(RuntimeError):
    """Raised if hosts have been under replacement for too long to queue requests; the client may retry later."""


@dataclass(frozen=True)
class Capacity:
    """Limit on the number of live requests of an engine; 0 while its hosts are replaced for more than `MAX_QUEUE_S`."""

    live: Sized
    """Requests that wait or run."""
    max_live: int
    """Maximum number of live requests."""
    recovery: Recovery | None = None
    """Replaces lost hosts; None if nothing does."""

    def check_size(self, wanted: int) -> None:
        """Raise RequestError if `wanted` requests exceed the limit even of an idle engine."""
        if wanted > self.max_live:
            raise RequestError(f"{wanted} prompts exceed the {self.max_live} live requests of a replica", "prompt")

    def check(self, wanted: int = 1) -> None:
        """Raise EngineBusyError if `wanted` more requests exceed the limit now. May be called from any thread.

        Raises: EngineRebuildingError, even if the limit is reached too: places become free once the hosts are replaced.
        """
        progress = None if self.recovery is None or not wanted else self.recovery.progress
        if progress is not None and progress.seconds > MAX_QUEUE_S:
            raise EngineRebuildingError(f"hosts are being replaced: {progress.phase}, {progress.seconds:.0f} s so far")
        if wanted and (number := len(self.live)) + wanted > self.max_live:
            raise EngineBusyError(f"{number} requests are waiting or running; try again later")


def check_request(request: GenerationRequest, card: ModelCard, *, max_tokens: int) -> None:
    """Raise RequestError if the engine can never serve the request.

    `max_tokens` is the number of tokens of a sequence that fit into the page pool.
    """
    prompt, sampling = request.prompt_ids, request.sampling
    if len(prompt) == 0:
        raise RequestError("the prompt is empty: at least one token is needed", "prompt")
    if prompt.min() < 0 or prompt.max() >= card.vocab_size:
        raise RequestError(f"token ids must lie in the vocabulary, [0, {card.vocab_size})", "prompt")
    _check_fields(sampling)
    _check_fields(request)
    total = len(prompt) + sampling.max_new_tokens
    if total > card.max_model_len:
        raise RequestError(
            f"{len(prompt)} prompt tokens and {sampling.max_new_tokens} new ones exceed the context of "
            f"{card.max_model_len} tokens",
            "prompt" if len(prompt) > card.max_model_len else "max_tokens",
        )
    if total > max_tokens:
        raise RequestError(f"{total} tokens exceed the KV page pool of {max_tokens} tokens", "max_tokens")
    rows = request.return_routed_experts or request.return_indexer_topk or request.return_router_gates
    scores = request.logprob_token_ids or request.num_top_logprobs or request.score_prompt_from is not None
    for is_requested, check in (
        (rows, _check_rows),
        (sampling.min_new_tokens or sampling.stop_strings_after, _check_ends),
        (sampling.logit_bias, _check_logit_bias),
        (sampling.allowed_token_ids, _check_allowed),
        (scores, _check_scoring),
        (request.return_hidden_states or request.listed_in_prompt is not None, _check_probe),
        (sampling.processor_arguments, _check_processors),
        (request.forced_routing is not None, _check_forced_routing),
        (request.is_audited, _check_audited),
        (request.return_layer_states, _check_layer_states),
    ):
        if is_requested:
            check(request, card)


def _check_rows(request: GenerationRequest, card: ModelCard) -> None:
    """Raise RequestError for rows that the server does not capture."""
    if request.return_routed_experts and not card.returns_routing:
        raise RequestError(
            "routed experts are not captured by this server: start it with enable_return_routed_experts: true",
            "return_routed_experts",
        )
    if request.return_indexer_topk and card.index is None:
        raise RequestError(
            "no index rows are captured by this server: start it with enable_return_indexer_topk: true, for a model "
            "with sparse attention",
            "return_indexer_topk",
        )
    if request.return_router_gates and card.gates is None:
        raise RequestError(
            "router gates are not captured by this server: start it with enable_return_router_gates: true",
            "return_router_gates",
        )
    if request.return_router_gates and not request.return_routed_experts:
        raise RequestError("needs return_routed_experts: gates belong to the experts of rows", "return_router_gates")


def _check_fields(record: SamplingParams | GenerationRequest) -> None:
    """Raise RequestError if a field is outside of its declared values; NaN is outside of every range."""
    for field in declared(type(record)):
        value = getattr(record, field.name)
        if value is None or isinstance(value, tuple):
            continue
        try:
            is_read = field.values.read(value) == value
        except ValueError as error:
            raise RequestError(f"{field.param} {error}", field.param) from error
        if not is_read:
            raise RequestError(f"{field.param} is not in the normal form of its field", field.param)


def ending_ids(sampling: SamplingParams, card: ModelCard) -> frozenset[int]:
    """Return the ids that `min_new_tokens` withholds: all stop ids and ends of sequence, even with `ignore_eos`."""
    return frozenset(i for i in (*sampling.stop_token_ids, *card.eos_token_ids) if 0 <= i < card.vocab_size)


def processed_of(sampling: SamplingParams, card: ModelCard) -> np.ndarray | None:
    """Return the processor arguments of a request as a row (`processed_row`).

    Raises: RequestError for arguments that no processor accepts.
    """
    try:
        return processed_row(dict(sampling.processor_arguments), card.processors)
    except ValueError as error:
        raise RequestError(str(error), "vllm_xargs") from error


def _check_processors(request: GenerationRequest, card: ModelCard) -> None:
    processed_of(request.sampling, card)


def _check_ends(request: GenerationRequest, card: ModelCard) -> None:
    sampling = request.sampling
    if not all(0 <= n <= sampling.max_new_tokens for n in (sampling.min_new_tokens, sampling.stop_strings_after)):
        raise RequestError("must lie in [0, max_tokens]", "min_tokens")
    if sampling.min_new_tokens and len(ending_ids(sampling, card)) > MAX_WITHHELD_IDS:
        raise RequestError(f"min_tokens allows at most {MAX_WITHHELD_IDS} ids that end a choice", "stop_token_ids")


def _check_logit_bias(request: GenerationRequest, card: ModelCard) -> None:
    biases = request.sampling.logit_bias
    if len(biases) > MAX_LOGIT_BIASES:
        raise RequestError(f"at most {MAX_LOGIT_BIASES} tokens can be biased", "logit_bias")
    if not all(0 <= token_id < card.vocab_size and math.isfinite(value) for token_id, value in biases):
        raise RequestError(f"token ids must lie in [0, {card.vocab_size}), and values be finite", "logit_bias")


def _check_allowed(request: GenerationRequest, card: ModelCard) -> None:
    """Raise RequestError for invalid allowed ids, or if `min_new_tokens` would withhold all of them."""
    sampling = request.sampling
    allowed, name = frozenset(sampling.allowed_token_ids), "allowed_token_ids"
    if not all(0 <= token_id < card.vocab_size for token_id in allowed):
        raise RequestError(f"token ids must lie in [0, {card.vocab_size})", name)
    if len(allowed) + len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise RequestError(f"at most {MAX_LOGIT_BIASES} tokens can be allowed or biased", name)
    if allowed and sampling.min_new_tokens and allowed <= ending_ids(sampling, card):
        raise RequestError("all of these ids end a choice, which min_tokens forbids", name)


def _check_scoring(request: GenerationRequest, card: ModelCard) -> None:
    if not all(0 <= token_id < card.vocab_size for token_id in request.logprob_token_ids):
        raise RequestError(f"token ids must lie in [0, {card.vocab_size})", "logprob_token_ids")
    if request.num_top_logprobs > card.vocab_size:
        raise RequestError(f"the vocabulary has {card.vocab_size} tokens", "top_logprobs")
    first = request.score_prompt_from
    if first is not None and not 0 <= first < len(request.prompt_ids):
        raise RequestError("must lie in the prompt", "logprob_start_len")


def _check_probe(request: GenerationRequest, card: ModelCard) -> None:
    listed, wanted, name = request.listed_in_prompt, request.return_hidden_states, "return_hidden_states"
    if wanted and not card.hidden_size:
        raise RequestError(
            "hidden states stay on the devices of this server: start it with enable_return_hidden_states: true", name
        )
    num_states = (len(request.prompt_ids) if wanted == "all" else 1) + request.sampling.max_new_tokens
    if wanted and num_states * request.sampling.n * card.hidden_size > MAX_HIDDEN_NUMBERS:
        raise RequestError(
            f"states of {card.hidden_size} numbers at up to {num_states} tokens are more than {MAX_HIDDEN_NUMBERS} "
            "together: request fewer tokens, or `last`",
            name,
        )
    if listed is None:
        return
    name = "listed_in_prompt"
    ids, num_scored, size = listed.ids, len(request.prompt_ids) - 1, card.vocab_size
    if not 0 <= listed.start <= num_scored - len(ids):
        raise RequestError(f"positions must lie in [0, {num_scored}): the last prompt token has no next token", name)
    if ids.shape[1] > MAX_LISTED_IDS or (ids.size and not -1 <= ids.min() <= ids.max() < size):
        raise RequestError(f"a position lists at most {MAX_LISTED_IDS} token ids in [0, {size})", name)


def _check_layer_states(request: GenerationRequest, card: ModelCard) -> None:
    num_layers, name = len(card.evidence.state_layers), "return_layer_states"
    if not num_layers:
        raise RequestError("no layer's states leave the devices: start the server with hidden_state_layers", name)
    num_tokens = len(request.prompt_ids) - request.layer_states_start
    if num_tokens <= 0:
        raise RequestError("must lie in the prompt", "layer_states_start_len")
    if num_tokens * num_layers * card.evidence.state_size > MAX_HIDDEN_NUMBERS:
        raise RequestError(
            f"states of {num_layers} layers at {num_tokens} tokens are more than {MAX_HIDDEN_NUMBERS} numbers: request "
            "fewer tokens, or show fewer layers",
            name,
        )


def _check_audited(request: GenerationRequest, card: ModelCard) -> None:
    if not card.evidence.audits:
        raise RequestError("this server records no evidence for audits: start it with enable_audit: true", "is_audited")


def _check_forced_routing(request: GenerationRequest, card: ModelCard) -> None:
    """Raise RequestError unless rows cover the prompt from `start` on and hold ids that a router can select."""
    forced, layout, prompt_len, name = request.forced_routing, card.routing, len(request.prompt_ids), FORCED
    assert forced is not None, "routing is forced"
    if not card.takes_forced_routing:
        raise RequestError(
            "this server balances its selection of experts, so routing cannot be forced: start it with "
            "expert_selection: replicas_only",
            name,
        )
    rows = forced.rows
    if forced.missing:
        raise RequestError("no row may be missing", name)
    if rows.ndim != 3 or rows.shape[1:] != layout.row_shape or not np.issubdtype(rows.dtype, np.integer):
        raise RequestError(
            f"rows must be whole numbers of shape {list(layout.row_shape)}: MoE layers, experts per token", name
        )
    if forced.start < 0 or len(rows) not in (prompt_len - forced.start, prompt_len - 1 - forced.start):
        raise RequestError("needs a row for every prompt token from the start on; only the last may have none", name)
    if len(rows) and (rows.min() < 0 or rows.max() >= layout.num_experts):
        raise RequestError(f"expert ids must lie in [0, {layout.num_experts})", name)
    if (np.diff(np.sort(rows, axis=-1), axis=-1) == 0).any():
        raise RequestError("no expert may appear twice in a row", name)
    if forced.index is not None:
        _check_forced_index(forced, forced.index, card)
    if forced.gates is not None:
        _check_forced_gates(forced, forced.gates, card)


def _check_forced_index(forced: RoutedExperts, index: np.ndarray, card: ModelCard) -> None:
    """Raise RequestError unless every row holds ascending positions up to its own for each index."""
    layout, name = card.index, FORCED_INDEX
    if layout is None:
        raise RequestError(
            "choices of an index cannot be forced: start the server with enable_return_indexer_topk", name
        )
    if len(index) != len(forced.rows):
        raise RequestError(f"needs a row for each row of {FORCED}", name)
    for position, packed in enumerate(index, forced.start):
        rows = unpacked_index(packed, num_layers=len(layout.layer_ids), top_k=layout.top_k)
        behind, before = rows[:, 1:], rows[:, :-1]
        is_ascending = ((behind > before) & (before >= 0)) | (behind < 0)
        last = position // layout.block_size
        if not (rows[:, 0] >= 0).all() or not is_ascending.all() or rows.max() > last:
            unit = "positions" if layout.block_size == 1 else "blocks"
            raise RequestError(f"row {position} must hold ascending {unit} up to {last}, then -1", name)


def _check_forced_gates(forced: RoutedExperts, gates: np.ndarray, card: ModelCard) -> None:
    """Raise RequestError unless every forced expert has a finite weight."""
    if card.gates is None:
        raise RequestError(
            "gates cannot be forced: start the server with enable_return_router_gates: true", FORCED_GATES
        )
    if gates.shape != forced.rows.shape or gates.dtype != np.float32 or not np.isfinite(gates).all():
        raise RequestError(f"needs a finite float32 for every id of {FORCED}", FORCED_GATES)


def sequences_of(request: GenerationRequest, card: ModelCard, *, guides: Iterable[Guide | None]) -> list[Sequence]:
    """Build a sequence per choice, all with the request's seed or a shared random seed.

    With a constraint, the guide withholds end tokens, and the end of sequence stops a choice even with `ignore_eos`.
    """
    sampling = request.sampling
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF
    is_guided = request.constraint is not None
    ends = sampling.ignore_eos and not is_guided
    stops = frozenset(sampling.stop_token_ids) | frozenset(() if ends else card.eos_token_ids)
    withheld = ending_ids(sampling, card) if sampling.min_new_tokens and not is_guided else frozenset()
    sequences = [
        Sequence(request, i, seed=seed, stop_token_ids=stops, withheld_ids=withheld, guide=guide)
        for i, guide in enumerate(guides)
    ]
    for sequence in sequences if sampling.processor_arguments else ():
        sequence.rules.processed = processed_of(sampling, card)
    return sequences
