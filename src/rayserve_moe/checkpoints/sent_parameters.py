"""Parameters that are filled tensor by tensor as weights arrive; the rest is copied from the serving weights.

From its first tensor on, this host's share of a parameter is held in host memory, with values ordered as in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rayserve_moe.checkpoints.bucket import SentPiece, WantedTensor
from rayserve_moe.checkpoints.casting import cast
from rayserve_moe.checkpoints.files import CheckpointFiles
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.loader import fill_part
from rayserve_moe.checkpoints.names import SpecTree, TensorPlace, is_ignorable, tensor_places, walk
from rayserve_moe.checkpoints.parts import (
    WeightSource,
    as_held,
    columns_of_piece,
    empty_blocks,
    filled_part,
    parts_of,
    pieces_of,
    region_of,
    regions_of,
    scale_region,
    views_of,
)
from rayserve_moe.checkpoints.pieces import Piece, Region
from rayserve_moe.checkpoints.staged import StagedParameter
from rayserve_moe.kernels.cpu_native.layout import INVERSES, LAYOUTS
from rayserve_moe.model.param_spec import ParamSpec

ParameterPath = tuple[str, ...]
"""Path of a parameter in its tree."""
Stack = tuple[int, ...]
"""Index on the stacked dimensions of a parameter: layer, expert slot."""


@dataclass
class _Filling:
    """A parameter that is being filled."""

    spec: ParamSpec
    devices: dict[Region, list[jax.Device]]
    blocks: dict[Region, list[np.ndarray]]
    """Values, then scales, by region."""
    arrived: dict[Region, set[Stack]] = field(default_factory=dict)
    """Indices that have arrived, by region."""


@dataclass(frozen=True)
class _Sent:
    """The pieces of a tensor that have arrived, as a `pieces.PieceSource`."""

    pieces: Sequence[SentPiece]

    def take(self, piece: Piece) -> np.ndarray:
        sent = _holding(self.pieces, piece[1])
        return sent.values[_relative(piece[1], sent.region)]


class SentParameters:
    """The parameters of an update; values that do not arrive are copied from `serving`.

    `expert_of_slot` [MoE layers, slots] and `serving` must not change before `finished`.
    """

    def __init__(
        self,
        tree: SpecTree,
        *,
        rules: Mapping[str, str],
        ignored: tuple[str, ...],
        sharding_of: Callable[[ParamSpec], jax.sharding.Sharding],
        expert_of_slot: np.ndarray,
        serving: Mapping[str, Any],
    ) -> None:
        self._tree, self._sharding_of, self._serving = tree, sharding_of, serving
        self._source = WeightSource(CheckpointFiles(Path("the update"), {}, {}), rules, expert_of_slot, ignored)
        self._places = tensor_places(tree, rules)
        self._scale_of = {spec.role: (path, spec) for path, spec in walk(tree) if spec.is_scale}
        self._fillings: dict[ParameterPath, _Filling] = {}
        self._regions: dict[ParameterPath, dict[Region, list[jax.Device]]] = {}

    def wanted(self, name: str, shape: tuple[int, ...] | None) -> WantedTensor:
        """Return the regions of a tensor in this host's share; no regions if no parameter needs the tensor.

        A delta has no `shape`. Raises CheckpointError for an unknown name, another shape, or a delta of a quantised
        tensor.
        """
        places = self._places.get(name)
        if places is None:
            if is_ignorable(name, self._tree, rules=self._source.rules, ignored=self._source.ignored):
                return WantedTensor(shape or (), ())
            raise CheckpointError(f"the model has no tensor {name}")
        expected = places[0].spec.file_shape
        if shape is not None and shape != expected:
            raise CheckpointError(f"tensor {name} is {list(shape)}, expected {list(expected)}")
        if shape is None and any(place.spec.is_quantized for place in places):
            raise CheckpointError(f"tensor {name} is served in 8 bits: send it whole, not as a delta")
        regions = dict.fromkeys(
            piece[1]
            for place in places
            for region in self._regions_of(place.path, place.spec)
            for held in self._held(place, region)
            for _, piece in pieces_of(self._source, place.spec, region=held)
        )
        return WantedTensor(expected, tuple(regions))

    def add(self, name: str, pieces: Sequence[SentPiece]) -> None:
        """Store all requested pieces of a tensor. Raises CheckpointError for values that are not finite."""
        for place in self._places.get(name, ()) if pieces else ():
            filling = self._filling_of(place)
            for region, blocks in filling.blocks.items():
                for held in self._held(place, region):
                    self._put(filling, region, held, pieces=pieces, blocks=blocks, path=place.path)

    def finished(self) -> Iterator[tuple[ParameterPath, StagedParameter]]:
        """Yield the parameters with any arrived tensor and their paths; each parameter's memory is released in turn."""
        for path in list(self._fillings):
            filling = self._fillings.pop(path)
            spec = filling.spec
            for region, blocks in filling.blocks.items():
                for held in _stacks(spec, region):
                    if held not in filling.arrived.get(region, ()):
                        self._keep(path, spec, region, held, blocks=blocks)
            dtype = jax.numpy.dtype(spec.dtype)
            shards = tuple(
                (LAYOUTS[spec.layout](blocks[0]).view(dtype), filling.devices[region])
                for region, blocks in filling.blocks.items()
            )
            yield path, StagedParameter(spec, self._sharding_of(spec), shards)
            if spec.is_quantized:
                yield self._scales(spec, filling)

    def _scales(self, matrix: ParamSpec, filling: _Filling) -> tuple[ParameterPath, StagedParameter]:
        path, spec = self._scale_of[matrix.role]
        found = {scale_region(matrix, region): blocks[1] for region, blocks in filling.blocks.items()}
        sharding = self._sharding_of(spec)
        shards = tuple((found[region], devices) for region, devices in regions_of(spec, sharding).items())
        return path, StagedParameter(spec, sharding, shards)

    def _filling_of(self, place: TensorPlace) -> _Filling:
        filling = self._fillings.get(place.path)
        if filling is None:
            devices = self._regions_of(place.path, place.spec)
            blocks = {region: empty_blocks(place.spec, region) for region in devices}
            filling = self._fillings[place.path] = _Filling(place.spec, devices, blocks)
        return filling

    def _regions_of(self, path: ParameterPath, spec: ParamSpec) -> dict[Region, list[jax.Device]]:
        if path not in self._regions:
            self._regions[path] = regions_of(spec, self._sharding_of(spec))
        return self._regions[path]

    def _held(self, place: TensorPlace, region: Region) -> Iterator[Region]:
        """Yield the parts of a region that a tensor fills, one for each index on the stacked dimensions."""
        spec, slots = place.spec, self._source.expert_of_slot
        candidates: list[Sequence[int]] = [range(*bounds) for bounds in region[: spec.num_stacked_dims]]
        if spec.layers:
            candidates[0] = _only(candidates[0], place.stack_index[0])
        if spec.num_experts and not spec.file.has_all_experts and candidates[0]:
            of_slot = slots[place.stack_index[0]] if slots is not None else np.arange(spec.shape[1])
            held = np.flatnonzero(of_slot == place.stack_index[-1])
            candidates[1] = [int(slot) for slot in held if slot in candidates[1]]
        for stack in product(*candidates):
            yield (*((each, each + 1) for each in stack), *region[spec.num_stacked_dims :])

    def _put(
        self,
        filling: _Filling,
        region: Region,
        held: Region,
        *,
        pieces: Sequence[SentPiece],
        blocks: list[np.ndarray],
        path: ParameterPath,
    ) -> None:
        spec, stack = filling.spec, tuple(start for start, _ in held[: filling.spec.num_stacked_dims])
        arrived = filling.arrived.setdefault(region, set())
        if pieces[0].positions is not None and stack not in arrived:
            self._keep(path, spec, region, stack, blocks=blocks)
        for part in parts_of(self._source, spec, region=held):
            views = views_of(blocks, part, region=region)
            if pieces[0].positions is None:
                fill_part(self._source, spec, blocks=views, part=part, reader=_Sent(pieces))
            else:
                _overwrite(self._source, spec, views[0], part=part, pieces=pieces)
        arrived.add(stack)

    def _keep(
        self, path: ParameterPath, spec: ParamSpec, region: Region, stack: Stack, *, blocks: list[np.ndarray]
    ) -> None:
        """Copy the serving weights into an index of a region."""
        serving = _shard(self._serving, path, spec, region)
        at = tuple(index - first for index, (first, _) in zip(stack, region, strict=False))
        values = blocks[0]
        values[at] = INVERSES[spec.layout](serving[at].view(_bits(values))).view(values.dtype)
        if spec.is_quantized:
            scale_path, scale_spec = self._scale_of[spec.role]
            blocks[1][at] = _shard(self._serving, scale_path, scale_spec, scale_region(spec, region))[at]


