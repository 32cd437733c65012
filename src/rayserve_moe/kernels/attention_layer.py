"""Grouped-query attention of one layer over the paged KV pool: from normed tokens to the output product."""

# T tokens   D model width   H local query heads   G local KV heads   h head width   B blocks   Q tokens per block
# L layers   P page-table width   U single-token blocks

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.layers import Rotation, project, rms_norm, rotate

PagedAttention = Callable[..., jax.Array]
"""The signature of `attention_reference.attend`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """The tokens of a step, a ragged batch laid out as `[U single tokens | prefill blocks of Q tokens]`.

    `token_ids_T`, `positions_T` (-1: padding) and `kv_slots_T` are int32 [T]; `page_table_BP` int32 holds the pages
    of the sequence that each block belongs to. `num_singles` is U.
    """

    token_ids_T: jax.Array
    positions_T: jax.Array
    kv_slots_T: jax.Array
    page_table_BP: jax.Array
    num_singles: int = field(metadata={"static": True})

    @property
    def num_prefill_blocks(self) -> int:
        return self.page_table_BP.shape[0] - self.num_singles

    @property
    def valid_T(self) -> jax.Array:
        """Which tokens are not padding, bool [T]."""
        return self.positions_T >= 0


@dataclass(frozen=True)
class AttentionConfig:
    """What is fixed about the attention of all layers when a step is compiled.

    `head_dim` is h, `eps` that of the norms of queries and keys. `interleaved_rotation`: see `layers.rotate`.
    """

    head_dim: int
    eps: float
    interleaved_rotation: bool = False


def attend_layer(  # noqa: PLR0913 (what differs from call to call is by keyword)
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    kv_pages: jax.Array,
    *,
    batch: TokenBatch,
    rotation: Rotation,
    layer: jax.Array,
    config: AttentionConfig,
    decode: PagedAttention,
    prefill: PagedAttention,
) -> tuple[jax.Array, jax.Array]:
    """Return the float32 output product [T, D], a partial sum over devices, and the pool with new keys and values.

    `weights` are those of all layers under the names of `model.parameters`; norms of heads and biases may be absent,
    and the output's bias is the caller's to add. `kv_pages` is [L * pages, page, 2 * G, h]: page p of layer l lies at
    l * pages + p. `decode` attends the single tokens, `prefill` the blocks.
    """
    first_page = layer * (kv_pages.shape[0] // len(weights["q_LDH"]))
    with jax.named_scope("projections"):
        of_layer = {name: stacked[layer] for name, stacked in weights.items()}
        queries, keys, values = _project_heads(normed_TD, of_layer, rotation, config)
    with jax.named_scope("kv_update"):
        kv_pages = write_kv(kv_pages, keys, values, batch.kv_slots_T + first_page * kv_pages.shape[1])
    with jax.named_scope("paged_attention"):
        attended_THh = attend_blocks(queries, kv_pages, batch, first_page=first_page, kernels=(decode, prefill))
    with jax.named_scope("output_product"):
        attended_TH = attended_THh.reshape(normed_TD.shape[0], -1)
        return jnp.matmul(attended_TH, of_layer["o_LHD"], preferred_element_type=jnp.float32), kv_pages


def write_kv(kv_pages: jax.Array, keys_TGh: jax.Array, values_TGh: jax.Array, slots_T: jax.Array) -> jax.Array:
    """Put K and V of each token at its slot (page * page_size + offset); returns the updated pool.

    `kv_pages` is [pages, page, 2 * G, h]. Padding tokens point into page 0 of a layer, which no sequence owns. What an
    8-bit pool cannot hold becomes its largest number.
    """
    kv_T = jnp.stack([keys_TGh, values_TGh], axis=2).reshape(-1, *kv_pages.shape[2:])
    return write_rows(kv_pages, kv_T, slots_T)


def write_rows(kv_pages: jax.Array, kv_T: jax.Array, slots_T: jax.Array) -> jax.Array:
    """`write_kv` of rows [T, *row] that are laid out as the pool [pages, page, *row] holds them."""
    num_pages, page_size, *row = kv_pages.shape
    if kv_pages.dtype.itemsize == 1:
        # float8_e4m3fn has no infinity: a plain cast would turn what is too large into NaN.
        largest = float(jnp.finfo(kv_pages.dtype).max)
        kv_T = jnp.clip(kv_T, -largest, largest)
    if len(slots_T) == 1:
        # XLA:CPU turns the write of a single row into a copy of the whole pool; of two rows, it does not.
        slots_T, kv_T = jnp.repeat(slots_T, 2), jnp.repeat(kv_T, 2, axis=0)
    flat = kv_pages.reshape(num_pages * page_size, *row)
    return flat.at[slots_T].set(kv_T.astype(kv_pages.dtype), mode="promise_in_bounds").reshape(kv_pages.shape)


def _project_heads(
    normed_TD: jax.Array, weights: Mapping[str, jax.Array], rotation: Rotation, config: AttentionConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project to heads, normalise and rotate queries and keys: three arrays [T, heads, h]."""
    tokens, width = len(normed_TD), config.head_dim
    turn = partial(rotate, rotation=rotation, interleaved=config.interleaved_rotation)
    queries = project(normed_TD, weights["q_LDH"], weights.get("q_bias_LH")).reshape(tokens, -1, width)
    keys = project(normed_TD, weights["k_LDG"], weights.get("k_bias_LG")).reshape(tokens, -1, width)
    values = project(normed_TD, weights["v_LDG"], weights.get("v_bias_LG")).reshape(tokens, -1, width)
    if "q_norm_Lh" in weights:
        queries = rms_norm(queries, weights["q_norm_Lh"], config.eps)
        keys = rms_norm(keys, weights["k_norm_Lh"], config.eps)
    return turn(queries), turn(keys), values


def attend_blocks(
    queries_THh: jax.Array,
    kv_pages: jax.Array,
    batch: TokenBatch,
    *,
    first_page: jax.Array,
    kernels: tuple[PagedAttention, PagedAttention],
) -> jax.Array:
    """Attend the single tokens and the prefill blocks, each part with its kernel: [T, H, width of values]."""
    singles, (num_tokens, *head_shape), (decode, prefill) = batch.num_singles, queries_THh.shape, kernels
    page_table_BP = batch.page_table_BP + first_page
    parts = []
    if singles:
        positions = batch.positions_T[:singles, None]
        parts.append(decode(queries_THh[:singles, None], kv_pages, page_table_BP[:singles], positions)[:, 0])
    if batch.num_prefill_blocks:
        blocks = (batch.num_prefill_blocks, (num_tokens - singles) // batch.num_prefill_blocks)
        queries_BQHh = queries_THh[singles:].reshape(*blocks, *head_shape)
        positions_BQ = batch.positions_T[singles:].reshape(blocks)
        attended = prefill(queries_BQHh, kv_pages, page_table_BP[singles:], positions_BQ)
        parts.append(attended.reshape(num_tokens - singles, *attended.shape[2:]))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
