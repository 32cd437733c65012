"""Texts as terms of a Lark grammar, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

NAME, JSON_NAME, NUMBER = "\0name\0", "\0json\0", "\0number\0"
"""Places in a text for a name, for the same as JSON, and for a number."""
ANY_TEXT = "/(?s:.*)/"
_PLACE = re.compile(f"({NAME}|{JSON_NAME}|{NUMBER})")


def terms_of(text: str, special_ids: Mapping[str, int], *, name: str = "") -> list[str]:
    """A text as terms: strings, ids in the place of special tokens, which no other tokens spell, and a number."""
    terms = []
    for part in _PLACE.split(text):
        if part == NUMBER:
            terms.append("/[0-9]{1,3}/")
        elif part == NAME:
            terms.append(_string(name))
        elif part == JSON_NAME:
            terms.append(_string(json.dumps(name, ensure_ascii=False)))
        else:
            terms += _plain(part, special_ids)
    return terms


def is_special(term: str) -> bool:
    """Whether a term is the id of a special token, which no terminal can hold."""
    return term.startswith("<[")


def literal(text: str) -> str:
    """An expression, without slashes around it, for exactly this text."""
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


def without(texts: Iterable[str]) -> str:
    """A part of a terminal: text in which none of these stands."""
    return f"{ANY_TEXT} & ~/(?s:.*)({'|'.join(map(literal, texts))})(?s:.*)/"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _plain(text: str, special_ids: Mapping[str, int]) -> list[str]:
    inside = [token for token in special_ids if token in text]
    if not inside:
        return [_string(text)] if text else []
    pieces = re.split("(" + "|".join(map(re.escape, sorted(inside, key=len, reverse=True))) + ")", text)
    return [f"<[{special_ids[piece]}]>" if piece in special_ids else _string(piece) for piece in pieces if piece]
