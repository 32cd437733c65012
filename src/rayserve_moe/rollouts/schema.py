"""A sample as a row of a Parquet shard: its record and its Arrow schema."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from rayserve_moe.replay.encoding.description import checksum
from rayserve_moe.replay.encoding.gates import DTYPE, gates_of
from rayserve_moe.replay.encoding.gates import checksum as gates_checksum
from rayserve_moe.replay.encoding.index import index_rows_of, known_index, over_sparse_layers
from rayserve_moe.requests.columns import Ragged
from rayserve_moe.requests.records import GateScale, IndexLayout, RoutedExperts, RoutingLayout
from rayserve_moe.requests.row_parts import are_known

_LABELLED = pa.list_(pa.struct([("first", pa.int32()), ("last", pa.int32()), ("label", pa.string())]))
_RANGES = pa.list_(pa.struct([("first", pa.int32()), ("last", pa.int32())]))

SCHEMA = pa.schema(
    [
        # The key: no two rows of a directory have the same three values.
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("weight_version", pa.string(), nullable=False),
        # The sample. `seed` and `sample_index` reproduce it as `sampling_seed` and `first_choice`.
        pa.field("seed", pa.uint32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("output_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("logprob_weight_version", _LABELLED, nullable=False),  # by position; the prompt's first token is 0
        pa.field("text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("sampling_mask", pa.list_(pa.list_(pa.int32()))),  # ids that each output could have had
        pa.field("sampling_logprobs", pa.list_(pa.float32())),  # of outputs, among these ids
        pa.field("drafted", pa.list_(pa.bool_())),  # true for outputs that were accepted drafts
        # Rows of routing, one per token but the last, C order, little-endian; all null without routing.
        pa.field("routing", pa.large_binary()),
        pa.field("routing_shape", pa.list_(pa.int32())),  # [rows, MoE layers, k]
        pa.field("routing_dtype", pa.string()),  # uint8, or uint16 above 256 experts
        pa.field("routing_crc32", pa.uint32()),  # null if a row is missing
        pa.field("routing_missing", _RANGES),  # [first, last) of rows without data; their bytes are undefined
        pa.field("routing_source", _LABELLED),  # computed, cached, recomputed, transferred
        pa.field("routing_weight_version", _LABELLED),
        pa.field("layer_ids", pa.list_(pa.int32())),
        pa.field("num_experts", pa.int32()),
        # Router gates, float32 per id of `routing`, C order, little-endian, NaN for missing rows; all null without.
        pa.field("gates", pa.large_binary()),
        pa.field("gates_crc32", pa.uint32()),
        pa.field("gates_score", pa.string()),  # softmax or sigmoid
        pa.field("gates_normalized", pa.bool_()),  # divided by their sum
        pa.field("gates_scale", pa.float32()),  # factor of all gates after that
        pa.field("gates_expert_factors", pa.bool_()),  # multiplied by learned factors of the experts after that
        # Packed index rows of sparse attention (`replay.index_rows`), one per row of routing; all null without them.
        pa.field("index_rows", pa.large_binary()),
        pa.field("index_row_bytes", pa.list_(pa.int32())),  # of each row, 0 for a missing row
        pa.field("index_crc32", pa.uint32()),
        pa.field("index_top_k", pa.int32()),
        pa.field("index_layer_ids", pa.list_(pa.int32())),  # layers with an index
        pa.field("index_block_size", pa.int32()),  # positions of a block; 1 if rows hold positions
        pa.field("sparse_layer_ids", pa.list_(pa.int32())),  # layers that see by one
        # Statistics.
        pa.field("num_cached_tokens", pa.int32(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("elapsed_s", pa.float32(), nullable=False),
        pa.field("prompt_fields", pa.string()),  # JSON object of the prompt row's other fields; null for none
    ]
)
"""A row per sample."""

ERRORS_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),  # row number in the prompts file, from 0
        pa.field("reason", pa.string(), nullable=False),
        pa.field("failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""A row per prompt that was given up."""

UNCOMPRESSED = ("routing", "gates", "index_rows", "logprobs")
"""Columns that hardly compress."""


