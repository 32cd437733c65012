"""The sentence of a refused field begins with its name, in this server's words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from rayserve_moe.serving.api.schemas.control import UpdateWeightsBody
from rayserve_moe.serving.api.schemas.openai import ChatBody
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import validate


@pytest.mark.parametrize(
    ("schema", "fields", "sentence"),
    [
        (ChatBody, {"messages": []}, "`messages` should have at least 1 item, not 0"),
        (ChatBody, {}, "`messages` is required"),
        (UpdateWeightsBody, {"model_path": "step-1"}, "`model_path` should be an absolute path or a URL"),
        (UpdateWeightsBody, {"model_path": "/a\0b"}, "`model_path` should be an absolute path or a URL"),
        (UpdateWeightsBody, {"model_path": "/" * 9999}, "`model_path` should have at most 4096 characters"),
    ],
)
def test_the_sentence_of_a_fault(schema: type[BaseModel], fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApiError) as refused:
        validate(schema, fields)
    assert refused.value.message == sentence
