"""Assistant turns of every family's chat template: how its model writes reasoning, content and calls.

Each is what the published template has for that turn, with tools and other turns left out: what is rendered after the
generation prompt is what a model is trained to answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

_THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}"

_HERMES = """{{ m.content or '' }}{% for c in m.tool_calls %}
{%- if (loop.first and m.content) or not loop.first %}{{ '\n' }}{% endif %}{% set c = c.function %}
{{- '<tool_call>\n{"name": "' ~ c.name ~ '", "arguments": ' }}
{%- if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}{{ '}\n</tool_call>' }}
{%- endfor %}"""

_QWEN_CODER = """{{ m.content or '' }}{% for c in m.tool_calls %}{% set c = c.function %}
{{- '\n<tool_call>\n<function=' ~ c.name ~ '>\n' }}{% for k, v in c.arguments | items %}
{{- '<parameter=' ~ k ~ '>\n' }}
{%- if v is mapping or (v is sequence and v is not string) %}{{ v | tojson }}{% else %}{{ v | string }}{% endif %}
{{- '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"""

_GLM = """{{ m.content or '' }}{% for c in m.tool_calls %}{% set c = c.function %}
{{- '\n<tool_call>' ~ c.name ~ '\n' }}{% for k, v in c.arguments | items %}
{{- '<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}"""

_GLM47 = """{{ m.content or '' }}{% for c in m.tool_calls %}{% set c = c.function %}
{{- '<tool_call>' ~ c.name }}{% for k, v in c.arguments | items %}
{{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}"""

_MINIMAX = """{{ m.content or '' }}{% if m.tool_calls %}{{ '\n<minimax:tool_call>' }}{% for c in m.tool_calls %}
{%- set c = c.function %}{{ '\n<invoke name="' ~ c.name ~ '">' }}{% for k, v in c.arguments | items %}
{{- '\n<parameter name="' ~ k ~ '">' }}{{ v if v is string else v | tojson }}{{ '</parameter>' }}
{%- endfor %}{{ '\n</invoke>' }}{% endfor %}{{ '\n</minimax:tool_call>' }}{% endif %}"""

_MISTRAL = """{{ m.content or '' }}{% if m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}]{% endif %}"""

_MISTRAL11 = """{{ m.content or '' }}{% for c in m.tool_calls %}
{{- '[TOOL_CALLS]' ~ c.function.name ~ '[ARGS]' }}{{ c.function.arguments | tojson }}{% endfor %}"""

_BAR, _SPACE = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"


def _deepseek(fill: str) -> str:
    """Put the tokens of DeepSeek in the place of short ones."""
    short = {"B": "calls begin", "b": "call begin", "s": "sep", "e": "call end", "E": "calls end"}
    for letter, words in short.items():
        fill = fill.replace(f"[{letter}]", f"<{_BAR}tool{_SPACE}{words.replace(' ', _SPACE)}{_BAR}>")
    return fill


_DEEPSEEK3 = _deepseek("""{{ m.content or '' }}{% for c in m.tool_calls %}
{%- if loop.first %}{{ '[B]' }}{% else %}{{ '\n' }}
{%- endif %}{{ '[b]function[s]' ~ c.function.name ~ '\n```json\n' }}{{ c.function.arguments | tojson }}{{ '\n```[e]' }}
{%- if loop.last %}{{ '[E]' }}{% endif %}{% endfor %}""")

_DEEPSEEK31 = _deepseek("""{{ m.content or '' }}{% for c in m.tool_calls %}{% if loop.first %}{{ '[B]' }}{% endif %}
{{- '[b]' ~ c.function.name ~ '[s]' }}{{ c.function.arguments | tojson }}{{ '[e]' }}
{%- if loop.last %}{{ '[E]' }}{% endif %}{% endfor %}""")

_KIMI = """{{ m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}
{{- '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' }}
{%- set a = c.function.arguments %}{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}
{{- '<|tool_call_end|>' }}{% endfor %}<|tool_calls_section_end|>{% endif %}"""

_LLAMA = """{% if not m.tool_calls %}{{ m.content }}{% endif %}{# ipython #}{% for c in m.tool_calls %}
{%- if not loop.first %}{{ '; ' }}{% endif %}{{ '{"name": "' ~ c.function.name ~ '", ' }}
{{- '"parameters": ' }}{{ c.function.arguments | tojson }}{{ '}' }}{% endfor %}"""

_HARMONY = """{% set n = namespace(first=true) %}
{%- macro start() %}{% if not n.first %}{{ '<|start|>assistant' }}{% endif %}{% set n.first = false %}{% endmacro %}
{%- if m.reasoning_content %}{{ start() ~ '<|channel|>analysis<|message|>' ~ m.reasoning_content ~ '<|end|>' }}
{%- endif %}{% if m.tool_calls and m.content %}
{{- start() ~ '<|channel|>commentary<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}
{%- for c in m.tool_calls %}{{ start() ~ '<|channel|>commentary to=functions.' ~ c.function.name }}
{{- ' <|constrain|>json<|message|>' ~ (c.function.arguments | tojson) ~ '<|call|>' }}{% endfor %}
{%- if not m.tool_calls %}{{ start() ~ '<|channel|>final<|message|>' ~ m.content ~ '<|return|>' }}{% endif %}"""

_GEMMA = """{% macro written(v) %}{% if v is string %}{{ '<|"|>' ~ v ~ '<|"|>' }}{% elif v is boolean %}
{{- 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}{% for k, i in v | dictsort %}
{{- k ~ ':' ~ written(i) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is sequence %}{{ '[' }}
{%- for i in v %}{{ written(i) }}{% if not loop.last %},{% endif %}{% endfor %}{{ ']' }}{% else %}{{ v }}{% endif %}
{%- endmacro %}{% if m.reasoning_content %}{{ '<|channel>thought\n' ~ m.reasoning_content ~ '\n<channel|>' }}{% endif %}
{%- for c in m.tool_calls %}{{ '<|tool_call>call:' ~ c.function.name }}{% set a = c.function.arguments %}
{{- written(a) if a is mapping else '{' ~ a ~ '}' }}{{ '<tool_call|>' }}{% endfor %}{{ m.content or '' }}"""

_MIMO = """{{ m.content or '' }}{% for c in m.tool_calls %}{% set c = c.function %}
{{- '<tool_call><function=' ~ c.name ~ '>' }}{% for k, v in c.arguments | items %}
{{- '<parameter=' ~ k ~ '>' }}{{ v if v is string else v | tojson }}{{ '</parameter>' }}
{%- endfor %}{{ '</function></tool_call>' }}{% endfor %}"""

_HY3 = """{% if m.reasoning_content %}
{{- '<think:opensource>' ~ m.reasoning_content ~ '</think:opensource>' }}{% endif %}
{{- m.content or '' }}{% if m.tool_calls %}{{ '<tool_calls:opensource>\n' }}{% for c in m.tool_calls %}
{{- '<tool_call:opensource>' ~ c.function.name ~ '<tool_sep:opensource>\n' }}
{%- for k, v in c.function.arguments | items %}{{ '<arg_key:opensource>' ~ k ~ '</arg_key:opensource>\n' }}
{{- '<arg_value:opensource>' ~ (v if v is string else v | tojson) ~ '</arg_value:opensource>\n' }}{% endfor %}
{{- '</tool_call:opensource>\n' }}{% endfor %}{{ '</tool_calls:opensource>' }}{% endif %}"""

_MINIMAX3 = """{% set n = ']<]minimax[>[' %}{% macro xml(v) %}{% if v is mapping %}{% for k, i in v.items() %}
{{- n ~ '<' ~ k ~ '>' ~ xml(i) ~ n ~ '</' ~ k ~ '>' }}{% endfor %}{% elif v is iterable and v is not string %}
{%- for i in v %}{{ n ~ '<item>' ~ xml(i) ~ n ~ '</item>' }}{% endfor %}
{%- elif v is boolean %}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro %}
{%- if m.reasoning_content %}{{ '<mm:think>' ~ m.reasoning_content ~ '</mm:think>' }}{% else %}{{ '</mm:think>' }}
{%- endif %}{{ m.content or '' }}{% if m.tool_calls %}{{ n ~ '<tool_call>\n' }}{% for c in m.tool_calls %}
{{- n ~ '<invoke name="' ~ c.function.name ~ '">' }}{% for k, v in c.function.arguments.items() %}
{{- n ~ '<' ~ k ~ '>' ~ xml(v) ~ n ~ '</' ~ k ~ '>' }}{% endfor %}{{ n ~ '</invoke>\n' }}
{%- endfor %}{{ n ~ '</tool_call>' }}{% endif %}"""

_ENDS_OF_VALUES = re.compile(
    r"</(parameter|arg_value(:opensource)?)>\s*<(/?(function|parameter|invoke|tool_call)|arg_key)"
)
_PLAIN_KEY = re.compile(r"\w+")


class Family(NamedTuple):
    """A family's turn, and what its form cannot hold."""

    template: str
    format: str
    reasons: bool = True
    takes_content_with_calls: bool = True
    parser: str = "auto"
    """Name of the setting that selects the format."""
    barrier: str = ""
    """Marker that no value can contain; names within such values are plain words."""
    has_typed_values: bool = True
    """False if values within objects and arrays are text without their schema."""

    def holds(self, value: object) -> bool:
        """Return True if the format can hold a value: its text does not contain an end and what follows an end."""
        if self.barrier:
            return all(
                _PLAIN_KEY.fullmatch(text) if is_key else self.barrier not in text for text, is_key in _texts(value)
            )
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return _ENDS_OF_VALUES.search(text) is None

    @property
    def chat_template(self) -> str:
        """A whole template: every turn ends at the end of the sequence, and the prompt with the assistant's name."""
        turn = f"{{% for m in messages %}}{{{{ m.role ~ ': ' }}}}{{% if m.role == 'assistant' %}}{self.template}"
        rest = "{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
        return turn + rest + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}{# tools #}"


def _texts(value: object) -> Iterator[tuple[str, bool]]:
    """Yield the strings of a value, and True for those that are keys."""
    if isinstance(value, str):
        yield value, False
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key, True
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


FAMILIES = {
    "qwen3": Family(_THINK + _HERMES, "hermes"),
    "qwen3_coder": Family(_THINK + _QWEN_CODER, "qwen_coder"),
    "mistral": Family(_MISTRAL, "mistral", reasons=False),
    "mistral_v11": Family(_MISTRAL11, "mistral", reasons=False),
    "deepseek_v3": Family(_DEEPSEEK3, "deepseek", reasons=False),
    "deepseek_v31": Family(_THINK + _DEEPSEEK31, "deepseek"),
    "glm45": Family(_THINK + _GLM, "glm"),
    "glm47": Family(_THINK + _GLM47, "glm"),
    "ling3": Family(_THINK + _GLM47, "glm"),
    "kimi_k2": Family(_THINK + _KIMI, "kimi"),
    "llama3": Family(_LLAMA, "llama", reasons=False, takes_content_with_calls=False),
    "gpt_oss": Family(_HARMONY, "harmony"),
    "minimax_m2": Family(_THINK + _MINIMAX, "minimax"),
    "minimax_m3": Family(_MINIMAX3, "minimax_m3", barrier="]<]minimax[>[", has_typed_values=False),
    "gemma4": Family(_GEMMA, "gemma", barrier='<|"|>'),
    "mimo": Family(_THINK + _MIMO, "mimo", parser="mimo"),
    "hy_v3": Family(_HY3, "hunyuan"),
}
