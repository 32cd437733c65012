"""Multi-head latent attention of a layer over a paged cache of latents (DeepSeek-V2, arXiv:2405.04434).

The cache holds a latent of each token, which determines the keys and values of all heads, and a rotated key that all
heads share. It is never expanded: a query is multiplied into the latent space (with k_b). Attention then has a single
KV head with keys `latent | rotated` and the latents as values, and its result is multiplied out (with v_b). That costs
2 C + r products per query head, key and query; an expanded key costs n + r + v, and expanding costs C (n + v) for every
key and head of a block. So expanding pays only in blocks of more than C (n + v) / (2 C - n - v) queries, 170 with the
widths of DeepSeek-V3; blocks have 32.
"""

# T tokens   D model width   L layers   A local query heads   R query latent   C latent   r rotated width
# n width without position   v value width   H local heads * their width

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.adapters import LayerAdapters, with_absorbed, with_expanded
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.attention_layer import (
    AttentionInputs,
    PagedAttention,
    PagedKernels,
    PagedStep,
    ProjectedRows,
    WritingAttention,
    attend_blocks,
    defined,
    output_product,
    write_early,
)
from rayserve_moe.kernels.reference.attention import ScoreConfig
from rayserve_moe.kernels.reference.layers import Rotation, project, rms_norm, rotate
from rayserve_moe.kernels.row_blocks import ByRows, at_once

HeadProduct = Callable[..., jax.Array]
"""The signature of `absorb` or `expand`."""


@dataclass(frozen=True)
class LatentConfig:
    """Constants of latent attention, the same in all layers.

    `nope_dim` is the width n of a head's part without position, `norm_eps` the epsilon of the latents' norms,
    `score_scale` the factor of the scores. `interleaved_rotation`: see `layers.rotate`. `output_gate` is the function
    of the gates of heads (`attention_layer.GATES`), or `none`.
    """

    nope_dim: int
    norm_eps: float
    score_scale: float
    interleaved_rotation: bool = False
    output_gate: str = "none"


def absorb(  # noqa: PLR0913 (by keyword)
    queries_TH: jax.Array,
    part: ProjectedRows,
    stacked: StackedWeights,
    *,
    config: LatentConfig,
    adapters: LayerAdapters | None = None,
    query_scale_T: jax.Array | None = None,
    by_rows: ByRows = at_once,
) -> jax.Array:
    """Multiply queries [T, H] into the latent space, and rotate the rest: float32 [T, A, C + r].

    A kernel may round queries and pad them with zeros. `query_scale_T` multiplies the queries of a token.
    """
    queries_TH, k_b_HC = _slice_after(queries_TH, stacked.of_layers["k_b_LHC"], stacked.layer)

    def absorb_part(rows: tuple[ProjectedRows, jax.Array]) -> jax.Array:
        part, queries_TH = rows
        return _absorb(queries_TH, k_b_HC, part.rotation, config=config, adapters=part.adapters(adapters))

    queries_TAC = by_rows(absorb_part, (part, queries_TH))
    return queries_TAC if query_scale_T is None else queries_TAC * query_scale_T[:, None, None]


def expand(
    attended_TAC: jax.Array,
    part: ProjectedRows,
    stacked: StackedWeights,
    *,
    adapters: LayerAdapters | None = None,
    by_rows: ByRows = at_once,
) -> jax.Array:
    """Multiply attended latents out to the values of each head: [T, A, v], in the dtype of `attended_TAC`."""
    attended_TAC, v_b_HC = _slice_after(attended_TAC, stacked.of_layers["v_b_LHC"], stacked.layer)
    v_b_AvC = v_b_HC.reshape(attended_TAC.shape[1], -1, v_b_HC.shape[1])

    def expand_part(rows: tuple[ProjectedRows, jax.Array]) -> jax.Array:
        part, attended_TAC = rows
        values_TAv = _multiply("TAC,AvC->TAv", attended_TAC, v_b_AvC)
        values_TAv = with_expanded(values_TAv, attended_TAC, "v_b_LHC", adapters=part.adapters(adapters))
        return values_TAv.astype(attended_TAC.dtype)

    return by_rows(expand_part, (part, attended_TAC))


