"""Checks a Serve config before anything is started. Errors are one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import Settings
from rayserve_moe.execution.card import check_tensors, describe_model
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.state import APPLICATION

DEPLOYMENT = "moe-server"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class CheckedConfig:
    """A Serve config that can be deployed, with the settings of our applications in it, by name."""

    document: dict[str, Any]
    settings: dict[str, Settings]
    host: str
    port: int


def check_config(path: Path) -> CheckedConfig:
    """Read a config file and the checkpoints it names. ValueError, naming file or key, for what would fail later."""
    document = _read(path)
    for place, mapping, schema in _sections(document):
        _refuse_unknown(mapping, schema, place=f"{path}: {place}")
    try:
        http = ServeDeploySchema.model_validate(document).http_options.model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        raise StartError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if not 0 < http["port"] < 2**16:
        raise StartError(f"{path}: http_options.port must lie in [1, {2**16 - 1}], found {http['port']}")
    ours = {
        application.get("name", "default"): settings_from(application.get("args") or {})
        for application in document["applications"]
        if application["import_path"] == APPLICATION
    }
    if not ours:
        raise StartError(f"{path}: no application has import_path {APPLICATION}")
    for settings in ours.values():
        check_tensors(open_checkpoint(describe_model(settings).runner.model.path))
    return CheckedConfig(document, ours, http.get("host") or LOOPBACK, http["port"])


def as_deployed(config: CheckedConfig) -> dict[str, Any]:
    """Return the config to deploy: one attempt to load a model, and only HAProxy listens outside of loopback."""
    applications = []
    for application in config.document["applications"]:
        deployments = [dict(deployment) for deployment in application.get("deployments") or []]
        if application.get("name", "default") in config.settings:
            if not any(deployment["name"] == DEPLOYMENT for deployment in deployments):
                deployments.append({"name": DEPLOYMENT})
            ours = next(deployment for deployment in deployments if deployment["name"] == DEPLOYMENT)
            ours.setdefault("max_constructor_retry_count", 1)
        applications.append({**application, "deployments": deployments})
    http = {**(config.document.get("http_options") or {}), "host": LOOPBACK}
    return {**config.document, "http_options": http, "applications": applications}


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, RecursionError) as error:
        raise StartError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        raise StartError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise StartError(f"{path}: a Serve config is a mapping with applications")
    return document


def _sections(document: dict[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], type[BaseModel]]]:
    """Yield the mappings of a config with their places and schemas; Serve itself ignores unknown keys."""
    yield "", document, ServeDeploySchema
    yield "http_options.", document.get("http_options") or {}, HTTPOptionsSchema
    yield "grpc_options.", document.get("grpc_options") or {}, gRPCOptionsSchema
    applications = document.get("applications")
    for number, application in enumerate(applications if isinstance(applications, list) else []):
        yield f"applications.{number}.", application, ServeApplicationSchema
        deployments = application.get("deployments") if isinstance(application, dict) else None
        for other, deployment in enumerate(deployments if isinstance(deployments, list) else []):
            yield f"applications.{number}.deployments.{other}.", deployment, DeploymentSchema


def _refuse_unknown(mapping: object, schema: type[BaseModel], *, place: str) -> None:
    known = list(schema.model_fields)
    for name in mapping if isinstance(mapping, dict) else ():
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(sorted(known))}"
            raise StartError(f"{place}{name}: unknown key; {hint}")
