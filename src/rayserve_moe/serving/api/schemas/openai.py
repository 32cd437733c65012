"""Bodies of the OpenAI routes, including tools: the computed fields (`known_fields` lists the others)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from rayserve_moe.requests.constraints import ConstraintFields
from rayserve_moe.requests.fields import INT32_MAX, OPENAI
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.serving.api.schemas.field_types import (
    MaxTokens,
    NumTopLogprobs,
    RequestBody,
    RequestId,
    RoutingFields,
    RoutingFormat,
    fault,
    record_fields,
)
from rayserve_moe.serving.api.schemas.prompt_types import Prompts, TokenIds

MAX_TOOLS = 1024
_MAX_NAME = 256
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
_CHOICES = ("none", "auto", "required")
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": _MAX_NAME},
        "parameters": {"type": ["object", "null"]},
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_TOOLS = {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART_SCHEMA}, {"type": "null"}]}


def _check_tools(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS or not all(map(_is_function, value)):
        raise fault(
            f"should be a list of at most {MAX_TOOLS} objects of type function, each with a function that has a name"
        )
    return value


def _is_function(tool: object) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        return False
    function = tool["function"]
    name, parameters = function.get("name"), function.get("parameters")
    is_named = isinstance(name, str) and 0 < len(name) <= _MAX_NAME
    return is_named and (parameters is None or isinstance(parameters, dict))


def _check_choice(value: object) -> str | dict[str, Any]:
    if isinstance(value, dict):
        function = value.get("function")
        if (
            value.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise fault("should name a function: {type: function, function: {name}}")
        return value
    if value not in _CHOICES:
        raise fault(f"should be one of {', '.join(_CHOICES)}, or name a function")
    return str(value)


def _check_effort(value: object) -> str:
    if value not in EFFORTS:
        raise fault(f"should be one of {', '.join(EFFORTS)}")
    return str(value)


ToolList = Annotated[list[dict[str, Any]], PlainValidator(_check_tools), WithJsonSchema(_TOOLS)]
Effort = Annotated[str, PlainValidator(_check_effort), WithJsonSchema({"enum": list(EFFORTS)})]
ToolChoice = Annotated[
    str | dict[str, Any],
    PlainValidator(_check_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_CHOICES)}, _NAMED]}),
]


def _check_kwargs(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fault("should be an object")
    return value


def _check_documents(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not all(map(_is_document, value)):
        raise fault("should be a list of objects whose values are strings")
    return value


def _is_document(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_DOCUMENTS_SCHEMA = {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "string"}}}

TemplateKwargs = Annotated[dict[str, Any], PlainValidator(_check_kwargs), WithJsonSchema({"type": "object"})]
Documents = Annotated[list[dict[str, str]], PlainValidator(_check_documents), WithJsonSchema(_DOCUMENTS_SCHEMA)]


class TemplateFields(RequestBody):
    """Template inputs besides messages. A prompt opens the assistant's answer unless it continues the last message."""

    chat_template_kwargs: TemplateKwargs | None = None
    documents: Documents | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _opens_or_continues(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise fault("give one of `add_generation_prompt` and `continue_final_message`")
        return self

    @property
    def opens_answer(self) -> bool:
        """Return True if the prompt ends with the beginning of the assistant's message."""
        if self.add_generation_prompt is not None:
            return self.add_generation_prompt
        return not self.continue_final_message

    @property
    def template_options(self) -> dict[str, Any]:
        """Return the template's variables besides messages."""
        own = {"documents": self.documents, "continue_final_message": self.continue_final_message or None}
        return {
            **{name: value for name, value in own.items() if value is not None},
            **(self.chat_template_kwargs or {}),
        }


class ToolFields(RequestBody):
    """Tool fields. Tools are passed to the template unchanged; with `tool_choice` none, calls are not parsed.

    `include_reasoning` false drops reasoning, `separate_reasoning` false leaves it in the content with its markers, and
    `stream_reasoning` false sends it at once when it has ended.
    """

    tools: ToolList = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _forced_tools_are_offered(self) -> Self:
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise fault("`tool_choice` should be required only beside `tools`, and name one of them")
        return self

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """Return the tools among which an answer must call; empty if no call is required."""
        if isinstance(self.tool_choice, str):
            return self.tools if self.tool_choice == "required" else []
        name = self.tool_choice["function"]["name"]
        return [tool for tool in self.tools if tool["function"]["name"] == name]

    @property
    def reasoning_options(self) -> dict[str, Any]:
        """Return the template's variables for `reasoning_effort`; none also switches thinking off, as in vLLM."""
        if self.reasoning_effort is None:
            return {}
        return {"reasoning_effort": self.reasoning_effort} | (
            {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        )

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools whose calls are parsed."""
        return [] if self.tool_choice == "none" else self.tools


def _check_role(value: object) -> str:
    if value not in _ROLES:
        raise fault(f"should be one of {', '.join(_ROLES)}")
    return str(value)


def _check_content(value: object) -> str | list[dict]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(map(_is_text_part, value)):
        raise fault("should be a string or a list of parts of type text")
    return value


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


Role = Annotated[str, PlainValidator(_check_role), WithJsonSchema({"enum": list(_ROLES)})]
Content = Annotated[str | list[dict] | None, PlainValidator(_check_content), WithJsonSchema(_CONTENT_SCHEMA)]


class StreamOptions(RequestBody):
    """Token counts in a stream: `include_usage` in a last event, `continuous_usage_stats` in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @property
    def usage_in_events(self) -> bool:
        """Return True if every event counts the tokens of its choice."""
        return self.include_usage and self.continuous_usage_stats


class StreamedBody(RoutingFields):
    """Body whose stream can count tokens."""

    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("`stream_options` is only for requests with `stream` true")
        return self


EXTRAS = (
    *("return_token_ids", "return_prompt_token_ids", "return_hidden_states", "return_weight_versions"),
    *("return_prompt_text", "return_cached_tokens_details", "return_spec_tokens_details", "return_meta_info"),
    *("return_input_ids_in_sglext", "return_output_ids_in_sglext"),
)
"""Fields that an `EvidenceWriter` answers, besides `prompt_logprobs`."""


@record_fields(OPENAI, SamplingParams)
@record_fields(OPENAI, ConstraintFields)
@record_fields(OPENAI, GenerationRequest, without={"top_logprobs", "return_sampling_mask"})
class OpenAIGeneration(StreamedBody):
    """Fields of both OpenAI routes. SGLang's `no_stop_trim` also keeps the text after the stop string in its token."""

    model: str | None = None
    lora_path: Annotated[str, Field(max_length=256)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    rid: RequestId | None = None
    routed_experts_format: RoutingFormat = "sglang"
    prompt_logprobs: NumTopLogprobs | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    return_cached_tokens_details: bool = False
    return_spec_tokens_details: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    @model_validator(mode="after")
    def _whole_answers_score_prompts(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise fault("`prompt_logprobs` is only for requests without `stream`")
        return self

    @property
    def wants_extras(self) -> bool:
        """Return True if the answer has more than text, log-probs and routing."""
        fields = dict(self)
        return fields["prompt_logprobs"] is not None or any(map(fields.get, EXTRAS))


class CompletionBody(OpenAIGeneration):
    """Body of `/v1/completions`. `logprobs` n returns log-probs with the n likeliest tokens each.

    `best_of` samples are drawn, and the `n` with the highest mean log-prob per token are returned.
    """

    prompt: Prompts
    logprobs: NumTopLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _best_of_several(self) -> Self:
        if self.best_of is not None and self.best_of < dict(self)["n"]:
            raise fault("`best_of` should be at least `n`")
        if self.num_samples > dict(self)["n"] and self.stream:
            raise fault("`best_of` above `n` is only for requests without `stream`")
        return self

    @property
    def num_samples(self) -> int:
        """Return the number of answers sampled per prompt, including discarded ones."""
        return self.best_of or dict(self)["n"]


class ChatMessage(RequestBody):
    """Chat message; other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: Content = None


class ChatBody(OpenAIGeneration, TemplateFields, ToolFields):
    """Body of `/v1/chat/completions`. As in SGLang, `input_ids` replace the rendered prompt."""

    echo: bool = False
    input_ids: TokenIds | None = None
    add_special_tokens: bool = False
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: NumTopLogprobs = 0
    return_prompt_text: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False
    return_sampling_mask: bool = False

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise fault("`top_logprobs` is only for requests with `logprobs` true")
        return self

    @property
    def answering_role(self) -> str:
        """Return the role of the answer: assistant, unless it continues another role's message."""
        return "assistant" if self.opens_answer else self.messages[-1].role

    @property
    def continued_text(self) -> str:
        """Return the last message's text if the answer has its role: `echo` repeats it, as in vLLM."""
        last = self.messages[-1]
        if last.role != self.answering_role:
            return ""
        parts = last.content if isinstance(last.content, list) else [{"text": last.content or ""}]
        return "\n".join(part["text"] for part in parts)

    @model_validator(mode="after")
    def _whole_answers_describe_themselves(self) -> Self:
        if self.return_sampling_mask and not self.return_meta_info:
            raise fault("`return_sampling_mask` is only for requests with `return_meta_info` true")
        if self.stream and (self.return_meta_info or self.return_prompt_token_ids):
            raise fault("`return_meta_info` and `return_prompt_token_ids` are only for requests without `stream`")
        return self
