"""Model configs without weights: from a directory, a URL, the Hub, or the presets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayserve_moe.checkpoints.files import CONFIG_FILE, CheckpointError
from rayserve_moe.checkpoints.files import read_config as read_remote
from rayserve_moe.config.given_files import GivenFileError, is_url, read_json_object
from rayserve_moe.config.model_names import PRESETS, hub_model, preset_names
from rayserve_moe.model.family_table import spec_from_config

LAYER_LISTS = ("hybrid_override_pattern", "layers_block_type")
"""Keys that give the kind of each layer, and alone the number of layers."""


class PresetError(ValueError):
    """A model whose config cannot be read; the message names the alternatives."""


def read_config(model: str, *, num_layers: int = 0) -> dict[str, Any]:
    """Return the parsed `config.json` of a preset, a directory, a URL or a model of the Hub.

    `num_layers` > 0 keeps only the first layers. Raises PresetError if `model` is none of these, the file is not a JSON
    object, or it has fewer layers.
    """
    config = _remote_config(model) or _local_config(model)
    return cut_to(config, num_layers) if num_layers else config


def _remote_config(model: str) -> dict[str, Any]:
    """Return the config of a URL or a model of the Hub; empty for a preset or a local path."""
    if model in preset_names():
        return {}
    try:
        return read_remote(model) if is_url(model) or hub_model(model) else {}
    except (CheckpointError, GivenFileError) as error:
        raise PresetError(f"no preset ({', '.join(preset_names())}), and {error}") from error


def _local_config(model: str) -> dict[str, Any]:
    path = PRESETS / f"{model}.json" if model in preset_names() else Path(model).expanduser() / CONFIG_FILE
    try:
        return read_json_object(path, allows_infinity=True)
    except GivenFileError as error:
        if path.exists():
            raise PresetError(f"{path}: {error}") from error
        names = ", ".join(preset_names())
        raise PresetError(f"{model} is neither a preset ({names}) nor a directory with {CONFIG_FILE}") from error


def cut_to(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a model's config with only its first layers. Raises PresetError if it has fewer."""
    if num_layers > (available := spec_from_config(config).num_layers):
        raise PresetError(f"the model has {available} layers, {num_layers} are requested")
    lists = {key: config[key][:num_layers] for key in LAYER_LISTS if config.get(key) is not None}
    first = {**lists, "num_hidden_layers": num_layers}
    if "text_config" not in config:
        return {**config, **first}
    return {**config, "text_config": {**config["text_config"], **first}}
