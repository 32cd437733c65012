"""Block-sparse grouped attention (MiniMax-M3): grouped-query attention to the blocks of keys that an index chooses.

Each head of the index chooses for the query heads of its KV heads. Contexts of at most `top_k` blocks are dense: the
index chooses all of them.
"""

# T tokens   L layers of the kind   D model width   A index heads   d width of a head   i heads * d   G local KV heads
# K chosen blocks

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.block_index import BlockIndexConfig
from rayserve_moe.kernels.candidates import Choice, choose
from rayserve_moe.kernels.operations import AttentionKernels, Kernels
from rayserve_moe.kernels.reference.block_index import BlockChoice
from rayserve_moe.kernels.reference.token_index import every_token
from rayserve_moe.kernels.table import BLOCK_ATTENTION
from rayserve_moe.model.layers import attention
from rayserve_moe.model.layers.attention import STATES, BlockIndex, GroupedAttention, kv_repeats
from rayserve_moe.model.layers.index_rows import CHOSEN, STATE, by_index, with_forced
from rayserve_moe.model.layers.kinds import LayerInputs, Mixer
from rayserve_moe.model.layers.latent import row_of
from rayserve_moe.model.model_config import Pools
from rayserve_moe.model.param_spec import TRANSPOSED, ParamSpec, norm_spec
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.state.kinds import StateKind


def index_of(own: GroupedAttention) -> BlockIndex:
    """Return the index of blocks."""
    assert own.index is not None, f"{own.kind} has an index"
    return own.index


def parameters(own: GroupedAttention, spec: ModelSpec, *, dtype: str, tensor_size: int) -> dict[str, ParamSpec]:
    """Return the parameters of grouped attention and of the index, which is replicated on every device."""
    layers, index, width = spec.layers_with_mixer(own.kind), index_of(own), spec.hidden_size

    def stack(role: str, columns: int) -> ParamSpec:
        shape, axes = (len(layers), width, columns), ("layers", "model", None)
        return ParamSpec(shape, dtype, axes, role, layers, file=TRANSPOSED)

    def norm(role: str) -> ParamSpec:
        shape, axes = (len(layers), index.head_dim), ("layers", None)
        return norm_spec(spec.norm_offset, shape, axes, role, dtype=spec.norm_dtype(dtype), layers=layers)

    return attention.parameters(own, spec, dtype=dtype, tensor_size=tensor_size) | {
        "index_q_LDi": stack("index_q", index.num_heads * index.head_dim),
        "index_k_LDd": stack("index_k", index.head_dim),
        "index_q_norm_Ld": norm("index_q_norm"),
        "index_k_norm_Ld": norm("index_k_norm"),
    }


def states(own: GroupedAttention, *, kernels: Kernels, tensor_size: int) -> tuple[StateKind, ...]:
    """Return the keys and values of a token, and the key of its index on the same pages in the same dtype.

    Contexts within the choice need no keys.
    """
    index = index_of(own)
    row = row_of(index.head_dim, kernels=kernels)
    key = StateKind(STATE, "token", (row,), unread_within=index.top_k * index.block_size)
    return (*attention.states(own, kernels=kernels, tensor_size=tensor_size), key)


def attention_choice(own: GroupedAttention, kernels: Kernels, *, pool: PoolFormat) -> Choice[AttentionKernels]:
    """Return the choice of block-sparse attention for a pool; UnsupportedModelError without candidates."""
    if kernels.name not in BLOCK_ATTENTION:
        raise UnsupportedModelError(
            f"the {kernels.name} kernels have no block-sparse attention (only {', '.join(BLOCK_ATTENTION)})"
        )
    candidates, block_size = BLOCK_ATTENTION[kernels.name], index_of(own).block_size
    return choose(candidates, pool, head_dim=own.head_dim, value_dim=own.value_width, block_size=block_size)


def _table_blocks(own: GroupedAttention, batch: TokenBatch, pools: Pools) -> int:
    """Return the number of blocks that a page table covers."""
    return -(-batch.page_table_BP.shape[-1] * pools[STATES[own.kind]][0].shape[1] // index_of(own).block_size)


def passed(own: GroupedAttention, batch: TokenBatch, pools: Pools) -> Pools:
    """Return the choice of blocks before the first layer, by index head: all blocks, if that many can be chosen."""
    index = index_of(own)
    count = min(index.top_k, _table_blocks(own, batch, pools))
    return {CHOSEN: (every_token(batch.positions_T // index.block_size, count),) * index.num_heads}


def index_config(own: GroupedAttention, spec: ModelSpec, plan: ParallelPlan | None = None) -> BlockIndexConfig:
    """Return the static configuration of the index of all layers."""
    index = index_of(own)
    choice = BlockChoice(index.block_size, index.top_k, index.first_blocks, index.local_blocks)
    is_interleaved = own.rope is not None and own.rope.interleaved
    return BlockIndexConfig(index.num_heads, choice, spec.norm_eps, is_interleaved, plan)


def apply(own: GroupedAttention, rows: tuple[jax.Array, Pools], inputs: LayerInputs) -> tuple[jax.Array, Pools]:
    """Choose blocks by the index of the layer, and attend to them; write the keys and values of new tokens.

    If page tables cover at most `top_k` blocks, the index is not read: attention is dense unless choices are forced.
    """
    (normed_TD, pools), index, config = rows, index_of(own), inputs.config
    is_whole = _table_blocks(own, inputs.step.batch, pools) <= index.top_k
    if is_whole and inputs.step.choices is None:
        return attention.apply(own, rows, inputs)
    if is_whole:
        (each,) = passed(own, inputs.step.batch, pools).values()
    else:
        choose_blocks = config.kernels.attention.choose_blocks
        assert choose_blocks is not None, f"{config.kernels.name} kernels of block-sparse attention choose blocks"
        choose_blocks = partial(choose_blocks, config=index_config(own, config.spec, config.plan))
        chosen_TAK, pools = by_index(rows, inputs, mixer=own.kind, choose=choose_blocks)
        each = tuple(chosen_TAK[:, head] for head in range(index.num_heads))
    first_row = inputs.layer * len(each)
    each = tuple(with_forced(chosen_TK, inputs.step, first_row + head) for head, chosen_TK in enumerate(each))
    chosen_TGK = of_kv_heads(jnp.stack(each, axis=1), own, config.plan)
    return attention.apply(own, (normed_TD, {**pools, CHOSEN: each}), inputs, chosen_TGK=chosen_TGK)


def of_kv_heads(chosen_TAK: jax.Array, own: GroupedAttention, plan: ParallelPlan) -> jax.Array:
    """Return the blocks that the queries of each KV head of this device see, [T, G, K]."""
    repeats, kv_heads_of_index = kv_repeats(own, plan.tensor_size), own.num_kv_heads // index_of(own).num_heads
    num_local = own.num_kv_heads * repeats // plan.tensor_size
    first = plan.tensor_rank() * num_local if plan.tensor_size > 1 else 0
    kv_heads = (first + jnp.arange(num_local)) // repeats
    return jnp.take(chosen_TAK, kv_heads // kv_heads_of_index, axis=1)


MIXER = Mixer(
    parameters,
    states,
    attention_choice,
    attention.prepare,
    apply,
    passed=passed,
    captured=CHOSEN,
    adapted=attention.MIXER.adapted,
)
