"""Table of all fields that vLLM, SGLang or OpenAI define for the request bodies here, and their treatment.

*Computed* fields belong to the schemas, under any of their names. *Accepted* and *refused* ones, and the names of
objects within bodies, are in `known_fields.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from rayserve_moe.serving.api.schemas import control
from rayserve_moe.serving.api.schemas.audit import AuditBody, AuditSample
from rayserve_moe.serving.api.schemas.messages import CountTokensBody, MessagesBody
from rayserve_moe.serving.api.schemas.native import GenerateBody, NativeSampling
from rayserve_moe.serving.api.schemas.openai import ChatBody, CompletionBody, StreamOptions
from rayserve_moe.serving.api.schemas.responses import ResponsesBody
from rayserve_moe.serving.api.schemas.resume import ResumeBody
from rayserve_moe.serving.api.schemas.scoring import EmbeddingBody, ScoreBody
from rayserve_moe.serving.api.schemas.text_tokens import DetokenizeBody, SessionOptions, TokenizeBody
from rayserve_moe.serving.api.schemas.tinker import (
    TinkerChunk,
    TinkerFutureBody,
    TinkerPrompt,
    TinkerSampleBody,
    TinkerSampling,
    TinkerSamplingSessionBody,
    TinkerSessionBody,
)
from rayserve_moe.serving.api.schemas.tokens import TokenBody, TokenSampling

NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that switch every refused field off, equal to a missing field."""
_MIN_COMPARED, _MAX_COMPARED = 5, 64
"""Minimum characters of names that are compared with unknown ones, and maximum number of these."""
TABLE = Path(__file__).with_suffix(".yaml")
_SCHEMAS: tuple[type[BaseModel], ...] = (
    *(CompletionBody, ChatBody, GenerateBody, NativeSampling, TokenBody, TokenSampling, StreamOptions, MessagesBody),
    *(
        CountTokensBody,
        ResponsesBody,
        ScoreBody,
        EmbeddingBody,
        AuditBody,
        AuditSample,
        TokenizeBody,
        DetokenizeBody,
        SessionOptions,
        ResumeBody,
    ),
    *(AuditBody, AuditSample),
    *(AuditBody, AuditSample),
    *(TinkerSampleBody, TinkerSampling, TinkerPrompt, TinkerChunk, TinkerFutureBody),
    *(TinkerSamplingSessionBody, TinkerSessionBody),
    *(control.AbortBody, control.AbortIdsBody, control.PauseBody, control.PauseOptions, control.ResetOptions),
    *(control.UpdateWeightsBody, control.WeightDirBody, control.WeightNameBody, control.PlacementBody),
    *(control.LoadAdapterBody, control.UnloadAdapterBody),
)
_READ: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
_BY_NAME = {schema.__name__: schema for schema in _SCHEMAS}
OBJECTS: Mapping[str, type[BaseModel]] = {key: _BY_NAME[each["schema"]] for key, each in _READ["objects"].items()}
"""Schema of each object of the table."""
PLACES: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {key: (tuple(each["routes"]), each.get("place", "body")) for key, each in _READ["objects"].items()}
)
"""Routes that take each object, and its location in their bodies."""


@dataclass(frozen=True)
class KnownFields:
    """Fields of a JSON object, by their treatment."""

    computed: frozenset[str]
    other_names: Mapping[str, str]
    """Computed field by alias."""
    accepted: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    """Values besides NOTHING that switch a field off."""
    nested: Mapping[str, KnownFields]
    """Computed fields that are declared objects, or lists of them."""
    kinds: tuple[str | None, ...] = ()
    """If not empty, only objects with such a `type` are checked."""

    @property
    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted({*self.computed, *self.other_names, *self.accepted, *self.refused})

    def meant_by(self, unknown: Sequence[str]) -> str | None:
        """Return the known name that is one edit away from one of the first unknown names, or None."""
        pairs = ((name, known) for name in unknown[:_MAX_COMPARED] if name not in _MEANT for known in self.names)
        return next((known for name, known in pairs if len(known) >= _MIN_COMPARED and is_one_edit(name, known)), None)


def known_fields(key: str) -> KnownFields:
    """Return the fields of an object in OBJECTS."""
    schema = OBJECTS[key]
    return KnownFields(
        computed=frozenset(schema.model_fields),
        other_names={other: own for row in _rows("other_names", key) for other, own in row["names"].items()},
        accepted=frozenset(name for row in _rows("accepted", key) for name in row["fields"]),
        refused={name: tuple(row.get("unless", ())) for row in _rows("refused", key) for name in row["fields"]},
        nested=dict(_nested_in(schema)) | plain_fields(key),
    )


def plain_fields(key: str) -> dict[str, KnownFields]:
    """Return the fields of objects without a schema in an object of OBJECTS, by name."""
    return {name: _plain(fields) for row in _rows("nested", key) for name, fields in row["objects"].items()}


def plain_objects(key: str) -> dict[str, KnownFields]:
    """Return the fields of objects without a schema at any depth of an object of OBJECTS, by path."""
    found: dict[str, KnownFields] = {}
    for name, outer in plain_fields(key).items():
        found[name] = outer
        found |= {f"{name}.{inner}": fields for inner, fields in outer.nested.items()}
    return found


def _rows(part: str, key: str) -> Iterator[dict[str, Any]]:
    """Return the rows of a part of the table that are about an object."""
    return (row for row in _READ[part] if key in row["of"])


def _plain(fields: Mapping[str, Any]) -> KnownFields:
    return KnownFields(
        computed=frozenset(fields["computed"]),
        other_names={},
        accepted=frozenset(fields.get("accepted", ())),
        refused={name: tuple(off) for name, off in fields.get("refused", {}).items()},
        nested={name: _plain(inner) for name, inner in fields.get("within", {}).items()},
        kinds=tuple(fields.get("kinds", ())),
    )


def _nested_in(schema: type[BaseModel]) -> Iterator[tuple[str, KnownFields]]:
    key_of = {declared: key for key, declared in OBJECTS.items()}
    for name, field in schema.model_fields.items():
        for declared in _types_in(field.annotation):
            if declared in key_of:
                yield name, known_fields(key_of[declared])


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)


def is_one_edit(one: str, other: str) -> bool:
    """Return True if a character was added, left out or replaced, or two neighbours are swapped."""
    if one == other or abs(len(one) - len(other)) > 1:
        return False
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    at = next(differing, min(len(one), len(other)))
    if len(one) == len(other):
        return one[at + 1 :] == other[at + 1 :] or one[at:] == other[at + 1] + other[at] + other[at + 2 :]
    shorter, longer = sorted((one, other), key=len)
    return shorter[at:] == longer[at + 1 :]


FIELDS: Mapping[type[BaseModel], KnownFields] = MappingProxyType(
    {schema: known_fields(key) for key, schema in OBJECTS.items()}
)
"""Fields of every declared request object, by schema."""
_MEANT = frozenset(name for known in FIELDS.values() for name in known.names).union(_READ["unlike"])
"""Names that clients mean as they stand, on any route."""
