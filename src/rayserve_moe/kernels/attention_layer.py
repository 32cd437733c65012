"""Grouped-query attention of a layer over the paged KV pool: from normed tokens to the output product."""

# T tokens   D model width   H local query heads   G local KV heads   h head width   v value width   B blocks
# Q tokens per block   L layers   P page-table width   U single-token blocks

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.adapters import LayerAdapters, with_adapters
from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights, project_rows
from rayserve_moe.kernels.kv_pool import StatePages, write_rows
from rayserve_moe.kernels.reference.attention import BlockPlaces, NewRows, ScoreConfig, Together
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.reference.layers import project as multiply
from rayserve_moe.kernels.row_blocks import ByRows, at_once
from rayserve_moe.kernels.tpu.byte_pairs import is_paired, paired_rows

PagedAttention = Callable[..., jax.Array]
"""The signature of `reference.attention.attend`."""
WritingAttention = Callable[..., tuple[jax.Array, jax.Array]]
"""The signature of `reference.attention.attend_new`."""


GATES: dict[str, Callable[[jax.Array], jax.Array]] = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}
"""Functions of output gates, in float32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """The tokens of a step, a ragged batch laid out as `[U single tokens | prefill blocks of Q tokens]`.

    `token_ids_T`, `positions_T` (-1: padding) and `kv_slots_T` are int32 [T]; `page_table_BP` int32 holds the pages
    of each block's sequence. `num_singles` is U. If layers have different page tables, slots and tables have a further
    dimension ahead, and `layer_pages` assigns them to layers. If several single tokens may belong to the same sequence,
    `sequences_U` int32 holds the sequence of each, with at most `max_together` per sequence (`Together`). `rows_B`
    int32 are the data rank's rows of single tokens and blocks; rows of padding are arbitrary. If
    `stores_only`, nothing reads the outputs of attention: kernels may only store keys and values.
    """

    token_ids_T: jax.Array
    positions_T: jax.Array
    kv_slots_T: jax.Array
    page_table_BP: jax.Array
    num_singles: int = field(metadata={"static": True})
    layer_pages: tuple[StatePages, ...] = field(default=(), metadata={"static": True})
    sequences_U: jax.Array | None = None
    max_together: int = field(default=1, metadata={"static": True})
    rows_B: jax.Array | None = None
    entries_B3: jax.Array | None = None
    """The entries of those rows, int32, if layers keep entries (`reference.gated_delta.RowEntries`)."""
    stores_only: bool = field(default=False, metadata={"static": True})

    @property
    def together(self) -> Together | None:
        """Return the sequences of single tokens; None if no two share a sequence."""
        return None if self.sequences_U is None else Together(self.sequences_U, self.max_together)

    @property
    def num_prefill_blocks(self) -> int:
        return self.page_table_BP.shape[0] - self.num_singles

    @property
    def valid_T(self) -> jax.Array:
        """Return True for tokens that are not padding, bool [T]."""
        return self.positions_T >= 0

    def of_state(self, state: str) -> TokenBatch:
        """Return the batch for layers that keep a state."""
        return replace(self, layer_pages=tuple(pages for pages in self.layer_pages if pages.state == state))

    def of_layer(
        self, layer: jax.Array, kv_pages: jax.Array, num_layers: int
    ) -> tuple[TokenBatch, jax.Array, jax.Array | int]:
        """Return the batch of a layer's page table, the layer's first page in the pool, and its number of pages.

        The batch is one of `of_state`; `layer` is one of the `num_layers` layers that keep the state.
        """
        if not self.layer_pages:
            num_pages = kv_pages.shape[0] // num_layers
            assert num_pages * num_layers == kv_pages.shape[0], "layers have equally many pages"
            return self, layer * num_pages, num_pages
        ((_, layers),) = self.layer_pages
        table, first_page, num_pages = jnp.asarray(np.array(layers, np.int32))[layer]
        own = replace(self, kv_slots_T=self.kv_slots_T[table], page_table_BP=self.page_table_BP[table], layer_pages=())
        return own, first_page, num_pages


class DescribedSingles(NamedTuple):
    """Input of the attention of single tokens, derived from positions, by window; True for tokens but padding."""

    by_window: Mapping[int, Any]
    valid_T1: jax.Array


class PagedStep(NamedTuple):
    """Arguments of a layer's paged attention beside queries and pool.

    They are the tokens, the layer's first page, the rows of all tokens, the number of single tokens with rows that the
    attending kernel writes, and the positions that tokens see (`AttentionInputs`).
    """

    batch: TokenBatch
    first_page: jax.Array
    rows_TX: jax.Array
    num_late: int
    chosen_TK: jax.Array | None = None


class PagedKernels(NamedTuple):
    """The attention of single tokens and of prefill blocks; optionally an attention of single tokens that also writes
    their rows, and returns zeros for padding unless tokens share sequences."""

    decode: PagedAttention
    prefill: PagedAttention
    write_and_decode: WritingAttention | None = None

    def with_knobs(self, **knobs: Any) -> PagedKernels:
        """Return the kernels with keyword arguments bound."""
        writing = self.write_and_decode
        writing = None if writing is None else partial(writing, **knobs)
        return PagedKernels(partial(self.decode, **knobs), partial(self.prefill, **knobs), writing)


class ProjectedRows(NamedTuple):
    """Tokens that the products of a layer read."""

    normed_TD: jax.Array
    rotation: Rotation
    place_T: jax.Array | None
    """Place of each token's adapter (`TokenAdapters`); None for a step without adapters."""

    def adapters(self, of_layer: LayerAdapters | None) -> LayerAdapters | None:
        """Return the adapters of these rows."""
        return None if of_layer is None or self.place_T is None else of_layer.for_rows(self.place_T)


