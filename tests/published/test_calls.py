"""Required tool calls over published tokenizers: every token a mask allows is consumed, and answers parse as calls."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import grammar_of
from rayserve_moe.constraints.matchers import built_matcher
from rayserve_moe.engine.guides import vocabulary_of
from rayserve_moe.requests.records import Constraint
from rayserve_moe.text.chat_output import parameters_of
from rayserve_moe.text.tokenizer import Tokenizer
from rayserve_moe.text.tool_calls.call_grammar import FORMS, call_grammar
from rayserve_moe.text.tool_calls.harmony import split_harmony
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS, HARMONY
from rayserve_moe.text.tool_calls.splitter import OutputSplitter, split_text
from rayserve_moe.text.tool_calls.tape import ToolCall

pytestmark = pytest.mark.published
MAX_TOKENS = 150
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


@cache
def table_of(tokenizer: Tokenizer) -> LLTokenizer:
    """Return the grammar engine's table of a tokenizer, built once."""
    return vocabulary_of(tokenizer, tokenizer.vocab_size, eos_ids=tokenizer.eos_token_ids).tokens()


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_followed_and_read_back(published: Tokenizer, form: str, count: int) -> None:
    """Draw random tokens with a preference for added tokens, which include markers."""
    special_ids = {published.token_text(token_id): token_id for token_id in published.special_ids}
    lark, schemas = call_grammar(FORMS[form], FUNCTIONS, special_ids=special_ids, allows_several=False)
    schemas = [NO_ARGUMENTS if schema == {"type": "object"} else schema for schema in schemas]
    text = json.dumps({"lark": lark, "schemas": schemas})
    constraint = Constraint("calls", text, whitespace="")
    matcher = built_matcher(table_of(published), grammar_of(constraint, limits=StructuredSettings()))
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
    """Return the ids of a random answer, or None beyond `MAX_TOKENS`."""
    ids: list[int] = []
    ends = np.array(tokenizer.eos_token_ids)
    for _ in range(MAX_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), (matcher.get_error(), ids)
        if is_allowed(mask, ends).any():
            return ids
        lures = added[is_allowed(mask, added)]
        if len(lures) and generator.random() < 0.5:
            ids.append(int(generator.choice(lures)))
        else:
            ids.append(drawn_from(mask, generator))
        assert matcher.consume_token(ids[-1]), (ids, tokenizer.token_text(ids[-1]))
    return None


def is_allowed(mask: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Return True for each id that a bitmask has, as bool [ids]."""
    return (mask[token_ids >> 3] >> (token_ids & 7) & 1).astype(bool)


def drawn_from(mask: np.ndarray, generator: np.random.Generator) -> int:
    """Draw an id that a bitmask has: the first of some random ids that it has, or any."""
    tried = generator.integers(0, 8 * len(mask), 64)
    hits = tried[is_allowed(mask, tried)]
    if len(hits):
        return int(hits[0])
    filled = np.flatnonzero(mask)
    assert len(filled), "something may follow"
    rows, bits = np.nonzero(np.unpackbits(mask[filled, None], axis=1, bitorder="little"))
    chosen = generator.integers(len(rows))
    return int(8 * filled[rows[chosen]] + bits[chosen])


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
