"""Checks of a Serve config by Ray Serve's own schema, and of its checkpoints, before deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.config.load import settings_from
from rayserve_moe.execution.card import check_tensors, describe_model
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.state import APPLICATION


def check_models(document: Mapping[str, Any]) -> None:
    """Raise ValueError with the key or file for a value that Serve rejects or a checkpoint that cannot be served."""
    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise StartError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    for application in document["applications"]:
        if application["import_path"] == APPLICATION:
            settings = settings_from(application.get("args") or {})
            check_tensors(open_checkpoint(describe_model(settings).runner.model.path))
