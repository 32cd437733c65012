"""Placement files: an expert placement as JSON, for a server to start from or to switch to.

    {"num_experts": 128, "ep_size": 8, "weight_version": "7",
     "expert_of_slot": [[...], ...], "share_of_slot": [[...], ...]}

The lists have a row per layer with experts and an entry per slot. Without `share_of_slot` the slots of an expert take
equal parts of its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, placement_from

SHARE_DIGITS = 6


def placement_as_json(placement: ExpertPlacement, *, weight_version: str = "") -> dict[str, Any]:
    """Return the content of a placement file."""
    return {
        "num_experts": placement.num_experts,
        "ep_size": placement.ep_size,
        "weight_version": weight_version,
        "expert_of_slot": placement.expert_of_slot.tolist(),
        "share_of_slot": np.round(placement.share_of_slot.astype(np.float64), SHARE_DIGITS).tolist(),
    }


def placement_in(content: Any) -> ExpertPlacement:
    """Return the placement of a file's content. Raises PlacementError with the field or condition that is violated."""
    if not isinstance(content, Mapping):
        raise PlacementError("a placement is a JSON object")
    num_experts, ep_size = (content.get(name) for name in ("num_experts", "ep_size"))
    if type(num_experts) is not int or type(ep_size) is not int or num_experts < 1 or ep_size < 1:
        raise PlacementError("num_experts and ep_size are not positive whole numbers")
    experts = _numbers(content, "expert_of_slot", kinds="iu")
    if experts is None:
        raise PlacementError("expert_of_slot is missing")
    shares = _numbers(content, "share_of_slot", kinds="fiu")
    if shares is not None and shares.shape != experts.shape:
        raise PlacementError(f"share_of_slot has shape {shares.shape}, expert_of_slot {experts.shape}")
    return placement_from(experts, shares, num_experts=num_experts, ep_size=ep_size)


def read_placement(file: str | Path) -> ExpertPlacement:
    """Read a placement file. Raises PlacementError, with its name, if it does not hold a placement."""
    try:
        return placement_in(json.loads(Path(file).read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise PlacementError(f"{file}: {error}") from error


def write_placement(file: str | Path, placement: ExpertPlacement, *, weight_version: str = "") -> None:
    """Write a placement file."""
    Path(file).write_text(json.dumps(placement_as_json(placement, weight_version=weight_version)) + "\n")


def _numbers(content: Mapping[str, Any], name: str, *, kinds: str) -> np.ndarray | None:
    """Return a table of a placement file; None if it is absent."""
    value = content.get(name)
    if value is None:
        return None
    try:
        table = np.array(value)
    except ValueError as error:  # rows of different lengths
        raise PlacementError(f"{name} is not a table of numbers: {error}") from error
    if table.ndim != 2 or not table.size or table.dtype.kind not in kinds:
        raise PlacementError(f"{name} is not a table of numbers")
    return table
