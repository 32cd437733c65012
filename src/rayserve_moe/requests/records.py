"""What a client asks of the engine, in token ids, and what it can know of the model.

These are types that all packages share. Text, HTTP bodies and device arrays live elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.requests.fields import (
    ARGUMENTS,
    BUDGET,
    COUNT,
    FLAG,
    HIDDEN_STATES,
    INT32_MAX,
    LISTED_IDS,
    LOGPROBS_MODE,
    LONGEST_CONSTRAINT,
    MAX_LOGIT_BIASES,
    MAX_TOP_LOGPROBS,
    PROCESSED,
    REPETITION,
    SEED,
    biases,
    number,
    one_or_several,
    stated,
    text,
    whole,
)
from rayserve_moe.requests.processor_arguments import ProcessorArgument
from rayserve_moe.requests.reasoning_span import ThinkingLimit

ROW_START = "routed_experts_start_len"


@dataclass(frozen=True, kw_only=True)
class SharedSampling:
    """Sampling parameters that have one name, one type and one default everywhere."""

    n: int = stated(1, whole(1, 128))
    """Choices."""
    temperature: float = stated(1.0, number(0, 100))
    """0 is greedy."""
    top_p: float = stated(1.0, number(0, 1, above=True))
    """Probability that the likeliest tokens kept have together; 1 keeps all."""
    top_k: int = stated(0, whole(-1, INT32_MAX, convert=lambda k: max(int(k), 0)))
    """Likeliest tokens kept; 0 (or, as given, -1) keeps all."""
    min_p: float = stated(0.0, number(0, 1))
    """Tokens kept are at least this likely, relative to the likeliest one."""
    presence_penalty: float = stated(0.0, number(-2, 2))
    """Subtracted from the logits of tokens that the output has."""
    frequency_penalty: float = stated(0.0, number(-2, 2))
    """Subtracted from the logit of a token once per occurrence in the output."""
    repetition_penalty: float = stated(1.0, number(0.001, 100))
    """Divides positive and multiplies negative logits of tokens in prompt or output, ahead of the other penalties."""
    seed: int | None = stated(None, SEED, sglang="sampling_seed")
    """All 64 bits count; None lets the engine draw one."""
    ignore_eos: bool = stated(False, FLAG)
    """Continue after the model's end of sequence."""
    include_stop_str_in_output: bool = stated(False, FLAG, sglang=None)
    """Text ends after the stop string and with the stop id, not before them."""
    skip_special_tokens: bool = stated(True, FLAG)
    """Leave special tokens out of the text."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(SharedSampling):
    """How the tokens of one request are chosen. Stop strings are matched above the engine, on text.

    Ids that end a choice, the end of sequence among them even where it is ignored, have no probability before
    `min_new_tokens` were generated.
    """

    max_new_tokens: int = stated(128, COUNT, openai="max_tokens", vllm="max_tokens", has_default=False)
    """0 runs the prompt only."""
    stop: tuple[str, ...] = stated((), one_or_several(text(1024, shortest=1), 32))
    """Strings that end a choice."""
    stop_token_ids: tuple[int, ...] = stated((), one_or_several(COUNT, 1024))
    """Ids that end a choice, besides the end of sequence."""
    logit_bias: tuple[tuple[int, float], ...] = stated((), biases(MAX_LOGIT_BIASES, bias=number(-100, 100)))
    """Added to logits ahead of the penalties, per token id."""
    allowed_token_ids: tuple[int, ...] = stated((), one_or_several(COUNT, MAX_LOGIT_BIASES, least=1), sglang=None)
    """The only ids that may be sampled; all may where there are none."""
    first_choice: int = stated(0, COUNT, openai=None, vllm=None)
    """Number of the first choice among all that the seed stands for."""
    min_new_tokens: int = stated(0, COUNT, openai="min_tokens", vllm="min_tokens")
    """Tokens before any id may end a choice."""
    stop_strings_after: int = stated(0, COUNT, sglang=None, openai="min_tokens", vllm="min_tokens")
    """Tokens before any stop string may end a choice."""
    no_stop_trim: bool = stated(False, FLAG, vllm=None)
    """Text is that of all tokens, the rest of the one with the stop string included."""
    stop_regex: tuple[str, ...] = stated((), one_or_several(text(256, shortest=1), 32), vllm=None)
    """Patterns (RE2) whose first match ends a choice, as stop strings do."""
    bad_words: tuple[str, ...] = stated((), one_or_several(text(256, shortest=1), 128), sglang=None)
    """Words that the output must not have."""
    processor_arguments: tuple[tuple[str, Any], ...] = stated(
        (), ARGUMENTS, sglang="custom_params", openai="vllm_xargs", vllm="extra_args"
    )
    """Arguments of logit processors that the server has, by name."""
    repetition_detection: tuple[int, ...] | None = stated(None, REPETITION, sglang=None)
    """A `Repetition`: a pattern of tokens that ends a choice once it stands there so often."""

    @property
    def is_watched(self) -> bool:
        """Whether something above the engine may end a choice."""
        return bool(self.stop or self.stop_regex or self.repetition_detection)


class ListedInPrompt(NamedTuple):
    """Token ids whose log-probs are requested at positions of a prompt."""

    start: int
    """First position."""
    ids: np.ndarray
    """int32 [N, L], -1 for none."""


class Constraint(NamedTuple):
    """What a whole answer has to keep to: JSON of a `json_schema`, a `regex`, JSON of a list of texts as `choice`, a
    `grammar`, JSON of a `structural_tag`, or `calls`: JSON of a grammar and schemas for its rules `args_0` and so on.

    `param` is the field that it came in. `whitespace` is an expression for what may stand between the parts of JSON,
    empty for nothing, None for the usual. It holds from the text `after` on, such as the end of reasoning, and within
    the grammar `within`, in Lark, where that has `@content`.
    """

    kind: str
    text: str
    param: str = "response_format"
    whitespace: str | None = None
    after: str = ""
    within: str = ""


@dataclass(frozen=True, kw_only=True)
class RequestedEvidence:
    """What a request wants to know of tokens besides the tokens themselves."""

    num_top_logprobs: int = stated(
        0, whole(0, MAX_TOP_LOGPROBS), sglang="top_logprobs_num", openai="top_logprobs", vllm=None
    )
    """Likeliest tokens returned with every log-prob."""
    logprob_token_ids: tuple[int, ...] = stated((), LISTED_IDS, sglang="token_ids_logprob", vllm=None)
    """Ids whose log-probs are returned at every output."""
    return_entropy: bool = stated(False, FLAG, openai=None, vllm=None)
    """Return the entropy at every output."""
    return_sampling_mask: bool = stated(False, FLAG, vllm=None)
    """Return the tokens that truncation has left at every output, and log-probs among them."""
    logprobs_mode: str | None = stated(None, LOGPROBS_MODE)
    """What log-probs of outputs are of: the distribution that is sampled before truncation, or the model's own."""
    raw_logprobs: bool = False
    """They are the model's own, and that may be another."""
    score_prompt_from: int | None = None
    """Return log-probs of the prompt tokens at positions above this one."""
    listed_in_prompt: ListedInPrompt | None = None
    """Ids whose log-probs are returned at positions of the prompt."""
    return_hidden_states: str = stated("", HIDDEN_STATES, vllm=None)
    """Return the states of the last layer: true those of all tokens, `last` of the last one."""

    @property
    def wants_evidence(self) -> bool:
        """Return True if any field is set."""
        return any(getattr(self, each.name) != each.default for each in fields(RequestedEvidence))


