"""Attention with each knob equals its definition in float64, however a sequence is cut into steps, and on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import CPU
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.layers.attention import GroupedAttention, attention_config, kv_repeats
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec, YarnSpec
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import TENSOR, ParallelPlan
from tests.support.models.attention_specs import attention_of, with_attention
from tests.support.models.core import CORE_CONFIG

NUM_TOKENS, PAGE, BLOCK = 30, 4, 8
PAGES = np.random.default_rng(7).permutation(np.arange(1, 9))
"""Pages of the sequence; page 0 takes what padding writes."""
NUM_PAGES = 12
PROMPT = ((0, 8, 8), (16, 5, 0))
"""Steps of a prompt: the first token, and how many there are in each of two blocks. Single tokens follow."""

YARN = YarnSpec(factor=8.0, original_length=16, attention_factor=1.2)
KNOBS: dict[str, dict[str, Any]] = {
    "norm of heads": {"qk_norm": "head"},
    "norm of heads after the rotation": {"qk_norm": "head", "qk_norm_after_rope": True},
    "norm of all heads": {"qk_norm": "full"},
    "clip": {"clip_qkv": 0.6},
    "clip after the norm of all heads": {"qk_norm": "full", "clip_qkv": 0.9},
    "score scale": {"score_scale": 0.9},
    "sinks": {"sinks": True},
    "windows": {"windows": (0, 5, 11)},
    "one window": {"windows": (6, 6, 6)},
    "sinks, windows, biases and yarn": {"sinks": True, "windows": (5, 0, 5), "bias": True, "yarn": YARN},
    "part of a head": {"rotary_dim": 4},
    "neighbouring pairs": {"interleaved": True},
    "neighbouring pairs of a part": {"interleaved": True, "rotary_dim": 6},
    "yarn": {"yarn": replace(YARN, truncate=False)},
    "no rotation": {"rope": None},
    "sigmoid gates": {"output_gate": "sigmoid"},
    "softplus gates": {"output_gate": "softplus"},
    "values normed": {"value_norm": True},
    "keys as values": {"values": "keys", "value_norm": True, "qk_norm": "head"},
    "narrow values": {"value_dim": 5},
    "wide values, scaled, sinks and gates of elements": {
        "value_dim": 12,
        "value_scale": 0.7,
        "sinks": True,
        "output_gate": "sigmoid",
        "bias": True,
    },
    "softplus gates of heads": {"output_gate": "softplus", "gate_form": "head", "windows": (0, 5, 11)},
}
MESHES = {"2 x 2": (2, 2), "1 x 4, with KV heads on two devices each": (1, 4)}


def spec_with(knobs: dict[str, Any]) -> ModelSpec:
    return with_attention(
        spec_from_hf(CORE_CONFIG.hf_config("float32")), **{"qk_norm": "none", "theta": 100.0, **knobs}
    )


def drawn_weights(spec: ModelSpec) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(11)
    drawn = {}
    for name, param in parameter_specs(spec, dtype="float32")["gqa"].items():
        values = generator.standard_normal(param.shape) * (0.2 if param.initial == "normal" else 0.3)
        drawn[name] = (values + (param.initial == "ones")).astype(np.float32)
    return drawn


def drawn_hidden(spec: ModelSpec) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((NUM_TOKENS, spec.hidden_size)).astype(np.float32)


def definition(spec: ModelSpec, weights: dict[str, np.ndarray], layer: int) -> np.ndarray:
    """The whole sequence at once, in float64."""
    attention, of_layer = attention_of(spec), {name: array[layer].astype(np.float64) for name, array in weights.items()}
    hidden = drawn_hidden(spec).astype(np.float64)
    of_values = "v_LDG" if attention.values == "own" else "k_LDG"
    parts = [hidden @ of_layer[name] for name in ("q_LDH", "k_LDG", of_values)]
    if attention.bias:
        parts = [
            part + of_layer[name] for part, name in zip(parts, ("q_bias_LH", "k_bias_LG", "v_bias_LG"), strict=True)
        ]
    if attention.qk_norm == "full":
        parts = [normed(parts[0], of_layer["q_norm_LH"], spec), normed(parts[1], of_layer["k_norm_LG"], spec), parts[2]]
    widths = attention.head_dim, attention.head_dim, attention.value_width
    queries, keys, values = (part.reshape(NUM_TOKENS, -1, width) for part, width in zip(parts, widths, strict=True))
    values = normed(values, np.ones(1), spec) if attention.value_norm else values
    scales = of_layer.get("q_norm_Lh"), of_layer.get("k_norm_Lh")
    if attention.qk_norm == "head" and not attention.qk_norm_after_rope:
        queries, keys = (normed(part, scale, spec) for part, scale in zip((queries, keys), scales, strict=True))
    if attention.clip_qkv is not None:
        queries, keys, values = (part.clip(-attention.clip_qkv, attention.clip_qkv) for part in (queries, keys, values))
    queries, keys, values = turned(queries, spec), turned(keys, spec), values * attention.value_scale
    if attention.qk_norm == "head" and attention.qk_norm_after_rope:
        queries, keys = (normed(part, scale, spec) for part, scale in zip((queries, keys), scales, strict=True))
    out = attended(queries, keys, values, of_layer, spec, layer)
    return (out * gates(hidden, of_layer, attention)).reshape(NUM_TOKENS, -1) @ of_layer["o_LHD"]


def gates(hidden: np.ndarray, weights: dict[str, np.ndarray], attention: GroupedAttention) -> np.ndarray:
    """The factors of a token's heads, [T, H, h] or [T, H, 1]."""
    if attention.output_gate == "none":
        return np.ones((1, 1, 1))
    raw = hidden @ weights["gate_LDA" if attention.gate_form == "head" else "gate_LDH"]
    of_gate = {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "softplus": lambda x: np.log1p(np.exp(x))}
    return of_gate[attention.output_gate](raw).reshape(NUM_TOKENS, attention.num_heads, -1)


