"""Rollouts as a trainer reads them: columns of numpy views into the files, one view per sample."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayserve_moe.replay.encoding.description import checksum
from rayserve_moe.replay.encoding.gates import DTYPE
from rayserve_moe.replay.encoding.index import over_sparse_layers
from rayserve_moe.replay.index_rows import unpacked_rows
from rayserve_moe.requests.columns import Ragged
from rayserve_moe.requests.records import GATES, INDEX, GateScale, IndexLayout, RoutedExperts
from rayserve_moe.rollouts.schema import SCHEMA
from rayserve_moe.rollouts.shards import ROLLOUTS, ShardError, altered_shards, damaged_shards, shard_files

_ROUTING = ("routing", "routing_shape", "routing_dtype")


def load(path: str | Path, *, columns: Sequence[str] | None = None, verify: bool = True) -> Rollouts:
    """Read the rollouts of a job's directory, or of a single shard; `columns` of the schema, by default all.

    `columns=["routing"]` also reads the columns of its shape. Shards are read on several cores and keep their order.
    `verify` first compares each shard with the checksum in its name, which reads all of its bytes once. Raises
    ValueError if no shard or no such column exists, ShardError with the names of damaged shards.
    """
    path = Path(path)
    files = [path] if path.is_file() else shard_files(path / ROLLOUTS) or shard_files(path)
    if not files:
        raise ValueError(f"{path}: no shards of rollouts")
    wanted = None if columns is None else list(columns)
    if wanted is not None and "routing" in wanted:
        wanted += [name for name in _ROUTING if name not in wanted]
    if verify and (damaged := altered_shards(files)):
        raise ShardError(f"damaged shards, their bytes do not match their names: {', '.join(map(str, damaged))}")
    try:
        return Rollouts(pq.read_table(files, columns=wanted, schema=SCHEMA, memory_map=True, partitioning=None))
    except (pa.ArrowException, OSError) as error:
        named = ", ".join(map(str, damaged_shards(files)))
        raise ShardError(f"damaged shards: {named}" if named else f"{path}: {error}") from error


class Rollouts:
    """Samples in the order they were written, by column; a column is built at its first use.

    Lists have an entry per sample. Their arrays are read-only views. `table` is the Arrow table.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    @cached_property
    def prompt_id(self) -> list[str]:
        return self.table["prompt_id"].to_pylist()

    @cached_property
    def sample_index(self) -> np.ndarray:
        """int32 [samples]."""
        return self.table["sample_index"].to_numpy()

    @cached_property
    def weight_version(self) -> list[str]:
        """Weight versions that samples were answered under; `routed_experts` has the versions of routing rows."""
        return self.table["weight_version"].to_pylist()

    @cached_property
    def prompt_fields(self) -> list[dict[str, Any]]:
        """Other fields of the prompt's row (`answer`, ...), per sample."""
        return [json.loads(text or "{}") for text in self.table["prompt_fields"].to_pylist()]

    @cached_property
    def prompt_ids(self) -> list[np.ndarray]:
        """int32 [prompt tokens] each."""
        return list(_list_views(self.table["prompt_ids"]))

    @cached_property
    def output_ids(self) -> list[np.ndarray]:
        """int32 [output tokens] each."""
        return list(_list_views(self.table["output_ids"]))

    @cached_property
    def logprobs(self) -> list[np.ndarray]:
        """float32 [output tokens] each."""
        return list(_list_views(self.table["logprobs"]))

    @cached_property
    def routing(self) -> list[np.ndarray | None]:
        """Expert ids, uint8 or uint16 [prompt + output tokens - 1, MoE layers, k] each; None without routing.

        Rows named by `routing_missing` hold no data.
        """
        names = self.table["routing_dtype"].to_pylist()
        dtypes = {name: np.dtype(name).newbyteorder("<") for name in set(names) - {None}}
        views = zip(_binary_views(self.table["routing"]), _list_views(self.table["routing_shape"]), names, strict=True)
        return [
            None if raw is None else raw.view(dtypes[name]).reshape(shape.tolist())  # reshape is slow with arrays
            for raw, shape, name in views
        ]

    @cached_property
    def routing_missing(self) -> list[tuple[tuple[int, int], ...]]:
        """Ranges [first, last) of missing rows, per sample."""
        return [_ranges(entries) for entries in self.table["routing_missing"].to_pylist()]

    @cached_property
    def routing_versions(self) -> list[tuple[tuple[int, int, str], ...]]:
        """Ranges [first, last) of rows and the weight version that they were computed under, per sample."""
        return [_ranges(entries) for entries in self.table["routing_weight_version"].to_pylist()]

    def routed_experts(self, sample: int) -> RoutedExperts | None:
        """Return a sample's routing with its index rows and gates, if any, after verifying their checksums.

        Raises: ValueError if rows were altered.
        """
        rows = self.routing[sample]
        if rows is None:
            return None
        names = ("routing_crc32", "routing_missing", "routing_source", "routing_weight_version")
        crc32, missing, source, version = (self.table[name][sample].as_py() for name in names)
        if crc32 is not None and checksum(rows) != crc32:
            raise ValueError(f"sample {sample}: rows of routing were altered")
        found = {INDEX: self._packed_index(sample), GATES: self._gates(sample, rows.shape)}
        parts = {name: values for name, values in found.items() if values is not None}
        return RoutedExperts(rows, 0, _ranges(missing), _ranges(source), _ranges(version), parts)

    def _gates(self, sample: int, shape: tuple[int, ...]) -> np.ndarray | None:
        if "gates" not in self.table.column_names:
            return None
        raw, crc32 = (self.table[name][sample].as_py() for name in ("gates", "gates_crc32"))
        if raw is None:
            return None
        if zlib.crc32(raw) != crc32:
            raise ValueError(f"sample {sample}: gates were altered")
        return np.frombuffer(raw, DTYPE).reshape(shape)

    def index_rows(self, sample: int) -> np.ndarray | None:
        """Return a sample's index rows [N, layers with sparse attention, top_k]; None without any.

        Raises: ValueError if rows were altered, or are missing.
        """
        packed, layout = self._packed_index(sample), index_layout_of(self, sample)
        if packed is None or layout is None:
            return None
        if (missing := np.array([row is None for row in packed])).any():
            raise ValueError(f"sample {sample}: {missing.sum()} index rows are missing")
        rows = unpacked_rows(packed, num_layers=len(layout.layer_ids), top_k=layout.top_k)
        return over_sparse_layers(rows, layout)

    def _packed_index(self, sample: int) -> np.ndarray | None:
        """Return packed index rows, object [N] with None for a missing row; ValueError if they were altered."""
        if "index_rows" not in self.table.column_names:
            return None
        raw, lengths, crc32 = (
            self.table[name][sample].as_py() for name in ("index_rows", "index_row_bytes", "index_crc32")
        )
        if raw is None:
            return None
        if zlib.crc32(raw) != crc32 or sum(lengths) != len(raw):
            raise ValueError(f"sample {sample}: index rows were altered")
        packed, ends = np.full(len(lengths), None, object), itertools.accumulate(lengths)
        for place, (last, length) in enumerate(zip(ends, lengths, strict=True)):
            packed[place] = raw[last - length : last] if length else None
        return packed


