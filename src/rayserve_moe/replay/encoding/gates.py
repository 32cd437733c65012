"""Router gates in answers and requests: base64 of little-endian float32 [rows, MoE layers, k], and their description.

Gates have the order of the ids in their row. Only the binary dialect can express missing rows: it carries the others as
an array of the container.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayserve_moe.replay.encoding.ranges import missing_ranges
from rayserve_moe.replay.encoding.wire_rows import from_base64, read_shape, to_base64
from rayserve_moe.requests.records import GATES, GateScale, RoutedExperts, RoutingLayout
from rayserve_moe.requests.row_parts import are_known, known_part

NAME = "router_gates"
DTYPE = np.dtype("<f4")
_SCORES = ("softmax", "sigmoid")


def gates_of(routing: RoutedExperts) -> np.ndarray:
    """Return gates, float32 [N, MoE layers, k]; NaN for a row that is missing or was not captured with them."""
    gates = known_part(routing, GATES)
    return np.full(routing.rows.shape, np.nan, DTYPE) if gates is None else gates


def known_gates(routing: RoutedExperts) -> np.ndarray:
    """Return the gates of known rows, which a container carries."""
    gates = gates_of(routing)
    return gates[are_known(gates)]


def encode(routing: RoutedExperts) -> str | None:
    """Return gates in base64, or None if any is missing."""
    gates = gates_of(routing)
    return to_base64(gates.astype(DTYPE, copy=False)) if are_known(gates).all() else None


def describe(routing: RoutedExperts, *, layout: RoutingLayout, scale: GateScale) -> dict[str, Any]:
    """Return `router_gates_info`: shape, scale, checksum, missing rows and versions.

    The checksum covers the C-order bytes; it is None if a row is missing.
    """
    gates = gates_of(routing)
    is_known = are_known(gates)
    return {
        "shape": list(gates.shape),
        "dtype": "float32",
        "start": routing.start,
        "layer_ids": list(layout.layer_ids),
        "score": scale.score,
        "normalized": scale.is_normalized,
        "scale": scale.scale,
        "expert_factors": scale.has_expert_factors,
        "crc32": checksum(gates) if is_known.all() else None,
        "missing": [list(entry) for entry in missing_ranges(is_known, routing.start)],
        "weight_version": [list(entry) for entry in routing.weight_version],
    }


def checksum(gates: np.ndarray) -> int:
    """Return the crc32 of gates: C order, little-endian."""
    return zlib.crc32(np.ascontiguousarray(gates, DTYPE).tobytes())


def with_gates(routing: RoutedExperts, value: object, *, info: Mapping[str, Any]) -> RoutedExperts:
    """Return the routing with the gates of its positions, from text or from the array of a container.

    Raises: ValueError if they do not match their description, do not cover the rows, or are null because some are
    missing.
    """
    shape, start = read_shape(info.get("shape")), info.get("start")
    if shape is None or type(start) is not int or shape[1:] != routing.rows.shape[1:]:
        raise ValueError("router_gates_info has no start, or another shape than the rows")
    if value is None:
        raise ValueError(f"router_gates misses rows: {info.get('missing')}")
    gates = _at_positions(value, info, shape) if isinstance(value, np.ndarray) else _read(value, shape)
    if info.get("crc32") is not None and checksum(gates) != info["crc32"]:
        raise ValueError("router_gates does not match the crc32 in router_gates_info: gates were altered")
    first = routing.start - start
    if first < 0 or len(gates) < first + len(routing.rows):
        raise ValueError("router_gates does not have the positions of routed_experts")
    return replace(routing, parts={**routing.parts, GATES: gates[first : first + len(routing.rows)]})


def scale_in(info: Mapping[str, Any]) -> GateScale:
    """Return the scale of a description. Raises ValueError if it has none."""
    score, scale = info.get("score"), info.get("scale")
    is_normalized, has_factors = info.get("normalized"), info.get("expert_factors")
    if score not in _SCORES or type(scale) not in (int, float):
        raise ValueError("router_gates_info has no score and scale")
    if type(is_normalized) is not bool or type(has_factors) is not bool:
        raise ValueError("router_gates_info does not have normalized and expert_factors")
    return GateScale(str(score), is_normalized, float(scale or 0), has_factors)


def _read(value: object, shape: tuple[int, int, int]) -> np.ndarray:
    raw = from_base64(value, NAME)
    if len(raw) != DTYPE.itemsize * int(np.prod(shape)):
        raise ValueError("router_gates_info has another shape than the gates")
    return np.frombuffer(raw, DTYPE).reshape(shape)


def _at_positions(known: np.ndarray, info: Mapping[str, Any], shape: tuple[int, int, int]) -> np.ndarray:
    """Return the gates of a container at their positions, with NaN for missing rows."""
    missing = info.get("missing")
    if not isinstance(missing, list) or known.shape[1:] != shape[1:]:
        raise ValueError("router_gates_info has another shape than the gates")
    if not missing and len(known) == shape[0]:
        return known
    is_known = np.ones(shape[0], np.bool_)
    for first, last in missing:
        is_known[first - info["start"] : last - info["start"]] = False
    if np.count_nonzero(is_known) != len(known):
        raise ValueError("router_gates_info has another shape than the gates")
    gates = np.full(shape, np.nan, DTYPE)
    gates[is_known] = known
    return gates


def decode_each_forced_gates(
    value: object, forced: Sequence[RoutedExperts | None], *, is_batch: bool
) -> list[RoutedExperts | None]:
    """Add the gates of `forced_router_gates` to the forced routing of every prompt.

    Each is an array [rows, MoE layers, k] or the field of an answer, and has a gate for each id of the routing.
    Raises ValueError for another form.
    """
    if value is None:
        return list(forced)
    each = value if is_batch else [value] * len(forced)
    if not isinstance(each, list | tuple) or len(each) != len(forced):
        raise ValueError("should be a list with one entry, or null, per prompt")
    return [
        routing if entry is None else _with_forced(entry, routing) for entry, routing in zip(each, forced, strict=True)
    ]


def _with_forced(value: object, routing: RoutedExperts | None) -> RoutedExperts:
    if routing is None:
        raise ValueError("needs forced_routed_experts for the same positions")
    shape = routing.rows.shape
    if not isinstance(value, np.ndarray):
        raw = from_base64(value, NAME)
        if len(raw) != DTYPE.itemsize * int(np.prod(shape)):
            raise ValueError(f"must hold float32 of shape {list(shape)}")
        value = np.frombuffer(raw, DTYPE).reshape(shape)
    if value.shape != shape or value.dtype.kind != "f":
        raise ValueError(f"must hold floats of shape {list(shape)}, found {list(value.shape)}")
    with np.errstate(over="ignore"):
        gates = value.astype(np.float32)
    if not np.isfinite(gates).all():
        raise ValueError("must hold finite numbers")
    return replace(routing, parts={**routing.parts, GATES: gates})


def extract_router_gates_from_meta_info(answer: Mapping) -> np.ndarray:
    """Return the gates of an answer, float32 [rows, MoE layers, k], in the order of the ids of `routed_experts`.

    `answer` is an object of a `/generate` answer, a choice of another route, or a result of `Engine.generate`.

    Raises: ValueError if the answer has none, misses some, or they do not match their description.
    """
    meta_info = answer.get("meta_info", answer)
    info = meta_info.get("router_gates_info")
    if not isinstance(info, Mapping):
        raise ValueError("meta_info has no router_gates: set return_router_gates=true in the request")
    shape = read_shape(info.get("shape"))
    if shape is None:
        raise ValueError("router_gates_info has no shape")
    rows = RoutedExperts(np.zeros(shape, np.uint8), int(info.get("start", 0)))
    gates = gates_of(with_gates(rows, meta_info.get(NAME), info=info))
    if not are_known(gates).all():
        raise ValueError(f"router_gates misses rows: {info.get('missing')}")
    return gates
