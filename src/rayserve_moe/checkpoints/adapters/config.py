"""The config of a LoRA adapter: ranks and scales by module, and the kinds of adapters that cannot be merged."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayserve_moe.checkpoints.header import CheckpointError

CONFIG_FILE = "adapter_config.json"
MAX_PATTERN_LENGTH = 256
"""Maximum characters of a pattern of names."""
_REPEATED_GROUP = re.compile(r"\)[*+{]")
"""Matching can double with every character of a name."""
_REPETITION, MAX_REPETITIONS = re.compile(r"(?<![\\(])(?:[*+?]|\{[^}]*\})[?+]?"), 3
"""Matching takes up to the characters of a name to the power of a pattern's repetitions."""
_MAX_RANK = 2**31 - 1
_NEEDS_MORE = {
    "use_dora": "DoRA scales the merged matrices",
    "lora_bias": "biases of adapters are not merged",
    "modules_to_save": "whole modules are not part of an adapter here: send them as weights",
    "trainable_token_indices": "rows of embeddings are not merged",
    "fan_in_fan_out": "the matrices of this model are [out, in]",
    "layer_replication": "layers are not replicated",
    "use_qalora": "QALoRA pools the inputs of its matrices",
    "alora_invocation_tokens": "an activated adapter does not apply to every token",
    "arrow_config": "a routed set of adapters is not merged",
    "use_bdlora": "block-diagonal adapters are not merged",
}
"""Fields that must be absent, null, false or empty, with the reason."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
"""Beginnings of `init_lora_weights` after which the adapter is relative to a changed base."""


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales of an adapter, as PEFT defines them."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    """Ranks that differ, by regular expression of a module's name."""
    alpha_pattern: Mapping[str, float]
    is_rank_stabilized: bool = False
    """True if scales divide by the root of the rank."""
    target_parameters: tuple[str, ...] = ()
    """Ends of the names of parameters that have adapters of their own, such as `mlp.experts.gate_up_proj`."""

    def rank_of(self, name: str) -> int:
        """Return the rank of a module or parameter."""
        return _by_pattern(self.rank_pattern, name, self.rank)

    def scale_of(self, name: str) -> float:
        """Return the factor of the product B A of a module or parameter."""
        rank = self.rank_of(name)
        return _by_pattern(self.alpha_pattern, name, self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )

    def name_of(self, module: str) -> str:
        """Return the name to match against patterns: the module, or its weight if `target_parameters` names that."""
        weight = f"{module}.weight"
        return weight if self.names_parameter(weight) else module

    def names_parameter(self, name: str) -> bool:
        """Return True if `target_parameters` has a parameter."""
        return any(name == target or name.endswith(f".{target}") for target in self.target_parameters)


def adapter_config_of(fields: Mapping[str, Any]) -> AdapterConfig:
    """Read the fields of an `adapter_config.json`.

    Raises CheckpointError with the field for an adapter that is no LoRA, or one that more than W + s B A describes.
    """
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise _fault("peft_type", f"{kind!r} is not LORA")
    for name, reason in _NEEDS_MORE.items():
        if fields.get(name):
            raise _fault(name, reason)
    if fields.get("bias", "none") not in ("none", None):
        raise _fault("bias", "biases are not merged: train with bias none")
    begins = fields.get("init_lora_weights")
    if isinstance(begins, str) and begins.lower().startswith(_CHANGES_BASE):
        raise _fault(
            "init_lora_weights", f"{begins!r} changes the base weights: convert the adapter to plain LoRA first"
        )
    return AdapterConfig(
        _rank(fields.get("r"), "r"),
        _alpha(fields.get("lora_alpha"), "lora_alpha"),
        {pattern: _rank(value, "rank_pattern") for pattern, value in _patterns(fields, "rank_pattern")},
        {pattern: _alpha(value, "alpha_pattern") for pattern, value in _patterns(fields, "alpha_pattern")},
        is_rank_stabilized=_flag(fields.get("use_rslora"), "use_rslora"),
        target_parameters=_names(fields, "target_parameters"),
    )


def _by_pattern(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches whole trailing parts of a name."""
    return next((value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", name)), otherwise)


def _patterns(fields: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    found = fields.get(key) or {}
    if not isinstance(found, Mapping):
        raise _fault(key, "should map names to numbers")
    for pattern in found:
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise _fault(key, f"a pattern is longer than {MAX_PATTERN_LENGTH} characters")
        if _REPEATED_GROUP.search(pattern):
            raise _fault(key, f"{pattern!r} repeats a group, which may take longer than anyone waits")
        if len(_REPETITION.findall(pattern)) > MAX_REPETITIONS:
            raise _fault(key, f"{pattern!r} has more than {MAX_REPETITIONS} repetitions (* + ? {{}})")
        try:
            re.compile(pattern)
        except re.error as error:
            raise _fault(key, f"{pattern!r} is no regular expression: {error}") from error
    return list(found.items())


def _names(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = fields.get(key) or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _fault(key, "should be a list of names")
    return tuple(found)


def _rank(value: Any, key: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise _fault(key, f"{value!r} is no rank: a positive integer")
    return value


def _alpha(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise _fault(key, f"{value!r} is no number")
    return float(value)


def _flag(value: Any, key: str) -> bool:
    if value is not None and type(value) is not bool:
        raise _fault(key, f"{value!r} is neither true nor false")
    return bool(value)


def _fault(key: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG_FILE}: {key}: {reason}")
