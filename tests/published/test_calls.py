"""Required tool calls over published tokenizers: every token a mask allows is consumed, and answers parse as calls."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llguidance import LLMatcher

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraint_fields import Constraint
from rayserve_moe.constraints.grammar_text import grammar_of
from rayserve_moe.constraints.matchers import built_matcher
from rayserve_moe.engine.guides import vocabulary_of
from rayserve_moe.text.chat_output import parameters_of
from rayserve_moe.text.tokenizer import Tokenizer
from rayserve_moe.text.tool_calls.call_grammar import FORMS, call_grammar
from rayserve_moe.text.tool_calls.harmony import split_harmony
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS, HARMONY
from rayserve_moe.text.tool_calls.splitter import OutputSplitter, split_text
from rayserve_moe.text.tool_calls.tape import ToolCall

pytestmark = pytest.mark.published
MOST_TOKENS = 150
FUNCTIONS = [
    {"name": "now", "parameters": None},
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Wien", "東京", "Zürich"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
]
NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
TOOLS = parameters_of([{"type": "function", "function": function} for function in FUNCTIONS])


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_followed_and_read_back(published: Tokenizer, form: str, count: int) -> None:
    """Draw random tokens with a preference for added tokens, which include markers."""
    special_ids = {published.token_text(token_id): token_id for token_id in published.special_ids}
    vocabulary = vocabulary_of(published, published.vocab_size, eos_ids=published.eos_token_ids)
    lark, schemas = call_grammar(FORMS[form], FUNCTIONS, special_ids=special_ids, allows_several=False)
    schemas = [NO_ARGUMENTS if schema == {"type": "object"} else schema for schema in schemas]
    text = json.dumps({"lark": lark, "schemas": schemas})
    constraint = Constraint("calls", text, whitespace="")
    matcher = built_matcher(vocabulary.tokens(), grammar_of(constraint, limits=StructuredSettings()))
    assert not matcher.is_error(), matcher.get_error()
    generator = np.random.default_rng(0)
    added = np.array(sorted(published.backing.added_tokens_decoder.keys() - set(published.eos_token_ids)))
    drawn = [draw(matcher.deep_copy(), published, added=added, generator=generator) for _ in range(count)]
    whole = [ids for ids in drawn if ids is not None]
    for ids in whole:
        check(form, published.decode(ids, skip_special_tokens=False))
    # Random reasoning rarely ends if its end marker is no single token.
    assert whole or form == HARMONY


def draw(
    matcher: LLMatcher, tokenizer: Tokenizer, *, added: np.ndarray, generator: np.random.Generator
) -> list[int] | None:
    """Return the ids of a random answer, or None beyond `MOST_TOKENS`."""
    ids: list[int] = []
    for _ in range(MOST_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert not matcher.is_error(), (matcher.get_error(), ids)
        allowed = np.flatnonzero(bits)
        assert len(allowed), "something may follow"
        if bits[list(tokenizer.eos_token_ids)].any():
            return ids
        lures = added[bits[added] > 0]
        ids.append(int(generator.choice(lures if len(lures) and generator.random() < 0.5 else allowed)))
        assert matcher.consume_token(ids[-1]), (ids, tokenizer.token_text(ids[-1]))
    return None


def check(form: str, answer: str) -> None:
    """Check that an answer is one call, possibly after reasoning."""
    name = form.split()[0]
    split = (
        split_harmony(has_calls=True, has_reasoning=True) if name == HARMONY else split_text(None, CALL_FORMATS[name])
    )
    splitter = OutputSplitter(split, tools=TOOLS, max_calls=None)
    parts = [*splitter.push(answer), *splitter.finish()]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    others = "".join(part.text for part in parts if not isinstance(part, ToolCall) and part.kind == "content")
    assert len(calls) == 1 and not others.strip(), (answer, parts)
    given = json.loads(calls[0].arguments)
    assert calls[0].name in ("now", "get_weather")
    assert calls[0].name == "now" or given["city"] in ("Wien", "東京", "Zürich"), answer
