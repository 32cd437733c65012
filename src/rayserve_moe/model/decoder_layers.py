"""Layers of the decoder: a mixer and a feed-forward network, or one of them, each with its norm and residual."""

# T tokens   D model width   L layers   M MoE layers

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.layer import LayerRouting
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.layer_runs import LayerRun
from rayserve_moe.model.layers.kinds import FfnRows, LayerInputs
from rayserve_moe.model.layers.table import FFNS, MIXERS
from rayserve_moe.model.model_config import NO_CAPTURES, Captures, ModelConfig, Parameters, Pools, StepInputs
from rayserve_moe.model.spec import NO_PART, LayerSpec


class LayerCarry(NamedTuple):
    """Arrays that a layer passes to the next one."""

    hidden_TD: jax.Array
    """The residual stream."""
    added_TD: jax.Array
    """The output to add to it, together with the next norm: on a TPU both are one operation."""
    pools: Pools
    num_done: jax.Array
    """Completed periods of the run. It is carried because scanning over an index would add an operation per layer."""
    passed: Pools
    """Arrays that layers pass on to later layers of the step (`Mixer.passed`)."""


class PeriodOutputs(NamedTuple):
    """Outputs of the layers of a period, in their order."""

    routings: tuple[LayerRouting, ...]
    """Routing of each layer with experts."""
    captured: tuple[jax.Array, ...]
    """Captured array of each layer with one (`Mixer.captured`), if requested."""
    sketches: tuple[jax.Array, ...]
    """Sketch [T, P] of the residual stream after each layer, if requested."""


class LayerPlace(NamedTuple):
    """Indices of a layer."""

    layer: jax.Array
    """In the model."""
    of_mixer: jax.Array
    """Among layers with the same kind of mixer."""
    of_ffn: jax.Array
    """Among layers with the same kind of feed-forward network."""
    of_norm: jax.Array
    """Among layers with any feed-forward network."""


def first_carry(hidden_TD: jax.Array, pools: Pools, batch: TokenBatch, *, config: ModelConfig) -> LayerCarry:
    """Return the carry of the first layer."""
    passed: Pools = {}
    for own in config.spec.mixers:
        if (passed_by := MIXERS[own.kind].passed) is not None:
            passed |= passed_by(own, batch, pools)
    return LayerCarry(hidden_TD, jnp.zeros_like(hidden_TD), pools, jnp.int32(0), passed)


def step_inputs(batch: TokenBatch, pools: Pools, config: ModelConfig) -> StepInputs:
    """Return the inputs that all layers share, with expert i in slot i."""
    prepared = {
        mixer.kind: MIXERS[mixer.kind].prepare(mixer, batch, pools, config=config) for mixer in config.spec.mixers
    }
    return StepInputs(batch, batch.valid_T, prepared)


def visit_period(
    params: Parameters,
    carry: LayerCarry,
    *,
    run: LayerRun,
    inputs: StepInputs,
    config: ModelConfig,
    captures: Captures = NO_CAPTURES,
) -> tuple[LayerCarry, PeriodOutputs]:
    """Compute the next period of a run; return the carry and the outputs of its layers."""
    routings, captured, sketches = [], [], []
    for index, kind in enumerate(run.period):
        place = place_of(run, index, carry.num_done)
        carry, routing = apply_layer(params, carry, kind, place=place, inputs=inputs, config=config)
        if routing is not None:
            routings.append(routing if captures.gates else routing._replace(gates_TK=None))
        if captures.index and kind.mixer != NO_PART and (name := MIXERS[kind.mixer].captured):
            captured += carry.passed[name]
        if inputs.sketch_DP is not None:
            sketches.append(sketch_of(carry.hidden_TD + carry.added_TD, inputs.sketch_DP))
    outputs = PeriodOutputs(tuple(routings), tuple(captured), tuple(sketches))
    return carry._replace(num_done=carry.num_done + 1), outputs


@jax.named_scope("sketch")
def sketch_of(hidden_TD: jax.Array, sketch_DP: jax.Array) -> jax.Array:
    """Return the projections of states, float32 [T, P]."""
    return jnp.dot(hidden_TD.astype(jnp.float32), sketch_DP, precision=jax.lax.Precision.HIGHEST)


def place_of(run: LayerRun, index: int, num_done: jax.Array) -> LayerPlace:
    """Return the place of a layer of a period, after `num_done` periods."""
    mixers, ffns = ([getattr(kind, name) for kind in run.period] for name in ("mixer", "ffn"))
    num_before = sum(count for name, count in run.first_of_ffn.items() if name != NO_PART)

    def number(first: int, names: Sequence[str | bool]) -> jax.Array:
        own = names[index]
        ahead, stride = names[:index].count(own), names.count(own)
        return first + ahead + (num_done if stride == 1 else num_done * stride)

    return LayerPlace(
        number(run.first, [""] * len(run.period)),
        number(run.first_of_mixer[mixers[index]], mixers),
        number(run.first_of_ffn[ffns[index]], ffns),
        number(num_before, [name != NO_PART for name in ffns]),
    )