@dataclass(frozen=True)
class Rollout:
    """A sample of a prompt."""

    prompt_id: str
    sample_index: int
    weight_version: str
    seed: int
    prompt_ids: np.ndarray
    """int32."""
    output_ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32, of the output tokens."""
    logprob_versions: tuple[tuple[int, int, str], ...]
    """Ranges of positions: (first, last, weight version)."""
    text: str
    finish_reason: str
    routing: RoutedExperts | None = None
    """Rows from the requested position on; None if not requested."""
    layout: RoutingLayout | None = None
    """None without routing."""
    index_layout: IndexLayout | None = None
    """None without index rows."""
    gate_scale: GateScale | None = None
    """Scale of router gates; None without gates."""
    sampling_mask: Ragged | None = None
    """Ids that each output could have had, int32; None unless requested."""
    sampling_logprobs: np.ndarray | None = None
    """float32: log-probs of outputs among these ids; None unless requested."""
    drafted: np.ndarray | None = None
    """bool: True for outputs that were accepted drafts; None unless requested."""
    num_cached_tokens: int = 0
    started_at: float = 0.0
    """Seconds since 1970."""
    elapsed_s: float = 0.0
    prompt_fields: str | None = None
    """JSON object of the other fields of the prompt's row."""

    @property
    def routed_experts(self) -> np.ndarray | None:
        """Return the rows [N, MoE layers, k], as `LLM` names them; None without routing, or if a row is missing."""
        return None if self.routing is None or self.routing.missing else self.routing.rows

    @property
    def index_rows(self) -> np.ndarray | None:
        """Return index rows [N, layers with sparse attention, top_k]; None without any, or if a row is missing."""
        if self.routing is None or self.index_layout is None:
            return None
        rows, known = index_rows_of(self.routing, self.index_layout)
        return over_sparse_layers(rows, self.index_layout) if known.all() else None

    @property
    def router_gates(self) -> np.ndarray | None:
        """Return gates [N, MoE layers, k] in the order of rows; None without any, or if one is missing."""
        if self.routing is None or self.gate_scale is None:
            return None
        gates = gates_of(self.routing)
        return gates if are_known(gates).all() else None

    @property
    def num_bytes(self) -> int:
        """Return the approximate memory use in bytes."""
        rows = 0 if self.routing is None else self.routing.num_bytes
        return rows + 8 * (len(self.prompt_ids) + 2 * len(self.output_ids)) + 1024


@dataclass(frozen=True)
class Failure:
    """A prompt that was given up."""

    prompt_id: str
    position: int
    """Row number in the prompts file."""
    reason: str
    failed_at: float
    """Seconds since 1970."""


def rollout_table(rollouts: Sequence[Rollout]) -> pa.Table:
    """Return rollouts as rows of `SCHEMA`, in order."""
    rows = [_row(rollout) for rollout in rollouts]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def failure_table(failures: Sequence[Failure]) -> pa.Table:
    """Return failures as rows of `ERRORS_SCHEMA`."""
    rows = [{**vars(failure), "failed_at": _moment(failure.failed_at)} for failure in failures]
    return pa.Table.from_pylist(rows, schema=ERRORS_SCHEMA)


def _row(rollout: Rollout) -> dict[str, Any]:
    names = ("prompt_id", "sample_index", "weight_version", "seed", "text", "finish_reason")
    others = ("prompt_ids", "output_ids", "logprobs", "sampling_logprobs", "drafted")
    others += ("num_cached_tokens", "elapsed_s", "prompt_fields")
    row = {name: getattr(rollout, name) for name in names + others}
    row["sampling_mask"] = None if rollout.sampling_mask is None else rollout.sampling_mask.entries()
    row["logprob_weight_version"] = _labelled(rollout.logprob_versions)
    return {
        **row,
        "started_at": _moment(rollout.started_at),
        **_routing_columns(rollout),
        **_gate_columns(rollout),
        **_index_columns(rollout),
    }


def _routing_columns(rollout: Rollout) -> dict[str, Any]:
    routing, layout = rollout.routing, rollout.layout
    if routing is None or layout is None:
        return {field.name: None for field in SCHEMA if field.name.startswith(("routing", "layer_ids", "num_experts"))}
    assert routing.start == 0, "a rollout's routing must begin at position 0"
    rows = np.ascontiguousarray(routing.rows, layout.dtype.newbyteorder("<"))
    return {
        "routing": rows.reshape(-1).view(np.uint8).data,
        "routing_shape": list(rows.shape),
        "routing_dtype": layout.dtype.name,
        "routing_crc32": None if routing.missing else checksum(rows),
        "routing_missing": [{"first": first, "last": last} for first, last in routing.missing],
        "routing_source": _labelled(routing.source),
        "routing_weight_version": _labelled(routing.weight_version),
        "layer_ids": list(layout.layer_ids),
        "num_experts": layout.num_experts,
    }


def _gate_columns(rollout: Rollout) -> dict[str, Any]:
    routing, scale = rollout.routing, rollout.gate_scale
    if routing is None or scale is None:
        return {field.name: None for field in SCHEMA if field.name.startswith("gates")}
    gates = np.ascontiguousarray(gates_of(routing), DTYPE)
    return {
        "gates": gates.reshape(-1).view(np.uint8).data,
        "gates_crc32": gates_checksum(gates),
        "gates_score": scale.score,
        "gates_normalized": scale.is_normalized,
        "gates_scale": scale.scale,
        "gates_expert_factors": scale.has_expert_factors,
    }


def _index_columns(rollout: Rollout) -> dict[str, Any]:
    routing, layout = rollout.routing, rollout.index_layout
    if routing is None or layout is None:
        return {field.name: None for field in SCHEMA if field.name.startswith(("index_", "sparse_layer_ids"))}
    packed = known_index(routing)
    raw = b"".join(filter(None, packed))
    return {
        "index_rows": raw,
        "index_row_bytes": [0 if row is None else len(row) for row in packed],
        "index_crc32": zlib.crc32(raw),
        "index_top_k": layout.top_k,
        "index_layer_ids": list(layout.layer_ids),
        "index_block_size": layout.block_size,
        "sparse_layer_ids": list(layout.sparse_layer_ids),
    }


def _labelled(ranges: tuple[tuple[int, int, str], ...]) -> list[dict[str, Any]]:
    return [{"first": first, "last": last, "label": label} for first, last, label in ranges]


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
