"""What a client asks of the engine, and what the engine answers, in token ids.

These are the types that all packages share. Text, HTTP bodies and device arrays live elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole vocabulary. `seed` None lets the engine
    draw one. `max_new_tokens` 0 runs the prompt only. Stop strings are matched above the engine, on text. With a seed,
    the choices are those numbered from `first_choice` on among all that it stands for.

    Ids that end a choice, the end of sequence among them even where it is ignored, have no probability before
    `min_new_tokens` were generated; no stop string ends within the first `stop_strings_after` tokens. Text ends before
    the stop string and without the stop id, or, with `include_stop_str_in_output`, after them. With `no_stop_trim` it
    is that of all tokens, the rest of the last one included.

    Penalties change logits before everything else: `repetition_penalty` divides positive and multiplies negative logits
    of tokens seen in prompt or output, `frequency_penalty` is subtracted once per earlier output of the token,
    `presence_penalty` once if there was any. `logit_bias` is added before them, per token id.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    first_choice: int = 0
    min_new_tokens: int = 0
    stop_strings_after: int = 0
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to complete `sampling.n` times. `prompt_ids` is int32 [prompt_len].

    Only requests with the same `cache_salt` share cached prefixes. Without `incremental` a choice has one update, at
    its end. `num_top_logprobs` likeliest tokens are told with every log-prob. `score_prompt_from` p asks for log-probs
    of the prompt tokens at positions above p. `forced_routing` replaces what the router selects at the prompt positions
    that it has rows for. Routing is told from position `routed_experts_start` on. With `stream_routed_experts` every
    update brings the rows that go with its tokens.
    """

    request_id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    return_routed_experts: bool = False
    cache_salt: str = ""
    incremental: bool = True
    num_top_logprobs: int = 0
    score_prompt_from: int | None = None
    forced_routing: RoutedExperts | None = None
    stream_routed_experts: bool = False
    routed_experts_start: int = 0


@dataclass(frozen=True)
class FinishReason:
    """Why a choice ended: `stop` (matched id or string), `length`, `abort`, or `error` (with its message)."""

    kind: str
    matched: int | str | None = None
    message: str | None = None


@dataclass(frozen=True)
class RoutingLayout:
    """What a routing row of this model looks like: layers that route, experts, picks per token."""

    num_hidden_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int

    @property
    def row_shape(self) -> tuple[int, int]:
        """Shape of one stored row: MoE layers only, by picks."""
        return len(self.layer_ids), self.top_k

    @property
    def dtype(self) -> np.dtype:
        """uint8 up to 256 experts, uint16 above."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@dataclass(frozen=True)
class RoutedExperts:
    """Routing of one choice: rows for positions `start .. num_tokens - 2`, or what is known of them.

    `rows` is [num_rows, MoE layers, k] in the layout's dtype, logical ids, router order. Ranges are absolute
    positions `[from, to)`; a row inside `missing` holds no data and must never be read as one.
    """

    rows: np.ndarray
    start: int = 0
    missing: tuple[tuple[int, int], ...] = ()
    source: tuple[tuple[int, int, str], ...] = ()
    weight_version: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens at each of N positions, falling: `token_ids` int32 and `logprobs` float32, both [N, n]."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class PromptScores:
    """Log-probs float32 [N] of the prompt tokens at positions `start + 1 .. start + N`, each given those before it.

    `ranks` int32 [N] are their places among all tokens, the likeliest first, from 1 on.
    N is the prompt's length - 1 - `start`, or less where the request ended before its prompt was computed. All are
    computed under the weights `weight_version`.
    """

    start: int
    logprobs: np.ndarray
    ranks: np.ndarray
    top: TopLogprobs | None = None
    weight_version: str = ""


@dataclass
class ChoiceResult:
    """What one choice has generated: since its last update, or, once updates are added up, from its start.

    The text layer adds `text`, and cuts everything at the first stop string. `finish` and `prompt_scores` come with the
    last update. So does `routing`, or, streamed, with every one: then it starts where that of the one before has ended.
    `ranks` go with `logprobs` (see `PromptScores`), `top` too where it was asked for. `weight_versions` are pairs of a
    position and the weights that outputs from there on were sampled under, up to the next pair, for all of the choice
    so far.
    """

    request_id: str = ""
    choice_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    routing: RoutedExperts | None = None
    num_cached_tokens: int = 0
    top: TopLogprobs | None = None
    prompt_scores: PromptScores | None = None
    weight_versions: tuple[tuple[int, str], ...] = ()
    ranks: list[int] = field(default_factory=list)
    text: str = ""

    def add(self, update: ChoiceResult) -> None:
        """Append the next update of this choice."""
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.ranks += update.ranks
        self.finish = update.finish or self.finish
        self.routing = joined_routing(self.routing, update.routing)
        self.top = joined_top(self.top, update.top)
        self.prompt_scores = update.prompt_scores or self.prompt_scores
        self.weight_versions = update.weight_versions or self.weight_versions
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)


def joined_routing(before: RoutedExperts | None, after: RoutedExperts | None) -> RoutedExperts | None:
    """Join routing where `after` starts at the position that `before` ends at; None where there is neither.

    A piece without rows may start anywhere: it is what is left of tokens beyond a stop string.
    """
    if before is None or after is None or len(after.rows) == 0:
        return after if before is None else before
    assert after.start == before.start + len(before.rows), "a piece of routing does not follow the one before"
    return replace(
        before,
        rows=np.concatenate([before.rows, after.rows]),
        missing=joined_ranges(before.missing + after.missing),
        source=joined_ranges(before.source + after.source),
        weight_version=joined_ranges(before.weight_version + after.weight_version),
    )


def joined_top(before: TopLogprobs | None, after: TopLogprobs | None) -> TopLogprobs | None:
    """Concatenate the likeliest tokens of both; None where there is neither."""
    if before is None or after is None:
        return after if before is None else before
    return TopLogprobs(
        np.concatenate([before.token_ids, after.token_ids]), np.concatenate([before.logprobs, after.logprobs])
    )


def joined_ranges(ranges: tuple) -> tuple:
    """Merge neighbouring ranges `(from, to, *label)`, in rising order, that have the same label."""
    joined: list[tuple] = []
    for first, last, *label in ranges:
        if joined and joined[-1][1:] == (first, *label):
            first = joined.pop()[0]
        joined.append((first, last, *label))
    return tuple(joined)


class RequestError(ValueError):
    """A request that cannot be served as asked; `param` names the field at fault, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WeightsRefusedError(ValueError):
    """A checkpoint whose weights cannot take the place of those that serve. The message does not tell where it lies."""


@dataclass(frozen=True)
class ModelCard:
    """What the layers above the engine need to know of the model being served."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    routing: RoutingLayout
    returns_routing: bool
    weight_version: str = "0"
    path: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    takes_forced_routing: bool = True
