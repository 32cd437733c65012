"""Bodies of the routes of Tinker's sampling clients, as tinker 0.16 to 0.38 sends them.

`asample` is strict about unknown fields, because its clients take an ignored one for a fault of the server.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Annotated, Any

from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema

from rayserve_moe.requests.fields import INT32_MAX, MAX_TOP_LOGPROBS, is_token_id
from rayserve_moe.serving.api.schemas.field_types import MAX_CHOICES, MAX_RID, RequestBody, fault
from rayserve_moe.serving.api.schemas.prompt_types import TokenIds

SAVED, MAX_SAVED = "tinker://", 128
"""Prefix and maximum characters of a path of saved weights."""
MAX_STOPS, MAX_STOP_CHARACTERS = 32, 1024
_Id = Annotated[str, Field(min_length=1, max_length=MAX_RID)]
_Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
_SavedPath = Annotated[str, Field(max_length=MAX_SAVED, pattern=rf"^{SAVED}\w[\w.:-]*(/\w[\w.:-]*)+$")]
_NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


def _read_stop(value: object) -> list[str] | list[int]:
    each = [value] if isinstance(value, str) else value
    if isinstance(each, list) and len(each) <= MAX_STOPS:
        if all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in each):
            return each
        if all(map(is_token_id, each)):
            return each
    raise fault(f"should be a text, or a list of up to {MAX_STOPS} texts or of token ids")


_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STOP_SCHEMA = {"anyOf": [{"type": "string"}, *({**each, "maxItems": MAX_STOPS} for each in (_TEXTS, _IDS))]}
Stop = Annotated[Any, PlainValidator(_read_stop), WithJsonSchema(_STOP_SCHEMA)]


class TinkerChunk(RequestBody):
    """Part of a prompt; only `encoded_text` is read, images are not."""

    tokens: TokenIds
    type: str = "encoded_text"


class TinkerPrompt(RequestBody):
    """A prompt of chunks, which are joined."""

    chunks: Annotated[list[TinkerChunk], Field(min_length=1, max_length=4096)]


class TinkerSampling(RequestBody):
    """Sampling parameters. Without `max_tokens` a sample may fill the context; an empty `stop` ignores the model's."""

    max_tokens: _Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TinkerSampleBody(RequestBody):
    """Samples of a prompt. `sampling_session_id` and `seq_id` name the request: a repeated one is answered once."""

    prompt: TinkerPrompt
    sampling_params: TinkerSampling = Field(default_factory=TinkerSampling)
    num_samples: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    sampling_session_id: _Id
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]
    prompt_logprobs: bool = False
    topk_prompt_logprobs: _NumTop = 0
    topk_sample_logprobs: _NumTop = 0
    prompt_logprobs_last_n: _Count | None = None


class TinkerFutureBody(RequestBody):
    """A request whose answer is wanted, or no longer."""

    request_id: Annotated[str, Field(min_length=1, max_length=2 * MAX_RID)]


class TinkerSamplingSessionBody(RequestBody):
    """Choice of the model to sample: the served one by its name, or saved weights by their path."""

    session_id: _Id
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=2**63)] = 0
    base_model: str | None = None
    model_path: _SavedPath | None = None


_SAVED_PATH = TypeAdapter(_SavedPath)


def sampler_name(body: TinkerSamplingSessionBody) -> str:
    """Return the id of a sampler. It names the saved weights, so that no server has to remember them."""
    path = urlsafe_b64encode((body.model_path or "").encode()).decode().rstrip("=")
    return f"{body.session_id}:sample:{body.sampling_session_seq_id}" + (f":{path}" if path else "")


def saved_path_in(sampler: str) -> str | None:
    """Return the path of saved weights in the id of a sampler; None for a sampler of the served model.

    Raises: ValueError if no sampler has this id.
    """
    encoded = sampler.rpartition(":sample:")[2].partition(":")[2]
    if not encoded:
        return None
    return _SAVED_PATH.validate_python(urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode())


class TinkerSessionBody(RequestBody):
    """Session of a client; its fields have no effect."""
