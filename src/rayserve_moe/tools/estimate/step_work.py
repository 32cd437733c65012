"""The work of a step on a device: what its kernels read, by the sizes of their calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class AttentionSizes(NamedTuple):
    """Sizes by which a call of paged attention is known."""

    num_blocks: int
    """Blocks of queries with padding, or single tokens."""
    num_sets: int
    """Sets of heads on a device."""
    value_lanes: int
    """Lanes of the values of a set."""


@dataclass(frozen=True)
class AttentionWork:
    """The work of a call of paged attention in one layer, or the mean of layers with the same sizes."""

    num_query_blocks: int
    """Blocks of queries, or groups of single tokens."""
    num_visits: float
    """Visits of blocks of keys, by all blocks of queries."""
    kv_bytes: float
    """Bytes of keys and values that the visits read."""
    num_pages: float
    """Pages of the visits, which are copied one by one."""
    is_of_prompts: bool = False
    """True if the queries are those of prompts."""
    num_layers: int = 1
    """Layers with a call of these sizes."""


@dataclass(frozen=True)
class RecurrentWork:
    """The work of a call of a recurrence in one layer."""

    num_singles: float
    """Tokens that are computed by themselves."""
    num_blocks: float
    """Pieces of prompts, of PIECE tokens each."""
    num_visits: float
    """Rows with tokens."""
    ring_tokens: float
    """Tokens of a row's ring up to its cursor, the mean of the visits."""
    num_folds: float
    """Entries that are written."""


@dataclass(frozen=True)
class SparseWork:
    """The work of sparse attention in one layer: tokens that see some of the tokens before them."""

    num_tokens: int
    """Single tokens that do not see all; 0 if contexts are no longer than a choice."""
    context: int
    """Positions whose keys a token scores."""
    top_k: int
    """Positions that it sees."""
    index_tokens: int = 0
    """Single tokens that a device of the tensor axis chooses for."""
    index_blocks: int = 0
    """Blocks of prompts that it chooses for; 0 if all of their tokens see all."""
    prompt_context: int = 0
    """Mean number of keys that a prompt token scores."""


@dataclass(frozen=True)
class StepWork:
    """A step's work on a device."""

    used_slots: float
    """Expert slots of a layer with any rows, on the device that has most of them."""
    expert_rows: float
    """Rows of all expert slots of a layer."""
    attention: dict[AttentionSizes, AttentionWork]
    """Per layer, by sizes of a kernel call."""
    flops: float
    """Minimum of the whole model."""
    hbm_bytes: float
    """Minimum of the whole model: used weights, keys and values, once each."""
    recurrent: RecurrentWork | None = None
    """None: no layer has a recurrent state."""
    exchanged_bytes: float = 0.0
    """Minimum of the whole model: one row per token and device with any of its experts, there and back."""
    device_share: float = 1.0
    """Share of the tokens that have an expert on a device."""
    sparse: SparseWork | None = None
    """None: no layer chooses tokens."""
