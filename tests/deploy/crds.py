"""Validating a manifest as the API server does: against the structural schema of its custom resource definition.

Defaults are applied, unknown fields are refused, names in lists that are keyed by name are unique. Rules in CEL
(`x-kubernetes-validations`) are not evaluated.
"""

from __future__ import annotations

import difflib
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

DEFINITIONS = {"RayService": "rayservices.yaml", "RayJob": "rayjobs.yaml"}
METADATA = {"type": "object", "required": ["name"], "additionalProperties": False} | {
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    }
}
"""Definitions leave `metadata` to the API server. The operator adds to the name, so it has 47 characters at most."""


def read_schema(folder: Path, kind: str) -> dict[str, Any]:
    """The closed schema of the version of a kind that is stored; files may be gzipped, and begin with `ray.io_`."""
    (path, *_) = [*folder.glob(f"*{DEFINITIONS[kind]}"), *folder.glob(f"*{DEFINITIONS[kind]}.gz")]
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    definition = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (version for version in definition["spec"]["versions"] if version["storage"])
    schema = version["schema"]["openAPIV3Schema"]
    group = definition["spec"]["group"]
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"] |= {
        "apiVersion": {"const": f"{group}/{version['name']}"},
        "kind": {"const": kind},
        "metadata": METADATA,
    }
    return _closed(schema)


def complaints(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What the API server would refuse, each with its place; none where it accepts the document."""
    document = _with_defaults(document, schema)
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    found = [line for error in errors for line in _described(error)]
    return sorted([*found, *_duplicates(document, schema, "")])


def _closed(schema: Any) -> Any:
    """Forbid what is not named, in every object with named properties that does not preserve unknown fields."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if schema.get("nullable") is True and isinstance(schema.get("type"), str):
        closed["type"] = [schema["type"], "null"]
    return closed


def _with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_with_defaults(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or {}
    missing = {name: part["default"] for name, part in properties.items() if "default" in part and name not in value}
    filled = missing | value
    return {name: _with_defaults(part, properties.get(name) or {}) for name, part in filled.items()}


def _described(error: jsonschema.ValidationError) -> Iterator[str]:
    place = _place(error.absolute_path)
    if error.validator != "additionalProperties" or not isinstance(error.schema, dict):
        yield f"{place}: {error.message}"
        return
    known = list(error.schema["properties"])
    for name in sorted(set(error.instance) - set(known)):
        nearest = difflib.get_close_matches(name, known, n=1)
        yield f"{place}: unknown field {name}" + (f", did you mean {nearest[0]}?" if nearest else "")


def _place(path: Any) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".") or "document"


def _duplicates(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        for name, part in value.items():
            yield from _duplicates(part, properties.get(name) or {}, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        seen: set[tuple[Any, ...]] = set()
        for item in value:
            key = tuple(item.get(name) for name in keys) if keys and isinstance(item, dict) else None
            if key in seen:
                yield f"{place}: twice {'/'.join(map(str, key))}"
            if key is not None:
                seen.add(key)
        for index, item in enumerate(value):
            yield from _duplicates(item, schema.get("items") or {}, f"{place}[{index}]")
