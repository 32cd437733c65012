"""litellm, in an environment of its own: chats, streams and objects. The argument is a server's address."""

import json
import sys

import litellm

ASKED = {"model": "hosted_vllm/m", "api_base": f"{sys.argv[1]}/v1", "api_key": "EMPTY", "max_tokens": 200, "seed": 1}
MESSAGES = [{"role": "user", "content": "Where?"}]
POINT = {
    "type": "object",
    "properties": {"axis": {"enum": ["x", "y"]}, "value": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["axis", "value"],
    "additionalProperties": False,
}


def main() -> None:
    """Raise where an answer is not what was asked for."""
    for provider in ("hosted_vllm", "openai"):
        asked = ASKED | {"model": f"{provider}/m"}
        whole = litellm.completion(messages=MESSAGES, **asked | {"max_tokens": 8})
        assert 0 < whole.usage.completion_tokens <= 8
        chunks = list(litellm.completion(messages=MESSAGES, stream=True, **asked | {"max_tokens": 8}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == (whole.choices[0].message.content or "")
        schema = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
        answer = litellm.completion(messages=MESSAGES, response_format=schema, **asked)
        assert json.loads(answer.choices[0].message.content)["axis"] in ("x", "y")
        scored = litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=2, **asked | {"max_tokens": 4})
        assert len(scored.choices[0].logprobs.content[0].top_logprobs) == 2
    text = litellm.text_completion(prompt="Where?", **ASKED | {"max_tokens": 8})
    assert text.usage.completion_tokens <= 8


if __name__ == "__main__":
    main()
