"""State, inputs and outputs of a compiled step: pytrees of arrays."""

# R rows of a data rank   P page-table width   F, I sampling parameters   S sampled rows   J likeliest tokens
# M MoE layers   K experts per token   N data ranks   T tokens of a data rank   X tokens in prefill blocks

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from rayserve_moe.decoding.adjustment import AdjustmentState
from rayserve_moe.decoding.logit_processors import LogitProcessor
from rayserve_moe.experts.migration import SlotArrays
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.kv_pool import StatePages
from rayserve_moe.model.draft_layer import DraftConfig
from rayserve_moe.model.model_config import NO_CAPTURES, Captures, ForcedChoices, ModelConfig, Parameters, Pools
from rayserve_moe.model.transformer import AuditOutput


@dataclass(frozen=True)
class StepShape:
    """A compiled shape per data rank: single tokens (decode), then prefill blocks of `block_tokens` tokens each."""

    num_singles: int
    num_blocks: int
    block_tokens: int
    num_adapters: int = 0
    """Adapters of a step; 0: no token has one."""
    drafts_rest: bool = False
    """True if no drafts follow the step. It then stores only keys and values of a draft model."""

    @property
    def num_tokens(self) -> int:
        return self.num_singles + self.num_blocks * self.block_tokens


@dataclass(frozen=True)
class StepConfig:
    """Compile-time parameters of a step besides its shape."""

    model: ModelConfig
    page_size: int
    capture_routing: bool
    captures: Captures = NO_CAPTURES
    """Decisions to return beside the routing."""
    layer_pages: tuple[StatePages, ...] = ()
    """As in `TokenBatch`."""
    max_drafts: int = 0
    """Maximum number of drafts of any `StepPlan`."""
    holds_samples: bool = False
    """True if samples may be deferred: the step then returns logits, and skips sampling if it has no samples."""
    draft: DraftConfig | None = None
    shows_hidden: bool = False
    """True if every step returns hidden states."""
    processors: tuple[LogitProcessor, ...] = ()
    """Logit processors for deferred samples."""
    num_columns: int = 0
    """State values of a row after its page tables."""
    audits: bool = False
    """True if steps with prefill blocks return evidence for audits."""
    state_layers: tuple[int, ...] = ()
    """Layers for layer states; steps with prefill blocks return their inputs."""

    @property
    def max_together(self) -> int:
        """Return the maximum number of single tokens of a sequence in a step (`TokenBatch`); 1 if kernels ignore it."""
        return 1 + self.max_drafts if self.model.kernels.attention.has_packed_rows else 1

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Return the layers whose input the draft model reads."""
        return self.draft.draft.aux_layers if self.draft else ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelWeights:
    """Weights that a step reads."""

    params: Parameters
    maps: PlacementArrays | None
    """Placement of experts; None if expert i is in slot i."""
    capacity_factor: jax.Array | None = None
    """float32, if the capacity of slots is limited."""
    draft: Parameters | None = None
    """Parameters of a draft model."""


class DraftState(NamedTuple):
    """State of a draft model between steps."""

    pools: Pools
    """Pools of the draft model's single layer."""
    features_RD: jax.Array
    """Feature of each row at its last accepted token, float."""
    positions_R: jax.Array
    """Position of that token, int32."""
    drafts_RK: jax.Array
    """Latest chain of drafts of each row, int32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertState:
    """Arrays that a migration changes."""

    weights: SlotArrays
    """Arrays of all expert slots, [layers, slots, ...]."""
    maps: PlacementArrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState(AdjustmentState):
    """State of a device between steps; donated to a step and returned by it.

    Rows keep their parameters here, so that plans only send changes. Each data rank has its own rows, except for logit
    adjustments. Outside the sharded step, leading dimensions cover all ranks.
    """

    pools: Pools
    """Pools of the model's state kinds (`model.states`)."""
    expert_counts_ME: jax.Array
    """Tokens since the last reset, int32."""
    page_table_RP: jax.Array
    """Page ids, int32."""
    sampling_floats_RF: jax.Array
    """Columns of `RowFloats`, float32."""
    sampling_integers_RI: jax.Array
    """Columns of `RowIntegers`, uint32."""
    last_tokens_R: jax.Array
    """Last sampled token, int32."""
    draft: DraftState | None = None


class BlockInputs(NamedTuple):
    """Forced routing, its weights, and forced choices of an index, of tokens in prefill blocks, of all data ranks."""

    forced_NMXK: jax.Array
    """Forced experts of tokens, int16; -1 for none."""
    gates_NMXK: jax.Array | None = None
    """Weights of these experts, float32; NaN for none. None if they cannot be forced."""
    choices: ForcedChoices | None = None
    """Forced choices of an index, by data rank; None if they cannot be forced."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """Outputs of a step for all data ranks, the same on every device."""

    sampled_N3S: jax.Array
    """int32: token ids, the bits of their float32 log-probs, and their ranks (0 for logits that are not finite)."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Other columns of samples.

    `top` int32 [N, 2, S, J] has ids and the bits of log-probs. Deferred samples add the columns of `with_evidence`, and
    `mask`, the result of `sampling_mask`.
    """
    topk_ids_MTK: jax.Array | None = None
    """Routing in the store's dtype, the ranks' tokens concatenated; None if the server does not capture it."""
    chosen_ITK: jax.Array | None = None
    """Positions that each token sees, int32, by layer with an index, as the routing; None if they are not captured."""
    gates_MTK: jax.Array | None = None
    """Weights of the chosen experts, float32, as the routing; None if they are not captured."""
    expert_counts_ME: jax.Array | None = None
    """Expert counts of all data ranks, after steps that want them."""
    tally_N4: jax.Array | None = None
    """int32: the tally of assignments if slots have limited capacity (`LimitedAssignments`)."""
    logits_AV: jax.Array | None = None
    """float32, each device's shard of the vocabulary, for deferred samples."""
    drafts_NSK: jax.Array | None = None
    """int32: drafts of each row that has sampled, after steps that want them (`draft_rows`)."""
    hidden_TD: jax.Array | None = None
    """As in `ForwardOutput`, for tokens that are probed; each data rank has its own."""
    probed: tuple[dict[str, jax.Array], ...] | None = None
    """Columns of every run of the probe (`probe_tokens`)."""
    audit: AuditOutput | None = None
    """Evidence of an audit, the ranks' tokens concatenated; None if the step returns none."""
    layer_states_LTD: jax.Array | None = None
    """Inputs of `StepConfig.state_layers`, likewise."""
