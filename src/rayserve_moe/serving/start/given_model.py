"""The Serve config of a model that was named on the command line, with settings as options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.state import APPLICATION

_SUFFIXES = (".yaml", ".yml", ".json")
_LISTENING = {"host": "127.0.0.1", "port": 8000}


def is_config(name: str) -> bool:
    """Whether a name on the command line is that of a file, and not a model's."""
    return name.endswith(_SUFFIXES) or Path(name).is_file()


def config_of_model(model: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the config that serves a model. StartError for what is no option, and for one that is given twice.

    `--host` and `--port` say where it listens; all others are settings, `--dp-size 2` or `--dp-size=2` for `dp_size`,
    and `--name` alone for true. Settings are checked with the config.
    """
    given: dict[str, Any] = {}
    for name, value in _pairs(options):
        if name in given or name == "model_path":
            raise StartError(f"--{name.replace('_', '-')} is given twice")
        given[name] = value
    http = {name: given.pop(name, default) for name, default in _LISTENING.items()}
    application = {
        "name": "model",
        "route_prefix": "/",
        "import_path": APPLICATION,
        "args": {"model_path": model, **given},
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": http,
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }


def _pairs(options: Sequence[str]) -> Iterator[tuple[str, Any]]:
    left = list(options)
    while left:
        option, is_joined, value = left.pop(0).partition("=")
        if not option.startswith("--") or len(option) < 3:
            raise StartError(f"{option}: options begin with --, and follow the model")
        if not is_joined:
            value = left.pop(0) if left and not left[0].startswith("--") else "true"
        try:
            yield option[2:].replace("-", "_"), yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise StartError(f"{option}: {' '.join(str(error).split())}") from error
