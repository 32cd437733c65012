"""instructor, in an environment of its own: objects by calls and by schemas.

The arguments are the addresses of two servers, of which the second one's model has tools.
"""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

MESSAGES = [{"role": "user", "content": "Where?"}]
BY_SCHEMA = [instructor.Mode.JSON_SCHEMA]
BY_CALLS = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


class Point(BaseModel):
    """Small enough for a random model to write within its limit."""

    model_config = ConfigDict(extra="forbid")
    axis: Literal["x", "y"]
    value: int = Field(ge=0, le=99)


def main() -> None:
    """Raise where an answer is not what was asked for."""
    for address, model, modes in (sys.argv[1], "m", BY_SCHEMA), (sys.argv[2], "scripted", BY_CALLS):
        for mode in modes:
            plain = openai.OpenAI(base_url=f"{address}/v1", api_key="EMPTY", max_retries=0)
            client = instructor.from_openai(plain, mode=mode)
            asked = {"model": model, "messages": MESSAGES, "max_tokens": 200, "seed": 1, "max_retries": 0}
            point = client.chat.completions.create(response_model=Point, **asked)
            assert isinstance(point, Point), mode
            *_, last = client.chat.completions.create_partial(response_model=Point, **asked)
            assert isinstance(Point.model_validate(last.model_dump()), Point), mode


if __name__ == "__main__":
    main()
