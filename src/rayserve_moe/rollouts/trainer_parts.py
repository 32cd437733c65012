"""Part of a rollout for one process of a trainer: its samples by data rank, and their rows by context rank.

A process reads the row groups of its samples, a batch at a time, and copies its own rows. So its memory holds its part
and one batch, never all rows. Token ids and log-probs of its samples are whole, because they are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayserve_moe.rollouts.records import Rollouts
from rayserve_moe.rollouts.schema import SCHEMA
from rayserve_moe.rollouts.shards import ROLLOUTS, ShardError, altered_shards, shard_files

ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"
_BATCH = 16
"""Samples that are decoded at a time."""
_COLUMNS = ["prompt_ids", "output_ids", "logprobs", "prompt_fields", "weight_version"]
_COLUMNS += [name for name in SCHEMA.names if name.startswith("routing")]


@dataclass(frozen=True)
class TrainerRank:
    """Place of a process in a trainer's mesh; ranks that are equal in both numbers read the same part."""

    data_rank: int = 0
    num_data_ranks: int = 1
    context_rank: int = 0
    num_context_ranks: int = 1
    layout: Literal["zigzag", "contiguous"] = ZIGZAG
    """Tokens of a context rank: `zigzag` has chunk r and chunk 2 * ranks - 1 - r of 2 * ranks equal ones, as
    Megatron and slime, so that causal attention costs all ranks the same; `contiguous` has chunk r of `ranks`."""

    def __post_init__(self) -> None:
        for rank, count in ((self.data_rank, self.num_data_ranks), (self.context_rank, self.num_context_ranks)):
            if not 0 <= rank < count:
                raise ValueError(f"rank {rank} is not in [0, {count})")
        if self.layout not in (ZIGZAG, CONTIGUOUS):
            raise ValueError(f"layout {self.layout!r} is neither {ZIGZAG!r} nor {CONTIGUOUS!r}")

    def samples_of(self, num_samples: int) -> range:
        """Return the consecutive samples of the data rank; counts of ranks differ by at most one."""
        first, end = (rank * num_samples // self.num_data_ranks for rank in (self.data_rank, self.data_rank + 1))
        return range(first, end)

    def positions_of(self, num_tokens: int) -> np.ndarray:
        """Return the positions of the context rank in a sequence, ascending, int32.

        The sequence is padded to chunks of equal length; positions from `num_tokens` on are padding.
        """
        is_zigzag = self.layout == ZIGZAG and self.num_context_ranks > 1
        num_chunks = self.num_context_ranks * (2 if is_zigzag else 1)
        size = -(-num_tokens // num_chunks)
        chunks = [self.context_rank, num_chunks - 1 - self.context_rank] if is_zigzag else [self.context_rank]
        return np.concatenate([np.arange(chunk * size, (chunk + 1) * size, dtype=np.int32) for chunk in chunks])


class OwnRows(NamedTuple):
    """Rows of a sample that belong to a context rank."""

    positions: np.ndarray
    """Positions of the rank in the padded sequence, int32 [P]."""
    rows: np.ndarray
    """Experts [P, MoE layers, k]; zeros for positions that are not `known`."""
    known: np.ndarray
    """bool [P]: False for padding, for the last token, which has no row, and for missing rows."""


@dataclass(frozen=True)
class RolloutPart:
    """Samples of a data rank with the rows of a context rank."""

    samples: list[int]
    """Number of each sample among all of the rollout, in the order in which they were written."""
    prompt_ids: list[np.ndarray]
    output_ids: list[np.ndarray]
    logprobs: list[np.ndarray]
    prompt_fields: list[dict[str, Any]]
    weight_version: list[str]
    own: list[OwnRows | None]
    """None for samples without routing."""

    @property
    def num_row_bytes(self) -> int:
        """Return the bytes of all rows of the part."""
        return sum(each.rows.nbytes for each in self.own if each is not None)


def load_part(
    path: str | Path, rank: TrainerRank, *, samples: Sequence[int] | None = None, verify: bool = True
) -> RolloutPart:
    """Read the part of a process from a job's directory, or from a single shard.

    `samples` are the numbers of the data rank's samples, by a schedule of the trainer; None: `rank.samples_of`.
    `verify` compares the shards with the checksums in their names, and rows with theirs.

    Raises: ValueError for samples that do not exist and for altered rows; ShardError for damaged shards.
    """
    path = Path(path)
    files = [path] if path.is_file() else shard_files(path / ROLLOUTS) or shard_files(path)
    if not files:
        raise ValueError(f"{path}: no shards of rollouts")
    if verify and (damaged := altered_shards(files)):
        raise ShardError(f"damaged shards, their bytes do not match their names: {', '.join(map(str, damaged))}")
    num_samples = sum(pq.read_metadata(file).num_rows for file in files)
    wanted = sorted(rank.samples_of(num_samples) if samples is None else samples)
    if wanted and not 0 <= wanted[0] <= wanted[-1] < num_samples:
        raise ValueError(f"samples must be in [0, {num_samples})")
    part = RolloutPart(wanted, [], [], [], [], [], [])
    for rollouts, index in _read(files, wanted):
        for name in ("prompt_ids", "output_ids", "logprobs"):
            getattr(part, name).append(np.array(getattr(rollouts, name)[index]))
        part.prompt_fields.append(rollouts.prompt_fields[index])
        part.weight_version.append(rollouts.weight_version[index])
        part.own.append(_own_rows(rollouts, index, rank, verify=verify))
    return part


def _read(files: Sequence[Path], wanted: Sequence[int]) -> Iterator[tuple[Rollouts, int]]:
    """Yield the wanted samples, each as a batch of the shard and its index there; only their row groups are read."""
    remaining, first = list(wanted), 0
    for file in files:
        with pq.ParquetFile(file, memory_map=True) as opened:
            for group in range(opened.num_row_groups):
                end = first + opened.metadata.row_group(group).num_rows
                if remaining and remaining[0] < end:
                    yield from _of_group(opened, group, [number - first for number in remaining if number < end])
                    remaining = [number for number in remaining if number >= end]
                first = end


def _of_group(opened: pq.ParquetFile, group: int, wanted: Sequence[int]) -> Iterator[tuple[Rollouts, int]]:
    """Yield samples of a row group by their index in it, ascending."""
    first = 0
    for batch in opened.iter_batches(batch_size=_BATCH, row_groups=[group], columns=_COLUMNS, use_threads=False):
        rollouts = Rollouts(pa.Table.from_batches([batch]))
        yield from ((rollouts, index - first) for index in wanted if first <= index < first + len(rollouts))
        first += len(rollouts)


def _own_rows(rollouts: Rollouts, sample: int, rank: TrainerRank, *, verify: bool) -> OwnRows | None:
    rows, missing = rollouts.routing[sample], rollouts.routing_missing[sample]
    if rows is None:
        return None
    if verify:
        rollouts.routed_experts(sample)
    positions = rank.positions_of(len(rollouts.prompt_ids[sample]) + len(rollouts.output_ids[sample]))
    known = positions < len(rows)
    for first, last in missing:
        known &= (positions < first) | (positions >= last)
    own = np.zeros((len(positions), *rows.shape[1:]), rows.dtype)
    own[known] = rows[positions[known]]
    return OwnRows(positions, own, known)
