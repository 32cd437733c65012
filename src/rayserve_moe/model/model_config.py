"""Compile-time configuration of a model, and the arrays that its layers share."""

# T tokens   X tokens in prefill blocks   M MoE layers   K experts per token

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from rayserve_moe.experts.balanced_layer import StepCapacity
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.adapters import AdapterPair, LayerAdapters, TokenAdapters
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.sharding import ParallelPlan

Parameters = dict[str, dict[str, jax.Array]]
"""Arrays by group and name, as in `model.parameters`."""
Pools = dict[str, tuple[jax.Array, ...]]
"""Arrays of each state kind by name. Tokens: [pages of all layers with the kind, page, *row]; entries and rings:
[entries or rows of all layers with the kind, ...]."""


@dataclass(frozen=True)
class ModelConfig:
    """Compile-time constants of a step: the model, its experts, kernels and mesh."""

    spec: ModelSpec
    experts: ExpertConfig
    table_tokens: int = 0
    """Positions of a page table, if that is known: states that such tables do not need are not kept."""
    state_dtypes: tuple[tuple[str, str], ...] = ()
    """Names of states, and their dtype in place of the KV cache's."""
    adapts_experts: bool = False
    """True if adapters beside the weights may change experts."""
    shares_outer: bool = False
    """True if the experts of a layer share A of gate and up, and B of down (`AdaptedMatrix.shared_part`)."""

    @property
    def kernels(self) -> Kernels:
        return self.experts.kernels

    @property
    def plan(self) -> ParallelPlan:
        return self.experts.plan


class Captures(NamedTuple):
    """Decisions that a step returns beside the routing."""

    index: bool = False
    """The choices of indexes of sparse attention."""
    gates: bool = False
    """The weights of the chosen experts."""


NO_CAPTURES = Captures()


class ForcedRouting(NamedTuple):
    """Experts of all MoE layers that replace the routers' choice for tokens in prefill blocks (`ForcedExperts`)."""

    ids_MXK: jax.Array
    """-1 for tokens left to the routers."""
    gates_MXK: jax.Array | None = None
    """Weights of these experts, float32, NaN for none; None if they cannot be forced."""


class ForcedChoices(NamedTuple):
    """Positions that some tokens see in place of those that indexes would choose."""

    tokens_F: jax.Array
    """Tokens, int32, counted over those in prefill blocks; entries that do not force a choice lie beyond them."""
    chosen_IFK: jax.Array
    """Positions that each sees, int32 by layer with an index, ascending with -1 behind."""


AdapterStacks = dict[str, dict[str, AdapterPair]]
"""Resident adapters by group and name of the parameters that they change, as in `model.adapters`."""


class StepAdapters(NamedTuple):
    """Resident adapters, and the adapter of each token of a step."""

    stacks: AdapterStacks
    tokens: TokenAdapters


class StepInputs(NamedTuple):
    """Arrays that all layers of a step share."""

    batch: TokenBatch
    valid_T: jax.Array
    """Bool [T]; False for padding."""
    prepared: dict[str, Any]
    """Result of `Mixer.prepare` by kind of mixer, computed once for all of its layers."""
    maps: PlacementArrays | None = None
    """Slots of the experts; None stands for expert i in slot i."""
    forced: ForcedRouting | None = None
    """Forced routing; None if it cannot be forced."""
    is_forced: jax.Array | None = None
    """Bool scalar: True if any of its entries is forced."""
    choices: ForcedChoices | None = None
    """Forced choices of an index, or None if they cannot be forced."""
    capacity: StepCapacity | None = None
    """Capacity of slots, or None without a limit."""
    sketch_DP: jax.Array | None = None
    """Projections of the residual stream, float32, if layers return evidence for audits."""
    adapters: StepAdapters | None = None
    """Adapters of tokens; None if no token of the step has one."""


def adapters_of(inputs: StepInputs, group: str, layer: jax.Array) -> LayerAdapters | None:
    """Return the adapters of a layer for a group of parameters; `layer` is its index within the group."""
    if inputs.adapters is None or group not in inputs.adapters.stacks:
        return None
    return LayerAdapters(inputs.adapters.stacks[group], layer, inputs.adapters.tokens)
