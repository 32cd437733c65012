"""Conversion of structural tags in the `format` form of xgrammar, vLLM and SGLang to a Lark grammar.

Free text ends at the first occurrence of the string that follows. Both form a single terminal, because a lexer inside a
text terminal would also consume that string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rayserve_moe.requests.records import RequestError

Format = Mapping[str, Any]
SchemaOf = Callable[[Any], str]
"""Returns a checked schema as JSON for the engine."""
GrammarsOf = Callable[[str], list[dict[str, Any]]]
"""Returns grammars of the engine for a written grammar; the first is the main grammar."""
ANY_TEXT = "/(?s:.*)/"
_FIELDS: Mapping[str, frozenset[str]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema", "style"}),
    "any_text": frozenset({"excludes", "max_chars"}),
    "grammar": frozenset({"grammar"}),
    "regex": frozenset({"pattern"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
    "repeat": frozenset({"content", "min", "max"}),
}
"""Fields of each supported format type."""


def literal(text: str) -> str:
    """Return a regular expression, without slashes, for exactly this text."""
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


class TagGrammar:
    """Writer of a format as grammars of the engine.

    Raises: RequestError from its methods if a format is unsupported or malformed.
    """

    def __init__(self, *, param: str, schema_of: SchemaOf, grammars_of: GrammarsOf) -> None:
        self._param, self._schema_of, self._grammars_of = param, schema_of, grammars_of
        self._lines: list[str] = []
        self._num_names = 0
        self._inner: list[dict[str, Any]] = []

    def grammars(self, given: Any) -> list[dict[str, Any]]:
        """Return the grammar of an answer, and the grammars to which it refers."""
        start = self._written(given, ())
        lark = "\n".join([f"start: {start}", *self._lines]) + "\n"
        return [{"lark_grammar": lark}, *self._inner]

    def _written(self, given: Any, ends: Sequence[str]) -> str:
        """Return terms for a format followed by a string in `ends`; without `ends` the format ends the answer."""
        kind = self._checked(given)
        if (of_kind := _OF_KIND.get(kind)) is not None:
            return of_kind(self, given, ends)
        return f"{_ONE_OF_KIND[kind](self, given)} {_any_of(ends)}"

    def _checked(self, given: Any) -> str:
        kind = given.get("type") if isinstance(given, Mapping) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise self._fault(f"a `format` should have a `type`, one of {', '.join(sorted(_FIELDS))}")
        for name, value in given.items():
            if name not in _FIELDS[kind] and name != "type" and value not in (None, False, []):
                raise self._fault(f"a field of `{kind}` is not supported; it may have {', '.join(_FIELDS[kind])}")
        return kind

    def _const(self, given: Format) -> str:
        return f"/{literal(self._text(given, 'value'))}/"

    def _schema(self, given: Format) -> str:
        if given.get("style", "json") != "json":
            raise self._fault("`style` should be json")
        return f"%json {self._schema_of(given.get('json_schema'))}"

    def _regex(self, given: Format) -> str:
        pattern = self._text(given, "pattern")
        if "\0" in pattern:
            raise self._fault("an expression may not hold NUL")
        return f"/{_between_slashes(pattern)}/"

    def _grammar(self, given: Format) -> str:
        name = f"inner_{len(self._inner)}"
        first, *others = self._grammars_of(self._text(given, "grammar"))
        self._inner += [{**first, "name": name}, *others]
        return f"@{name}"

    def _any_text(self, given: Format, ends: Sequence[str]) -> str:
        max_chars = given.get("max_chars")
        if max_chars is not None and (not isinstance(max_chars, int) or max_chars < 0):
            raise self._fault("`max_chars` should be a number")
        length = "" if max_chars is None else f" & /(?s:.{{0,{max_chars:d}}})/"
        return self._text_until(ends, without=self._texts(given, "excludes"), length=length)

    def _sequence(self, given: Format, ends: Sequence[str]) -> str:
        elements = self._formats(given, "elements")
        terms: list[str] = []
        while elements:
            element, *elements = elements
            if elements and self._is_open(element):
                head, rest = self._head(elements[0])
                terms.append(self._written(element, (head,)))
                elements = [*rest, *elements[1:]]
                terms += [] if elements else [_any_of(ends)]
            else:
                terms.append(self._written(element, () if elements else ends))
        return " ".join(terms)

    def _or(self, given: Format, ends: Sequence[str]) -> str:
        return f"({' | '.join(self._written(one, ends) for one in self._formats(given, 'elements'))})"

    def _tag(self, given: Format, ends: Sequence[str]) -> str:
        return f"{self._begin(given, '')} {self._rest_of_tag(given, ends)}"

    def _begin(self, tag: Format, trigger: str) -> str:
        """Return the rest of a tag's beginning after its trigger."""
        return _any_of([self._text(tag, "begin")[len(trigger) :]])

    def _rest_of_tag(self, tag: Format, ends: Sequence[str]) -> str:
        end = tag.get("end", "")
        own = [end] if isinstance(end, str) else end
        if not isinstance(own, list) or not own or not all(isinstance(one, str) for one in own):
            raise self._fault("`end` of a tag should be a string, or a list of strings")
        if "" in own:
            return self._written(tag.get("content"), ends)
        return f"{self._written(tag.get('content'), own)} {_any_of(ends)}"

    def _triggered(self, given: Format, ends: Sequence[str]) -> str:
        triggers, tags = self._texts(given, "triggers"), self._formats(given, "tags")
        excluded = [*triggers, *self._texts(given, "excludes")]
        if not triggers or not tags or not all(triggers) or any(self._checked(tag) != "tag" for tag in tags):
            raise self._fault("`triggered_tags` should have `triggers` and `tags`, one at least of both")
        after: dict[str, list[str]] = {}
        for tag in tags:
            trigger = next((one for one in triggers if self._text(tag, "begin").startswith(one)), None)
            if trigger is None:
                raise self._fault("every structure or tag should begin with one of the triggers")
            after.setdefault(trigger, []).append(f"{self._begin(tag, trigger)} {self._rest_of_tag(tag, ())}")
        forbidden = [*excluded, *ends]
        found = " | ".join(
            f"{self._text_until((trigger,), without=forbidden)} ({' | '.join(rests)})"
            for trigger, rests in after.items()
        )
        whole = " | ".join(self._written(tag, ()) for tag in tags)
        if given.get("stop_after_first"):
            one_tag = f"({whole if given.get('at_least_one') else found}) {_any_of(ends)}"
            tail = "" if given.get("at_least_one") else f" | {self._text_until(ends, without=excluded)}"
            return f"({one_tag}{tail})"
        first = f"({whole}) " if given.get("at_least_one") else ""
        return f"{first}({found})* {self._text_until(ends, without=excluded)}"

    def _separated(self, given: Format) -> str:
        tags = self._formats(given, "tags")
        if not tags or any(self._checked(tag) != "tag" for tag in tags):
            raise self._fault("`tags` should be tags, one at least")
        one = f"({' | '.join(self._written(tag, ()) for tag in tags)})"
        several = (
            one if given.get("stop_after_first") else f"{one} ({_any_of([self._text(given, 'separator')])} {one})*"
        )
        return f"({several})" if given.get("at_least_one") else f"({several})?"

    def _repeated(self, given: Format) -> str:
        content = given.get("content")
        kind = self._checked(given)
        if self._checked(content) and self._is_open(content):
            raise self._fault(f"`content` of `{kind}` can be any text: nothing would end it")
        signs = {"optional": "?", "plus": "+", "star": "*"}
        if kind in signs:
            return f"({self._written(content, ())}){signs[kind]}"
        minimum, maximum = given.get("min"), given.get("max")
        are_integers = isinstance(minimum, int) and isinstance(maximum, int)
        if not are_integers or not (0 <= minimum <= maximum or maximum == -1):
            raise self._fault("`repeat` should have `min` and `max`, -1 for no limit")
        return f"({self._written(content, ())}){{{minimum:d},{'' if maximum < 0 else maximum}}}"

    def _is_open(self, given: Any) -> bool:
        """Return True if a format can end with free text."""
        kind = self._checked(given)
        if kind in ("sequence", "or"):
            elements = self._formats(given, "elements")
            return any(map(self._is_open, elements[-1:] if kind == "sequence" else elements))
        if kind == "tag":
            return given.get("end") in ("", [""]) and self._is_open(given.get("content"))
        return kind in ("any_text", "triggered_tags")

    def _head(self, given: Any) -> tuple[str, list[Format]]:
        """Return the string with which a format begins, and formats for its rest."""
        kind = self._checked(given)
        if kind == "const_string" and given.get("value"):
            return self._text(given, "value"), []
        if kind == "tag" and given.get("begin"):
            return self._text(given, "begin"), [{**given, "begin": ""}]
        raise self._fault("free text should be the last of a `sequence`, or stand before a string or a tag")

    def _text_until(self, ends: Sequence[str], *, without: Iterable[str], length: str = "") -> str:
        """Return the name of a terminal for text that ends with a string in `ends`."""
        forbidden = [literal(one) for one in dict.fromkeys([*without, *ends]) if one]
        excluded = f" & ~/(?s:.*)({'|'.join(forbidden)})(?s:.*)/" if forbidden else ""
        self._num_names += 1
        self._lines.append(f"TEXT_{self._num_names}: ({ANY_TEXT}{excluded}{length}) {_any_of(ends)}")
        return f"TEXT_{self._num_names}"

    def _text(self, given: Format, name: str) -> str:
        value = given.get(name)
        if not isinstance(value, str):
            raise self._fault(f"`{name}` should be a string")
        return value

    def _texts(self, given: Format, name: str) -> list[str]:
        value = given.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._fault(f"`{name}` should be a list of strings")
        return value

    def _formats(self, given: Format, name: str) -> list[Any]:
        value = given.get(name)
        if not isinstance(value, list) or not value:
            raise self._fault(f"`{name}` should be a list, one at least")
        return value

    def _fault(self, sentence: str) -> RequestError:
        return RequestError(sentence, self._param)


