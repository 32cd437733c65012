"""Table from the architecture in a `config.json` to its family."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

from rayserve_moe.model import families
from rayserve_moe.model.draft_spec import PREDICTION_TENSORS, prediction_rules
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError

FAMILIES: dict[str, ModuleType] = {
    name: module
    for module in vars(families).values()
    if isinstance(module, ModuleType)
    for name in (module.ARCHITECTURE, *getattr(module, "OTHER_ARCHITECTURES", ()))
}


def family_of(config: Mapping[str, Any]) -> ModuleType:
    """Return the family of a parsed `config.json`.

    Raises: UnsupportedModelError with the supported architectures.
    """
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    dense = ": a dense model, and this server is for Mixture-of-Experts models" if _is_dense(config) else ""
    raise UnsupportedModelError(
        f"config.json: architectures = {reprlib.repr(architectures)}{dense}; supported: {', '.join(sorted(FAMILIES))}"
    )


def _is_dense(config: Mapping[str, Any]) -> bool:
    """Return True for the config of a language model that names no experts."""
    own = config.get("text_config", config)
    sizes = own if isinstance(own, Mapping) else config
    return "hidden_size" in sizes and not any("expert" in name for name in sizes)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a parsed `config.json`."""
    return family_of(config).spec_from_hf(config)


def rules_of(config: Mapping[str, Any], names: Collection[str] = ()) -> Mapping[str, str]:
    """Return the tensor names by role of a checkpoint with the tensors `names`.

    They are the family's CHECKPOINT_RULES, or the first of its OTHER_RULES if the tensors have these names.
    """
    family, spec = family_of(config), spec_from_config(config)
    layers = {"expert_down": spec.moe_layer_ids[0]}
    if recurrent := spec.layers_with_mixer("kimi_delta"):
        layers["kda_out"] = recurrent[0]
    if dense := spec.layers_with_ffn("dense"):
        layers["dense_down"] = dense[0]
    return fitting_rules((family.CHECKPOINT_RULES, *getattr(family, "OTHER_RULES", ())), names, layers=layers)


def prediction_rules_of(config: Mapping[str, Any], names: Collection[str] = ()) -> Mapping[str, str]:
    """Return the tensor names by role of the prediction layer of a checkpoint with the tensors `names`.

    They are the first of the family's PREDICTION_RULES that fit. A family without has the layer behind its last layer.
    """
    family = family_of(config)
    if own := getattr(family, "PREDICTION_RULES", ()):
        return fitting_rules(own, names, layers={"expert_down": 0})
    tensors = PREDICTION_TENSORS | getattr(family, "PREDICTION_TENSORS", {})
    return prediction_rules(rules_of(config, names), spec_from_config(config).num_layers, tensors=tensors)


def fitting_rules(
    candidates: Iterable[Mapping[str, str]], names: Collection[str], *, layers: Mapping[str, int]
) -> Mapping[str, str]:
    """Return the first rules by which `names` have the roles of `layers` in these layers; else the first rules."""
    first, *others = candidates

    def is_fitting(rules: Mapping[str, str]) -> bool:
        return all(rules[role].format(layer=layer, expert=0) in names for role, layer in layers.items())

    return next(filter(is_fitting, others), first)
