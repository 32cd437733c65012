"""The state, inputs and outputs of a compiled step: pytrees of arrays."""

# R rows of a data rank   P page-table width   F, I sampling parameters   S sampled rows   J likeliest tokens
# M MoE layers   K experts per token   N data ranks   T tokens of a data rank   X those of them in prefill blocks

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from rayserve_moe.decoding.adjustment import AdjustmentState
from rayserve_moe.decoding.logit_processors import LogitProcessor
from rayserve_moe.experts.migration import SlotArrays
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.kv_pool import LayerPages
from rayserve_moe.model.draft_layer import DraftConfig
from rayserve_moe.model.model_config import ModelConfig, Parameters, Pools


@dataclass(frozen=True)
class StepShape:
    """One compiled shape: single tokens (decode), then prefill blocks of `block_tokens` tokens each, per data rank."""

    num_singles: int
    num_blocks: int
    block_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_singles + self.num_blocks * self.block_tokens


@dataclass(frozen=True)
class StepConfig:
    """All that is fixed when a step is compiled, besides its shape; `layer_pages` as in `TokenBatch`.

    `max_drafts` is that of any `StepPlan`. Where samples may be `held`, logits leave the step, and a step without a
    sample leaves out sampling. Hidden states leave it where it `shows_hidden`. `processors` change logits of held
    samples.
    """

    model: ModelConfig
    page_size: int
    capture_routing: bool
    layer_pages: tuple[LayerPages, ...] = ()
    max_drafts: int = 0
    holds_samples: bool = False
    draft: DraftConfig | None = None
    shows_hidden: bool = False
    processors: tuple[LogitProcessor, ...] = ()
    num_columns: int = 0
    """Values of states that a row has behind its page tables."""

    @property
    def most_together(self) -> int:
        """Single tokens of one sequence in a step at most, where kernels are to know (`TokenBatch`)."""
        return 1 + self.max_drafts if self.model.kernels.attention.has_packed_rows else 1

    @property
    def asked_layers(self) -> tuple[int, ...]:
        """Layers whose input the draft model reads."""
        return self.draft.draft.aux_layers if self.draft else ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelWeights:
    """What a step reads and leaves as it is: the parameters, and where experts lie (None: expert i in slot i).

    `capacity_factor` is a float32 where the capacity of slots is limited. `draft` are those of a draft model.
    """

    params: Parameters
    maps: PlacementArrays | None
    capacity_factor: jax.Array | None = None
    draft: Parameters | None = None


class DraftState(NamedTuple):
    """State of a draft model between steps."""

    pools: Pools
    """Pools of one layer each."""
    features_RD: jax.Array
    """Feature of each row at its last accepted token, float."""
    positions_R: jax.Array
    """Position of that token, int32."""
    drafts_RK: jax.Array
    """Latest chain of drafts of each row, int32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertState:
    """What a migration moves: the arrays of all expert slots [layers, slots, ...], and the maps that go with them."""

    weights: SlotArrays
    maps: PlacementArrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState(AdjustmentState):
    """What a device keeps from step to step; donated on the way in, returned on the way out.

    `pools` are those of the model's state kinds (`model.states`); `expert_counts_ME` int32 counts tokens
    since it was reset. The rest is remembered of rows, so that only changes travel: page ids int32; sampling parameters
    float32 and uint32 in the columns of `RowSampling`; the token sampled last, int32. Each data rank has its own, but
    for what adjusts logits: outside the sharded step, leading dimensions are those of all ranks together.
    """

    pools: Pools
    expert_counts_ME: jax.Array
    page_table_RP: jax.Array
    sampling_floats_RF: jax.Array
    sampling_integers_RI: jax.Array
    last_tokens_R: jax.Array
    draft: DraftState | None = None


class BlockInputs(NamedTuple):
    """Forced routing of tokens in prefill blocks, of all data ranks."""

    forced_NMXK: jax.Array
    """Experts that tokens take, int16, or -1."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What leaves the device, of all data ranks and the same on every device."""

    sampled_N3S: jax.Array
    """int32: token ids, the bits of their float32 log-probs, and their ranks (0 for logits that are not finite)."""
    columns: dict[str, Any] = field(default_factory=dict)
    """What else is reported of the samples: `top` int32 [N, 2, S, J] has ids and the bits of log-probs; the columns of
    `with_evidence`, and `mask`, what `sampling_mask` returns, once deferred samples are drawn."""
    topk_ids_MTK: jax.Array | None = None
    """Routing in the store's dtype, the ranks' tokens one after the other; None if the server does not capture it."""
    expert_counts_ME: jax.Array | None = None
    """Of all data ranks, after steps that want it."""
    tally_N4: jax.Array | None = None
    """int32: the tally of assignments if slots have limited capacity (`LimitedAssignments`)."""
    logits_AV: jax.Array | None = None
    """float32, of each device its share of the vocabulary, for samples that are deferred."""
    drafts_NSK: jax.Array | None = None
    """int32: drafts of each row that has sampled, after steps that want them (`draft_rows`)."""
    hidden_TD: jax.Array | None = None
    """Those of `ForwardOutput`, of each data rank its own, for tokens that are probed."""
    probed: tuple[dict[str, jax.Array], ...] | None = None
    """Columns of every run of the probe (`probe_tokens`)."""
