"""What a random model of any family is: its config as data, and how its weights are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayserve_moe.checkpoints.synthetic_tokenizer import SPECIAL_IDS


@dataclass(frozen=True)
class SyntheticModel:
    """A random model of any family.

    `config` is its `config.json`, but for the dtype and the ids of special tokens, which are added. Weights are
    drawn as those of `SyntheticConfig`; biases and sinks as other weights.
    """

    config: Mapping[str, Any]
    scale: float = 0.02
    norm_jitter: float = 0.0
    router_skew: float = 0.0

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    def hf_config(self, dtype: str) -> dict[str, Any]:
        """`config.json`."""
        return {**self.config, "dtype": dtype, "initializer_range": self.scale, "use_cache": True, **SPECIAL_IDS}
