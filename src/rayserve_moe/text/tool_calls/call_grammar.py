"""Grammars that restrict an answer to tool calls in a model's own format."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rayserve_moe.text.tool_calls import deepseek, gemma, harmony, hunyuan, kimi, minimax_m3
from rayserve_moe.text.tool_calls.lark_terms import JSON_NAME, NAME, NUMBER, is_special, terms_of, without
from rayserve_moe.text.tool_calls.mistral import ARGS as MISTRAL_ARGS
from rayserve_moe.text.tool_calls.mistral import BEGIN as MISTRAL_BEGIN
from rayserve_moe.text.tool_calls.parameter_schemas import (
    UnwritableSchemaError,
    array_bounds,
    branches,
    resolved,
    value_forms,
)
from rayserve_moe.text.tool_calls.quoted_arguments import QuotedArguments

_MAX_DEPTH = 8
"""Maximum nesting of objects and arrays that hold parameters; deeper schemas may refer to themselves."""
_MAX_MEMBERS = 2000
"""Maximum number of parameters of an answer, counted at each place where a schema is used."""
_NAME = re.compile(r"[^\s<>\"'\0]+")
_KEY = re.compile(r"[^\s<>\"'\0](?:[^<>\"'\0\n]*[^\s<>\"'\0])?")


class ParameterForm(NamedTuple):
    """Written form of a parameter."""

    before: str
    """Text before the value, including the key."""
    end: str
    """Text directly after the value; it may include the key."""
    gap: str = ""
    """Text after `end`."""
    barriers: tuple[str, ...] = ()
    """Markers that no value can contain, besides `end`."""
    item: str = ""
    """Key of an array's items if objects and arrays hold parameters of this form; empty if they are JSON."""


class ReasoningForm(NamedTuple):
    """Written form of optional reasoning before calls or content."""

    begin: str
    """Text before reasoning."""
    end: str
    """Text after reasoning."""
    content: str
    """Text that begins content after reasoning."""
    markers: tuple[str, ...]
    """Markers that appear neither in reasoning nor in content."""


class CallForm(NamedTuple):
    """Written form of the calls of an answer."""

    before: str
    """Text before the arguments of a call."""
    after: str
    """Text after the arguments of a call."""
    between: str | None = None
    """Text between calls; None if an answer holds at most a single call."""
    begin: str = ""
    """Text before all calls."""
    end: str = ""
    """Text after all calls."""
    parameter: ParameterForm | None = None
    """Form of each parameter; None if the arguments are an object."""
    quote: str = ""
    """Text around strings in an object with bare keys; empty if an object is JSON."""
    reasoning: ReasoningForm | None = None
    """Form of reasoning before the calls, or None."""


