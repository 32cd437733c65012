"""outlines: answers of the types that it is asked for, through its client of OpenAI."""

from __future__ import annotations

from typing import Literal

import openai
from pydantic import BaseModel, Field

from tests.clients.conftest import client_package

outlines = client_package("outlines")

SEEDS = range(3)


class Point(BaseModel):
    """Small enough for a random model to write within its limit."""

    axis: Literal["x", "y"]
    value: int = Field(ge=0, le=99)


def test_outlines_gets_what_it_asks_for(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        model = outlines.from_openai(client, "m")
        for seed in SEEDS:
            assert Point.model_validate_json(model("Where?", Point, max_tokens=200, seed=seed)).value <= 99
