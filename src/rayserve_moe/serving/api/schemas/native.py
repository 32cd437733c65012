"""Body of `/generate`, the native route in SGLang's dialect."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from rayserve_moe.requests.constraints import ConstraintFields
from rayserve_moe.requests.fields import (
    FLAG,
    HIDDEN_STATES,
    INT32_MAX,
    LISTED_IDS,
    MAX_TOP_LOGPROBS,
    SGLANG,
    Values,
    text,
    whole,
)
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.serving.api.schemas.field_types import (
    MAX_RID,
    RequestBody,
    RoutingFields,
    RoutingFormat,
    fault,
    record_fields,
)
from rayserve_moe.serving.api.schemas.prompt_types import MAX_PROMPTS, IdsBatch, PromptBatch, TextBatch


def _check_rids(value: object) -> str | list[str]:
    rids = value if isinstance(value, list) else [value]
    if not all(isinstance(rid, str) and 0 < len(rid) <= MAX_RID for rid in rids) or len(rids) > MAX_PROMPTS:
        raise fault(f"should be a string of 1 to {MAX_RID} characters or a list of such")
    if len(set(rids)) != len(rids):
        raise fault("should not hold the same id twice")
    return value if isinstance(value, list) else str(value)


def _as_list(value: object) -> list:
    if not isinstance(value, dict | list):
        raise fault("should be an object or a list of objects")
    return value if isinstance(value, list) else [value]


class Each(list):
    """Values of a batch, one per prompt."""


def _reader(values: Values, *, takes_lists: bool = False) -> PlainValidator:
    """Return a validator of a value for all prompts or a list per prompt; list values cannot be nested."""

    def read(value: object) -> Any:
        if not isinstance(value, list) or (takes_lists and not any(isinstance(each, list) for each in value)):
            return values.read(value)
        if len(value) > MAX_PROMPTS:
            raise fault(f"should hold at most {MAX_PROMPTS} entries")
        return Each(values.read([] if takes_lists and each is None else each) for each in value)

    return PlainValidator(read)


def _schema(values: Values) -> WithJsonSchema:
    several = {"type": "array", "items": values.schema, "maxItems": MAX_PROMPTS}
    return WithJsonSchema({"anyOf": [dict(values.schema), several]})


_START, _COUNT, _SALT = whole(-1, INT32_MAX), whole(0, MAX_TOP_LOGPROBS), text(256)
Flags = Annotated[Any, _reader(FLAG), _schema(FLAG)]
Starts = Annotated[Any, _reader(_START), _schema(_START)]
Counts = Annotated[Any, _reader(_COUNT), _schema(_COUNT)]
Listed = Annotated[Any, _reader(LISTED_IDS, takes_lists=True), _schema(LISTED_IDS)]
States = Annotated[Any, _reader(HIDDEN_STATES), _schema(HIDDEN_STATES)]
Salts = Annotated[Any, _reader(_SALT), _schema(_SALT)]


def _adapter_names(value: object) -> str | list[str | None]:
    several = isinstance(value, list)
    each = value if isinstance(value, list) else [value]
    if len(each) > MAX_PROMPTS or not all((name is None and several) or _is_name(name) for name in each):
        raise fault(f"should be a name of up to {MAX_NAME} characters, or a list of such and of nulls")
    return each if several else str(value)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= MAX_NAME


MAX_NAME = 256
_NAME_SCHEMA = {"type": "string", "maxLength": MAX_NAME}
_NAMES_SCHEMA = {"type": "array", "items": {"anyOf": [_NAME_SCHEMA, {"type": "null"}]}, "maxItems": MAX_PROMPTS}
AdapterNames = Annotated[Any, PlainValidator(_adapter_names), WithJsonSchema({"anyOf": [_NAME_SCHEMA, _NAMES_SCHEMA]})]

_RID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_RID}
_RIDS_SCHEMA = {"type": "array", "items": _RID_SCHEMA, "maxItems": MAX_PROMPTS, "uniqueItems": True}

Rids = Annotated[
    str | list[str] | None, PlainValidator(_check_rids), WithJsonSchema({"anyOf": [_RID_SCHEMA, _RIDS_SCHEMA]})
]


@record_fields(SGLANG, SamplingParams)
@record_fields(SGLANG, ConstraintFields)
class NativeSampling(RequestBody):
    """A `sampling_params` object. `first_choice` c selects choices c to c + n - 1 of a seed's sequence of choices.

    Stop strings end a choice even before `min_new_tokens`; with `no_stop_trim` they stay in the text.
    """

    max_thinking_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None


OneOrMoreSamplings = Annotated[
    list[NativeSampling],
    BeforeValidator(_as_list, json_schema_input_type=NativeSampling | list[NativeSampling]),
]


@record_fields(SGLANG, GenerationRequest)
class GenerateBody(RoutingFields):
    """Prompt or batch, as text or token ids; `sampling_params` holds an object, or a list with an object per prompt.

    Options of log-probs and hidden states, and the salt, may be lists with a value per prompt. With `return_logprob`
    true, `logprob_start_len` p requests log-probs of the prompt from position p; -1 requests the output only.
    """

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["text"]}, {"required": ["input_ids"]}]})

    text: TextBatch | None = None
    input_ids: IdsBatch | None = None
    sampling_params: OneOrMoreSamplings = Field(default_factory=lambda: [NativeSampling()])
    return_logprob: Flags = False
    logprob_start_len: Starts = -1
    top_logprobs_num: Counts = 0
    token_ids_logprob: Listed = ()
    cache_salt: Salts = ""
    return_hidden_states: States = ""
    return_sampling_mask: Flags = False
    return_text_in_logprobs: bool = False
    routed_experts_format: RoutingFormat = "sglang"
    rid: Rids = None
    lora_path: AdapterNames | None = None
    return_prompt_token_ids: bool = False

    @model_validator(mode="after")
    def _lengths_agree(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise fault("give exactly one of `text` and `input_ids`")
        num_prompts = len(self.batch.prompts)
        if len(self.sampling_params) not in (1, num_prompts):
            raise fault("`sampling_params` should hold one object per prompt")
        for name in ("rid", "lora_path"):
            if isinstance(value := getattr(self, name), list) and len(value) != num_prompts:
                raise fault(f"`{name}` should hold one value per prompt")
        for name, value in self:
            if isinstance(value, Each) and len(value) != num_prompts:
                raise fault(f"`{name}` should hold one value per prompt")
        return self

    @property
    def batch(self) -> PromptBatch:
        """Return the prompts, text or ids."""
        given = self.text or self.input_ids
        assert given is not None, "checked when the body was read"
        return given

    def of_prompt(self, place: int) -> dict[str, Any]:
        """Return the values of all fields for a prompt."""
        return {name: value[place] if isinstance(value, Each) else value for name, value in self}

    @property
    def prompt_name(self) -> str:
        """Return the name of the field that holds the prompts."""
        return "input_ids" if self.text is None else "text"