_OF_KIND = {
    "any_text": TagGrammar._any_text,
    "sequence": TagGrammar._sequence,
    "or": TagGrammar._or,
    "tag": TagGrammar._tag,
    "triggered_tags": TagGrammar._triggered,
}
_ONE_OF_KIND = {
    "const_string": TagGrammar._const,
    "json_schema": TagGrammar._schema,
    "regex": TagGrammar._regex,
    "grammar": TagGrammar._grammar,
    "tags_with_separator": TagGrammar._separated,
    **dict.fromkeys(("optional", "plus", "star", "repeat"), TagGrammar._repeated),
}


def _any_of(texts: Sequence[str]) -> str:
    """Return a term for a choice of strings, empty for no strings or only empty strings."""
    written = [f"/{literal(text)}/" for text in texts if text]
    return written[0] if len(written) == 1 else f"({' | '.join(written)})" if written else ""


def _between_slashes(pattern: str) -> str:
    """Return a pattern escaped for use between slashes."""
    found, at = [], 0
    while at < len(pattern):
        step = pattern[at : at + (2 if pattern[at] == "\\" else 1)]
        found.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(step, step))
        at += len(step)
    return "".join(found)


def triggered(structures: Sequence[Format], triggers: Sequence[str]) -> Format:
    """Return the legacy form with `structures` and `triggers` as a format."""
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure["end"],
        }
        for structure in structures
    ]
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}
