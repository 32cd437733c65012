"""Records of requests and of the served model, in token ids.

All packages share these types. Text, HTTP bodies and device arrays are defined elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    MAX_CONSTRAINT_BYTES,
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
from rayserve_moe.requests.retention import NO_RETENTION, Retention

INDEX, GATES = "index", "gates"
"""Names of parts of routing rows (`requests.row_parts`)."""
ROW_START = "routed_experts_start_len"
MAX_ADAPTER_KEY = 300
"""Maximum characters of an adapter's name with the digest of its bytes."""


@dataclass(frozen=True, kw_only=True)
class SharedSampling:
    """Sampling parameters with the same name, type and default in every dialect."""

    n: int = stated(1, whole(1, 128))
    """Number of choices."""
    temperature: float = stated(1.0, number(0, 100))
    """Sampling temperature; 0 is greedy."""
    top_p: float = stated(1.0, number(0, 1, above=True))
    """Minimum total probability of the likeliest tokens kept; 1 keeps all."""
    top_k: int = stated(0, whole(-1, INT32_MAX, convert=lambda k: max(int(k), 0)))
    """Likeliest tokens kept; 0 (or, as given, -1) keeps all."""
    min_p: float = stated(0.0, number(0, 1))
    """Minimum probability of kept tokens, relative to the likeliest token."""
    presence_penalty: float = stated(0.0, number(-2, 2))
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = stated(0.0, number(-2, 2))
    """Subtracted from the logit of a token once per occurrence in the output."""
    repetition_penalty: float = stated(1.0, number(0.001, 100))
    """Divides positive and multiplies negative logits of tokens in prompt or output, ahead of the other penalties."""
    seed: int | None = stated(None, SEED, sglang="sampling_seed")
    """64-bit seed; None lets the engine draw a seed."""
    ignore_eos: bool = stated(False, FLAG)
    """Continue after the model's end of sequence."""
    include_stop_str_in_output: bool = stated(False, FLAG, sglang=None)
    """Include the stop string and the stop id in the text."""
    skip_special_tokens: bool = stated(True, FLAG)
    """Leave special tokens out of the text."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(SharedSampling):
    """Sampling and stopping of a request. Stop strings are matched above the engine, on text.

    Before `min_new_tokens`, stop ids and the end of sequence (even if ignored) have no probability.
    """

    max_new_tokens: int = stated(128, COUNT, openai="max_tokens", vllm="max_tokens", has_default=False)
    """Maximum number of new tokens; 0 runs the prompt only."""
    stop: tuple[str, ...] = stated((), one_or_several(text(1024, shortest=1), 32))
    """Strings that end a choice."""
    stop_token_ids: tuple[int, ...] = stated((), one_or_several(COUNT, 1024))
    """Ids that end a choice, besides the end of sequence."""
    logit_bias: tuple[tuple[int, float], ...] = stated((), biases(MAX_LOGIT_BIASES, bias=number(-100, 100)))
    """Added to logits ahead of the penalties, per token id."""
    allowed_token_ids: tuple[int, ...] = stated((), one_or_several(COUNT, MAX_LOGIT_BIASES, least=1), sglang=None)
    """Only these ids may be sampled; empty permits all."""
    first_choice: int = stated(0, COUNT, openai=None, vllm=None)
    """Index of the first choice in the seed's sequence of choices."""
    min_new_tokens: int = stated(0, COUNT, openai="min_tokens", vllm="min_tokens")
    """Minimum tokens before a stop id or the end of sequence."""
    stop_strings_after: int = stated(0, COUNT, sglang=None, openai="min_tokens", vllm="min_tokens")
    """Minimum tokens before a stop string."""
    no_stop_trim: bool = stated(False, FLAG, vllm=None)
    """Return the text of all tokens, including the rest of the token with the stop string."""
    stop_regex: tuple[str, ...] = stated((), one_or_several(text(256, shortest=1), 32), vllm=None)
    """Patterns (RE2) whose first match ends a choice, like stop strings."""
    bad_words: tuple[str, ...] = stated((), one_or_several(text(256, shortest=1), 128), sglang=None)
    """Words that the output must not contain."""
    processor_arguments: tuple[tuple[str, Any], ...] = stated(
        (), ARGUMENTS, sglang="custom_params", openai="vllm_xargs", vllm="extra_args"
    )
    """Arguments of the server's logit processors, by name."""
    repetition_detection: tuple[int, ...] | None = stated(None, REPETITION, sglang=None)
    """A `Repetition` that ends a choice."""

    @property
    def is_watched(self) -> bool:
        """Return True if the layers above the engine may end a choice."""
        return bool(self.stop or self.stop_regex or self.repetition_detection)


class ListedInPrompt(NamedTuple):
    """Token ids whose log-probs are requested at positions of a prompt."""

    start: int
    """First position."""
    ids: np.ndarray
    """int32 [N, L], -1 for none."""