def attend_latent_layer(  # noqa: PLR0913 (kernels, by keyword)
    normed_TD: jax.Array,
    kv_pages: jax.Array,
    inputs: AttentionInputs,
    *,
    config: LatentConfig,
    decode: PagedAttention,
    prefill: PagedAttention,
    rows_of: Callable[[jax.Array], jax.Array] = jnp.asarray,
    write_and_decode: WritingAttention | None = None,
    absorb: HeadProduct = absorb,
    expand: HeadProduct = expand,
    by_rows: ByRows = at_once,
) -> tuple[jax.Array, jax.Array]:
    """Return the float32 output product [T, D], a partial sum over devices, and the pool with new latents.

    As `attention_layer.attend_layer`, for a pool [L * pages, page, 1, C + r] that is the same on every device, or with
    the rows of `rows_of`; `rotation` is for r elements. Queries come from a latent of their own if `weights` have it
    (q_a, q_a_norm, q_b). A token sees the positions of `inputs.chosen_TK` only, if given. `absorb` and `expand` have
    the signatures of the functions above.
    """
    weights, batch, rotation, layer, singles, _, query_scale_T, chosen_TK, adapters = inputs
    batch, first_page, _ = batch.of_layer(layer, kv_pages, len(weights["o_LHD"]))
    of_layer = {name: stacked[layer] for name, stacked in weights.items() if name not in ("k_b_LHC", "v_b_LHC")}
    latent_width, stacked = len(of_layer["kv_a_norm_LC"]), StackedWeights(weights, layer)
    with jax.named_scope("projections"):

        def project_part(part: ProjectedRows) -> tuple[jax.Array, jax.Array]:
            own = part.adapters(adapters)
            latents_T1C = _latents(part.normed_TD, of_layer, part.rotation, config=config, adapters=own)
            return latents_T1C, _queries(part.normed_TD, of_layer, config, adapters=own)

        inputs_T = ProjectedRows(normed_TD, rotation, adapters and adapters.tokens.place_T)
        latents_T1C, queries_TH = by_rows(project_part, inputs_T)
        of_heads = partial(absorb, config=config, query_scale_T=query_scale_T)
        queries_TAC = of_heads(queries_TH, inputs_T, stacked, adapters=adapters, by_rows=by_rows)
    num_late = batch.num_singles if write_and_decode else 0
    step = PagedStep(batch, first_page, rows_of(latents_T1C), num_late, chosen_TK)
    kv_pages = write_early(kv_pages, step)
    with jax.named_scope("paged_attention"):
        kernels = PagedKernels(decode, prefill, write_and_decode)
        kernels = kernels.with_knobs(config=ScoreConfig(scale=config.score_scale), latent_width=latent_width)
        described = singles and singles.by_window[0]
        attended_TAC, kv_pages = attend_blocks(queries_TAC, kv_pages, step, kernels=kernels, described=described)
    with jax.named_scope("output_product"):
        attended_TAC = attended_TAC.astype(normed_TD.dtype)
        values_TAv = expand(attended_TAC, inputs_T, stacked, adapters=adapters, by_rows=by_rows)
        multiply_out = partial(output_product, weights=of_layer, function=config.output_gate, adapters=adapters)
        return defined(by_rows(multiply_out, (inputs_T, values_TAv)), step, singles), kv_pages


def attend_by_choice(
    normed_TD: jax.Array,
    kv_pages: jax.Array,
    inputs: AttentionInputs,
    *,
    config: LatentConfig,
    dense: Callable[..., tuple[jax.Array, jax.Array]],
    sparse: Callable[..., tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Attend by `sparse` where tokens see chosen positions only, else by `dense`; both are `attend_latent_layer`."""
    run = dense if inputs.chosen_TK is None else sparse
    return run(normed_TD, kv_pages, inputs, config=config)


def _latents(
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    rotation: Rotation,
    *,
    config: LatentConfig,
    adapters: LayerAdapters | None,
) -> jax.Array:
    """Return the cached row of each token: its normed latent, and the rotated key of all heads, [T, 1, C + r]."""
    latent_width = len(weights["kv_a_norm_LC"])
    bias = weights.get("kv_a_bias_LC")
    projected_T1C = project(normed_TD, weights["kv_a_LDC"], bias, name="kv_a_LDC", adapters=adapters)[:, None]
    latents_T1C, keys_T1r = projected_T1C[..., :latent_width], projected_T1C[..., latent_width:]
    latents_T1C = rms_norm(latents_T1C, weights["kv_a_norm_LC"], config.norm_eps)
    keys_T1r = rotate(keys_T1r, rotation, interleaved=config.interleaved_rotation)
    return jnp.concatenate([latents_T1C, keys_T1r], axis=-1)


def query_latents(
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    *,
    norm_eps: float,
    adapters: LayerAdapters | None = None,
) -> jax.Array:
    """Return the normed latents of queries, [T, R]."""
    bias = weights.get("q_a_bias_LR")
    latents_TR = project(normed_TD, weights["q_a_LDR"], bias, name="q_a_LDR", adapters=adapters)
    return rms_norm(latents_TR, weights["q_a_norm_LR"], norm_eps)


def _queries(
    normed_TD: jax.Array, weights: Mapping[str, jax.Array], config: LatentConfig, *, adapters: LayerAdapters | None
) -> jax.Array:
    """Return queries before rotation, [T, H]."""
    if "q_a_LDR" in weights:
        latents_TR = query_latents(normed_TD, weights, norm_eps=config.norm_eps, adapters=adapters)
        return project(latents_TR, weights["q_b_LRH"], name="q_b_LRH", adapters=adapters)
    return project(normed_TD, weights["q_LDH"], name="q_LDH", adapters=adapters)


def _slice_after(rows: jax.Array, stacked: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `rows` unchanged, and the layer's part of a stack of matrices, sliced once `rows` are computed.

    XLA does not slice inside a product per head. Without this order it slices several matrices at once, of equal shapes
    or of several layers, and copies those to HBM that it needs last.
    """
    rows, layer = jax.lax.optimization_barrier((rows, layer))
    return rows, stacked[layer]


def _absorb(
    queries_TH: jax.Array,
    k_b_HC: jax.Array,
    rotation: Rotation,
    *,
    config: LatentConfig,
    adapters: LayerAdapters | None,
) -> jax.Array:
    """Return queries against latents and the shared rotated key, float32 [T, A, C + r]."""
    k_b_AnC = k_b_HC.reshape(-1, config.nope_dim, k_b_HC.shape[1])
    queries_TAh = queries_TH.reshape(len(queries_TH), len(k_b_AnC), -1)
    plain_TAn, turned_TAr = queries_TAh[..., : config.nope_dim], queries_TAh[..., config.nope_dim :]
    turned_TAr = rotate(turned_TAr, rotation, interleaved=config.interleaved_rotation)
    absorbed_TAC = _multiply("AnC,TAn->TAC", k_b_AnC, plain_TAn)
    absorbed_TAC = with_absorbed(absorbed_TAC, plain_TAn, "k_b_LHC", adapters=adapters)
    return jnp.concatenate([absorbed_TAC, turned_TAr.astype(jnp.float32)], axis=-1)


def _multiply(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply per head, accumulated in float32; the result stays float32."""
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)
