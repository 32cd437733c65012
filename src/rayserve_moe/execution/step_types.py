"""What goes into a compiled step and what comes out: pytrees padded to one of the compiled shapes."""

# T tokens   R rows   P page-table width   B attention blocks   S sampled rows   M MoE layers   K experts per token

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import numpy as np

from rayserve_moe.decoding.sampling import SamplingBatch
from rayserve_moe.model.token_batch import TokenBatch


def as_device(array: np.ndarray) -> jax.Array:
    """Type a host array as the device array that it becomes when the compiled step is called with it."""
    return cast(jax.Array, array)


@dataclass(frozen=True)
class StepShape:
    """One compiled shape: single tokens (decode), then prefill blocks of `block_tokens` tokens each."""

    num_singles: int
    num_blocks: int
    block_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_singles + self.num_blocks * self.block_tokens


@partial(jax.tree_util.register_dataclass, data_fields=["kv_pages", "expert_counts_ME"], meta_fields=[])
@dataclass(frozen=True)
class DeviceState:
    """What a device keeps from step to step; donated on the way in, returned on the way out.

    `kv_pages` is [layers * pages, page, 2 * KV heads, h]; `expert_counts_ME` int32 counts tokens since it was reset.
    """

    kv_pages: jax.Array
    expert_counts_ME: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["batch", "sampled_tokens_S", "sampling"], meta_fields=[])
@dataclass(frozen=True)
class StepInput:
    """Tokens to run, which of them (index into T) are sampled from, and how."""

    batch: TokenBatch
    sampled_tokens_S: jax.Array
    sampling: SamplingBatch


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids_S", "logprobs_S", "finite_S", "topk_ids_MTK"],
    meta_fields=[],
)
@dataclass(frozen=True)
class StepOutput:
    """Sampled ids, log-probs, finiteness; routing in the store's dtype, or None where the server does not capture."""

    token_ids_S: jax.Array
    logprobs_S: jax.Array
    finite_S: jax.Array
    topk_ids_MTK: jax.Array | None
