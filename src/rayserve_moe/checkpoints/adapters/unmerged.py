"""Adapters beside the weights: the matrices of a trainer's file as the arrays that programs take."""

# L layers   R rank   I inputs   O outputs

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from rayserve_moe.checkpoints.adapters.additions import Addition
from rayserve_moe.checkpoints.adapters.config import AdapterConfig
from rayserve_moe.checkpoints.adapters.placing import placed_additions
from rayserve_moe.checkpoints.casting import cast
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.names import SpecTree, tensor_places
from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.model.adapters import AdaptedMatrix
from rayserve_moe.model.param_spec import ParamSpec


class HeldPair(NamedTuple):
    """Matrices of an adapter for a parameter, over its layers, padded to the rank of the programs."""

    a_LRI: np.ndarray
    b_LRO: np.ndarray


HeldAdapter = Mapping[tuple[str, str], HeldPair]
"""Pairs of the matrices that an adapter changes, by group and name of the parameter."""


def held_adapter(
    config: AdapterConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    matrices: Iterable[AdaptedMatrix],
    tree: SpecTree,
    rules: Mapping[str, str],
    settings: AdapterSettings,
) -> HeldAdapter:
    """Return the matrices of an adapter in the dtype of the weights; the scale is multiplied into B in float32.

    Raises CheckpointError as `merged_tensors`, for a rank above `max_lora_rank`, and for a tensor of a matrix that
    takes no adapters.
    """
    adapted = {(matrix.group, matrix.name): matrix for matrix in matrices}
    places, held = tensor_places(tree, rules), dict[tuple[str, str], HeldPair]()
    num_used = Counter[tuple[str, str, int]]()
    for name, target, addition in placed_additions(config, tensors, tree=tree, rules=rules):
        for place in places[target.tensor]:
            matrix = adapted.get((place.path[0], place.path[-1]))
            if matrix is None:
                raise CheckpointError(
                    f"tensor {name}: {target.tensor} takes no adapter beside the weights, only attention, dense layers "
                    "and shared experts do: merge the adapter (merge: true, or max_loras: 0)"
                )
            key, layer = (matrix.group, matrix.name), place.stack_index[0]
            pair = held.setdefault(key, _zeros(matrix, settings.compiled_rank))
            rank = addition.a_NRI.shape[1]
            if (last := num_used[*key, layer] + rank) > settings.max_rank:
                raise CheckpointError(f"tensor {name}: rank {last} exceeds max_lora_rank {settings.max_rank}")
            if _fill(pair.a_LRI[layer, last - rank :], pair.b_LRO[layer, last - rank :], addition, spec=place.spec):
                num_used[*key, layer] = last
    return held


def _zeros(matrix: AdaptedMatrix, rank: int) -> HeldPair:
    shape, dtype = (len(matrix.spec.layers), rank), jax.numpy.dtype(matrix.spec.dtype)
    return HeldPair(*(np.zeros((*shape, size), dtype) for size, _ in (matrix.inputs, matrix.outputs)))


def _fill(a_RI: np.ndarray, b_RO: np.ndarray, addition: Addition, *, spec: ParamSpec) -> bool:
    """Write an addition to a tensor into the columns that a parameter holds; return False if it changes none."""
    (from_file_RI,), (from_file_OR,) = addition.a_NRI, addition.b_NOR
    columns = spec.columns_in_file(0, spec.filled_shape[spec.column_dim])
    rows, is_changed = columns, np.ones(len(columns), bool)
    if addition.rows is not None:
        rows = np.searchsorted(addition.rows, columns).clip(max=len(addition.rows) - 1)
        is_changed = addition.rows[rows] == columns
    if not is_changed.any():
        return False
    rank, num_inputs = from_file_RI.shape
    scaled_OR = cast(from_file_OR, np.dtype(np.float32)) * np.float32(addition.scale)
    a_RI[:rank, :num_inputs] = cast(from_file_RI, a_RI.dtype)
    b_RO[:rank, np.flatnonzero(is_changed)] = cast(scaled_OR[rows[is_changed]], b_RO.dtype).T
    return True
