"""Grammar of arguments with bare keys and quoted strings: Gemma's objects and arrays, by their JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from rayserve_moe.text.tool_calls.lark_terms import NAME, without
from rayserve_moe.text.tool_calls.parameter_schemas import (
    ANNOTATIONS,
    OF_OTHERS,
    OF_TEXT,
    SCALARS,
    TYPES,
    Schema,
    UnwritableSchemaError,
    array_bounds,
    branches,
    resolved,
    split_branch,
)

_MAX_DEPTH = 64
"""Maximum nesting of schemas, as the parser reads it."""
_KEY = re.compile(r"[^\s:,{}<\0](?:[^:,{}<\0\n]*[^\s:,{}<\0])?")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"
_KNOWN = {"type", *ANNOTATIONS, *OF_TEXT, *OF_OTHERS}
_UNWRITABLE = {"patternProperties", "minProperties", "maxProperties"}


class GrammarWriter(Protocol):
    """Collector of grammar lines."""

    lines: list[str]

    def written(self, text: str | None, name: str = "") -> str:
        """Return a text as grammar terms."""
        ...

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of JSON text that is valid under a schema."""
        ...

    def text_until(self, end: str, texts: list[str]) -> str:
        """Return the terms of a choice of texts and their end."""
        ...


class QuotedArguments:
    """Rules of a function's arguments. Equal schemas share a rule, so that schemas may refer to themselves."""

    def __init__(self, writer: GrammarWriter, *, quote: str, prefix: str, root: Schema) -> None:
        self._writer, self._quote, self._prefix, self._root = writer, quote, prefix, root
        self._rules: dict[str, str] = {}
        self._depth = 0

    def members(self, properties: Mapping[str, Any], required: Collection[str]) -> str:
        """Return the terms of an object with these members, in alphabetical order as the template writes them.

        Raises: UnwritableSchemaError with the unsupported keyword.
        """
        keys = sorted(properties, key=str.lower)
        if not all(_KEY.fullmatch(key) for key in keys):
            raise UnwritableSchemaError("properties")
        members = [f"{self._writer.written(f'{NAME}:', key)} {self._rule(properties[key])}" for key in keys]
        later = [f'("," {member}){"" if key in required else "?"}' for key, member in zip(keys, members, strict=True)]
        first_required = next((place for place, key in enumerate(keys) if key in required), None)
        num_firsts = len(keys) if first_required is None else first_required + 1
        firsts = [" ".join([members[place], *later[place + 1 :]]) for place in range(num_firsts)]
        inside = f"({' | '.join(firsts)})" if firsts else ""
        return f'"{{" {inside}{"?" if firsts and first_required is None else ""} "}}"'

    def _rule(self, schema: Any) -> str:
        """Return the name of the rule of a schema's values."""
        if self._depth == _MAX_DEPTH:
            raise UnwritableSchemaError("properties")
        key = json.dumps(schema, sort_keys=True)
        if key not in self._rules:
            self._rules[key] = rule = f"{self._prefix}_{len(self._rules)}"
            self._depth += 1
            self._writer.lines.append(f"{rule}: {' | '.join(self._choices(schema))}")
            self._depth -= 1
        return self._rules[key]

    def _choices(self, schema: Any) -> list[str]:
        found = resolved({} if schema is True else schema, self._root)
        if not isinstance(found, Mapping):
            raise UnwritableSchemaError("false")
        choices: list[str] = []
        for branch in branches(found):
            texts, scalars = split_branch(branch, SCALARS)
            choices += [self._writer.json(scalar) for scalar in scalars]
            if texts:
                ended = [f"{text} & {without([self._quote])}" for text in texts]
                choices.append(f"{self._writer.written(self._quote)} {self._writer.text_until(self._quote, ended)}")
            if not branch.keys() & {"enum", "const"}:
                choices += self._containers(branch)
        if not choices or ("oneOf" in found and len(choices) > 1 and _may_overlap(found)):
            raise UnwritableSchemaError("oneOf" if choices else "type")
        return choices

    def _containers(self, schema: Schema) -> list[str]:
        """Return the terms of the objects and arrays that an alternative allows."""
        declared = schema.get("type", TYPES)
        kinds = [declared] if isinstance(declared, str) else declared
        if "object" in kinds and (unknown := sorted(schema.keys() & _UNWRITABLE | schema.keys() - _KNOWN)):
            raise UnwritableSchemaError(unknown[0])
        found = [self._object(schema)] if "object" in kinds else []
        return [*found, self._array(schema)] if "array" in kinds else found

    def _object(self, schema: Schema) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, Mapping):
            raise UnwritableSchemaError("properties")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise UnwritableSchemaError("required")
        additional = schema.get("additionalProperties", True)
        properties = {**properties, **{name: additional for name in required if name not in properties}}
        if properties or additional is False:
            return self.members(properties, required)
        member = f'{_ANY_KEY} ":" {self._rule(additional)}'
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _array(self, schema: Schema) -> str:
        low, high = array_bounds(schema)
        if high == 0:
            return '"[" "]"'
        item = self._rule(schema.get("items", {}))
        rest = f"{{{max(0, low - 1)},{'' if high is None else high - 1}}}"
        inside = f'({item} ("," {item}){rest})'
        return f'"[" {inside}{"" if low else "?"} "]"'


def _may_overlap(schema: Schema) -> bool:
    """Return True if two alternatives of `oneOf` allow the same type, so that a value may fit both."""
    seen: list[str] = []
    for branch in schema["oneOf"]:
        declared = branch.get("type", TYPES) if isinstance(branch, Mapping) else TYPES
        kinds = [declared] if isinstance(declared, str) else list(declared)
        if any(kind in seen or (kind == "number" and "integer" in seen) for kind in kinds):
            return True
        seen += kinds
    return False