class Constraint(NamedTuple):
    """Constraint of a whole answer."""

    kind: str
    """`json_schema`, `regex`, `choice`, `grammar`, `structural_tag` or `calls`."""
    text: str
    """JSON schema; expression; JSON list of texts; grammar; JSON of tags; or JSON of a grammar with schemas for its
    rules `args_0` and so on."""
    param: str = "response_format"
    """Field that set the constraint."""
    whitespace: str | None = None
    """Expression for whitespace between JSON tokens; empty for none, None for the default."""
    after: str = ""
    """Text after which the constraint applies, such as the end of reasoning."""
    within: str = ""
    """Lark grammar that contains the constraint as `@content`."""


@dataclass(frozen=True, kw_only=True)
class RequestedEvidence:
    """Requested evidence about tokens besides the tokens themselves."""

    num_top_logprobs: int = stated(
        0, whole(0, MAX_TOP_LOGPROBS), sglang="top_logprobs_num", openai="top_logprobs", vllm=None
    )
    """Likeliest tokens returned with every log-prob."""
    logprob_token_ids: tuple[int, ...] = stated((), LISTED_IDS, sglang="token_ids_logprob", vllm=None)
    """Ids whose log-probs are returned at every output."""
    return_entropy: bool = stated(False, FLAG, openai=None, vllm=None)
    """Return the entropy at every output."""
    return_sampling_mask: bool = stated(False, FLAG)
    """Return the sampling mask of every output, and log-probs within it."""
    logprobs_mode: str | None = stated(None, LOGPROBS_MODE)
    """Distribution of output log-probs: the sampled one before truncation (processed), or the model's own (raw)."""
    raw_logprobs: bool = False
    """True if log-probs are the model's own and may differ from the sampled distribution's."""
    score_prompt_from: int | None = None
    """Return log-probs of the prompt tokens at positions above this one."""
    listed_in_prompt: ListedInPrompt | None = None
    """Ids whose log-probs are returned at positions of the prompt."""
    return_hidden_states: str = stated("", HIDDEN_STATES, vllm=None)
    """Return the states of the last layer: of all tokens (true), or of the last token (`last`)."""
    return_indexer_topk: bool = stated(False, FLAG)
    """Return the positions that the indexes of sparse attention choose."""
    return_router_gates: bool = stated(False, FLAG)
    """Return the weights of the routed experts."""
    return_draft_tokens: bool = stated(False, FLAG, openai=None, vllm=None)
    """Return which outputs were accepted drafts."""
    return_layer_states: bool = stated(False, FLAG, openai=None, vllm=None)
    """Return the inputs of the layers that the server shows, at positions of the prompt."""
    layer_states_start: int = stated(0, COUNT, sglang="layer_states_start_len", openai=None, vllm=None)
    """First position with returned states."""
    is_audited: bool = False
    """True if the routers' own choices and sketches are returned at all positions of the prompt."""

    @property
    def wants_evidence(self) -> bool:
        """Return True if any field is set."""
        return any(getattr(self, each.name) != each.default for each in fields(RequestedEvidence))


@dataclass(frozen=True, kw_only=True)
class RequestedAdapter:
    """Name or key of the requested adapter; empty for none."""

    adapter: str = stated("", text(MAX_ADAPTER_KEY), sglang="lora_path", openai="lora_path", vllm=None)
    """Name of a loaded adapter, or its key, NAME@DIGEST; empty: the model alone. The engine replaces names by keys."""

    def version_label(self, weight_version: str) -> str:
        """Return the version of its tokens under weights of a version: it also names the adapter."""
        return f"{weight_version}+{self.adapter}" if self.adapter else weight_version


