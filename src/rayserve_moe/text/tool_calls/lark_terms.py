"""Texts as terms of a Lark grammar in the dialect of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

NAME, JSON_NAME, NUMBER = "\0name\0", "\0json\0", "\0number\0"
"""Placeholders in a text: a name, the name as JSON, and a number."""
ANY_TEXT = "/(?s:.*)/"
_PLACE = re.compile(f"({NAME}|{JSON_NAME}|{NUMBER})")


def terms_of(text: str, special_ids: Mapping[str, int], *, name: str = "") -> list[str]:
    """Return a text as terms: strings, special token ids (no other token may spell them), and number patterns."""
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
    """Return True if a term is a special token's id, which a terminal cannot contain."""
    return term.startswith("<[")


def literal(text: str) -> str:
    """Return a regular expression, without slashes, for exactly this text."""
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


def without(texts: Iterable[str]) -> str:
    """Return a terminal part that matches text with none of these strings."""
    return f"{ANY_TEXT} & ~/(?s:.*)({'|'.join(map(literal, texts))})(?s:.*)/"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _plain(text: str, special_ids: Mapping[str, int]) -> list[str]:
    inside = [token for token in special_ids if token in text]
    if not inside:
        return [_string(text)] if text else []
    pieces = re.split("(" + "|".join(map(re.escape, sorted(inside, key=len, reverse=True))) + ")", text)
    return [f"<[{special_ids[piece]}]>" if piece in special_ids else _string(piece) for piece in pieces if piece]