_GLM = f"<arg_key>{NAME}</arg_key>"
FORMS: Mapping[str, CallForm] = {
    "hermes": CallForm(f'<tool_call>\n{{"name": {JSON_NAME}, "arguments": ', "}\n</tool_call>", between="\n"),
    "llama": CallForm(f'{{"name": {JSON_NAME}, "parameters": ', "}", between="; "),
    "kimi": CallForm(
        f"{kimi.CALL}functions.{NAME}:{NUMBER}{kimi.ARGUMENTS}",
        kimi.END,
        between="",
        begin=kimi.SECTION,
        end=kimi.SECTION_END,
    ),
    "deepseek": CallForm(
        f"{deepseek.BEGIN}{NAME}{deepseek.SEPARATOR}",
        deepseek.END,
        between="",
        begin=deepseek.SECTION,
        end=deepseek.SECTION_END,
    ),
    "deepseek fenced": CallForm(
        f"{deepseek.BEGIN}function{deepseek.SEPARATOR}{NAME}\n```json\n",
        f"\n```{deepseek.END}",
        between="",
        begin=deepseek.SECTION,
        end=deepseek.SECTION_END,
    ),
    "mistral": CallForm(f'{{"name": {JSON_NAME}, "arguments": ', "}", between=", ", begin=f"{MISTRAL_BEGIN}[", end="]"),
    "mistral named": CallForm(f"{MISTRAL_BEGIN}{NAME}{MISTRAL_ARGS}", "", between=""),
    "glm": CallForm(
        f"<tool_call>{NAME}\n",
        "</tool_call>",
        between="\n",
        parameter=ParameterForm(f"{_GLM}\n<arg_value>", "</arg_value>", "\n"),
    ),
    "glm tight": CallForm(
        f"<tool_call>{NAME}",
        "</tool_call>",
        between="",
        parameter=ParameterForm(f"{_GLM}<arg_value>", "</arg_value>"),
    ),
    "qwen_coder": CallForm(
        f"<tool_call>\n<function={NAME}>\n",
        "</function>\n</tool_call>",
        between="\n",
        parameter=ParameterForm(f"<parameter={NAME}>\n", "\n</parameter>", "\n"),
    ),
    "mimo": CallForm(
        f"<tool_call><function={NAME}>",
        "</function></tool_call>",
        between="",
        parameter=ParameterForm(f"<parameter={NAME}>", "</parameter>"),
    ),
    "gemma": CallForm(f"{gemma.BEGIN}{gemma.CALL}{NAME}", gemma.END, between="", quote=gemma.QUOTE),
    "hunyuan": CallForm(
        f"{hunyuan.CALL}{NAME}{hunyuan.SEPARATOR}\n",
        f"{hunyuan.END}\n",
        between="",
        begin=f"{hunyuan.SECTION}\n",
        end=hunyuan.SECTION_END,
        parameter=ParameterForm(f"{hunyuan.KEY}{NAME}{hunyuan.KEY_END}\n{hunyuan.VALUE}", hunyuan.VALUE_END, "\n"),
    ),
    "minimax_m3": CallForm(
        f'{minimax_m3.INVOKE}{NAME}">',
        f"{minimax_m3.INVOKE_END}\n",
        between="",
        begin=f"{minimax_m3.BLOCK}\n",
        end=minimax_m3.BLOCK_END,
        parameter=ParameterForm(
            f"{minimax_m3.NAMESPACE}<{NAME}>",
            f"{minimax_m3.NAMESPACE}</{NAME}>",
            barriers=(minimax_m3.NAMESPACE,),
            item=minimax_m3.ITEM,
        ),
    ),
    "minimax": CallForm(
        f'<invoke name="{NAME}">\n',
        "</invoke>\n",
        between="",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        parameter=ParameterForm(f'<parameter name="{NAME}">', "</parameter>", "\n"),
    ),
    "harmony": CallForm(
        f"{harmony.CHANNEL}commentary to=functions.{NAME} {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        harmony.CALL,
        reasoning=ReasoningForm(
            harmony.REASONING[0],
            f"{harmony.REASONING[1]}{harmony.START}assistant",
            f"{harmony.CHANNEL}final{harmony.MESSAGE}",
            harmony.MARKERS,
        ),
    ),
}
"""Call forms by format. If a format has a second form, `SECOND_FORMS` gives the template marker that selects it."""
SECOND_FORMS = {
    "deepseek": ("deepseek fenced", "```json"),
    "mistral": ("mistral named", MISTRAL_ARGS),
    "glm": ("glm tight", "</arg_key><arg_value>"),
}


def form_of(calls: str | None, template: str, *, ends: Collection[str] = ()) -> CallForm | None:
    """Return the call form of a format in `CALL_FORMATS`, or None if it has none.

    Text in `ends` ends an answer by itself, so it is removed from the form's end.
    """
    second, marker = SECOND_FORMS.get(calls or "", ("", ""))
    form = FORMS.get(second if second and marker in template else calls or "")
    return form._replace(after="") if form is not None and form.after in ends else form


class CallGrammar(NamedTuple):
    """Lark grammar, and JSON schemas for its rules `args_0`, `args_1`, and so on."""

    lark: str
    schemas: list[Any]


