"""Models that do not exist: the config of a known family with other sizes, for plans and compile checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayserve_moe.checkpoints.files import CONFIG_FILE
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.spec import UnsupportedModelError
from rayserve_moe.tools.plan_slice.made_up_options import SIZES, flag


def resized(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return a config with other sizes; lists with an entry per layer repeat their pattern.

    Raises ValueError for a size that the family does not have, or for sizes that do not fit each other.
    """
    text = dict(config.get("text_config", config))
    for name, value in sizes.items():
        key = next((key for key in SIZES[name].keys if key in text), None)
        if key is None:
            keys = " or ".join(SIZES[name].keys)
            raise ValueError(f"{flag(name)}: a model of the type {text.get('model_type')} has no {keys}")
        if name == "layers":
            text |= _repeated(text, value)
        text[key] = value
    found = {**config, "text_config": text} if "text_config" in config else text
    try:
        spec_from_config(found)
    except (UnsupportedModelError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"these sizes make no model: {error}") from error
    return found


def save_config(config: Mapping[str, Any], folder: str) -> None:
    """Write a config without weights, which `compile-check --model FOLDER` reads."""
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _repeated(text: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the lists of a config with an entry per layer, for `num_layers`."""
    now = text["num_hidden_layers"]
    lists = {key: value for key, value in text.items() if isinstance(value, list) and len(value) == now}
    return {key: [value[layer % now] for layer in range(num_layers)] for key, value in lists.items()}
