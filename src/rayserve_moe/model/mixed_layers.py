"""A loop over layers of any kind: every kind of mixer and of feed-forward network is compiled once.

Two conditionals choose them for each layer. Only the mixer's passes on the pools.
"""

# T tokens   L layers of the run   M MoE layers of the run

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.experts.layer import LayerRouting
from rayserve_moe.model.decoder_layers import (
    LayerCarry,
    LayerPlace,
    PeriodOutputs,
    add_ffn,
    add_mixer,
    multiply_by_scalar,
    sketch_of,
)
from rayserve_moe.model.layer_runs import LayerRun, layer_runs
from rayserve_moe.model.model_config import Captures, ModelConfig, Parameters, StepInputs
from rayserve_moe.model.spec import NO_PART, LayerSpec, ModelSpec


class MixedSteps(NamedTuple):
    """Arrays [L] of the layers of a mixed run, int32."""

    mixer: jax.Array
    """Index among the kinds of mixer."""
    ffn: jax.Array
    """Index among the kinds of feed-forward network."""
    place: LayerPlace


class LayerParts(NamedTuple):
    """Kinds of mixer and of feed-forward network in a mixed run, each a layer of that part alone, and who has which."""

    mixers: tuple[LayerSpec, ...]
    ffns: tuple[LayerSpec, ...]
    mixer_L: tuple[int, ...]
    """Index of each layer's mixer."""
    ffn_L: tuple[int, ...]
    """Index of each layer's feed-forward network."""


def parts_of(kinds: Sequence[LayerSpec]) -> LayerParts:
    """Return the distinct parts of layers, in the order in which they first occur."""
    mixers = [replace(kind, ffn=NO_PART, expert_limit=0.0, mlp_limit=0.0) for kind in kinds]
    ffns = [replace(kind, mixer=NO_PART) for kind in kinds]
    of_mixer, of_ffn = dict.fromkeys(mixers), dict.fromkeys(ffns)
    indices = tuple([[*found].index(part) for part in parts] for found, parts in ((of_mixer, mixers), (of_ffn, ffns)))
    return LayerParts(tuple(of_mixer), tuple(of_ffn), *map(tuple, indices))


def branch_counts(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each branch of a mixed run's conditionals, in order; empty for a model without such a run.

    A part that all layers share has no conditional.
    """
    counts = []
    for run in layer_runs(spec):
        parts = parts_of(run.period)
        indices = (parts.mixer_L, parts.ffn_L) if run.is_mixed else ()
        counts += [tuple(of_L.count(index) for index in range(max(of_L) + 1)) for of_L in indices if max(of_L)]
    return tuple(counts)


def steps_of(run: LayerRun, parts: LayerParts) -> MixedSteps:
    """Return the parts and places of the layers of a mixed run."""
    kinds = run.period

    def numbers(names: Sequence[str], first_of: dict[str, int]) -> jax.Array:
        return jnp.asarray([first_of[own] + names[:index].count(own) for index, own in enumerate(names)], jnp.int32)

    mixers, ffns = [kind.mixer for kind in kinds], [kind.ffn for kind in kinds]
    num_before = sum(count for name, count in run.first_of_ffn.items() if name != NO_PART)
    with_ffn = np.cumsum([0, *(name != NO_PART for name in ffns[:-1])])
    place = LayerPlace(
        jnp.arange(run.first, run.first + len(kinds), dtype=jnp.int32),
        numbers(mixers, run.first_of_mixer),
        numbers(ffns, run.first_of_ffn),
        jnp.asarray(num_before + with_ffn, jnp.int32),
    )
    return MixedSteps(jnp.asarray(parts.mixer_L, jnp.int32), jnp.asarray(parts.ffn_L, jnp.int32), place)


def visit_mixed(
    params: Parameters,
    carry: LayerCarry,
    *,
    run: LayerRun,
    inputs: StepInputs,
    config: ModelConfig,
    captures: Captures,
) -> tuple[LayerCarry, PeriodOutputs]:
    """Compute all layers of a mixed run; return the carry, and outputs stacked over the layers that have them."""
    assert not carry.passed, "layers that pass arrays on are in no mixed run"
    parts = parts_of(run.period)
    mix = [partial(_mixed, params, kind=kind, inputs=inputs, config=config) for kind in parts.mixers]
    feed = [partial(_fed, params, kind=kind, inputs=inputs, config=config, captures=captures) for kind in parts.ffns]
    moe = next((branch for branch, kind in zip(feed, parts.ffns, strict=True) if kind.ffn == "moe"), None)

    def visit(carry: LayerCarry, step: MixedSteps) -> tuple[LayerCarry, tuple[LayerRouting | None, jax.Array | None]]:
        carry = jax.lax.switch(step.mixer, mix, carry, step.place)
        rows = carry._replace(pools={})
        branches = feed if moe is None else _alike(feed, moe, rows, step.place)
        rows, routing = jax.lax.switch(step.ffn, branches, rows, step.place)
        carry = rows._replace(pools=carry.pools)
        if config.spec.has_scalars:
            carry = multiply_by_scalar(params, carry, place=step.place)
        sketch_DP = inputs.sketch_DP
        sketch = None if sketch_DP is None else sketch_of(carry.hidden_TD + carry.added_TD, sketch_DP)
        return carry, (routing, sketch)

    carry, (routing, sketches) = jax.lax.scan(visit, carry, steps_of(run, parts))
    moe_layers = np.flatnonzero([kind.ffn == "moe" for kind in run.period])
    routings = () if routing is None else (jax.tree.map(lambda rows: rows[moe_layers], routing),)
    return carry, PeriodOutputs(routings, (), () if sketches is None else (sketches,))


def _mixed(
    params: Parameters,
    carry: LayerCarry,
    place: LayerPlace,
    *,
    kind: LayerSpec,
    inputs: StepInputs,
    config: ModelConfig,
) -> LayerCarry:
    """Compute the mixer of a layer, if it has one."""
    if kind.mixer == NO_PART:
        return carry
    return add_mixer(params, carry, kind, place=place, inputs=inputs, config=config)


def _fed(  # noqa: PLR0913 (the options of a call)
    params: Parameters,
    carry: LayerCarry,
    place: LayerPlace,
    *,
    kind: LayerSpec,
    inputs: StepInputs,
    config: ModelConfig,
    captures: Captures,
) -> tuple[LayerCarry, LayerRouting | None]:
    """Compute the feed-forward network of a layer, if it has one."""
    if kind.ffn == NO_PART:
        return carry, None
    carry, routing = add_ffn(params, carry, kind, place=place, inputs=inputs, config=config)
    if routing is None or captures.gates:
        return carry, routing
    return carry, routing._replace(gates_TK=None)


def _alike(
    branches: Sequence[Callable[..., Any]], moe: Callable[..., Any], rows: LayerCarry, place: LayerPlace
) -> list[Callable[..., Any]]:
    """Return branches with the routing of experts; those without experts return zeros for it."""
    _, expected = jax.eval_shape(moe, rows, place)

    def with_routing(rows: LayerCarry, place: LayerPlace, *, branch: Callable[..., Any]) -> Any:
        rows, routing = branch(rows, place)
        if routing is None:
            routing = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), expected)
        return rows, routing

    return [partial(with_routing, branch=branch) for branch in branches]