def call_grammar(
    form: CallForm, functions: Sequence[Mapping[str, Any]], *, special_ids: Mapping[str, int], allows_several: bool
) -> CallGrammar:
    """Return the grammar of calls of the given functions.

    Raises: UnwritableSchemaError with the schema keyword, or `name` for a function name, that the format cannot
    express.
    """
    writer = _Writer(form, special_ids)
    several = f"({writer.written(form.between)} call)*" if allows_several and form.between is not None else ""
    writer.lines += [
        f"start: {writer.reasoning()} {writer.written(form.begin)} call {several} {writer.written(form.end)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        name = function["name"]
        if (form.parameter is not None or form.quote) and not _NAME.fullmatch(name):
            raise UnwritableSchemaError("name")
        arguments = writer.arguments(i, {"type": "object", **(function.get("parameters") or {})})
        writer.lines.append(f"call_{i}: {writer.written(form.before, name)} {arguments} {writer.written(form.after)}")
    return CallGrammar("\n".join(writer.lines) + "\n", writer.schemas)


def content_grammar(form: ReasoningForm, *, special_ids: Mapping[str, int]) -> str:
    """Return a Lark grammar of an answer with optional reasoning, whose content follows the grammar `@content`."""
    writer = _Writer(CallForm("", "", reasoning=form), special_ids)
    start = f"start: {writer.reasoning()} {writer.written(form.content)} @content"
    return "\n".join([*writer.lines, start]) + "\n"


class _Writer:
    """Collector of grammar lines and of the schemas to which they refer."""

    def __init__(self, form: CallForm, special_ids: Mapping[str, int]) -> None:
        self._form, self._special_ids = form, special_ids
        self._num_texts, self._num_members, self._depth = 0, 0, 0
        self.lines: list[str] = []
        self.schemas: list[Any] = []

    def written(self, text: str | None, name: str = "") -> str:
        """Return a text as grammar terms."""
        return " ".join(terms_of(text or "", self._special_ids, name=name))

    def reasoning(self) -> str:
        """Return the terms of optional reasoning before all calls."""
        form = self._form.reasoning
        if form is None:
            return ""
        inner = self.text_until(form.end, [without(form.markers)])
        return f"({self.written(form.begin)} {inner})?"

    def arguments(self, function: int, schema: Mapping[str, Any]) -> str:
        """Return the terms of a function's arguments."""
        form = self._form.parameter
        if form is None and not self._form.quote:
            return self.json(schema)
        schema = resolved(schema, schema)
        properties, required = _object_parts(schema)
        if form is None:
            quoted = QuotedArguments(self, quote=self._form.quote, prefix=f"value_{function}", root=schema)
            return quoted.members(properties, required)
        return " ".join(self._members(form, properties, required, root=schema))

    def _value(self, form: ParameterForm, key: str, *, schema: Any, root: Mapping[str, Any]) -> str:
        schema, end = resolved(schema, root), form.end.replace(NAME, key)
        if form.item and (inside := self._parameters_in(form, schema, root)) is not None:
            return f"{inside} {self.written(end)}"
        found = value_forms(schema, root, has_json_containers=not form.item)
        marker = without([end.strip(), *self._form.after.split(), *form.barriers])
        choices = []
        if found.texts:
            choices.append(self.text_until(end, [f"{text} & {marker}" for text in found.texts]))
        if found.schema is not None:
            choices.append(f"{self.json(found.schema)} {self.written(end)}")
        return f"({' | '.join(choices)})"

    def _parameters_in(self, form: ParameterForm, schema: Any, root: Mapping[str, Any]) -> str | None:
        """Return the terms of an object or array that holds parameters, or None for a schema that allows others."""
        found = [each for each in branches(schema) if each.get("type") != "null"] if isinstance(schema, Mapping) else []
        kind = found[0].get("type") if len(found) == 1 else None
        if kind not in ("object", "array"):
            return None
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnwritableSchemaError("$ref")
        if kind == "array":
            terms = self._items(form, found[0], root)
        else:
            properties, required = _object_parts(found[0])
            if not properties:
                raise UnwritableSchemaError("properties")
            terms = " ".join(self._members(form, properties, required, root=root))
        self._depth -= 1
        return terms

    def _items(self, form: ParameterForm, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        low, high = array_bounds(schema)
        value = self._value(form, form.item, schema=schema.get("items", {}), root=root)
        return f"({self.written(form.before, form.item)} {value}){{{low},{'' if high is None else high}}}"

    def _members(
        self, form: ParameterForm, properties: Mapping[str, Any], required: Collection[str], *, root: Mapping[str, Any]
    ) -> list[str]:
        """Return the terms of parameters, in the order of the schema."""
        members = []
        self._num_members += len(properties)
        if self._num_members > _MAX_MEMBERS:
            raise UnwritableSchemaError("properties")
        for key, schema in properties.items():
            if not _KEY.fullmatch(key):
                raise UnwritableSchemaError("properties")
            value = self._value(form, key, schema=schema, root=root)
            member = f"{self.written(form.before, key)} {value} {self.written(form.gap)}"
            members.append(f"({member}){'' if key in required else '?'}")
        return members

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of JSON text that is valid under a schema."""
        self.schemas.append(schema)
        return f"args_{len(self.schemas) - 1}"

    def text_until(self, end: str, texts: Sequence[str]) -> str:
        """Return the terms of a choice of texts and their end, merged into a single terminal where possible."""
        terms = terms_of(end, self._special_ids)
        inside = 0
        while inside < len(terms) and not is_special(terms[inside]):
            inside += 1
        name = f"TEXT_{self._num_texts}"
        self._num_texts += 1
        body = " | ".join(f"({text})" for text in texts)
        self.lines.append(f"{name}: {' '.join([f'({body})', *terms[:inside]])}")
        return " ".join([name, *terms[inside:]])


_OBJECT_KEYS = {
    *("type", "properties", "required", "additionalProperties", "title", "description", "default", "examples"),
    *("$defs", "definitions", "$schema", "$id", "$comment", "strict"),
}


def _object_parts(schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the parameter schemas by name, and the names of required parameters."""
    if unknown := sorted(schema.keys() - _OBJECT_KEYS):
        raise UnwritableSchemaError(unknown[0])
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if schema["type"] != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UnwritableSchemaError("type")
    if not all(isinstance(name, str) for name in required):
        raise UnwritableSchemaError("required")
    return {**properties, **{name: {} for name in required if name not in properties}}, set(required)
