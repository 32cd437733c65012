"""What a compiled step keeps and what it brings: pytrees of arrays."""

# R rows of a data rank   P page-table width   S sampled rows   M MoE layers   K experts per token
# N data ranks   T tokens of a data rank

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.model.transformer import Parameters


@dataclass(frozen=True)
class StepShape:
    """One compiled shape: single tokens (decode), then prefill blocks of `block_tokens` tokens each, per data rank."""

    num_singles: int
    num_blocks: int
    block_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_singles + self.num_blocks * self.block_tokens


@partial(jax.tree_util.register_dataclass, data_fields=["params", "maps"], meta_fields=[])
@dataclass(frozen=True)
class ModelWeights:
    """What a step reads and leaves as it is: the parameters, and where experts lie (None: expert i in slot i)."""

    params: Parameters
    maps: PlacementArrays | None


ROW_ARRAYS = ["page_table_RP", "sampling_floats_R3", "sampling_integers_R3", "last_tokens_R"]


@partial(jax.tree_util.register_dataclass, data_fields=ROW_ARRAYS, meta_fields=[])
@dataclass(frozen=True)
class RowState:
    """What a data rank remembers of its rows, so that only changes travel.

    Page ids int32; temperature, top-p, min-p float32; top-k, seed, choice index uint32; the token sampled last, int32.
    """

    page_table_RP: jax.Array
    sampling_floats_R3: jax.Array
    sampling_integers_R3: jax.Array
    last_tokens_R: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["kv_pages", "expert_counts_ME", "rows"], meta_fields=[])
@dataclass(frozen=True)
class DeviceState:
    """What a device keeps from step to step; donated on the way in, returned on the way out.

    `kv_pages` is [layers * pages, page, 2 * KV heads, h]; `expert_counts_ME` int32 counts tokens since it was reset.
    Each data rank has its own: outside the sharded step, leading dimensions are those of all ranks together.
    """

    kv_pages: jax.Array
    expert_counts_ME: jax.Array
    rows: RowState


@partial(jax.tree_util.register_dataclass, data_fields=["sampled_N3S", "topk_ids_MTK"], meta_fields=[])
@dataclass(frozen=True)
class StepOutput:
    """What leaves the device, of all data ranks and the same on every device.

    `sampled_N3S` int32: token ids, the bits of their float32 log-probs, whether their logits were finite.
    `topk_ids_MTK` is routing in the store's dtype, the ranks' tokens one after the other, or None where the server
    does not capture it.
    """

    sampled_N3S: jax.Array
    topk_ids_MTK: jax.Array | None
