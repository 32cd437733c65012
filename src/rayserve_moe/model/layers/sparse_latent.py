"""Sparse latent attention (DeepSeek-V3.2, arXiv:2512.02556): latent attention to the tokens that an index chooses.

A layer chooses by an index of its own, or takes the choice of the last layer that has one. Contexts of at most `top_k`
tokens are dense: the index chooses all of them.
"""

# T tokens   L layers of the kind   D model width   R query latent   A index heads   d width of a head   i heads * d
# K chosen tokens

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.candidates import Choice, choose
from rayserve_moe.kernels.operations import AttentionKernels, Kernels
from rayserve_moe.kernels.reference.token_index import every_token
from rayserve_moe.kernels.table import SPARSE_ATTENTION
from rayserve_moe.kernels.token_index import IndexConfig
from rayserve_moe.model.layers import latent
from rayserve_moe.model.layers.index_rows import CHOSEN, STATE, by_index, with_forced
from rayserve_moe.model.layers.kinds import LayerInputs, Mixer
from rayserve_moe.model.layers.latent import STATES, LatentAttention, TokenIndex, row_of
from rayserve_moe.model.model_config import Pools, StepInputs
from rayserve_moe.model.param_spec import TRANSPOSED, ParamSpec
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.state.kinds import StateKind


def index_of(own: LatentAttention) -> TokenIndex:
    """Return the index of sparse attention."""
    assert own.index is not None, f"{own.kind} has an index"
    return own.index


def parameters(own: LatentAttention, spec: ModelSpec, *, dtype: str, tensor_size: int) -> dict[str, ParamSpec]:
    """Return the parameters of latent attention and of the index, which is replicated on every device.

    The weights of heads are float32, because rounding them would change the choice.
    """
    layers, index, q_latent = spec.layers_with_mixer(own.kind), index_of(own), own.q_lora_rank
    assert q_latent is not None, "the index reads the latents of queries"

    def stack(role: str, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str = dtype) -> ParamSpec:
        axes, shape = ("layers", *axes), (len(layers), *shape)
        return ParamSpec(shape, dtype, axes, role, layers, file=TRANSPOSED)

    def of_norm(role: str, initial: str) -> ParamSpec:
        shape, axes = (len(layers), index.head_dim), ("layers", None)
        return ParamSpec(shape, dtype, axes, role, layers, initial=initial)

    width = spec.hidden_size
    return latent.parameters(own, spec, dtype=dtype, tensor_size=tensor_size) | {
        "index_q_LRi": stack("index_q", (q_latent, index.num_heads * index.head_dim), (None, None)),
        "index_k_LDd": stack("index_k", (width, index.head_dim), ("model", None)),
        "index_k_norm_Ld": of_norm("index_k_norm", "ones"),
        "index_k_norm_bias_Ld": of_norm("index_k_norm_bias", "normal"),
        "index_weights_LDA": stack("index_weights", (width, index.num_heads), ("model", None), "float32"),
    }


def states(own: LatentAttention, *, kernels: Kernels, tensor_size: int) -> tuple[StateKind, ...]:
    """Return the latents of a token, and the key of its index on the same pages, in the dtype of the KV cache.

    Contexts within the choice need no keys.
    """
    index = index_of(own)
    key = StateKind(STATE, "token", (row_of(index.head_dim, kernels=kernels),), unread_within=index.top_k)
    return (*latent.states(own, kernels=kernels, tensor_size=tensor_size), key)


def attention_choice(own: LatentAttention, kernels: Kernels, *, pool: PoolFormat) -> Choice[AttentionKernels]:
    """Return the choice of sparse latent attention for a pool; UnsupportedModelError without candidates."""
    if kernels.name not in SPARSE_ATTENTION:
        raise UnsupportedModelError(
            f"the {kernels.name} kernels have no sparse attention (only {', '.join(SPARSE_ATTENTION)})"
        )
    candidates = SPARSE_ATTENTION[kernels.name]
    return choose(candidates, pool, row_width=own.row_width, latent_width=own.kv_lora_rank)


def _table_tokens(own: LatentAttention, batch: TokenBatch, pools: Pools) -> int:
    """Return the number of positions that a page table covers."""
    return batch.page_table_BP.shape[-1] * pools[STATES[own.kind]][0].shape[1]


def passed(own: LatentAttention, batch: TokenBatch, pools: Pools) -> Pools:
    """Return the choice of tokens before the first layer: all tokens, if that many can be chosen."""
    count = min(index_of(own).top_k, _table_tokens(own, batch, pools))
    return {CHOSEN: (every_token(batch.positions_T, count),)}


def index_config(own: LatentAttention, plan: ParallelPlan) -> IndexConfig:
    """Return the static configuration of the index of all layers."""
    index = index_of(own)
    return IndexConfig(index.num_heads, index.top_k, own.norm_eps, index.norm_eps, index.interleaved, plan)


def apply(own: LatentAttention, rows: tuple[jax.Array, Pools], inputs: LayerInputs) -> tuple[jax.Array, Pools]:
    """Choose tokens by the index of the layer, and attend to them; write the latents and keys of new tokens.

    If page tables cover at most `top_k` positions, the index is not read: attention is dense unless choices are forced.
    """
    (normed_TD, pools), kernels = rows, inputs.config.kernels
    if _is_dense(own, inputs.step, pools):
        return latent.apply(own, rows, inputs)
    if _table_tokens(own, inputs.step.batch, pools) <= index_of(own).top_k:
        ((chosen_TK,),) = passed(own, inputs.step.batch, pools).values()
    else:
        choose_tokens = kernels.attention.choose_tokens
        assert choose_tokens is not None, f"{kernels.name} kernels of sparse attention choose tokens"
        choose_tokens = partial(choose_tokens, config=index_config(own, inputs.config.plan))
        chosen_TK, pools = by_index(rows, inputs, mixer=own.kind, choose=choose_tokens)
    chosen_TK = with_forced(chosen_TK, inputs.step, inputs.layer)
    return latent.apply(own, (normed_TD, {**pools, CHOSEN: (chosen_TK,)}), inputs, chosen_TK=chosen_TK)


def apply_shared(own: LatentAttention, rows: tuple[jax.Array, Pools], inputs: LayerInputs) -> tuple[jax.Array, Pools]:
    """Attend to the tokens that the last layer with an index chose; write the latents of new tokens."""
    _, pools = rows
    (chosen_TK,) = pools[CHOSEN]
    return latent.apply(own, rows, inputs, chosen_TK=None if _is_dense(own, inputs.step, pools) else chosen_TK)


def _is_dense(own: LatentAttention, step: StepInputs, pools: Pools) -> bool:
    """Return True if every token of a step sees all tokens before it."""
    return step.choices is None and _table_tokens(own, step.batch, pools) <= index_of(own).top_k


MIXER = Mixer(
    parameters,
    states,
    attention_choice,
    latent.prepare,
    apply,
    passed=passed,
    captured=CHOSEN,
    adapted=latent.MIXER.adapted,
)
SHARED_MIXER = replace(
    MIXER,
    parameters=latent.parameters,
    states=latent.states,
    apply=apply_shared,
    captured="",
    needs_earlier_layers=True,
)
