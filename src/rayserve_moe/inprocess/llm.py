"""Generation for a list of prompts under vLLM's names: `LLM`, over the engine of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from rayserve_moe.config.settings import SettingsError
from rayserve_moe.inprocess.arguments import SamplingParams, one_each, request_with, token_ids_of
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.inprocess.outputs import OutputWriter, RequestOutput
from rayserve_moe.inprocess.running import run_to_end
from rayserve_moe.requests.records import RequestError
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
"""Settings by the names that users of vLLM know them by."""
PROMPT_FORMS, PROMPT_OPTIONS = {"prompt", "prompt_token_ids"}, {"cache_salt"}


@dataclass(frozen=True)
class _Prompt:
    """One prompt: its ids, its text where it came as text, and its options."""

    token_ids: np.ndarray
    text: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class LLM:
    """A model in this process. With `enable_return_routed_experts=True` every output carries its routing.

    Other keywords are the settings of `config.settings` under their flat names, or vLLM's where those are well known
    (`max_num_seqs`, ...). SettingsError and CheckpointError say what is wrong with them. Use it as a context manager,
    or call `shutdown`.
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
        """Take `tensor_parallel_size` devices (1) for each of `data_parallel_size` groups; experts lie over all."""
        if tensor_parallel_size is not None and "devices_per_host" in settings:
            raise SettingsError("tensor_parallel_size and devices_per_host both set the devices: give one of them")
        if "devices_per_host" not in settings:
            settings["devices_per_host"] = (tensor_parallel_size or 1) * data_parallel_size
        if not enable_expert_parallel and settings["devices_per_host"] != 1:
            raise SettingsError("experts lie over all devices: leave enable_expert_parallel at True, or use one device")
        self.engine = Engine(model, data_parallel_size=data_parallel_size, **_our_names(settings))
        self._writer = OutputWriter(self.engine.tokenizer, self.engine.card.routing)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        A prompt is a text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`, these two with a `cache_salt` if
        wanted. `sampling_params` are for all prompts, or one each. RequestError names what cannot be served.
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
        """Answer one conversation, or each of several, through the checkpoint's chat template."""
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
        """Abort what runs and stop the engine. May be called twice."""
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
    """Rename settings that came under vLLM's names; SettingsError where one came under both."""
    renamed: dict[str, Any] = {}
    for name, value in settings.items():
        ours = OUR_NAMES.get(name, name)
        if ours in renamed:
            raise SettingsError(f"{ours} is given twice: it has the name {name} too")
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
