"""Grammars of answers that are tool calls and nothing else, as a model's format writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rayserve_moe.text.tool_calls import deepseek, kimi
from rayserve_moe.text.tool_calls.mistral import ARGS as MISTRAL_ARGS
from rayserve_moe.text.tool_calls.mistral import BEGIN as MISTRAL_BEGIN

NAME, JSON_NAME, NUMBER = "\0name\0", "\0json\0", "\0number\0"
_PLACE = re.compile(f"({NAME}|{JSON_NAME}|{NUMBER})")


class CallForm(NamedTuple):
    """What stands before and after the arguments of a call, between calls, and around all of them.

    Without `between` an answer has one call.
    """

    before: str
    after: str
    between: str | None = None
    begin: str = ""
    end: str = ""


_DEEPSEEK = {"between": "", "begin": deepseek.SECTION, "end": deepseek.SECTION_END}
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
    "deepseek": CallForm(f"{deepseek.BEGIN}{NAME}{deepseek.SEPARATOR}", deepseek.END, **_DEEPSEEK),
    "deepseek fenced": CallForm(
        f"{deepseek.BEGIN}function{deepseek.SEPARATOR}{NAME}\n```json\n", f"\n```{deepseek.END}", **_DEEPSEEK
    ),
    "mistral": CallForm(f'{{"name": {JSON_NAME}, "arguments": ', "}", between=", ", begin=f"{MISTRAL_BEGIN}[", end="]"),
    "mistral named": CallForm(f"{MISTRAL_BEGIN}{NAME}{MISTRAL_ARGS}", "", between=""),
}
"""By format; of two that a format has, the second is that of templates with the marker in `SECOND_FORMS`."""
SECOND_FORMS = {"deepseek": ("deepseek fenced", "```json"), "mistral": ("mistral named", MISTRAL_ARGS)}


def form_of(calls: str | None, template: str) -> CallForm | None:
    """How a format of `CALL_FORMATS` writes calls whose arguments are JSON; None for others."""
    second, marker = SECOND_FORMS.get(calls or "", ("", ""))
    return FORMS.get(second if second and marker in template else calls or "")


def call_grammar(
    form: CallForm, functions: Sequence[Mapping[str, Any]], *, special_ids: Mapping[str, int], allows_several: bool
) -> tuple[str, list[Any]]:
    """A grammar in Lark for calls of some of the functions, and schemas for its rules `args_0`, `args_1`, and so on."""

    def written(text: str, name: str = "") -> str:
        return _lark(text, name, special_ids)

    several = f"({written(form.between)} call)*" if allows_several and form.between is not None else ""
    lines = [
        f"start: {written(form.begin)} call {several} {written(form.end)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        name = function["name"]
        lines.append(f"call_{i}: {written(form.before, name)} args_{i} {written(form.after, name)}")
    return "\n".join(lines) + "\n", [_parameters(function) for function in functions]


def _parameters(function: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments, which are an object."""
    return {"type": "object", **(function.get("parameters") or {})}


def _lark(text: str, name: str, special_ids: Mapping[str, int]) -> str:
    """A text as terms of Lark: strings, ids of special tokens, and a number."""
    terms = []
    for part in _PLACE.split(text):
        if part == NUMBER:
            terms.append("/[0-9]{1,3}/")
        elif part == NAME:
            terms.append(json.dumps(name, ensure_ascii=False))
        elif part == JSON_NAME:
            terms.append(json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False))
        else:
            terms += _plain(part, special_ids)
    return " ".join(terms)


def _plain(text: str, special_ids: Mapping[str, int]) -> list[str]:
    """Strings, and in the place of special tokens their ids: no other tokens spell these."""
    inside = [token for token in special_ids if token in text]
    if not inside:
        return [json.dumps(text, ensure_ascii=False)] if text else []
    pieces = re.split("(" + "|".join(map(re.escape, sorted(inside, key=len, reverse=True))) + ")", text)
    return [
        f"<[{special_ids[piece]}]>" if piece in special_ids else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    ]
