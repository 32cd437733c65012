"""What an answer has to keep to: a constraint, and the fields of all dialects that one comes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from rayserve_moe.requests.fields import ANY_OBJECT, LONG_TEXT, OBJECT_OR_TEXT, PATTERN, TEXTS, stated


@dataclass(frozen=True, kw_only=True)
class ConstraintFields:
    """What an answer has to keep to, under the names of every dialect: one of them, read by `request_constraints`."""

    response_format: Any = stated(None, ANY_OBJECT, sglang=None, vllm=None)
    """OpenAI's: `text`, `json_object`, `json_schema` or `structural_tag`."""
    structured_outputs: Any = stated(None, ANY_OBJECT, sglang=None)
    """vLLM's: `json`, `regex`, `choice`, `grammar`, `json_object` or `structural_tag`, and options."""
    guided_decoding: Any = stated(None, ANY_OBJECT, sglang=None)
    """An earlier name of `structured_outputs`."""
    guided_json: Any = stated(None, OBJECT_OR_TEXT, sglang=None, vllm=None)
    """A JSON schema."""
    guided_regex: Any = stated(None, LONG_TEXT, sglang=None, vllm=None)
    """A regular expression that the whole answer matches."""
    guided_choice: Any = stated(None, TEXTS, sglang="choice", vllm=None)
    """Texts, of which the answer is one."""
    guided_grammar: Any = stated(None, LONG_TEXT, sglang=None, vllm=None)
    """A grammar in GBNF or Lark."""
    guided_whitespace_pattern: Any = stated(None, PATTERN, sglang=None, vllm=None)
    """Expression for what may stand between the parts of JSON."""
    json_schema: Any = stated(None, OBJECT_OR_TEXT, vllm=None)
    """A JSON schema."""
    regex: Any = stated(None, LONG_TEXT, vllm=None)
    """A regular expression that the whole answer matches."""
    ebnf: Any = stated(None, LONG_TEXT, vllm=None)
    """A grammar in GBNF or Lark."""
    structural_tag: Any = stated(None, OBJECT_OR_TEXT, openai=None, vllm=None)
    """A `format`, or `structures` with `begin`, `schema` and `end`, which `triggers` in free text begin."""


class Constraint(NamedTuple):
    """What a whole answer has to keep to: JSON of a `json_schema`, a `regex`, JSON of a list of texts as `choice`, a
    `grammar`, JSON of a `structural_tag`, or `calls`: JSON of a grammar and schemas for its rules `args_0` and so on.

    `param` is the field that it came in. `whitespace` is an expression for what may stand between the parts of JSON,
    empty for nothing, None for the usual. It holds from the text `after` on, such as the end of reasoning, and within
    the grammar `within`, in Lark, where that has `@content`.
    """

    kind: str
    text: str
    param: str = "response_format"
    whitespace: str | None = None
    after: str = ""
    within: str = ""
