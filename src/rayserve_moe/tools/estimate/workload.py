"""The work of a step of a served model on a device, for kernels and the roofline.

Every sequence has its whole context, prompts start at `StepSizes.prompt_start`, and every token chooses its experts at
random. A step ends with its fullest device, so the expert slots in use are those of that device.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from rayserve_moe.execution.programs.buckets import PREFILL_BLOCK_TOKENS
from rayserve_moe.execution.weights.placing import parameter_tree
from rayserve_moe.kernels.reference.gated_delta import PIECE
from rayserve_moe.kernels.tpu.delta_visits import TILE
from rayserve_moe.kernels.tpu.packed_rows import layout_of
from rayserve_moe.kernels.tpu.paged_sizes import pages_of_a_block, tile_queries_for
from rayserve_moe.model.layers.index_rows import STATE as INDEX_KEYS
from rayserve_moe.model.layers.index_rows import index_layout
from rayserve_moe.model.layers.latent import SPARSE, LatentAttention
from rayserve_moe.model.layers.sparse_latent import index_of
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.spec import MixerSpec, ModelSpec, ScoreShape
from rayserve_moe.model.states import KeptState, entry_states, state_of_mixer, token_states
from rayserve_moe.parallel.mesh import cores_of
from rayserve_moe.tools.estimate.step_work import AttentionSizes, AttentionWork, RecurrentWork, SparseWork, StepWork


@dataclass(frozen=True)
class StepSizes:
    """Sizes of the steps of a data rank on a topology."""

    topology: str
    sequences: int
    context: int
    """Tokens of each sequence."""
    page_size: int = 128
    dtype: str = "bfloat16"
    """Dtype of the weights."""
    kv_dtype: str = "bfloat16"
    singles: int = 0
    """Capacity of the step for single tokens; 0: the number of sequences."""
    rows_each: int = 1
    """Single tokens per sequence; more than 1 if drafts are verified."""
    prompt_start: int = 0
    """Prompt tokens computed by earlier steps."""

    @property
    def rows(self) -> int:
        return self.sequences * self.rows_each

    @property
    def places(self) -> int:
        return max(self.singles, self.rows)


def step_work(model: ModelConfig, sizes: StepSizes, *, prompt_tokens: int = 0) -> StepWork:
    """Return the work of a step of all sequences, with `prompt_tokens` more per data rank.

    A layer sees all positions, or those of its window. Weights count if a step uses them; for expert slots the expected
    share of the device with most slots in use.
    """
    plan, spec, experts = model.plan, model.spec, model.experts
    num_devices = plan.mesh.devices.size
    all_tokens = (sizes.rows + prompt_tokens) * plan.data_size
    slots = experts.num_slots // num_devices
    used_slots = fullest_slots(slots, num_devices, share=spec.router.top_k / experts.num_slots, num_tokens=all_tokens)
    expert_rows = all_tokens * spec.router.top_k / num_devices
    of_slot = used_slots / slots, expert_rows / slots
    flops, weight_bytes = _weight_work(model, sizes, of_slot=of_slot, prompt_tokens=prompt_tokens)
    sparse = _sparse_work(model, sizes, prompt_tokens=prompt_tokens)
    attention, attention_flops = _attention_of_layers(model, sizes, sparse, prompt_tokens=prompt_tokens)
    index_flops = 0.0 if sparse is None else _index_flops(spec, sparse)
    devices = devices_of_token(experts.num_slots, num_devices, top_k=spec.router.top_k)
    rows_sent = all_tokens / num_devices * devices
    exchanged = 2 * rows_sent * spec.exchanged_width * jnp.dtype(sizes.dtype).itemsize * len(spec.moe_layer_ids)
    return StepWork(
        used_slots,
        expert_rows,
        attention,
        flops + attention_flops + index_flops,
        weight_bytes + _state_bytes(model, sizes, sparse, prompt_tokens=prompt_tokens),
        _recurrent_work(model, sizes, prompt_tokens=prompt_tokens),
        exchanged_bytes=exchanged,
        device_share=devices / num_devices,
        sparse=sparse,
    )


def _weight_work(
    model: ModelConfig, sizes: StepSizes, *, of_slot: tuple[float, float], prompt_tokens: int
) -> tuple[float, float]:
    """Return the operations of products with weights on a device, and the bytes of these weights.

    `of_slot` are the share of expert slots in use, and the mean number of rows of a slot.
    """
    plan, flops, num_bytes = model.plan, 0.0, 0.0
    for group, specs in parameter_tree(model, dtype=sizes.dtype).items():
        for name, param in specs.items():
            elements = math.prod(plan.sharding(param.axes).shard_shape(param.shape))
            used, rows = of_slot if param.num_experts else (1.0, sizes.rows + prompt_tokens)
            if group == "embedding":
                used, rows = _of_table(name, ties=model.spec.tie_embeddings), sizes.rows * plan.data_size
            num_bytes += used * elements * jnp.dtype(param.dtype).itemsize
            flops += 2 * elements * rows * (1 if used else 0)
    return flops, num_bytes


def _attention_of_layers(
    model: ModelConfig, sizes: StepSizes, sparse: SparseWork | None, *, prompt_tokens: int
) -> tuple[dict[AttentionSizes, AttentionWork], float]:
    """Return the mean work of each call of attention over the layers with this call, and the operations of all."""
    calls: dict[AttentionSizes, list[AttentionWork]] = {}
    flops, see_some = 0.0, sparse is not None and sparse.num_tokens > 0
    for mixer, shape in _scoring(model.spec):
        kept = state_of_mixer(model, mixer)
        row_bytes = kept.row_bytes(model.plan, dtype=sizes.kv_dtype)
        of_layer = partial(_attention_work, model, shape, sizes, row_bytes=row_bytes, prompt_tokens=prompt_tokens)
        for window, num_layers in Counter(kept.windows).items():
            for call, work in of_layer(window=window).items():
                of_call = _without_singles(work) if see_some else work
                calls[call] = [*calls.get(call, []), *[of_call] * num_layers]
            heads = shape.num_heads // model.plan.tensor_size
            limit = sparse.top_k if sparse is not None and see_some else window
            of_prompt = sparse.top_k if sparse is not None and sparse.index_blocks else window
            pairs = _seen(sizes, of_prompt, of_single=limit, prompt_tokens=prompt_tokens)
            flops += 2 * heads * (shape.key_width + shape.value_width) * pairs * num_layers
    return {call: _mean(works) for call, works in calls.items()}, flops


def _state_bytes(model: ModelConfig, sizes: StepSizes, sparse: SparseWork | None, *, prompt_tokens: int) -> float:
    """Return the bytes of states that a step reads."""
    plan = model.plan

    def rows_of(state: KeptState) -> int:
        limit = _rows_read(state.kind.name, sizes, sparse)
        num = sizes.sequences
        if sparse is not None and state.kind.name == INDEX_KEYS:
            num = math.ceil(num / plan.tensor_size)
        before = math.ceil(prompt_tokens / min(sizes.context, max(prompt_tokens, 1))) * sizes.prompt_start
        return sum(
            num * min(limit, window or limit) + min(before, window or before) + prompt_tokens
            for window in state.windows
        )

    of_tokens = sum(state.row_bytes(plan, dtype=sizes.kv_dtype) * rows_of(state) for state in token_states(model))
    # A sequence reads its entry, and half of its ring on average.
    return of_tokens + sizes.sequences * sum(
        (state.row_bytes(plan, dtype=sizes.kv_dtype) + state.ring_bytes(plan, dtype=sizes.kv_dtype) // 2)
        * state.num_layers
        for state in entry_states(model)
    )


def _sparse_work(model: ModelConfig, sizes: StepSizes, *, prompt_tokens: int) -> SparseWork | None:
    """Return the work of a layer with sparse attention; prompts are no longer than the context."""
    layout = index_layout(model.spec)
    if layout is None or layout.block_size > 1:  # XLA scores all keys, and masks those of other blocks
        return None
    singles = sizes.rows if sizes.context > layout.top_k else 0
    length = min(sizes.context, prompt_tokens)
    blocks = math.ceil(prompt_tokens / PREFILL_BLOCK_TOKENS) if sizes.prompt_start + length > layout.top_k else 0
    return SparseWork(
        singles,
        sizes.context,
        layout.top_k,
        index_tokens=math.ceil(singles / model.plan.tensor_size),
        index_blocks=math.ceil(blocks / model.plan.tensor_size),
        prompt_context=sizes.prompt_start + length // 2 if blocks else 0,
    )


def _rows_read(state: str, sizes: StepSizes, sparse: SparseWork | None) -> int:
    """Return the rows of a state that a sequence reads in a layer: an index only if tokens do not see all."""
    if sparse is None:
        return sizes.context
    if state == INDEX_KEYS:
        return sizes.context if sparse.num_tokens else 0
    return min(sizes.context, sparse.top_k)


def _index_flops(spec: ModelSpec, sparse: SparseWork) -> float:
    """Return the operations of the indexes of all layers on a device."""
    own = spec.mixer(SPARSE)
    assert isinstance(own, LatentAttention), own
    index, num_layers = index_of(own), len(spec.layers_with_mixer(SPARSE))
    of_prompts = sparse.index_blocks * PREFILL_BLOCK_TOKENS * sparse.prompt_context
    return 2 * index.num_heads * index.head_dim * num_layers * (sparse.index_tokens * sparse.context + of_prompts)


def _without_singles(work: AttentionWork) -> AttentionWork:
    """Return the work of a call of dense attention if its single tokens do not see all."""
    return work if work.is_of_prompts else AttentionWork(0, 0, 0, 0)


def fullest_slots(num_slots: int, num_devices: int, *, share: float, num_tokens: int) -> float:
    """Return the expected number of expert slots in use on the device that uses most of its `num_slots`.

    `share` is the probability that a token uses a slot. Slots are taken as independent, which 16 tokens of 8 experts
    on 8 devices change by 1 %.
    """
    in_use = 1 - (1 - share) ** num_tokens
    cumulative = np.cumsum(
        [math.comb(num_slots, k) * in_use**k * (1 - in_use) ** (num_slots - k) for k in range(num_slots)]
    )
    return float(np.sum(1 - cumulative.clip(0.0, 1.0) ** num_devices))


def devices_of_token(num_slots: int, num_devices: int, *, top_k: int) -> float:
    """Return the expected number of devices that have an expert of a token, out of `num_slots` on all devices."""
    elsewhere = num_slots - num_slots // num_devices
    return num_devices * (1 - math.comb(elsewhere, top_k) / math.comb(num_slots, top_k))


def _recurrent_work(model: ModelConfig, sizes: StepSizes, *, prompt_tokens: int) -> RecurrentWork | None:
    """Return the work of a layer with a recurrent state: cursors are everywhere in rings, and prompts begin.

    A row writes an entry once per `entry_tokens` tokens. Before that it reads the whole ring, else up to its cursor, in
    tiles.
    """
    kinds = [state.kind for state in entry_states(model)]
    if not kinds:
        return None
    chunk, tokens = kinds[0].entry_tokens, sizes.rows + prompt_tokens
    read = [chunk, *(math.ceil(cursor / TILE) * TILE for cursor in range(1, chunk))]
    prompts = math.ceil(prompt_tokens / min(sizes.context, prompt_tokens)) if prompt_tokens else 0
    visits = sizes.sequences + prompts
    ring_tokens = sum(read) / chunk * sizes.sequences / visits
    return RecurrentWork(sizes.rows, prompt_tokens / PIECE, visits, ring_tokens, tokens / chunk)


def _scoring(spec: ModelSpec) -> list[tuple[MixerSpec, ScoreShape]]:
    """Return the mixers that score keys."""
    return [(mixer, shape) for mixer in spec.mixers if (shape := mixer.score_shape()) is not None]


def _of_table(name: str, *, ties: bool) -> float:
    """Return the share of an array that is read fully: the head, not the table unless it is also the head."""
    return 1.0 if ties or not name.startswith("table") else 0.0


def _seen(sizes: StepSizes, window: int, *, of_single: int, prompt_tokens: int) -> float:
    """Return the number of pairs of queries and keys in a layer with a window (0: none).

    A single token sees at most `of_single` keys (0: no limit).
    """
    length, seen = min(sizes.context, max(prompt_tokens, 1)), min(sizes.context, of_single or sizes.context)

    def up_to(end: int) -> float:
        of_query = min(end, window or end)
        return of_query * end - of_query**2 / 2

    of_prompt = up_to(sizes.prompt_start + length) - up_to(sizes.prompt_start)
    return sizes.rows * seen + prompt_tokens / length * of_prompt


def _attention_work(
    model: ModelConfig, scores: ScoreShape, sizes: StepSizes, *, window: int, row_bytes: int, prompt_tokens: int
) -> dict[AttentionSizes, AttentionWork]:
    """Return the work of a layer on single tokens and on blocks of prompts; every core has equally many blocks."""
    num, cores = sizes.sequences, cores_of(model.plan.mesh)
    row_lanes = row_bytes // jnp.dtype(sizes.kv_dtype).itemsize
    widths = (scores.value_width, 0) if scores.values_are_keys else (0, scores.value_width)
    layout = layout_of(row_lanes, scores.key_width, latent_width=widths[0], value_width=widths[1])

    def call_of(num_blocks: int) -> AttentionSizes:
        return AttentionSizes(_whole(num_blocks, cores), layout.num_sets, layout.value_lanes)

    def keys_of(first_query: int, end: int) -> tuple[int, int]:
        return (max(0, first_query - window + 1) if window else 0), end

    work = {call_of(sizes.places): _visits(sizes, [keys_of(sizes.context - 1, sizes.context)] * num, row_bytes)}
    if prompt_tokens:
        query_rows = scores.num_heads // model.plan.tensor_size // layout.num_sets
        length, tile = min(sizes.context, prompt_tokens), tile_queries_for(PREFILL_BLOCK_TOKENS, query_rows)
        start = sizes.prompt_start
        tiles = [keys_of(start + end, start + min(length, end + tile)) for end in range(0, length, tile)]
        num_blocks = math.ceil(prompt_tokens / PREFILL_BLOCK_TOKENS)
        of_prompts = _visits(sizes, tiles * math.ceil(prompt_tokens / length), row_bytes)
        work[call_of(num_blocks)] = replace(of_prompts, is_of_prompts=True)
    return work


def _visits(sizes: StepSizes, tiles: list[tuple[int, int]], row_bytes: int) -> AttentionWork:
    """Return the visits of query tiles that see keys from a first one up to an end."""
    of_block = pages_of_a_block(sizes.page_size, row_bytes, math.ceil(sizes.context / sizes.page_size))
    pages = [math.ceil(end / sizes.page_size) - first // sizes.page_size for first, end in tiles]
    visits, num = sum(math.ceil(each / of_block) for each in pages), len(tiles)
    return AttentionWork(num, visits, sum(pages) * sizes.page_size * row_bytes, sum(pages))


def _mean(works: list[AttentionWork]) -> AttentionWork:
    """Return the mean of the calls of layers, which differ in their windows."""
    num = len(works)
    return replace(
        works[0],
        num_visits=sum(work.num_visits for work in works) / num,
        kv_bytes=sum(work.kv_bytes for work in works) / num,
        num_pages=sum(work.num_pages for work in works) / num,
        num_layers=num,
    )


def _whole(num_blocks: int, cores: int) -> int:
    """Return the number of blocks rounded up to an equal number per core."""
    cores = min(num_blocks, cores)
    return -(-num_blocks // cores) * cores
