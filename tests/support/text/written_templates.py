"""Whole chat templates for families whose published ones no package holds: the same roles, fields and forms.

Hunyuan-A13B, Ling 2.0, OLMoE, and Qwen2-MoE as its chats are published (without tools).
"""

from __future__ import annotations

from collections.abc import Mapping

_OLMOE = """{{ bos_token }}{% for m in messages %}{% if m['role'] in ['system', 'user'] %}
{{- '<|' ~ m['role'] ~ '|>\n' }}{{ m['content'] + '\n' }}{% elif m['role'] == 'assistant' %}
{{- '<|assistant|>\n' + m['content'] + eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

_QWEN2_MOE = """{% for m in messages %}{% if loop.first and m['role'] != 'system' %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_LING2 = """{% set n = namespace(thinks='off') %}{% if enable_thinking is defined and enable_thinking %}
{%- set n.thinks = 'on' %}{% endif %}{{ '<role>SYSTEM</role>' }}{% if messages[0].role == 'system' %}
{{- messages[0].content + '\n' }}{% endif %}{% if tools %}{{ '# Tools\n<tools>' }}{% for tool in tools %}
{{- '\n' ~ (tool | tojson) }}{% endfor %}{{ '\n</tools>\n' }}{% endif %}
{{- 'detailed thinking ' + n.thinks + '<|role_end|>' }}{% for m in messages %}
{%- set content = m.content if m.content is string else '' %}{% if m.role == 'user' %}
{{- '<role>HUMAN</role>' + m.content + '<|role_end|>' }}{% elif m.role == 'system' and not loop.first %}
{{- '<role>SYSTEM</role>' + m.content + '<|role_end|>' }}{% elif m.role == 'assistant' %}
{{- '<role>ASSISTANT</role>' }}{% if m.reasoning_content is string and loop.last %}
{{- '\n<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ content }}
{%- for c in m.tool_calls or [] %}{% if (loop.first and content) or not loop.first %}{{ '\n' }}{% endif %}
{%- set c = c.function or c %}{{ '<tool_call>\n{"name": "' ~ c.name ~ '", "arguments": ' }}
{%- if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|role_end|>' }}{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<role>OBSERVATION</role>' }}{% endif %}
{{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|role_end|>' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"""

_HUNYUAN = """{% for m in messages %}{% set content = m['content'] if 'content' in m else '' %}
{%- if loop.first and tools %}{{ '<|startoftext|>' ~ (tools | tojson) ~ '\n' }}{% if m['role'] == 'system' %}
{{- content }}{% endif %}{{ '<|extra_4|>' }}{% elif loop.first and m['role'] == 'system' %}
{{- '<|startoftext|>' + content + '<|extra_4|>' }}{% elif m['role'] == 'system' %}{{ content }}{% endif %}
{%- if m['role'] == 'user' %}{% if not tools and loop.index0 != 1 %}{{ '<|startoftext|>' }}{% endif %}
{{- content + '<|extra_0|>' }}{% elif m['role'] == 'assistant' %}{{ content }}{% if 'tool_calls' in m %}
{{- '<tool_calls>[' }}{% for c in m['tool_calls'] %}{% set a = c['function']['arguments'] %}
{{- '{"name": "' + c['function']['name'] + '", "arguments": ' + (a if a is string else a | tojson) + '}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</tool_calls>' }}{% endif %}{{ '<|eos|>' }}
{%- elif m['role'] == 'tool' %}{{ '<tool_response>' + content + '</tool_response><|extra_0|>' }}{% endif %}{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n' }}{% endif %}"""

OWN_TEMPLATES: Mapping[str, str] = {
    "hunyuan_a13b": _HUNYUAN,
    "ling2": _LING2,
    "olmoe": _OLMOE,
    "qwen2_moe_plain": _QWEN2_MOE,
}
