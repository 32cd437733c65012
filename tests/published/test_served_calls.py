"""Demanded tool calls of served models whose tokenizer and chat template are published together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace

import httpx
import jsonschema
import pytest

from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.inprocess.engine import Engine
from tests.http.conftest import served
from tests.support.engine.shared_settings import SERVED
from tests.support.models.core import CORE_CONFIG
from tests.support.serving.http_client import CHAT, ask
from tests.support.text.published_templates import template_of
from tests.support.text.published_tokenizers import folder_of, opened

pytestmark = pytest.mark.published
PAIRS = {
    "qwen3": "qwen3",
    "deepseek_v3": "deepseek_v31",
    "gptoss": "gpt_oss",
    "kimi_k2": "kimi_k2",
    "mistral_nemo": "mistral_nemo",
}
"""Chat template by tokenizer."""
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Wien", "東京", "Zürich"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SETTINGS = SERVED | {"max_model_len": 2048, "num_pages": 1100, "structured_output_timeout_s": 300.0}
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}} for name in "fg"]
NAMED = {"type": "function", "function": {"name": "g"}}
FIELDS = {"messages": [{"role": "user", "content": "Weather in Wien?"}], "tools": TOOLS, "parallel_tool_calls": False}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3")) for name in PAIRS]
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, Engine]]:
    """Serve a random model with a published tokenizer and its template."""
    tokenizer, template = opened(request.param), template_of(PAIRS[request.param])
    if template is None:
        pytest.skip("`make published` fetches the template")
    config = replace(CORE_CONFIG, vocab_size=tokenizer.vocab_size, max_position_embeddings=2048)
    directory = write_checkpoint(tmp_path_factory.mktemp("pair") / "model", config, seed=3, dtype="float32")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (directory / file).unlink(missing_ok=True)
    for file in folder_of(request.param).iterdir():
        shutil.copy(file, directory)
    (directory / "chat_template.jinja").write_text(template)
    with (
        Engine(model_path=str(directory), **SETTINGS) as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        yield client, engine


@pytest.mark.parametrize("count", [2, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("bias", [0, 15], ids=["plain", "lured"])
def test_every_demanded_call_is_one_and_valid(
    pair: tuple[httpx.Client, Engine], count: int, choice: object, bias: int
) -> None:
    """Check calls of a random model, also with a bias towards added tokens, which include markers."""
    client, engine = pair
    backing, ends = engine.tokenizer.backing, set(engine.tokenizer.eos_token_ids)
    lures = (
        {str(token_id): bias for token_id in sorted(backing.added_tokens_decoder.keys() - ends)[:200]} if bias else {}
    )
    body = {"tool_choice": choice, "n": count, "seed": 7, "max_tokens": 400, "logit_bias": lures, **FIELDS}
    choices = ask(client, CHAT, thinking_token_budget=_budget(engine), **body)["choices"]
    for each in choices:
        (call,) = each["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert each["finish_reason"] == ("stop" if choice == NAMED else "tool_calls"), each
        assert call["function"]["name"] == "g" or choice == "required"


def _budget(engine: Engine) -> int | None:
    """Return a budget if an answer may begin with reasoning, which a random model does not end, else None."""
    return 10 if "<|channel|>" in engine.tokenizer.backing.get_vocab() else None
