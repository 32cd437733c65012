"""Table of all fields that vLLM, SGLang or OpenAI define for the request bodies here, and their treatment.

*Computed* fields belong to the schemas, under any of their names. *Accepted* fields do not change the answer.
*Refused* fields would change it and are unsupported: only values that switch them off are permitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from rayserve_moe.serving.schemas import control
from rayserve_moe.serving.schemas.embeddings import EmbeddingBody
from rayserve_moe.serving.schemas.messages import CountTokensBody, MessagesBody
from rayserve_moe.serving.schemas.native import GenerateBody, NativeSampling
from rayserve_moe.serving.schemas.openai import ChatBody, CompletionBody, StreamOptions
from rayserve_moe.serving.schemas.responses import ResponsesBody
from rayserve_moe.serving.schemas.resume import ResumeBody
from rayserve_moe.serving.schemas.score import ScoreBody
from rayserve_moe.serving.schemas.text_tokens import DetokenizeBody, TokenizeBody
from rayserve_moe.serving.schemas.tokens import TokenBody, TokenSampling

NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that switch every refused field off, equal to a missing field."""
OBJECTS: dict[str, type[BaseModel]] = {
    "c": CompletionBody,
    "h": ChatBody,
    "g": GenerateBody,
    "gs": NativeSampling,
    "i": TokenBody,
    "is": TokenSampling,
    "so": StreamOptions,
    "m": MessagesBody,
    "mc": CountTokensBody,
    "r": ResponsesBody,
    "score": ScoreBody,
    "e": EmbeddingBody,
    "abort": control.AbortBody,
    "abort-ids": control.AbortIdsBody,
    "pause": control.PauseBody,
    "vLLM-pause": control.PauseOptions,
    "reset": control.ResetOptions,
    "resume": ResumeBody,
    "update": control.UpdateWeightsBody,
    "directory": control.WeightDirBody,
    "version": control.WeightNameBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
_PLAIN = {
    "c": "/v1/completions",
    "h": "/v1/chat/completions",
    "g": "/generate",
    "i": "/inference/v1/generate /skyrl/v1/generate",
    "m": "/v1/messages",
    "mc": "/v1/messages/count_tokens",
    "r": "/v1/responses",
    "score": "/v1/score",
    "e": "/v1/embeddings",
    "abort": "/abort_request",
    "abort-ids": "/abort_requests /inference/v1/abort_requests",
    "pause": "/pause_generation",
    "vLLM-pause": "/pause",
    "reset": "/flush_cache /reset_prefix_cache",
    "update": "/update_weights_from_disk /areal_update_weights",
    "directory": "/update_weights",
    "version": "/update_weight_version",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "resume": "/resume_request",
}
_NESTED = {
    "gs": ("/generate", "sampling_params"),
    "is": ("/inference/v1/generate /skyrl/v1/generate", "sampling_params"),
    "so": ("/v1/completions /v1/chat/completions /inference/v1/generate /skyrl/v1/generate", "stream_options"),
}
PLACES: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        key: (tuple(paths.split()), place)
        for key, (paths, place) in ({key: (paths, "body") for key, paths in _PLAIN.items()} | _NESTED).items()
    }
)
"""Routes that take each of OBJECTS, and its location in their bodies."""
_OTHER_NAMES = (
    ("c h", {"request_id": "rid", "extra_key": "cache_salt", "custom_params": "vllm_xargs"}),
    ("c h", {"routed_experts_prompt_start": "routed_experts_start_len"}),
    ("g", {"extra_key": "cache_salt"}),
    ("i", {"rid": "request_id"}),
    ("r", {"extra_key": "cache_salt"}),
    ("e score", {"request_id": "rid"}),
)
_ACCEPTED = (
    ("c h", "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options"),
    ("c h", "prompt_cache_retention prediction return_token_offsets guided_decoding_backend"),
    ("c h", "mm_payload return_mm_kwargs"),
    ("c h gs is", "spaces_between_special_tokens length_penalty early_stopping"),
    ("is", "truncation_side"),
    ("c h g gs is", "stream_interval"),
    ("c h g i", "session_id conversation_id routing_key data_parallel_rank routed_dp_rank custom_labels"),
    ("g", "return_bytes no_logs log_metrics background received_time"),
    ("c h g", "return_flat_raw_top_logprobs_b64 return_flat_raw_output_top_logprobs_b64"),
    ("i", "token_offsets mm_payload return_mm_kwargs"),
    ("is", "output_kind detokenize skip_reading_prefix_cache skip_clone output_text_buffer_length"),
    ("so", "include_obfuscation"),
    ("m mc", "metadata service_tier cache_control inference_geo speed mm_payload return_mm_kwargs"),
    ("m mc", "betas user_profile_id workspace_id"),
    ("r", "service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention"),
    ("r", "stream_options mm_payload return_mm_kwargs session_id access_programs"),
    ("m r", "data_parallel_rank routed_dp_rank"),
    ("score e", "user"),
    ("score", "truncation_side"),
    ("mc", "cache_salt priority vllm_xargs"),
    ("pause reset update version", "rid"),
    ("directory", "update_info reset_prefix_cache"),
    ("reset", "reset_external timeout timeout_s empty_cache"),
    ("version", "weight_label"),
    ("update", "torch_empty_cache recapture_cuda_graph token_step"),
)
_REFUSED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    # length, stopping, text
    ("i", "output_mode", ("tokens",)),
    # distribution
    ("c h is", "logits_processors", ()),
    ("c h gs is", "use_beam_search", (False,)),
    ("c h gs is", "beam_width", (1,)),
    ("h gs is", "best_of", (1,)),
    ("c h g", "custom_logit_processor", ()),
    ("g", "custom_params", ()),
    ("is", "trace_decode_token_ids", ()),
    ("c h is", "watermarking", (False,)),
    ("c h g gs", "watermark", (False, {"enabled": False})),
    # evidence returned
    ("is", "flat_logprobs", (False,)),
    ("g", "return_indexer_topk", (False,)),
    ("h g", "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs", (False,)),
    ("h g", "sampling_logprobs_mode", ("selected",)),
    # prompt, template, tools, reasoning
    ("c", "prompt_embeds suffix", ()),
    ("h", "chat_template functions", ()),
    ("h", "reasoning thinking task", ()),
    ("h", "function_call", ("none", "auto")),
    ("g", "input_embeds session_params", ()),
    ("g", "require_reasoning", (False,)),
    ("i", "reasoning_ended reasoning_parser_kwargs", (False,)),
    # adapters, disaggregation, media, internals
    ("c h g", "lora_path lora_id", ()),
    ("c h i", "kv_transfer_params ec_transfer_params", ()),
    ("c h g m r", "bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank", ()),
    ("c h g", "bootstrap_pair_key", ()),
    ("c h g", "decode_tp_size kv_hints", ()),
    ("c h g i", "mm_processor_kwargs media_io_kwargs", ()),
    ("h g", "modalities", (["text"],)),
    ("h", "audio web_search_options moderation verbosity", ()),
    ("h g", "image_data video_data audio_data images_config video_config max_dynamic_patch min_dynamic_patch", ()),
    ("h g", "image_max_dynamic_patch video_max_dynamic_patch", ()),
    ("h g", "use_audio_in_video", (False,)),
    ("g", "positional_embed_overrides http_worker_ipc external_trace_header encoder_urls", ()),
    ("g", "multi_item_delimiter_indices token_indices_to_pool", ()),
    ("g", "mm_hashes mm_content_hashes", ()),
    ("g", "need_wait_for_mm_inputs ebnf_full_assistant", (False,)),
    ("gs", "stop_strs stop_regex_strs", ()),
    ("gs", "stop_str_max_len stop_regex_max_len", (0,)),
    ("gs", "is_normalized ebnf_full_assistant", (False,)),
    ("c h", "session_params", ()),
    ("c", "images_config", ()),
    ("g", "num_items_assigned", (0,)),
    ("i", "features content_parts", ()),
    # other systems' routes
    ("m mc", "container context_management mcp_servers kv_transfer_params ec_transfer_params", ()),
    ("m mc", "mm_processor_kwargs media_io_kwargs", ()),
    ("m", "diagnostics", ()),
    ("m mc r", "watermarking", (False,)),
    ("r", "background", (False,)),
    ("r", "truncation", ("disabled",)),
    ("r", "conversation context_management max_tool_calls prompt moderation background_options image", ()),
    ("r", "mm_processor_kwargs media_io_kwargs previous_input_messages", ()),
    ("r", "enable_response_messages", (False,)),
    ("r", "kv_transfer_params ec_transfer_params", ()),
    ("score", "truncate_prompt_tokens mm_processor_kwargs multi_item_delimiter_indices", ()),
    ("e", "messages mm_processor_kwargs lora_path embed_overrides embed_override_token_id", ()),
    ("e", "padding", ("do_not_pad",)),
    ("e", "embed_dtype", ("float32",)),
    ("e", "endianness", ("native", "little")),
    ("score", "return_pooled_hidden_states return_token_logprobs", (False,)),
    ("score", "embed_override_token_id query_embed_overrides item_embed_overrides score_extraction_token", ()),
    ("score", "instruction chat_template_kwargs use_activation", ()),
    ("score", "max_tokens_per_query max_tokens_per_doc priority", (0,)),
    ("score", "padding", ("do_not_pad",)),
    ("score", "add_special_tokens", (True,)),
    # control
    ("abort", "abort_message finished_reason weight_versions", ()),
    ("abort pause reset update version", "http_worker_ipc", ()),
    ("tokenize", "chat_template tools return_offsets reasoning_effort", ()),
    ("tokenize", "tool_choice", ("none", "auto")),
    ("tokenize", "mm_processor_kwargs media_io_kwargs", ()),
    ("update", "is_async keep_pause", (False,)),
    ("update", "manifest", ()),
)