@dataclass(frozen=True)
class GenerationRequest(RequestedEvidence):
    """One prompt to complete `sampling.n` times. `prompt_ids` is int32 [prompt_len]."""

    request_id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    return_routed_experts: bool = stated(False, FLAG)
    """Return routing from position `routed_experts_start` on."""
    cache_salt: str = stated("", text(256))
    """Only requests with the same salt share cached prefixes."""
    incremental: bool = True
    """Send updates as tokens are sampled; otherwise a choice has one, at its end."""
    thinking_token_budget: int | None = stated(None, BUDGET, sglang="max_thinking_tokens", vllm=None)
    """Tokens of reasoning, after which it is ended."""
    thinking: ThinkingLimit | None = None
    """The same with markers, which the text layer knows."""
    forced_routing: RoutedExperts | None = None
    """Replaces what the router selects at the prompt positions that it has rows for."""
    stream_routed_experts: bool = stated(False, FLAG)
    """Send with every update the rows of its tokens."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of each of the `bad_words`, which the text layer knows."""
    kept_special_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text even where it leaves such out."""
    routed_experts_start: int = stated(0, COUNT, sglang=ROW_START, openai=ROW_START, vllm="routed_experts_prompt_start")
    """First position whose routing is returned, of the prompt or right after it."""
    priority: int = stated(0, whole(-INT32_MAX, INT32_MAX))
    """Requests that wait are admitted in rising order of it."""
    speculative: bool = stated(True, FLAG)
    """Verify drafts where the server does; what is returned does not depend on it."""
    constraint: Constraint | None = None
    """What the answer has to keep to."""

    @property
    def is_guided(self) -> bool:
        """Return True if something limits the answer, token by token."""
        return self.constraint is not None or self.thinking is not None or bool(self.bad_word_ids)


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


class RequestError(ValueError):
    """A request that cannot be served as requested; `param` names the field at fault, or is None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WeightsRefusedError(ValueError):
    """A checkpoint whose weights cannot replace the served weights. The message does not contain its path."""


@dataclass(frozen=True)
class RoutingLayout:
    """Layout of a routing row of this model: layers that route, experts, assignments per token."""

    num_hidden_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int

    @property
    def row_shape(self) -> tuple[int, int]:
        """Return the shape of one stored row, [MoE layers, top_k]."""
        return len(self.layer_ids), self.top_k

    @property
    def dtype(self) -> np.dtype:
        """Return uint8 up to 256 experts, uint16 above."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@dataclass(frozen=True)
class ModelCard:
    """Properties of the served model for the layers above the engine."""

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
    logprobs_mode: str = PROCESSED
    longest_constraint: int = LONGEST_CONSTRAINT
    """Maximum bytes of a schema, an expression or a grammar of a request."""
    routing_by_default: str = "off"
    """Form in which OpenAI's routes return routing if a request does not set it; `off` for none."""
    hidden_size: int = 0
    """Length of a hidden state; 0 if hidden states do not leave the devices."""
    processors: tuple[tuple[ProcessorArgument, ...], ...] = ()
    """Arguments of each logit processor."""
