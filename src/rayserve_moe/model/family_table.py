"""Table from the architecture in a `config.json` to its family."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rayserve_moe.model import families
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError

FAMILIES: dict[str, ModuleType] = {
    module.ARCHITECTURE: module for module in vars(families).values() if isinstance(module, ModuleType)
}


def family_of(config: Mapping[str, Any]) -> ModuleType:
    """Return the family of a parsed `config.json`.

    Raises: UnsupportedModelError with the supported architectures.
    """
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModelError(
        f"config.json: architectures = {reprlib.repr(architectures)}; supported: {', '.join(sorted(FAMILIES))}"
    )


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a parsed `config.json`."""
    return family_of(config).spec_from_hf(config)