class AttentionInputs(NamedTuple):
    """Arguments of a layer's attention besides the stream and the pool: weights of all layers under the names of
    `model.parameters`, the tokens of the step, their rotation, and the layer's number; optionally the results of
    `AttentionKernels.describe_singles` and `AttentionKernels.norm_and_project`, and float32 factors of the queries of
    latent attention [T] and the positions that tokens see, int32 [T, K], ascending with -1 behind (None: all), or the
    blocks that they see with the queries of each KV head, [T, G, K]; and the adapters of tokens, if any has one."""

    weights: Mapping[str, jax.Array]
    batch: TokenBatch
    rotation: Rotation
    layer: jax.Array
    singles: DescribedSingles | None = None
    projected: tuple[jax.Array, jax.Array] | None = None
    query_scale_T: jax.Array | None = None
    chosen_TK: jax.Array | None = None
    adapters: LayerAdapters | None = None


def attend_layer(  # noqa: PLR0913 (kernels, by keyword)
    normed_TD: jax.Array,
    kv_pages: jax.Array,
    inputs: AttentionInputs,
    *,
    config: AttentionConfig,
    decode: PagedAttention,
    prefill: PagedAttention,
    project: Callable[..., tuple[jax.Array, jax.Array]] = project_rows,
    write_and_decode: WritingAttention | None = None,
    by_rows: ByRows = at_once,
) -> tuple[jax.Array, jax.Array]:
    """Return the float32 output product [T, D], a partial sum over devices, and the pool with new keys and values.

    Norms, biases and sinks may be absent; the caller adds the output's bias. `kv_pages` is [L * pages, page, G, h + v],
    or has other rows that `project` returns and the kernels read. Page p of layer l lies at l * pages + p, or as
    `batch.layer_pages` assigns. `decode` attends the single tokens, `prefill` the blocks; `project` has the signature
    of `project_rows`. `write_and_decode` replaces `decode` and writes the rows that it attends. `by_rows` applies the
    functions that treat rows independently.
    """
    weights, batch, rotation, layer, singles, projected, _, chosen_TGK, adapters = inputs
    batch, first_page, _ = batch.of_layer(layer, kv_pages, len(weights["q_LDH"]))
    with jax.named_scope("projections"):
        of_layer = {name: stacked[layer] for name, stacked in weights.items()}

        def project_part(part: ProjectedRows) -> tuple[jax.Array, jax.Array]:
            return project(
                part.normed_TD,
                of_layer,
                rotation=part.rotation,
                config=config,
                stacked=StackedWeights(weights, layer),
                adapters=part.adapters(adapters),
            )

        inputs_T = ProjectedRows(normed_TD, rotation, adapters and adapters.tokens.place_T)
        queries, rows = projected or by_rows(project_part, inputs_T)
    rows = paired_rows(rows) if is_paired(kv_pages.dtype) else rows
    num_late = batch.num_singles if write_and_decode else 0
    step = PagedStep(batch, first_page, rows, num_late, chosen_TGK)
    kv_pages = write_early(kv_pages, step)
    with jax.named_scope("paged_attention"):

        def attend(scores: ScoreConfig) -> tuple[jax.Array, jax.Array]:
            kernels = PagedKernels(decode, prefill, write_and_decode)
            kernels = kernels.with_knobs(config=scores, value_width=config.value_dim)
            if chosen_TGK is not None:
                kernels = kernels.with_knobs(block_size=config.block_size)
            if "sinks_LA" in of_layer:
                kernels = kernels.with_knobs(sinks_H=of_layer["sinks_LA"])
            described = singles and singles.by_window[scores.window]
            return attend_blocks(queries, kv_pages, step, kernels=kernels, described=described)

        attended_THh, kv_pages = attend_by_window(attend, layer, config)
    with jax.named_scope("output_product"):
        multiply_out = partial(output_product, weights=of_layer, function=config.output_gate, adapters=adapters)
        return defined(by_rows(multiply_out, (inputs_T, attended_THh)), step, singles), kv_pages


