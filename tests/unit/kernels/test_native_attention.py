"""Attention by the native CPU kernel is attention by pure JAX, whoever shares the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.cpu_native.calls import LAYOUT_OF
from rayserve_moe.kernels.cpu_native.layout import pack
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import CPU, CPU_NATIVE
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.layers.attention import attention_config
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import TENSOR
from tests.support.kernels.native_kernels import laid_out, need_native_kernels
from tests.support.models.attention_specs import attention_of, with_attention

PAGE, BLOCK, NUM_LAYERS, LAYER = 16, 8, 2, 1
PAGES_OF = np.array([[3, 1, 7, 5], [2, 4, 6, 8], [9, 10, 11, 12]], np.int32)
"""Pages of three sequences; those of others, and page 0, hold NaN."""
NUM_PAGES = 14


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    need_native_kernels()


def spec_with(*, norm_offset: float = 0.0, **changes: Any) -> ModelSpec:
    """A tiny model with other values in its config, or of knobs of its attention or rotation."""
    spec = spec_from_hf(
        replace(PRESETS["tiny"], num_hidden_layers=NUM_LAYERS, num_attention_heads=6).hf_config("float32")
    )
    return replace(with_attention(spec, **changes), norm_offset=norm_offset)


def drawn_weights(spec: ModelSpec) -> dict[str, jax.Array]:
    generator = np.random.default_rng(1)
    specs = parameter_specs(spec, dtype="bfloat16")["gqa"]
    return {
        name: jnp.asarray(generator.standard_normal(p.shape) * 0.1 + ("norm" in name), p.dtype)
        for name, p in specs.items()
    }


def batch_of(singles: list[tuple[int, int]], blocks: list[tuple[int, int, int]]) -> TokenBatch:
    """Single tokens (sequence, position), then blocks (sequence, first position, number of tokens); -1 is nobody."""
    positions = [position for _, position in singles]
    sequences = [sequence for sequence, _ in singles]
    for sequence, first, count in blocks:
        positions += [*range(first, first + count), *[-1] * (BLOCK - count)]
        sequences += [sequence] * BLOCK
    tables = PAGES_OF[[sequence for sequence, *_ in [*singles, *blocks]]]
    slots = [
        PAGES_OF[sequence, position // PAGE] * PAGE + position % PAGE if position >= 0 else 0
        for sequence, position in zip(sequences, positions, strict=True)
    ]
    arrays = (np.asarray(numbers, np.int32) for numbers in (np.zeros(len(slots)), positions, slots, tables))
    return TokenBatch(*arrays, num_singles=len(singles))


def pool_of(spec: ModelSpec) -> jax.Array:
    own = attention_of(spec)
    shape = (NUM_LAYERS, NUM_PAGES, PAGE, own.num_kv_heads, own.head_dim + own.value_width)
    pool = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    pool[:, np.setdiff1d(np.arange(NUM_PAGES), PAGES_OF)] = np.nan
    return jnp.asarray(pool, jnp.bfloat16).reshape(-1, *shape[2:])


def run(
    kernels: Kernels,
    spec: ModelSpec,
    batch: TokenBatch,
    hidden: jax.Array,
    weights: dict[str, jax.Array],
    *,
    adapters: LayerAdapters | None = None,
):
    """Output [T, D] and the pool, as one compiled program: the pool is written in place there."""

    def layer(hidden: jax.Array, weights: dict[str, jax.Array], pool: jax.Array, batch: TokenBatch):
        own = attention_of(spec)
        rotation = rotation_of(batch.positions_T, rope_frequencies(own.rope, own.rotary_width))
        inputs = AttentionInputs(weights, batch, rotation, jnp.int32(LAYER), adapters=adapters)
        out, pool = kernels.attention.attend(hidden, pool, inputs, config=attention_config(own, spec))
        return out.astype(hidden.dtype), pool

    out, pool = jax.jit(layer)(hidden, weights, pool_of(spec), batch)
    return np.asarray(out, np.float32), np.asarray(pool, np.float32)


def natively(spec: ModelSpec, batch: TokenBatch, hidden: jax.Array, *, adapters: LayerAdapters | None = None):
    packed = {name: laid_out(array) if LAYOUT_OF.get(name) else array for name, array in drawn_weights(spec).items()}
    return run(CPU_NATIVE, spec, batch, hidden, packed, adapters=adapters)


def drawn_hidden(num_tokens: int, width: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(num_tokens).standard_normal((num_tokens, width)), jnp.bfloat16)


MIXED = "both, with an empty block"
CASES = {
    "one token": ([(0, 0)], []),
    "single tokens, and nobody": ([(0, 37), (1, 15), (2, -1), (2, 63)], []),
    "blocks, one not full": ([], [(0, 0, 8), (0, 8, 3), (2, 30, 8)]),
    MIXED: ([(1, 50), (1, -1)], [(0, 25, 8), (2, 0, 0), (0, 33, 8)]),
}
MODELS: dict[str, dict[str, Any]] = {
    "norms of heads": {},
    "biases": {"bias": True, "qk_norm": "none"},
    "a head per head": {"num_kv_heads": 6},
    "norms after the rotation": {"qk_norm_after_rope": True},
    "norms of all heads, and a clip": {"qk_norm": "full", "clip_qkv": 0.7},
    "sinks and a score scale": {"sinks": True, "score_scale": 0.3},
    "a window": {"windows": (0, 20)},
    "a window shorter than a block, sinks": {"windows": (0, 5), "sinks": True, "head_dim": 80, "bias": True},
    "part of a head": {"rotary_dim": 20},
    "neighbouring pairs of a part": {"interleaved": True, "rotary_dim": 36, "head_dim": 48},
    "neighbouring pairs": {"interleaved": True},
    "an output gate, and float32 norms": {"output_gate": "sigmoid", "gate_form": "in_query", "norm_offset": 1.0},
    "an output gate and biases": {"output_gate": "sigmoid", "bias": True, "qk_norm": "none"},
    "softplus gates of elements": {"output_gate": "softplus", "head_dim": 24},
    "softplus gates of heads": {"output_gate": "softplus", "gate_form": "head", "head_dim": 24},
    "sigmoid gates of heads": {"output_gate": "sigmoid", "gate_form": "head"},
    "no rotation": {"rope": None},
    "normed values": {"value_norm": True, "score_scale": 1.0},
    "keys as values": {"values": "keys", "value_norm": True},
    "normed wide values": {"value_dim": 40, "value_norm": True},
    "narrow values, scaled": {"value_dim": 20, "value_scale": 0.707, "sinks": True},
    "wide values, gates of elements": {"head_dim": 24, "value_dim": 40, "output_gate": "sigmoid", "bias": True},
    **{f"heads of {width}": {"head_dim": width} for width in (8, 16, 24, 64, 96, 160, 192, 512)},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model", "case"), [*(("norms of heads", case) for case in CASES), *((model, MIXED) for model in list(MODELS)[1:])]
)
def test_it_is_the_pure_layer(model, case):
    spec, batch = spec_with(**MODELS[model]), batch_of(*CASES[case])
    hidden = drawn_hidden(len(batch.positions_T), spec.hidden_size)
    out, pool = natively(spec, batch, hidden)
    expected, expected_pool = run(CPU, spec, batch, hidden, drawn_weights(spec))
    here = batch.positions_T >= 0
    # Queries, keys and attended values round to 8 bits on either side, and then the result does.
    np.testing.assert_allclose(out[here], expected[here], rtol=2**-7, atol=2**-6 * np.abs(expected[here]).max())
    used = np.unique(PAGES_OF) + LAYER * NUM_PAGES
    np.testing.assert_allclose(pool[used], expected_pool[used], rtol=2**-6, atol=2**-6)
    others = np.setdiff1d(np.arange(len(pool)), used)
    untouched = np.setdiff1d(others, [LAYER * NUM_PAGES])
    np.testing.assert_array_equal(pool[untouched], np.asarray(pool_of(spec), np.float32)[untouched])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "model", ["norms of heads", "biases", "softplus gates of heads", "keys as values", "narrow values, scaled"]
)
def test_a_layer_that_only_stores_stores_what_one_that_attends_does(model):
    spec, batch = spec_with(**MODELS[model]), batch_of(*CASES[MIXED])
    hidden = drawn_hidden(len(batch.positions_T), spec.hidden_size)
    _, stored = natively(spec, replace(batch, stores_only=True), hidden)
    _, expected = natively(spec, batch, hidden)
    np.testing.assert_array_equal(stored, expected)
    assert not np.array_equal(stored, np.asarray(pool_of(spec), np.float32), equal_nan=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "model",
    [
        "norms of heads",
        "a window shorter than a block, sinks",
        "an output gate, and float32 norms",
        "softplus gates of heads",
    ],
)
def test_a_token_comes_out_the_same_alone_in_company_and_in_a_block(model):
    spec = spec_with(**MODELS[model])
    hidden = drawn_hidden(BLOCK, spec.hidden_size)
    in_block, pool = natively(spec, batch_of([], [(0, 33, 8)]), hidden)
    padded = jnp.concatenate([drawn_hidden(3, spec.hidden_size), hidden[:5], jnp.zeros_like(hidden[:3])])
    in_company, _ = natively(spec, batch_of([(1, 3), (2, 60), (2, -1)], [(0, 33, 5)]), padded)
    np.testing.assert_array_equal(in_company[3:8], in_block[:5])
    alone, one_written = natively(spec, batch_of([(0, 33)], []), hidden[:1])
    np.testing.assert_array_equal(alone, in_block[:1])
    slot = PAGES_OF[0, 2] + LAYER * NUM_PAGES, 1
    np.testing.assert_array_equal(one_written[slot], pool[slot])


def test_a_norm_over_the_heads_of_two_devices_is_that_of_one():
    spec = spec_with(qk_norm="full", bias=True)
    batch, plan = batch_of(*CASES[MIXED]), plan_for(jax.devices()[:2], data_size=1)
    hidden, heads, alike = drawn_hidden(len(batch.positions_T), spec.hidden_size), P(None, None, TENSOR), P()

    def layer(hidden: jax.Array, weights: dict[str, jax.Array], pool: jax.Array, batch: TokenBatch):
        packed = {name: pack(array) if LAYOUT_OF.get(name) else array for name, array in weights.items()}
        own = attention_of(spec)
        rotation = rotation_of(batch.positions_T, rope_frequencies(own.rope, own.rotary_width))
        inputs = AttentionInputs(packed, batch, rotation, jnp.int32(LAYER))
        out, pool = CPU_NATIVE.attention.attend(hidden, pool, inputs, config=attention_config(own, spec, plan))
        return plan.sum_over_tensor(out), pool

    axes = parameter_specs(spec, dtype="bfloat16", tensor_size=2)["gqa"]
    in_specs = alike, {name: plan.partition(param.axes) for name, param in axes.items()}, heads, alike
    step = jax.shard_map(layer, mesh=plan.mesh, in_specs=in_specs, out_specs=(alike, heads), check_vma=False)
    out, _ = jax.jit(step)(hidden, drawn_weights(spec), pool_of(spec), batch)
    expected, _ = natively(spec, batch, hidden)
    here = batch.positions_T >= 0
    np.testing.assert_allclose(np.asarray(out)[here], expected[here], atol=2**-7 * np.abs(expected[here]).max())


def test_what_lies_behind_a_window_has_no_effect():
    """Its pages may be gone: the table then has others in their place, here one of NaN, and one that there is not."""
    spec = spec_with(windows=(0, 20), sinks=True)
    batch, hidden = batch_of([(1, 60)], [(0, 38, 8)]), drawn_hidden(1 + BLOCK, spec.hidden_size)
    whole, _ = natively(spec, batch, hidden)
    tables = np.array(batch.page_table_BP)
    tables[0, :2], tables[1, 0] = (0, NUM_PAGES), -1  # the first keys that they see are 41 and 19
    cut, _ = natively(spec, replace(batch, page_table_BP=tables), hidden)
    np.testing.assert_array_equal(cut, whole)
    with pytest.raises(Exception, match="lies outside the pool"):
        natively(spec, replace(batch, page_table_BP=np.full_like(tables, NUM_PAGES)), hidden)


def test_a_later_token_that_is_not_finite_leaves_the_earlier_ones_as_they_are():
    """A weight of zero times what is not finite is not zero."""
    spec = spec_with()
    batch, hidden = batch_of([], [(0, 33, 8)]), drawn_hidden(BLOCK, spec.hidden_size)
    whole, _ = natively(spec, batch, hidden)
    for value in (np.nan, np.inf):
        broken, _ = natively(spec, batch, hidden.at[5].set(value))
        np.testing.assert_array_equal(broken[:5], whole[:5])
        assert np.isnan(broken[5:]).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"q_norm_Lh": (NUM_LAYERS, 16)}, {"q_norm_Lh": (1, 32)}, {"sinks_LA": (NUM_LAYERS, 5)},
        {"q_bias_LH": (NUM_LAYERS, 32)}, {"gate_LDH": (NUM_LAYERS, 128, 5)},
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(wrong):
    spec = spec_with(output_gate="sigmoid")
    weights = drawn_weights(spec) | {name: jnp.ones(shape, jnp.bfloat16) for name, shape in wrong.items()}
    with pytest.raises(Exception, match="weights of attention do not fit"):
        run(CPU_NATIVE, spec, batch_of([(0, 5)], []), drawn_hidden(1, spec.hidden_size), weights)


def test_windows_of_other_layers_are_refused():
    spec = spec_with(windows=(0, 5))
    other = with_attention(replace(spec, layers=(*spec.layers, spec.layers[-1])), windows=(0, 5, 5))
    with pytest.raises(Exception, match="each layer has a window"):
        run(CPU_NATIVE, other, batch_of([(0, 5)], []), drawn_hidden(1, spec.hidden_size), drawn_weights(spec))


@pytest.mark.parametrize(
    "changes",
    [
        {"page_table_BP": np.full((1, 4), NUM_PAGES, np.int32)},
        {"page_table_BP": np.full((1, 4), -1, np.int32)},
        {"kv_slots_T": np.full(1, NUM_PAGES * PAGE, np.int32)},
        {"kv_slots_T": np.full(1, -1, np.int32)},
        {"positions_T": np.full(1, 4 * PAGE, np.int32)},
    ],
)
def test_places_outside_the_pool_are_refused(changes):
    spec = spec_with()
    batch = replace(batch_of([(0, 5)], []), **changes)
    with pytest.raises(Exception, match="lies outside the pool"):
        natively(spec, batch, drawn_hidden(1, spec.hidden_size))