def normed(part: np.ndarray, scale: np.ndarray, spec: ModelSpec) -> np.ndarray:
    return part / np.sqrt((part**2).mean(-1, keepdims=True) + spec.norm_eps) * scale


def turned(heads: np.ndarray, spec: ModelSpec) -> np.ndarray:
    rope, width = attention_of(spec).rope, attention_of(spec).rotary_width
    if rope is None:
        return heads
    places = np.arange(width).reshape(-1, 2).T if rope.interleaved else np.arange(width).reshape(2, -1)
    frequencies = rope_frequencies(rope, width).astype(np.float64)
    angles = np.arange(NUM_TOKENS)[:, None, None] * frequencies
    factor = rope.yarn.attention_factor if rope.yarn else 1.0
    pairs = (heads[..., places[0]] + 1j * heads[..., places[1]]) * np.exp(1j * angles) * factor
    out = heads.copy()
    out[..., places[0]], out[..., places[1]] = pairs.real, pairs.imag
    return out


def attended(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    weights: dict[str, np.ndarray],
    spec: ModelSpec,
    layer: int,
) -> np.ndarray:
    attention = attention_of(spec)
    group = attention.num_heads // attention.num_kv_heads
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scale = attention.head_dim**-0.5 if attention.score_scale is None else attention.score_scale
    scores = np.einsum("thd,shd->hts", queries, keys) * scale
    behind = np.arange(NUM_TOKENS)[:, None] - np.arange(NUM_TOKENS)
    window = spec.layers[layer].window or NUM_TOKENS
    exponentials = np.where((behind >= 0) & (behind < window), np.exp(scores), 0.0)
    total = exponentials.sum(-1)
    if attention.sinks:
        total += np.exp(weights["sinks_LA"])[:, None]
    return np.einsum("hts,shd->thd", exponentials / total[..., None], values)


Step = Callable[..., tuple[jax.Array, jax.Array]]


def step_on(plan: ParallelPlan, spec: ModelSpec) -> Step:
    """One step of one layer as a compiled program: the output product, summed over devices, and the pool."""
    own = attention_of(spec)
    config, yarn = attention_config(own, spec, plan), own.rope and own.rope.yarn

    def step(weights: dict[str, jax.Array], pool: jax.Array, hidden: jax.Array, batch: TokenBatch, layer: jax.Array):
        frequencies = rope_frequencies(own.rope, own.rotary_width)
        rotation = rotation_of(batch.positions_T, frequencies, factor=yarn.attention_factor if yarn else 1.0)
        out, pool = CPU.attention.attend(hidden, pool, AttentionInputs(weights, batch, rotation, layer), config=config)
        return plan.sum_over_tensor(out), pool

    specs = parameter_specs(spec, dtype="float32", tensor_size=plan.tensor_size)["gqa"]
    heads, alike = PartitionSpec(None, None, TENSOR), PartitionSpec()
    of_weights = {name: plan.partition(param.axes) for name, param in specs.items()}
    in_specs = of_weights, heads, alike, alike, alike
    return jax.jit(jax.shard_map(step, mesh=plan.mesh, in_specs=in_specs, out_specs=(alike, heads), check_vma=False))


