"""Adapters beside the weights: the matrices of a trainer's file as the arrays that programs take."""

# L layers   R rank   I inputs   O outputs   E experts

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from rayserve_moe.checkpoints.adapters.additions import Addition
from rayserve_moe.checkpoints.adapters.config import AdapterConfig
from rayserve_moe.checkpoints.adapters.placing import placed_additions
from rayserve_moe.checkpoints.casting import cast, is_finite
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.names import SpecTree, TensorPlace, tensor_places
from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.model.adapters import AdaptedMatrix
from rayserve_moe.model.param_spec import ParamSpec


class HeldPair(NamedTuple):
    """Matrices of an adapter for a parameter, over its layers, padded to the rank of the programs.

    Those of experts are [L, E, R, I] and [L, E, R, O], but for the part that the experts share.
    """

    a_LRI: np.ndarray
    """A; [L, E, R, I] for experts."""
    b_LRO: np.ndarray
    """B times the scale; [L, E, R, O] for experts."""


HeldAdapter = Mapping[tuple[str, str], HeldPair]
"""Pairs of the matrices that an adapter changes, by group and name of the parameter."""


def held_adapter(  # noqa: PLR0913 (keyword arguments that vary by call)
    config: AdapterConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    matrices: Iterable[AdaptedMatrix],
    tree: SpecTree,
    rules: Mapping[str, str],
    settings: AdapterSettings,
    dtype: str,
) -> HeldAdapter:
    """Return the matrices of an adapter in the model's dtype; the scale is multiplied into B in float32.

    Raises CheckpointError as `merged_tensors`, for a rank above `max_lora_rank`, for a tensor of a matrix that takes no
    adapters, and for experts that differ in the part that they share.
    """
    adapted = {(matrix.group, matrix.name): matrix for matrix in matrices}
    places, held = tensor_places(tree, rules), dict[tuple[str, str], HeldPair]()
    num_used = Counter[tuple[tuple[str, str], tuple[int, ...]]]()
    num_shared = Counter[tuple[tuple[str, str], int]]()
    for name, target, addition in placed_additions(config, tensors, tree=tree, rules=rules):
        for place in places[target.tensor]:
            matrix = adapted.get((place.path[0], place.path[-1]))
            if matrix is None:
                raise CheckpointError(f"tensor {name}: {target.tensor} {_unsupported(place.spec)}")
            columns = _Columns.of(addition, place.spec)
            if not columns.held.size:
                continue
            key, rank = (matrix.group, matrix.name), addition.a_NRI.shape[1]
            pair = held.setdefault(key, _zeros(matrix, settings.compiled_rank, dtype))
            for at, number in _pieces(place, addition):
                if (last := num_used[key, at] + rank) > settings.max_rank:
                    raise CheckpointError(f"tensor {name}: rank {last} exceeds max_lora_rank {settings.max_rank}")
                filled = _filled(pair, at, slice(last - rank, last), addition, number=number, columns=columns)
                if not all(is_finite(half.after) for half in filled):
                    raise CheckpointError(f"tensor {name}: A or s B is not finite in {dtype}")
                if matrix.shared_part is not None:
                    _check_shared(filled[matrix.shared_part], num_shared[key, at[0]] - last + rank, name)
                    num_shared[key, at[0]] = max(num_shared[key, at[0]], last)
                num_used[key, at] = last
    return held


def _unsupported(spec: ParamSpec) -> str:
    """Return why a parameter takes no adapter, and what to do instead."""
    if spec.num_experts:
        return "is of experts, which take no adapter beside the weights: set lora_experts, or merge it (merge: true)"
    return (
        "takes no adapter beside the weights, only attention, dense layers and experts do: merge the adapter "
        "(merge: true, or max_loras: 0)"
    )


def _zeros(matrix: AdaptedMatrix, rank: int, dtype: str) -> HeldPair:
    def zeros(part: int, size: int) -> np.ndarray:
        experts = (matrix.spec.num_experts,) if matrix.slots(part) else ()
        return np.zeros((len(matrix.spec.layers), *experts, rank, size), jax.numpy.dtype(dtype))

    return HeldPair(zeros(0, matrix.inputs[0]), zeros(1, matrix.outputs[0]))


def _pieces(place: TensorPlace, addition: Addition) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each changed matrix: its index (layer,) or (layer, expert), and its number in the addition."""
    if not place.spec.num_experts or not place.spec.file.has_all_experts:
        yield place.stack_index, 0
    elif addition.expert is not None:
        yield (*place.stack_index, addition.expert), 0
    else:
        for expert in range(place.spec.num_experts):
            yield (*place.stack_index, expert), expert


class _Columns(NamedTuple):
    """Columns of a parameter that an addition changes."""

    held: np.ndarray
    """Indices in the parameter, ascending."""
    rows: np.ndarray
    """Output of the addition for each of these columns."""

    @classmethod
    def of(cls, addition: Addition, spec: ParamSpec) -> _Columns:
        columns = spec.columns_in_file(0, spec.filled_shape[spec.column_dim])
        if addition.rows is None:
            return cls(np.arange(len(columns)), columns)
        rows = np.searchsorted(addition.rows, columns).clip(max=len(addition.rows) - 1)
        held = np.flatnonzero(addition.rows[rows] == columns)
        return cls(held, rows[held])


class _Filled(NamedTuple):
    """Ranks of a pair that were written, before and after: [r, I] or [r, O]."""

    before: np.ndarray
    after: np.ndarray


def _filled(
    pair: HeldPair, at: tuple[int, ...], ranks: slice, addition: Addition, *, number: int, columns: _Columns
) -> tuple[_Filled, _Filled]:
    """Write matrix `number` of an addition into A and B of a pair; return the written ranks of A and of B.

    An addition whose experts share a matrix has only one.
    """
    from_file_RI = addition.a_NRI[number % len(addition.a_NRI)]
    from_file_OR = addition.b_NOR[number % len(addition.b_NOR)][columns.rows]
    own_RI, own_RO = (array[at[: array.ndim - 2]][ranks] for array in pair)
    before = own_RI.copy(), own_RO.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        scaled_OR = cast(from_file_OR, np.dtype(np.float32)) * np.float32(addition.scale)
        own_RI[:, : from_file_RI.shape[1]] = cast(from_file_RI, own_RI.dtype)
        own_RO[:, columns.held] = cast(scaled_OR, own_RO.dtype).T
    return _Filled(before[0], own_RI), _Filled(before[1], own_RO)


def _check_shared(filled: _Filled, num_before: int, name: str) -> None:
    """Raise CheckpointError if an expert changed the `num_before` ranks that another had written before."""
    num = max(num_before, 0)
    if not np.array_equal(filled.before[:num], filled.after[:num]):
        raise CheckpointError(
            f"tensor {name}: experts of a layer differ in A of gate or up or in B of down, which they share by "
            "lora_shared_outer"
        )