class NestedFields(NamedTuple):
    """Names in plain JSON objects within bodies of `/v1/messages` and `/v1/responses`.

    Content of messages, input items, schemas and `metadata` may have any names.
    """

    computed: str
    """Names of computed fields, separated by spaces."""
    accepted: str = ""
    """Names of fields without effect, separated by spaces."""
    refused: Mapping[str, tuple[Any, ...]] = {}
    """Refused fields, with values that switch them off."""
    within: Mapping[str, NestedFields] = {}
    """Fields of inner objects."""
    kinds: tuple[str | None, ...] = ()
    """If not empty, only objects with such a `type` are checked; the route rejects others."""


_TOOLS = NestedFields(
    "type name description input_schema",
    "cache_control strict eager_input_streaming",
    {"defer_loading": (False,), "input_examples": (), "allowed_callers": (["direct"],)},
    kinds=(None, "custom"),
)
_MESSAGES = {
    "thinking": NestedFields("type budget_tokens", refused={"display": ("summarized",)}),
    "output_config": NestedFields("effort format", within={"format": NestedFields("type schema", "name strict")}),
    "tools": _TOOLS,
    "tool_choice": NestedFields("type name disable_parallel_tool_use"),
}
_RESPONSES = {
    "reasoning": NestedFields("effort", "summary generate_summary", {"context": ("auto",), "mode": ("standard",)}),
    "text": NestedFields(
        "format",
        refused={"verbosity": ("medium",)},
        within={"format": NestedFields("type name schema strict description")},
    ),
    "tools": NestedFields(
        "type name description parameters strict",
        refused={
            "defer_loading": (False,),
            "allowed_callers": (["direct"],),
            "async": (False,),
            "output_schema": (),
        },
        kinds=("function",),
    ),
    "tool_choice": NestedFields("type name", kinds=("function",)),
}
NESTED_FIELDS: Mapping[str, Mapping[str, NestedFields]] = {"m": _MESSAGES, "mc": _MESSAGES, "r": _RESPONSES}
"""Nested fields by object of `known_fields`, then by field."""


