"""Batch generation under vLLM's names: `LLM` over the in-process engine, and its outputs.

It returns a `RequestOutput` per prompt, with routing as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from rayserve_moe.answers.native import ChoiceResult, TokenLogprob, output_logprobs, prompt_logprobs_of, stop_reason
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.inprocess.arguments import SamplingParams, one_each, request_with, token_ids_of
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.inprocess.running import run_to_end
from rayserve_moe.replay.encoding import routed_experts_info, routing_from
from rayserve_moe.requests.records import GenerationRequest, RequestError, RoutedExperts, RoutingLayout
from rayserve_moe.text.chat import render_chat
from rayserve_moe.text.tokenizer import Tokenizer

Prompts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
Messages = Sequence[Mapping[str, Any]]

OUR_NAMES = {
    "block_size": "page_size",
    "gpu_memory_utilization": "mem_fraction",
    "max_num_batched_tokens": "max_step_tokens",
    "max_num_seqs": "max_running_requests",
}
"""Settings by their names in vLLM."""
PROMPT_FORMS, PROMPT_OPTIONS = {"prompt", "prompt_token_ids"}, {"cache_salt"}


@dataclass(frozen=True)
class _Prompt:
    """Prompt of a call."""

    token_ids: np.ndarray
    text: str | None = None
    """Text of the prompt, or None if it was given as ids."""
    options: Mapping[str, Any] = field(default_factory=dict)


class LLM:
    """Model in this process. With `enable_return_routed_experts=True` every output carries its routing.

    Other keywords are the settings of `config.settings` under their flat names, or well-known names of vLLM
    (`max_num_seqs`, ...). Use it as a context manager, or call `shutdown`.

    Raises: SettingsError for wrong settings, CheckpointError for an unusable checkpoint.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int | None = None,
        data_parallel_size: int = 1,
        enable_expert_parallel: bool = True,
        **settings: Any,
    ) -> None:
        """Take `tensor_parallel_size` devices (default 1) for each of `data_parallel_size` groups.

        Experts use all devices.
        """
        if tensor_parallel_size is not None and "devices_per_host" in settings:
            raise SettingsError("tensor_parallel_size and devices_per_host both set the devices: give one of them")
        if "devices_per_host" not in settings:
            settings["devices_per_host"] = (tensor_parallel_size or 1) * data_parallel_size
        if not enable_expert_parallel and settings["devices_per_host"] != 1:
            raise SettingsError("experts use all devices: leave enable_expert_parallel at True, or use one device")
        self.engine = Engine(model, data_parallel_size=data_parallel_size, **_our_names(settings))
        self._writer = OutputWriter(self.engine.tokenizer, self.engine.card.routing)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt and return the outputs in the order of the prompts.

        A prompt is a text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`; the mappings may have a `cache_salt`.
        `sampling_params` apply to all prompts, or are a list with an entry per prompt.

        Raises: RequestError if a request is invalid or unsupported.
        """
        return self._complete(_prompts_of(self.get_tokenizer(), prompts), sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the checkpoint's chat template."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer, prompts = self.get_tokenizer(), []
        for conversation in conversations:
            text = render_chat(
                tokenizer,
                conversation,
                template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
            )
            prompts.append(_Prompt(token_ids_of(tokenizer.encode(text, add_special_tokens=False)), text))
        return self._complete(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer."""
        return self.engine.tokenizer

    def shutdown(self) -> None:
        """Abort running requests and stop the engine. May be called twice."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _complete(
        self,
        prompts: list[_Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = one_each(sampling_params, len(prompts), single=SamplingParams, otherwise=SamplingParams())
        card = self.engine.card
        requests = [
            request_with(prompt.token_ids, params, card=card, options=prompt.options)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        finished = run_to_end(self.engine.loop, self.engine.tokenizer, requests=requests, shows_progress=use_tqdm)
        return [
            self._writer.request_output(one.request, one.results, params=params, prompt=prompt.text)
            for one, params, prompt in zip(finished, each, prompts, strict=True)
        ]


def _our_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings given under vLLM's names.

    Raises: SettingsError if a setting has both names.
    """
    renamed: dict[str, Any] = {}
    for name, value in settings.items():
        ours = OUR_NAMES.get(name, name)
        if ours in renamed:
            raise SettingsError(f"{ours} is given twice, also under the name {name}")
        renamed[ours] = value
    return renamed


def _prompts_of(tokenizer: Tokenizer, prompts: Prompts) -> list[_Prompt]:
    each = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    return [_prompt_of(tokenizer, prompt) for prompt in each]


def _prompt_of(tokenizer: Tokenizer, prompt: str | Mapping[str, Any]) -> _Prompt:
    if isinstance(prompt, str):
        return _Prompt(token_ids_of(tokenizer.encode(prompt)), prompt)
    is_known = isinstance(prompt, Mapping) and prompt.keys() <= PROMPT_FORMS | PROMPT_OPTIONS
    if not is_known or len(PROMPT_FORMS & prompt.keys()) != 1:
        raise RequestError('a prompt is a text, {"prompt": text} or {"prompt_token_ids": [...]}', "prompts")
    text, options = prompt.get("prompt", ""), {name: prompt[name] for name in PROMPT_OPTIONS & prompt.keys()}
    ids = tokenizer.encode(text) if "prompt" in prompt else prompt["prompt_token_ids"]
    return _Prompt(token_ids_of(ids), text or None, options)


@dataclass(frozen=True)
class Logprob:
    """Log-prob of a token at a position."""

    logprob: float
    rank: int | None
    """Rank among all tokens; 1 is the likeliest."""
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""Log-probs by token id: first the token at the position, then the likeliest tokens."""


@dataclass(frozen=True)
class CompletionOutput:
    """Completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    routed_experts: np.ndarray | None
    """int16 [rows, MoE layers, k] of the positions from the first generated token on; a row fewer than tokens, because
    the last token never enters the model. None without routing capture or with missing rows."""
    routed_experts_info: dict | None
    """Description of the routing, including its missing rows; None without routing capture."""


@dataclass(frozen=True)
class RequestOutput:
    """Prompt with its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    """Log-probs per prompt token; the first is None."""
    outputs: list[CompletionOutput]
    finished: bool
    prompt_routed_experts: np.ndarray | None
    """int16 [prompt tokens, MoE layers, k], the same for all completions; None without capture or with missing rows."""
    num_cached_tokens: int


@dataclass(frozen=True)
class OutputWriter:
    """Converter of results to outputs."""

    tokenizer: Tokenizer
    layout: RoutingLayout

    def request_output(
        self, request: GenerationRequest, results: Sequence[ChoiceResult], *, params: SamplingParams, prompt: str | None
    ) -> RequestOutput:
        """Return the output of a request, which was built from `params`."""
        num_prompt_tokens = len(request.prompt_ids)
        start = params.routed_experts_prompt_start
        found = (_rows(result.routing, start, num_prompt_tokens) for result in results)
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_ids.tolist(),
            prompt_logprobs=self._prompt_logprobs(request, results[0], params.prompt_logprobs),
            outputs=[
                self._completion(index, result, params=params, request=request) for index, result in enumerate(results)
            ],
            finished=all(result.finish is not None for result in results),
            prompt_routed_experts=next((rows for rows in found if rows is not None), None),
            num_cached_tokens=results[0].num_cached_tokens,
        )

    def _completion(
        self, index: int, result: ChoiceResult, *, params: SamplingParams, request: GenerationRequest
    ) -> CompletionOutput:
        routing, finish, num_prompt_tokens = result.routing, result.finish, len(request.prompt_ids)
        reason = stop_reason(result, request, eos_token_ids=self.tokenizer.eos_token_ids)
        end = num_prompt_tokens if routing is None else max(num_prompt_tokens, routing.start + len(routing.rows))
        info = None
        if routing is not None:
            info = routed_experts_info(routing_from(routing, params.routed_experts_prompt_start), self.layout)
        logprobs = None
        if params.logprobs is not None:
            listed_ids = request.logprob_token_ids
            found = output_logprobs(result, num_top=params.logprobs, listed_ids=listed_ids)
            logprobs = list(map(self._by_id, found))
        return CompletionOutput(
            index=index,
            text=result.text,
            token_ids=list(result.token_ids),
            cumulative_logprob=float(sum(result.logprobs)),
            logprobs=logprobs,
            finish_reason=finish.kind if finish else None,
            stop_reason=finish.message if finish and finish.message is not None else reason,
            routed_experts=_rows(routing, num_prompt_tokens, end),
            routed_experts_info=info,
        )

    def _prompt_logprobs(
        self, request: GenerationRequest, result: ChoiceResult, num_top: int | None
    ) -> list[TokenLogprobs | None] | None:
        if num_top is None or result.prompt is None or "logprobs" not in result.prompt.columns:
            return None
        scored = prompt_logprobs_of(result, request.prompt_ids.tolist(), num_top=num_top)
        return [None if tokens is None else self._by_id(tokens) for tokens in scored]

    def _by_id(self, tokens: Sequence[TokenLogprob]) -> TokenLogprobs:
        return {token.token_id: Logprob(token.logprob, token.rank, self._text(token.token_id)) for token in tokens}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id)


def _rows(routing: RoutedExperts | None, first: int, last: int) -> np.ndarray | None:
    """Return the rows of positions `[first, last)`, or None if any row is missing."""
    if routing is None or first < routing.start or routing.start + len(routing.rows) < last:
        return None
    if any(begin < last and end > first for begin, end in routing.missing):
        return None
    return routing.rows[first - routing.start : last - routing.start].astype(np.int16)