def apply_layer(
    params: Parameters,
    carry: LayerCarry,
    kind: LayerSpec,
    *,
    place: LayerPlace,
    inputs: StepInputs,
    config: ModelConfig,
) -> tuple[LayerCarry, LayerRouting | None]:
    """Compute a layer; return the carry and, for a layer with experts, its routing."""
    routing = None
    if kind.mixer != NO_PART:
        carry = add_mixer(params, carry, kind, place=place, inputs=inputs, config=config)
    if kind.ffn != NO_PART:
        hidden_TD, normed_TD = norm_for_ffn(params, carry, place=place, config=config)
        rows = FfnRows(hidden_TD, normed_TD)
        out_TD, routing = FFNS[kind.ffn].apply(params, rows, inputs, kind=kind, layer=place.of_ffn, config=config)
        added_TD = _addend(params, out_TD, "ffn", kind=kind, layer=place.layer, config=config)
        carry = carry._replace(hidden_TD=hidden_TD, added_TD=added_TD)
    if kind.has_scalar:
        scalar_1 = params["layer_scalars"]["scalar_L1"][place.layer]
        hidden_TD = (carry.hidden_TD + carry.added_TD) * scalar_1
        carry = carry._replace(hidden_TD=hidden_TD, added_TD=jnp.zeros_like(hidden_TD))
    return carry, routing


def norm_for_ffn(
    params: Parameters, carry: LayerCarry, *, place: LayerPlace, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Return the residual stream [T, D] after the addend, and its norm for the feed-forward network [T, D]."""
    return _add_and_norm(carry.hidden_TD, carry.added_TD, params["mlp_norm"]["scale"], place.of_norm, config)


def add_mixer(
    params: Parameters,
    carry: LayerCarry,
    kind: LayerSpec,
    *,
    place: LayerPlace,
    inputs: StepInputs,
    config: ModelConfig,
) -> LayerCarry:
    """Compute a mixer with its norm; return the carry with its output as the addend."""
    mixer, own, weights = MIXERS[kind.mixer], config.spec.mixer(kind.mixer), params[kind.mixer]
    hidden_TD, added_TD, layer, pools = carry.hidden_TD, carry.added_TD, place.of_mixer, {**carry.pools, **carry.passed}
    begun, of_layer = None, LayerInputs(weights, inputs, layer, config)
    if mixer.begin is not None:
        begun = mixer.begin(own, (hidden_TD, added_TD), of_layer)
    if begun is None:
        hidden_TD, normed_TD = _add_and_norm(hidden_TD, added_TD, weights["norm_LD"], layer, config)
        out_TD, pools = mixer.apply(own, (normed_TD, pools), of_layer)
    else:
        hidden_TD, made = begun
        out_TD, pools = mixer.apply(own, (hidden_TD, pools), of_layer, made=made)
    added_TD = _addend(params, out_TD, "mixer", kind=kind, layer=place.layer, config=config)
    kept, passed = ({name: pools[name] for name in names} for names in (carry.pools, carry.passed))
    return LayerCarry(hidden_TD, added_TD, kept, carry.num_done, passed)


def _addend(
    params: Parameters, out_TD: jax.Array, part: str, *, kind: LayerSpec, layer: jax.Array, config: ModelConfig
) -> jax.Array:
    """Return the addend of the stream by the output of a layer's `mixer` or `ffn`: normed and scaled as configured."""
    if kind.post_norms:
        out_TD = norm_rows(out_TD, params["post_norms"][f"{part}_LD"][layer], config)
    return scaled(out_TD, config.spec.factors.residual_multiplier)


def scaled(hidden_TD: jax.Array, factor: float) -> jax.Array:
    """Multiply in float32; a factor of 1 is a no-op."""
    return hidden_TD if factor == 1.0 else (hidden_TD.astype(jnp.float32) * factor).astype(hidden_TD.dtype)


def _add_and_norm(
    hidden_TD: jax.Array, added_TD: jax.Array, scale_LD: jax.Array, layer: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the stream and its addend, and the norm of the sum."""
    with jax.named_scope("norm"):
        return config.kernels.add_norm(hidden_TD, added_TD, scale_LD, layer=layer, eps=config.spec.norm_eps)


def norm_rows(hidden_TD: jax.Array, scale_D: jax.Array, config: ModelConfig) -> jax.Array:
    """Return the RMS norm of rows."""
    with jax.named_scope("norm"):
        return config.kernels.norm(hidden_TD, scale_D, config.spec.norm_eps)
