"""The config of a model to look at without its weights: a directory's own, or one of the presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rayserve_moe.checkpoints.files import CONFIG_FILE

PRESETS = Path(__file__).parents[1] / "model" / "presets"


class PresetError(ValueError):
    """A model whose config cannot be read; the message names it and what there is."""


def preset_names() -> list[str]:
    """Names of the models whose configs come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_config(model: str, *, num_layers: int = 0) -> dict[str, Any]:
    """The parsed `config.json` of a preset or of a directory; `num_layers` > 0 keeps only that many of its layers.

    PresetError where `model` is neither, the file is no JSON object, or it has fewer layers.
    """
    path = PRESETS / f"{model}.json" if model in preset_names() else Path(model).expanduser() / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(preset_names())
        raise PresetError(f"{model} is neither a preset ({names}) nor a directory with {CONFIG_FILE}") from error
    except ValueError as error:
        raise PresetError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise PresetError(f"{path}: expected a JSON object")
    if num_layers:
        if num_layers > config.get("num_hidden_layers", num_layers):
            raise PresetError(f"{model} has {config['num_hidden_layers']} layers, {num_layers} are asked for")
        config["num_hidden_layers"] = num_layers
    return config