@dataclass(frozen=True)
class KnownFields:
    """Fields of a JSON object, by their treatment."""

    computed: frozenset[str]
    other_names: Mapping[str, str]
    """Computed field by alias."""
    accepted: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    """Values besides NOTHING that switch a field off."""
    nested: Mapping[str, KnownFields]
    """Computed fields that are declared objects, or lists of them."""
    kinds: tuple[str | None, ...] = ()
    """If not empty, only objects with such a `type` are checked."""

    @property
    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted({*self.computed, *self.other_names, *self.accepted, *self.refused})


def known_fields(key: str) -> KnownFields:
    """Return the fields of an object in OBJECTS."""
    schema = OBJECTS[key]
    return KnownFields(
        computed=frozenset(schema.model_fields),
        other_names=MappingProxyType(
            {other: own for keys, names in _OTHER_NAMES if key in keys.split() for other, own in names.items()}
        ),
        accepted=frozenset(name for keys, names in _ACCEPTED if key in keys.split() for name in names.split()),
        refused=MappingProxyType(
            {name: off for keys, names, off in _REFUSED if key in keys.split() for name in names.split()}
        ),
        nested=MappingProxyType(
            dict(_nested_in(schema)) | {name: _plain(fields) for name, fields in NESTED_FIELDS.get(key, {}).items()}
        ),
    )


def plain_objects(key: str) -> dict[str, KnownFields]:
    """Return the fields of objects without a schema inside an object of OBJECTS, by path."""
    found: dict[str, KnownFields] = {}
    for name in NESTED_FIELDS.get(key, {}):
        found[name] = outer = known_fields(key).nested[name]
        found |= {f"{name}.{inner}": fields for inner, fields in outer.nested.items()}
    return found


def _plain(fields: NestedFields) -> KnownFields:
    return KnownFields(
        computed=frozenset(fields.computed.split()),
        other_names={},
        accepted=frozenset(fields.accepted.split()),
        refused=fields.refused,
        nested={name: _plain(inner) for name, inner in fields.within.items()},
        kinds=fields.kinds,
    )


def _nested_in(schema: type[BaseModel]) -> Iterator[tuple[str, KnownFields]]:
    key_of = {declared: key for key, declared in OBJECTS.items()}
    for name, field in schema.model_fields.items():
        for declared in _types_in(field.annotation):
            if declared in key_of:
                yield name, known_fields(key_of[declared])


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)


FIELDS: Mapping[type[BaseModel], KnownFields] = MappingProxyType(
    {schema: known_fields(key) for key, schema in OBJECTS.items()}
)
"""Fields of every declared request object, by schema."""