def run_sequence(spec: ModelSpec, step: Step, layer: int, *, repeats: int = 1) -> np.ndarray:
    """Compute the sequence block by block and then token by token, in a pool of NaN.

    Before every step the pages that lie wholly behind the window of its first token become NaN again.
    """
    weights, hidden, attention = drawn_weights(spec), drawn_hidden(spec), attention_of(spec)
    for name in ("k_LDG", "v_LDG", "k_bias_LG", "v_bias_LG", "k_norm_LG"):
        if name in weights:
            width = attention.value_width if name.startswith("v_") else attention.head_dim
            heads = weights[name].reshape(*weights[name].shape[:-1], -1, width)
            weights[name] = np.repeat(heads, repeats, axis=-2).reshape(*weights[name].shape[:-1], -1)
    row_width = attention.head_dim + attention.value_width
    shape = spec.num_layers * NUM_PAGES, PAGE, attention.num_kv_heads * repeats, row_width
    pool, found = np.full(shape, np.nan, np.float32), np.full(hidden.shape, np.nan)
    window = spec.layers[layer].window or NUM_TOKENS
    steps = [(-1, first, counts) for first, *counts in PROMPT]
    steps += [(position, 0, (0, 0)) for position in range(sum(sum(counts) for _, *counts in PROMPT), NUM_TOKENS)]
    for single, first, counts in steps:
        places = np.full(1 + 2 * BLOCK, -1)
        places[0] = single
        for block, count in enumerate(counts):
            places[1 + block * BLOCK :][:count] = first + sum(counts[:block]) + np.arange(count)
        num_unseen = max(places[places >= 0].min() - window + 1, 0) // PAGE
        pool[layer * NUM_PAGES + PAGES[:num_unseen]] = np.nan
        out, new_pool = step(weights, pool, hidden[places], batch_of(places), np.int32(layer))
        pool = np.array(new_pool)
        found[places[places >= 0]] = np.asarray(out)[places >= 0]
    return found


def batch_of(places: np.ndarray) -> TokenBatch:
    slots = np.where(places >= 0, PAGES[places // PAGE] * PAGE + places % PAGE, 0)
    tables = np.tile(PAGES, (3, 1))
    arrays = (np.asarray(array, np.int32) for array in (np.zeros(len(places)), places, slots, tables))
    return TokenBatch(*arrays, num_singles=1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_a_sequence_in_steps_equals_the_definition_of_every_knob_and_not_the_plain_one(knobs):
    spec = spec_with(knobs)
    weights, step = drawn_weights(spec), step_on(plan_for(jax.devices()[:1]), spec)
    for layer in range(spec.num_layers):
        expected, found = definition(spec, weights, layer), run_sequence(spec, step, layer)
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
        for name in knobs:
            if name in ("gate_form", "values", "value_dim") or (name == "windows" and not knobs[name][layer]):
                continue
            plain = spec_with({knob: value for knob, value in knobs.items() if knob != name})
            assert np.abs(definition(plain, weights, layer) - expected).max() > 1e-3, f"{name} changes nothing"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(
    "name",
    [
        "clip after the norm of all heads",
        "sinks, windows, biases and yarn",
        "softplus gates of heads",
        "wide values, scaled, sinks and gates of elements",
    ],
)
def test_a_mesh_computes_what_one_device_computes(mesh, name):
    spec = spec_with(KNOBS[name])
    plan = plan_for(jax.devices()[: mesh[0] * mesh[1]], data_size=mesh[0])
    one_device, many = step_on(plan_for(jax.devices()[:1]), spec), step_on(plan, spec)
    for layer in (0, 1):
        expected = run_sequence(spec, one_device, layer)
        found = run_sequence(spec, many, layer, repeats=kv_repeats(attention_of(spec), plan.tensor_size))
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