def _only(candidates: Sequence[int], index: int) -> Sequence[int]:
    return range(index, index + 1) if index in candidates else range(0)


def _bits(values: np.ndarray) -> np.dtype:
    """Return the integer dtype of the same size: numpy copies it without the interpreter lock."""
    return np.dtype(f"i{values.itemsize}")


def _shard(tree: Mapping[str, Any], path: ParameterPath, spec: ParamSpec, region: Region) -> np.ndarray:
    """Return this host's shard of a serving parameter at a region."""
    array: Any = tree
    for key in path:
        array = array[key]
    found = next(shard for shard in array.addressable_shards if region_of(shard.index, spec.shape) == region)
    return np.asarray(found.data)


def _stacks(spec: ParamSpec, region: Region) -> Iterator[Stack]:
    """Return the indices of a region on its parameter's stacked dimensions."""
    return product(*(range(*bounds) for bounds in region[: spec.num_stacked_dims]))


def _relative(region: Region, outer: Region) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, outer, strict=True))


def _overwrite(
    source: WeightSource, spec: ParamSpec, values: np.ndarray, *, part: Region, pieces: Sequence[SentPiece]
) -> None:
    """Store the values of a delta that are in a part of a region."""
    filled = filled_part(spec, part)
    inner = tuple(slice(0, stop - start) for start, stop in filled)
    for place, (_, region) in pieces_of(source, spec, region=part):
        columns = columns_of_piece(spec.columns_in_file(*filled[spec.column_dim]))
        sent, is_sent = (
            as_held(spec, each, columns=columns) for each in _dense(_holding(pieces, region), region, values.dtype)
        )
        values[place + inner].view(_bits(values))[is_sent] = sent.view(_bits(values))[is_sent]


def _holding(pieces: Sequence[SentPiece], region: Region) -> SentPiece:
    """Return the piece that contains a region."""
    return next(
        piece
        for piece in pieces
        if all(
            start >= first and stop <= last for (start, stop), (first, last) in zip(region, piece.region, strict=True)
        )
    )


def _dense(piece: SentPiece, region: Region, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a delta in a region, zeros elsewhere, and the mask of its positions."""
    assert piece.positions is not None, "a delta has positions"
    shape = tuple(stop - start for start, stop in region)
    sent, is_sent = np.zeros(shape, dtype), np.zeros(shape, bool)
    places = np.unravel_index(piece.positions, tuple(stop - start for start, stop in piece.region))
    bounds = _relative(region, piece.region)
    is_in = np.ones(len(piece.positions), bool)
    for at, bound in zip(places, bounds, strict=True):
        is_in &= (at >= bound.start) & (at < bound.stop)
    local = tuple(at[is_in] - bound.start for at, bound in zip(places, bounds, strict=True))
    sent[local], is_sent[local] = cast(piece.values[is_in], dtype), True
    return sent, is_sent