def defined(out_TD: jax.Array, step: PagedStep, singles: DescribedSingles | None) -> jax.Array:
    """Return a layer's outputs with zeros for padding whose attention is undefined (`attend_blocks`)."""
    if singles is None or (step.num_late and step.batch.together is None):
        return out_TD
    return jnp.where(singles.valid_T1, out_TD, 0.0)


def output_product(
    rows: tuple[ProjectedRows, jax.Array],
    *,
    weights: Mapping[str, jax.Array],
    function: str,
    adapters: LayerAdapters | None,
) -> jax.Array:
    """Gate a layer's attended values [T, H, v] and multiply them by its output matrix; return float32 [T, D]."""
    part, attended_THh = rows
    own = part.adapters(adapters)
    attended_THh = gated(attended_THh, part.normed_TD, weights, function=function, adapters=own)
    attended_TH = attended_THh.reshape(len(attended_THh), -1)
    out_TD = jnp.matmul(attended_TH, weights["o_LHD"], preferred_element_type=jnp.float32)
    return with_adapters(out_TD, attended_TH, "o_LHD", adapters=own)


def gated(
    attended_THh: jax.Array,
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    *,
    function: str,
    adapters: LayerAdapters | None,
) -> jax.Array:
    """Return attended values times their gates [T, H, v], or [T, H, 1] if a head has a single gate.

    `function` is a key of GATES, or `none`.
    """
    if function == "none":
        return attended_THh
    name = "gate_LDA" if "gate_LDA" in weights else "gate_LDH"
    made = multiply(normed_TD, weights[name], name=name, adapters=adapters)
    gates = GATES[function](made.astype(jnp.float32))
    return (attended_THh * gates.reshape(*attended_THh.shape[:2], -1)).astype(attended_THh.dtype)


def attend_by_window(
    attend: Callable[[ScoreConfig], tuple[jax.Array, jax.Array]], layer: jax.Array, config: AttentionConfig
) -> tuple[jax.Array, jax.Array]:
    """Attend with the window of a layer; a single program serves all layers, so they need not be unrolled."""
    windows = sorted(set(config.windows or (0,)))
    scores = [ScoreConfig(window, config.score_scale) for window in windows]
    if len(scores) == 1:
        return attend(scores[0])
    which_L = np.array([windows.index(window) for window in config.windows], np.int32)
    return jax.lax.switch(jnp.asarray(which_L)[layer], [partial(attend, score) for score in scores])


def write_early(kv_pages: jax.Array, step: PagedStep) -> jax.Array:
    """Return the pool with the rows of all tokens whose attention does not write them."""
    if step.num_late == len(step.rows_TX):
        return kv_pages
    with jax.named_scope("kv_update"):
        slots_T = step.batch.kv_slots_T[step.num_late :] + step.first_page * kv_pages.shape[1]
        return write_rows(kv_pages, step.rows_TX[step.num_late :], slots_T)


def attend_blocks(
    queries_THh: jax.Array, kv_pages: jax.Array, step: PagedStep, *, kernels: PagedKernels, described: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Attend the single tokens and the prefill blocks: return [T, H, width of values], and the pool with all rows.

    With `described` (see `BlockPlaces`), the result of padding among single tokens is undefined.
    """
    batch, (num_tokens, *head_shape), parts, chosen = step.batch, queries_THh.shape, [], step.chosen_TK
    singles, page_table_BP = batch.num_singles, batch.page_table_BP + step.first_page
    positions_U1 = batch.positions_T[:singles, None]
    if step.num_late:
        assert kernels.write_and_decode is not None, "rows are left to a kernel that writes them"
        places = BlockPlaces(batch.page_table_BP[:singles], positions_U1, described, batch.together)
        new = NewRows(step.rows_TX[:singles], step.first_page)
        attended, kv_pages = kernels.write_and_decode(queries_THh[:singles], kv_pages, places, new)
        parts.append(attended)
    elif singles:
        of_singles = None if chosen is None else chosen[:singles, None]
        places = BlockPlaces(page_table_BP[:singles], positions_U1, described, chosen_BQK=of_singles)
        parts.append(kernels.decode(queries_THh[:singles, None], kv_pages, places)[:, 0])
    if batch.num_prefill_blocks:
        blocks = (batch.num_prefill_blocks, (num_tokens - singles) // batch.num_prefill_blocks)
        queries_BQHh = queries_THh[singles:].reshape(*blocks, *head_shape)
        of_blocks = None if chosen is None else chosen[singles:].reshape(*blocks, *chosen.shape[1:])
        places = BlockPlaces(page_table_BP[singles:], batch.positions_T[singles:].reshape(blocks), chosen_BQK=of_blocks)
        attended = kernels.prefill(queries_BQHh, kv_pages, places)
        parts.append(attended.reshape(num_tokens - singles, *attended.shape[2:]))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0], kv_pages
