"""Records of functions that make up a kind of mixer and a kind of feed-forward network.

All are pure functions. `spec` is the ModelSpec and `own` the mixer's part of it; `layer` is the index among the layers
of the same kind.
"""

# T tokens   D model width

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from rayserve_moe.experts.layer import LayerRouting
from rayserve_moe.kernels.candidates import Choice
from rayserve_moe.kernels.operations import AttentionKernels
from rayserve_moe.model.model_config import ModelConfig, Pools, StepInputs
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.state.kinds import StateKind


class LayerInputs(NamedTuple):
    """Arguments of a mixer's layer besides its rows."""

    weights: dict[str, jax.Array]
    """Parameters, stacked over the layers of the kind."""
    step: StepInputs
    layer: jax.Array
    config: ModelConfig


@dataclass(frozen=True)
class Mixer:
    """Kind of mixer: the part of a layer that mixes the tokens of a sequence."""

    parameters: Callable[..., dict[str, ParamSpec]]
    """`(own, spec, *, dtype, tensor_size)`: parameters stacked over layers of the kind, without the preceding norm."""
    states: Callable[..., tuple[StateKind, ...]]
    """`(own, *, kernels, tensor_size)`: the states that a layer keeps per sequence."""
    attention: Callable[..., Choice[AttentionKernels]] | None
    """`(own, kernels, *, pool)`: the choice of attention for a pool; None if the mixer attends no keys."""
    prepare: Callable[..., Any]
    """`(own, batch, pools, *, config)`: values computed once per step for all layers, in `StepInputs.prepared`."""
    apply: Callable[..., tuple[jax.Array, Pools]]
    """`(own, (normed_TD, pools), inputs: LayerInputs)`: returns the addend of the stream [T, D] and the pools. If
    `begin` returned a result, it is passed as `made`, and only the shape of `normed_TD` matters."""
    begin: Callable[..., tuple[jax.Array, Any] | None] | None = None
    """`(own, (hidden_TD, added_TD), inputs)`: residual, norm and projections in a fused kernel; returns the stream and
    the argument `made` of `apply`. It may be absent, or return None."""
    passed: Callable[..., Pools] | None = None
    """`(own, batch, pools)`: arrays that layers pass on to later layers of a step, with their values before the first
    layer. `apply` finds and returns them among the pools. May be absent."""
    captured: str = ""
    """Name of a passed array that is an output of the step for each layer of the kind; empty if none."""
    needs_earlier_layers: bool = False
    """True if layers read arrays that layers of another kind have passed on."""
    adapted: tuple[str, ...] = ()
    """Names of the matrices that `apply` computes with adapters."""


class FfnRows(NamedTuple):
    """Rows that a feed-forward network reads."""

    hidden_TD: jax.Array
    """The residual stream."""
    normed_TD: jax.Array
    """The stream, normed."""


@dataclass(frozen=True)
class Ffn:
    """Kind of feed-forward network, which follows the mixer."""

    parameters: Callable[..., dict[str, dict[str, ParamSpec]]]
    """`(spec, *, dtype, expert_dtype, num_redundant)`: parameters by group, stacked over the layers of the kind."""
    apply: Callable[..., tuple[jax.Array, LayerRouting | None]]
    """`(params, rows, inputs, *, kind, layer, config)`: the addend of the stream [T, D], and the routing of a layer
    with experts. `kind` is the LayerSpec without its window."""
    divided_sizes: Callable[..., dict[str, int]]
    """`(spec)`: sizes that must be divisible by the tensor axis, by their keys in `config.json`."""
    adapted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the matrices that `apply` computes with adapters, by group."""
