"""The pairs of matrices in an adapter's tensors, by the module that they adapt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.checkpoints.header import CheckpointError

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_REFUSED = {
    "lora_magnitude_vector": "DoRA scales the merged matrices: only LoRA is merged",
    "lora_embedding_": "adapters of embeddings are not merged",
    "embed_tokens": "adapters of embeddings are not merged",
    "modules_to_save": "whole modules are not part of an adapter here: send them as weights",
    ".bias": "biases of adapters are not merged",
}
"""Parts of names that are rejected, with the reason."""


class Pair(NamedTuple):
    """Matrices A and B of a module, as files hold them."""

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True)
class AdapterPart:
    """A pair with the module that it adapts."""

    module: str
    """Name of the module without the prefix of PEFT, as in `model.layers.0.self_attn.q_proj`."""
    name: str
    """Name of the tensor A, for messages."""
    pair: Pair


def parts_of_adapter(tensors: Mapping[str, np.ndarray]) -> list[AdapterPart]:
    """Pair the tensors of an adapter by module.

    Raises CheckpointError with the name of a tensor that is no A or B of LoRA, or that lacks its other half.
    """
    if not tensors:
        raise CheckpointError("the adapter has no tensors")
    sides: dict[str, dict[str, str]] = {}
    for name in tensors:
        reason = next((reason for part, reason in _REFUSED.items() if part in name), "")
        found = None if reason else _KEY.fullmatch(name)
        if found is None:
            raise CheckpointError(f"tensor {name}: {reason or 'not a lora_A or lora_B of a module'}")
        names = sides.setdefault(found[1], {})
        if found[2] in names:
            raise CheckpointError(f"tensor {name}: {names[found[2]]} is of the same module")
        names[found[2]] = name
    return [_part(module, names, tensors) for module, names in sides.items()]


def _part(module: str, names: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> AdapterPart:
    if len(names) < 2:
        (side, name), other = next(iter(names.items())), "B" if "A" in names else "A"
        raise CheckpointError(f"tensor {name}: lora_{side} of {module} comes without its lora_{other}")
    return AdapterPart(module, names["A"], Pair(tensors[names["A"]], tensors[names["B"]]))
