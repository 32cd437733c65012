"""Allocating what the devices keep between steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rayserve_moe.decoding.adjustment import AdjustmentState
from rayserve_moe.execution.adjustment_updates import MAX_BIASES
from rayserve_moe.execution.step import COUNT_AXES, KV_AXES, ROW_AXES
from rayserve_moe.execution.step_types import DeviceState, RowState
from rayserve_moe.model.parameters import kv_repeats
from rayserve_moe.model.transformer import ModelConfig
from rayserve_moe.scheduling.step_plan import NUM_FLOATS, NUM_INTEGERS


def allocate_state(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: str, num_rows: int, pages_per_row: int
) -> DeviceState:
    """Zeroed pool, counts and rows: `num_pages` pages and `num_rows` rows on every data rank."""
    spec, plan = config.spec, config.plan
    ranks, attention = plan.data_size, spec.attention
    kv_heads = attention.num_kv_heads * kv_repeats(spec, plan.tensor_size)

    def zeros(shape: tuple[int, ...], dtype: DTypeLike, axes: tuple[str | None, ...]) -> jax.Array:
        return jnp.zeros((ranks * shape[0], *shape[1:]), dtype, device=plan.sharding(axes))

    return DeviceState(
        kv_pages=zeros((spec.num_layers * num_pages, page_size, 2 * kv_heads, attention.head_dim), dtype, KV_AXES),
        expert_counts_ME=zeros((len(spec.moe_layer_ids), spec.router.num_experts), jnp.int32, COUNT_AXES),
        rows=RowState(
            page_table_RP=zeros((num_rows, pages_per_row), jnp.int32, ROW_AXES),
            sampling_floats_RF=zeros((num_rows, NUM_FLOATS), jnp.float32, ROW_AXES),
            sampling_integers_RI=zeros((num_rows, NUM_INTEGERS), jnp.uint32, ROW_AXES),
            last_tokens_R=zeros((num_rows,), jnp.int32, ROW_AXES[:1]),
            adjustments=AdjustmentState(
                seen_RV=zeros((num_rows, spec.vocab_size), jnp.int32, ROW_AXES),
                bias_ids_RB=zeros((num_rows, MAX_BIASES), jnp.int32, ROW_AXES),
                bias_values_RB=zeros((num_rows, MAX_BIASES), jnp.float32, ROW_AXES),
            ),
        ),
    )
