"""The model being served, as the layers above the engine need to know it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rayserve_moe.processor_arguments import ProcessorArgument
from rayserve_moe.request_fields import LONGEST_CONSTRAINT, PROCESSED


@dataclass(frozen=True)
class RoutingLayout:
    """What a routing row of this model looks like: layers that route, experts, assignments per token."""

    num_hidden_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int

    @property
    def row_shape(self) -> tuple[int, int]:
        """Shape of one stored row: MoE layers only, by assignments."""
        return len(self.layer_ids), self.top_k

    @property
    def dtype(self) -> np.dtype:
        """uint8 up to 256 experts, uint16 above."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@dataclass(frozen=True)
class ModelCard:
    """What the layers above the engine need to know of the model being served."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    routing: RoutingLayout
    returns_routing: bool
    weight_version: str = "0"
    path: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    takes_forced_routing: bool = True
    logprobs_mode: str = PROCESSED
    longest_constraint: int = LONGEST_CONSTRAINT
    """Bytes that a schema, an expression or a grammar of a request may have."""
    routing_by_default: str = "off"
    """Form in which OpenAI's routes return routing where a request says nothing of it; `off` for none."""
    hidden_size: int = 0
    """Numbers of a hidden state; 0 where such do not leave the devices."""
    processors: tuple[tuple[ProcessorArgument, ...], ...] = ()
    """Arguments of each logit processor."""