@dataclass(frozen=True)
class GenerationRequest(RequestedAdapter, RequestedEvidence):
    """Prompt to complete `sampling.n` times. `prompt_ids` is int32 [prompt_len]."""

    request_id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    return_routed_experts: bool = stated(False, FLAG)
    """Return routing from position `routed_experts_start` on."""
    cache_salt: str = stated("", text(256))
    """Only requests with the same salt share cached prefixes."""
    incremental: bool = True
    """Send updates as tokens are sampled; otherwise each choice has a single update, at its end."""
    thinking_token_budget: int | None = stated(None, BUDGET, sglang="max_thinking_tokens", vllm=None)
    """Maximum tokens of reasoning."""
    thinking: ThinkingLimit | None = None
    """The budget with the markers of reasoning, set by the text layer."""
    forced_routing: RoutedExperts | None = None
    """Routing that replaces the router's selection at prompt positions with rows."""
    stream_routed_experts: bool = stated(False, FLAG)
    """Send the rows of its tokens with every update."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of each of the `bad_words`, set by the text layer."""
    kept_special_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text even if special tokens are skipped."""
    routed_experts_start: int = stated(0, COUNT, sglang=ROW_START, openai=ROW_START, vllm="routed_experts_prompt_start")
    """First position whose routing is returned, at most the prompt length."""
    priority: int = stated(0, whole(-INT32_MAX, INT32_MAX))
    """Waiting requests are admitted in ascending order of priority."""
    speculative: bool = stated(True, FLAG)
    """Verify drafts if the server does; the output does not depend on it."""
    constraint: Constraint | None = None
    """Constraint of the answer."""
    session: str | None = None
    """Key of its session, distinct for each tenant; None without a session. The answer does not depend on it."""
    retention: Retention = NO_RETENTION
    """Hints about its cached pages."""

    @property
    def is_guided(self) -> bool:
        """Return True if the answer is limited token by token."""
        return self.constraint is not None or self.thinking is not None or bool(self.bad_word_ids)

    @property
    def wants_rows(self) -> bool:
        """Return True if rows of its tokens are returned, of routing or of an index."""
        return self.return_routed_experts or self.return_indexer_topk


@dataclass(frozen=True)
class RoutedExperts:
    """Routing of a choice for positions `start .. num_tokens - 2`, or a known part.

    Ranges are absolute positions `[from, to)`.
    """

    rows: np.ndarray
    """[num_rows, MoE layers, k] in the layout's dtype, logical ids in router order."""
    start: int = 0
    missing: tuple[tuple[int, int], ...] = ()
    """Ranges without data; their rows must never be read."""
    source: tuple[tuple[int, int, str], ...] = ()
    """Ranges labelled with the source of their rows."""
    weight_version: tuple[tuple[int, int, str], ...] = ()
    """Ranges labelled with the version of the weights."""
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Captured parts of the rows by name (`requests.row_parts`), an entry per row."""

    @property
    def index(self) -> np.ndarray | None:
        """Return packed index rows, or None if they are not captured."""
        return self.parts.get(INDEX)

    @property
    def gates(self) -> np.ndarray | None:
        """Return router gates, or None if they are not captured."""
        return self.parts.get(GATES)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all rows and parts."""
        packed = 0 if self.index is None else sum(map(len, filter(None, self.index)))
        return self.rows.nbytes + packed + (0 if self.gates is None else self.gates.nbytes)


class RequestError(ValueError):
    """Error for a request that cannot be served as requested; `param` is the field at fault, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WeightsRefusedError(ValueError):
    """Error for a checkpoint whose weights cannot replace the serving weights. Its message omits the path."""


@dataclass(frozen=True)
class RoutingLayout:
    """Layout of a routing row: layers that route, experts, assignments per token."""

    num_hidden_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int

    @property
    def row_shape(self) -> tuple[int, int]:
        """Return the shape of a stored row, [MoE layers, top_k]."""
        return len(self.layer_ids), self.top_k

    @property
    def dtype(self) -> np.dtype:
        """Return uint8 up to 256 experts, uint16 above."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@dataclass(frozen=True)
class IndexLayout:
    """Layout of the rows of the index of sparse attention."""

    layer_ids: tuple[int, ...]
    """Layer of each row of a token: layers with an index of their own, once for each row of such a layer."""
    sparse_layer_ids: tuple[int, ...]
    """Layers with sparse attention, likewise; those without an index share the last choice before them."""
    top_k: int
    """Maximum number of positions that a token sees, or of blocks."""
    max_bytes: int = 0
    """Maximum bytes of stored rows in host memory."""
    block_size: int = 1
    """Positions of a block; 1 if rows hold positions."""


@dataclass(frozen=True)
class GateScale:
    """Computation of router gates, the weights of a token's experts: scores, normalisation, scale, factors."""

    score: str
    """Function of the router's logits: `softmax` or `sigmoid`."""
    is_normalized: bool
    """True if the scores of a token's experts are divided by their sum."""
    scale: float
    """Factor of all gates after that; 1 for none."""
    has_expert_factors: bool = False
    """True if each gate is then multiplied by a learned factor of its expert."""


class PromptEvidence(NamedTuple):
    """Evidence about tokens of prompts that the steps of a server compute."""

    audits: bool = False
    """True if the server was started for audits."""
    state_layers: tuple[int, ...] = ()
    """Layers for layer states; empty if states stay on the devices."""
    state_size: int = 0
    """Length of such an input."""


_NO_EVIDENCE = PromptEvidence()


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
    evidence: PromptEvidence = _NO_EVIDENCE
    logprobs_mode: str = PROCESSED
    max_constraint_bytes: int = MAX_CONSTRAINT_BYTES
    """Maximum bytes of a schema, an expression or a grammar of a request."""
    routing_by_default: str = "off"
    """Form in which OpenAI's routes return routing if a request does not set it; `off` for none."""
    index: IndexLayout | None = None
    """Layout of index rows; None if the server does not return them."""
    gates: GateScale | None = None
    """Scale of router gates; None if the server does not return them."""
    hidden_size: int = 0
    """Length of a hidden state; 0 if hidden states do not leave the devices."""
    processors: tuple[tuple[ProcessorArgument, ...], ...] = ()
    """Arguments of each logit processor."""