def index_layout_of(rollouts: Rollouts, sample: int) -> IndexLayout | None:
    """Return the layout of a sample's index rows; None without any."""
    names = ("index_layer_ids", "sparse_layer_ids", "index_top_k", "index_block_size")
    own, sparse, top_k, size = (rollouts.table[name][sample].as_py() for name in names)
    return None if top_k is None else IndexLayout(tuple(own), tuple(sparse), top_k, block_size=size)


class Decisions(NamedTuple):
    """Decisions of a sample beside its rows; None for those that were not requested."""

    router_gates: np.ndarray | None
    """float32 [N, MoE layers, k] in the order of rows; NaN for a missing row."""
    gate_scale: GateScale | None
    sampling_mask: Ragged | None
    """Ids that each output could have had, int32."""
    sampling_logprobs: np.ndarray | None
    """Log-probs of outputs among these ids, float32."""
    drafted: np.ndarray | None
    """bool: True for outputs that are accepted drafts."""


def decisions_of(rollouts: Rollouts, sample: int) -> Decisions:
    """Return the decisions of a sample. Raises ValueError if gates were altered."""
    names = ("gates_score", "gates_normalized", "gates_scale", "gates_expert_factors")
    score, is_normalized, scale, has_factors = (rollouts.table[name][sample].as_py() for name in names)
    routing, mask = rollouts.routed_experts(sample), rollouts.table["sampling_mask"][sample].values
    if mask is not None:
        offsets = mask.offsets.to_numpy()
        mask = Ragged(np.diff(offsets), mask.values.to_numpy()[offsets[0] : offsets[-1]])
    per_output = (rollouts.table[name][sample].values for name in ("sampling_logprobs", "drafted"))
    return Decisions(
        None if routing is None else routing.gates,
        None if score is None else GateScale(score, is_normalized, scale, has_factors),
        mask,
        *(None if values is None else values.to_numpy(zero_copy_only=False) for values in per_output),
    )


def _list_views(column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    for chunk in column.chunks:
        values = chunk.values.to_numpy()
        offsets = chunk.offsets.to_pylist()
        yield from (values[first:last] for first, last in itertools.pairwise(offsets))


def _binary_views(column: pa.ChunkedArray) -> Iterator[np.ndarray | None]:
    for chunk in column.chunks:
        _, offset_bytes, value_bytes = chunk.buffers()
        offsets = np.frombuffer(offset_bytes, np.int64, len(chunk) + 1, chunk.offset * 8).tolist()
        values = np.frombuffer(value_bytes or b"", np.uint8)
        values.flags.writeable = False
        present = chunk.is_valid().to_pylist()
        for first, last, is_present in zip(offsets, offsets[1:], present, strict=False):
            yield values[first:last] if is_present else None


def _ranges(entries: list[dict[str, Any]] | None) -> tuple[Any, ...]:
    return tuple(tuple(entry.values()) for entry in entries or ())
