"""A field of a request is declared once: every edge has it, under its dialect's name, with the same bounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from pydantic import ValidationError

from rayserve_moe import SamplingParams as VllmSampling
from rayserve_moe.engine.admission import check_request
from rayserve_moe.requests.builder import build_request, read_given
from rayserve_moe.requests.fields import OPENAI, SGLANG, VLLM, RequestField, declared, number, stated
from rayserve_moe.requests.records import GenerationRequest, RequestError, SamplingParams, SharedSampling
from rayserve_moe.rollouts.prompts import BadRow, check_sampling
from rayserve_moe.serving.api.schemas.field_types import RequestBody, record_fields
from rayserve_moe.serving.api.schemas.native import GenerateBody, NativeSampling
from rayserve_moe.serving.api.schemas.openai import ChatBody, CompletionBody
from rayserve_moe.serving.api.schemas.tokens import TokenBody, TokenSampling
from tests.support.devices.counting_executor import CARD

SCHEMAS = {
    SGLANG: {SamplingParams: [NativeSampling], GenerationRequest: [GenerateBody]},
    OPENAI: {SamplingParams: [CompletionBody, ChatBody], GenerationRequest: [ChatBody]},
    VLLM: {SamplingParams: [TokenSampling], GenerationRequest: [TokenBody, TokenSampling]},
}
FIELDS = [
    pytest.param(record, field, dialect, id=f"{field.name}-{dialect}")
    for record in (SamplingParams, GenerationRequest)
    for field in declared(record)
    for dialect in field.names
]
WRONG = {"x": [["no value of any field"]]}
PROMPT = np.array([5, 6], np.int32)


@pytest.mark.parametrize(("record", "field", "dialect"), FIELDS)
def test_every_schema_of_a_dialect_has_the_field(record: type, field: RequestField, dialect: str) -> None:
    name = field.names[dialect]
    holders = [schema for schema in SCHEMAS[dialect][record] if name in schema.model_fields]
    assert len(holders) == (1 if dialect == VLLM else len(SCHEMAS[dialect][record]))
    for schema in holders:
        with pytest.raises(ValidationError) as refused:
            schema.model_validate({name: WRONG})
        assert (name,) in [fault["loc"] for fault in refused.value.errors()]


@pytest.mark.parametrize(("record", "field", "dialect"), FIELDS)
def test_keywords_and_rows_are_held_to_the_same_values(record: type, field: RequestField, dialect: str) -> None:
    name = field.names[dialect]
    options = () if record is SamplingParams else (name,)
    with pytest.raises(RequestError, match=name) as refused:
        read_given({name: WRONG}, options=options)
    assert refused.value.param == name
    if record is SamplingParams and dialect == SGLANG and field.name not in ("n", "first_choice"):
        with pytest.raises(BadRow, match=name):
            check_sampling({name: WRONG})


def test_llm_has_every_sampling_parameter_of_vllm() -> None:
    names = {field.names[VLLM] for field in declared(SamplingParams) if VLLM in field.names}
    assert names <= {field.name for field in dataclasses.fields(VllmSampling)}


def test_what_is_built_from_nothing_is_admitted() -> None:
    for dialect in SCHEMAS:
        check_request(build_request(PROMPT, {}, dialect=dialect, card=CARD), CARD, max_tokens=200)


@pytest.mark.parametrize(
    ("params", "num_top"),
    [
        ({}, 0),
        ({"logprobs": 0}, 0),
        ({"logprobs": 1}, 0),
        ({"logprobs": 2}, 2),
        ({"logprobs": 1, "prompt_logprobs": 1}, 1),
    ],
)
def test_likeliest_tokens_are_computed_only_for_an_answer_that_has_them(params: dict[str, int], num_top: int) -> None:
    body = TokenBody.model_validate({"token_ids": [5, 6], "sampling_params": params})
    request = build_request(PROMPT, body.given(), dialect=VLLM, card=CARD)
    assert request.num_top_logprobs == num_top


def test_a_field_that_is_added_to_the_record_is_read_described_and_bounded() -> None:
    """The first step of docs/add_a_request_flag.md."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithFlag(SharedSampling):
        top_a: float = stated(0.0, number(0, 1))

    @record_fields(SGLANG, WithFlag)
    class Body(RequestBody):
        """A body."""

    assert dict(Body.model_validate({"top_a": 1}))["top_a"] == 1.0
    assert Body.model_json_schema()["properties"]["top_a"]["maximum"] == 1
    with pytest.raises(ValidationError, match=r"top_a[^\w]+.*should be a finite number in \[0, 1\]"):
        Body.model_validate({"top_a": 2})
    with pytest.raises(RequestError, match="top_a"):
        read_given({"top_a": 0.5})
