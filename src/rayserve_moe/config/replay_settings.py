"""Settings for evidence in answers: routing and other decisions, hidden states, and audits."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.config.setting_fields import choice as _choice
from rayserve_moe.config.setting_fields import named as _named
from rayserve_moe.config.setting_fields import number as _number


@dataclass(frozen=True)
class ReplaySettings:
    """Routed experts and hidden states in answers."""

    enabled: bool = _named(False, "enable_return_routed_experts")
    """Compile routing capture into the steps and accept `return_routed_experts` on requests."""
    by_default: str = _choice("off", "nested", key="routed_experts_by_default")
    """Routing that `/v1/completions` and `/v1/chat/completions` return by default: `nested` is the lists of vLLM's
    server flag, `off` none."""
    shows_gates: bool = _named(False, "enable_return_router_gates")
    """Compile the capture of router gates into the steps and accept `return_router_gates`: 4 host bytes per gate."""
    shows_index: bool = _named(False, "enable_return_indexer_topk")
    """Compile the capture of index rows of sparse attention into the steps and accept `return_indexer_topk`."""
    index_store_mib: int = _number(4096, (1, 1 << 22))
    """Maximum MiB of host memory for packed index rows; rows dropped beyond it are reported missing."""
    shows_hidden: bool = _named(False, "enable_return_hidden_states")
    """Return hidden states from decode steps too: for `return_hidden_states` and `/v1/embeddings`. A token probe
    program is compiled for each step size."""
    audits: bool = _named(False, "enable_audit")
    """Accept `/audit`: steps with prompts also compute the routers' own choices beside forced ones, and sketches of
    the residual stream."""
    state_layers: tuple[int, ...] = _number((), (0, 4096), "hidden_state_layers")
    """Layers for `return_layer_states`, which returns their inputs at prompt positions; the number of layers selects
    the output of the last layer."""
